"""`blockpilot train-policy`: from a sweep to a policy, with what it learned next to what needs no learning."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from .calibration import measure_costs
from .cli_common import Drafter, Dtype, Target, check_names, load_pilot, load_target, package_version
from .cli_console import Screen, progress_bar
from .costs import CostTable
from .drafter_checkpoint import written_whole
from .drafter_record import package_versions, write_training_prompts
from .evaluation import evaluate, overlapping
from .evaluation_display import Table, told
from .evaluation_rules import Comparison
from .json_lines import write_json
from .policy_training import (
    PolicyTrainingConfig,
    best_epoch,
    curve_accuracy,
    split_rows,
    train_policy,
    window,
    with_steps,
)
from .sweep import Sweep, SweepRow, read_sweep
from .target_states import weights_fingerprint
from .texts import prompt_numbers

_DEFAULTS = PolicyTrainingConfig()
_BLOCK_SIZES = "1,2,3,4,6,8"
# What two sweeps must share to be spoken of together.
_PAIR = ("target_fingerprint", "drafter_fingerprint", "training_block_size")

SweepFolder = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="Folder that `blockpilot sweep` wrote.", metavar="SWEEP")
]
Resamples = Annotated[int, typer.Option(min=1, help="Resamples behind the intervals.")]


def train_policy_command(
    sweep: SweepFolder,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the policy, the record and the costs.")],
    head: Annotated[
        str,
        typer.Option(
            help="'choice' names the best size under one rule. 'curve' predicts the acceptance length at every size, "
            "and any cost table makes a choice of that: trained once, for every device."
        ),
    ] = _DEFAULTS.head,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Of head 'choice': what makes a size the best one. 'seconds': most tokens per second under the cost "
            "table; 'tau': the largest acceptance length in a window around the size that the drafter was trained for, "
            "as in the paper.",
            show_default=_DEFAULTS.rule,
        ),
    ] = None,
    block_sizes: Annotated[
        str | None,
        typer.Option(
            help="Candidates of rule 'seconds' and of head 'curve', comma-separated.",
            show_default=f"{_BLOCK_SIZES}; for a curve all of the sweep",
        ),
    ] = None,
    window_sizes: Annotated[
        str | None,
        typer.Option(
            "--window", help="Candidates of rule 'tau', comma-separated.", show_default="two around the training size"
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Cost table.",
            show_default="costs.json in the output, measured if it is not there, but for rule 'tau'",
        ),
    ] = None,
    test: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Another sweep, to judge the policy on.")
    ] = None,
    validation: Annotated[
        float, typer.Option(min=0.05, max=0.5, help="Share of the prompts that decide when training stops.")
    ] = 0.2,
    features: Annotated[
        str,
        typer.Option(
            help="'compact', 'compact+context': also what the drafter reads of the prompt's end, or 'logits': the "
            "whole vocabulary, as in the paper; needs a sweep with --keep-logits."
        ),
    ] = _DEFAULTS.features,
    objective: Annotated[
        str,
        typer.Option(
            help="Of head 'choice'. 'label': name the best size, as in the paper; 'speed': expected worth of the "
            "choice."
        ),
    ] = _DEFAULTS.objective,
    class_weights: Annotated[
        bool, typer.Option("--class-weights", help="Let a label weigh as much as it is rare.")
    ] = False,
    hidden_size: Annotated[int, typer.Option(min=1, help="Width of the head; the paper's 2048.")] = (
        _DEFAULTS.hidden_size
    ),
    dropout: Annotated[float, typer.Option(min=0.0, max=0.9, help="After each hidden layer.")] = _DEFAULTS.dropout,
    input_dropout: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.9, help="Of the inputs.", show_default="0.5 for a curve with context, else 0"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="At most.")] = _DEFAULTS.epochs,
    patience: Annotated[
        int, typer.Option(min=1, help="Epochs without a better validation before training stops.")
    ] = _DEFAULTS.patience,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = _DEFAULTS.learning_rate,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Of AdamW.")] = _DEFAULTS.weight_decay,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per step.")] = _DEFAULTS.batch_size,
    seed: Annotated[int, typer.Option(help="Of start and order.")] = _DEFAULTS.seed,
    seeds: Annotated[
        int, typer.Option(min=1, help="Train with that many seeds and keep the one with the best validation.")
    ] = 1,
    bootstrap: Resamples = 10_000,
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "auto",
) -> None:
    """Train a policy that picks the block size of a prompt. Target and drafter are loaded only to measure costs."""
    if head == "curve" and rule is not None:
        raise ValueError(
            f"`--rule` goes with head 'choice', got {rule!r}. A curve is trained without one: leave it out, and "
            "give the table to judge its choices by with `--costs`."
        )
    config = PolicyTrainingConfig(
        head=head,
        rule=rule or _DEFAULTS.rule,
        features=features,
        objective=objective,
        class_weights=class_weights,
        hidden_size=hidden_size,
        dropout=dropout,
        input_dropout=input_dropout,
        epochs=epochs,
        patience=patience,
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        seed=seed,
    )
    swept = read_sweep(sweep)
    sizes = _candidates(config, block_sizes, window_sizes, swept)
    trained_for, rows = swept.settings["training_block_size"], with_steps(swept.rows)
    train, held_out = split_rows(rows, validation)
    tested = _read_test(test, swept, sweep) if test else None
    screen = Screen()
    needs_table = config.head == "curve" or config.rule == "seconds"
    table = _cost_table(costs, output / "costs.json", swept, sizes, needs_table, (target, drafter, dtype))

    runs = []
    for one in progress_bar(range(seed, seed + seeds), "seeds"):
        runs.append((one, *train_policy(train, held_out, sizes, replace(config, seed=one), table)))
    chosen, policy, log = max(runs, key=lambda run: best_epoch(run[2])["validation"])
    config = replace(config, seed=chosen)
    is_curve = config.head == "curve"
    unit = "r2 of log tau" if is_curve else "tau" if config.rule == "tau" else "times plain"
    _say_how_it_went(screen, runs, chosen, unit, len(set(prompt_numbers(train))), len(set(prompt_numbers(held_out))))

    _describe(policy.config, swept.settings)
    with written_whole(output / "policy") as beside:
        policy.save_pretrained(beside)
        write_training_prompts(beside, [row.prompt_hash for row in swept.rows])

    def judge(on: Sequence[SweepRow]) -> list[dict[str, Any]]:
        return evaluate(
            on,
            train,
            [Comparison(tuple(sizes), {output.absolute().name: policy})],
            block_sizes=sorted({*sizes, trained_for}),
            training_block_size=trained_for,
            costs=table,
            num_resamples=bootstrap,
            seed=seed,
            progress=progress_bar,
        )

    results = {"validation": judge(held_out), **({"test": judge(with_steps(tested.rows))} if tested else {})}
    sides = {"train": train, "validation": held_out, **({"test": with_steps(tested.rows)} if tested else {})}
    accuracy = {name: curve_accuracy(policy, sides[name], train) for name in results} if is_curve else {}
    write_json(
        output / "training.json",
        {
            "run_info": run_info(),
            "meta_info": {
                "versions": package_versions(),
                "policy_fingerprint": weights_fingerprint(policy),
                "sweep": swept.settings,
                **({"test_sweep": tested.settings} if tested else {}),
            },
            "settings": {**asdict(config), "block_sizes": sizes, "validation_share": validation, "num_seeds": seeds},
            "costs": table.to_dict() if table else None,
            "num_prompts": {name: len(set(prompt_numbers(side))) for name, side in sides.items()},
            "num_texts": {name: len(side) for name, side in sides.items()},
            "num_texts_without_steps": len(swept.rows) - len(rows),
            "seeds": [{"seed": one, "num_epochs": len(its), **best_epoch(its)} for one, _, its in runs],
            "log": log,
            **({"curve_accuracy": accuracy} if is_curve else {}),
            "results": results,
        },
    )
    titles = {"validation": "on the prompts that decided when training stopped", "test": f"on {test}"}
    for name, result in results.items():
        screen.line()
        screen.line(f"{name}: {titles[name]}", style="bold")
        if is_curve:
            screen.line()
            _show_accuracy(screen, accuracy[name])
        show(screen, result)
    screen.line()
    screen.line(f"policy: {output / 'policy'}, record: {output / 'training.json'}")


def show(screen: Screen, results: list[dict[str, Any]]) -> None:
    """An evaluation's tables and lines."""
    for part in told(results):
        screen.line()
        if isinstance(part, Table):
            screen.table(part.title, part.header, part.rows)
        else:
            screen.line(part)


def _show_accuracy(screen: Screen, accuracy: Sequence[dict[str, float]]) -> None:
    """By block size, next to the mean of the training texts."""
    header = ("size", "tau", "predicted", "error", "of the mean", "r2")
    rows = [
        (
            str(entry["block_size"]),
            f"{entry['mean']:.2f}",
            f"{entry['mean_predicted']:.2f}",
            f"{entry['mean_absolute_error']:.3f}",
            f"{entry['mean_absolute_error_of_the_mean']:.3f}",
            f"{entry['r2']:.2f}",
        )
        for entry in accuracy
    ]
    screen.table("acceptance length by block size: means, and mean absolute errors", header, rows)
    screen.line("of the mean: error of predicting the mean of the training texts; r2: what of its square is taken away")


def run_info() -> dict[str, str]:
    """Of this call, for a record."""
    return {
        "command": shlex.join(["blockpilot", *sys.argv[1:]]),
        "finished_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def check_same_pair(sweep: Sweep, other: Sweep, path: Path) -> None:
    """
    Raises:
        `ValueError`: if two sweeps are of different targets or drafters, which nothing can be told of together.
    """
    for name in _PAIR:
        ours, theirs = sweep.settings.get(name), other.settings.get(name)
        if ours != theirs:
            raise ValueError(
                f"{path} is a sweep of another pair: `{name}` is {theirs!r} there and {ours!r} in the other. Sweep "
                "both with one target and one drafter."
            )


def parse_sizes(option: str, text: str) -> list[int]:
    """
    Raises:
        `ValueError`: for what is no list of two block sizes or more.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"`{option}` takes integers >= 1, separated by commas, got {text!r}.")
    sizes = sorted({int(part) for part in parts})
    if len(sizes) < 2:
        raise ValueError(f"`{option}` needs at least two sizes to choose from, got {text!r}.")
    return sizes


def _candidates(
    config: PolicyTrainingConfig, block_sizes: str | None, window_sizes: str | None, sweep: Sweep
) -> list[int]:
    if config.head == "curve":
        if window_sizes is not None:
            raise ValueError(
                "`--window` goes with head 'choice' and rule 'tau'. A curve takes its candidates by `--block-sizes`."
            )
        given = sweep.block_sizes if block_sizes is None else parse_sizes("--block-sizes", block_sizes)
        sizes = sorted({1, *given})
    elif config.rule == "tau":
        if block_sizes is not None:
            raise ValueError("`--block-sizes` goes with rule 'seconds'. Rule 'tau' takes its candidates by `--window`.")
        trained_for = sweep.settings["training_block_size"]
        sizes = window(trained_for) if window_sizes is None else parse_sizes("--window", window_sizes)
        missing = sorted(set(sizes) - set(sweep.block_sizes))
        if window_sizes is None and missing and trained_for in sweep.block_sizes:
            left = [size for size in sizes if size in sweep.block_sizes]
            narrower = f"name candidates that it has, such as `--window {','.join(map(str, left))}`, or "
            raise ValueError(
                f"The default `--window` of rule 'tau' is {sizes[0]} to {sizes[-1]}, two around the training size "
                f"{trained_for}, and the sweep lacks {', '.join(map(str, missing))}; it has {list(sweep.block_sizes)}. "
                f"{'' if len(left) < 2 else narrower}sweep with `--block-sizes "
                f"{min(sizes[0], *sweep.block_sizes)}-{max(sizes[-1], *sweep.block_sizes)}`."
            )
    else:
        if window_sizes is not None:
            raise ValueError("`--window` goes with rule 'tau'. Rule 'seconds' takes its candidates by `--block-sizes`.")
        sizes = parse_sizes("--block-sizes", block_sizes or _BLOCK_SIZES)
    if missing := sorted({*sizes, sweep.settings["training_block_size"]} - set(sweep.block_sizes)):
        raise ValueError(
            f"The sweep has no block sizes {missing}, only {list(sweep.block_sizes)}. Leave them out, or sweep with "
            "them; the size that the drafter was trained for is always needed."
        )
    return sizes


def _read_test(path: Path, swept: Sweep, sweep_path: Path) -> Sweep:
    tested = read_sweep(path)
    check_same_pair(swept, tested, path)
    if missing := sorted(set(swept.block_sizes) - set(tested.block_sizes)):
        raise ValueError(f"{path} has no block sizes {missing}. Sweep with those of {sweep_path}.")
    shared = overlapping(tested.rows, {row.prompt_hash[:16] for row in swept.rows})
    if shared:
        raise ValueError(
            f"{len(set(prompt_numbers(shared)))} prompts of {path} are also in {sweep_path}, the first is "
            f"{shared[0].id!r}. Take them out of one of the two."
        )
    return tested


def _cost_table(
    given: Path | None,
    kept: Path,
    sweep: Sweep,
    sizes: list[int],
    is_needed: bool,
    pair: tuple[str | None, str | None, str],
) -> CostTable | None:
    """The one that is given, the one in the output, or a new one, which prices all sizes of the sweep."""
    path = given or (kept if kept.is_file() else None)
    if path is None and not is_needed:
        return None
    table = CostTable.load(path) if path else _measure(sweep, *pair)
    if missing := sorted({*sizes, sweep.settings["training_block_size"]} - set(table.block_sizes)):
        raise ValueError(
            f"The cost table {path} has no seconds for block sizes {missing}. Name another, or leave it out and remove "
            f"{kept} to measure one."
        )
    if path != kept:
        table.save(kept)
    return table


def _measure(sweep: Sweep, target: str | None, drafter: str | None, dtype: str) -> CostTable:
    check_names(target, drafter, None, dtype)
    model, _ = load_target(target, dtype)
    pilot = load_pilot(drafter, "none", model)
    for name, loaded in (("target", model), ("drafter", pilot.drafter)):
        found, expected = weights_fingerprint(loaded), sweep.settings[f"{name}_fingerprint"]
        if found != expected:
            raise ValueError(
                f"The sweep is of another {name} ({sweep.settings[name]}, weights {expected}) than the one to measure "
                f"costs with ({found}). Name it with `--{name}`, or give a table with `--costs`."
            )
    return measure_costs(model, pilot.drafter, list(sweep.block_sizes), progress=progress_bar)


def _say_how_it_went(
    screen: Screen, runs: Sequence[tuple[int, Any, Any]], chosen: int, unit: str, num_train: int, num_held_out: int
) -> None:
    screen.line(f"trained on {num_train} prompts, stopped by {num_held_out} others")
    for seed, _, log in runs:
        best = best_epoch(log)
        screen.line(
            f"seed {seed}: best epoch {best['epoch']} of {len(log)}, {unit} {best['train']:.3f} in training, "
            f"{best['validation']:.3f} in validation{' (kept)' if seed == chosen and len(runs) > 1 else ''}"
        )


def _describe(config: Any, settings: dict[str, Any]) -> None:
    """What the policy was made for."""
    if len(settings["temperatures"]) == 1:
        config.sampling = {"temperature": float(settings["temperatures"][0])}
    config.target_name_or_path, config.target_fingerprint = settings["target"], settings["target_fingerprint"]
    config.drafter_name_or_path = os.path.basename(str(settings["drafter"]).rstrip("/")) or None
    config.drafter_fingerprint, config.blockpilot_version = settings["drafter_fingerprint"], package_version()


__all__ = [
    "Resamples",
    "SweepFolder",
    "check_same_pair",
    "parse_sizes",
    "run_info",
    "show",
    "train_policy_command",
]

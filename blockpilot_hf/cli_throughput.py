"""`blockpilot evaluate --objective throughput`: every way to decide by tokens per second, simulated and timed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from .cli_common import EMBEDDED, load_pilot, load_target, machine_facts, sampling_settings
from .cli_console import Screen, progress_bar
from .cli_policy import run_info
from .costs import CostTable, costs_key
from .default_costs import costs_for
from .drafter_record import package_versions
from .evaluation_display import Table, policy_label
from .evaluation_rules import facts_of
from .json_lines import read_lines, write_json
from .modeling_blockpilot import BlockPilotPolicy
from .policy_training import with_steps
from .prompts import Prompt, encode_prompt, read_prompts
from .sweep import Sweep, SweepRow
from .target_states import weights_fingerprint
from .texts import Text
from .throughput import (
    BEST_CONSTANT,
    FLIGHT,
    LOOKUP_FLIGHT,
    PLAIN,
    TRAINING_SIZE,
    Setup,
    best_constant,
    judge,
    simulate,
)
from .throughput_display import told_throughput
from .throughput_timing import TimedPrompt, judge_timing, time_rounds

RECORD = "throughput.json"
OBJECTIVES = ("tau", "throughput")
# Fixed sizes that are told without being asked for: what published drafters are mostly used at.
_USUAL_FIXED = (16,)

Objective = Annotated[
    str,
    typer.Option(
        help="tau: acceptance lengths and speeds of sizes that are chosen once per prompt. throughput: tokens per "
        "second of every way to decide, in flight too, under one cost table or several; needs a sweep with "
        "--all-positions.",
        metavar="|".join(OBJECTIVES),
    ),
]
Fixed = Annotated[
    list[int] | None,
    typer.Option(
        min=2, help="Throughput: a further fixed block size. May be given several times.", show_default="16 if swept"
    ),
]
TimedPrompts = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="Throughput: prompts to really time all rules on, next to plain generate."
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="Timed rounds for every prompt; medians count.")]
TimedOutput = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        help="JSON lines of the timed rounds, added as they end; the same command goes on.",
        show_default="timed-DTYPE.jsonl in the output",
    ),
]


@dataclass(frozen=True)
class Timing:
    """What to time, and how."""

    prompts: Path
    output: Path
    target: str | None
    drafter: str | None
    dtype: str
    pack: bool
    limit: int | None
    max_new_tokens: int
    temperature: float
    repeats: int
    seed: int


@dataclass(frozen=True)
class Question:
    """
    What is asked, checked: sweeps of one pair, held-out rows, notes on what does not fit.

    Args:
        known (`Mapping[str, frozenset[str]]`): By whom, the first 16 hex digits of prompts that were trained on.
    """

    swept: Sweep
    trained: Sweep
    rows: list[SweepRow]
    policies: Mapping[str, BlockPilotPolicy]
    described: Mapping[str, Any]
    groups: dict[str, list[str]]
    overlap: dict[str, Any]
    notes: list[str]
    known: Mapping[str, frozenset[str]]
    drop_overlap: bool
    num_resamples: int
    seed: int


def check_objective(
    objective: str,
    costs: Sequence[Path],
    fixed: Sequence[int] | None,
    timed: Path | None,
    output: Path | None,
    timed_output: Path | None,
) -> None:
    """
    Raises:
        `ValueError`: for an objective that is none, and for options that go with the other one.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"`--objective` must be one of {', '.join(OBJECTIVES)}, got {objective!r}.")
    if objective == "tau":
        given = {"--fixed": fixed, "--timed": timed, "--timed-output": timed_output}
        if wrong := [name for name, value in given.items() if value]:
            raise ValueError(f"`{wrong[0]}` goes with `--objective throughput`. Add that, or leave it out.")
        if len(costs) > 1:
            raise ValueError(
                f"Objective 'tau' takes one cost table, got {len(costs)}. Name one, or add `--objective throughput`."
            )
        return
    if not costs:
        raise ValueError(
            "`--objective throughput` needs a cost table. Name one or several with `--costs`; `blockpilot calibrate "
            "--output FILE` writes one."
        )
    if timed_output is not None and timed is None:
        raise ValueError("`--timed-output` goes with `--timed PROMPTS`. Name the prompts, or leave it out.")
    if timed is not None and timed_output is None and output is None:
        raise ValueError("Timed rounds are kept in a file. Name it with `--timed-output`, or a folder with `--output`.")


def load_tables(paths: Sequence[Path]) -> dict[str, CostTable]:
    """
    Cost tables by the shortest names that tell them apart: of the file, or of its folder where it is `costs.json`.

    Raises:
        `ValueError`: for one that is given twice, and for a file that is none.
    """
    places = []
    for path in paths:
        parts = path.absolute().with_suffix("").parts[1:]
        places.append(parts[:-1] if parts[-1] == "costs" and len(parts) > 1 else parts)
    if len(set(places)) < len(places):
        raise ValueError(f"A `--costs` is given twice: {', '.join(map(str, paths))}. Name each once.")
    tables = {}
    for path, place in zip(paths, places, strict=True):
        ends = (place[-length:] for length in range(1, len(place) + 1))
        own = next((end for end in ends if sum(other[-len(end) :] == end for other in places) == 1), place)
        tables["/".join(own)] = CostTable.load(path)
    return tables


def make_setup(
    question: Question, tables: Mapping[str, CostTable], fixed: Sequence[int] | None
) -> tuple[Setup, list[str]]:
    """
    The sizes and rules that sweep and tables allow, with notes on what is left out.

    Raises:
        `ValueError`: if a size that is asked for, or cannot be left out, was not swept or has no price; if the sweep
            has no positions.
    """
    swept, trained_for = question.swept, question.swept.settings["training_block_size"]
    if any(row.confidence_at is None for row in question.rows):
        raise ValueError(
            "`--objective throughput` flies over every position of a text, and the sweep kept none. Sweep again with "
            "`--all-positions` or `--position-sizes`; the training sweep needs no positions."
        )
    kept = set(question.rows[0].accepted_at or ()) if question.rows else set()
    priced = {name: set(table.block_sizes) for name, table in tables.items()}

    def check(sizes: Sequence[int], whose: str) -> None:
        if missing := sorted({*sizes} - {1, *swept.block_sizes}):
            raise ValueError(
                f"{whose} needs block sizes {missing}, and the sweep has {list(swept.block_sizes)}. Sweep with them."
            )
        for name, known in priced.items():
            if missing := sorted({*sizes} - known):
                raise ValueError(
                    f"{whose} needs block sizes {missing}, which the cost table {name} has no seconds for. Measure "
                    "them with `blockpilot calibrate`."
                )

    check([trained_for], "The rule of the drafter's training size")
    for name, policy in question.policies.items():
        check(policy.config.block_sizes, policy_label(name).capitalize())
    if fixed:
        check(fixed, "`--fixed`")
    everywhere = [size for size in swept.block_sizes if all(size in known for known in priced.values())]
    notes = []
    if lost := sorted(set(swept.block_sizes) - set(everywhere)):
        notes.append(f"block sizes {', '.join(map(str, lost))} are left out: not every cost table has their seconds.")
    wanted = fixed or _USUAL_FIXED
    if lost := [size for size in wanted if size not in everywhere]:
        notes.append(f"the fixed size {lost[0]} is left out: it was not swept, or has no price.")
    setup = Setup(
        block_sizes=tuple(everywhere),
        constant_sizes=tuple(size for size in everywhere if size in question.trained.block_sizes),
        training_block_size=trained_for,
        fixed=tuple(sorted({size for size in wanted if size in everywhere} - {trained_for})),
        policies=question.policies,
        position_sizes=tuple(size for size in everywhere if size in kept),
        max_new_tokens=swept.settings.get("max_new_tokens"),
    )
    curves = [name for name, policy in question.policies.items() if policy.config.head == "curve"]
    for prior in (None, *curves):
        whose = "a policy" if prior is None else policy_label(prior)
        if lost := setup.left_out_of_flight(prior):
            notes.append(
                f"flights with{'out' if prior is None else ''} {whose} are restricted to block sizes "
                f"{', '.join(map(str, setup.flight_sizes(prior)))}: no positions were swept at "
                f"{', '.join(map(str, lost))}, or they have no price."
            )
    return setup, notes


def throughput(
    question: Question,
    tables: Mapping[str, CostTable],
    *,
    fixed: Sequence[int] | None,
    output: Path | None,
    timing: Timing | None,
) -> None:
    """
    Simulate all rules under all tables, time them if asked for, write the record and show it. The record is there
    before anything is timed, and again after it.
    """
    setup, more = make_setup(question, tables, fixed)
    notes = [*question.notes, *more]
    train_rows = with_steps(question.trained.rows)
    simulated = simulate(question.rows, train_rows, tables, setup, progress=progress_bar)
    results = judge(
        simulated,
        setup,
        groups=question.groups,
        num_resamples=question.num_resamples,
        seed=question.seed,
        progress=progress_bar,
    )
    record = {
        "run_info": run_info(),
        "meta_info": {
            "versions": package_versions(),
            "sweep": question.swept.settings,
            "train_sweep": question.trained.settings,
            "policies": dict(question.described),
        },
        "settings": {
            "objective": "throughput",
            "block_sizes": list(setup.block_sizes),
            "training_block_size": setup.training_block_size,
            "fixed": list(setup.fixed),
            "flight_block_sizes": setup.flight_sizes(),
            "position_block_sizes": list(setup.position_sizes),
            "max_new_tokens": setup.max_new_tokens,
            "num_resamples": question.num_resamples,
            "seed": question.seed,
            "groups": question.groups,
            "num_texts_without_steps": sum(row.num_new_tokens < 2 for row in question.swept.rows),
        },
        "overlap": question.overlap,
        "notes": notes,
        "costs": {name: table.to_dict() for name, table in tables.items()},
        "results": results,
        "timed": None,
        "per_prompt": _per_prompt(simulated, question.groups),
    }
    if output is not None:
        write_json(output / RECORD, record)
    timed = None
    if timing is not None:
        timed, more = time_rules(question, tables, setup, timing)
        notes += more
        if output is not None:
            write_json(output / RECORD, {**record, "run_info": run_info(), "timed": timed})
    screen = Screen()
    for note in notes:
        screen.line(f"note: {note}")
    for part in told_throughput(results, timed):
        screen.line()
        if isinstance(part, Table):
            screen.table(part.title, part.header, part.rows)
        else:
            screen.line(part)
    screen.line()
    if timing is not None:
        screen.line(f"timed rounds: {timing.output}")
    if output is not None:
        screen.line(f"record: {output / RECORD}")


def time_rules(
    question: Question, tables: Mapping[str, CostTable], setup: Setup, timing: Timing
) -> tuple[dict[str, Any], list[str]]:
    """
    Time what is missing in the file and judge all that is in it. Models are loaded only where something is missing.

    Returns:
        `tuple(dict, list[str])`: for the record, and notes.

    Raises:
        `ValueError`: for a file of other settings, prompts that were trained on, and models other than the sweep's.
    """
    prompts = read_prompts(timing.prompts, timing.limit)
    settings = {**sampling_settings(timing.temperature), "max_new_tokens": timing.max_new_tokens}
    run = {
        "prompts": timing.prompts.name,
        "target": timing.target,
        "drafter": timing.drafter or EMBEDDED,
        "dtype": timing.dtype,
        "pack": timing.pack,
        "seed": timing.seed,
        **settings,
        "fixed": list(setup.fixed),
        "policies": {name: weights_fingerprint(policy) for name, policy in setup.policies.items()},
        "costs": {name: _digest(table.to_dict()) for name, table in tables.items()},
        "train_texts": question.trained.settings.get("texts_fingerprint"),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    try:
        lines = read_lines(timing.output, run)
    except ValueError as error:
        raise ValueError(str(error).replace("`--output`", "`--timed-output`")) from error
    hashes = {line["prompt"]: line["prompt_hash"] for line in lines}
    done = {(line["prompt"], line["round"]) for line in lines}
    pending = [prompt for prompt in prompts if any((prompt.id, one) not in done for one in range(timing.repeats))]
    costs = CostTable.from_dict(lines[0]["costs"]) if lines else None
    notes, model, encoded = [], None, {}
    if pending:
        model, tokenizer = load_target(timing.target, timing.dtype, pack=timing.pack)
        pilot = load_pilot(timing.drafter, "none", model, pack=timing.pack)
        _check_weights(question.swept, model, pilot.drafter)
        costs = costs or table_for(tables, model, pilot.drafter)
        for prompt in pending:
            ids = encode_prompt(tokenizer, prompt.turns[0]).to(model.device)
            hashes[prompt.id] = Text(prompt.id, prompt.category, tuple(ids[0].tolist()), ()).prompt_hash
            encoded[prompt.id] = TimedPrompt(prompt.id, prompt.category, hashes[prompt.id], ids)
    prompts, more = _held_out(prompts, hashes, question)
    notes += more
    assert costs is not None, "of the file, or of the models"
    rules, calls = rules_and_calls(question, setup, costs, timing.temperature)
    if model is not None:
        lines += time_rounds(
            model,
            pilot,
            # In the order of the file, so that a second call rotates on as the first one would have.
            [encoded[prompt.id] for prompt in prompts if prompt.id in encoded],
            calls,
            timing.output,
            run=run,
            more={"costs": costs.to_dict(), "machine": machine_facts(model)},
            done=done,
            places={prompt.id: i for i, prompt in enumerate(prompts)},
            repeats=timing.repeats,
            seed=timing.seed,
            progress=progress_bar,
            **settings,
        )
    chosen = {prompt.id for prompt in prompts}
    judged = judge_timing(
        [line for line in lines if line["prompt"] in chosen and line["round"] < timing.repeats],
        rules,
        costs,
        groups=question.groups,
        num_resamples=question.num_resamples,
        seed=question.seed,
    )
    return {
        "file": timing.output.name,
        "run": run,
        "machine": lines[0]["machine"],
        "dtype": lines[0]["machine"]["dtype"],
        "temperature": timing.temperature,
        "source": costs.source,
        "costs": costs.to_dict(),
        "training_block_size": setup.training_block_size,
        "best_constant": int(rules[BEST_CONSTANT].removeprefix("size ")),
        "policies": list(setup.policies),
        **judged,
    }, notes


def table_for(tables: Mapping[str, CostTable], target: Any, drafter: Any) -> CostTable:
    """
    The given table that was measured for this pair, dtype and machine, as far as its key says so; else the one that
    decoding takes without being told, see [`costs_for`].
    """
    key = costs_key(target, drafter)
    fitting = (
        table
        for table in tables.values()
        if table.key and all(key.get(name) == value for name, value in table.key.items())
    )
    return next(fitting, None) or costs_for(target, drafter)


def rules_and_calls(
    question: Question, setup: Setup, costs: CostTable, temperature: float
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The call of every rule, and the keywords of every call but plain `generate`'s."""
    train_rows = with_steps(question.trained.rows)
    chosen_on = [row for row in train_rows if row.temperature == temperature] or train_rows
    constant = best_constant(chosen_on, costs, setup.constant_sizes)
    rules = {PLAIN: PLAIN, TRAINING_SIZE: f"size {setup.training_block_size}"}
    rules |= {f"fixed {size}": f"size {size}" for size in setup.fixed}
    rules[BEST_CONSTANT] = f"size {constant}"
    calls: dict[str, dict[str, Any]] = {
        f"size {size}": {"block_size": size} for size in (setup.training_block_size, *setup.fixed, constant)
    }
    for name, policy in setup.policies.items():
        calls[f"policy {name}"] = {"policy": policy, "adapt": "prompt", "costs": costs}
    for rule in (FLIGHT, LOOKUP_FLIGHT):
        how = {"adapt": "flight", "costs": costs, "lookup": rule == LOOKUP_FLIGHT}
        calls[rule] = {"policy": False, **how}
        for name, policy in setup.policies.items():
            if policy.config.head == "curve":
                calls[f"{rule} {name}"] = {"policy": policy, **how}
    rules |= {name: name for name in calls if not name.startswith("size ")}
    return rules, calls


def _held_out(prompts: list[Prompt], hashes: Mapping[str, str], question: Question) -> tuple[list[Prompt], list[str]]:
    """Without those that were trained on."""
    seen = {
        prompt.id: whose
        for prompt in prompts
        for whose, known in question.known.items()
        if hashes[prompt.id][:16] in known
    }
    if not seen:
        return prompts, []
    if not question.drop_overlap:
        first, whose = next(iter(seen.items()))
        raise ValueError(
            f"{len(seen)} prompts of `--timed` were trained on, the first is {first!r} in the {whose}. Time others, or "
            "leave these out with `--drop-overlap`."
        )
    left = [prompt for prompt in prompts if prompt.id not in seen]
    if not left:
        raise ValueError("All prompts of `--timed` were trained on, so nothing is left to time. Name others.")
    return left, [f"{len(seen)} prompts of `--timed` that were trained on are left out."]


def _check_weights(swept: Sweep, target: Any, drafter: Any) -> None:
    for name, loaded in (("target", target), ("drafter", drafter)):
        expected = swept.settings[f"{name}_fingerprint"]
        found = weights_fingerprint(loaded) if isinstance(loaded, nn.Module) else None
        if found != expected:
            raise ValueError(
                f"The sweep is of another {name} ({swept.settings[name]}, weights {expected}) than the one to time "
                f"({found}). Name it with `--{name}`."
            )


def _digest(entry: Any) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:16]


def _per_prompt(simulated: Sequence[Any], groups: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Seconds of every rule on every text, by table."""
    entries: dict[tuple[float, str], dict[str, Any]] = {}
    for one in simulated:
        for i, row in enumerate(one.rows):
            entry = entries.setdefault(
                (row.temperature, row.id),
                {
                    **facts_of(row, groups),
                    "seconds": {},
                    "chosen": {},
                },
            )
            entry["seconds"][one.table] = {rule: float(seconds[i]) for rule, seconds in one.seconds.items()}
            entry["chosen"][one.table] = {name: sizes[i] for name, sizes in one.choices.items()}
    return list(entries.values())


__all__ = [
    "OBJECTIVES",
    "RECORD",
    "Fixed",
    "Objective",
    "Question",
    "Repeats",
    "TimedOutput",
    "TimedPrompts",
    "Timing",
    "check_objective",
    "load_tables",
    "make_setup",
    "rules_and_calls",
    "table_for",
    "throughput",
    "time_rules",
]

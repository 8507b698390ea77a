"""`blockpilot evaluate`: what policies are worth on prompts that no training saw."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_common import EMBEDDED, Dtype, Limit, NewTokens, Packing, Target, Temperature, check_names
from .cli_console import Screen, progress_bar
from .cli_policy import Resamples, SweepFolder, check_same_pair, run_info, show
from .cli_throughput import (
    Fixed,
    Objective,
    Question,
    Repeats,
    TimedOutput,
    TimedPrompts,
    Timing,
    check_objective,
    load_tables,
    throughput,
)
from .costs import CostTable
from .drafter_record import TrainingPrompts, package_versions, read_training_prompts
from .evaluation import comparisons_of, evaluate, overlapping
from .evaluation_display import policy_label
from .evaluation_plots import CHOICES_PLOT, TAU_PLOT, draw_choices, draw_tau
from .evaluation_rules import GROUPS, Comparison, facts_of
from .json_lines import write_json
from .loading import embedded_drafter_dir, load_policy
from .policy_training import policy_choices, with_steps
from .sweep import Sweep, SweepRow, read_sweep
from .target_states import weights_fingerprint
from .texts import prompt_numbers
from .units import require_extra

RECORD = "evaluation.json"
_SHOULD_AGREE = ("dtype", "max_new_tokens")


def evaluate_command(
    sweep: SweepFolder,
    train: Annotated[
        Path,
        typer.Option(
            exists=True, file_okay=False, help="Sweep of the training prompts: the best constant size is chosen there."
        ),
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy: folder or Hub id. May be given several times.", metavar="NAME")
    ] = None,
    objective: Objective = "tau",
    costs: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Cost table. With --objective throughput it may be given several times.",
            show_default="none, and no speeds are told",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="The drafter: 'embedded', folder or Hub id, for the prompts that it was trained on.", metavar="NAME"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for the record and two plots.")] = None,
    drop_overlap: Annotated[
        bool, typer.Option("--drop-overlap", help="Leave out prompts that were trained on, instead of stopping.")
    ] = False,
    groups: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='JSON file, {"group": ["category", ...]}.',
            show_default=f"{', '.join(GROUPS)}",
        ),
    ] = None,
    bootstrap: Resamples = 10_000,
    shuffles: Annotated[int, typer.Option(min=1, help="Shuffles of the control.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of resamples, shuffles and timed calls.")] = 0,
    fixed: Fixed = None,
    timed: TimedPrompts = None,
    timed_output: TimedOutput = None,
    target: Target = None,
    dtype: Dtype = "auto",
    pack: Packing = True,
    limit: Limit = None,
    max_new_tokens: NewTokens = 96,
    temperature: Temperature = 0.0,
    repeats: Repeats = 1,
) -> None:
    """
    Judge policies on SWEEP next to the size that the drafter was trained for, the best constant size, a random one and
    the best one per text. Prompts that a training saw are refused. With --objective throughput also in flight, and with
    --timed in real calls; target, dtype, limit, new tokens, temperature and repeats are for these.
    """
    check_objective(objective, costs or [], fixed, timed, output, timed_output)
    if output is not None and objective == "tau":
        require_extra("matplotlib")
    if timed is not None:
        check_names(target, drafter, None, dtype)
        drafter = drafter or EMBEDDED
    for given in policy or []:
        check_names(None, None, given, "auto")
    check_names(None, drafter, None, "auto")
    mapping = _read_groups(groups) if groups else {name: list(members) for name, members in GROUPS.items()}
    tables = load_tables(costs or [])
    policies = {name: load_policy(given) for name, given in _names(policy or []).items()}
    swept, trained = read_sweep(sweep), read_sweep(train)
    check_same_pair(swept, trained, train)
    notes = [*_differences(swept, trained, train), *_strangers(policies, swept)]
    lists = _training_lists(trained, train, _names(policy or []), drafter)
    rows, overlap, more = _held_out(swept, lists, drop=drop_overlap)
    notes += more
    paths = costs or []
    for path, one in zip(paths, tables.values(), strict=True):
        notes += _other_costs(one, path, swept)
    if objective == "throughput":
        timing = None
        if timed is not None:
            timing = Timing(
                prompts=timed,
                output=timed_output or Path(output or ".") / f"timed-{dtype}.jsonl",
                target=target,
                drafter=drafter,
                dtype=dtype,
                pack=pack,
                limit=limit,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                repeats=repeats,
                seed=seed,
            )
        throughput(
            Question(
                swept=swept,
                trained=trained,
                rows=rows,
                policies=policies,
                described={name: _described(one) for name, one in policies.items()},
                groups=mapping,
                overlap=overlap,
                notes=notes,
                known={name: one.hashes for name, one in lists.items() if one is not None},
                drop_overlap=drop_overlap,
                num_resamples=bootstrap,
                seed=seed,
            ),
            tables,
            fixed=fixed,
            output=output,
            timing=timing,
        )
        return

    table = next(iter(tables.values()), None)
    sizes = [size for size in swept.block_sizes if size in trained.block_sizes]
    trained_for = swept.settings["training_block_size"]
    comparisons = comparisons_of(policies, sizes, trained_for)
    if table is not None:
        notes += _without_speeds(comparisons, trained_for, table, paths[0])
    results = evaluate(
        rows,
        with_steps(trained.rows),
        comparisons,
        block_sizes=sizes,
        training_block_size=trained_for,
        costs=table,
        groups=mapping,
        num_resamples=bootstrap,
        num_shuffles=shuffles,
        seed=seed,
        progress=progress_bar,
    )
    pictures: list[str] = []
    if output is not None:  # before anything is shown: a closed pipe must not cost the record
        output.mkdir(parents=True, exist_ok=True)
        draw_tau(results, trained_for, output / TAU_PLOT)
        pictures.append(TAU_PLOT)
        if policies:
            draw_choices(results, output / CHOICES_PLOT)
            pictures.append(CHOICES_PLOT)
        write_json(
            output / RECORD,
            {
                "run_info": run_info(),
                "meta_info": {
                    "versions": package_versions(),
                    "sweep": swept.settings,
                    "train_sweep": trained.settings,
                    "policies": {name: _described(one) for name, one in policies.items()},
                },
                "settings": {
                    "block_sizes": sizes,
                    "training_block_size": trained_for,
                    "num_resamples": bootstrap,
                    "num_shuffles": shuffles,
                    "seed": seed,
                    "groups": mapping,
                    "num_texts_without_steps": sum(row.num_new_tokens < 2 for row in swept.rows),
                },
                "overlap": overlap,
                "notes": notes,
                "costs": table.to_dict() if table else None,
                "results": results,
                "per_prompt": _per_prompt(rows, sizes, policies, mapping, table),
            },
        )
    screen = Screen()
    for note in notes:
        screen.line(f"note: {note}")
    show(screen, results)
    if output is not None:
        screen.line()
        screen.line(f"record: {output / RECORD}, plots: {', '.join(str(output / name) for name in pictures)}")


def _names(given: Sequence[str]) -> dict[str, str]:
    """
    Policies by the shortest name that tells them apart: the last parts of where they lie. A folder called `policy`, as
    `train-policy` writes it, is called as the one that it lies in.
    """
    if len(set(given)) < len(given):
        raise ValueError(f"A `--policy` is given twice: {', '.join(given)}. Name each once.")
    places = []
    for name in given:
        parts = Path(name).absolute().parts[1:] if Path(name).is_dir() else tuple(name.split("/"))
        places.append(parts[:-1] if parts[-1] == "policy" and len(parts) > 1 else parts)
    names = {}
    for name, place in zip(given, places, strict=True):
        # One policy in another's folder, such as a checkpoint, may leave nothing but what was given.
        ends = [place[-length:] for length in range(1, len(place) + 1)]
        own = (end for end in ends if sum(other[-len(end) :] == end for other in places) == 1)
        names["/".join(next(own, (name,)))] = name
    return names


def _without_speeds(comparisons: Sequence[Comparison], trained_for: int, table: CostTable, path: Path) -> list[str]:
    """Which comparisons a cost table leaves without speeds, and where a whole one comes from."""
    notes = []
    for one in comparisons:
        if missing := sorted({trained_for, *one.block_sizes} - set(table.block_sizes)):
            of_whom = f" ({', '.join(map(policy_label, one.policies))})" if one.policies else ""
            notes.append(
                f"no speeds are printed for the comparison of block sizes {', '.join(map(str, one.block_sizes))}"
                f"{of_whom}: {path} has no seconds for {', '.join(map(str, missing))}."
            )
    if notes:
        notes.append(
            "for a complete cost table run `blockpilot train-policy` with a new `--output` and without `--costs`: it "
            "measures one for all sizes of the sweep, costs.json in the output."
        )
    return notes


def _read_groups(path: Path) -> dict[str, list[str]]:
    try:
        groups = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"`--groups {path}` is not JSON ({error}).") from error
    is_right = isinstance(groups, dict) and all(
        isinstance(members, list) and all(isinstance(one, str) for one in members) for members in groups.values()
    )
    if not is_right or "all" in groups:
        raise ValueError(
            f"`--groups {path}` must map names of groups, none of them 'all', to lists of categories, such as "
            f'{{"maths": ["gsm8k"]}}.'
        )
    counts = [member for members in groups.values() for member in members]
    if twice := sorted({member for member in counts if counts.count(member) > 1}):
        raise ValueError(f"`--groups {path}` has {', '.join(twice)} in several groups. Every category has one.")
    return groups


def _differences(swept: Sweep, trained: Sweep, path: Path) -> list[str]:
    """What two sweeps of one pair do not share."""
    notes = [
        f"{path} has `{name}` {trained.settings.get(name)!r}, the sweep has {swept.settings.get(name)!r}."
        for name in _SHOULD_AGREE
        if trained.settings.get(name) != swept.settings.get(name)
    ]
    if lost := sorted(set(swept.block_sizes) - set(trained.block_sizes)):
        notes.append(f"{path} has no block sizes {lost}, so they are left out.")
    return notes


def _other_costs(table: CostTable, path: Path, swept: Sweep) -> list[str]:
    """Where the table was measured with another target or dtype than those of the sweep."""
    measured_on = {**table.key, "target": table.measured.get("target", table.key.get("target"))}
    pairs = [(kind, measured_on.get(kind), swept.settings[kind]) for kind in ("target", "dtype")]
    return [
        f"{path} was measured with the {kind} {theirs}, the sweep was made with {ours}: speeds are those of {theirs}."
        for kind, theirs, ours in pairs
        if theirs is not None and theirs != ours
    ]


def _strangers(policies: dict[str, Any], swept: Sweep) -> list[str]:
    """Policies that were made for another pair, or do not say for which."""
    notes = []
    for name, policy in policies.items():
        for kind in ("target", "drafter"):
            theirs, ours = getattr(policy.config, f"{kind}_fingerprint"), swept.settings[f"{kind}_fingerprint"]
            if theirs is None:
                notes.append(f"{policy_label(name)} does not say which {kind} it was made for.")
            elif theirs != ours:
                notes.append(
                    f"{policy_label(name)} was made for another {kind}: weights {theirs}, the sweep's are {ours}."
                )
    return notes


def _training_lists(
    trained: Sweep, train: Path, policies: dict[str, str], drafter: str | None
) -> dict[str, TrainingPrompts | None]:
    """Prompts that were trained on, by whom; `None` where that is not known."""
    of_sweep = TrainingPrompts(frozenset(row.prompt_hash[:16] for row in trained.rows))
    lists: dict[str, TrainingPrompts | None] = {f"training sweep {train}": of_sweep}
    lists |= {f"policy {name}": read_training_prompts(given) for name, given in policies.items()}
    folder = embedded_drafter_dir() if drafter == EMBEDDED else drafter
    lists[f"drafter {drafter}" if drafter else "drafter"] = read_training_prompts(folder) if folder else None
    return lists


def _held_out(
    swept: Sweep, lists: dict[str, TrainingPrompts | None], *, drop: bool
) -> tuple[list[SweepRow], dict[str, Any], list[str]]:
    """
    The rows to judge on, the record of what they were compared with, and notes.

    Raises:
        `ValueError`: for prompts that were trained on, unless they are to be dropped.
    """
    rows = with_steps(swept.rows)
    record: dict[str, Any] = {"lists": {}, "num_prompts_dropped": 0}
    notes, found = [], {}
    for name, known in lists.items():
        if known is None:
            why = "has no list of its training prompts" if name != "drafter" else "is not named with `--drafter`"
            notes.append(f"{name} {why}: whether it was trained on these prompts cannot be checked.")
            record["lists"][name] = {"is_checked": False}
            continue
        if not known.is_complete:
            notes.append(f"{name} was trained on prompts that its list lacks: these cannot be checked.")
        shared = overlapping(rows, known.hashes)
        count = len(set(prompt_numbers(shared)))
        record["lists"][name] = {
            "is_checked": known.is_complete,
            "num_prompts_known": len(known.hashes),
            "num_prompts_shared": count,
        }
        if shared:
            found[name] = (count, shared)
    if found and not drop:
        told = "; ".join(
            f"{count} in the {name}, the first is {shared[0].id!r}" for name, (count, shared) in found.items()
        )
        raise ValueError(
            f"Prompts of the sweep were trained on: {told}. A policy is judged on prompts that no training saw: sweep "
            "others, or leave these out with `--drop-overlap`."
        )
    if found:
        lost = {row.id for _, shared in found.values() for row in shared}
        num_dropped = len(set(prompt_numbers([row for row in rows if row.id in lost])))
        rows = [row for row in rows if row.id not in lost]
        record["num_prompts_dropped"] = num_dropped
        notes.append(f"{num_dropped} prompts that were trained on are left out.")
        if not rows:
            raise ValueError("All prompts of the sweep were trained on, so nothing is left to judge. Sweep others.")
    return rows, record, notes


def _described(policy: Any) -> dict[str, Any]:
    config = policy.config
    return {
        "fingerprint": weights_fingerprint(policy),
        "block_sizes": config.block_sizes,
        "features": config.features,
        "sampling": config.sampling,
        "target_fingerprint": config.target_fingerprint,
        "drafter_fingerprint": config.drafter_fingerprint,
        "blockpilot_version": config.blockpilot_version,
    }


def _per_prompt(
    rows: Sequence[SweepRow],
    sizes: Sequence[int],
    policies: dict[str, Any],
    groups: dict[str, list[str]],
    costs: CostTable | None,
) -> list[dict[str, Any]]:
    chosen = {name: policy_choices(policy, rows, costs) for name, policy in policies.items()}
    return [
        {
            **facts_of(row, groups),
            "num_steps": {str(size): row.num_steps(size) for size in sizes},
            "acceptance_length": {str(size): row.acceptance_length(size) for size in sizes},
            "chosen": {name: picked[i] for name, picked in chosen.items()},
        }
        for i, row in enumerate(rows)
    ]


__all__ = ["RECORD", "evaluate_command"]

"""`blockpilot sweep`: the steps that decoding takes at every block size, from the target's own texts. And
`blockpilot check-replay`: the same by decoding, to see that they agree and what is saved."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_common import (
    EMBEDDED,
    Drafter,
    Dtype,
    Limit,
    NewTokens,
    Packing,
    Seed,
    Target,
    check_names,
    load_pilot,
    load_target,
    machine_facts,
    progress_bar,
    sampling_settings,
)
from .cli_console import Screen, held_notes, units_bar
from .display import counted
from .json_lines import append_line, read_lines
from .prompts import Prompt, encode_prompt, read_prompts
from .sweep import Sweep, write_sweep
from .sweep_check import ReplayCheck, check_replay
from .texts import read_texts, spread
from .units import processes, require_extra

BlockSizes = Annotated[str, typer.Option(help="Sizes and ranges of them, as in '1,2,4-16'.")]


def sweep(
    texts: Annotated[
        list[Path],
        typer.Argument(
            exists=True, help="The target's own texts: folders of `blockpilot prepare`, .jsonl or .jsonl.gz files."
        ),
    ],
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder of the sweep; a second call goes on.")],
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "float32",
    pack: Packing = True,
    block_sizes: BlockSizes = "1-16",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=2, help="Only that much of every answer, as if decoding had ended there.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="That many texts, a like share of every category.")] = None,
    all_positions: Annotated[
        bool,
        typer.Option(
            "--all-positions",
            help="Also what is accepted after every anchor, with the drafter's confidence, for decisions in flight.",
        ),
    ] = False,
    position_sizes: Annotated[
        str | None,
        typer.Option(
            help="The same at some of the block sizes, as in '2,4,8', while the others are walked: much quicker."
        ),
    ] = None,
    keep_logits: Annotated[
        bool,
        typer.Option(
            "--keep-logits",
            help="Also the target's logits at the prompt's end: one number per token of its vocabulary and text.",
        ),
    ] = False,
) -> None:
    """Steps and accepted lengths at every block size, on texts that the target wrote. Resumable; several processes
    under `accelerate launch` share the work."""
    check_names(target, drafter, None, dtype)
    require_extra("datasets")
    sizes, is_main = parse_block_sizes(block_sizes), processes()[0] == 0
    if all_positions and position_sizes is not None:
        raise ValueError("`--all-positions` and `--position-sizes` exclude each other. Leave one out.")
    chosen = [text for path in texts for text in read_texts(path)]
    chosen = spread(chosen, limit or len(chosen))
    model, _ = load_target(target, dtype, pack=pack)
    with held_notes():
        pilot = load_pilot(drafter, "none", model, pack=pack)
        found = write_sweep(
            model,
            pilot.drafter,
            chosen,
            sizes,
            output,
            max_new_tokens=max_new_tokens,
            keep_logits=keep_logits,
            position_sizes=sizes if all_positions else parse_block_sizes(position_sizes) if position_sizes else (),
            progress=units_bar if is_main else None,
        )
    if is_main:
        _show_sweep(Screen(), found, output)


def check_replay_command(
    prompts: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Prompts: .jsonl with `prompt` or `turns`, of which the first is taken, or one per line.",
        ),
    ],
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "float32",
    pack: Packing = True,
    block_sizes: BlockSizes = "1-16",
    temperatures: Annotated[str, typer.Option(help="One text each, comma-separated; 0: greedy.")] = "0,1",
    max_new_tokens: NewTokens = 32,
    seed: Seed = 0,
    limit: Limit = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write results as JSON lines as they come; a second call with the same settings goes on."),
    ] = None,
) -> None:
    """Compare the replay behind `sweep` with decoding at every block size, and time both. Ends with status 1 if a step
    differs."""
    check_names(target, drafter, None, dtype)
    sizes, drawn = parse_block_sizes(block_sizes), _temperatures(temperatures)
    chosen = read_prompts(prompts, limit)
    run = {
        "prompts": prompts.name,
        "target": target,
        "drafter": drafter or EMBEDDED,
        "dtype": dtype,
        "pack": pack,
        "block_sizes": sizes,
        "temperatures": drawn,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    known = _read_checks(output, run) if output else {}
    pending = [prompt for prompt in chosen if prompt.id not in known]
    if pending:
        model, tokenizer = load_target(target, dtype, pack=pack)
        with held_notes():
            pilot = load_pilot(drafter, "none", model, pack=pack)
            for prompt in progress_bar(pending, "prompts"):
                checks, replay_s = check_replay(
                    model,
                    pilot,
                    encode_prompt(tokenizer, prompt.turns[0]).to(model.device),
                    sizes,
                    [sampling_settings(temperature) for temperature in drawn],
                    max_new_tokens=max_new_tokens,
                    seed=seed,
                )
                entry = {
                    "run": run,
                    "prompt": prompt.id,
                    "checks": [asdict(check) for check in checks],
                    "replay_s": replay_s,
                    "machine": machine_facts(model),
                }
                known[prompt.id] = checks, replay_s, entry["machine"]
                if output:
                    append_line(output, entry)
    is_same = _show_checks(Screen(), chosen, known)
    raise typer.Exit(0 if is_same else 1)


def parse_block_sizes(text: str) -> list[int]:
    """
    Sizes of a list such as `1,2,4-16`, rising.

    Raises:
        `ValueError`: for anything else.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        ends = [first, last] if dash else [first, first]
        if not all(end.isdecimal() for end in ends) or not 1 <= int(ends[0]) <= int(ends[1]):
            raise ValueError(
                f"`--block-sizes` takes integers >= 1 and rising ranges of them, separated by commas, got {part!r}. "
                "For example: 1,2,4-16."
            )
        sizes |= set(range(int(ends[0]), int(ends[1]) + 1))
    return sorted(sizes)


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 <= temperature < math.inf for temperature in found):
        raise ValueError(f"`--temperatures` takes numbers >= 0, separated by commas, got {text!r}.")
    return list(dict.fromkeys(found))


def _show_sweep(screen: Screen, sweep: Sweep, output: Path) -> None:
    by_temperature: dict[float, list[Any]] = defaultdict(list)
    for row in sweep.rows:
        by_temperature[row.temperature].append(row)
    for temperature, rows in sorted(by_temperature.items()):
        groups: dict[str, list[Any]] = {"all": rows}
        for row in rows:
            if row.category != "all":
                groups.setdefault(row.category, []).append(row)
        names = sorted(groups, key=lambda name: (name == "all", name))
        table = [
            [f"{name} ({len(groups[name])})"]
            + [f"{_mean([row.acceptance_length(size) for row in groups[name]]):.2f}" for size in sweep.block_sizes]
            for name in names
        ]
        title = "tau by block size" + (f", temperature {temperature:g}" if len(by_temperature) > 1 else "")
        _show_wide_table(screen, title, ["category", *map(str, sweep.block_sizes)], table)
    screen.line("tau: tokens committed per verification step, mean over a text's steps, then over the texts")
    screen.line(f"{counted(len(sweep.rows), 'text')} in {output}")


def _show_wide_table(screen: Screen, title: str, header: list[str], rows: list[list[str]]) -> None:
    """In several parts where the screen has no room for all columns."""
    first = max(len(row[0]) for row in [header, *rows])
    at_once = max(1, (screen.width - first) // 7)  # "1.00" and the space around it
    for start in range(1, len(header), at_once):
        part = slice(start, start + at_once)
        screen.table(
            title if start == 1 else f"{title}, continued",
            [header[0], *header[part]],
            [[row[0], *row[part]] for row in rows],
        )


def _show_checks(screen: Screen, prompts: list[Prompt], known: dict[str, tuple[list[ReplayCheck], float, Any]]) -> bool:
    checks = [(prompt, check) for prompt in prompts for check in known[prompt.id][0]]
    by_temperature: dict[float, list[ReplayCheck]] = defaultdict(list)
    for _, check in checks:
        by_temperature[check.temperature].append(check)
    rows = []
    for temperature, of_it in by_temperature.items():
        for size in of_it[0].decoded:
            same = sum(size not in check.differing for check in of_it)
            rows.append(
                [
                    f"{temperature:g}",
                    str(size),
                    f"{same} / {len(of_it)}",
                    str(sum(len(check.decoded[size]) for check in of_it)),
                    f"{_mean([_tau(check, size) for check in of_it]):.2f}",
                ]
            )
    screen.table("replay against decoding", ["temperature", "block size", "identical", "steps", "tau"], rows)
    for prompt, check in checks:
        for size in check.differing:
            where = f"{prompt.id}, temperature {check.temperature:g}, block size {size}"
            screen.line(f"{where}: {_difference(check, size)}")
    replay_s = sum(known[prompt.id][1] for prompt in prompts)
    decode_s = sum(check.decode_s for _, check in checks)
    plain_s = sum(check.plain_s for _, check in checks)
    machines = [known[prompt.id][2] for prompt in prompts]
    threads = ", ".join(sorted({f"{m['device']}, {counted(m['num_threads'], 'thread')}" for m in machines}))
    screen.line(
        f"replay {replay_s:.1f} s, decoding at every size {decode_s:.1f} s: {decode_s / replay_s:.1f} times cheaper, "
        f"the target's passes included ({threads})"
    )
    screen.line(f"plain generate, which wrote the texts: {plain_s:.1f} s")
    total = sum(len(check.decoded) for _, check in checks)
    differing = sum(len(check.differing) for _, check in checks)
    screen.line(f"identical {total - differing} / {total}")
    return not differing


def _difference(check: ReplayCheck, size: int) -> str:
    if size in check.other_texts:
        return "decoding gave another text than plain generate"
    decoded, replayed = check.decoded[size], check.replayed[size]
    pairs = enumerate(zip(decoded, replayed, strict=False))
    first = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(decoded), len(replayed)))
    accepted = [str(steps[first]) if first < len(steps) else "no step" for steps in (decoded, replayed)]
    return (
        f"{len(decoded)} steps by decoding, {len(replayed)} by replay; the first other one is step {first + 1}, which "
        f"accepted {accepted[0]} by decoding and {accepted[1]} by replay"
    )


def _tau(check: ReplayCheck, size: int) -> float:
    steps = check.decoded[size]
    return sum(count + 1 for count in steps) / len(steps) if steps else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _read_checks(path: Path, run: dict[str, Any]) -> dict[str, tuple[list[ReplayCheck], float, Any]]:
    """Results of an earlier call with the same settings."""
    known = {}
    for entry in read_lines(path, run):
        for check in entry["checks"]:
            for name in ("decoded", "replayed"):
                check[name] = {int(size): steps for size, steps in check[name].items()}
        checks = [ReplayCheck(**check) for check in entry["checks"]]
        known[entry["prompt"]] = checks, entry["replay_s"], entry["machine"]
    return known


__all__ = ["check_replay_command", "parse_block_sizes", "sweep"]

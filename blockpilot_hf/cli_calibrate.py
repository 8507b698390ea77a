"""`blockpilot calibrate`: measure what passes cost here, once, and show the table that decisions then read."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from .calibration import DEFAULT_CONTEXT_LENGTHS, DEFAULT_SECONDS, calibrate
from .cli_common import (
    Drafter,
    Dtype,
    Packing,
    Target,
    check_names,
    load_pilot,
    load_target,
    package_version,
    progress_bar,
)
from .cli_console import Screen, held_notes
from .costs import CostTable, device_name, kept_costs_path
from .display import counted
from .json_lines import write_json

_CONTEXT_LENGTHS = ",".join(map(str, DEFAULT_CONTEXT_LENGTHS))


def calibrate_command(
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "auto",
    pack: Packing = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the CPU.", show_default="as torch has them")
    ] = None,
    block_sizes: Annotated[
        str | None,
        typer.Option(
            help="Block sizes, comma-separated.",
            show_default="1,2,3,4,6,8,12,16, and on to the drafter's",
            metavar="SIZES",
        ),
    ] = None,
    context_lengths: Annotated[
        str | None,
        typer.Option(help="Tokens before the block.", show_default=_CONTEXT_LENGTHS, metavar="LENGTHS"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="About how long to measure; every size gets two steps at least.")
    ] = DEFAULT_SECONDS,
    force: Annotated[bool, typer.Option("--force", help="Measure anew, whatever is kept.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write the table here too, for `--costs` of other commands.", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as one line of JSON, nothing else.")] = False,
) -> None:
    """
    Seconds of a drafting and a verifying pass by width and context length, for this target, drafter, dtype, device and
    number of threads. Measured once and kept: later calls decide by the kept table, and a second one shows it.
    """
    check_names(target, drafter, None, dtype)
    sizes = _numbers(block_sizes, "--block-sizes")
    lengths = _numbers(context_lengths, "--context-lengths")
    if drafter is not None and drafter.partition(":")[0] == "scripted":
        raise ValueError("A scripted drafter only looks texts up, so there is nothing to measure. Name a real drafter.")
    if threads is not None:
        torch.set_num_threads(threads)
    note = _note_path(target=target, drafter=drafter, dtype=dtype, pack=pack)
    kept = None if force else _noted_table(note)
    if kept is not None and kept.covers(sizes, lengths):
        table, is_new = kept, False
    else:
        model, _ = load_target(target, dtype, pack=pack)
        pilot = load_pilot(drafter, "none", model, pack=pack)
        with held_notes():
            table, is_new = calibrate(
                model,
                pilot.drafter,
                sizes,
                context_lengths=lengths,
                seconds=seconds,
                force=force,
                progress=progress_bar,
            )
        write_json(note, {"table": kept_costs_path(table.key).name})
    if output is not None:
        table.save(output)
    screen = Screen(is_quiet=as_json)
    if as_json:
        screen.json_line(json.dumps(table.to_dict()))
        return
    _show(screen, table)
    path = kept_costs_path(table.key)
    if is_new:
        screen.line(f"measured now, {counted(table.measured['num_samples'], 'step')} each; kept in {path}")
    else:
        screen.line(f"measured before ({table.measured['utc']}), nothing was measured now: kept in {path}")
        screen.line("`--force` measures anew")
    if output is not None:
        screen.line(f"written to {output}")


def _note_path(**arguments: Any) -> Path:
    """
    Where a call notes which table it came to, so that the same call need not load two models to find it again. Whatever
    the key could depend on is in its name: arguments, configs of folders, versions, devices and threads.
    """
    facts: dict[str, Any] = {
        **arguments,
        "versions": [package_version(), torch.__version__, transformers.__version__],
        "devices": [device_name("cpu"), *(device_name(f"cuda:{i}") for i in range(torch.cuda.device_count()))],
        "threads": torch.get_num_threads(),
    }
    for name in ("target", "drafter"):
        config = Path(arguments[name] or "") / "config.json"
        if arguments[name] and config.is_file():
            facts[name] = [str(config.resolve()), config.read_text(encoding="utf-8")]
    return kept_costs_path(facts).with_suffix(".call")


def _noted_table(note: Path) -> CostTable | None:
    """The table that an earlier call came to, while it is there and whole."""
    try:
        return CostTable.load(note.with_name(json.loads(note.read_text(encoding="utf-8"))["table"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _show(screen: Screen, table: CostTable) -> None:
    """By context length and width: medians, fit, and both in plain passes; then the fit and the key."""
    screen.line(f"target {table.measured['target']}, drafter {table.measured['drafter']}")
    header = ["width", "verify, ms", "fit", "x plain", "draft, ms", "fit", "x plain", "step x plain"]
    raw = {name: table.measured[name] for name in ("verify_s", "draft_s")}
    for i, length in enumerate(table.context_lengths):
        plain = table.verify_s[1][i]
        rows = []
        for width in sorted(table.verify_s):
            cells = [str(width)]
            for name, fitted in (("verify_s", table.verify_s), ("draft_s", table.draft_s)):
                row = fitted.get(width)
                if row is None:
                    cells += ["-"] * 3
                else:
                    cells += [_ms(raw[name][str(width)][i]), _ms(row[i]), f"{row[i] / plain:.2f}"]
            step_s = table.step_s(width, context_length=length)
            rows.append([*cells, f"{step_s / plain:.2f}"])
        screen.table(f"{length:,} tokens of context", header, rows)
        screen.line()
    change, where = _largest_change(table)
    screen.line(
        f"fit: seconds never fall with width or context; it moved a median by {100 * change:.1f} % at most ({where})"
    )
    screen.line("x plain: in plain passes; what a step costs is the tokens that it has to commit to break even")
    screen.line(f"key {table.name}: {_key_words(table.key)}")


def _largest_change(table: CostTable) -> tuple[float, str]:
    """Of a median by the fit, as a share, and which it was."""
    changes = [
        (abs(fitted / raw - 1), f"{kind} {width} after {length:,} tokens")
        for kind, rows in (("verify", table.verify_s), ("draft", table.draft_s))
        for width, row in rows.items()
        for length, fitted, raw in zip(table.context_lengths, row, table.measured[f"{kind}_s"][str(width)], strict=True)
    ]
    return max(changes)


def _key_words(key: dict[str, Any]) -> str:
    target, drafter = key["target"], key["drafter"]
    parts = [f"{target['class']} and {drafter['class']}", key["dtype"]]
    if drafter["dtype"] != key["dtype"]:
        parts[-1] += f" and {drafter['dtype']}"
    parts += [f"{target['linear']} layers", f"attention {target['attention']}", f"on {key['device']}"]
    if key["num_threads"]:
        parts.append(counted(key["num_threads"], "thread"))
    return ", ".join([*parts, f"torch {key['torch']}", "and the shapes of both models"])


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f}" if milliseconds >= 1 else f"{milliseconds:.3f}"


def _numbers(text: str | None, option: str) -> list[int] | None:
    """Of a comma-separated list."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= 1 for part in parts):
        raise ValueError(f"`{option}` must be integers >= 1, comma-separated, such as 1,4,8; got {text!r}.")
    return sorted({int(part) for part in parts})


__all__ = ["calibrate_command"]

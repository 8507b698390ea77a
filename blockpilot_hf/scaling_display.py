"""A scaling record in words and tables, and whether ours grow faster with the work than plain `generate`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .benchmark_methods import PLAIN
from .display import counted
from .evaluation_display import NONE, Table, number
from .scaling_summary import AXES

# Ratios of single calls are off by that much, so less is no growth.
TOLERANCE = 1.1
# A process on its own has nearly all of its threads' time.
_ALONE = 0.9
LEGEND = (
    "Medians over texts. A step is a pass of the target after the prefill with its draft; tau: tokens per step. Tau "
    "differs from text to text, and with it the time of a token. MB: 10^6 bytes beyond what was held before."
)
_PER_TOKEN = "time per token"
_NOUN = {"prompt_length": "prompts", "answer_length": "answers"}
_WITH = {"prompt_length": "answers", "answer_length": "prompts"}


def time_table(record: Mapping[str, Any], sweep: Mapping[str, Any]) -> Table:
    """Milliseconds per token of decoding, prefill aside, and tokens per step."""
    per_token, _, of = clock(record)
    rest = _others(record)
    header = [_noun(sweep), *map(_title(record), record["methods"]), *(f"tau, {_title(record)(name)}" for name in rest)]
    rows = [
        [
            f"{length:,}",
            *(_scaled(_of(sweep, name, per_token, i), 1e3) for name in record["methods"]),
            *(_number(_of(sweep, name, "acceptance_length", i), 2) for name in rest),
        ]
        for i, length in enumerate(sweep["lengths"])
    ]
    return Table(f"{described_sweep(sweep)}: milliseconds{of} per token of decoding, after the prefill", header, rows)


def steps_table(record: Mapping[str, Any], sweep: Mapping[str, Any]) -> Table:
    """Milliseconds per step, which no acceptance plays a part in, and what of it no model takes."""
    _, per_step, of = clock(record)
    names = list(record["methods"])
    header = [_noun(sweep), *map(_title(record), names), *(f"rest, {_title(record)(name)}" for name in names)]
    rows = [
        [
            f"{length:,}",
            *(_scaled(_of(sweep, name, per_step, i), 1e3) for name in names),
            *(_scaled(_of(sweep, name, "overhead_per_step_s", i), 1e3) for name in names),
        ]
        for i, length in enumerate(sweep["lengths"])
    ]
    return Table(
        f"{described_sweep(sweep)}: milliseconds{of} per step, and the rest beside the models' passes", header, rows
    )


def call_table(record: Mapping[str, Any], sweep: Mapping[str, Any]) -> Table:
    """Seconds of whole calls, and of the prefill in them."""
    names = list(record["methods"])
    header = [_noun(sweep), *(f"{_title(record)(name)}" for name in names)]
    header += [f"prefill, {_title(record)(name)}" for name in names]
    rows = [
        [
            f"{length:,}",
            *(_number(_of(sweep, name, measure, i), 2) for measure in ("total_s", "prefill_s") for name in names),
        ]
        for i, length in enumerate(sweep["lengths"])
    ]
    return Table(f"{described_sweep(sweep)}: seconds of whole calls, and of the prefill in them", header, rows)


def memory_table(record: Mapping[str, Any], sweep: Mapping[str, Any]) -> Table:
    """The most that a call held beyond what was held before it, and what both caches hold at its end."""
    names, ours = list(record["methods"]), default_name(record)
    header = [_noun(sweep), *map(_title(record), names), "target's cache", "drafter's cache"]
    rows = [
        [
            f"{length:,}",
            *(_scaled(_of(sweep, name, "peak_memory_bytes", i), 1e-6) for name in names),
            _scaled(_of(sweep, ours, "target_cache_bytes", i), 1e-6),
            _scaled(_of(sweep, ours, "drafter_cache_bytes", i), 1e-6),
        ]
        for i, length in enumerate(sweep["lengths"])
    ]
    return Table(
        f"{described_sweep(sweep)}: peak memory of a call in MB, and what caches hold at its end", header, rows
    )


def growth_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """For each axis, what ours take next to plain at the shortest and at the longest length."""
    for sweep in record["summary"]:
        where = f"{_noun(sweep).capitalize()} of {sweep['lengths'][0]:,} to {sweep['lengths'][-1]:,} tokens"
        if len(sweep["lengths"]) < 2:
            yield f"{where}: a single length, so nothing can be said of growth."
            continue
        for name, measure, what in _growing(record):
            told = sweep["growth"][name][measure]
            if told is None:
                yield f"{where}, {what}: not measured here."
                continue
            tau = f" ({_taus(sweep, name)})" if what == _PER_TOKEN else ""
            yield (
                f"{where}, {what}: {_title(record)(name)} takes {number(told['shortest'], 2)} times plain's at the "
                f"shortest and {number(told['longest'], 2)} times at the longest{tau}; growth over plain's "
                f"{number(told['growth'], 2)}."
            )


def growth_verdict(record: Mapping[str, Any]) -> str:
    """What lengths alone make grow more than plain's, and beside it what the time of a token does, text and all."""
    alone: list[tuple[float, str]] = []
    per_token: list[str] = []
    for sweep in record["summary"]:
        over = f"over {_noun(sweep)} of rising length"
        for name, measure, what in _growing(record):
            if (told := sweep["growth"][name][measure]) is None:
                continue
            if what == _PER_TOKEN:
                per_token.append(f"{number(told['growth'], 2)} {over} ({_taus(sweep, name)})")
            else:
                alone.append((told["growth"], f"{what} of {_title(record)(name)} {over}"))
    if not alone:
        return "Growth: too little was measured to tell."
    beyond = [f"{number(growth, 2)} ({what})" for growth, what in alone if growth > TOLERANCE]
    most, where = max(alone)
    verdict = (
        f"Growth that plain generate has not: {', '.join(beyond)} times its own"
        if beyond
        else f"Growth: none that plain generate has not; at most {number(most, 2)} times its own ({where})"
    )
    return f"{verdict}. Time per token follows the text too: {', '.join(per_token)}."


def described_scaling(record: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, where and how."""
    meta, settings, run = record["meta_info"], record["settings"], record["run_info"]
    machine = meta["machine"]
    where = [str(machine.get(key)) for key in ("dtype", "device", "device_name") if machine.get(key)]
    where += ["packed linear layers"] if machine.get("is_packed") else []
    where += [counted(machine["num_threads"], "thread")] if machine.get("num_threads") else []
    yield f"target {meta['target'].get('name')}, drafter {meta['drafter'].get('name')}; {', '.join(where)}"
    yield (
        f"greedy, {counted(settings.get('repeats', 1), 'text')} for each pair of lengths, methods in turns; answers of "
        "exactly the length asked for"
    )
    yield f"memory: {settings.get('memory') or 'nothing counts it on this device'}"
    versions = ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items())
    commit = f", commit {run['commit'][:12]}" if run.get("commit") else ""
    yield f"{versions}{commit}; finished {run.get('finished_utc', 'at an unknown time')}"
    if run.get("status", "whole") != "whole":
        yield "This run was stopped before it was through: figures are of what was done."
    yield from (f"left out: {one}" for one in settings.get("left_out", ()))
    yield from shared_lines(record)
    if run.get("notes"):
        yield f"note: {run['notes']}"


def shared_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """That others had the machine too, where they had."""
    if (share := busy_share(record)) is not None and is_shared(record):
        threads = counted(record["meta_info"]["machine"]["num_threads"], "thread")
        yield (
            f"The process had {100 * share:.0f} % of the time of its {threads}: others had the machine too. Time per "
            "token and step is that of the processor; other seconds are too long."
        )


def busy_share(record: Mapping[str, Any]) -> float | None:
    """On a CPU, processor seconds over seconds of all threads, of all calls; `None` elsewhere."""
    machine = record["meta_info"]["machine"]
    calls = [call for cell in record["cells"] for call in cell["calls"].values()]
    total = sum(call["total_s"] for call in calls)
    if machine.get("device") != "cpu" or not machine.get("num_threads") or not total:
        return None
    return sum(call["cpu_s"] for call in calls) / (total * machine["num_threads"])


def is_shared(record: Mapping[str, Any]) -> bool:
    """Whether others had the machine too, so much that seconds on the wall say little."""
    share = busy_share(record)
    return share is not None and share < _ALONE


def clock(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """The measures of time per token and per step that hold, and what sets them apart, in words."""
    if is_shared(record):
        return "cpu_per_token_s", "cpu_per_step_s", " of processor time"
    return "time_per_token_s", "time_per_step_s", ""


def _growing(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """
    Methods and measures that are compared with plain's, in words. Steps are those of a fixed size: in flight their
    width follows the text as well.
    """
    per_token, per_step, _ = clock(record)
    ours, rest = default_name(record), _others(record)
    fixed = next((name for name in rest if record["methods"][name]["kind"] == "fixed"), ours)
    return [(ours, per_token, _PER_TOKEN), (fixed, per_step, "time per step"), (ours, "peak_memory_bytes", "memory")]


def _taus(sweep: Mapping[str, Any], name: str) -> str:
    first, last = (_number(sweep["methods"][name]["acceptance_length"][i], 2) for i in (0, -1))
    return f"tau {first} to {last}"


def first_and_last(sweep: Mapping[str, Any], name: str, measure: str) -> str:
    """Of a picture's panel: next to plain at both ends, and how much is accepted there where that plays a part."""
    told = sweep["growth"][name].get(measure)
    if told is None:
        return ""
    tau = "" if measure == "peak_memory_bytes" else f", {_taus(sweep, name)}"
    return f"ours / plain: {number(told['shortest'], 2)} to {number(told['longest'], 2)}{tau}"


def told_scaling(record: Mapping[str, Any]) -> Iterator[Table | str]:
    """Everything that there is to show of a record: tables, and lines between and below them."""
    yield from described_scaling(record)
    for sweep in record["summary"]:
        yield time_table(record, sweep)
        yield steps_table(record, sweep)
        yield call_table(record, sweep)
        yield memory_table(record, sweep)
    yield LEGEND
    yield from growth_lines(record)
    yield growth_verdict(record)


def described_sweep(sweep: Mapping[str, Any]) -> str:
    """What is varied, and beside what."""
    other = next(axis for axis in AXES if axis != sweep["axis"])
    return f"{_noun(sweep)}, with {_WITH[sweep['axis']]} of {sweep[other]:,} tokens"


def described_axis(sweep: Mapping[str, Any]) -> str:
    """The same for an axis of a picture."""
    other = next(axis for axis in AXES if axis != sweep["axis"])
    return f"{_noun(sweep).removesuffix('s')} length (tokens), {_WITH[sweep['axis']]} of {sweep[other]:,}"


def _noun(sweep: Mapping[str, Any]) -> str:
    return _NOUN[sweep["axis"]]


def _title(record: Mapping[str, Any]) -> Any:
    return lambda name: record["methods"][name]["title"]


def _others(record: Mapping[str, Any]) -> Sequence[str]:
    return [name for name in record["methods"] if name != PLAIN]


def default_name(record: Mapping[str, Any]) -> str:
    """The method that users get, else the last of those beside plain."""
    return next((name for name, one in record["methods"].items() if one["is_default"]), _others(record)[-1])


def _of(sweep: Mapping[str, Any], name: str, measure: str, i: int) -> float | None:
    return sweep["methods"][name][measure][i]


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else number(value, digits)


def _scaled(value: float | None, factor: float) -> str:
    return NONE if value is None else number(value * factor, 1)


__all__ = [
    "LEGEND",
    "TOLERANCE",
    "busy_share",
    "call_table",
    "clock",
    "default_name",
    "described_axis",
    "described_scaling",
    "first_and_last",
    "growth_lines",
    "growth_verdict",
    "is_shared",
    "memory_table",
    "shared_lines",
    "steps_table",
    "time_table",
    "told_scaling",
]

"""The figures of a scaling record: medians over repeats by length, and how ours grow next to plain `generate`'s."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .benchmark_methods import PLAIN

# What a method has per length; memory may be unknown.
MEASURES = (
    "prefill_s",
    "time_per_token_s",
    "total_s",
    "cpu_s",
    "acceptance_length",
    "time_per_step_s",
    "cpu_per_token_s",
    "cpu_per_step_s",
    "overhead_per_step_s",
    "peak_memory_bytes",
    "target_cache_bytes",
    "drafter_cache_bytes",
)
# What must not grow faster than plain's.
# Of these, steps tell what lengths alone do: how many tokens a step gives is up to the text.
GROWTH = ("time_per_token_s", "time_per_step_s", "cpu_per_token_s", "cpu_per_step_s", "peak_memory_bytes")
_PER = {
    "time_per_step_s": ("decode_s", "step"),
    "cpu_per_token_s": ("decode_cpu_s", "token"),
    "cpu_per_step_s": ("decode_cpu_s", "step"),
    "overhead_per_step_s": ("other_s", "step"),
}
AXES = ("prompt_length", "answer_length")


def summarize_scaling(lines: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> list[dict[str, Any]]:
    """
    Along prompt lengths and along answer lengths, each with the other at its shortest.

    Args:
        lines (`Sequence[Mapping]`): As [`run_cells`] writes them, whole or of a run that was stopped.
        methods (`Sequence[str]`): Their names, plain `generate` among them.

    Returns:
        `list[dict]`: for each axis the `lengths`, by method the medians over repeats of every measure at each length,
        and for all but plain the `growth` of what plain's is compared in: the median over repeats of its ratio to
        plain's at the shortest and at the longest length, and the second over the first.
    """
    found = []
    for axis, other in (AXES, AXES[::-1]):
        shortest = min(line[other] for line in lines)
        own = [line for line in lines if line[other] == shortest]
        lengths = sorted({line[axis] for line in own})
        by_length = [[line["calls"] for line in own if line[axis] == length] for length in lengths]
        found.append(
            {
                "axis": axis,
                other: shortest,
                "lengths": lengths,
                "num_repeats": [len(calls) for calls in by_length],
                "methods": {
                    name: {
                        measure: [_median([_value(call[name], measure) for call in calls]) for calls in by_length]
                        for measure in MEASURES
                    }
                    for name in methods
                },
                "growth": {
                    name: {measure: _growth(by_length, name, measure) for measure in GROWTH}
                    for name in methods
                    if name != PLAIN
                },
            }
        )
    return found


def _growth(by_length: Sequence[Sequence[Mapping[str, Any]]], name: str, measure: str) -> dict[str, float] | None:
    """`None` for a single length, and where something was not measured or nothing was there to be compared with."""

    def ratio(calls: Sequence[Mapping[str, Any]]) -> float | None:
        pairs = [(_value(call[name], measure), _value(call[PLAIN], measure)) for call in calls]
        return _median([None if ours is None or not plain else ours / plain for ours, plain in pairs])

    first, last = ratio(by_length[0]), ratio(by_length[-1])
    if len(by_length) < 2 or not first or last is None:
        return None
    return {"shortest": first, "longest": last, "growth": last / first}


def _value(call: Mapping[str, Any], measure: str) -> float | None:
    if measure not in _PER:
        return call[measure]
    seconds, count = _PER[measure]
    number = call["num_new_tokens"] - 1 if count == "token" else call["num_steps"]
    return None if call[seconds] is None or not number else call[seconds] / number


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


__all__ = ["AXES", "GROWTH", "MEASURES", "summarize_scaling"]

"""Figures of a benchmark from its lines: speeds over plain decoding, acceptance, the bound and the overhead."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .benchmark_methods import FLIGHT, PLAIN
from .evaluation_rules import ALL, ENOUGH_PROMPTS, GROUPS, group_of, ordered_groups
from .intervals import Means, bootstrap_intervals
from .throughput import SLOW

_PARTS = ("total_s", "prefill_s", "policy_s", "decode_s", "draft_s", "verify_s", "other_s")
Statistics = dict[tuple[str, str], Callable[[Means], np.ndarray]]


def summarize(
    lines: Sequence[Mapping[str, Any]], *, num_resamples: int = 10_000, seed: int = 0
) -> list[dict[str, Any]]:
    """
    Results by temperature, and by set of prompts where there are several.

    Args:
        lines (`Sequence[Mapping]`): As [`run_rounds`] writes them. Of several repeats of a call medians count.

    Returns:
        `list[dict]`: each with `temperature`, `set`, `num_prompts` and `groups`; see the page on reading records.

    Raises:
        `ValueError`: if no answer is longer than one token.
    """
    names = list(dict.fromkeys(line["set"] for line in lines))
    results = []
    for temperature in sorted({line["temperature"] for line in lines}):
        for name in [ALL, *(names if len(names) > 1 else [])]:
            of_set = [line for line in lines if line["temperature"] == temperature and name in (ALL, line["set"])]
            prompts = _prompts(of_set)
            if not prompts:
                continue
            groups = [prompt.group for prompt in prompts]
            results.append(
                {
                    "temperature": temperature,
                    "set": name,
                    "num_prompts": len(prompts),
                    "groups": {
                        group: _judge(
                            [prompt for prompt in prompts if group in (ALL, prompt.group)],
                            num_resamples=num_resamples,
                            seed=seed,
                        )
                        for group in ordered_groups(groups, GROUPS)
                    },
                }
            )
    if not results:
        raise ValueError("No answer of this benchmark has more than one token. Ask for more with `--max-new-tokens`.")
    return results


class _Prompt:
    """A prompt with all of its turns and repeats: seconds and tokens of every method, summed over the turns."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]):
        self.group = group_of(lines[0]["category"], GROUPS)
        turns: dict[int, list[Mapping[str, Any]]] = {}
        for line in lines:
            turns.setdefault(line["turn"], []).append(line)
        self.calls: dict[str, dict[str, Any]] = {}
        for name in lines[0]["calls"]:
            calls = [[line["calls"][name] for line in repeats] for repeats in turns.values()]
            own: dict[str, Any] = {part: _sum_of_medians(calls, part) for part in _PARTS}
            own["tokens"] = sum(repeats[0]["num_new_tokens"] for repeats in calls)
            own["steps"] = sum(repeats[0]["num_steps"] for repeats in calls)
            own["left"] = own["tokens"] - len(calls)  # the prefill gives the first token of a turn
            every = [call for repeats in calls for call in repeats]
            own["is_identical"] = all(call["first_difference"] is None for call in every)
            own["is_explained"] = all(call["first_difference"] is None or call["is_near_tie"] for call in every)
            own["spread"] = _spread(calls)
            self.calls[name] = own

    @property
    def has_steps(self) -> bool:
        """Whether there is decoding to speak of, with every method."""
        return all(call["left"] > 0 for call in self.calls.values())

    def speed(self, name: str, seconds: str, tokens: str) -> float:
        """Tokens per second over plain's."""
        own, plain = self.calls[name], self.calls[PLAIN]
        return (own[tokens] / own[seconds]) / (plain[tokens] / plain[seconds])

    def bound(self, name: str) -> float:
        """Decoding over plain's if only the passes of target and drafter took time, plain's own passes too."""
        own, plain = self.calls[name], self.calls[PLAIN]
        if own["draft_s"] is None or own["verify_s"] is None:
            return np.nan
        return (own["left"] / (own["draft_s"] + own["verify_s"])) / (plain["left"] / plain["decode_s"])

    def overhead(self, name: str) -> float:
        """Share of decoding outside the passes."""
        own = self.calls[name]
        return np.nan if own["other_s"] is None else own["other_s"] / own["decode_s"]


def _prompts(lines: Sequence[Mapping[str, Any]]) -> list[_Prompt]:
    by_prompt: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        by_prompt.setdefault((line["set"], line["prompt"]), []).append(line)
    prompts = [_Prompt(of_prompt) for of_prompt in by_prompt.values()]
    return [prompt for prompt in prompts if prompt.has_steps]


def _sum_of_medians(calls: Sequence[Sequence[Mapping[str, Any]]], part: str) -> float | None:
    if any(call[part] is None for repeats in calls for call in repeats):
        return None
    return float(sum(np.median([call[part] for call in repeats]) for repeats in calls))


def _spread(calls: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    """Of the seconds between repeats, relative to the median."""
    if len(calls[0]) < 2:
        return None
    seconds = [[call["total_s"] for call in repeats] for repeats in calls]
    return float(np.mean([(max(of_turn) - min(of_turn)) / np.median(of_turn) for of_turn in seconds]))


def _judge(prompts: Sequence[_Prompt], *, num_resamples: int, seed: int) -> dict[str, Any]:
    names = list(prompts[0].calls)
    columns: dict[str, np.ndarray] = {}
    statistics: Statistics = {}
    for name in names:
        calls = [prompt.calls[name] for prompt in prompts]
        own = {
            "speedup": np.array([prompt.speed(name, "total_s", "tokens") for prompt in prompts]),
            "decode_speedup": np.array([prompt.speed(name, "decode_s", "left") for prompt in prompts]),
            "acceptance_length": np.array([call["left"] / max(1, call["steps"]) for call in calls]),
            "bound": np.array([prompt.bound(name) for prompt in prompts]),
            "overhead_share": np.array([prompt.overhead(name) for prompt in prompts]),
        }
        if FLIGHT in names:
            own["over_default"] = np.array(
                [
                    prompt.speed(FLIGHT, "total_s", "tokens") / prompt.speed(name, "total_s", "tokens")
                    for prompt in prompts
                ]
            )
        for measure, values in own.items():
            columns[f"{name} {measure}"] = values
            statistics[name, measure] = _column(f"{name} {measure}")
        columns[f"{name} s"] = np.array([call["total_s"] for call in calls])
        columns[f"{name} tokens"] = np.array([call["tokens"] for call in calls])
        statistics[name, "tokens_per_second"] = _ratio(f"{name} tokens", f"{name} s")
        statistics[name, "of_bound"] = _ratio(f"{name} decode_speedup", f"{name} bound")
    told = bootstrap_intervals(columns, statistics, num_resamples=num_resamples, seed=seed)
    found = {}
    for name in names:
        own_figures: dict[str, Any] = {
            measure: asdict(interval) if interval.estimate is not None else None
            for (of_name, measure), interval in told.items()
            if of_name == name
        }
        if name == PLAIN:
            own_figures["bound"] = own_figures["of_bound"] = None
        speeds = [prompt.speed(name, "total_s", "tokens") for prompt in prompts]
        calls = [prompt.calls[name] for prompt in prompts]
        spreads = [call["spread"] for call in calls]
        found[name] = {
            **own_figures,
            "least_speedup": min(speeds),
            "num_slow": sum(speed < SLOW for speed in speeds),
            "num_identical": sum(call["is_identical"] for call in calls),
            "num_explained": sum(call["is_explained"] and not call["is_identical"] for call in calls),
            "seconds_per_token": {
                part.removesuffix("_s"): _per_token(calls, part)
                for part in _PARTS
                if part not in ("total_s", "decode_s")
            },
            "spread": None if None in spreads else float(np.median(spreads)),
        }
    return {"num_prompts": len(prompts), "is_enough": len(prompts) >= ENOUGH_PROMPTS, "methods": found}


def _per_token(calls: Sequence[Mapping[str, Any]], part: str) -> float | None:
    values = [call[part] for call in calls]
    return None if None in values else sum(values) / sum(call["tokens"] for call in calls)


def _column(name: str) -> Callable[[Means], np.ndarray]:
    return lambda means: means[name]


def _ratio(a: str, b: str) -> Callable[[Means], np.ndarray]:
    return lambda means: means[a] / means[b]


__all__ = ["summarize"]

"""Real calls, timed: every way to decide next to plain `generate`, on the same prompts and in turns.

A round is one prompt: each call once, from the same seed, in an order that rotates from round to round, so that a
machine that grows slow or warm weighs on all alike. Rounds are added to a file of JSON lines as they end, and what it
holds is not run again. The seconds of a call stand next to those that a cost table gives the steps that it took.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

from .costs import CostTable
from .evaluation_rules import ALL, ENOUGH_PROMPTS, GROUPS, group_of, ordered_groups
from .generate import BlockPilot
from .intervals import Means, bootstrap_intervals
from .json_lines import append_line
from .throughput import PLAIN, SLOW
from .trace import DecodeTrace

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class TimedPrompt:
    """
    Args:
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): On the target's device.
    """

    id: str
    category: str
    prompt_hash: str
    input_ids: torch.LongTensor


class PlainClock(BaseStreamer):
    """When plain `generate` has its first token, as `DecodeTrace.prefill_s` says it of ours."""

    def __init__(self) -> None:
        self.num_seen, self.first_token_at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then every token."""
        self.num_seen += 1
        if self.num_seen == 2:
            self.first_token_at = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


def time_rounds(
    target: Any,
    pilot: BlockPilot,
    prompts: Sequence[TimedPrompt],
    calls: Mapping[str, Mapping[str, Any]],
    path: Path,
    *,
    run: dict[str, Any],
    more: Mapping[str, Any] | None = None,
    done: Iterable[tuple[str, int]] = (),
    places: Mapping[str, int] | None = None,
    repeats: int = 1,
    seed: int = 0,
    progress: Callable[[list[Any], str], Iterable[Any]] = lambda items, name: items,
    **generate_kwargs: Any,
) -> list[dict[str, Any]]:
    """
    Time all rounds that are missing, after a short warm-up of every call.

    Args:
        calls (`Mapping[str, Mapping[str, Any]]`):
            By name, the keywords of [`BlockPilot.generate`]; plain `generate` comes by itself.
        path (`Path`): Where a line is added after every round.
        run (`dict`): Settings that go with every line.
        more (`Mapping`, *optional*): What else does.
        done (`Iterable[tuple[str, int]]`): Prompt ids and rounds that are there already.
        places (`Mapping[str, int]`, *optional*):
            Where each prompt stands among all, which turns the order; by default its place in `prompts`.
        repeats (`int`, *optional*, defaults to 1): Rounds for every prompt.
        seed (`int`, *optional*, defaults to 0): Of every call.
        generate_kwargs: For all, `max_new_tokens` among them.

    Returns:
        `list[dict]`: the new lines.
    """
    names, known, lines = [PLAIN, *calls], set(done), []
    places = places or {prompt.id: i for i, prompt in enumerate(prompts)}
    pending = [
        (places[prompt.id] * repeats + number, number, prompt)
        for prompt in prompts
        for number in range(repeats)
        if (prompt.id, number) not in known
    ]
    if not pending:
        return []

    def call(name: str, ids: torch.LongTensor, **more: Any) -> tuple[dict[str, Any], torch.Tensor]:
        kwargs = {**generate_kwargs, "return_dict_in_generate": True, **more}
        clock = PlainClock()
        torch.manual_seed(seed)
        _synchronize(target)
        start = time.perf_counter()
        if name == PLAIN:
            output = type(target).generate(target, ids, streamer=clock, **kwargs)
        else:
            output = pilot.generate(target, ids, **{**calls[name], **kwargs})
        _synchronize(target)
        total_s = time.perf_counter() - start
        new_ids = output.sequences[0, ids.shape[1] :].cpu()
        entry: dict[str, Any] = {"total_s": total_s, "num_new_tokens": len(new_ids)}
        if name == PLAIN:
            prefill_s = clock.first_token_at - start
            return {**entry, "prefill_s": prefill_s, "policy_s": 0.0, "decode_s": total_s - prefill_s}, new_ids
        return {**entry, **_of_trace(output.blockpilot)}, new_ids

    follow = getattr(pilot.drafter, "follow", None)
    few = min(_WARM_UP_TOKENS, generate_kwargs["max_new_tokens"])
    for name in names:
        call(name, pending[0][2].input_ids, max_new_tokens=few)
    for place, number, prompt in progress(pending, "rounds"):
        ids = prompt.input_ids
        if follow is not None:  # a scripted drafter has to know the text before it drafts
            follow(torch.cat([ids.cpu(), call(PLAIN, ids)[1][None]], dim=-1))
        order = names[place % len(names) :] + names[: place % len(names)]
        found, texts = {}, {}
        for name in order:
            found[name], texts[name] = call(name, ids)
        for name in names:
            found[name]["is_identical"] = torch.equal(texts[name], texts[PLAIN])
        line = {
            "run": run,
            **(more or {}),
            "prompt": prompt.id,
            "category": prompt.category,
            "prompt_hash": prompt.prompt_hash,
            "num_prompt_tokens": ids.shape[1],
            "round": number,
            "order": order,
            "calls": {name: found[name] for name in names},
        }
        append_line(path, line)
        lines.append(line)
    return lines


def _synchronize(target: Any) -> None:
    if target.device.type != "cpu":
        torch.accelerator.synchronize(target.device)


def _of_trace(trace: DecodeTrace) -> dict[str, Any]:
    return {
        "prefill_s": trace.prefill_s,
        "policy_s": trace.policy_s,
        "decode_s": trace.decode_s,
        "block_size": trace.block_size,
        # Where the budget ends a fixed size verifies less than it drafts, and without a draft it is a plain pass.
        "steps": [step.cost_counts for step in trace.steps],
    }


def steps_seconds(steps: Iterable[Sequence[int]], num_prompt_tokens: int, costs: CostTable) -> float:
    """
    Table seconds of steps that were taken, each at its own context length.

    Args:
        steps (`Iterable[Sequence[int]]`): Drafted block size, 1 without a draft, verified width, accepted count.
    """
    total, length = 0.0, num_prompt_tokens
    for size, width, accepted in steps:
        total += costs.step_s(size, verify_width=width, context_length=length)
        length += accepted + 1
    return total


@dataclass(frozen=True)
class _Speeds:
    """Of a call on a prompt: tokens over seconds, each over plain decoding's."""

    total: float
    decode: float
    simulated: float


def judge_timing(
    lines: Sequence[Mapping[str, Any]],
    rules: Mapping[str, str],
    costs: CostTable,
    *,
    groups: Mapping[str, Sequence[str]] = GROUPS,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Speeds of timed calls over plain `generate`, next to those of the table for the very steps that were taken.

    Args:
        lines (`Sequence[Mapping]`): As [`time_rounds`] writes them. Of several rounds of a prompt medians count.
        rules (`Mapping[str, str]`): The call of every rule. Two rules may come to the same call.
        costs ([`CostTable`]): That the calls decided by.

    Returns:
        `dict`: `num_prompts`, `num_without_steps` for prompts that are left out because an answer has one token only,
        and the `groups`, with `rules` by name: `speedup` over plain in seconds from ids to ids, `decode_speedup`
        without prefill and policy, `simulated_speedup` of the steps under the table, `timed_over_simulated`, the ratio
        of the two, `tokens_per_second`, all as dicts of `estimate`, `low` and `high`; `agrees`: whether the simulated
        one lies in the interval of the `decode_speedup`; `least_speedup` of a prompt, `num_slow` prompts below `SLOW`
        times plain, and `num_identical` texts.

    Raises:
        `ValueError`: if no prompt is left.
    """
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_prompt.setdefault(line["prompt"], []).append(line)
    kept = {
        prompt: rounds
        for prompt, rounds in by_prompt.items()
        if all(call["num_new_tokens"] > 1 for line in rounds for call in line["calls"].values())
    }
    if not kept:
        raise ValueError(
            f"No timed prompt has an answer of more than one token, of {len(by_prompt)} prompts. Time others."
        )
    of_prompts = [group_of(rounds[0]["category"], groups) for rounds in kept.values()]
    found: dict[str, Any] = {
        "num_prompts": len(kept),
        "num_without_steps": len(by_prompt) - len(kept),
        "num_rounds": max(len(rounds) for rounds in kept.values()),
        "groups": {},
    }
    for name in ordered_groups(of_prompts, groups):
        members = [rounds for rounds, group in zip(kept.values(), of_prompts, strict=True) if name in (ALL, group)]
        found["groups"][name] = _judge_group(members, rules, costs, num_resamples=num_resamples, seed=seed)
    return found


def _judge_group(
    members: Sequence[Sequence[Mapping[str, Any]]],
    rules: Mapping[str, str],
    costs: CostTable,
    *,
    num_resamples: int,
    seed: int,
) -> dict[str, Any]:
    columns: dict[str, np.ndarray] = {}
    statistics: dict[tuple[str, str], Callable[[Means], np.ndarray]] = {}
    speeds = {call: [_speeds(rounds, call, costs) for rounds in members] for call in {PLAIN, *rules.values()}}
    for call, of_prompts in speeds.items():
        for part in ("total", "decode", "simulated"):
            columns[f"{call} {part}"] = np.array([getattr(speed, part) for speed in of_prompts])
        columns[f"{call} s"] = np.array([_median(rounds, call, "total_s") for rounds in members])
        columns[f"{call} tokens"] = np.array([rounds[0]["calls"][call]["num_new_tokens"] for rounds in members])
        statistics[call, "speedup"] = _column(f"{call} total")
        statistics[call, "decode_speedup"] = _column(f"{call} decode")
        statistics[call, "simulated_speedup"] = _column(f"{call} simulated")
        statistics[call, "timed_over_simulated"] = _ratio(f"{call} decode", f"{call} simulated")
        statistics[call, "tokens_per_second"] = _ratio(f"{call} tokens", f"{call} s")
    told = bootstrap_intervals(columns, statistics, num_resamples=num_resamples, seed=seed)
    found = {}
    for rule, call in rules.items():
        own = {name: asdict(interval) for (of_call, name), interval in told.items() if of_call == call}
        low, high = own["decode_speedup"]["low"], own["decode_speedup"]["high"]
        simulated = own["simulated_speedup"]["estimate"]
        found[rule] = {
            "call": call,
            **own,
            # Of one prompt there is no interval.
            "agrees": None if low is None or high is None else bool(low <= simulated <= high),
            "least_speedup": min(speed.total for speed in speeds[call]),
            "num_slow": sum(speed.total < SLOW for speed in speeds[call]),
            "num_identical": sum(all(line["calls"][call]["is_identical"] for line in rounds) for rounds in members),
        }
    return {"num_prompts": len(members), "is_enough": len(members) >= ENOUGH_PROMPTS, "rules": found}


def _speeds(rounds: Sequence[Mapping[str, Any]], call: str, costs: CostTable) -> _Speeds:
    # By tokens per second: in half precision a text may part from plain's, and end elsewhere.
    own, plain = rounds[0]["calls"][call], rounds[0]["calls"][PLAIN]
    num_prompt_tokens = rounds[0]["num_prompt_tokens"]
    tokens = own["num_new_tokens"] / plain["num_new_tokens"]
    left = (own["num_new_tokens"] - 1) / (plain["num_new_tokens"] - 1)
    plain_steps = [(1, 1, 0)] * (plain["num_new_tokens"] - 1)
    own_s = steps_seconds(own.get("steps", plain_steps), num_prompt_tokens, costs)
    return _Speeds(
        total=tokens * _median(rounds, PLAIN, "total_s") / _median(rounds, call, "total_s"),
        decode=left * _median(rounds, PLAIN, "decode_s") / _median(rounds, call, "decode_s"),
        simulated=left * steps_seconds(plain_steps, num_prompt_tokens, costs) / own_s,
    )


def _median(rounds: Sequence[Mapping[str, Any]], call: str, name: str) -> float:
    return float(np.median([line["calls"][call][name] for line in rounds]))


def _column(name: str) -> Callable[[Means], np.ndarray]:
    return lambda means: means[name]


def _ratio(a: str, b: str) -> Callable[[Means], np.ndarray]:
    return lambda means: means[a] / means[b]


__all__ = ["PlainClock", "TimedPrompt", "judge_timing", "steps_seconds", "time_rounds"]

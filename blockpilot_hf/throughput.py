"""Tokens per second of every way to decide, on texts that are known: simulated in the seconds of cost tables.

A rule is a fixed block size, a size per prompt, a flight, or an oracle that knows what will be accepted. All of them
write the same texts, so a rule is the seconds that it takes for each: everything that is told, with intervals over
prompts, follows from those. Knows nothing of files and terminals; [`judge_rules`] is for measured seconds too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from .candidate_generator import sizes_up_to
from .costs import CostTable
from .evaluation_rules import ALL, ENOUGH_PROMPTS, GROUPS, by_prompt, group_of, ordered_groups
from .flight_simulation import answer_costs, fly, least_seconds
from .intervals import Means, bootstrap_intervals
from .modeling_blockpilot import BlockPilotPolicy
from .policy_training import policy_choices, policy_inputs
from .sweep import SweepRow
from .texts import prompt_numbers

PLAIN = "plain"
TRAINING_SIZE = "training_size"
BEST_CONSTANT = "best_constant"
FLIGHT = "flight"
# With copies from the text so far, as flights are by default. The other one tells what drafter and policy give alone.
LOOKUP_FLIGHT = "flight_lookup"
BEST_PER_TEXT = "best_per_text"
BEST_PER_STEP = "best_per_step"
# A prompt whose speed is below this share of plain decoding's counts as slowed down.
SLOW = 0.95


@dataclass(frozen=True)
class Setup:
    """
    What is compared.

    Args:
        block_sizes (`tuple[int, ...]`): Sizes for the oracles, swept on the texts. Plain decoding is always one.
        constant_sizes (`tuple[int, ...]`): Sizes for the best constant: those that the training texts have too.
        training_block_size (`int`): The size that the drafter was trained for.
        fixed (`tuple[int, ...]`): Further fixed sizes.
        policies (`Mapping[str, BlockPilotPolicy]`): By name.
        position_sizes (`tuple[int, ...]`):
            Sizes for flights and for the oracle that decides at every step: those whose positions were kept.
        max_new_tokens (`int`, *optional*): The budget of the calls, which flights know.
    """

    block_sizes: tuple[int, ...]
    constant_sizes: tuple[int, ...]
    training_block_size: int
    fixed: tuple[int, ...] = ()
    policies: Mapping[str, BlockPilotPolicy] = field(default_factory=dict)
    position_sizes: tuple[int, ...] = ()
    max_new_tokens: int | None = None

    def flight_sizes(self, policy: str | None = None) -> list[int]:
        """Candidates of a flight: those of decoding, as far as their positions were kept."""
        return [size for size in self._wanted(policy) if size in self.position_sizes]

    def left_out_of_flight(self, policy: str | None = None) -> list[int]:
        """Candidates that decoding has and the sweep has not."""
        return [size for size in self._wanted(policy) if size not in self.position_sizes]

    def _wanted(self, policy: str | None) -> list[int]:
        return sizes_up_to(
            self.training_block_size if policy is None else max(self.policies[policy].config.block_sizes)
        )


@dataclass(frozen=True)
class Simulated:
    """
    The texts of one temperature under one table.

    Args:
        table (`str`): Its name.
        seconds (`dict[str, np.ndarray]`): By rule, of every text, `(num_texts,)`.
        choices (`dict[str, list[int]]`): By policy, the size of every text.
    """

    table: str
    costs: CostTable
    temperature: float
    rows: list[SweepRow]
    chosen_on: list[SweepRow]
    best_constant: int
    seconds: dict[str, np.ndarray]
    choices: dict[str, list[int]]


def is_in_seconds(costs: CostTable) -> bool:
    """Whether a table's numbers are seconds; those of the defaults are plain passes."""
    return "device_class" not in costs.key


def simulate(
    rows: Sequence[SweepRow],
    train_rows: Sequence[SweepRow],
    tables: Mapping[str, CostTable],
    setup: Setup,
    *,
    progress: Callable[[list[Any], str], Iterable[Any]] = lambda items, name: items,
) -> list[Simulated]:
    """
    Every rule on every text, under every table and apart for every temperature.

    Args:
        rows (`Sequence[SweepRow]`): Held-out texts with positions and at least one step each.
        train_rows (`Sequence[SweepRow]`): Where the best constant size is chosen: on texts of the same temperature if
            it has any, else on all. Needs no positions.
        tables (`Mapping[str, CostTable]`): By name.
        progress (`Callable`, *optional*): Wraps the list of what is simulated, for a bar.

    Raises:
        `ValueError`: without texts on either side, for texts without positions, and for sizes that were not swept.
    """
    if not rows or not train_rows:
        raise ValueError(f"A simulation needs texts on both sides, got {len(rows)} and {len(train_rows)} to train on.")
    found, jobs = [], []
    for temperature in sorted({row.temperature for row in rows}):
        own = [row for row in rows if row.temperature == temperature]
        chosen_on = [row for row in train_rows if row.temperature == temperature] or list(train_rows)
        curves = {
            name: predicted_curves(policy, own)
            for name, policy in setup.policies.items()
            if policy.config.head == "curve"
        }
        for name, costs in tables.items():
            one = Simulated(
                name,
                costs,
                temperature,
                own,
                chosen_on,
                best_constant(chosen_on, costs, setup.constant_sizes),
                {},
                {policy: policy_choices(head, own, costs) for policy, head in setup.policies.items()},
            )
            found.append(one)
            jobs += [(one, i, curves) for i in range(len(own))]
    for one, i, curves in progress(jobs, "texts"):
        for rule, seconds in _seconds(one, i, curves, setup).items():
            one.seconds.setdefault(rule, np.zeros(len(one.rows)))[i] = seconds
    return found


def _seconds(one: Simulated, i: int, curves: dict[str, list[dict[int, float]]], setup: Setup) -> dict[str, float]:
    """Of every rule on a text, in the order in which they are told."""
    row, budget = one.rows[i], setup.max_new_tokens
    chosen = {name: sizes[i] for name, sizes in one.choices.items()}
    sizes = {1, setup.training_block_size, one.best_constant, *setup.fixed, *setup.block_sizes, *chosen.values()}
    at = seconds_by_size(row, one.costs, sizes)
    found = {PLAIN: at[1], TRAINING_SIZE: at[setup.training_block_size]}
    found |= {f"fixed {size}": at[size] for size in setup.fixed}
    found[BEST_CONSTANT] = at[one.best_constant]
    found |= {f"policy {name}": at[size] for name, size in chosen.items()}
    # Older sweeps do not hold the texts.
    for rule in (FLIGHT, LOOKUP_FLIGHT) if row.answer_ids is not None else (FLIGHT,):
        how: dict[str, Any] = {"max_new_tokens": budget, "lookup": rule == LOOKUP_FLIGHT}
        found[rule] = fly(row, one.costs, setup.flight_sizes(), **how).seconds
        for name, curve in curves.items():
            found[f"{rule} {name}"] = fly(row, one.costs, setup.flight_sizes(name), prior=curve[i], **how).seconds
    found[BEST_PER_TEXT] = min(at[size] for size in {1, *setup.block_sizes})
    found[BEST_PER_STEP] = least_seconds(row, one.costs, setup.position_sizes)
    return found


def seconds_by_size(row: SweepRow, costs: CostTable, sizes: Iterable[int]) -> dict[int, float]:
    """
    Seconds of a text at fixed block sizes. Plain decoding takes a pass per token and need not be swept.

    Raises:
        `ValueError`: for another size that was not swept.
    """
    costs = answer_costs(row, costs)
    return {
        size: (row.num_steps(size) if size > 1 else row.num_new_tokens - 1) * costs.step_s(size)
        for size in sorted(sizes)
    }


def best_constant(rows: Sequence[SweepRow], costs: CostTable, sizes: Sequence[int]) -> int:
    """The size of the most tokens per second over all texts together, the smallest among equals; plain is one."""
    totals: dict[int, float] = {}
    for row in rows:
        for size, seconds in seconds_by_size(row, costs, {1, *sizes}).items():
            totals[size] = totals.get(size, 0.0) + seconds
    return min(totals, key=lambda size: (totals[size], size))


@torch.no_grad()
def predicted_curves(policy: BlockPilotPolicy, rows: Sequence[SweepRow]) -> list[dict[int, float]]:
    """Acceptance length by block size that a head of kind `"curve"` predicts for every text."""
    curves = policy(policy_inputs(rows, policy.config.features)).scores.float().tolist()
    return [dict(zip(policy.config.block_sizes, curve, strict=True)) for curve in curves]


def judge(
    simulated: Sequence[Simulated],
    setup: Setup,
    *,
    groups: Mapping[str, Sequence[str]] = GROUPS,
    num_resamples: int = 10_000,
    seed: int = 0,
    progress: Callable[[list[Any], str], Iterable[Any]] = lambda items, name: items,
) -> list[dict[str, Any]]:
    """
    What there is to say of simulated rules, by group and for all.

    Returns:
        `list[dict]`: one for every table and temperature, with `groups` as of [`judge_rules`].
    """
    results, jobs = [], []
    for one in simulated:
        of_rows = [group_of(row.category, groups) for row in one.rows]
        result: dict[str, Any] = {
            "table": one.table,
            "source": one.costs.source,
            "is_in_seconds": is_in_seconds(one.costs),
            "temperature": one.temperature,
            "num_prompts": len(set(prompt_numbers(one.rows))),
            "num_texts": len(one.rows),
            "training_block_size": setup.training_block_size,
            "best_constant": one.best_constant,
            "best_constant_chosen_on": {
                "temperatures": sorted({row.temperature for row in one.chosen_on}),
                "num_prompts": len(set(prompt_numbers(one.chosen_on))),
            },
            "block_sizes": sorted({1, *setup.block_sizes}),
            "flight_block_sizes": setup.flight_sizes(),
            "position_block_sizes": list(setup.position_sizes),
            "policies": list(setup.policies),
            "groups": {},
            "choices": {},
        }
        results.append(result)
        jobs += [(result, one, of_rows, name) for name in ordered_groups(of_rows, groups)]
    for result, one, of_rows, name in progress(jobs, "bootstrap"):
        places = [i for i, group in enumerate(of_rows) if name in (ALL, group)]
        chosen = [one.rows[i] for i in places]
        tokens = np.array([row.num_new_tokens - 1 for row in chosen], dtype=float)
        seconds = {rule: all_of[places] for rule, all_of in one.seconds.items()}
        result["groups"][name] = judge_rules(
            seconds, tokens, np.array(prompt_numbers(chosen)), num_resamples=num_resamples, seed=seed
        )
        result["choices"][name] = {
            policy: {str(size): [sizes[i] for i in places].count(size) for size in sorted(set(sizes))}
            for policy, sizes in one.choices.items()
        }
    return results


def judge_rules(
    seconds: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    numbers: np.ndarray,
    *,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Speeds of rules that write the same texts, each with its 95 % interval over prompts, all of the same resamples.

    Args:
        seconds (`Mapping[str, np.ndarray]`): By rule, of every text, `(num_texts,)`. Plain decoding must be one; the
            best constant and the best size per text may be.
        tokens (`np.ndarray` of shape `(num_texts,)`): What those seconds gave.
        numbers (`np.ndarray` of shape `(num_texts,)`): The number of each text's prompt, from 0.

    Returns:
        `dict`: numbers of prompts and texts, `is_enough`, and by rule under `rules`: `speedup` over plain decoding, the
        mean over prompts; `tokens_per_second`, all tokens over all seconds; `over_best_constant` and
        `of_best_per_text`, ratios of either, where that rule is there; `share_slow`, of prompts below `SLOW` times
        plain; all as dicts of `estimate`, `low` and `high`; and `least_speedup` of a prompt.
    """
    speedups = {rule: by_prompt(seconds[PLAIN] / own, numbers) for rule, own in seconds.items()}
    columns = {"tokens": by_prompt(tokens, numbers, total=True)}
    statistics: dict[tuple[str, ...], Callable[[Means], np.ndarray]] = {}
    references = {"over_best_constant": BEST_CONSTANT, "of_best_per_text": BEST_PER_TEXT}
    for rule, own in seconds.items():
        columns[f"{rule} seconds"] = by_prompt(own, numbers, total=True)
        columns[f"{rule} speedup"] = speedups[rule]
        columns[f"{rule} slow"] = (speedups[rule] < SLOW).astype(float)
        statistics[rule, "speedup"] = _mean(f"{rule} speedup")
        statistics[rule, "tokens_per_second"] = _ratio("tokens", f"{rule} seconds")
        statistics[rule, "share_slow"] = _mean(f"{rule} slow")
        for name, reference in references.items():
            if reference in seconds:
                statistics[rule, name, "speedup"] = _ratio(f"{rule} speedup", f"{reference} speedup")
                # The tokens are the same.
                statistics[rule, name, "tokens_per_second"] = _ratio(f"{reference} seconds", f"{rule} seconds")
    rules: dict[str, dict[str, Any]] = {}
    for key, interval in bootstrap_intervals(columns, statistics, num_resamples=num_resamples, seed=seed).items():
        place = rules.setdefault(key[0], {})
        for part in key[1:-1]:
            place = place.setdefault(part, {})
        place[key[-1]] = asdict(interval)
    for rule, told in rules.items():
        told["least_speedup"] = float(speedups[rule].min())
    num_prompts = int(numbers.max()) + 1
    return {
        "num_prompts": num_prompts,
        "num_texts": len(tokens),
        "is_enough": num_prompts >= ENOUGH_PROMPTS,
        "rules": rules,
    }


def _mean(column: str) -> Callable[[Means], np.ndarray]:
    return lambda means: means[column]


def _ratio(a: str, b: str) -> Callable[[Means], np.ndarray]:
    return lambda means: means[a] / means[b]


__all__ = [
    "BEST_CONSTANT",
    "BEST_PER_STEP",
    "BEST_PER_TEXT",
    "FLIGHT",
    "LOOKUP_FLIGHT",
    "PLAIN",
    "SLOW",
    "TRAINING_SIZE",
    "Setup",
    "Simulated",
    "best_constant",
    "is_in_seconds",
    "judge",
    "judge_rules",
    "predicted_curves",
    "seconds_by_size",
    "simulate",
]

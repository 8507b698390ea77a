"""What a policy is worth on prompts that no training saw, next to what needs no policy and to what none can beat.

Everything is computed from a sweep: how decoding went at every block size on one and the same text. All rules are
compared on the same resampled prompts. Knows nothing of terminals and files.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .costs import CostTable
from .evaluation_rules import ALL, GROUPS, Comparison, Judged, ordered_groups
from .modeling_blockpilot import BlockPilotPolicy
from .policy_training import window
from .sweep import SweepRow
from .texts import prompt_numbers


def comparisons_of(
    policies: Mapping[str, BlockPilotPolicy], block_sizes: Sequence[int], training_block_size: int
) -> list[Comparison]:
    """
    One for the paper's window where the sweep has it, and one for every other set of candidates that a policy has;
    without policies, one for all sizes of the sweep.

    Args:
        block_sizes (`Sequence[int]`): Those of the sweep.

    Raises:
        `ValueError`: if a policy has a candidate that was not swept.
    """
    around = tuple(window(training_block_size))
    sets: dict[tuple[int, ...], dict[str, BlockPilotPolicy]] = {around: {}} if set(around) <= set(block_sizes) else {}
    for name, policy in policies.items():
        candidates = tuple(policy.config.block_sizes)
        if missing := sorted(set(candidates) - set(block_sizes)):
            raise ValueError(
                f"Policy {name!r} chooses from {list(candidates)}, and the sweep has no block sizes {missing}. Sweep "
                "with all of its candidates."
            )
        sets.setdefault(candidates, {})[name] = policy
    if not policies:
        sets.setdefault(tuple(block_sizes), {})
    return [Comparison(sizes, members) for sizes, members in sets.items()]


def overlapping(rows: Sequence[SweepRow], known: Collection[str]) -> list[SweepRow]:
    """
    Rows whose prompt, or another turn of it, was trained on.

    Args:
        known (`Collection[str]`): The first 16 hex digits of prompt hashes, as training puts them on record.
    """
    numbers = prompt_numbers(rows)
    seen = {number for number, row in zip(numbers, rows, strict=True) if row.prompt_hash[:16] in known}
    return [row for number, row in zip(numbers, rows, strict=True) if number in seen]


def evaluate(
    rows: Sequence[SweepRow],
    train_rows: Sequence[SweepRow],
    comparisons: Sequence[Comparison],
    *,
    block_sizes: Sequence[int],
    training_block_size: int,
    costs: CostTable | None = None,
    groups: Mapping[str, Sequence[str]] = GROUPS,
    num_resamples: int = 10_000,
    num_shuffles: int = 1000,
    seed: int = 0,
    progress: Callable[[list[Any], str], Iterable[Any]] = lambda items, name: items,
) -> list[dict[str, Any]]:
    """
    Judge every rule on `rows`, apart for every temperature.

    Args:
        rows (`Sequence[SweepRow]`): Held-out texts with at least one step each.
        train_rows (`Sequence[SweepRow]`): Where the best constant size is chosen: on texts of the same temperature if
            it has any, else on all.
        comparisons (`Sequence[Comparison]`): Candidates, and the policies that choose from them.
        block_sizes (`Sequence[int]`): All sizes of both sweeps.
        training_block_size (`int`): The size that the drafter was trained for, one of `block_sizes`.
        costs ([`CostTable`], *optional*): Without it, or for candidates that it does not price, only acceptance lengths
            are told.
        groups (`Mapping[str, Sequence[str]]`): Categories by reporting group.
        progress (`Callable`, *optional*): Wraps the list of what is resampled, for a bar.

    Returns:
        `list[dict]`: for every temperature its `temperature`, numbers of prompts and texts, `tau_by_block_size` by
        group, and the `comparisons`: candidates, best constants, the `groups` with every rule, and the `shuffled`
        control, against the best constant. Figures are dicts of `estimate`, `low` and `high`; shares of a gain also
        have `is_defined`, see [`has_clear_gain`].

    Raises:
        `ValueError`: without texts on either side, or if the training block size was not swept.
    """
    if not rows or not train_rows:
        raise ValueError(f"An evaluation needs texts on both sides, got {len(rows)} and {len(train_rows)} to train on.")
    if training_block_size not in block_sizes:
        raise ValueError(
            f"The sweep has no block size {training_block_size}, for which its drafter was trained, only "
            f"{list(block_sizes)}. Sweep with it: the other rules are compared with it."
        )
    jobs: list[tuple[dict[str, Any], Judged, str]] = []
    results = []
    for temperature in sorted({row.temperature for row in rows}):
        chosen_on = [row for row in train_rows if row.temperature == temperature] or list(train_rows)
        judged = Judged(
            [row for row in rows if row.temperature == temperature],
            chosen_on,
            comparisons,
            tuple(block_sizes),
            training_block_size,
            costs,
        )
        numbers = prompt_numbers(judged.rows)
        result: dict[str, Any] = {
            "temperature": temperature,
            "num_prompts": len(set(numbers)),
            "num_texts": len(judged.rows),
            "best_constant_chosen_on": {
                "temperatures": sorted({row.temperature for row in chosen_on}),
                "num_prompts": len(set(prompt_numbers(chosen_on))),
            },
            "tau_by_block_size": {},
            "comparisons": [
                {**judged.described(i), "groups": {}, "shuffled": judged.shuffled(i, num_shuffles, seed)}
                for i in range(len(comparisons))
            ],
        }
        results.append(result)
        jobs += [(result, judged, name) for name in ordered_groups(judged.groups(groups), groups)]
    for result, judged, name in progress(jobs, "bootstrap"):
        of_rows = np.array([name in (ALL, group) for group in judged.groups(groups)])
        judged.judge(result, name, of_rows, num_resamples, seed)
    return results


__all__ = ["comparisons_of", "evaluate", "overlapping"]

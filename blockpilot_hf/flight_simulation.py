"""What decisions would have cost on texts that are known, in a cost table's seconds: flights, fixed sizes, oracles.

Decoding at any widths yields the same text, so a sweep over all positions ([`SweepRow`] with `accepted_at` and
`confidence_at`) tells what every step of a flight would have accepted, without a model. All rules are priced alike: at
the context length of the middle of the answer, prefill and policy aside. Knows nothing of files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .costs import CostTable
from .flight import COPY_WIDTH, Flight
from .lookup import Lookup
from .parity import first_difference
from .sweep import SweepRow


@dataclass(frozen=True)
class SimulatedFlight:
    """
    Args:
        seconds (`float`): Of all steps after the prefill.
        steps (`tuple[tuple[int, int, int], ...]`):
            Drafted block size, 1 without a draft, verified width and accepted count of each.
    """

    seconds: float
    steps: tuple[tuple[int, int, int], ...]


def answer_costs(row: SweepRow, costs: CostTable) -> CostTable:
    """The table at the one context length that a text is priced at."""
    return costs.at(row.num_prompt_tokens + row.num_new_tokens // 2)


def fixed_seconds(row: SweepRow, costs: CostTable, block_size: int) -> float:
    """Seconds at one block size; those of plain decoding at 1."""
    return row.num_steps(block_size) * answer_costs(row, costs).step_s(block_size)


def fly(
    row: SweepRow,
    costs: CostTable,
    block_sizes: Sequence[int],
    *,
    prior: Mapping[int, float] | None = None,
    max_new_tokens: int | None = None,
    lookup: bool = False,
) -> SimulatedFlight:
    """
    A flight over a text.

    Args:
        block_sizes (`Sequence[int]`): Candidates; those above 1 must have been swept.
        prior (`Mapping[int, float]`, *optional*): See [`Flight`].
        max_new_tokens (`int`, *optional*): The budget of the call, which the decisions know; by default none.
        lookup (`bool`, *optional*, defaults to `False`): Whether steps may copy from the text so far.

    Raises:
        `ValueError`: for a row without positions, or to copy from, without its ids, and for a size that was not swept.
    """
    accepted_at, confidence_at = _positions(row, block_sizes)
    costs = answer_costs(row, costs)
    flight = Flight(costs, block_sizes, prior=prior)
    num_left, position, steps = row.num_new_tokens - 1, 0, []
    budget = (max_new_tokens or 2**31) - 1
    length = costs.context_lengths[0]
    known = Lookup()
    answer_ids: tuple[int, ...] = ()
    if lookup:
        prompt_ids, answer_ids = _ids(row)
        known.extend((*prompt_ids, answer_ids[0]))
    while position < num_left:
        remaining, size, width, reach = budget - position, 1, 1, 0
        match_length, copied = known.find(min(COPY_WIDTH, remaining) - 1)
        if match_length:
            width = flight.copy_width(match_length, len(copied) + 1, remaining, length)
            difference = first_difference(copied, answer_ids[position + 1 :])
            reach = len(copied) if difference is None else difference
        if width == 1:
            size, _ = flight.draft_size(remaining, length)
            if size > 1:
                width = flight.verify_width(confidence_at[size][position], min(size, remaining))
                reach = accepted_at[size][position]
        # The last token is always the target's own pick.
        accepted = min(reach, width - 1, num_left - position - 1)
        flight.learn(width, accepted, was_drafted=width > 1 or size > 1)
        steps.append((size, width, accepted))
        if lookup:
            known.extend(answer_ids[position + 1 : position + accepted + 2])
        position += accepted + 1
    return SimulatedFlight(flight.spent_s, tuple(steps))


def least_seconds(row: SweepRow, costs: CostTable, block_sizes: Sequence[int]) -> float:
    """
    The per-step oracle: the least that any choice of sizes and widths could take, knowing what will be accepted.

    Raises:
        `ValueError`: as in [`fly`].
    """
    accepted_at, _ = _positions(row, block_sizes)
    costs = answer_costs(row, costs)
    sizes = [size for size in block_sizes if size > 1]
    draft_s = {size: costs.draft_at(size) for size in sizes}
    verify_s = [0.0, *(costs.verify_at(width) for width in range(1, max(sizes, default=1) + 1))]
    num_left = row.num_new_tokens - 1
    least = [0.0] * (num_left + 1)  # from each position to the end
    for position in reversed(range(num_left)):
        options = [verify_s[1] + least[position + 1]]
        for size in sizes:
            reach = min(accepted_at[size][position], num_left - position - 1)
            # Verifying more than what is accepted only costs.
            options += [
                draft_s[size] + verify_s[accepted + 1] + least[position + accepted + 1]
                for accepted in range(1, reach + 1)
            ]
        least[position] = min(options)
    return least[0]


def _ids(row: SweepRow) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if row.prompt_ids is None or row.answer_ids is None:
        raise ValueError(
            f"The sweep of text {row.id!r} does not hold the text, so nothing can be copied from it. Sweep again with "
            "`--all-positions`, or fly without `lookup`."
        )
    return row.prompt_ids, row.answer_ids


def _positions(
    row: SweepRow, block_sizes: Sequence[int]
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[tuple[float, ...], ...]]]:
    if row.accepted_at is None or row.confidence_at is None:
        raise ValueError(
            f"The sweep of text {row.id!r} has no data of single positions. Sweep again with `--all-positions`."
        )
    missing = sorted({size for size in block_sizes if size > 1} - row.accepted_at.keys())
    if missing:
        raise ValueError(f"Block sizes {missing} were not swept, only {sorted(row.accepted_at)}.")
    return row.accepted_at, row.confidence_at


__all__ = ["SimulatedFlight", "answer_costs", "fixed_seconds", "fly", "least_seconds"]

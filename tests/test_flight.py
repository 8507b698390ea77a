"""The decision in flight, played on drafts of known worth: where it ends up, and what it may cost."""

import itertools
import math
import random

import pytest

from blockpilot_hf.costs import CostTable
from blockpilot_hf.flight import (
    COPY_WIDTH,
    REGRET_PASSES,
    REGRET_SHARE,
    Belief,
    Flight,
    copy_log_odds,
    log_odds_of_curve,
)

SIZES = (2, 4, 8, 16)


def table(slope, draft=0.05, slope_draft=0.0):
    """A plain pass costs 1; `slope` for every further position."""
    widths = (1, *SIZES)
    return CostTable(
        context_lengths=(0, 512),
        verify_s={width: (1 + slope * (width - 1),) * 2 for width in widths},
        draft_s={size: (draft + slope_draft * size,) * 2 for size in SIZES},
    )


FLAT, STEEP = table(0.0, draft=0.001), table(0.25)


def play(flight, is_accepted, num_tokens, *, confidence=None, context_length=10):
    """
    An answer of `num_tokens`, drafted token `j` after token `position` right or not by `is_accepted(position, j)`.
    Returns the drafted size and the verified width of every step, 1 and 1 for plain ones.
    """
    steps, position = [], 0
    while position < num_tokens:
        remaining = num_tokens - position
        size, _ = flight.draft_size(remaining, context_length + position)
        width, accepted = 1, 0
        if size > 1:
            given = [confidence(position, j) if confidence else 0.5 for j in range(size - 1)]
            width = flight.verify_width(given, min(size, remaining))
            while accepted < width - 1 and is_accepted(position, accepted):
                accepted += 1
        flight.learn(width, accepted, was_drafted=size > 1)
        steps.append((size, width))
        position += accepted + 1
        assert flight.spent_s <= flight.plain_s + REGRET_PASSES * _plain(flight) + REGRET_SHARE * flight.plain_s + 1e-9
    return steps


def _plain(flight):
    return flight.costs.verify_at(1, 0)


def always(position, j):
    return True


def never(position, j):
    return False


def by_chance(chance, seed=0):
    """Independent of how it is asked."""
    return lambda position, j: random.Random(f"{seed} {position} {j}").random() < chance


# --- where it ends up ---


@pytest.mark.parametrize("costs", [FLAT, table(0.03), table(0.1)])
def test_a_perfect_drafter_ends_in_the_largest_block(costs):
    steps = play(Flight(costs, SIZES), always, 400)
    assert set(steps[len(steps) // 2 : -1]) == {(16, 16)}


@pytest.mark.parametrize("costs", [table(0.03), table(0.1), STEEP])
def test_a_useless_drafter_ends_in_plain_decoding(costs):
    flight = Flight(costs, SIZES)
    steps = play(flight, never, 400)
    assert steps[:20] != [(1, 1)] * 20  # it was tried
    late = steps[100:]
    assert sum(step == (1, 1) for step in late) >= 0.97 * len(late)
    assert flight.spent_s <= 1.02 * flight.plain_s + REGRET_PASSES * _plain(flight)


def test_flat_costs_reproduce_the_choice_by_acceptance_length():
    # Every size has a longer acceptance length than the one before, by ever less: the largest has the largest.
    prior = {1: 1.0, 2: 1.6, 4: 2.1, 8: 2.35, 16: 2.4}
    steps = play(Flight(FLAT, SIZES, prior=prior), by_chance(0.6), 300, confidence=lambda p, j: 0.6)
    full = [step for step in steps[:-10] if step == (16, 16)]
    assert len(full) >= 0.95 * len(steps[:-10])


def test_steep_costs_shrink_what_is_drafted_and_verified():
    taken = {}
    for name, costs in (("flat", FLAT), ("middle", table(0.08)), ("steep", table(0.2))):
        steps = play(Flight(costs, SIZES), by_chance(0.7), 600, confidence=lambda p, j: 0.7)
        taken[name] = sum(width for _, width in steps) / len(steps)
    assert taken["flat"] > taken["middle"] + 1 > taken["steep"] + 1


def test_drafting_dear_by_size_shrinks_the_drafted_block_and_not_only_what_is_verified():
    costs = table(0.02, draft=0.0, slope_draft=0.08)
    steps = play(Flight(costs, SIZES), by_chance(0.5), 400, confidence=lambda p, j: 0.5)
    drafted = [size for size, _ in steps[20:-10] if size > 1]
    assert drafted and max(drafted) <= 4


def test_where_the_text_turns_easy_drafting_comes_back_and_where_it_turns_hard_it_goes():
    def turning(position, j):
        return 300 <= position < 700

    steps = play(Flight(table(0.05), SIZES), turning, 1400)
    sizes, position = {}, 0
    for size, width in steps:
        sizes[position] = size
        position += 1 if size == 1 else (width if turning(position, 0) else 1)
    inside = [size for at, size in sizes.items() if 600 <= at < 690]
    outside = [size for at, size in sizes.items() if at >= 900]
    assert set(inside) == {16}
    assert sum(size == 1 for size in outside) >= 0.95 * len(outside)


# --- what the draft's confidence does ---


def test_only_the_confident_beginning_of_a_draft_is_verified():
    flight = Flight(table(0.03), SIZES)
    size, _ = flight.draft_size(100, 10)
    flight._drafted, size = 16, 16
    flight.spent_s = -100.0  # the budget is no matter here
    assert flight.verify_width([0.95] * 3 + [0.02] * 12, size) == 4
    assert flight.verify_width([0.99] * 15, size) == 16
    assert flight.verify_width([0.99] * 15, 6) == 6
    assert flight.verify_width([0.01] * 15, size) == 1


def test_an_overconfident_drafter_is_believed_less_and_less():
    flight = Flight(table(0.1), SIZES)
    flight.draft_size(100, 10)
    flight._drafted = 16
    before = flight.verify_width([0.8] * 15, 16)
    for _ in range(20):
        flight.spent_s = 0.0  # as often as it likes
        flight.verify_width([0.8] * 15, 16)
        flight.learn(2, 0, was_drafted=True)
    flight.spent_s = 0.0
    assert flight.verify_width([0.8] * 15, 16) < before


@pytest.mark.parametrize("value", [0.0, 1.0, math.nan])
def test_any_confidence_gives_a_width(value):
    flight = Flight(table(0.1), SIZES)
    size, _ = flight.draft_size(100, 10)
    assert 1 <= flight.verify_width([value] * 15, size) <= size


# --- no regret ---


@pytest.mark.parametrize("seed", range(30))
def test_an_answer_never_costs_more_than_plain_decoding_and_the_budget(seed):
    # `play` checks it after every step.
    drawn = random.Random(seed)
    costs = table(drawn.choice([0.0, 0.02, 0.1, 0.5, 2.0]), draft=drawn.choice([0.01, 0.3, 1.5, 5.0]))
    chance, sure = drawn.random(), drawn.random()
    prior = drawn.choice([None, {2: 1.9, 8: 7.5}, {2: 1.01, 4: 1.02}])
    flight = Flight(costs, SIZES, prior=prior)
    play(flight, by_chance(chance, seed), 200, confidence=lambda p, j: sure)


def test_an_adversary_that_rejects_whatever_is_verified_gets_no_more_than_the_budget():
    flight = Flight(table(0.3, draft=0.5), SIZES, prior={2: 2.0, 16: 16.0})
    play(flight, never, 1000, confidence=lambda p, j: 0.999)


# --- its account and its inputs ---


def test_the_same_past_gives_the_same_decisions():
    first, second = (
        play(Flight(table(0.07), SIZES), by_chance(0.6, 3), 200, confidence=lambda p, j: 0.3 + 0.1 * (p % 5))
        for _ in range(2)
    )
    assert first == second and len(set(first)) > 2


def test_the_account_is_in_the_tables_seconds_at_the_length_of_the_context():
    costs = CostTable(
        context_lengths=(0, 640),
        verify_s={1: (1.0, 2.0), 2: (1.5, 3.0)},
        draft_s={2: (0.25, 0.5)},
    )
    flight = Flight(costs, [2])
    flight.draft_size(10, 640)
    flight._drafted = 2
    flight.verify_width([0.9], 2)
    flight.learn(2, 1, was_drafted=True)
    assert flight.spent_s == 3.5 and flight.plain_s == 4.0
    flight.draft_size(10, 0)
    flight.learn(1, 0, was_drafted=False)
    assert flight.spent_s == 4.5 and flight.plain_s == 5.0


def test_nothing_is_drafted_for_a_last_token_or_beyond_what_fits():
    assert Flight(FLAT, SIZES).draft_size(1, 10)[0] == 1
    assert Flight(FLAT, SIZES).draft_size(100, 10, largest=1)[0] == 1
    assert Flight(FLAT, SIZES).draft_size(100, 10, largest=5)[0] == 4
    assert Flight(FLAT, [1]).draft_size(100, 10)[0] == 1


def test_looks_come_ever_more_seldom():
    flight = Flight(table(0.1), SIZES)
    steps = play(flight, never, 3000)
    looks = [i for i, (size, _) in enumerate(steps) if size > 1]
    # At first, as often as the budget allows, until the drafter is known to be useless; then half as often each time.
    later = [b - a for a, b in itertools.pairwise(looks)][-5:]
    assert len(looks) < 40 and all(b > 1.8 * a for a, b in itertools.pairwise(later))


# --- beliefs ---


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
def test_a_belief_comes_to_the_share_of_outcomes(chance):
    belief, drawn = Belief(1.0), random.Random(0)
    means = []
    for _ in range(3000):
        belief.update(0.0, drawn.random() < chance)
        means.append(belief.mean)
    mean = sum(means[500:]) / len(means[500:])
    assert 1 / (1 + math.exp(-mean)) == pytest.approx(chance, abs=0.05)


def test_a_belief_without_evidence_is_its_prior_and_narrows_with_it():
    belief = Belief(0.8)
    assert belief.mean == 0
    moves = []
    for _ in range(5):
        before = belief.mean
        belief.update(-belief.mean, True)  # as surprising every time
        moves.append(belief.mean - before)
    assert moves == sorted(moves, reverse=True) and moves[-1] > 0
    wide = Belief(2.0)
    wide.update(0.0, True)
    assert wide.mean > moves[0]


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 1.0])
def test_the_log_odds_of_a_curve_give_the_curve_back(chance):
    lengths = {size: sum(chance**k for k in range(size)) for size in range(1, 17)}
    found = log_odds_of_curve(lengths, 16)
    survival, length = 1.0, 1.0
    for size, log_odds in enumerate(found, 2):
        survival *= 1 / (1 + math.exp(-log_odds))
        length += survival
        assert length == pytest.approx(lengths[size], abs=0.02)


def test_a_curve_with_gaps_or_a_dip_still_gives_log_odds_for_every_place():
    found = log_odds_of_curve({2: 1.5, 8: 1.4}, 12)
    assert len(found) == 11 and all(math.isfinite(value) for value in found)


# --- copies ---


def copy_play(flight, is_right, num_tokens, *, match_length=4):
    """As [`play`], with a copy of 15 tokens on offer at every step, each right or not; verified widths of copies."""
    widths, position = [], 0
    while position < num_tokens:
        remaining = num_tokens - position
        width, accepted, size = flight.copy_width(match_length, 16, remaining, 10 + position), 0, 1
        if width > 1:
            while accepted < width - 1 and is_right(position, accepted):
                accepted += 1
        else:
            size, _ = flight.draft_size(remaining, 10 + position)
        verified = width if width > 1 else flight.verify_width([0.5] * (size - 1), min(size, remaining))
        flight.learn(verified, accepted, was_drafted=verified > 1 or size > 1)
        widths.append(width)
        position += accepted + 1
        assert flight.spent_s <= flight.plain_s + REGRET_PASSES * _plain(flight) + REGRET_SHARE * flight.plain_s + 1e-9
    return widths


def test_copies_that_are_right_are_taken_whole_before_any_draft():
    assert set(copy_play(Flight(table(0.02), SIZES), always, 160)[2:-1]) == {16}


def test_copies_that_are_never_right_are_given_up_within_the_budget():
    for costs in (table(0.03), table(0.1), STEEP):  # where they cost something
        flight = Flight(costs, SIZES)
        widths = copy_play(flight, never, 400)
        assert max(widths[100:]) <= 3 and sum(width > 1 for width in widths[200:]) < 0.2 * 200, costs
        assert flight.spent_s < 1.045 * flight.plain_s


def test_wide_copies_are_narrowed_to_what_is_right():
    widths = copy_play(Flight(table(0.1), SIZES), lambda position, j: j < 2, 300)
    assert all(width <= 6 for width in widths[40:]) and any(width > 1 for width in widths[40:])


def test_a_copy_after_a_longer_match_is_believed_in_further():
    taken = [Flight(table(0.1), SIZES).copy_width(length, 16, 100, 10) for length in (1, 2, 4, 8, 16, 32)]
    assert taken == sorted(taken) and taken[0] < taken[-1]
    chances = [1 / (1 + math.exp(-copy_log_odds(length))) for length in (1, 2, 4, 12)]
    assert [round(chance, 1) for chance in chances] == [0.3, 0.5, 0.7, 0.9]


def test_a_draft_that_gives_more_goes_before_a_copy():
    sure = {2: 2.0, 16: 15.5}  # the policy is sure of drafts
    assert Flight(table(0.02, draft=0.01), SIZES, prior=sure).copy_width(1, 16, 100, 10) == 1
    assert Flight(table(0.02, draft=0.01), SIZES, prior={2: 1.0, 16: 1.0}).copy_width(1, 16, 100, 10) > 1


def test_copies_keep_to_what_is_left_and_to_what_there_is():
    flight = Flight(FLAT, SIZES)
    assert flight.copy_width(32, 16, 3, 10) == 3 and flight.copy_width(32, 5, 100, 10) == 5
    assert flight.copy_width(32, 16, 1, 10) == 1 and flight.copy_width(32, 99, 100, 10) == COPY_WIDTH
    assert Flight(FLAT, []).copy_width(32, 16, 100, 10) == COPY_WIDTH  # drafter or not


def test_what_is_copied_says_nothing_of_drafts():
    flight, other = Flight(table(0.03), SIZES), Flight(table(0.03), SIZES)
    for _ in range(20):
        width = flight.copy_width(8, 16, 100, 10)
        flight.learn(width, width - 1, was_drafted=width > 1)
    assert flight.draft_size(100, 10) == other.draft_size(100, 10)
    assert flight._place_belief.mean == 0 and flight._copy_belief.mean > 0

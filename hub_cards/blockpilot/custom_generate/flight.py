"""The decision in flight: before every step how many tokens to copy or to draft, after a draft how many to verify.

Drafting is worth its seconds where drafted tokens are accepted, and how often they are shows while the answer grows. A
[`Flight`] starts from a prior (what a policy predicts for the prompt, or what is common), takes every accepted and
every rejected token as evidence, and picks what commits the most tokens per second under a cost table: a draft, tokens
copied from the text so far ([`Lookup`]), which take no pass to propose, or neither. In plain stretches it looks again
now and then. In the table's seconds an answer never costs more than plain decoding plus a small budget: what could
exceed it is not tried.

The contract: a decision is a function of the table, the prior, the text so far, accepted lengths of the past and what
the drafter says of the draft at hand. It reads no clock, so the same seed gives the same trace, and it never looks at a
token drawn in the step at hand, so sampling stays exact also where drafted tokens are drawn from the drafter's
distribution.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

# Where nothing is known of the prompt: how often a drafted token is accepted when those before it were, as log-odds,
# and how far prompts differ in that (a standard deviation).
PRIOR_ACCEPTANCE = 0.0
PRIOR_SPREAD = 1.0
# Of the evidence, the share that is left one drafted token later: texts change as they go.
_MEMORY = 0.97
# How far prompts differ from what the drafter's confidence says. On average drafters are as sure as they are right.
_CONFIDENCE_SPREAD = 0.7
# How far texts differ in how often a copied token is accepted after a match of some length, see `copy_log_odds`.
_COPY_SPREAD = 1.0
# Of a copy at most so many positions are verified, the anchor included: cost tables are measured up to there.
COPY_WIDTH = 16
# Plain steps before drafting is looked at again; twice as many each time.
_FIRST_LOOK_AFTER = 8
# What an answer may cost beyond plain decoding: passes of one token, and a share of the answer's own. With these an
# answer of 41 tokens and more stays above 0.95 times plain decoding in the table's seconds, and long ones near 0.98.
# Passes, because what a text is worth shows in its first steps: with 0.3 of one, answers of 24 and 48 tokens were up to
# 10 % slower.
REGRET_PASSES = 1.3
REGRET_SHARE = 0.02
# Costs are looked up anew when the context has grown by so many tokens.
_CONTEXT_STEP = 64

PLAIN = "plain decoding pays most"
NO_ROOM = "the budget beyond plain decoding is spent"


class Flight:
    """
    The decisions of one answer.

    Args:
        costs ([`CostTable`]): Seconds of passes.
        block_sizes (`Sequence[int]`): Candidates. Plain decoding is always one.
        prior (`Mapping[int, float]`, *optional*):
            Acceptance length by block size that is expected of this prompt, as a curve head predicts it.

    Attributes:
        spent_s (`float`): Table seconds of the steps so far.
        plain_s (`float`): Table seconds that plain decoding of the same tokens takes.
    """

    def __init__(self, costs: Any, block_sizes: Sequence[int], *, prior: Mapping[int, float] | None = None):
        self.costs = costs
        self.block_sizes = sorted({size for size in block_sizes if size > 1})
        self.spent_s = self.plain_s = 0.0
        longest = max(self.block_sizes, default=1)
        self._by_place = log_odds_of_curve(prior, longest) if prior else [PRIOR_ACCEPTANCE] * (longest - 1)
        self._place_belief = Belief(PRIOR_SPREAD)
        self._confidence_belief = Belief(_CONFIDENCE_SPREAD)
        self._by_confidence: list[float] = []  # log-odds of acceptance of the tokens of the draft at hand
        self._copy_belief = Belief(_COPY_SPREAD)
        self._match = 0  # length of the match that the step at hand copies after; 0 where it does not
        self._drafted = 1  # the size of the latest block
        self._rate = 0.0
        self._plain_steps, self._look_after = 0, _FIRST_LOOK_AFTER
        self._priced_at = -1
        self._verify_s: list[float] = []  # by width
        self._draft_s: dict[int, float] = {}

    def draft_size(self, remaining: int, context_length: int, *, largest: int | None = None) -> tuple[int, str]:
        """
        The block size of the next step, and why it is 1 where it is.

        Args:
            remaining (`int`): Tokens left in the budget.
            context_length (`int`): Tokens before the block.
            largest (`int`, *optional*): No larger block fits.
        """
        self._price(context_length)
        self._match = 0
        sizes = self._sizes(largest)
        if remaining < 2:
            return 1, "end of the token budget"
        self._rate, size = self._best(sizes, remaining)
        is_look = size == 1
        if is_look:
            if self._plain_steps < self._look_after or not sizes:
                return 1, PLAIN
            size = min(sizes, key=lambda size: self._draft_s[size] + self._verify_s[2])
        if self._excess_s(size, 2) > self.room_s:
            return 1, NO_ROOM
        if is_look:
            self._look_after *= 2
        self._plain_steps, self._drafted = 0, size
        return size, ""

    def copy_width(
        self, match_length: int, most: int, remaining: int, context_length: int, *, largest: int | None = None
    ) -> int:
        """
        How many positions to verify of a copy, the anchor included; 1 where a draft or a plain pass is worth more.

        Args:
            match_length (`int`): Tokens before the copy that are the same as those before what is copied.
            most (`int`): The most that may be verified, the anchor included.
            remaining, context_length, largest: As in [`draft_size`], which is asked next where this gives 1.
        """
        self._price(context_length)
        self._match = 0
        best, _ = self._best(self._sizes(largest), remaining)
        best_width, expected, survival = 1, 1.0, 1.0
        for width in range(2, min(most, remaining, COPY_WIDTH) + 1):
            survival *= _sigmoid(copy_log_odds(match_length + width - 2) + self._copy_belief.mean)
            expected += survival
            if self._verify_s[width] - self._verify_s[1] > self.room_s:
                break
            if expected / self._verify_s[width] > best:
                best, best_width = expected / self._verify_s[width], width
        if best_width > 1:
            self._match = match_length
        return best_width

    def verify_width(self, confidence: Sequence[float], width: int) -> int:
        """
        How many positions of the draft to verify: one more as long as that commits tokens at a better rate than going
        on without it.

        Args:
            confidence (`Sequence[float]`): Of the drafter in each drafted token, see [`DraftBlock`].
            width (`int`): The most that may be verified, the anchor included.
        """
        shift = self._confidence_belief.mean
        self._by_confidence = [_log_odds(value) for value in confidence]
        best, best_width = 1 - self._rate * self._verify_s[1], 1
        expected = survival = 1.0
        for j, log_odds in enumerate(self._by_confidence[: width - 1]):
            survival *= _sigmoid(log_odds + shift)
            expected += survival
            if self._excess_s(self._drafted, j + 2) > self.room_s:
                break
            gain = expected - self._rate * self._verify_s[j + 2]
            if gain > best:
                best, best_width = gain, j + 2
        return best_width

    def learn(self, verify_width: int, num_accepted: int, *, was_drafted: bool) -> None:
        """
        Take in how the step at hand went.

        Args:
            verify_width (`int`): Positions that the target checked, the anchor included.
            num_accepted (`int`): Drafted tokens that it accepted.
            was_drafted (`bool`): Whether a block was drafted or copied at all.
        """
        self.plain_s += (num_accepted + 1) * self._verify_s[1]
        self.spent_s += self._verify_s[verify_width]
        if not was_drafted:
            self._plain_steps += 1
            return
        if self._match:
            for j in range(min(num_accepted + 1, verify_width - 1)):
                self._copy_belief.update(copy_log_odds(self._match + j), j < num_accepted)
            return
        self.spent_s += self._draft_s[self._drafted]
        for j in range(min(num_accepted + 1, verify_width - 1)):
            self._place_belief.update(self._by_place[j], j < num_accepted)
            self._confidence_belief.update(self._by_confidence[j], j < num_accepted)
        if num_accepted == verify_width - 1 < len(self._by_confidence):
            # Left out because it was not believed in. Without that place only tokens that look right would count.
            chance = _sigmoid(self._by_confidence[num_accepted] + self._confidence_belief.mean)
            self._place_belief.update(self._by_place[num_accepted], chance)

    @property
    def room_s(self) -> float:
        """Table seconds that may still be lost against plain decoding of the tokens so far."""
        allowed = REGRET_PASSES * self._verify_s[1] + (1 + REGRET_SHARE) * self.plain_s
        return allowed - self.spent_s

    def _sizes(self, largest: int | None) -> list[int]:
        return [size for size in self.block_sizes if largest is None or size <= largest]

    def _excess_s(self, block_size: int, verify_width: int) -> float:
        """What a step loses against plain decoding if nothing is accepted."""
        return self._draft_s[block_size] + self._verify_s[verify_width] - self._verify_s[1]

    def _best(self, sizes: Sequence[int], remaining: int) -> tuple[float, int]:
        """The largest expected tokens per second of a step, and the block size that has it, by places alone."""
        best, best_size = 1 / self._verify_s[1], 1
        shift = self._place_belief.mean
        expected, survival = [1.0], 1.0  # by width - 1
        for log_odds in self._by_place:
            survival *= _sigmoid(log_odds + shift)
            expected.append(expected[-1] + survival)
        for size in sizes:
            for width in range(2, min(size, remaining) + 1):
                rate = expected[width - 1] / (self._draft_s[size] + self._verify_s[width])
                if rate > best:
                    best, best_size = rate, size
        return best, best_size

    def _price(self, context_length: int) -> None:
        step = context_length // _CONTEXT_STEP
        if step == self._priced_at:
            return
        self._priced_at = step
        length = step * _CONTEXT_STEP
        longest = max([*self.block_sizes, COPY_WIDTH])
        self._verify_s = [0.0, *(self.costs.verify_at(width, length) for width in range(1, longest + 1))]
        self._draft_s = {size: self.costs.draft_at(size, length) for size in self.block_sizes}


class Belief:
    """
    A shift of log-odds, normal around `mean`, from outcomes of known log-odds: logistic regression on one unknown, one
    outcome at a time (a Newton step each), with a memory that fades.

    Args:
        spread (`float`): Standard deviation before anything was seen.
    """

    def __init__(self, spread: float):
        self.mean, self._least = 0.0, spread**-2
        self._precision = self._least

    def update(self, log_odds: float, outcome: float) -> None:
        """
        One outcome that had these log-odds before the shift.

        Args:
            outcome (`float`): 1 or 0, or the chance of 1 where it was not seen.
        """
        chance = _sigmoid(log_odds + self.mean)
        self._precision = max(self._least, self._precision * _MEMORY) + chance * (1 - chance)
        self.mean += (outcome - chance) / self._precision


def copy_log_odds(match_length: int) -> float:
    """
    The log-odds that what followed an earlier stretch of so many tokens follows again: from 0.3 after one token over
    0.5 after two and 0.7 after four to 0.9 after twelve. Fitted to answers of a small target to questions, maths, code,
    summaries and rewriting; a [`Belief`] corrects it for the text at hand.
    """
    return -0.9 + 1.25 * math.log(match_length)


def log_odds_of_curve(acceptance_lengths: Mapping[int, float], longest: int) -> list[float]:
    """
    The log-odds that a drafted token is accepted when those before it were, for each of `longest - 1` places, that
    acceptance lengths by block size stand for: those between two sizes are taken as equally often reached.
    """
    chances, known = [], sorted({1: 1.0, **acceptance_lengths}.items())
    reached = 1.0
    for (size, length), (next_size, next_length) in itertools.pairwise(known):
        each = min(max((next_length - length) / (next_size - size), 0.0), reached)
        for _ in range(next_size - size):
            chances.append(each / reached if reached > 0 else 0.0)
            reached = each
    chances += chances[-1:] * (longest - 1 - len(chances))
    return [_log_odds(chance) for chance in chances[: longest - 1]]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _log_odds(chance: float) -> float:
    chance = min(max(chance, 1e-4), 1 - 1e-4) if chance == chance else 1e-4
    return math.log(chance / (1 - chance))


__all__ = ["COPY_WIDTH", "Belief", "Flight", "copy_log_odds", "log_odds_of_curve"]

"""Flights over known texts: step for step those of decoding, and priced by the table."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from conftest import fit_drafter, make_drafter, make_prompt, make_target, plain_generate
from drafter_texts import make_text
from sweeps import make_row

from blockpilot_hf import BlockPilot
from blockpilot_hf.costs import CostTable
from blockpilot_hf.flight_simulation import fixed_seconds, fly, least_seconds
from blockpilot_hf.sweep import write_sweep

SIZES = [1, 2, 4, 8]
NUM_NEW = 70


def table(slope=0.05, draft=0.05):
    return CostTable(
        context_lengths=(64,),
        verify_s={width: (1 + slope * (width - 1),) for width in SIZES},
        draft_s={size: (draft,) for size in SIZES[1:]},
    )


@pytest.fixture(scope="module")
def pair():
    target = make_target()
    drafter = make_drafter(target)
    fit_drafter(target, drafter, plain_generate(target, make_prompt(11), max_new_tokens=NUM_NEW, do_sample=False))
    return target, drafter


@pytest.fixture(scope="module")
def rows(pair, tmp_path_factory):
    texts = [make_text(pair[0], seed=seed, length=11, num_new=NUM_NEW) for seed in (0, 1, 2)]
    return texts, write_sweep(*pair, texts, SIZES, tmp_path_factory.mktemp("sweep") / "s", position_sizes=SIZES).rows


@pytest.mark.parametrize("costs", [table(), table(0.3), table(0.02, 0.4)])
@pytest.mark.parametrize("lookup", [False, True])
def test_a_simulated_flight_takes_the_steps_of_decoding(pair, rows, costs, lookup):
    texts, swept = rows
    seen, num_copied = set(), 0
    for text in texts:
        row = next(row for row in swept if row.id == text.id)
        prior = {8: 2.0}
        found = fly(row, costs, [2, 4, 8], max_new_tokens=NUM_NEW, lookup=lookup)
        output = BlockPilot(pair[1], adapt="flight", costs=costs, lookup=lookup).generate(
            pair[0],
            torch.tensor([text.prompt_ids]),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            return_dict_in_generate=True,
        )
        steps = [tuple(step.cost_counts) for step in output.blockpilot.steps]
        assert list(found.steps) == steps
        num_copied += sum(step.source == "lookup" for step in output.blockpilot.steps)
        seen |= {size for size, _, _ in steps}
        assert fly(row, costs, [2, 4, 8], prior=prior).steps  # a prior changes decisions, never the text's length
    assert len(seen) > 1 and bool(num_copied) == lookup


def test_seconds_are_those_of_the_steps(rows):
    costs = table(0.1, 0.2)
    for row in rows[1]:
        found = fly(row, costs, [2, 4, 8])
        by_hand = sum(1.0 if size == 1 else 0.2 + 1 + 0.1 * (width - 1) for size, width, _ in found.steps)
        assert found.seconds == pytest.approx(by_hand)
        assert sum(accepted + 1 for _, _, accepted in found.steps) == NUM_NEW - 1
        assert fixed_seconds(row, costs, 1) == pytest.approx(NUM_NEW - 1)
        assert fixed_seconds(row, costs, 4) == pytest.approx(row.num_steps(4) * (0.2 + 1.3))


@pytest.mark.parametrize("seed", range(5))
def test_the_per_step_oracle_is_the_least_of_all_ways(seed):
    draw = random.Random(seed)
    num_left = 7
    accepted = {size: tuple(draw.randrange(size) for _ in range(num_left)) for size in (2, 4)}
    row = make_row(
        "text",
        {},
        num_new_tokens=num_left + 1,
        accepted_at=accepted,
        confidence_at={size: ((0.5,) * (size - 1),) * num_left for size in (2, 4)},
    )
    costs = table(draw.choice([0.0, 0.1, 0.4]), draw.choice([0.01, 0.3]))

    def ways(position):
        if position >= num_left:
            yield 0.0
            return
        options = [(1.0, 1)]
        for size, width in itertools.chain(((2, 2),), ((4, width) for width in (2, 3, 4))):
            taken = min(accepted[size][position], width - 1, num_left - position - 1)
            options.append((costs.step_s(size, verify_width=width), taken + 1))
        for seconds, tokens in options:
            for rest in ways(position + tokens):
                yield seconds + rest

    assert least_seconds(row, costs, [1, 2, 4]) == pytest.approx(min(ways(0)))


def test_no_flight_is_quicker_than_the_per_step_oracle(rows):
    for costs, row in itertools.product([table(), table(0.2), table(0.01, 0.5)], rows[1]):
        assert least_seconds(row, costs, [2, 4, 8]) <= fly(row, costs, [2, 4, 8]).seconds + 1e-9
        assert least_seconds(row, costs, [2, 4, 8]) <= fixed_seconds(row, costs, 4) + 1e-9


def test_rows_without_their_text_cannot_be_copied_from(rows):
    row = replace(rows[1][0], answer_ids=None)
    assert fly(row, table(), [2, 4, 8]).steps
    with pytest.raises(ValueError, match=r"does not hold the text, .* Sweep again with `--all-positions`"):
        fly(row, table(), [2, 4, 8], lookup=True)


def test_rows_without_positions_and_sizes_that_were_not_swept_are_named(rows):
    bare = make_row("bare", {}, num_new_tokens=5)
    with pytest.raises(ValueError, match=r"'bare' has no data of single positions.*`--all-positions`"):
        fly(bare, table(), [2])
    with pytest.raises(ValueError, match=r"Block sizes \[3\] were not swept, only \[1, 2, 4, 8\]"):
        fly(rows[1][0], table(), [2, 3])

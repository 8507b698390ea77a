"""The check finds replay and decoding equal where they are, and says where they are not."""

import pytest
import torch
from conftest import fit_drafter, make_drafter, make_prompt, make_target, plain_generate

from blockpilot_hf import BlockPilot
from blockpilot_hf import sweep_check as module
from blockpilot_hf.parity import ScriptedDrafter
from blockpilot_hf.sweep_check import ReplayCheck, check_replay

SIZES = [1, 2, 5, 8]
SAMPLING = [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}]


@pytest.fixture(scope="module")
def pair():
    target = make_target()
    drafter = make_drafter(target)
    fit_drafter(target, drafter, plain_generate(target, make_prompt(10), max_new_tokens=40, do_sample=False))
    return target, BlockPilot(drafter, False)


def check(pair, **settings):
    return check_replay(*pair, make_prompt(10), SIZES, SAMPLING, **{"max_new_tokens": 20, "seed": 4, **settings})


def test_replay_and_decoding_agree_on_greedy_and_sampled_texts(pair):
    checks, replay_s = check(pair)
    assert [one.temperature for one in checks] == [0.0, 0.7] and replay_s > 0
    for one in checks:
        assert one.differing == [] and one.other_texts == []
        assert list(one.decoded) == list(one.replayed) == SIZES
        for steps in one.decoded.values():
            assert sum(steps) + len(steps) == one.num_new_tokens - 1 == 19
        assert one.plain_s > 0 and one.decode_s > 0
    assert max(checks[0].decoded[8]) >= 2  # the drafter knows this text
    assert checks[0].decoded != checks[1].decoded


def test_it_decodes_the_text_of_plain_generate_from_the_same_seed(pair, monkeypatch):
    target, pilot = pair
    generate, seen = pilot.generate, []

    def keep(*args, **kwargs):
        output = generate(*args, **kwargs)
        seen.append(output.sequences)
        return output

    monkeypatch.setattr(pilot, "generate", keep)
    check(pair)
    for sampling, found in zip(SAMPLING, (seen[: len(SIZES)], seen[len(SIZES) :]), strict=True):
        plain = plain_generate(target, make_prompt(10), seed=4, max_new_tokens=20, **sampling)
        assert len(found) == len(SIZES) and all(torch.equal(sequence, plain) for sequence in found)


def test_a_replay_that_is_wrong_is_found(pair, monkeypatch):
    walk = module.walk

    def wrong(*args):
        found = walk(*args)
        steps = found[1][5]
        found[1][5] = (*steps[:-1], steps[-1] + 1)
        return found

    monkeypatch.setattr(module, "walk", wrong)
    checks, _ = check(pair)
    assert [one.differing for one in checks] == [[], [5]]


def test_a_pilot_that_writes_another_text_is_found(pair, monkeypatch):
    _, pilot = pair
    generate = pilot.generate

    def other(*args, block_size, **kwargs):
        output = generate(*args, block_size=block_size, **kwargs)
        if block_size == 2:
            output.sequences = output.sequences.clone()
            output.sequences[0, -1] += 1
        return output

    monkeypatch.setattr(pilot, "generate", other)
    checks, _ = check(pair)
    assert [one.other_texts for one in checks] == [one.differing for one in checks] == [[2], [2]]


def test_an_answer_that_ends_at_once_has_no_steps(pair):
    checks, _ = check(pair, max_new_tokens=1)
    assert all(one.decoded == one.replayed == {size: [] for size in SIZES} for one in checks)


def test_more_steps_of_the_same_counts_differ_too():
    one = ReplayCheck(0.0, 5, {1: [0] * 4, 4: [1, 1]}, {1: [0] * 4, 4: [1, 1, 0]}, [], 1.0, 1.0)
    assert one.differing == [4]


def test_a_drafter_that_cannot_be_replayed_is_refused_before_anything_is_decoded(pair, monkeypatch):
    target, _ = pair
    monkeypatch.setattr(type(target), "generate", None)
    with pytest.raises(ValueError, match="Replay needs a DFlash drafter"):
        check((target, BlockPilot(ScriptedDrafter(target))))

"""Timed rounds: what is run, in which order, what is kept; and what is made of known seconds."""

import json

import pytest
import torch
from conftest import constant_policy, fit_drafter, make_drafter, make_prompt, make_target, plain_generate
from sweeps import COSTS

from blockpilot_hf import BlockPilot
from blockpilot_hf.costs import CostTable
from blockpilot_hf.throughput_timing import TimedPrompt, judge_timing, steps_seconds, time_rounds

SETTINGS = {"max_new_tokens": 12, "do_sample": False}
TABLE = CostTable((16,), {1: (1.0,), 8: (1.2,)}, {2: (0.1,), 8: (0.1,)})
CALLS = {
    "size 4": {"block_size": 4},
    "policy two": {"policy": constant_policy(2), "adapt": "prompt"},
    "flight": {"policy": False, "adapt": "flight", "costs": TABLE},
}
NAMES = ["plain", *CALLS]


@pytest.fixture(scope="module")
def pair():
    target = make_target()
    drafter = make_drafter(target)
    fit_drafter(target, drafter, plain_generate(target, make_prompt(10), max_new_tokens=12, do_sample=False))
    return target, BlockPilot(drafter, False)


@pytest.fixture
def prompts():
    return [TimedPrompt(f"p{i}", "gsm8k", f"hash{i}", make_prompt(10, seed=i)) for i in range(3)]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_call_is_run_on_every_prompt_in_an_order_that_rotates(pair, prompts, tmp_path):
    path, more = tmp_path / "timed.jsonl", {"machine": {"dtype": "float32"}}
    lines = time_rounds(*pair, prompts, CALLS, path, run={"a": 1}, more=more, repeats=2, **SETTINGS)
    assert lines_of(path) == lines
    assert [(line["prompt"], line["round"]) for line in lines] == [(f"p{i}", r) for i in range(3) for r in range(2)]
    for i, line in enumerate(lines):
        assert line["order"] == NAMES[i % 4 :] + NAMES[: i % 4]
        assert list(line["calls"]) == NAMES
        assert line["run"] == {"a": 1} and line["machine"] == {"dtype": "float32"}
        assert (line["category"], line["prompt_hash"]) == ("gsm8k", f"hash{i // 2}")
        assert all(call["is_identical"] for call in line["calls"].values())
        plain = line["calls"]["plain"]
        assert plain["prefill_s"] + plain["decode_s"] == pytest.approx(plain["total_s"])
        assert 0 < plain["prefill_s"] < plain["total_s"]
        for name in CALLS:
            steps = line["calls"][name]["steps"]
            assert sum(accepted + 1 for _, _, accepted in steps) == line["calls"][name]["num_new_tokens"] - 1
        assert {size for size, _, _ in line["calls"]["policy two"]["steps"]} <= {1, 2}
        assert line["calls"]["size 4"]["steps"][0][:2] == [4, 4]


def test_what_the_file_holds_is_not_run_again(pair, prompts, tmp_path):
    path = tmp_path / "timed.jsonl"

    def stop_after_two(items, name):
        for number, item in enumerate(items):
            if number == 2:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        time_rounds(*pair, prompts, CALLS, path, run={}, progress=stop_after_two, **SETTINGS)
    assert [line["prompt"] for line in lines_of(path)] == ["p0", "p1"]
    done = [(line["prompt"], line["round"]) for line in lines_of(path)]
    places = {prompt.id: i for i, prompt in enumerate(prompts)}
    more = time_rounds(*pair, prompts[2:], CALLS, path, run={}, done=done, places=places, **SETTINGS)
    assert [line["prompt"] for line in more] == ["p2"]
    assert more[0]["order"] == NAMES[2:] + NAMES[:2]  # as without the interruption
    done.append(("p2", 0))
    # Without models any call would fail.
    assert time_rounds(None, None, prompts, CALLS, path, run={}, done=done, **SETTINGS) == []
    assert len(lines_of(path)) == 3


def test_another_text_is_told(pair, prompts, tmp_path):
    """A sampled call whose tokens are drawn by the drafter is right in distribution, and not plain's own text."""
    target, pilot = pair
    other = BlockPilot(pilot.drafter, False, draft_sampling=True)
    settings = {"max_new_tokens": 30, "do_sample": True, "top_k": 0, "temperature": 2.0}
    lines = time_rounds(target, other, prompts, {"size 8": {"block_size": 8}}, tmp_path / "f", run={}, **settings)
    assert [line["calls"]["size 8"]["is_identical"] for line in lines] != [True] * 3
    assert all(line["calls"]["plain"]["is_identical"] for line in lines)


def test_sampled_calls_start_from_the_same_seed(pair, prompts, tmp_path):
    settings = {"max_new_tokens": 12, "do_sample": True, "top_k": 0}
    lines = time_rounds(*pair, prompts[:1], CALLS, tmp_path / "f", run={}, seed=3, **settings)
    assert all(call["is_identical"] for call in lines[0]["calls"].values())


def test_steps_are_priced_where_they_took_place():
    costs = CostTable((0, 100), {1: (1.0, 2.0), 4: (2.0, 3.0)}, {4: (0.5, 0.5)})
    # At 50 tokens a plain pass costs 1.5; then a block of 4 of which 2 are verified at 51: 0.5 + 1.51 + 1 / 3.
    assert steps_seconds([(1, 1, 0)], 50, costs) == pytest.approx(1.5)
    assert steps_seconds([(1, 1, 0), (4, 2, 1)], 50, costs) == pytest.approx(1.5 + 0.5 + 1.51 + 1 / 3)
    assert steps_seconds([(4, 4, 3), (4, 1, 0)], 0, costs) == pytest.approx(2.5 + 0.5 + 1.04)


def call(total_s, decode_s, *, num_new_tokens=9, steps=None, is_identical=True):
    found = {"total_s": total_s, "decode_s": decode_s, "num_new_tokens": num_new_tokens, "is_identical": is_identical}
    return found if steps is None else {**found, "steps": steps}


def line(prompt, calls, *, category="gsm8k", number=0):
    return {"prompt": prompt, "round": number, "category": category, "num_prompt_tokens": 8, "calls": calls}


FOURS = [[4, 4, 3], [4, 4, 3]]  # 8 tokens in 2 steps of 1.45 seconds
RULES = {"plain": "plain", "training_size": "size 4", "best_constant": "size 4"}


def test_figures_are_those_of_the_seconds():
    lines = [
        line("a", {"plain": call(10, 8), "size 4": call(5, 3, steps=FOURS)}),
        line("b", {"plain": call(10, 8), "size 4": call(20, 16, steps=FOURS, is_identical=False)}, category="code"),
    ]
    found = judge_timing(lines, RULES, COSTS, num_resamples=20)
    assert list(found["groups"]) == ["maths", "code", "all"]
    told = found["groups"]["all"]["rules"]["training_size"]
    assert told == found["groups"]["all"]["rules"]["best_constant"]  # one call for both
    assert told["speedup"]["estimate"] == pytest.approx((2 + 0.5) / 2)
    assert told["decode_speedup"]["estimate"] == pytest.approx((8 / 3 + 0.5) / 2)
    assert told["simulated_speedup"]["estimate"] == pytest.approx(8 / 2.9)
    assert told["timed_over_simulated"]["estimate"] == pytest.approx((8 / 3 + 0.5) / 2 / (8 / 2.9))
    assert told["tokens_per_second"]["estimate"] == pytest.approx(18 / 25)
    assert (told["least_speedup"], told["num_slow"], told["num_identical"]) == (0.5, 1, 1)
    plain = found["groups"]["all"]["rules"]["plain"]
    assert plain["simulated_speedup"]["estimate"] == plain["speedup"]["estimate"] == 1.0
    assert found["groups"]["maths"]["rules"]["training_size"]["agrees"] is None  # one prompt has no interval


def test_agreement_is_the_table_within_the_interval_of_what_was_timed():
    def timed(factor):
        return [
            line(f"p{i}", {"plain": call(10, 8), "size 4": call(5, factor * 2.9 * (1 + 0.1 * (-1) ** i), steps=FOURS)})
            for i in range(10)
        ]

    def told(lines):
        return judge_timing(lines, RULES, COSTS, num_resamples=200)["groups"]["all"]["rules"]["training_size"]

    assert told(timed(1.0))["agrees"] is True
    assert told(timed(1.5))["agrees"] is False


def test_of_several_rounds_medians_count():
    lines = [
        line("a", {"plain": call(10, 8), "size 4": call(seconds, seconds, steps=FOURS)}, number=number)
        for number, seconds in enumerate((5, 100, 4))
    ]
    found = judge_timing(lines, RULES, COSTS)
    assert (found["num_prompts"], found["num_rounds"]) == (1, 3)
    assert found["groups"]["all"]["rules"]["training_size"]["speedup"]["estimate"] == pytest.approx(2.0)


def test_texts_of_other_lengths_are_compared_by_tokens_per_second():
    calls = {"plain": call(10, 8), "size 4": call(5, 4, num_new_tokens=5, steps=[[4, 4, 3]])}
    told = judge_timing([line("a", calls)], RULES, COSTS)["groups"]["all"]["rules"]["training_size"]
    assert told["speedup"]["estimate"] == pytest.approx((5 / 5) / (9 / 10))
    assert told["decode_speedup"]["estimate"] == pytest.approx((4 / 4) / (8 / 8))
    assert told["simulated_speedup"]["estimate"] == pytest.approx((4 / 1.45) / 1)


def test_answers_of_one_token_are_left_out():
    short = line("a", {"plain": call(1, 0, num_new_tokens=1), "size 4": call(1, 0, num_new_tokens=1, steps=[])})
    good = line("b", {"plain": call(10, 8), "size 4": call(5, 4, steps=FOURS)})
    found = judge_timing([short, good], RULES, COSTS)
    assert (found["num_prompts"], found["num_without_steps"]) == (1, 1)
    with pytest.raises(ValueError, match="No timed prompt has an answer of more than one token, of 1 prompts"):
        judge_timing([short], RULES, COSTS)


def test_the_clock_of_plain_decoding_is_read_at_its_first_token(pair):
    from blockpilot_hf.throughput_timing import PlainClock

    clock = PlainClock()
    ids = make_prompt(10)
    type(pair[0]).generate(pair[0], ids, streamer=clock, **SETTINGS)
    assert clock.num_seen == 1 + 12
    assert clock.first_token_at > 0
    assert torch.equal(ids, make_prompt(10))

"""Throughput of every rule on known texts: figures that can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import constant_policy
from sweeps import COSTS, SIZES, TRAINING_SIZE, make_row
from throughput_rows import constant_curve, positioned_row

from blockpilot_hf.costs import CostTable
from blockpilot_hf.flight import REGRET_PASSES, REGRET_SHARE
from blockpilot_hf.flight_simulation import fly, least_seconds
from blockpilot_hf.throughput import Setup, best_constant, is_in_seconds, judge, judge_rules, simulate

# Seconds by hand: 24 tokens after the prefill; a step costs 1, 1.25, 1.3, 1.45, 1.55, 1.7 at sizes 1 to 6.
ROWS = [
    positioned_row("a", 0, category="gsm8k"),
    positioned_row("b", 1, category="chat"),
    positioned_row("c", 2, category="gsm8k"),
]
TRAIN = [make_row("x", {2: 1, 3: 2, 4: 3, 5: 4, 6: 5}), make_row("y", {2: 1, 3: 2, 4: 3, 5: 2, 6: 4})]
STEEP = CostTable(
    context_lengths=(8,),
    verify_s={size: (1 + 0.6 * (size - 1),) for size in SIZES},
    draft_s={size: (0.1,) for size in SIZES[1:]},
)


def setup(**more):
    return Setup(
        **{
            "block_sizes": SIZES,
            "constant_sizes": SIZES,
            "training_block_size": TRAINING_SIZE,
            "position_sizes": SIZES,
            **more,
        }
    )


def seconds_of(rule, *, rows=ROWS, costs=COSTS, **more):
    (found,) = simulate(rows, TRAIN, {"one": costs}, setup(**more))
    return found.seconds[rule].tolist()


@pytest.mark.parametrize(
    ("rule", "seconds"),
    [
        ("plain", [24.0, 24.0, 24.0]),
        ("training_size", [24 * 1.45, 6 * 1.45, 6 * 1.45]),
        ("fixed 6", [24 * 1.7, 12 * 1.7, 4 * 1.7]),
        ("best_constant", [24 * 1.7, 12 * 1.7, 4 * 1.7]),
        ("policy three", [24 * 1.3, 8 * 1.3, 8 * 1.3]),
        ("best_per_text", [24.0, 6 * 1.45, 4 * 1.7]),
    ],
)
def test_seconds_are_steps_times_the_seconds_of_a_step(rule, seconds):
    assert seconds_of(rule, fixed=(6,), policies={"three": constant_policy(3)}) == pytest.approx(seconds)


def test_the_best_constant_is_the_one_of_the_most_tokens_per_second_of_the_training_texts():
    by_hand = {size: sum(row.num_steps(size) for row in TRAIN) * COSTS.step_s(size) for size in SIZES}
    assert best_constant(TRAIN, COSTS, SIZES) == min(by_hand, key=by_hand.get) == 6
    assert best_constant(TRAIN, COSTS, (2, 4)) == 4
    assert (
        best_constant(TRAIN, STEEP, SIZES)
        == min(SIZES, key=lambda size: sum(row.num_steps(size) for row in TRAIN) * STEEP.step_s(size))
        != 6
    )
    assert best_constant([make_row("useless", {})], COSTS, (4, 6)) == 1  # plain decoding needs no sweep
    # Texts of the same temperature go first.
    warm = [replace(row, temperature=1.0) for row in ROWS]
    train = [*TRAIN, make_row("useless", {}, temperature=1.0)]
    cold, hot = simulate([*ROWS, *warm], train, {"one": COSTS}, setup())
    assert (cold.best_constant, hot.best_constant) == (6, 1)


def test_flights_know_the_table_the_budget_and_the_prior():
    rows = [positioned_row(f"r{i}", i) for i in range(3)]
    more = {"policies": {"sure": constant_curve(0.9), "four": constant_policy(4)}, "max_new_tokens": 30}
    (found,) = simulate(rows, TRAIN, {"one": COSTS}, setup(**more))
    prior = {1: 1.0, 2: 1.9, 4: 3.7, 6: 5.5}
    for i, row in enumerate(rows):
        assert found.seconds["flight"][i] == fly(row, COSTS, [2, 4], max_new_tokens=30).seconds
        with_prior = fly(row, COSTS, [2, 3, 6], prior=prior, max_new_tokens=30).seconds
        assert found.seconds["flight sure"][i] == pytest.approx(with_prior)
        assert found.seconds["best_per_step"][i] == least_seconds(row, COSTS, SIZES)
    assert "flight four" not in found.seconds  # a choice head predicts no acceptance length
    assert found.seconds["flight sure"][2] < found.seconds["flight"][2]
    assert found.seconds["flight"][0] <= 24 * (1 + REGRET_SHARE) + REGRET_PASSES


def test_a_curve_chooses_by_the_table_at_hand():
    flat, steep = simulate(ROWS, TRAIN, {"flat": COSTS, "steep": STEEP}, setup(policies={"sure": constant_curve(0.5)}))
    assert (flat.table, steep.table) == ("flat", "steep")
    # 1 + 0.5 (b - 1) tokens a step: 3.5 for 1.7 s, against 2.5 for 1.45 s; and 1.5 tokens for 1.7 s, against 1 for 1 s.
    assert flat.choices["sure"] == [6] * 3
    assert steep.choices["sure"] == [1] * 3
    assert steep.seconds["policy sure"].tolist() == [24.0] * 3


def test_what_is_not_swept_is_left_out_of_flights_and_said():
    some = setup(position_sizes=(3, 4), policies={"sure": constant_curve(0.9)})
    assert (some.flight_sizes(), some.left_out_of_flight()) == ([4], [2])
    assert (some.flight_sizes("sure"), some.left_out_of_flight("sure")) == ([3], [2, 6])
    assert (setup().flight_sizes(), setup().left_out_of_flight()) == ([2, 4], [])


def test_figures_of_rules_are_those_of_their_seconds():
    (result,) = judge(simulate(ROWS, TRAIN, {"one": COSTS}, setup()), setup(), num_resamples=50)
    assert list(result["groups"]) == ["maths", "chat", "all"]
    told = result["groups"]["all"]["rules"]["training_size"]
    assert told["speedup"]["estimate"] == pytest.approx((24 / 34.8 + 2 * 24 / 8.7) / 3)
    assert told["tokens_per_second"]["estimate"] == pytest.approx(72 / 52.2)
    assert told["over_best_constant"]["tokens_per_second"]["estimate"] == pytest.approx(68 / 52.2)
    assert told["of_best_per_text"]["tokens_per_second"]["estimate"] == pytest.approx(39.5 / 52.2)
    best = (24 / 24 + 24 / 8.7 + 24 / 6.8) / 3
    assert told["of_best_per_text"]["speedup"]["estimate"] == pytest.approx((24 / 34.8 + 48 / 8.7) / 3 / best)
    assert told["share_slow"]["estimate"] == pytest.approx(1 / 3)
    assert told["least_speedup"] == pytest.approx(24 / 34.8)
    plain = result["groups"]["all"]["rules"]["plain"]
    assert plain["speedup"] == {"estimate": 1.0, "low": 1.0, "high": 1.0}
    assert result["groups"]["maths"]["num_prompts"] == 2
    assert result["groups"]["maths"]["rules"]["plain"]["tokens_per_second"]["estimate"] == pytest.approx(1.0)


def test_a_prompt_counts_once_however_many_texts_it_has():
    seconds = {"plain": np.array([10.0, 10.0, 10.0]), "other": np.array([5.0, 10.0, 20.0])}
    told = judge_rules(seconds, np.array([10.0] * 3), np.array([0, 0, 1]), num_resamples=20)
    assert (told["num_prompts"], told["num_texts"], told["is_enough"]) == (2, 3, False)
    other = told["rules"]["other"]
    assert other["speedup"]["estimate"] == pytest.approx((1.5 + 0.5) / 2)
    assert other["tokens_per_second"]["estimate"] == pytest.approx(30 / 35)
    assert other["share_slow"]["estimate"] == pytest.approx(0.5)
    assert "over_best_constant" not in other


def test_intervals_are_paired_so_a_rule_over_itself_has_none():
    rows = [positioned_row(f"r{i}", i % 3) for i in range(30)]
    (result,) = judge(simulate(rows, TRAIN, {"one": COSTS}, setup(fixed=(6,))), setup(fixed=(6,)), num_resamples=200)
    told = result["groups"]["all"]["rules"]["fixed 6"]
    assert result["best_constant"] == 6
    assert told["over_best_constant"]["speedup"] == {"estimate": 1.0, "low": 1.0, "high": 1.0}
    assert told["speedup"]["low"] < told["speedup"]["estimate"] < told["speedup"]["high"]


def test_defaults_in_plain_passes_are_told_from_seconds():
    assert is_in_seconds(COSTS)
    assert not is_in_seconds(replace(COSTS, key={"device_class": "some kind", "drafter_share": 0.2}))


def test_a_side_without_texts_is_refused():
    with pytest.raises(ValueError, match="needs texts on both sides, got 0 and 2"):
        simulate([], TRAIN, {"one": COSTS}, setup())
    assert simulate(ROWS[:1], TRAIN[:1], {"one": COSTS}, setup())


def test_a_flight_may_copy_where_the_sweep_holds_the_texts():
    row = positioned_row("bare", 0)
    prompt_ids = tuple(range(10, 10 + row.num_prompt_tokens))
    again = replace(row, id="again", prompt_ids=prompt_ids, answer_ids=(1, 2, 3, 4, 5) * 5)
    other = replace(row, id="other", prompt_ids=prompt_ids, answer_ids=tuple(range(100, 125)))
    (bare,) = simulate([row], TRAIN, {"one": COSTS}, setup())
    assert "flight_lookup" not in bare.seconds
    (found,) = simulate([again, other], TRAIN, {"one": COSTS}, setup(policies={"sure": constant_curve(0.9)}))
    for rule in ("flight", "flight sure"):
        with_copies = found.seconds[rule.replace("flight", "flight_lookup")]
        assert with_copies[0] < 0.95 * found.seconds[rule][0] and with_copies[1] == found.seconds[rule][1]
    rules = judge([found], setup(policies={"sure": constant_curve(0.9)}), num_resamples=20)[0]["groups"]["all"]["rules"]
    assert rules["flight_lookup"]["speedup"]["estimate"] > rules["flight"]["speedup"]["estimate"]

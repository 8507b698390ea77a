"""Rules are judged as a plain loop would, apart by temperature and group; texts of a prompt move together."""

import numpy as np
import pytest
from sweeps import CATEGORIES, COSTS, KINDS, SIZES, TRAINING_SIZE, make_row, make_rows

from blockpilot_hf.costs import CostTable
from blockpilot_hf.evaluation import comparisons_of, evaluate
from blockpilot_hf.evaluation_rules import ALL, Comparison, group_of
from blockpilot_hf.policy_training import PolicyTrainingConfig, policy_choices, train_policy, window

CANDIDATES = (1, 4, 6)


@pytest.fixture(scope="module")
def policy():
    return train_policy(make_rows(200, 0), make_rows(60, 1), CANDIDATES, PolicyTrainingConfig(epochs=25), COSTS)[0]


def judge(rows, train_rows, comparisons, costs=COSTS, **more):
    settings = {"block_sizes": SIZES, "training_block_size": TRAINING_SIZE, "num_resamples": 200, "num_shuffles": 50}
    return evaluate(rows, train_rows, comparisons, costs=costs, **{**settings, **more})


def estimates(group, rule):
    return {name: entry["estimate"] for name, entry in group["rules"][rule].items() if "estimate" in entry}


def test_every_rule_is_what_a_loop_over_prompts_gives(policy):
    rows, train = make_rows(60, 2), make_rows(90, 3)
    (result,) = judge(rows, train, [Comparison(CANDIDATES, {"mine": policy})])
    comparison = result["comparisons"][0]
    group = comparison["groups"][ALL]

    def told(sizes_of):
        """`sizes_of(row)` gives the sizes that a rule draws from evenly."""
        tau = np.mean([np.mean([row.acceptance_length(b) for b in sizes_of(row)]) for row in rows])
        steps = sum(np.mean([row.num_steps(b) for b in sizes_of(row)]) for row in rows)
        per_second = np.mean(
            [
                np.mean([(row.num_new_tokens - 1) / (row.num_steps(b) * COSTS.step_s(b)) for b in sizes_of(row)])
                for row in rows
            ]
        )
        return {
            "tau": pytest.approx(tau),
            "tokens_per_step": pytest.approx(sum(row.num_new_tokens - 1 for row in rows) / steps),
            "tokens_per_second": pytest.approx(per_second),
            "speedup": pytest.approx(per_second * COSTS.step_s(1)),
        }

    def best_constant(key):
        return max(CANDIDATES, key=lambda b: (np.mean([key(row, b) for row in train]), -b))

    def speed(row, b):
        return COSTS.speedup(b, row.acceptance_length(b))

    def tau(row, b):
        return row.acceptance_length(b)

    constants = {"tau": best_constant(tau), "speedup": best_constant(speed)}
    assert comparison["best_constant"] == constants
    picked = dict(zip([row.id for row in rows], policy_choices(policy, rows), strict=True))
    expected = {
        "training_size": lambda row: [TRAINING_SIZE],
        "best_constant_tau": lambda row: [constants["tau"]],
        "best_constant_speedup": lambda row: [constants["speedup"]],
        "random": lambda row: CANDIDATES,
        "policy mine": lambda row: [picked[row.id]],
        "best_per_prompt_tau": lambda row: [max(CANDIDATES, key=lambda b: (tau(row, b), -b))],
        "best_per_prompt_speedup": lambda row: [max(CANDIDATES, key=lambda b: (speed(row, b), -b))],
    }
    assert list(group["rules"]) == list(expected)
    for rule, sizes_of in expected.items():
        assert estimates(group, rule) == told(sizes_of), rule
    assert result["tau_by_block_size"][ALL]["6"]["estimate"] == pytest.approx(np.mean([tau(row, 6) for row in rows]))
    assert group["choices"] == {"mine": {str(b): list(picked.values()).count(b) for b in CANDIDATES}}


def test_differences_and_shares_are_against_the_rule_of_their_measure(policy):
    (result,) = judge(make_rows(60, 2), make_rows(90, 3), [Comparison(CANDIDATES, {"mine": policy})])
    rules = result["comparisons"][0]["groups"][ALL]["rules"]
    for measure in ("tau", "speedup"):
        own, best, constant, fixed = (
            rules[name][measure]["estimate"]
            for name in ("policy mine", f"best_per_prompt_{measure}", f"best_constant_{measure}", "training_size")
        )
        mine = rules["policy mine"]
        assert mine["over_best_constant"][measure]["estimate"] == pytest.approx(own - constant)
        assert mine["over_training_size"][measure]["estimate"] == pytest.approx(own - fixed)
        share = mine["share_of_gain_over_best_constant"][measure]
        assert share["estimate"] == pytest.approx((own - constant) / (best - constant))
        assert share["low"] < share["estimate"] < share["high"]
        share = mine["share_of_gain_over_training_size"][measure]["estimate"]
        assert share == pytest.approx((own - fixed) / (best - fixed))
        full = rules[f"best_per_prompt_{measure}"]["share_of_gain_over_best_constant"][measure]
        assert (full["estimate"], full["low"], full["high"]) == pytest.approx((1.0, 1.0, 1.0))
        assert full["is_defined"]  # the best size gains much here
        none = rules[f"best_constant_{measure}"]["over_best_constant"][measure]
        assert (none["estimate"], none["low"], none["high"]) == (0.0, 0.0, 0.0)


def test_texts_of_one_prompt_count_as_one_prompt():
    """Three like texts of every prompt say no more than one: same estimate, same interval."""
    rows = make_rows(30, 4)
    thrice = [
        make_row(
            f"{row.id}-s{seed}", {b: max(a) for b, a in row.num_accepted.items()}, prompt_id=row.prompt_id,
            category=row.category, features=row.features, seed=seed,
        )
        for seed in range(3)
        for row in rows
    ]  # fmt: skip
    comparison = [Comparison(CANDIDATES)]
    (one,), (three,) = judge(rows, rows, comparison), judge(thrice, rows, comparison)
    assert (three["num_prompts"], three["num_texts"]) == (30, 90)
    ours, theirs = (result["comparisons"][0]["groups"][ALL]["rules"]["training_size"] for result in (one, three))
    for measure in ("tau", "speedup", "tokens_per_step"):
        assert list(theirs[measure].values()) == pytest.approx(list(ours[measure].values()))


def test_temperatures_are_judged_apart_and_so_are_groups(policy):
    rows = make_rows(70, 5, temperatures=(0.0, 1.0))
    results = judge(rows, make_rows(50, 6), [Comparison(CANDIDATES, {"mine": policy})])
    assert [result["temperature"] for result in results] == [0.0, 1.0]
    greedy = [row for row in rows if row.temperature == 0]
    assert judge(greedy, make_rows(50, 6), [Comparison(CANDIDATES, {"mine": policy})]) == results[:1]
    assert results[1]["best_constant_chosen_on"] == {"temperatures": [0.0], "num_prompts": 50}
    groups = results[0]["comparisons"][0]["groups"]
    assert list(groups) == ["maths", "code", "other", ALL]
    for name, category in zip(groups, CATEGORIES, strict=False):
        (alone,) = judge(
            [row for row in greedy if row.category == category],
            make_rows(50, 6),
            [Comparison(CANDIDATES, {"mine": policy})],
        )
        assert groups[name] == alone["comparisons"][0]["groups"][ALL]
    assert [group["num_prompts"] for group in groups.values()] == [24, 23, 23, 70]
    few = judge(rows[:40], rows[:40], [Comparison(CANDIDATES)])[0]["comparisons"][0]["groups"]
    assert [group["is_enough"] for group in few.values()] == [False, False, False, True]


def test_the_best_constant_is_chosen_on_texts_of_the_same_temperature():
    train = [make_row(f"a{i}", KINDS[1]) for i in range(5)]
    train += [make_row(f"a{i}-t1", KINDS[2], prompt_id=f"a{i}", temperature=1.0) for i in range(5)]
    rows = [make_row(f"b{i}", {}, temperature=i % 2) for i in range(6)]
    greedy, sampled = judge(rows, train, [Comparison(CANDIDATES)])
    assert greedy["comparisons"][0]["best_constant"] == {"tau": 4, "speedup": 4}
    assert sampled["comparisons"][0]["best_constant"] == {"tau": 6, "speedup": 6}
    (other,) = judge([make_row("c", {}, temperature=0.5)], train, [Comparison(CANDIDATES)])
    assert other["best_constant_chosen_on"]["temperatures"] == [0.0, 1.0]


def test_without_prices_only_acceptance_lengths_are_told():
    rows = make_rows(20, 7)
    some = CostTable((8,), verify_s={1: (1.0,), 4: (1.2,)}, draft_s={4: (0.2,)})
    for costs in (None, some):
        (result,) = judge(rows, rows, [Comparison((1, 2, 4)), Comparison(tuple(window(TRAINING_SIZE)))], costs)
        by_tau = result["comparisons"][1]
        assert list(by_tau["groups"][ALL]["rules"]) == [
            "training_size",
            "best_constant_tau",
            "random",
            "best_per_prompt_tau",
        ]
        assert "speedup" not in by_tau["groups"][ALL]["rules"]["random"]
        assert list(by_tau["shuffled"]) == ["tau"]
        assert ("speedup" in result["comparisons"][0]["groups"][ALL]["rules"]["random"]) == (costs is not None)


def test_candidates_are_the_window_and_those_of_the_policies(policy):
    assert [one.block_sizes for one in comparisons_of({}, SIZES, 4)] == [(2, 3, 4, 5, 6), SIZES]
    around, own = comparisons_of({"a": policy, "b": policy}, SIZES, 4)
    assert (around.block_sizes, dict(around.policies)) == ((2, 3, 4, 5, 6), {})
    assert (own.block_sizes, list(own.policies)) == (CANDIDATES, ["a", "b"])
    assert [one.block_sizes for one in comparisons_of({"a": policy}, CANDIDATES, 4)] == [CANDIDATES]
    with pytest.raises(ValueError, match=r"'a' chooses from \[1, 4, 6\], and the sweep has no block sizes \[6\]"):
        comparisons_of({"a": policy}, (1, 2, 3, 4), 4)


def test_categories_have_groups_and_others_stand_for_themselves():
    assert [group_of(name) for name in ("math_reasoning", "summarize", "poetry")] == ["maths", "summary", "poetry"]
    assert group_of("poetry", {"art": ["poetry"]}) == "art"


def test_the_control_stands_beside_the_gain_of_the_best_size_per_text():
    rows = make_rows(60, 2)
    always_best = [make_row(f"a{i}", KINDS[2]) for i in range(5)]  # so that the best constant is not the training size
    (result,) = judge(rows, always_best, [Comparison(CANDIDATES)])
    control = result["comparisons"][0]["shuffled"]["tau"]
    best = np.mean([max(row.acceptance_length(b) for b in CANDIDATES) for row in rows])
    constant = result["comparisons"][0]["best_constant"]["tau"]
    assert control["reference_block_size"] == constant == 6 != TRAINING_SIZE
    always = np.mean([row.acceptance_length(constant) for row in rows])
    assert control["gain"] == pytest.approx(best / always - 1)
    assert control["shuffled"]["low"] <= control["shuffled"]["mean"] <= control["shuffled"]["high"]
    assert control["num_shuffles"] == 50


def test_shares_of_no_gain_are_marked():
    """Where every text does best at one and the same size, there is nothing to take a share of."""
    rows = [make_row(f"a{i}", KINDS[2], num_new_tokens=13 + i) for i in range(20)]
    (result,) = judge(rows, rows, [Comparison(CANDIDATES)])
    rules = result["comparisons"][0]["groups"][ALL]["rules"]
    assert not rules["random"]["share_of_gain_over_best_constant"]["tau"]["is_defined"]
    assert rules["random"]["share_of_gain_over_training_size"]["tau"]["is_defined"]


def test_what_cannot_be_judged_is_said():
    rows = make_rows(5, 8)
    with pytest.raises(ValueError, match="texts on both sides, got 5 and 0"):
        judge(rows, [], [Comparison(CANDIDATES)])
    with pytest.raises(ValueError, match="no block size 8, for which its drafter was trained"):
        judge(rows, rows, [Comparison(CANDIDATES)], training_block_size=8)

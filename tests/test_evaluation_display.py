"""An evaluation in words: figures are those of the record, and rules are named by what they are."""

import pytest
from sweeps import COSTS, SIZES, TRAINING_SIZE, make_rows

from blockpilot_hf.evaluation import ALL, Comparison, evaluate
from blockpilot_hf.evaluation_display import (
    Table,
    choices_table,
    control_lines,
    figure,
    gains_table,
    groups_table,
    rule_name,
    rules_table,
    told,
)
from blockpilot_hf.policy_training import PolicyTrainingConfig, train_policy


@pytest.fixture(scope="module")
def results():
    train, rows = make_rows(60, 0), make_rows(45, 1)
    policy, _ = train_policy(train, make_rows(20, 2), [1, 4, 6], PolicyTrainingConfig(epochs=5), COSTS)
    return evaluate(
        rows, train, [Comparison((1, 4, 6), {"mine": policy})], block_sizes=SIZES,
        training_block_size=TRAINING_SIZE, costs=COSTS, num_resamples=50, num_shuffles=5,
    )  # fmt: skip


def test_figures_are_rounded_and_have_their_interval():
    entry = {"estimate": 1.2345, "low": -1.0, "high": 2.5}
    assert figure(entry) == "1.23 [-1.00 2.50]"
    assert figure(entry, 0, percent=True) == "123 % [-100 250]"
    assert figure({**entry, "low": None}) == "1.23"
    assert figure({"estimate": None, "low": None, "high": None}) == figure(None) == "-"


def test_rules_are_named_by_what_they_are():
    comparison = {"training_block_size": 8, "block_sizes": [1, 8], "best_constant": {"tau": 8, "speedup": 3}}
    one, two = {**comparison, "policies": ["a"]}, {**comparison, "policies": ["a", "b"]}
    assert rule_name("training_size", one) == "training size 8"
    assert rule_name("best_constant_speedup", one) == "best constant 3 (time)"
    assert rule_name("random", one) == "random of 2"
    assert rule_name("best_per_prompt_tau", one) == "best per text (tau)"
    assert (rule_name("policy a", one), rule_name("policy a", two)) == ("policy", "policy a")


def test_tables_hold_the_records_figures(results):
    result, comparison = results[0], results[0]["comparisons"][0]
    judged = comparison["groups"][ALL]
    table = rules_table(result, comparison)
    assert table.title == "greedy: 45 prompts, 45 texts, block sizes 1, 4, 6, policy mine"
    row = next(row for row in table.rows if row[0] == "policy")
    own = judged["rules"]["policy mine"]
    assert row == [
        "policy", figure(own["tau"]), f"{own['tokens_per_step']['estimate']:.2f}",
        f"{own['tokens_per_second']['estimate']:.2f}", figure(own["speedup"]),
    ]  # fmt: skip
    for measure, unit in (("tau", "tau"), ("speedup", "speed")):
        best = comparison["best_constant"][measure]
        shares = {4: "share_of_gain_over_training_size", best: "share_of_gain_over_best_constant"}
        gains = {row[0]: row[1:] for row in gains_table(comparison).rows}
        for size, share in shares.items():
            assert gains[f"policy over size {size}, {unit}"] == [
                figure(own[share.removeprefix("share_of_gain_")][measure], 3),
                figure(own[share][measure], 0, percent=True),
            ]
        known = own[shares[best]][measure]
        own[shares[best]][measure] = {**known, "low": None}
        gains = {row[0]: row[1:] for row in gains_table(comparison).rows}
        assert gains[f"policy over size {best}, {unit}"][1] == "-"
        own[shares[best]][measure] = known
    groups = groups_table(comparison, "mine")
    assert [row[0] for row in groups.rows] == ["maths (15) *", "code (15) *", "other (15) *", "all (45)"]
    assert groups.rows[-1][-1] == figure(own["over_best_constant"]["speedup"])
    counts = choices_table(comparison, "mine").rows[-1][1:]
    assert counts == [str(count) for count in judged["choices"]["mine"].values()]
    assert sum(map(int, counts)) == 45
    for table in (rules_table(result, comparison), gains_table(comparison), groups):
        assert all(len(row) == len(table.header) for row in table.rows)


def test_everything_is_told_with_the_control_and_a_word_on_small_groups(results):
    parts = list(told(results))
    lines = [part for part in parts if not isinstance(part, Table)]
    control = results[0]["comparisons"][0]["shuffled"]["tau"]
    assert any(f"by tau, the best size per text gains {control['gain']:.1%} over size 4" in line for line in lines)
    assert len(list(control_lines(results[0]["comparisons"][0]))) == 2
    assert lines[-1].startswith("* fewer than 20 prompts")

"""An evaluation in words: figures are those of the record, and rules are named by what they are."""

import copy

import pytest
from sweeps import COSTS, SIZES, TRAINING_SIZE, make_rows

from blockpilot_hf.evaluation import evaluate
from blockpilot_hf.evaluation_display import (
    Table,
    choices_table,
    control_lines,
    figure,
    gains_table,
    groups_table,
    policy_label,
    rule_name,
    rules_table,
    summary_table,
    told,
)
from blockpilot_hf.evaluation_rules import ALL, Comparison, has_clear_gain
from blockpilot_hf.policy_training import PolicyTrainingConfig, train_policy


@pytest.fixture(scope="module")
def results():
    train, rows = make_rows(60, 0), make_rows(45, 1)
    policy, _ = train_policy(train, make_rows(20, 2), [1, 4, 6], PolicyTrainingConfig(epochs=5), COSTS)
    return evaluate(
        rows, train, [Comparison((1, 4, 6), {"mine": policy})], block_sizes=SIZES,
        training_block_size=TRAINING_SIZE, costs=COSTS, num_resamples=50, num_shuffles=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_by_two():
    """Two policies with candidates of their own, at two temperatures."""
    train, rows, comparisons = make_rows(60, 0), make_rows(30, 1, temperatures=(0.0, 1.0)), []
    for name, sizes in (("near", (2, 3, 4)), ("far", (1, 4, 6))):
        policy, _ = train_policy(train, make_rows(20, 2), list(sizes), PolicyTrainingConfig(epochs=3), COSTS)
        comparisons.append(Comparison(sizes, {name: policy}))
    return evaluate(
        rows, train, comparisons, block_sizes=SIZES, training_block_size=TRAINING_SIZE, costs=COSTS,
        num_resamples=50, num_shuffles=5,
    )  # fmt: skip


def test_figures_are_rounded_and_have_their_interval():
    entry = {"estimate": 1.2345, "low": -1.0, "high": 2.5}
    assert figure(entry) == "1.23 [-1.00 2.50]"
    assert figure(entry, 0, percent=True) == "123 % [-100 250]"
    assert figure({**entry, "low": None}) == "1.23"
    assert figure({"estimate": None, "low": None, "high": None}) == figure(None) == "-"
    assert figure({"estimate": -0.001, "low": -0.0049, "high": 0.0}) == "0.00 [0.00 0.00]"
    assert figure({"estimate": -0.0001, "low": -0.01, "high": 0.0}, 1, percent=True) == "0.0 % [-1.0 0.0]"


def test_rules_are_named_by_what_they_are():
    comparison = {"training_block_size": 8, "block_sizes": [1, 8], "best_constant": {"tau": 8, "speedup": 3}}
    one, two = {**comparison, "policies": ["a"]}, {**comparison, "policies": ["a", "b"]}
    assert rule_name("training_size", one) == "training size 8"
    assert rule_name("best_constant_speedup", one) == "best constant 3 (time)"
    assert rule_name("random", one) == "random of 2"
    assert rule_name("best_per_prompt_tau", one) == "best per text (tau)"
    assert (rule_name("policy a", one), rule_name("policy a", two)) == ("policy", "policy a")


def in_percent(rules, own, over, measure):
    reference = "training_size" if over == "over_training_size" else f"best_constant_{measure}"
    base, gain = rules[reference][measure]["estimate"], own[over][measure]
    estimate, low, high = (100 * gain[end] / base for end in ("estimate", "low", "high"))
    return f"{estimate:.1f} % [{low:.1f} {high:.1f}]"


def test_no_share_is_told_of_a_gain_that_is_not_clear(results):
    comparison = copy.deepcopy(results[0]["comparisons"][0])
    rules, constant = comparison["groups"][ALL]["rules"], comparison["best_constant"]["tau"]
    name = f"policy over size {constant}, tau"

    def share():
        return {row[0]: row[2] for row in gains_table(comparison).rows}[name]

    gain, base = (
        rules["best_per_prompt_tau"]["over_best_constant"]["tau"],
        rules["best_constant_tau"]["tau"]["estimate"],
    )
    for estimate, low, is_told in ((0.1, 0.01, True), (0.1, 0.0, False), (0.009, 0.001, False), (0.011, 0.001, True)):
        gain.update(estimate=estimate * base, low=low * base, high=base)
        assert (share() != "-") == is_told, (estimate, low)
        assert has_clear_gain(rules, "best_constant", "tau") == is_told
    gain["low"] = None
    assert share() == "-"


def test_a_summary_stands_first_and_has_the_main_rules_of_all_comparisons(two_by_two):
    parts = list(told(two_by_two))
    assert [part.title for part in parts[:2]] == ["summary, greedy: 30 prompts", "summary, temperature 1: 30 prompts"]
    first, window, own = parts[0], *two_by_two[0]["comparisons"]
    assert len(first.rows) <= 9
    constants = {one: [row[0] for row in first.rows].count(one) for one in (
        rule_name("best_constant_speedup", own), rule_name("best_constant_tau", window),
    )}  # fmt: skip
    assert set(constants.values()) == {1}
    cells = {row[0]: row[1:] for row in first.rows}
    for name, one in (("policy near", window), ("policy far", own)):
        rules = one["groups"][ALL]["rules"][name]
        assert cells[name] == [figure(rules[key]) for key in ("tau", "speedup", "tokens_per_second")]
    assert cells["best per text, 1 to 6"][1] == figure(
        own["groups"][ALL]["rules"]["best_per_prompt_speedup"]["speedup"]
    )
    assert {"training size 4", "best per text, 2 to 4"} <= set(cells)
    (result, *_) = two_by_two
    without = {**result, "comparisons": [{**one, "best_constant": {"tau": one["best_constant"]["tau"]}} for one in
                                         result["comparisons"]]}  # fmt: skip
    assert summary_table(without).header == ["rule", "tau"]


def test_a_policy_is_not_called_policy_twice(results):
    assert (policy_label("policy"), policy_label("mine")) == ("policy", "policy mine")
    comparison = copy.deepcopy(results[0]["comparisons"][0])
    for group in comparison["groups"].values():
        group["choices"] = {"policy": group["choices"]["mine"]}
        group["rules"]["policy policy"] = group["rules"]["policy mine"]
    comparison["policies"] = ["policy"]
    titles = [rules_table(results[0], comparison).title, choices_table(comparison, "policy").title]
    titles.append(groups_table(comparison, "policy").title)
    assert all(title.endswith(", policy") for title in titles), titles


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
                in_percent(judged["rules"], own, share.removeprefix("share_of_gain_"), measure),
                figure(own[share][measure], 0, percent=True),
            ]
        known = own[shares[best]][measure]
        own[shares[best]][measure] = {**known, "low": None}
        gains = {row[0]: row[1:] for row in gains_table(comparison).rows}
        assert gains[f"policy over size {best}, {unit}"][1] == "-"
        own[shares[best]][measure] = known
    groups = groups_table(comparison, "mine")
    assert [row[0] for row in groups.rows] == ["maths (15) *", "code (15) *", "other (15) *", "all (45)"]
    assert groups.header[-1] == f"policy over size {comparison['best_constant']['speedup']}"
    assert groups.rows[-1][-1] == in_percent(judged["rules"], own, "over_best_constant", "speedup")
    counts = choices_table(comparison, "mine").rows[-1][1:]
    assert counts == [str(count) for count in judged["choices"]["mine"].values()]
    assert sum(map(int, counts)) == 45
    for table in (rules_table(result, comparison), gains_table(comparison), groups):
        assert all(len(row) == len(table.header) for row in table.rows)


def test_everything_is_told_with_the_control_and_a_word_on_small_groups(results):
    parts = list(told(results))
    lines = [part for part in parts if not isinstance(part, Table)]
    control = results[0]["comparisons"][0]["shuffled"]["tau"]
    constant, still = control["reference_block_size"], control["shuffled"]["mean"]
    assert constant == results[0]["comparisons"][0]["best_constant"]["tau"]
    (line,) = (line for line in lines if line.startswith("control by tau"))
    assert f"the best size per text gains {100 * control['gain']:.1f} % over size {constant} for all" in line
    assert f"it still gains {100 * still:.1f} % [" in line
    assert len(list(control_lines(results[0]["comparisons"][0]))) == 2
    assert sum(line.startswith("Control: ") for line in lines) == 1
    assert lines[-1].startswith("* fewer than 20 prompts")


def test_words_below_are_only_of_what_is_above(results):
    def lines(change):
        changed = copy.deepcopy(results)
        change(changed[0]["comparisons"][0])
        return " ".join(part for part in told(changed) if not isinstance(part, Table))

    def enough(comparison):
        for group in comparison["groups"].values():
            group["is_enough"] = True

    def without_prices(comparison):
        for of_measure in (comparison["best_constant"], comparison["shuffled"]):
            del of_measure["speedup"]
        for group in comparison["groups"].values():
            group["rules"] = {name: rule for name, rule in group["rules"].items() if not name.endswith("_speedup")}

    assert "* fewer" in lines(without_prices)
    assert "Times plain" not in lines(without_prices)
    assert "* fewer" not in lines(enough)
    assert "Times plain" in lines(enough)

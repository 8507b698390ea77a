"""Intervals are scipy's, paired over prompts; the shuffled control knows what chance alone gives."""

import numpy as np
import pytest
from scipy import stats

from blockpilot_hf.intervals import Interval, bootstrap_intervals, shuffled_gain


def mean(column):
    return lambda means: means[column]


def test_the_interval_of_a_mean_is_scipys():
    values = np.random.default_rng(0).gamma(2.0, size=50)
    found = bootstrap_intervals({"a": values, "b": -values}, {"a": mean("a"), "b": mean("b")}, num_resamples=500)
    expected = stats.bootstrap((values,), np.mean, n_resamples=500, rng=np.random.default_rng(0), batch=1000)
    assert (found["a"].low, found["a"].high) == pytest.approx(tuple(expected.confidence_interval))
    assert found["a"].estimate == pytest.approx(values.mean())
    assert (-found["b"].high, -found["b"].low) == pytest.approx((found["a"].low, found["a"].high), abs=0.02)


def test_a_difference_is_of_the_same_prompts():
    """Two rules that differ by 0.1 on every prompt: the interval is as wide as the difference varies, not the rules."""
    values = np.random.default_rng(1).normal(3, 1, 60)
    found = bootstrap_intervals(
        {"a": values, "b": values + 0.1 + np.linspace(-0.01, 0.01, 60)},
        {"a": mean("a"), "difference": lambda means: means["b"] - means["a"]},
        num_resamples=400,
    )
    assert found["a"].high - found["a"].low > 0.3
    assert 0.095 < found["difference"].low < found["difference"].estimate < found["difference"].high < 0.105


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng, covered = np.random.default_rng(2), 0
    for _ in range(100):
        values = rng.exponential(size=40)
        one = bootstrap_intervals({"a": values}, {"a": mean("a")}, num_resamples=300)["a"]
        covered += one.low <= 1.0 <= one.high
    assert 85 <= covered <= 100


def test_the_same_seed_gives_the_same_intervals():
    columns = {"a": np.random.default_rng(3).normal(size=30)}
    one, same, other = (
        bootstrap_intervals(columns, {"a": mean("a")}, num_resamples=200, seed=seed)["a"] for seed in (0, 0, 1)
    )
    assert one == same
    assert one != other


def test_what_does_not_vary_has_no_width_and_what_is_undefined_is_none():
    columns = {"a": np.ones(30), "b": np.arange(30.0)}
    statistics = {
        "constant": mean("a"),
        "undefined": lambda means: (means["b"] - means["a"]) / (means["a"] - means["a"]),
        "ratio": lambda means: means["b"] / means["a"],
    }
    found = bootstrap_intervals(columns, statistics, num_resamples=200)
    assert found["constant"] == Interval(1.0, 1.0, 1.0)
    assert found["undefined"] == Interval(None, None, None)
    assert found["ratio"].low < 14.5 < found["ratio"].high


def test_one_prompt_has_an_estimate_and_no_interval():
    assert bootstrap_intervals({"a": np.array([2.5])}, {"a": mean("a")})["a"] == Interval(2.5, None, None)
    with pytest.raises(ValueError, match="Intervals need prompts and resamples, got 0 prompts"):
        bootstrap_intervals({"a": np.array([])}, {"a": mean("a")})
    with pytest.raises(ValueError, match="0 resamples"):
        bootstrap_intervals({"a": np.ones(3)}, {"a": mean("a")}, num_resamples=0)
    two = bootstrap_intervals({"a": np.array([2.0, 3.0])}, {"a": mean("a")}, num_resamples=100)["a"]
    assert (two.low, two.high) == (2.0, 3.0)


def test_shuffling_keeps_the_gain_that_is_chance():
    """Independent noise has hardly anything to lose."""
    noise = 3 + np.random.default_rng(4).normal(0, 0.3, (400, 5))
    chance = shuffled_gain(noise, noise[:, 2], num_shuffles=200)
    assert chance["gain"] > 0.1
    # Rows keep a fifth of the noise's variance, so its root is what plain shuffling loses.
    assert chance["shuffled"]["mean"] == pytest.approx(0.8**0.5 * chance["gain"], rel=0.03)
    assert chance["rescaled"]["mean"] == pytest.approx(chance["gain"], rel=0.03)


def test_shuffling_loses_the_gain_of_rows_that_have_one_good_column_each():
    """Shuffled, some rows get two of them and some none."""
    rng = np.random.default_rng(5)
    values = 3 + np.eye(5)[rng.integers(5, size=400)]
    found = shuffled_gain(values, values[:, 2], num_shuffles=200)
    assert found["gain"] == pytest.approx(4 / values[:, 2].mean() - 1)
    assert found["shuffled"]["high"] < found["rescaled"]["high"] < 0.95 * found["gain"]
    assert found["shuffled"]["low"] < found["shuffled"]["mean"] < found["shuffled"]["high"]
    assert found["num_shuffles"] == 200


def test_without_residuals_the_gain_is_that_of_the_best_column():
    """Rows that differ only in level: shuffling changes nothing."""
    values = np.arange(6.0)[:, None] + np.array([1.0, 2.0, 1.5])
    found = shuffled_gain(values, values[:, 0], num_shuffles=10)
    expected = values[:, 1].mean() / values[:, 0].mean() - 1
    assert found["gain"] == pytest.approx(expected)
    for name in ("shuffled", "rescaled"):
        assert [found[name][key] for key in ("mean", "low", "high")] == pytest.approx([expected] * 3)
    assert shuffled_gain(values, values[:, 0], num_shuffles=10) == found

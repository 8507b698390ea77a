"""Paired bootstrap intervals over prompts, and the shuffled control that tells how much of an oracle is chance.

Whatever is compared is computed from the same resampled prompts, so a difference between two rules has the interval of
the difference, not the sum of two. Knows nothing of models, sweeps or policies.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .units import require_extra

Key = TypeVar("Key", bound=Hashable)
Means = Mapping[str, np.ndarray]

CONFIDENCE_LEVEL = 0.95
_TAILS = [50 * (1 - CONFIDENCE_LEVEL), 50 * (1 + CONFIDENCE_LEVEL)]  # in percent
_RESAMPLES_AT_ONCE = 1000


@dataclass(frozen=True)
class Interval:
    """
    Args:
        estimate (`float`, *optional*): From the prompts as they are; `None` where it is not defined, such as 0 / 0.
        low, high (`float`, *optional*): Ends of the 95 % interval; `None` where it cannot be told, as of one prompt.
    """

    estimate: float | None
    low: float | None = None
    high: float | None = None


def bootstrap_intervals(
    columns: Mapping[str, np.ndarray],
    statistics: Mapping[Key, Callable[[Means], np.ndarray]],
    *,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> dict[Key, Interval]:
    """
    95 % intervals of functions of means, all from the same resamples (`scipy.stats.bootstrap`, bias-corrected and
    accelerated; percentiles where that is not defined, as for values that hardly vary).

    Args:
        columns (`Mapping[str, np.ndarray]`): What a prompt contributes, each of shape `(num_prompts,)`.
        statistics (`Mapping[Key, Callable]`):
            From the means of the columns, by name and each of shape `(num_resamples,)`, to a statistic of that shape.
        num_resamples (`int`, *optional*, defaults to 10000): Resamples of the prompts.
        seed (`int`, *optional*, defaults to 0): The same one gives the same intervals.

    Returns:
        `dict[Key, Interval]`

    Raises:
        `ImportError`: if scipy is not installed.
        `ValueError`: without prompts, or for less than one resample.
    """
    names, table = list(columns), np.stack([np.asarray(column, dtype=float) for column in columns.values()], axis=-1)
    if not len(table) or num_resamples < 1:
        raise ValueError(f"Intervals need prompts and resamples, got {len(table)} prompts, {num_resamples} resamples.")

    def of_means(means: np.ndarray) -> np.ndarray:
        """`(..., num_columns)` to `(num_statistics, ...)`."""
        by_name = {name: means[..., i] for i, name in enumerate(names)}
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.stack([statistic(by_name) for statistic in statistics.values()])

    def of_prompts(index: np.ndarray, axis: int = -1) -> np.ndarray:
        """`index` holds prompt numbers, `(..., num_drawn)`. Counting them turns all means into one product."""
        drawn = index.reshape(-1, index.shape[-1])
        places = drawn + np.arange(len(drawn))[:, None] * len(table)
        counts = np.bincount(places.ravel(), minlength=len(drawn) * len(table)).reshape(len(drawn), len(table))
        means = counts @ table / index.shape[-1]
        return of_means(means.reshape(*index.shape[:-1], len(names)))

    estimates = of_means(table.mean(0))
    if len(table) == 1:
        return {key: Interval(_finite(value)) for key, value in zip(statistics, estimates, strict=True)}
    bootstrap = require_extra("scipy.stats").bootstrap
    settings: dict[str, Any] = {
        "n_resamples": num_resamples,
        "batch": _RESAMPLES_AT_ONCE,
        "vectorized": True,
        "confidence_level": CONFIDENCE_LEVEL,
        "rng": np.random.default_rng(seed),
    }
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of statistics that do not vary, which are looked after below
        result = bootstrap((np.arange(len(table)),), of_prompts, method="BCa", **settings)
        plain = np.percentile(result.bootstrap_distribution, _TAILS, axis=-1)
    low, high = (
        np.where(np.isfinite(ends), ends, other) for ends, other in zip(result.confidence_interval, plain, strict=True)
    )
    return {key: Interval(_finite(estimates[i]), _finite(low[i]), _finite(high[i])) for i, key in enumerate(statistics)}


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def shuffled_gain(
    values: np.ndarray, reference: np.ndarray, *, num_shuffles: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """
    What choosing the best column row by row gains over `reference`, for the values and for values without any tie
    between a row and a column: an additive fit `mean_i + mean_b - mean` plus residuals shuffled between rows, each
    column on its own. What the second one gains too, the best of several independent draws gives without anything about
    the row being there to know. It does not show that nothing is there: what rows really prefer adds to the residuals.

    The fit takes a share of one in `num_columns` of pure noise into the means of the rows, so shuffled residuals are a
    little too small; `rescaled` has them larger by `sqrt(num_columns / (num_columns - 1))`, which gives that back.

    Args:
        values (`np.ndarray` of shape `(num_rows, num_columns)`): Say tau by text and block size.
        reference (`np.ndarray` of shape `(num_rows,)`): The same measure at the size to compare with.

    Returns:
        `dict`: `gain` of the values; `shuffled` and `rescaled`, each with the `mean` over the shuffles and their middle
        95 % as `low` and `high`, all relative to the mean of `reference`; and `num_shuffles`.
    """
    num_columns = values.shape[1]
    fit = values.mean(1, keepdims=True) + values.mean(0, keepdims=True) - values.mean()
    residuals, rng, base = values - fit, np.random.default_rng(seed), reference.mean()
    scale, gains = math.sqrt(num_columns / max(1, num_columns - 1)), []
    for _ in range(num_shuffles):
        shuffled = rng.permuted(residuals, axis=0)  # every column in an order of its own
        gains.append([(fit + factor * shuffled).max(1).mean() / base - 1 for factor in (1.0, scale)])
    low, high = np.percentile(gains, _TAILS, axis=0)
    found = {
        name: {"mean": float(np.mean(gains, axis=0)[i]), "low": float(low[i]), "high": float(high[i])}
        for i, name in enumerate(("shuffled", "rescaled"))
    }
    return {"gain": float(values.max(1).mean() / base - 1), **found, "num_shuffles": num_shuffles}


__all__ = ["CONFIDENCE_LEVEL", "Interval", "bootstrap_intervals", "shuffled_gain"]

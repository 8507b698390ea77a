"""Rules that choose a block size, judged on the texts of one temperature.

A rule, such as "always the size that the drafter was trained for" or "what the policy picks", is a distribution over
the block sizes for every text, so that its acceptance length and its speed under a cost table are plain weighted means,
also for a random choice. Knows nothing of files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .costs import CostTable
from .intervals import Means, bootstrap_intervals, shuffled_gain
from .modeling_blockpilot import BlockPilotPolicy
from .policy_training import policy_choices
from .sweep import SweepRow
from .texts import prompt_numbers

# Categories of the usual prompt sets; one that is not named here stands for itself.
GROUPS = {
    "maths": ("gsm8k", "math_reasoning", "math"),
    "code": ("humaneval", "coding", "code"),
    "qa": ("qa", "rag", "extraction", "stem", "humanities"),
    "summary": ("summarization", "summarize"),
    "translation": ("translation",),
    "writing": ("writing", "roleplay", "reasoning", "rewrite", "instruction"),
}
ALL = "all"
# Fewer prompts than this carry no claim about their group.
ENOUGH_PROMPTS = 20
# Of a gain that is smaller than this, as a share of the reference, or not above 0 for sure, no share is told.
LEAST_GAIN = 0.01
MEASURES = ("tau", "speedup")
# What gains are told over.
REFERENCES = ("best_constant", "training_size")

Statistic = Callable[[Means], np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """
    Rules that choose from the same block sizes.

    Args:
        block_sizes (`Sequence[int]`): The candidates, increasing.
        policies (`Mapping[str, BlockPilotPolicy]`): Those that have these candidates, by name.
    """

    block_sizes: tuple[int, ...]
    policies: Mapping[str, BlockPilotPolicy] = field(default_factory=dict)


def group_of(category: str, groups: Mapping[str, Sequence[str]] = GROUPS) -> str:
    """The reporting group of a category."""
    return next((name for name, members in groups.items() if category in members), category)


def ordered_groups(of_rows: Iterable[str], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The groups that occur, known ones in their order, then others by name, then all."""
    known = list(groups)
    found = set(of_rows) - {ALL}
    return [*(name for name in known if name in found), *sorted(found - set(known)), ALL]


def facts_of(row: SweepRow, groups: Mapping[str, Sequence[str]] = GROUPS) -> dict[str, Any]:
    """What a record says of a text, before what was found on it."""
    return {
        "id": row.id,
        "prompt_id": row.prompt_id,
        "category": row.category,
        "group": group_of(row.category, groups),
        "temperature": row.temperature,
        "seed": row.seed,
        "num_prompt_tokens": row.num_prompt_tokens,
        "num_new_tokens": row.num_new_tokens,
    }


class Judged:
    """
    The texts of one temperature, and how every rule chooses on them.

    `tau` and `steps` are `(num_texts, num_block_sizes)`; a rule is a matrix of that shape whose rows sum to 1.
    """

    def __init__(
        self,
        rows: list[SweepRow],
        chosen_on: list[SweepRow],
        comparisons: Sequence[Comparison],
        sizes: tuple[int, ...],
        training_block_size: int,
        costs: CostTable | None,
    ):
        self.rows, self.sizes, self.comparisons, self.costs = rows, sizes, comparisons, costs
        self.training_block_size = training_block_size
        self.tau, tau_chosen_on = taus(rows, sizes), taus(chosen_on, sizes)
        self.steps = np.array([[row.num_steps(size) for size in sizes] for row in rows], dtype=float)
        # Speedup of one token per step; sizes that the table does not price are never asked for.
        priced = costs.block_sizes if costs else []
        self.gain = np.array([costs.speedup(s, 1.0) if costs and s in priced else np.nan for s in sizes])
        self.rules: list[dict[str, np.ndarray]] = []
        self.best_constants: list[dict[str, int]] = []
        self.choices: list[dict[str, list[int]]] = []
        numbers = np.array(prompt_numbers(chosen_on))
        for comparison in comparisons:
            places = [sizes.index(size) for size in comparison.block_sizes]
            has_speed = training_block_size in priced and set(comparison.block_sizes) <= set(priced)
            measured = {"tau": (self.tau, tau_chosen_on)}
            if has_speed:
                measured["speedup"] = (self.tau * self.gain, tau_chosen_on * self.gain)
            rules, constants = {"training_size": self._always(training_block_size)}, {}
            for measure, (_, on_train) in measured.items():
                mean = by_prompt(on_train[:, places], numbers).mean(0)
                constants[measure] = comparison.block_sizes[int(mean.argmax())]
                rules[f"best_constant_{measure}"] = self._always(constants[measure])
            rules["random"] = np.zeros_like(self.tau)
            rules["random"][:, places] = 1 / len(places)
            choices = {name: policy_choices(policy, rows, costs) for name, policy in comparison.policies.items()}
            for name, picked in choices.items():
                rules[f"policy {name}"] = self._one_hot([sizes.index(size) for size in picked])
            for measure, (value, _) in measured.items():
                best = value[:, places].argmax(1)  # the smallest of equals
                rules[f"best_per_prompt_{measure}"] = self._one_hot([places[i] for i in best])
            self.rules.append(rules)
            self.best_constants.append(constants)
            self.choices.append(choices)

    def _one_hot(self, places: Sequence[int]) -> np.ndarray:
        return np.eye(len(self.sizes))[list(places)]

    def _always(self, size: int) -> np.ndarray:
        return self._one_hot([self.sizes.index(size)] * len(self.rows))

    def groups(self, groups: Mapping[str, Sequence[str]]) -> list[str]:
        """Of every text."""
        return [group_of(row.category, groups) for row in self.rows]

    def described(self, i: int) -> dict[str, Any]:
        return {
            "block_sizes": list(self.comparisons[i].block_sizes),
            "training_block_size": self.training_block_size,
            "best_constant": self.best_constants[i],
            "policies": list(self.comparisons[i].policies),
        }

    def shuffled(self, i: int, num_shuffles: int, seed: int) -> dict[str, Any]:
        """The control for both measures, over texts, against the best constant of the measure."""
        places = [self.sizes.index(size) for size in self.comparisons[i].block_sizes]
        found: dict[str, Any] = {}
        for measure, constant in self.best_constants[i].items():
            value = self.tau if measure == "tau" else self.tau * self.gain
            reference = value[:, self.sizes.index(constant)]
            control = shuffled_gain(value[:, places], reference, num_shuffles=num_shuffles, seed=seed)
            found[measure] = {"reference_block_size": constant, **control}
        return found

    def judge(self, result: dict[str, Any], name: str, of_rows: np.ndarray, num_resamples: int, seed: int) -> None:
        """Adds what there is to say of the texts in `of_rows`, a mask, under the group's name."""
        chosen = [row for row, is_in in zip(self.rows, of_rows, strict=True) if is_in]
        numbers = np.array(prompt_numbers(chosen))
        tau, steps = self.tau[of_rows], self.steps[of_rows]
        tokens = np.array([row.num_new_tokens - 1 for row in chosen], dtype=float)
        columns = {"tokens": by_prompt(tokens, numbers, total=True)}
        statistics: dict[tuple[Any, ...], Statistic] = {}
        for place, size in enumerate(self.sizes):
            columns[f"size {size}"] = by_prompt(tau[:, place], numbers)
            statistics["size", size] = _mean(f"size {size}")
        for i, rules in enumerate(self.rules):
            for rule, choice in rules.items():
                picked = choice[of_rows]
                column = f"{i} {rule}"
                columns[f"{column} tau"] = by_prompt((picked * tau).sum(1), numbers)
                columns[f"{column} steps"] = by_prompt((picked * steps).sum(1), numbers, total=True)
                if "speedup" in self.best_constants[i]:
                    # A size that is not priced is never picked, and 0 * nan would be nan.
                    speed = np.where(picked > 0, picked * tau * self.gain, 0.0).sum(1)
                    columns[f"{column} speedup"] = by_prompt(speed, numbers)
                statistics.update(self._statistics(i, rule))
        found = bootstrap_intervals(columns, statistics, num_resamples=num_resamples, seed=seed)
        counts = {"num_prompts": int(numbers.max()) + 1, "num_texts": len(chosen)}
        result["tau_by_block_size"][name] = {str(size): asdict(found["size", size]) for size in self.sizes}
        for i, comparison in enumerate(result["comparisons"]):
            told: dict[str, Any] = {}
            for key, interval in found.items():
                if key[0] == i:
                    place = told.setdefault(key[1], {})
                    for part in key[2:-1]:
                        place = place.setdefault(part, {})
                    place[key[-1]] = asdict(interval)
            for measure in self.best_constants[i]:
                for reference in REFERENCES:
                    is_defined = has_clear_gain(told, reference, measure)
                    for of_rule in told.values():
                        of_rule[f"share_of_gain_over_{reference}"][measure]["is_defined"] = is_defined
            comparison["groups"][name] = {
                **counts,
                "is_enough": counts["num_prompts"] >= ENOUGH_PROMPTS,
                "rules": told,
                "choices": {
                    policy: {
                        str(size): sum(size == one for one, is_in in zip(picked, of_rows, strict=True) if is_in)
                        for size in comparison["block_sizes"]
                    }
                    for policy, picked in self.choices[i].items()
                },
            }

    def _statistics(self, i: int, rule: str) -> dict[tuple[Any, ...], Statistic]:
        """What is told of a rule, as functions of column means."""
        own = f"{i} {rule}"
        told: dict[tuple[Any, ...], Statistic] = {
            (i, rule, "tau"): _mean(f"{own} tau"),
            (i, rule, "tokens_per_step"): lambda means: means["tokens"] / means[f"{own} steps"],
        }
        if "speedup" in self.best_constants[i]:
            assert self.costs is not None
            plain = 1 / self.costs.step_s(1)
            told[i, rule, "speedup"] = _mean(f"{own} speedup")
            told[i, rule, "tokens_per_second"] = lambda means: means[f"{own} speedup"] * plain
        for measure in self.best_constants[i]:
            best, constant = f"{i} best_per_prompt_{measure} {measure}", f"{i} best_constant_{measure} {measure}"
            fixed = f"{i} training_size {measure}"
            told[i, rule, "over_best_constant", measure] = _difference(f"{own} {measure}", constant)
            told[i, rule, "over_training_size", measure] = _difference(f"{own} {measure}", fixed)
            told[i, rule, "share_of_gain_over_best_constant", measure] = _share(f"{own} {measure}", constant, best)
            told[i, rule, "share_of_gain_over_training_size", measure] = _share(f"{own} {measure}", fixed, best)
        return told


def reference_rule(reference: str, measure: str) -> str:
    """The rule that one of `REFERENCES` is for a measure."""
    return f"best_constant_{measure}" if reference == "best_constant" else reference


def has_clear_gain(rules: Mapping[str, Any], reference: str, measure: str) -> bool:
    """
    Whether a share of what the best size per text gains over a reference says anything: that gain is at least 1 %, and
    its interval lies above 0.

    Args:
        rules (`Mapping`): Of one group of a result, by name.
    """
    gain = rules[f"best_per_prompt_{measure}"][f"over_{reference}"][measure]
    base = rules[reference_rule(reference, measure)][measure]["estimate"]
    return gain["low"] is not None and gain["low"] > 0 and gain["estimate"] >= LEAST_GAIN * base


def taus(rows: Sequence[SweepRow], sizes: Sequence[int]) -> np.ndarray:
    """Acceptance lengths, `(num_texts, num_block_sizes)`."""
    return np.array([[row.acceptance_length(size) for size in sizes] for row in rows])


def by_prompt(values: np.ndarray, numbers: np.ndarray, *, total: bool = False) -> np.ndarray:
    """Mean, or sum, over the texts of every prompt: `(num_texts, ...)` to `(num_prompts, ...)`."""
    sums = np.zeros((int(numbers.max()) + 1, *values.shape[1:]))
    np.add.at(sums, numbers, values)
    if total:
        return sums
    return sums / np.bincount(numbers).reshape(-1, *[1] * (values.ndim - 1))


def _mean(column: str) -> Statistic:
    return lambda means: means[column]


def _difference(a: str, b: str) -> Statistic:
    return lambda means: means[a] - means[b]


def _share(rule: str, reference: str, best: str) -> Statistic:
    """Of what the best size per prompt gains over the reference, what the rule gains; 0 / 0 is not defined."""
    return lambda means: (means[rule] - means[reference]) / (means[best] - means[reference])


__all__ = [
    "ALL",
    "ENOUGH_PROMPTS",
    "GROUPS",
    "MEASURES",
    "REFERENCES",
    "Comparison",
    "Judged",
    "by_prompt",
    "facts_of",
    "group_of",
    "has_clear_gain",
    "ordered_groups",
    "reference_rule",
    "taus",
]

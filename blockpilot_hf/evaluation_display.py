"""An evaluation in words and tables: the names of rules, figures with their intervals, rows for a screen or a card."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .evaluation import ALL, ENOUGH_PROMPTS, MEASURES

NONE = "-"
_BY = {"tau": "tau", "speedup": "time"}
_UNIT = {"tau": "tau", "speedup": "speed"}


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, the first column naming the row."""

    title: str
    header: list[str]
    rows: list[list[str]]


def rule_name(rule: str, comparison: Mapping[str, Any]) -> str:
    """What a rule of a record is called where the comparison is known: a policy has its name only next to another."""
    if rule.startswith("policy "):
        return rule if len(comparison["policies"]) > 1 else "policy"
    if rule == "training_size":
        return f"training size {comparison['training_block_size']}"
    if rule == "random":
        return f"random of {len(comparison['block_sizes'])}"
    kind, _, measure = rule.rpartition("_")
    if kind == "best_constant":
        return f"best constant {comparison['best_constant'][measure]} ({_BY[measure]})"
    return f"best per text ({_BY[measure]})"


def figure(entry: Mapping[str, Any] | None, digits: int = 2, *, percent: bool = False) -> str:
    """`1.93 [1.88 1.99]`: the estimate and its interval."""
    if entry is None or entry["estimate"] is None:
        return NONE
    factor, unit = (100, " %") if percent else (1, "")
    shown = f"{entry['estimate'] * factor:.{digits}f}{unit}"
    if entry["low"] is None or entry["high"] is None:
        return shown
    return f"{shown} [{entry['low'] * factor:.{digits}f} {entry['high'] * factor:.{digits}f}]"


def temperature_name(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def main_measure(comparison: Mapping[str, Any]) -> str:
    """What a comparison is about: seconds where they are known."""
    return "speedup" if "speedup" in comparison["best_constant"] else "tau"


def group_name(name: str, group: Mapping[str, Any]) -> str:
    """With its number of prompts, and a star where they are too few."""
    return f"{name} ({group['num_prompts']}){'' if group['is_enough'] else ' *'}"


def rules_table(result: Mapping[str, Any], comparison: Mapping[str, Any], group: str = ALL) -> Table:
    """Every rule with its acceptance length and speed, on one group."""
    judged = comparison["groups"][group]
    has_speed = main_measure(comparison) == "speedup"
    header = ["rule", "tau", "tok/step"]
    header += ["tok/s", "times plain"] if has_speed else []
    rows = []
    for rule, told in judged["rules"].items():
        row = [rule_name(rule, comparison), figure(told["tau"]), f"{told['tokens_per_step']['estimate']:.2f}"]
        if has_speed:
            row += [f"{told['tokens_per_second']['estimate']:.2f}", figure(told["speedup"])]
        rows.append(row)
    where = "" if group == ALL else f"{group}, "
    sizes = ", ".join(map(str, comparison["block_sizes"]))
    title = (
        f"{temperature_name(result['temperature'])}: {where}{judged['num_prompts']} prompts, {judged['num_texts']} "
        f"texts, block sizes {sizes}{''.join(f', policy {name}' for name in comparison['policies'])}"
    )
    return Table(title, header, rows)


def gains_table(comparison: Mapping[str, Any], group: str = ALL) -> Table:
    """What rules that choose gain over those that do not, and which share that is of what could be gained."""
    rows = []
    for measure in (measure for measure in MEASURES if measure in comparison["best_constant"]):
        # By size, so that one that is both stands there once.
        references = {comparison["training_block_size"]: "training_size"}
        references[comparison["best_constant"][measure]] = "best_constant"
        for rule, told in comparison["groups"][group]["rules"].items():
            if not rule.startswith(("policy ", "random", f"best_per_prompt_{measure}")):
                continue
            for size, reference in references.items():
                row = f"{rule_name(rule, comparison).partition(' (')[0]} over size {size}, {_UNIT[measure]}"
                share = told[f"share_of_gain_over_{reference}"][measure]
                # Where resamples have nothing to gain, a share of it says nothing.
                shown = NONE if share["low"] is None or share["high"] is None else figure(share, 0, percent=True)
                rows.append([row, figure(told[f"over_{reference}"][measure], 3), shown])
    return Table("gains, and the share of what the best size per text gains", ["rule", "gain", "share"], rows)


def groups_table(comparison: Mapping[str, Any], policy: str | None = None) -> Table:
    """By group: the rules that need no policy, the policy against the best constant, and the most that there is."""
    measure = main_measure(comparison)
    shown = {"training_size": f"size {comparison['training_block_size']}"}
    if comparison["best_constant"][measure] != comparison["training_block_size"]:
        shown[f"best_constant_{measure}"] = f"size {comparison['best_constant'][measure]}"
    shown["random"] = "random"
    if policy:
        shown[f"policy {policy}"] = "policy"
    shown[f"best_per_prompt_{measure}"] = "best"
    header = ["group (prompts)", *shown.values()]
    header += [f"policy - size {comparison['best_constant'][measure]}"] if policy else []
    rows = []
    for name, group in comparison["groups"].items():
        row = [group_name(name, group), *(f"{group['rules'][rule][measure]['estimate']:.2f}" for rule in shown)]
        if policy:
            row.append(figure(group["rules"][f"policy {policy}"]["over_best_constant"][measure]))
        rows.append(row)
    what = "times plain decoding" if measure == "speedup" else "tau"
    return Table(f"{what} by group{f', policy {policy}' if policy else ''}", header, rows)


def choices_table(comparison: Mapping[str, Any], policy: str) -> Table:
    """How many texts of every group got which size."""
    sizes = [str(size) for size in comparison["block_sizes"]]
    rows = [
        [group_name(name, group), *(str(group["choices"][policy][size]) for size in sizes)]
        for name, group in comparison["groups"].items()
    ]
    return Table(f"texts by chosen size, policy {policy}", ["group (prompts)", *sizes], rows)


def control_lines(comparison: Mapping[str, Any]) -> Iterator[str]:
    """The shuffled control in words."""
    for measure, control in comparison["shuffled"].items():

        def percent(entry: Mapping[str, float]) -> str:
            return f"{entry['mean']:.1%} [{entry['low']:.1%} {entry['high']:.1%}]"

        yield (
            f"by {_BY[measure]}, the best size per text gains {control['gain']:.1%} over size "
            f"{comparison['training_block_size']}; with residuals shuffled between texts it still gains "
            f"{percent(control['shuffled'])}, or {percent(control['rescaled'])} with the variance that the fit took "
            f"({control['num_shuffles']:,} shuffles)"
        )


def told(results: list[dict[str, Any]]) -> Iterator[Table | str]:
    """Everything that a terminal shows of an evaluation: tables, and lines between them."""
    is_small = False
    for result in results:
        for comparison in result["comparisons"]:
            yield rules_table(result, comparison)
            yield gains_table(comparison)
            for policy in comparison["policies"] or [None]:
                yield groups_table(comparison, policy)
                if policy:
                    yield choices_table(comparison, policy)
            yield from control_lines(comparison)
            is_small |= not all(group["is_enough"] for group in comparison["groups"].values())
    yield "Brackets: 95 % bootstrap interval over prompts. Times plain: speed over plain decoding, prefill aside."
    if is_small:
        yield f"* fewer than {ENOUGH_PROMPTS} prompts: too few for a claim."


__all__ = [
    "NONE",
    "Table",
    "choices_table",
    "control_lines",
    "figure",
    "gains_table",
    "group_name",
    "groups_table",
    "main_measure",
    "rule_name",
    "rules_table",
    "temperature_name",
    "told",
]

"""An evaluation in words and tables: the names of rules, figures with their intervals, rows for a screen or a card."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .evaluation_rules import ALL, ENOUGH_PROMPTS, MEASURES, has_clear_gain, reference_rule

NONE = "-"
_BY = {"tau": "tau", "speedup": "time"}
_UNIT = {"tau": "tau", "speedup": "speed"}
# With title, header and line, a summary has twelve lines.
_SUMMARY_ROWS = 9
# "A little more": see `rescaled` in `intervals.shuffled_gain`.
CONTROL_NOTE = (
    "Control: once what two means (the text's and the size's) leave unexplained is shuffled between texts, no text "
    "prefers a size any more, so about what is still gained then, or a little more, may be luck that none can foresee."
)


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, the first column naming the row."""

    title: str
    header: list[str]
    rows: list[list[str]]

    @property
    def markdown(self) -> str:
        """With its title above, as cards have it."""
        return f"{self.title[0].upper()}{self.title[1:]}:\n\n{markdown_table(self.header, self.rows)}"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


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


def policy_label(name: str) -> str:
    """What a policy is called in a title; one that is only named "policy" is not called that twice."""
    return name if name == "policy" else f"policy {name}"


def number(value: float, digits: int) -> str:
    """Rounded, and never -0."""
    shown = f"{value:.{digits}f}"
    return shown.lstrip("-") if float(shown) == 0 else shown


def figure(entry: Mapping[str, Any] | None, digits: int = 2, *, percent: bool = False) -> str:
    """`1.93 [1.88 1.99]`: the estimate and its interval."""
    if entry is None or entry["estimate"] is None:
        return NONE
    factor, unit = (100, " %") if percent else (1, "")
    shown = f"{number(entry['estimate'] * factor, digits)}{unit}"
    if entry["low"] is None or entry["high"] is None:
        return shown
    return f"{shown} [{number(entry['low'] * factor, digits)} {number(entry['high'] * factor, digits)}]"


def gain_figure(rules: Mapping[str, Any], rule: str, reference: str, measure: str) -> str:
    """
    What a rule gains over a reference, in percent of the reference's mean: `12.3 % [10.1 14.5]`.

    Args:
        rules (`Mapping`): Of one group of a result, by name.
        reference (`str`): One of `REFERENCES`.
    """
    base = rules[reference_rule(reference, measure)][measure]["estimate"]
    gain = rules[rule][f"over_{reference}"][measure]
    return figure({end: None if value is None else value / base for end, value in gain.items()}, 1, percent=True)


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
        f"texts, block sizes {sizes}{''.join(f', {policy_label(name)}' for name in comparison['policies'])}"
    )
    return Table(title, header, rows)


def gains_table(comparison: Mapping[str, Any], group: str = ALL) -> Table:
    """What rules that choose gain over those that do not, and which share that is of what could be gained."""
    rows, rules = [], comparison["groups"][group]["rules"]
    for measure in (measure for measure in MEASURES if measure in comparison["best_constant"]):
        # By size, so that one that is both stands there once.
        references = {comparison["training_block_size"]: "training_size"}
        references[comparison["best_constant"][measure]] = "best_constant"
        for rule, told in rules.items():
            if not rule.startswith(("policy ", "random", f"best_per_prompt_{measure}")):
                continue
            for size, reference in references.items():
                row = f"{rule_name(rule, comparison).partition(' (')[0]} over size {size}, {_UNIT[measure]}"
                share = told[f"share_of_gain_over_{reference}"][measure]
                # Where there is nothing to gain, also in resamples, a share of it says nothing.
                is_defined = has_clear_gain(rules, reference, measure) and None not in (share["low"], share["high"])
                shown = figure(share, 0, percent=True) if is_defined else NONE
                rows.append([row, gain_figure(rules, rule, reference, measure), shown])
    title = "gain in percent of the size it is over, and the share of what the best size per text gains there"
    return Table(title, ["rule", "gain", "share"], rows)


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
    header += [f"policy over size {comparison['best_constant'][measure]}"] if policy else []
    rows = []
    for name, group in comparison["groups"].items():
        row = [group_name(name, group), *(f"{group['rules'][rule][measure]['estimate']:.2f}" for rule in shown)]
        if policy:
            row.append(gain_figure(group["rules"], f"policy {policy}", "best_constant", measure))
        rows.append(row)
    what = "times plain decoding" if measure == "speedup" else "tau"
    return Table(f"{what} by group{f', {policy_label(policy)}' if policy else ''}", header, rows)


def choices_table(comparison: Mapping[str, Any], policy: str) -> Table:
    """How many texts of every group got which size."""
    sizes = [str(size) for size in comparison["block_sizes"]]
    rows = [
        [group_name(name, group), *(str(group["choices"][policy][size]) for size in sizes)]
        for name, group in comparison["groups"].items()
    ]
    return Table(f"texts by chosen size, {policy_label(policy)}", ["group (prompts)", *sizes], rows)


def control_lines(comparison: Mapping[str, Any]) -> Iterator[str]:
    """The shuffled control in words, for each measure; what it says is in `CONTROL_NOTE`."""
    for measure, control in comparison["shuffled"].items():
        # Earlier records compare with the training size, and do not say so.
        size = control.get("reference_block_size", comparison["training_block_size"])
        shuffled = figure({"estimate": control["shuffled"]["mean"], **control["shuffled"]}, 1, percent=True)
        yield (
            f"control by {_BY[measure]}: the best size per text gains {number(100 * control['gain'], 1)} % over size "
            f"{size} for all; with residuals shuffled between texts it still gains {shuffled}"
        )


def summary_table(result: Mapping[str, Any]) -> Table:
    """The rules that matter most of all comparisons of a temperature, on all prompts, in a few rows."""
    # Those with seconds first: what does not depend on candidates is taken from there.
    comparisons = sorted(result["comparisons"], key=lambda one: main_measure(one) != "speedup")
    has_speed = main_measure(comparisons[0]) == "speedup"
    num_policies = sum(len(one["policies"]) for one in comparisons)
    constants: dict[str, Mapping[str, Any]] = {}
    policies, best = {}, {}
    for one in comparisons:
        rules, measure = one["groups"][ALL]["rules"], main_measure(one)
        for constant in (f"best_constant_{known}" for known in reversed(MEASURES) if known in one["best_constant"]):
            constants.setdefault(rule_name(constant, one), rules[constant])
        for name in one["policies"]:
            policies[policy_label(name) if num_policies > 1 else "policy"] = rules[f"policy {name}"]
        sizes = one["block_sizes"]
        name = f"best per text, {sizes[0]} to {sizes[-1]}"
        best[name if name not in best else f"best per text, {', '.join(map(str, sizes))}"] = rules[
            f"best_per_prompt_{measure}"
        ]
    first = comparisons[0]
    fixed = {rule_name("training_size", first): first["groups"][ALL]["rules"]["training_size"]}
    num_constants = max(1, _SUMMARY_ROWS - len(fixed) - len(policies) - len(best))
    chosen = {**fixed, **dict(list(constants.items())[:num_constants]), **policies, **best}
    header = ["rule", "tau", *(["times plain", "tok/s"] if has_speed else [])]
    rows = []
    for name, told in chosen.items():
        per_second = told.get("tokens_per_second")
        digits = 1 if per_second and per_second["estimate"] >= 10 else 2
        speed = [figure(told.get("speedup")), figure(per_second, digits)] if has_speed else []
        rows.append([name, figure(told["tau"]), *speed])
    return Table(f"summary, {temperature_name(result['temperature'])}: {result['num_prompts']} prompts", header, rows)


def told(results: list[dict[str, Any]]) -> Iterator[Table | str]:
    """
    Everything that a terminal shows of an evaluation: tables, and lines between them. A summary of each temperature
    comes first, unless there is only one table to sum up.
    """
    compared = [comparison for result in results for comparison in result["comparisons"]]
    if len(compared) > 1:
        yield from map(summary_table, results)
    for result in results:
        for comparison in result["comparisons"]:
            yield rules_table(result, comparison)
            yield gains_table(comparison)
            for policy in comparison["policies"] or [None]:
                yield groups_table(comparison, policy)
                if policy:
                    yield choices_table(comparison, policy)
            yield from control_lines(comparison)
    yield CONTROL_NOTE
    yield "Brackets: 95 % bootstrap interval over prompts."
    if any(main_measure(comparison) == "speedup" for comparison in compared):
        yield "Times plain: speed over plain decoding, prefill aside."
    if not all(group["is_enough"] for comparison in compared for group in comparison["groups"].values()):
        yield f"* fewer than {ENOUGH_PROMPTS} prompts: too few for a claim."


__all__ = [
    "CONTROL_NOTE",
    "NONE",
    "Table",
    "choices_table",
    "control_lines",
    "figure",
    "gain_figure",
    "gains_table",
    "group_name",
    "groups_table",
    "main_measure",
    "markdown_table",
    "number",
    "policy_label",
    "rule_name",
    "rules_table",
    "summary_table",
    "temperature_name",
    "told",
]

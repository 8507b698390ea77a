"""Simulated and timed throughput in words and tables that fit a terminal of 80 columns."""

from collections.abc import Iterator, Mapping
from typing import Any

from .evaluation_display import NONE, Table, figure, number, temperature_name
from .evaluation_rules import ALL, ENOUGH_PROMPTS
from .throughput import BEST_CONSTANT, BEST_PER_STEP, BEST_PER_TEXT, FLIGHT, LOOKUP_FLIGHT, PLAIN, SLOW, TRAINING_SIZE


def rule_name(rule: str, result: Mapping[str, Any]) -> str:
    """What a rule of a record is called; a policy has its name only next to another."""
    kind, _, name = rule.partition(" ")
    if kind == "policy":
        return f"policy {name}" if len(result["policies"]) > 1 else "policy"
    if kind in (FLIGHT, LOOKUP_FLIGHT) and name:
        own = f"flight, {name}" if len(result["policies"]) > 1 else "flight, policy"
        return f"{own}, lookup" if kind == LOOKUP_FLIGHT else own
    known = {
        PLAIN: "plain",
        TRAINING_SIZE: f"training size {result['training_block_size']}",
        BEST_CONSTANT: f"best constant {result['best_constant']}",
        FLIGHT: "flight",
        LOOKUP_FLIGHT: "flight, lookup",
        BEST_PER_TEXT: "best size per text",
        BEST_PER_STEP: "best per step",
    }
    return known.get(rule, rule)


def unit_of(result: Mapping[str, Any]) -> str:
    """Of `tokens_per_second` under a table."""
    return "tok/s" if result["is_in_seconds"] else "tok/pass"


def title_of(result: Mapping[str, Any]) -> str:
    """Temperature, number of prompts and table."""
    return (
        f"simulated, {temperature_name(result['temperature'])}: {result['num_prompts']} prompts, cost table "
        f"{result['table']} ({result['source']})"
    )


def speeds_table(result: Mapping[str, Any], group: str = ALL) -> Table:
    """Every rule over plain decoding."""
    rows = []
    for rule, told in result["groups"][group]["rules"].items():
        per_second = told["tokens_per_second"]["estimate"]
        rows.append(
            [
                rule_name(rule, result),
                figure(told["speedup"]),
                number(per_second, 1 if per_second >= 10 else 2),
                number(told["least_speedup"], 2),
                f"{number(100 * told['share_slow']['estimate'], 0)} %",
            ]
        )
    return Table(title_of(result), ["rule", "times plain", unit_of(result), "least", f"< {SLOW}"], rows)


def ratios_table(result: Mapping[str, Any], group: str = ALL) -> Table:
    """Every rule over the best constant size, and what it reaches of the best size per text."""
    rows = []
    for rule, told in result["groups"][group]["rules"].items():
        per_second = {name: told[name]["tokens_per_second"] for name in ("over_best_constant", "of_best_per_text")}
        rows.append(
            [
                rule_name(rule, result),
                figure(per_second["over_best_constant"]),
                figure(per_second["of_best_per_text"], 0, percent=True),
                figure(told["of_best_per_text"]["speedup"], 0, percent=True),
            ]
        )
    unit = unit_of(result)
    title = f"over the best constant, and of what the best size per text reaches ({unit}; times plain)"
    return Table(title, ["rule", "over constant", f"of best, {unit}", "of best, times"], rows)


def groups_table(result: Mapping[str, Any]) -> Table:
    """Times plain by group, the estimates alone; of a simulated or of a timed result."""
    groups = result["groups"]
    rows = [["prompts", *(f"{group['num_prompts']}{'' if group['is_enough'] else ' *'}" for group in groups.values())]]
    rows += [
        [
            rule_name(rule, result),
            *(number(group["rules"][rule]["speedup"]["estimate"], 2) for group in groups.values()),
        ]
        for rule in groups[ALL]["rules"]
    ]
    return Table("times plain by group", ["rule", *groups], rows)


def choices_line(result: Mapping[str, Any]) -> str:
    """How many texts got which size, by policy."""
    told = (
        f"{rule_name(f'policy {policy}', result)} {', '.join(f'{size} for {count}' for size, count in counts.items())}"
        for policy, counts in result["choices"][ALL].items()
    )
    return f"chosen sizes, and for how many texts: {'; '.join(told)}"


def timed_title(timed: Mapping[str, Any]) -> str:
    """What was run."""
    group = timed["groups"][ALL]
    rounds = f", {timed['num_rounds']} rounds each" if timed["num_rounds"] > 1 else ""
    return (
        f"timed, {timed['dtype']}, {temperature_name(timed['temperature'])}: {group['num_prompts']} prompts{rounds}, "
        f"costs: {timed['source']}"
    )


def timed_table(timed: Mapping[str, Any]) -> Table:
    """Timed speed over plain `generate`."""
    group = timed["groups"][ALL]
    rows = []
    for rule, told in group["rules"].items():
        per_second = told["tokens_per_second"]["estimate"]
        rows.append(
            [
                rule_name(rule, timed),
                figure(told["speedup"]),
                number(per_second, 1 if per_second >= 10 else 2),
                number(told["least_speedup"], 2),
                str(told["num_slow"]),
                f"{told['num_identical']}/{group['num_prompts']}",
            ]
        )
    return Table(timed_title(timed), ["rule", "times plain", "tok/s", "least", f"< {SLOW}", "same text"], rows)


def agreement_table(timed: Mapping[str, Any]) -> Table:
    """Timed decoding next to what the cost table gives the steps that were taken."""
    words = {True: "yes", False: "no", None: NONE}
    rows = [
        [
            rule_name(rule, timed),
            figure(told["decode_speedup"]),
            number(told["simulated_speedup"]["estimate"], 2),
            figure(told["timed_over_simulated"]),
            words[told["agrees"]],
        ]
        for rule, told in timed["groups"][ALL]["rules"].items()
        if rule != PLAIN  # 1 by definition
    ]
    return Table("decoding alone, times plain", ["rule", "timed", "table", "timed/table", "agrees"], rows)


def told_throughput(results: list[dict[str, Any]], timed: Mapping[str, Any] | None = None) -> Iterator[Table | str]:
    """Everything that a terminal shows: tables, and lines between and below them."""
    for result in results:
        yield speeds_table(result)
        yield ratios_table(result)
        yield groups_table(result)
        if result["policies"]:
            yield choices_line(result)
    if timed is not None:
        yield timed_table(timed)
        yield agreement_table(timed)
        yield groups_table(timed)
    yield "Brackets: 95 % bootstrap interval over prompts. Simulated: seconds of the table, prefill and policy aside."
    yield (
        f"Times plain: mean over prompts of the speed over plain decoding; least: of a prompt; < {SLOW}: prompts whose "
        "speed is below that."
    )
    if results:
        each = " and ".join(sorted({unit_of(result) for result in results}, reverse=True))
        passes = "; a pass is one of plain decoding" if any(not one["is_in_seconds"] for one in results) else ""
        yield f"{each}: all tokens over all seconds{passes}."
    if timed is not None:
        yield (
            "Timed: whole calls, prefill included. Table: seconds of the very steps that were taken; agrees: it lies "
            "in the interval of what was timed."
        )
    groups = [group for one in [*results, *([timed] if timed else [])] for group in one["groups"].values()]
    if not all(group["is_enough"] for group in groups):
        yield f"* fewer than {ENOUGH_PROMPTS} prompts: too few for a claim."


__all__ = [
    "agreement_table",
    "groups_table",
    "ratios_table",
    "rule_name",
    "speeds_table",
    "timed_table",
    "told_throughput",
    "unit_of",
]

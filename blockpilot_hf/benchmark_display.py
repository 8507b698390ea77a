"""A benchmark's record in words and tables: for a terminal of 80 columns, in Markdown, and as one README table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .benchmark_reading import (
    PARTS,
    UNSPLIT,
    default_method,
    main_results,
    methods_of,
    record_labels,
    seconds_per_token,
    set_name,
    titles,
)
from .display import counted
from .evaluation_display import NONE, Table, figure, markdown_table, number, temperature_name
from .evaluation_rules import ALL, ENOUGH_PROMPTS
from .throughput import SLOW

# Between columns of a table on a screen.
_GAP = 3
WIDTH = 80


def speeds_table(record: Mapping[str, Any], result: Mapping[str, Any]) -> Table:
    """Whole calls of every method: times plain, our default over it, acceptance length, tokens per second."""
    ours = default_method(record)
    header = ["method", "times plain", *([_over(record, ours)] if ours else []), "tau", "tok/s"]
    rows = []
    for name, told in _methods(record, result):
        per_second = told["tokens_per_second"]
        rows.append(
            [
                titles(record)[name],
                _figure(told["speedup"]),
                *([_figure(told["over_default"]) if name != ours else NONE] if ours else []),
                _estimate(told["acceptance_length"], 2),
                _estimate(per_second, _digits(per_second)),
            ]
        )
    return Table(title_of(record, result), header, rows)


def decoding_table(record: Mapping[str, Any], result: Mapping[str, Any]) -> Table:
    """Without prefill and policy: times plain, the bound, which share of it is reached, and what is not the models'."""
    rows = [
        [
            titles(record)[name],
            _figure(told["decode_speedup"]),
            _estimate(told["bound"], 2),
            figure(told["of_bound"], 0, percent=True),
            _percent(told["overhead_share"]),
        ]
        for name, told in _methods(record, result)
    ]
    return Table(
        f"{_which(record, result)}, decoding alone", ["method", "times plain", "bound", "of bound", "overhead"], rows
    )


def texts_table(record: Mapping[str, Any], result: Mapping[str, Any]) -> Table:
    """Prompt by prompt: whose text is plain generate's, the slowest one, and how repeats differ."""
    count = result["groups"][ALL]["num_prompts"]
    rows, has_spread = [], any(told.get("spread") is not None for _, told in _methods(record, result))
    for name, told in _methods(record, result):
        spread = told.get("spread")
        rows.append(
            [
                titles(record)[name],
                f"{told['num_identical']}/{count}",
                str(told["num_explained"]),
                number(told["least_speedup"], 2),
                str(told["num_slow"]),
                *([NONE if spread is None else f"{number(100 * spread, 1)} %"] if has_spread else []),
            ]
        )
    header = ["method", "same text", "near-ties", "least", f"< {SLOW}", *(["spread"] if has_spread else [])]
    return Table(f"{_which(record, result)}, prompt by prompt", header, rows)


def groups_table(record: Mapping[str, Any], result: Mapping[str, Any]) -> Table:
    """Times plain by group, the estimates alone."""
    groups = result["groups"]
    rows = [["prompts", *(_count(group) for group in groups.values())]]
    for name in methods_of(record, result):
        told = (group["methods"].get(name) for group in groups.values())
        rows.append([titles(record)[name], *(_estimate(one and one["speedup"], 2) for one in told)])
    return Table(f"{_which(record, result)}, times plain by group", ["method", *groups], rows)


def gains_table(record: Mapping[str, Any], result: Mapping[str, Any]) -> Table | None:
    """By group, our default over plain generate and everybody else's methods; `None` where it did not run."""
    ours = default_method(record)
    others = [name for name in methods_of(record, result) if record["methods"][name]["kind"] in ("plain", "peer")]
    if ours is None or not others:
        return None
    rows = []
    for group, judged in result["groups"].items():
        told = (judged["methods"].get(name) for name in others)
        rows.append([f"{group} ({_count(judged)})", *(_figure(one and one["over_default"]) for one in told)])
    title = f"{_which(record, result)}, {titles(record)[ours]} over the others by group"
    return Table(title, ["group (prompts)", *(titles(record)[name] for name in others)], rows)


def time_table(record: Mapping[str, Any], result: Mapping[str, Any]) -> Table:
    """Milliseconds per token, and where they go."""
    rows = []
    for name in methods_of(record, result):
        parts = seconds_per_token(record, result, name)
        is_whole = parts[UNSPLIT] is not None
        total = sum(value or 0.0 for value in parts.values()) if is_whole else None
        rows.append([titles(record)[name], *map(_milliseconds, (*(parts[part] for part in PARTS), total))])
    header = ["method", *PARTS, "all"]
    return Table(f"{_which(record, result)}, milliseconds per token", header, rows)


def sets_table(record: Mapping[str, Any], temperature: float) -> Table | None:
    """Times plain by prompt set; `None` where there is only one."""
    results = [result for result in record["results"] if result["temperature"] == temperature]
    if len(results) < 2:
        return None
    rows = [["prompts", *(_count(result["groups"][ALL]) for result in results)]]
    for name in dict.fromkeys(name for result in results for name in methods_of(record, result)):
        told = (result["groups"][ALL]["methods"].get(name) for result in results)
        rows.append([titles(record)[name], *(_estimate(one and one["speedup"], 2) for one in told)])
    return Table(
        f"{temperature_name(temperature)}, times plain by prompt set", ["method", *map(set_name, results)], rows
    )


def described(record: Mapping[str, Any]) -> Iterator[str]:
    """What was run, where and when."""
    machine, meta, run = record["meta_info"]["machine"], record["meta_info"], record["run_info"]
    where = [str(machine.get(key)) for key in ("dtype", "device", "device_name") if machine.get(key)]
    where += ["packed linear layers"] if machine.get("is_packed") else []
    where += [counted(machine["num_threads"], "thread")] if machine.get("num_threads") else []
    drafter = meta["drafter"]
    trained = f" (trained for size {drafter['training_block_size']})" if drafter.get("training_block_size") else ""
    yield f"target {meta['target'].get('name')}, drafter {drafter.get('name')}{trained}; {', '.join(where)}"
    sets = ", ".join(f"{one['name']} ({one['num_prompts']})" for one in meta.get("prompts", []))
    settings = record["settings"]
    yield (
        f"prompts: {sets or 'unknown'}; at most {settings.get('max_new_tokens', '?')} new tokens, "
        f"{counted(settings.get('repeats', 1), 'call')} of each method, in turns; seed {settings.get('seed', '?')}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items())
    commit = f", commit {run['commit'][:12]}" if run.get("commit") else ""
    yield f"{versions}{commit}; finished {run.get('finished_utc', 'at an unknown time')}"
    if run.get("status", "whole") != "whole":
        yield "This run was stopped before it was through: its figures are of the prompts that were done."
    if run.get("notes"):
        yield f"note: {run['notes']}"


def not_run_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The methods without figures, and why."""
    for method in record["methods"].values():
        if method["reason"]:
            yield f"{method['title']} did not run: {method['reason']}"


def legend_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """What columns mean, as far as they are there."""
    ours = default_method(record)
    yield "Brackets: 95 % bootstrap interval over prompts, paired."
    over = f"; {_over(record, ours)}: how many times as fast {titles(record)[ours]} is" if ours else ""
    yield (
        f"Times plain: speed of whole calls over plain generate, mean over prompts{over}; tau: tokens per verification "
        f"step; least: the slowest prompt; < {SLOW}: prompts with a speed below that."
    )
    yield (
        "Bound: times plain if everything but the passes of target and drafter were free; overhead: the share of "
        "decoding outside of them. - stands where a method does not tell its passes."
    )
    yield (
        "Same text: prompts with plain generate's own text. Sampled texts may differ. Near-ties: different texts that "
        "start to differ where two tokens score alike."
    )
    if any(told.get("spread") is not None for one in record["results"] for _, told in _methods(record, one)):
        yield "Spread: between repeats of a prompt, (slowest - fastest) / median, median over prompts."
    if not all(group["is_enough"] for result in record["results"] for group in result["groups"].values()):
        yield f"* fewer than {ENOUGH_PROMPTS} prompts: too few for a claim."


def told_benchmark(record: Mapping[str, Any]) -> Iterator[Table | str]:
    """Everything that there is to show of a record: tables, and lines between and below them."""
    yield from described(record)
    for result in main_results(record):
        yield speeds_table(record, result)
        yield decoding_table(record, result)
        yield texts_table(record, result)
        gains = gains_table(record, result)
        by_set = sets_table(record, result["temperature"])
        yield from (one for one in (gains, groups_table(record, result), by_set) if one is not None)
        yield time_table(record, result)
    yield from not_run_lines(record)
    yield from legend_lines(record)


def markdown_parts(parts: Iterable[Table | str]) -> str:
    """Tables and lines in Markdown; successive lines become a list."""
    blocks: list[str] = []
    was_line = False
    for part in parts:
        if isinstance(part, Table):
            blocks.append(_escaped(part).markdown)
        elif was_line:
            blocks[-1] += f"\n{_item(part)}"
        else:
            blocks.append(_item(part))
        was_line = isinstance(part, str)
    return "\n\n".join(blocks) + "\n"


def compared_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """
    Several records in one table: a row per method, a column per record and temperature, in the cells times plain with
    its interval; `-` stands where a method did not run.
    """
    columns = [
        (f"{label}, {temperature_name(result['temperature'])}", result["groups"][ALL]["methods"])
        for label, record in zip(record_labels(records), records, strict=True)
        for result in main_results(record)
    ]
    shown = {name: title for record in records for name, title in titles(record).items()}
    rows = [
        [title, *(_figure(told[name]["speedup"]) if name in told else NONE for _, told in columns)]
        for name, title in shown.items()
    ]
    return Table("times plain", ["method", *(name for name, _ in columns)], rows)


def readme_table(records: Sequence[Mapping[str, Any]]) -> str:
    """[`compared_table`] in Markdown, the row of our default in bold."""
    table = _escaped(compared_table(records))
    ours = {titles(record)[name] for record in records if (name := default_method(record))}
    rows = [[f"**{cell}**" if row[0] in ours and cell != NONE else cell for cell in row] for row in table.rows]
    return markdown_table(["times plain", *table.header[1:]], rows)


def fitted(table: Table, width: int = WIDTH) -> list[Table]:
    """
    The table, or where it is wider than `width` several with the same first column, of columns as even in number as
    they can be.
    """
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    for num_parts in range(1, len(widths)):
        per_part = -(-(len(widths) - 1) // num_parts)
        parts = [range(i, min(i + per_part, len(widths))) for i in range(1, len(widths), per_part)]
        if all(widths[0] + sum(widths[i] + _GAP for i in part) <= width for part in parts):
            break
    return [
        Table(
            table.title if n == 0 else f"{table.title}, continued",
            [table.header[0], *(table.header[i] for i in part)],
            [[row[0], *(row[i] for i in part)] for row in table.rows],
        )
        for n, part in enumerate(parts)
    ]


def title_of(record: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Temperature, prompts and dtype."""
    dtype = record["meta_info"]["machine"].get("dtype")
    return f"{_which(record, result)}: {counted(result['num_prompts'], 'prompt')}{f', {dtype}' if dtype else ''}"


def _which(record: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    of_set = f", {set_name(result)}" if set_name(result) != ALL else ""
    return f"{temperature_name(result['temperature'])}{of_set}"


def _methods(record: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in methods_of(record, result):
        yield name, result["groups"][ALL]["methods"][name]


def _over(record: Mapping[str, Any], ours: str) -> str:
    return f"{titles(record)[ours]} over it"


def _count(group: Mapping[str, Any]) -> str:
    return f"{group['num_prompts']}{'' if group['is_enough'] else ' *'}"


def _figure(entry: Mapping[str, Any] | None) -> str:
    """Without an interval where that is the estimate itself, as of plain over plain."""
    if entry is not None and entry["low"] == entry["estimate"] == entry["high"]:
        return figure({**entry, "low": None})
    return figure(entry)


def _estimate(entry: Mapping[str, Any] | None, digits: int) -> str:
    return NONE if entry is None or entry["estimate"] is None else number(entry["estimate"], digits)


def _digits(entry: Mapping[str, Any] | None) -> int:
    """Of tokens per second: three or four that count."""
    return 1 if entry is not None and (entry["estimate"] or 0) >= 10 else 2


def _percent(entry: Mapping[str, Any] | None) -> str:
    return NONE if entry is None or entry["estimate"] is None else f"{number(100 * entry['estimate'], 1)} %"


def _milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else number(1000 * seconds, 2)


def _cell(text: str) -> str:
    """On one line, and no bar ends the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _item(line: str) -> str:
    """Of a list; its star is no list of its own."""
    star = "\\*" if line.startswith("*") else ""
    return f"- {star}{' ' * bool(star)}{_cell(line.removeprefix('*'))}"


def _escaped(table: Table) -> Table:
    return Table(
        table.title and _cell(table.title),
        [_cell(cell) for cell in table.header],
        [[_cell(cell) for cell in row] for row in table.rows],
    )


__all__ = [
    "WIDTH",
    "compared_table",
    "decoding_table",
    "described",
    "fitted",
    "gains_table",
    "groups_table",
    "legend_lines",
    "markdown_parts",
    "not_run_lines",
    "readme_table",
    "sets_table",
    "speeds_table",
    "texts_table",
    "time_table",
    "told_benchmark",
]

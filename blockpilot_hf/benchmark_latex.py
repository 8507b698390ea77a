"""A benchmark's record in LaTeX, as papers have it: speedup and tau per data set or group, the best in bold."""

from collections.abc import Mapping
from typing import Any

from .benchmark_reading import PLAIN, main_results, methods_of, set_name, titles
from .evaluation_display import number
from .evaluation_rules import ALL, ENOUGH_PROMPTS

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_NONE = "--"
_MEASURES = ("speedup", "acceptance_length")
_AVERAGE = "Avg."
_HEADERS = r" & Speedup & $\tau$"
_STAR = "$^{*}$"


def escaped(text: str) -> str:
    """As it has to stand in LaTeX, on one line."""
    return "".join(_ESCAPES.get(character, character) for character in " ".join(text.split()))


def latex_table(record: Mapping[str, Any]) -> str:
    """
    Rows are methods, a block per temperature; columns are prompt sets, or groups where there is one set, each with
    speedup and tau, and last their plain averages. The best of a column is bold, and all that round to the same.

    Args:
        record (`Mapping`): As [`read_record`] gives it.
    """
    results = main_results(record)
    names = list(dict.fromkeys(name for result in results for name in _columns(record, result)))
    num_cells = 2 * (len(names) + 1)
    small = {
        name for result in results for name, group in _columns(record, result).items() if not group["is_enough"]
    }  # fmt: skip
    headers = [f"\\multicolumn{{2}}{{c}}{{{escaped(name)}{_STAR * (name in small)}}}" for name in (*names, _AVERAGE)]
    rules = " ".join(f"\\cmidrule(lr){{{2 * i + 2}-{2 * i + 3}}}" for i in range(len(names) + 1))
    lines = [
        "% Needs \\usepackage{booktabs}.",
        "\\begin{table*}[t]",
        "  \\centering",
        "  \\small",
        "  \\setlength{\\tabcolsep}{3.5pt}",
        f"  \\caption{{{_caption(record, bool(small))}}}",
        f"  \\begin{{tabular}}{{l{'r' * num_cells}}}",
        "    \\toprule",
        f"    & {' & '.join(headers)} \\\\",
        f"    {rules}",
        f"    Method{_HEADERS * (len(names) + 1)} \\\\",
    ]
    for result in results:
        lines += [
            "    \\midrule",
            f"    \\multicolumn{{{num_cells + 1}}}{{c}}{{Temperature = {result['temperature']:g}}} \\\\",
            "    \\midrule",
            *(f"    {row} \\\\" for row in _rows(record, result, names)),
        ]
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table*}"]
    return "\n".join(lines) + "\n"


def _columns(record: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The prompt sets of a temperature, or else its groups; either without the one of all prompts."""
    sets = {
        set_name(one): one["groups"][ALL]
        for one in record["results"]
        if one["temperature"] == result["temperature"] and set_name(one) != ALL
    }
    groups = {name: group for name, group in result["groups"].items() if name != ALL}
    return (sets if len(sets) > 1 else groups) or {ALL: result["groups"][ALL]}


def _rows(record: Mapping[str, Any], result: Mapping[str, Any], names: list[str]) -> list[str]:
    columns, methods = _columns(record, result), methods_of(record, result)
    values = {method: _values(columns, method, names) for method in methods}
    best = [
        max((of_method[i] for of_method in values.values() if of_method[i] != _NONE), key=_as_number, default=None)
        for i in range(2 * len(names) + 2)
    ]
    rows = []
    for method in methods:
        cells = []
        for shown, most in zip(values[method], best, strict=True):
            text = f"\\textbf{{{shown}}}" if shown == most and shown != _NONE else shown
            cells.append(text)
        rows.append(f"{escaped(titles(record)[method])} & {' & '.join(cells)}")
    return rows


def _values(columns: Mapping[str, Mapping[str, Any]], method: str, names: list[str]) -> list[str]:
    """Rounded, speedup and tau in turns; an average only where every column has its figure."""
    shown: list[str] = []
    found: dict[str, list[float | None]] = {measure: [] for measure in _MEASURES}
    for name in names:
        told = columns[name]["methods"].get(method, {}) if name in columns else {}
        for measure in _MEASURES:
            value = (told.get(measure) or {}).get("estimate")
            if method == PLAIN and told and measure == "acceptance_length":
                value = 1.0  # a token per pass
            found[measure].append(value)
            shown.append(_rounded(value))
    for measure in _MEASURES:
        known = [value for value in found[measure] if value is not None]
        shown.append(_rounded(sum(known) / len(known) if len(known) == len(names) else None))
    return shown


def _rounded(value: float | None) -> str:
    return _NONE if value is None else number(value, 2)


def _as_number(shown: str) -> float:
    return float(shown)


def _caption(record: Mapping[str, Any], has_small: bool) -> str:
    meta, settings = record["meta_info"], record["settings"]
    machine = meta["machine"]
    where = ", ".join(str(machine[key]) for key in ("dtype", "device_name") if machine.get(key))
    counts = ", ".join(dict.fromkeys(str(result["num_prompts"]) for result in main_results(record)))
    target, drafter = (escaped(str(meta[kind].get("name"))) for kind in ("target", "drafter"))
    told = (
        f"Speed over plain decoding (whole calls) and acceptance length $\\tau$: {target} with {drafter}, "
        f"{escaped(where)}, {counts} prompts, at most "
        f"{settings.get('max_new_tokens', '?')} new tokens. Means over prompts; {_AVERAGE} is the mean of the columns."
    )
    missing = [escaped(f"{one['title']}: {one['reason']}") for one in record["methods"].values() if one["reason"]]
    if has_small:
        told += f" $^{{*}}$: fewer than {ENOUGH_PROMPTS} prompts."
    return told + "".join(f" Not run: {one}{'' if one.endswith('.') else '.'}" for one in missing)


__all__ = ["escaped", "latex_table"]

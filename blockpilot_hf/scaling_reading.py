"""A scaling record read from a file and checked: what tables and the picture need of it is there."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .benchmark_methods import PLAIN
from .record_reading import lacking, read_sections
from .scaling_summary import AXES, GROWTH, MEASURES

_SECTIONS = {
    "run_info": dict,
    "meta_info": dict,
    "settings": dict,
    "methods": dict,
    "cells": list,
    "summary": list,
}
_OF_METHOD = ("title", "kind", "is_default")
_AGAIN = "Run `blockpilot scaling` again with this version, or use the version that wrote the file."


def is_scaling(record: Any) -> bool:
    """Whether something looks like a record of `blockpilot scaling`, broken or not, rather than like another one."""
    return isinstance(record, dict) and "cells" in record


def is_scaling_record(path: Path) -> bool:
    """The same of a file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    return is_scaling(record)


def read_scaling_record(path: Path) -> dict[str, Any]:
    """
    A record of `blockpilot scaling`, from this machine or another.

    Args:
        path (`Path`): The JSON file.

    Raises:
        `ValueError`: if it is not JSON, not such a record, or lacks what the tables are made of.
    """
    record = read_sections(path, _SECTIONS, command="blockpilot scaling", file="scaling.json")
    if problem := next(_problems(record), None):
        raise ValueError(f"{path} is a scaling record that this version cannot show: {problem}. {_AGAIN}")
    return record


def _problems(record: Mapping[str, Any]) -> Iterator[str]:
    """What is missing or of another kind, in words, as far as tables and the picture would meet it."""
    for name in ("machine", "target", "drafter"):
        if not isinstance(record["meta_info"].get(name), dict):
            yield f"`meta_info` lacks `{name}`"
    for name, method in record["methods"].items():
        yield from lacking(f"`methods`, {name}", method, _OF_METHOD)
    if PLAIN not in record["methods"]:
        yield f"`methods` lacks `{PLAIN}`, which the others are compared with"
    others = [name for name in record["methods"] if name != PLAIN]
    if not others:
        yield f"`methods` holds nothing beside `{PLAIN}`"
    for i, cell in enumerate(record["cells"]):
        yield from lacking(f"`cells`, entry {i}", cell, ("calls",))
        for name, call in cell["calls"].items():
            yield from lacking(f"`cells`, entry {i}, {name}", call, ("total_s", "cpu_s"))
    if not record["summary"]:
        yield "`summary` is empty"
    for i, sweep in enumerate(record["summary"]):
        where = f"`summary`, entry {i}"
        yield from lacking(where, sweep, ("axis", "lengths", "num_repeats", "methods", "growth"))
        if sweep["axis"] not in AXES:
            yield f"{where} is of {sweep['axis']!r}, which is none of {', '.join(AXES)}"
        yield from lacking(where, sweep, [axis for axis in AXES if axis != sweep["axis"]])
        if not isinstance(sweep["lengths"], list) or not sweep["lengths"]:
            yield f"{where} has no lengths"
        yield from lacking(f"{where}, `methods`", sweep["methods"], list(record["methods"]))
        for name in record["methods"]:
            told = sweep["methods"][name]
            yield from lacking(f"{where}, {name}", told, MEASURES)
            for measure in MEASURES:
                if not _are_numbers(told[measure], len(sweep["lengths"])):
                    yield f"{where}, {name}, `{measure}` is no number for each of {len(sweep['lengths'])} lengths"
        yield from lacking(f"{where}, `growth`", sweep["growth"], others)
        for name in others:
            yield from lacking(f"{where}, `growth`, {name}", sweep["growth"][name], GROWTH)
            for measure in GROWTH:
                if (told := sweep["growth"][name][measure]) is not None:
                    yield from lacking(
                        f"{where}, `growth`, {name}, `{measure}`", told, ("shortest", "longest", "growth")
                    )
                    if not _are_numbers([*told.values()], len(told)):
                        yield f"{where}, `growth`, {name}, `{measure}` holds other things than numbers"


def _are_numbers(values: Any, count: int) -> bool:
    """Or `None` where nothing was measured."""
    return (
        isinstance(values, list)
        and len(values) == count
        and all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)
    )


__all__ = ["is_scaling", "is_scaling_record", "read_scaling_record"]

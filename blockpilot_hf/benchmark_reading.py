"""A benchmark's record read from a file and checked, and what tables and pictures need to know of it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .display import counted
from .evaluation_rules import ALL, GROUPS, group_of
from .record_reading import lacking, read_sections

PLAIN = "plain"
PARTS = ("prefill", "policy", "draft", "verify", "other")
# Decoding of methods that do not tell its parts.
UNSPLIT = "decoding"
_SECTIONS = {"run_info": dict, "meta_info": dict, "settings": dict, "methods": dict, "results": list}
_KINDS = ("plain", "peer", "fixed", "ours")
_OF_METHOD = ("title", "kind", "is_default", "reason")
_OF_GROUP = ("num_prompts", "is_enough", "methods")
# Of a method on a group: what has an interval, and what does not.
_INTERVALS = ("speedup", "decode_speedup", "over_default", "acceptance_length", "tokens_per_second")
_BOUNDS = ("bound", "of_bound", "overhead_share")
_COUNTS = ("least_speedup", "num_slow", "num_identical", "num_explained")
_OF_ROW = ("set", "prompt", "category", "turn", "temperature", "num_prompt_tokens", "calls")
_OF_CALL = ("total_s", "decode_s", "num_new_tokens", "acceptance_length")
_AGAIN = "Run `blockpilot benchmark` again with this version, or use the version that wrote the file."


def read_record(path: Path) -> dict[str, Any]:
    """
    A record of `blockpilot benchmark`, from this machine or another.

    Args:
        path (`Path`): The JSON file.

    Raises:
        `ValueError`: if it is not JSON, not a benchmark's record, or lacks what tables are made of.
    """
    record = read_sections(path, _SECTIONS, command="blockpilot benchmark", file="benchmark.json")
    if not record["results"]:
        raise ValueError(
            f"{path} has no results: its run stopped before a prompt was done. Run `blockpilot benchmark` again."
        )
    if problem := next(_problems(record), None):
        raise ValueError(f"{path} is a benchmark's record that this version cannot show: {problem}. {_AGAIN}")
    return record


def _problems(record: Mapping[str, Any]) -> Iterator[str]:
    """What is missing or of another kind, in words, as far as tables and pictures would meet it."""
    for section, name in (("meta_info", "machine"), ("meta_info", "target"), ("meta_info", "drafter")):
        if not isinstance(record[section].get(name), dict):
            yield f"`{section}` lacks `{name}`"
    for name, method in record["methods"].items():
        yield from lacking(f"`methods`, {name}", method, _OF_METHOD)
        if method["kind"] not in _KINDS:
            yield f"`methods`, {name} is of the kind {method['kind']!r}, which is none of {', '.join(_KINDS)}"
    if PLAIN not in record["methods"]:
        yield f"`methods` lacks `{PLAIN}`, which the others are compared with"
    for i, result in enumerate(record["results"]):
        where = f"`results`, entry {i}"
        yield from lacking(where, result, ("temperature", "num_prompts", "groups"))
        if not isinstance(result["groups"], dict) or ALL not in result["groups"]:
            yield f"{where} lacks the group `{ALL}`"
        for group, judged in result["groups"].items():
            yield from lacking(f"{where}, {group}", judged, _OF_GROUP)
            for name, told in judged["methods"].items():
                here = f"{where}, {group}, {name}"
                if name not in record["methods"]:
                    yield f"{here} is not in `methods`"
                yield from lacking(here, told, (*_INTERVALS, *_BOUNDS, *_COUNTS, "seconds_per_token"))
                yield from lacking(f"{here}, `seconds_per_token`", told["seconds_per_token"], PARTS)
                for key in (*_INTERVALS, *_BOUNDS):
                    if told[key] is not None:
                        yield from lacking(f"{here}, `{key}`", told[key], ("estimate", "low", "high"))
                        if not all(one is None or isinstance(one, int | float) for one in told[key].values()):
                            yield f"{here}, `{key}` holds other things than numbers"
    for i, row in enumerate(record.get("per_prompt") or ()):
        yield from lacking(f"`per_prompt`, entry {i}", row, _OF_ROW)
        for name, call in row["calls"].items():
            yield from lacking(f"`per_prompt`, entry {i}, {name}", call, _OF_CALL)


def titles(record: Mapping[str, Any]) -> dict[str, str]:
    """What methods are called, by name."""
    return {name: method["title"] for name, method in record["methods"].items()}


def default_method(record: Mapping[str, Any]) -> str | None:
    """The rule that calls use when nothing is asked for, if it ran."""
    return next((name for name, one in record["methods"].items() if one["is_default"] and not one["reason"]), None)


def set_name(result: Mapping[str, Any]) -> str:
    """Of prompts; a run with one set names none."""
    return result.get("set", ALL)


def main_results(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of every temperature the one on all prompts, else the first."""
    chosen: dict[float, dict[str, Any]] = {}
    for result in record["results"]:
        if result["temperature"] not in chosen or set_name(result) == ALL:
            chosen[result["temperature"]] = result
    return list(chosen.values())


def methods_of(record: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Those that ran, in the record's order."""
    return [name for name in record["methods"] if name in result["groups"][ALL]["methods"]]


def peers_first(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The same methods, what others wrote first and our default last."""
    places = {kind: i for i, kind in enumerate(_KINDS)}
    methods = record["methods"]
    return sorted(names, key=lambda name: (methods[name]["is_default"], places[methods[name]["kind"]]))


def rows_of(record: Mapping[str, Any], result: Mapping[str, Any], group: str = ALL) -> list[dict[str, Any]]:
    """The calls that a result was made from, of one group; none in a record without them."""
    mapping = record["settings"].get("groups", GROUPS)
    return [
        row
        for row in record.get("per_prompt") or ()
        if row["temperature"] == result["temperature"]
        and set_name(result) in (ALL, row["set"])
        and group in (ALL, group_of(row["category"], mapping))
    ]


def calls_by_prompt(record: Mapping[str, Any], result: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The rows of a result by prompt and turn: one for each repeat."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows_of(record, result):
        found.setdefault((row["set"], row["prompt"], row["turn"]), []).append(row)
    return list(found.values())


def seconds_per_token(
    record: Mapping[str, Any], result: Mapping[str, Any], method: str, group: str = ALL
) -> dict[str, float | None]:
    """
    Where the time of a method goes. Where decoding is not told in parts, it stands as one under `decoding`, from the
    calls themselves; `None` where these are not in the record.
    """
    parts: dict[str, float | None] = {**result["groups"][group]["methods"][method]["seconds_per_token"], UNSPLIT: 0.0}
    if any(parts[name] is None for name in ("draft", "verify", "other")):
        calls = [row["calls"][method] for row in rows_of(record, result, group) if method in row["calls"]]
        tokens = sum(call["num_new_tokens"] for call in calls)
        known = sum(parts[name] or 0.0 for name in ("draft", "verify", "other"))
        parts[UNSPLIT] = sum(call["decode_s"] for call in calls) / tokens - known if tokens else None
    return parts


def command_line(label: str, record: Mapping[str, Any]) -> str:
    """Of a card: the command that wrote a record, and on what."""
    run, meta = record["run_info"], record["meta_info"]
    machine = f"{meta['machine']['device_name']} with {counted(meta['machine']['num_threads'], 'thread')}"
    notes = f" {run['notes']}" if run.get("notes") else ""
    return f"Command ({label}): `{run['command']}`, on {machine}, torch {meta['versions']['torch']}.{notes}"


def record_labels(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """
    Records by what tells them apart: the dtype, and where that is not enough the device, the target or a number too.
    """
    facts = [
        (
            str(record["meta_info"]["machine"].get("dtype", "record")),
            str(record["meta_info"]["machine"].get("device_name") or record["meta_info"]["machine"].get("device", "")),
            str(record["meta_info"]["target"].get("name", "")),
        )
        for record in records
    ]
    for length in range(1, 4):
        # Only what differs is worth saying, but the dtype is always said.
        used = [0, *(i for i in range(1, length) if len({fact[i] for fact in facts}) > 1)]
        labels = [", ".join(fact[i] for i in used if fact[i]) for fact in facts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} ({i})" for i, label in enumerate(labels, 1)]


__all__ = [
    "PARTS",
    "PLAIN",
    "UNSPLIT",
    "calls_by_prompt",
    "command_line",
    "default_method",
    "main_results",
    "methods_of",
    "peers_first",
    "read_record",
    "record_labels",
    "rows_of",
    "seconds_per_token",
    "set_name",
    "titles",
]

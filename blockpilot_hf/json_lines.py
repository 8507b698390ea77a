"""JSON files: lines that long jobs add as they go, and records that appear whole."""

import json
import os
from pathlib import Path
from typing import Any


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Adds one line; what a killed run cut off stays a line of its own, which readers leave out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write((json.dumps(entry) + "\n").encode())


def read_lines(path: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """
    Objects of an earlier call, none if the file is not there; a line cut off by a kill is left out.

    Args:
        run (`dict`): Settings of this call, which each of them has under `run`.

    Raises:
        `ValueError`: if they are of other settings.
    """
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found = entry.get("run") if isinstance(entry, dict) else None
        if found != run:
            other = {k: found.get(k) for k in run if found.get(k) != run[k]} if isinstance(found, dict) else found
            raise ValueError(f"{path} holds results of other settings ({other}). Name another file with `--output`.")
        entries.append(entry)
    return entries


def write_json(path: Path, record: dict[str, Any]) -> None:
    """One object, under its name only when whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


__all__ = ["append_line", "read_lines", "write_json"]

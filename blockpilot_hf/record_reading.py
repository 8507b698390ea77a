"""What reading a record takes, whichever command wrote it: its sections are there, and its entries are whole."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def read_sections(path: Path, sections: Mapping[str, type], *, command: str, file: str) -> dict[str, Any]:
    """
    A JSON file with the sections of a command's record.

    Args:
        sections (`Mapping[str, type]`): The kind of each, by name.
        command (`str`): That writes such records, for the message.
        file (`str`): The name under which it does.

    Raises:
        `ValueError`: if the file is not JSON, or lacks a section.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is no whole JSON file ({error}). Name a `{file}` as `{command}` writes it."
        ) from error
    found = record if isinstance(record, dict) else {}
    if missing := [name for name, kind in sections.items() if not isinstance(found.get(name), kind)]:
        has = f"has {', '.join(found) or 'no sections'}" if isinstance(record, dict) else "is no object"
        raise ValueError(
            f"{path} is no record of `{command}`: it {has}, and lacks {', '.join(missing)}. Name a `{file}` as that "
            "command writes it."
        )
    return found


def lacking(where: str, entry: Any, keys: Iterable[str]) -> Iterator[str]:
    """What of `keys` an entry lacks, or that it is none, in words."""
    if not isinstance(entry, dict):
        yield f"{where} is no object"
    elif missing := [key for key in keys if key not in entry]:
        yield f"{where} lacks {', '.join(f'`{key}`' for key in missing)}"


__all__ = ["lacking", "read_sections"]

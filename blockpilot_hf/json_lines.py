"""Files of one JSON object per line, which long jobs add to as they go."""

import json
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


__all__ = ["append_line"]

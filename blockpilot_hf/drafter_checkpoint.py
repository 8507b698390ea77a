"""What a training run leaves on disk so that it can go on: checkpoints, under their names only when whole, and a log.

A checkpoint holds the weights in float32, the optimiser's moments, and where the run stands. Knows nothing of losses or
texts.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .json_lines import append_line

_NAME = "checkpoint"


@dataclass
class TrainingState:
    """What a checkpoint holds besides weights and moments."""

    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """
    A new folder to write into, which takes the place of `folder` at the end. A folder cannot replace another in one
    move, so for a moment the one before is called `<name>.old`: [`find_whole`] finds it there.

    Raises:
        `OSError`: if it cannot be written; `folder` is then what it was.
    """
    beside, before = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        yield beside
        _share(beside)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch writes with errors of the last kind
        shutil.rmtree(beside, ignore_errors=True)
        raise OSError(f"{folder} cannot be written: {error}. What was there before is still there.") from error
    if folder.exists():  # else an interrupted call left `before` as the only one
        shutil.rmtree(before, ignore_errors=True)
        os.replace(folder, before)
    os.replace(beside, folder)
    shutil.rmtree(before, ignore_errors=True)


def _share(folder: Path) -> None:
    """Some writers make files that only their owner can read. All get the rights that the folder was made with."""
    usual = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(path.stat().st_mode | usual)


def find_whole(folder: Path) -> Path | None:
    """`folder`, or the one before it if the last call was killed between two moves."""
    candidates = (folder, folder.with_name(f"{folder.name}.old"))
    return next((found for found in candidates if found.is_dir()), None)


def save_checkpoint(
    output_dir: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState
) -> None:
    """
    Raises:
        `OSError`: if the disk is full, for example; the checkpoint before is still there.
    """
    with written_whole(output_dir / _NAME) as folder:
        weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
        save_file(weights, folder / "drafter.safetensors")
        tensors, rest = _moments(optimizer)
        save_file(tensors, folder / "optimizer.safetensors")
        (folder / "optimizer.json").write_text(json.dumps(rest, indent=2) + "\n", encoding="utf-8")
        (folder / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")


def load_checkpoint(
    output_dir: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    *,
    defaults: dict[str, Any] | None = None,
) -> TrainingState | None:
    """
    Go back to the last checkpoint in `output_dir`; without one, `None` is returned and nothing happens.

    Args:
        settings (`dict`): Those of this run, as JSON has them. What the checkpoint says of them must be the same.
        defaults (`dict`, *optional*):
            What held for settings that the checkpoint does not name, because it is older than they are.

    Raises:
        `ValueError`: if the checkpoint is of another recipe, target or set of texts.
    """
    folder = find_whole(output_dir / _NAME)
    if folder is None:
        return None
    state = TrainingState(**json.loads((folder / "state.json").read_text(encoding="utf-8")))
    for name, ours in settings.items():
        theirs = state.settings.get(name, (defaults or {}).get(name, ours))
        if theirs != ours:
            raise ValueError(
                f"{folder} is of another run: `{name}` was {theirs!r} there and is {ours!r} now. "
                "Use the same settings to go on (only `steps` may change), or another output folder to start anew."
            )
    weights = load_file(folder / "drafter.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    optimizer.load_state_dict(_read_moments(folder))
    return state


def _moments(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The tensors of an optimiser by parameter and name, and the settings of its groups: nothing is pickled."""
    state = optimizer.state_dict()
    tensors = {
        f"{parameter}.{name}": value.detach().contiguous()
        for parameter, values in state["state"].items()
        for name, value in values.items()
    }
    return tensors, state["param_groups"]


def _read_moments(folder: Path) -> dict[str, Any]:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    return {"state": state, "param_groups": json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))}


class TrainingLog:
    """A file of JSON lines, one per step or validation, each with its `step`."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, entry: dict[str, Any]) -> None:
        append_line(self.path, entry)

    def up_to(self, step: float = math.inf) -> list[dict[str, Any]]:
        """The entries of all steps until that one."""
        return [entry for entry in self._entries() if "step" in entry and entry["step"] <= step]

    def cut_after(self, step: int) -> list[dict[str, Any]]:
        """Removes the lines of later steps, and what a killed run left of a line; returns the others."""
        kept = self.up_to(step)
        if len(kept) < len(self._entries()):
            beside = self.path.with_suffix(".new")
            beside.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
            os.replace(beside, self.path)
        return kept

    def _entries(self) -> list[dict[str, Any]]:
        """What was cut off is an empty one."""
        lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.is_file() else []
        return [_parse(line) for line in lines if line]


def _parse(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return {}


__all__ = ["TrainingLog", "TrainingState", "find_whole", "load_checkpoint", "save_checkpoint", "written_whole"]

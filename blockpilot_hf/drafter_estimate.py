"""What a training run will take, before it starts: memory, disk and time, from sizes and one trial of its loss.

The trial changes nothing: no weight, no gradient, no random state, no file. Seconds are those of this machine now.
"""

import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .drafter_loss import DrafterLoss
from .target_states import TargetStatesReader, target_states
from .texts import Text


@dataclass(frozen=True)
class DiskEstimate:
    """
    Args:
        folder (`Path`): Where the target's states are kept.
        needed_bytes (`int`): What those will take that are not there yet.
        free_bytes (`int`): On that disk.
    """

    folder: Path
    needed_bytes: int
    free_bytes: int


def estimate_disk(reader: TargetStatesReader, texts: list[Text], num_visits: int) -> DiskEstimate | None:
    """
    What kept states will take; `None` where they are not kept.

    Args:
        num_visits (`int`): Texts that are visited, repetitions included.

    Raises:
        `ValueError`: if that much is not free.
    """
    if reader.folder is None:
        return None
    missing = [text for text in texts if not reader.has(text)]
    share = min(1.0, num_visits / len(texts))
    needed = round(share * sum(len(text.ids) for text in missing)) * reader.bytes_per_token
    existing = next(folder for folder in (reader.folder, *reader.folder.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(
            f"The target's states need about {needed / 1e9:.1f} GB in {reader.folder}, {free / 1e9:.1f} GB are "
            "free. Name a folder on another disk with `--states`, or pass `--recompute`."
        )
    return DiskEstimate(reader.folder, needed, free)


@dataclass(frozen=True)
class RunEstimate:
    """
    Args:
        num_steps (`int`): Steps still to be taken.
        step_s (`float`): Seconds of one, with the target's states at hand.
        states_s (`float`): Seconds of a target pass over one text.
        num_passes (`int`): How many of them each process will need.
        present_bytes (`dict[str, int]`): What weights take, by whose they are. They are in memory already.
        coming_bytes (`dict[str, int]`): What will come on top, by what it is.
        available_bytes (`int`): Memory that this process can still take.
    """

    num_steps: int
    step_s: float
    states_s: float
    num_passes: int
    present_bytes: dict[str, int]
    coming_bytes: dict[str, int]
    available_bytes: int

    @property
    def total_s(self) -> float:
        """Seconds until the last step, validations apart."""
        return self.num_steps * self.step_s + self.num_passes * self.states_s


def estimate_run(
    loss: DrafterLoss,
    optimizer: torch.optim.Optimizer,
    texts: list[Text],
    *,
    num_steps: int,
    num_processes: int = 1,
) -> RunEstimate:
    """
    Try the loss on the longest text and on one of the mean length.

    Args:
        loss ([`DrafterLoss`]): Of the run; its reader says whose states are kept already.
        optimizer (`torch.optim.Optimizer`): Of the run.
        texts (`list[Text]`): To train on.
        num_steps (`int`): Steps still to be taken.
        num_processes (`int`, *optional*, defaults to 1): Processes that share the texts of a step.

    Raises:
        `ValueError`: if memory will not do, with what takes it and what to change.
    """
    drafter, config = loss.drafter, loss.config
    device, weights = drafter.device, _bytes_of(drafter.parameters())
    moments = [part for state in optimizer.state.values() for part in state.values() if isinstance(part, torch.Tensor)]
    available = available_memory(device) // (num_processes if device.type == "cpu" else 1)
    coming = {"gradients": weights, "moments": max(0, 2 * weights - _bytes_of(moments))}
    # Scores and their gradient alone, lest the trial itself takes too much.
    sizes = config.block_sizes or (drafter.config.block_size,)
    longest = max(texts, key=lambda text: len(text.ids))
    anchors = min(config.anchors_per_sequence, len(longest.answer_ids) - 1)
    scores = 2 * 4 * anchors * (max(sizes) - 1) * loss.head.weight.shape[0]
    _check_memory({**coming, "scores of a text": scores}, available)
    mean = sum(len(text.ids) for text in texts) / len(texts)
    typical = min(texts, key=lambda text: abs(len(text.ids) - mean))
    try:
        activations, _, _ = _try(loss, longest, max(sizes))
        _, text_s, states_s = _try(loss, typical, sizes[len(sizes) // 2])
    except torch.OutOfMemoryError:
        raise ValueError(_too_much({**coming, "the longest text": scores}, available)) from None
    coming["the longest text"] = activations
    _check_memory(coming, available)
    visits = num_steps * config.texts_per_step
    passes = visits
    if loss.read_states.folder is not None:
        missing = sum(not loss.read_states.has(text) for text in texts)
        passes = round(missing * min(1.0, visits / len(texts)))
    return RunEstimate(
        num_steps=num_steps,
        step_s=math.ceil(config.texts_per_step / num_processes) * text_s,
        states_s=states_s,
        num_passes=math.ceil(passes / num_processes),
        present_bytes={"target": _bytes_of(loss.target.parameters()), "drafter": weights},
        coming_bytes=coming,
        available_bytes=available,
    )


def available_memory(device: torch.device) -> int:
    """Bytes that can still be taken on a device: of a GPU what is free, else what the system and its limits leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    left = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if hasattr(os, "sysconf") else []
    facts = _facts(Path("/proc/meminfo"))
    if "MemAvailable" in facts:
        left = [facts["MemAvailable"] * 1024]  # what is merely cached counts
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        left.append(limit - used + _facts(group / "memory.stat").get("inactive_file", 0))
    except (OSError, ValueError):  # no limit
        pass
    return min(left, default=2**63)


def _facts(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    parts = [line.replace(":", " ").split() for line in lines]
    return {part[0]: int(part[1]) for part in parts if len(part) > 1 and part[1].isdecimal()}


def _try(loss: DrafterLoss, text: Text, block_size: int) -> tuple[int, float, float]:
    """Bytes that a text's pass keeps for its way back, and seconds of both ways and of the target's pass."""
    drafter, reader = loss.drafter, loss.read_states
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in (*drafter.parameters(), *loss.head.parameters())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with _nothing_changed(drafter, reader.target.device):
        with _timed(drafter.device) as states_s:
            states = target_states(reader.target, reader.target_layer_ids, text)
        with _timed(drafter.device) as text_s:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                value, _ = loss.of_states(text, states, torch.Generator().manual_seed(0), block_size)
            value.backward()
    # On the way back the largest of them has a gradient of its size, and for a moment a copy of that.
    return sum(kept.values()) + 2 * max(kept.values(), default=0), text_s[0], states_s[0]


@contextmanager
def _nothing_changed(drafter: Any, device: torch.device) -> Iterator[None]:
    was_training = drafter.training
    drafter.train()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        drafter.zero_grad(set_to_none=True)
        drafter.train(was_training)


@contextmanager
def _timed(device: torch.device) -> Iterator[list[float]]:
    """Its seconds, afterwards, in the list."""
    seconds: list[float] = []
    started = time.perf_counter()
    yield seconds
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds.append(time.perf_counter() - started)


def _check_memory(coming: dict[str, int], available: int) -> None:
    if sum(coming.values()) > available:
        raise ValueError(_too_much(coming, available))


def _too_much(coming: dict[str, int], available: int) -> str:
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in coming.items())
    return (
        f"Training needs about {sum(coming.values()) / 1e9:.2f} GB of memory more ({parts}), {available / 1e9:.2f} GB "
        "are available. Take fewer `--anchors`, a smaller block size, shorter texts or fewer `--layers`."
    )


def _bytes_of(tensors: Any) -> int:
    return sum(
        tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, nn.Parameter | torch.Tensor)
    )


__all__ = ["DiskEstimate", "RunEstimate", "available_memory", "estimate_disk", "estimate_run"]

"""The most memory that a call holds beyond what was held before it. Knows nothing of models.

On a GPU the allocator counts. On a CPU no allocator of torch's does, and the kernel's own mark is read: the most pages
that the process ever had (`VmHWM`), which Linux sets back on request. Elsewhere there is none, and nothing is guessed.
"""

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5): sets the peak back to what is held now

ALLOCATOR = "allocator of the device: most bytes in tensors"
KERNEL = "kernel: most resident memory of the process (VmHWM)"


@dataclass
class Peak:
    """`num_bytes` is known when the call is over; `None` where nothing counts."""

    num_bytes: int | None = None


def memory_source(device: torch.device) -> str | None:
    """Who counts memory for calls on a device, in words for records; `None` where nobody does."""
    if device.type != "cpu":
        try:
            torch.accelerator.max_memory_allocated(device)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError):
            return None
        return ALLOCATOR
    try:
        _RESET.write_text(_RESET_PEAK)
        _status_bytes("VmHWM")
    except (OSError, KeyError):
        return None
    return KERNEL


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """
    Count what is done inside.

    Args:
        device (`torch.device`): Where the call's tensors are.
    """
    peak, source = Peak(), memory_source(device)
    gc.collect()
    if source == ALLOCATOR:
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        yield peak
        peak.num_bytes = torch.accelerator.max_memory_allocated(device) - before
    elif source == KERNEL:
        # What was freed but not given back would be used again unseen.
        _give_back()
        _RESET.write_text(_RESET_PEAK)
        before = _status_bytes("VmRSS")
        yield peak
        peak.num_bytes = max(0, _status_bytes("VmHWM") - before)
    else:
        yield peak


def _status_bytes(name: str) -> int:
    """A line of the kernel's account of this process, which it gives in KiB."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024


def _give_back() -> None:
    """Free pages of the C library back to the kernel, where it can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


__all__ = ["ALLOCATOR", "KERNEL", "Peak", "memory_source", "peak_memory"]

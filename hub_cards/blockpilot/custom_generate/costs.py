"""What passes cost: seconds of a drafting and of a verifying pass by width and context length.

Decisions, labels and evaluations read a frozen table of such seconds and never a clock, so the same call decides the
same way again. Only ratios to a plain pass matter to them. What a table was measured on is its key: everything that the
seconds of a pass depend on, and not the weights. This module holds tables, keys and the place of kept tables; it
measures nothing.
"""

import functools
import hashlib
import json
import os
import platform
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.hub import constants

_REFERENCE_LENGTH = 256


@dataclass(frozen=True)
class CostTable:
    """
    Seconds at measured widths and context lengths, and between and beyond them.

    Args:
        context_lengths (`tuple[int, ...]`): Tokens before the block, rising.
        verify_s (`dict[int, tuple[float, ...]]`):
            Seconds of a target pass by width, one number for each context length; width 1 is a step of plain decoding.
        draft_s (`dict[int, tuple[float, ...]]`): Seconds of drafting a block, by block size above 1.
        key (`dict[str, Any]`, *optional*): What it was measured on, see [`costs_key`].
        source (`str`, *optional*): Where the seconds come from, in words for the user.
        measured (`dict[str, Any]`, *optional*): How it was measured: medians before they were fitted, names, counts.

    Raises:
        `ValueError`: if a number is missing or not above 0.
    """

    context_lengths: tuple[int, ...]
    verify_s: dict[int, tuple[float, ...]]
    draft_s: dict[int, tuple[float, ...]]
    key: dict[str, Any] = field(default_factory=dict)
    source: str = "given"
    measured: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        lengths = self.context_lengths
        if not lengths or list(lengths) != sorted(set(lengths)) or lengths[0] < 0:
            raise ValueError(f"Context lengths of a cost table must rise from 0 or more, got {list(lengths)}.")
        if 1 not in self.verify_s or min(self.verify_s) < 1 or min(self.draft_s, default=2) < 2:
            raise ValueError(
                f"A cost table needs the target's seconds at width 1 and drafting seconds of sizes above 1 only, got "
                f"widths {sorted(self.verify_s)} and drafted sizes {sorted(self.draft_s)}. Measure it again."
            )
        for row in (*self.verify_s.values(), *self.draft_s.values()):
            if len(row) != len(lengths):
                raise ValueError(
                    f"A cost table needs one number for each of its {len(lengths)} context lengths, got {list(row)}."
                )
            if not all(0 < seconds < float("inf") for seconds in row):
                raise ValueError(f"Seconds in a cost table must be above 0, got {list(row)}. Measure it again.")

    @property
    def block_sizes(self) -> list[int]:
        """Sizes that a step can be priced at: every one up to the largest that was drafted."""
        return list(range(1, max(self.draft_s, default=1) + 1))

    @property
    def name(self) -> str:
        """Short and the same for the same key."""
        return key_name(self.key)

    @property
    def reference_length(self) -> int:
        """The context length where none is named: 256, or what of the measured stretch comes closest to it."""
        return min(max(_REFERENCE_LENGTH, self.context_lengths[0]), self.context_lengths[-1])

    def verify_at(self, width: int, context_length: int | None = None) -> float:
        """
        Seconds of a target pass over `width` positions: linear between measured ones, with the last slope beyond them,
        and never falling there.

        Args:
            context_length (`int`, *optional*): Tokens before the block, by default [`reference_length`].
        """
        return self._seconds(self.verify_s, width, context_length)

    def draft_at(self, block_size: int, context_length: int | None = None) -> float:
        """
        Seconds of drafting a block, as in [`verify_at`]; below the smallest drafted size as that one.

        Raises:
            `ValueError`: if the table knows of no drafting at all.
        """
        if not self.draft_s:
            raise ValueError("This cost table has no drafting seconds, so it can price plain decoding only.")
        return self._seconds(self.draft_s, block_size, context_length)

    def step_s(self, block_size: int, *, verify_width: int | None = None, context_length: int | None = None) -> float:
        """Seconds of a step at `block_size`: drafting it and verifying it or a part of it; at 1 nothing is drafted."""
        if block_size == 1:
            return self.verify_at(verify_width or 1, context_length)
        width = block_size if verify_width is None else verify_width
        return self.draft_at(block_size, context_length) + self.verify_at(width, context_length)

    def speedup(self, block_size: int, acceptance_length: float, context_length: int | None = None) -> float:
        """Tokens per second at `block_size` over those of plain decoding, prefill aside."""
        step_s = self.step_s(block_size, context_length=context_length)
        return acceptance_length * self.verify_at(1, context_length) / step_s

    def covers(self, block_sizes: Iterable[int] | None, context_lengths: Iterable[int] | None) -> bool:
        """Whether these, all or none, were measured themselves."""
        sizes = {1, *(block_sizes or ())}
        is_priced = sizes <= {*self.verify_s} and sizes - {1} <= {*self.draft_s}
        return is_priced and {*(context_lengths or ())} <= {*self.context_lengths}

    def at(self, context_length: int) -> "CostTable":
        """The table of one context length."""
        return replace(
            self,
            context_lengths=(context_length,),
            verify_s={width: (self.verify_at(width, context_length),) for width in self.verify_s},
            draft_s={size: (self.draft_at(size, context_length),) for size in self.draft_s},
        )

    def _seconds(self, rows: Mapping[int, Sequence[float]], width: int, context_length: int | None) -> float:
        lengths = self.context_lengths
        context_length = self.reference_length if context_length is None else context_length
        widths = sorted(rows)
        i = min(max(bisect_right(widths, width), 1), len(widths) - 1)
        around = widths[max(i - 1, 0) : i + 1]
        return _interpolated(around, [_interpolated(lengths, rows[known], context_length) for known in around], width)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        seconds = {
            name: {str(width): list(getattr(self, name)[width]) for width in sorted(getattr(self, name))}
            for name in ("verify_s", "draft_s")
        }
        more = {"measured": self.measured} if self.measured else {}
        return {
            "context_lengths": list(self.context_lengths),
            **seconds,
            "key": self.key,
            "source": self.source,
            **more,
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "CostTable":
        """
        From [`to_dict`], or from the form of one `context_length`, with a number per width and `measured_on`.

        Raises:
            `ValueError`, `KeyError`, `TypeError`, `AttributeError`: if it is neither.
        """
        is_flat = "context_lengths" not in entry
        lengths = [entry["context_length"]] if is_flat else entry["context_lengths"]
        seconds = {
            name: {
                int(width): tuple(float(s) for s in ([row] if is_flat else row)) for width, row in entry[name].items()
            }
            for name in ("verify_s", "draft_s")
        }
        return cls(
            context_lengths=tuple(int(length) for length in lengths),
            **seconds,
            key=dict(entry.get("measured_on" if is_flat else "key") or {}),
            source=str(entry.get("source", "measured earlier")),
            measured=dict(entry.get("measured") or {}),
        )

    @classmethod
    def load(cls, path: str | os.PathLike) -> "CostTable":
        """
        Raises:
            `ValueError`: if the file is no cost table.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{path} is not a cost table ({reason}). Leave it out, or make one with `blockpilot calibrate`."
            ) from error

    def save(self, path: str | os.PathLike) -> None:
        """Under its name only when whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(self.to_dict(), indent=2) + "\n")
            Path(beside).chmod(0o644)
            os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)


def _interpolated(points: Sequence[int], values: Sequence[float], x: float) -> float:
    """Linear between the points, below the first as there, beyond the last with the last slope or level."""
    if x <= points[0] or len(points) == 1:
        return values[0]
    i = min(bisect_right(points, x), len(points) - 1)
    slope = (values[i] - values[i - 1]) / (points[i] - points[i - 1])
    if x > points[-1]:
        return values[-1] + max(slope, 0.0) * (x - points[-1])
    return values[i - 1] + slope * (x - points[i - 1])


def blockpilot_cache_dir() -> Path:
    """
    This package's part of the Hugging Face cache. `HF_HOME` is looked up at every call: it may be set after the first
    import of a library that reads it.
    """
    home = os.environ.get("HF_HOME")
    return Path(os.path.expandvars(home) if home else constants.HF_HOME).expanduser() / "blockpilot"


def kept_costs_path(key: Mapping[str, Any]) -> Path:
    """Where a table with this key is kept, whether it is there or not."""
    return blockpilot_cache_dir() / "costs" / f"{key_name(key)}.json"


def key_name(key: Mapping[str, Any]) -> str:
    """Of 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def costs_key(target: Any, drafter: Any) -> dict[str, Any]:
    """
    Everything that the seconds of a pass depend on, as JSON values: classes and shapes of both models, dtypes,
    attention, kind of linear layers, device, threads and torch. Weights and names of the models are no part of it.
    """
    places = {str(target.device), str(drafter.device)}
    # Split over several devices, as by `device_map`.
    places |= {str(place) for place in (getattr(target, "hf_device_map", None) or {}).values() if place != "disk"}
    devices = {device_name(f"cuda:{place}" if place.isdigit() else place) for place in places}
    is_on_cpu = any(place.startswith("cpu") for place in places)
    return {
        "target": _model_key(target),
        "drafter": _model_key(drafter),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": ", ".join(sorted(devices)),
        "num_devices": len(places),
        # Kernels on an accelerator are started by one thread.
        "num_threads": torch.get_num_threads() if is_on_cpu else None,
        "torch": torch.__version__,
    }


def _model_key(model: Any) -> dict[str, Any]:
    config = model.config
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    # All counts and widths, under whatever names; what numbers only mean ids, or what a model was trained for, is not.
    shape: dict[str, Any] = {
        name: value
        for name, value in sorted(vars(text).items())
        if type(value) is int
        and not name.startswith("_")
        and not name.endswith(("_id", "_ids"))
        and name not in _NO_SHAPE
    }
    for name in ("layer_types", "target_layer_ids"):
        entries = getattr(text, name, None)
        if entries:
            shape[name] = len(entries) if name == "target_layer_ids" else dict(sorted(Counter(entries).items()))
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(text, "_attn_implementation", None),
        "linear": linear_kind(model),
        "shape": shape,
    }


_NO_SHAPE = frozenset(
    {"max_position_embeddings", "block_size", "original_max_position_embeddings", "max_window_layers"}
)


def linear_kind(model: Any) -> str | None:
    """
    Class of the model's first linear layer, with the class of its weight where a quantisation put one of its own there:
    ordinary, packed or quantised.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        kind = type(module)
        # Quantised layers of torch have that name too. The rest goes by its name alone: ours may be a copy of the code.
        name = f"{kind.__module__}.Linear" if kind.__name__ == "Linear" and kind is not nn.Linear else kind.__name__
        if "linear" in name.lower() or name == "Conv1D":
            weight = module._parameters.get("weight")  # not as attribute: packed layers note that it is read
            is_own = weight is not None and type(weight) not in (nn.Parameter, torch.Tensor)
            return f"{name} of {type(weight).__name__}" if is_own else name
    return None


@functools.lru_cache(maxsize=16)
def device_name(device: str) -> str:
    """The accelerator's name, or the processor's with its widest vector instructions."""
    place = torch.device(device)
    if place.type != "cpu":
        module = getattr(torch, place.type, None)
        found = getattr(module, "get_device_name", None)
        try:
            return str(found(place)) if found else place.type
        except (RuntimeError, AssertionError):  # a type that this build of torch has no device for
            return place.type
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass  # not Linux
    more = ", bfloat16" if has_native_bfloat16() else ""
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}{more})"


def has_native_bfloat16() -> bool:
    """Whether the processor has instructions for products in bfloat16."""
    # Not in every torch; a processor that nothing is known of counts as one without.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


__all__ = [
    "CostTable",
    "blockpilot_cache_dir",
    "costs_key",
    "device_name",
    "has_native_bfloat16",
    "kept_costs_path",
    "key_name",
    "linear_kind",
]

"""Which cost table a call decides by: the one kept for exactly this pair and machine, else a default.

Nothing is measured here, only a file is read, so this may run within a timed call. Defaults are in units of a plain
pass, which is all that decisions need. They are rough, and a table of one's own (`blockpilot calibrate`) goes before
them.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .costs import CostTable, costs_key, has_native_bfloat16, kept_costs_path, key_name

logger = logging.get_logger(__name__)

# Widths that a default prices, up to the larger of this and the drafter's block size.
LARGEST_DEFAULT_SIZE = 16


@dataclass(frozen=True)
class DeviceClass:
    """
    What passes cost on one kind of device, in plain passes.

    Args:
        source (`str`): Said to the user.
        verify (`tuple[tuple[int, float], ...]`): Width and cost of a target pass; linear between them, and beyond.
        drafting (`float`, *optional*, defaults to 1.0): Factor on the drafter's share of the target's work.
        overhead (`float`, *optional*, defaults to 0.05): What drafting costs besides that share.
        is_launch_bound (`bool`, *optional*, defaults to `False`):
            Whether the number of layers decides where it weighs more than the number of parameters.
    """

    source: str
    verify: tuple[tuple[int, float], ...]
    drafting: float = 1.0
    overhead: float = 0.05
    is_launch_bound: bool = False


# Measured: a model of 135 M parameters on processors of 2 cores. Ordinary products in float32 rearrange the weight in
# every pass of more than one row (AVX-512); packed ones do not (AVX2, up to 10; beyond, the same slope is assumed).
CPU_FLOAT32 = DeviceClass(
    "default for float32 on a CPU", ((1, 1.0), (2, 1.44), (4, 1.45), (8, 1.57), (16, 1.85), (32, 2.5))
)
CPU_FLOAT32_PACKED = DeviceClass(
    "default for float32 on a CPU with packed weights",
    ((1, 1.0), (2, 1.09), (4, 1.2), (8, 1.32), (16, 1.75), (32, 2.6)),
)
# Measured: the same model on 2 cores with AVX512-BF16.
CPU_BFLOAT16 = DeviceClass(
    "default for bfloat16 on a CPU with instructions for it",
    ((1, 1.0), (2, 1.0), (4, 1.02), (8, 1.17), (16, 1.38), (32, 1.81)),
)
# Assumed: one pass reads all weights whatever its width, and models in Python are bound by starting kernels. Published
# figures of DFlash (arXiv 2602.06036, Qwen3-4B and 8B, block size 16) are in line: acceptance length over speedup is
# 1.33 to 1.4 plain passes a step, of which a drafter of 5 layers for a target of 36 has 0.2 or so.
ACCELERATOR_HALF = DeviceClass(
    "default for half precision on an accelerator",
    ((1, 1.0), (2, 1.02), (4, 1.03), (8, 1.05), (16, 1.1), (32, 1.2), (64, 1.4)),
    is_launch_bound=True,
)
# Assumed: without matrix units in half precision, arithmetic is felt earlier.
ACCELERATOR_FLOAT32 = DeviceClass(
    "default for float32 on an accelerator",
    ((1, 1.0), (2, 1.05), (4, 1.08), (8, 1.15), (16, 1.35), (32, 1.8), (64, 2.8)),
    is_launch_bound=True,
)
# Assumed, between an accelerator and a CPU.
MPS = DeviceClass(
    "default for Apple GPUs",
    ((1, 1.0), (2, 1.15), (4, 1.22), (8, 1.4), (16, 1.8), (32, 2.7)),
    overhead=0.08,
    is_launch_bound=True,
)
# Assumed, so that a block is drafted only where long runs are accepted: wide passes dear, drafting twice its share.
CAUTIOUS = DeviceClass(
    "cautious default, {reason}",
    ((1, 1.0), (2, 1.6), (4, 2.0), (8, 2.8), (16, 4.2), (32, 7.0)),
    drafting=2.0,
    overhead=0.1,
    is_launch_bound=True,
)

_ACCELERATORS = ("cuda", "xpu", "npu")
# Names under which configs say that a token goes through some of the weights only.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def costs_for(target: Any, drafter: Any) -> CostTable:
    """
    The table of a call: the calibrated one for this pair, dtype, device and number of threads if one is kept, else the
    default of the device class; `source` says which. A kept file that is damaged is left aside with a warning, since
    decoding needs no table to be right.

    Args:
        target, drafter (`PreTrainedModel`): As they will run: dtype, device, packing and attention count.
    """
    key = costs_key(target, drafter)
    kept = kept_costs(key)
    return default_costs(target, drafter, key) if kept is None else kept


def kept_costs(key: dict[str, Any]) -> CostTable | None:
    """The calibrated table with this key, or `None`."""
    path = kept_costs_path(key)
    try:
        found = path.stat()
    except OSError:
        return None
    table = _read(path, found.st_mtime_ns, found.st_size)
    return table if table is not None and table.key == key else None


@functools.lru_cache(maxsize=32)
def _read(path: Path, mtime_ns: int, size: int) -> CostTable | None:
    """A file as it was at that time: a calibration in between is seen, and a call costs no more than a look."""
    try:
        return CostTable.load(path)
    except (OSError, ValueError) as error:
        logger.warning_once(
            f"The calibrated costs cannot be read and are left aside: {error} `blockpilot calibrate` replaces them."
        )
        return None


def default_costs(target: Any, drafter: Any, key: dict[str, Any] | None = None) -> CostTable:
    """
    The default of the device class, in plain passes: one plain pass is the unit, and the context length plays no part.
    The drafter's share comes from the sizes of the pair, see [`drafter_share`].
    """
    key = costs_key(target, drafter) if key is None else key
    name, largest = key_name(key), max(LARGEST_DEFAULT_SIZE, int(getattr(drafter.config, "block_size", 0) or 0))
    if (name, largest) not in _DEFAULTS:
        device_class = device_class_of(target, key)
        share = drafter_share(target, drafter, is_launch_bound=device_class.is_launch_bound)
        _DEFAULTS[name, largest] = _table(device_class, share, largest)
    return _DEFAULTS[name, largest]


# By name of the key, which tells all that they depend on, and largest size: every answer asks, and counting takes a
# while.
_DEFAULTS: dict[tuple[str, int], CostTable] = {}


def _table(device_class: DeviceClass, share: float, largest: int) -> CostTable:
    curve = CostTable((0,), {width: (cost,) for width, cost in device_class.verify}, {})
    widths = sorted({*(width for width, _ in device_class.verify if width < largest), largest})
    verify = {width: curve.verify_at(width) for width in widths}
    # A drafter's layers are the target's in small: their passes grow with the width as its own do.
    draft = {
        width: device_class.overhead + device_class.drafting * share * cost
        for width, cost in verify.items()
        if width > 1
    }
    return CostTable(
        context_lengths=(0,),
        verify_s={width: (cost,) for width, cost in verify.items()},
        draft_s={width: (cost,) for width, cost in draft.items()},
        key={"device_class": device_class.source, "drafter_share": round(share, 4)},
        source=device_class.source,
    )


def device_class_of(target: Any, key: dict[str, Any]) -> DeviceClass:
    """
    What is known of the target's device, dtype and layers; the cautious class where that is too little.

    Args:
        key (`dict[str, Any]`): Of the pair, see [`costs_key`].
    """
    device, dtype, linear = target.device.type, key["dtype"], key["target"]["linear"]
    config = _text_config(target)

    def cautious(reason: str) -> DeviceClass:
        return replace(CAUTIOUS, source=CAUTIOUS.source.format(reason=reason))

    if getattr(target.config, "quantization_config", None) or linear not in ("Linear", "PackedLinear", "Conv1D"):
        return cautious("the target is quantised or has layers of its own kind")
    if any(getattr(config, name, None) for name in _EXPERTS):
        return cautious("the target is a mixture of experts, and wide passes read more of them")
    if key["num_devices"] > 1:
        return cautious("target and drafter are spread over several devices")
    if device == "cpu" and dtype == "float32":
        return CPU_FLOAT32_PACKED if linear == "PackedLinear" else CPU_FLOAT32
    if device == "cpu" and dtype == "bfloat16" and has_native_bfloat16():
        return CPU_BFLOAT16
    if device == "cpu":
        return cautious(f"this processor has no instructions for {dtype}")
    if device == "mps":
        return MPS
    if device in _ACCELERATORS:
        return ACCELERATOR_FLOAT32 if dtype == "float32" else ACCELERATOR_HALF
    return cautious(f"devices of type '{device}' are unknown")


def drafter_share(target: Any, drafter: Any, *, is_launch_bound: bool) -> float:
    """
    Work of a drafter's pass over that of a target's: parameters read, those of the borrowed head (or of the shortlist's
    rows) included; or layers, where that is more and starting kernels is what takes the time.
    """
    head, table = target.get_output_embeddings(), target.get_input_embeddings()
    head_size, head_rows = _num_parameters(head), getattr(head, "out_features", 0)
    read = _num_parameters(target)
    # Of the embedding table a pass reads a row per token, unless it is the head too.
    if getattr(table, "_parameters", {}).get("weight") is not getattr(head, "_parameters", {}).get("weight"):
        read -= _num_parameters(table)
    shortlist = getattr(drafter.config, "shortlist_size", None)
    if shortlist and head_rows:
        head_size = head_size * shortlist // head_rows
    share = (_num_parameters(drafter) + head_size) / max(read, 1)
    if is_launch_bound:
        own, theirs = (getattr(one, "num_hidden_layers", 0) for one in (drafter.config, _text_config(target)))
        share = max(share, own / max(theirs, 1))
    return share


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _num_parameters(module: Any) -> int:
    """0 for what has none, such as a drafter that only looks texts up."""
    return sum(parameter.numel() for parameter in module.parameters()) if hasattr(module, "parameters") else 0


__all__ = ["DeviceClass", "costs_for", "default_costs", "device_class_of", "drafter_share", "kept_costs"]

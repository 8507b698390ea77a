"""Linear layers with prepacked weights, for decoding in float32 on a CPU.

Decoding passes a handful of rows through each weight. For more than one row the product behind `torch.nn.Linear` first
rearranges the whole weight, in every pass; here that is done once, by oneDNN, through the operators that torch's own
compiler uses for frozen weights. They are private to torch, so they are tried out against the ordinary product before
anything is packed. A packed layer stays a `torch.nn.Linear` with its ordinary weight, and its result is that of the
weight it has now. This module knows nothing of decoding.
"""

import math
import platform
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Up to here packed products are the quicker ones; beyond, both take the same time, and each new number of rows
# costs oneDNN some preparation: prompts come in every length.
_MAX_ROWS = 64
# The arrangement is chosen for this many rows; a block under verification has about that many.
_EXPECTED_ROWS = 8
# Of a weight, to be compared in every pass: few enough to cost nothing.
_NUM_SAMPLES = 64
_RELATIVE_TOLERANCE = 1e-5


def pack_linear_weights(model: nn.Module) -> int:
    """
    Prepack the weights of all CPU float32 `torch.nn.Linear` layers of a model, in place. Subclasses, quantised layers
    and layers with hooks in place of their `forward` are left alone.

    Packed weights are one more copy in memory: the ordinary ones remain, for long prompts, gradients, saving, and the
    embedding that a head is tied to. Layers use the packed copy for at most 64 rows (positions times batch) where no
    gradient is asked for, and notice when their weight is replaced, moved, cast, or edited: the pass after an edit
    takes the ordinary product, and once a pass finds the weight unchanged it is packed anew. A copy or pickle of the
    model holds no packed weights, it packs them when it is used.

    One kind of edit goes unnoticed: single elements or rows, changed behind autograd's back (`.data`, NumPy), through
    another module that shares the weight or a reference that was taken before the last pass. Call this function again
    after it.

    Args:
        model (`nn.Module`): For example a target, or a drafter; wrapped by PEFT or not.

    Returns:
        `int`: The number of packed layers; 0, with a warning, if this build of torch cannot pack.
    """
    layers = [module for module in model.modules() if _is_packable(module)]
    packings = []
    try:
        tried = set()
        for layer in layers:
            packing = _Packing(layer.weight).with_tensor()
            kind = (layer.weight.shape, layer.bias is None)
            if kind not in tried:
                _try_out(layer, packing)
                tried.add(kind)
            packings.append(packing)
    except (AttributeError, RuntimeError) as error:  # no such operator; or it refuses
        logger.warning_once(f"Linear layers stay as they are, because their weights cannot be packed here: {error}")
        unpack_linear_weights(model)
        return 0
    for layer, packing in zip(layers, packings, strict=True):
        layer.__class__ = PackedLinear
        layer._packing, layer._was_read = packing, False
    return len(layers)


def unpack_linear_weights(model: nn.Module) -> int:
    """
    Make packed layers ordinary `torch.nn.Linear` ones again and free their packed weights.

    Returns:
        `int`: The number of layers that were packed.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in layers:
        layer.__dict__.pop("_packing", None)
        layer.__dict__.pop("_was_read", None)
        if type(layer) is PackedLinear:  # else a parametrisation made a class of its own from it
            layer.__class__ = nn.Linear
    return len(layers)


def packing_pays(model: Any) -> bool:
    """Whether packing is known to make a model quicker: in float32 on x86-64 processors, where torch has oneDNN."""
    return (
        model.dtype == torch.float32
        and model.device.type == "cpu"
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    )


class PackedLinear(nn.Linear):
    """A `torch.nn.Linear` that uses a packed copy of its weight where that gives the same result. Made by
    [`pack_linear_weights`]."""

    _packing: "_Packing | None" = None
    # Whether somebody got hold of the weight since the last pass: it may then be edited without a trace.
    _was_read = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Not as attributes: reading those is noted.
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if weight is None:  # computed from other parameters, as by pruning
            return super().forward(input)
        if _takes_packed_product(input, weight, bias):
            packing = self._current_packing(weight)
            if packing is not None:
                return _packed_product(input, packing.tensor, bias)
        return F.linear(input, weight, bias)

    def _current_packing(self, weight: Any) -> "_Packing | None":
        """
        The packing of this very weight, if there is one by now. A weight is packed when two passes in a row find it the
        same: one that changes, or is read, between any two passes would be packed in vain each time.

        Threads may be in here together: `_packing` is replaced as a whole, and each thread uses the one it checked.
        """
        packing = self._packing
        if packing is None or self._was_read or not packing.is_of(weight):
            self._was_read = False  # before the weight is looked at: what is read from now on counts for the next pass
            self._packing = _Packing(weight) if _is_plain(weight) else None
            return None
        if packing.tensor is None:
            packing = self._packing = packing.with_tensor()
        return packing

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        weight, packing = self._parameters.get("weight"), self._packing
        if packing is not None and (type(weight) is not nn.Parameter or not packing.is_of(weight)):
            self._packing = None  # frees the memory now, not with the next pass
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self.__dict__["_was_read"] = True
        return super().__getattr__(name)


class _Packing:
    """
    What a weight looks like, and the weight in packed form, which is made when it is wanted.

    Args:
        weight (`nn.Parameter` of shape `(out_features, in_features)`): In float32, contiguous, on the CPU.
    """

    def __init__(self, weight: nn.Parameter):
        self.tensor: torch.Tensor | None = None
        self._weight, self._data_ptr = weight, weight.data_ptr()
        # Parameters made in inference mode do not count their edits.
        self._version = None if weight.is_inference() else weight._version
        self._shape = weight.shape
        # A view, which keeps the memory: no other weight gets the same address. NumPy compares it the quickest.
        self._samples = _samples(weight).numpy()
        self._expected = self._samples.tobytes()

    def is_of(self, weight: Any) -> bool:
        """Whether `weight` is the same as when this was made, as far as can be told in no time."""
        return (
            weight is self._weight
            and weight.data_ptr() == self._data_ptr
            and weight.shape == self._shape
            and weight.is_contiguous()
            and (self._version is None or weight._version == self._version)
            # `.data` leads around the version counter, and PEFT merges through it.
            and self._samples.tobytes() == self._expected
        )

    def with_tensor(self) -> "_Packing":
        # What it looks like is noted first: an edit in the meantime is then found by the next pass.
        packing = _Packing(self._weight)
        packing.tensor = torch.ops.mkldnn._reorder_linear_weight(self._weight.detach(), _EXPECTED_ROWS)
        return packing

    def __reduce__(self):
        # Packed tensors cannot be copied or saved, and the copy of a layer has a weight of its own: it gets `None`.
        return type(None), ()


def _is_packable(module: nn.Module) -> bool:
    # An instance's own `forward` is a hook, and calls the one that it found.
    is_ours = type(module) in (nn.Linear, PackedLinear) and "forward" not in module.__dict__
    return is_ours and _is_plain(module._parameters.get("weight"))  # not as attribute: reading that is noted


def _is_plain(weight: Any) -> bool:
    """Quantisation libraries put tensors of their own classes into ordinary layers."""
    return (
        type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.is_cpu
        and weight.layout == torch.strided
        and weight.is_contiguous()
        and weight.numel() > 0
    )


def _takes_packed_product(input: torch.Tensor, weight: Any, bias: Any) -> bool:
    """Whether the packed product is what the ordinary one would be: few rows, no gradients, no other kind of tensor."""
    return (
        not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and type(input) is torch.Tensor
        and input.dtype == torch.float32
        and input.is_cpu
        and input.layout == torch.strided
        and input.ndim >= 2
        and 0 < input.numel() <= _MAX_ROWS * (num_columns := weight.shape[-1])
        and input.shape[-1] == num_columns
        and (bias is None or _is_plain(bias))
        and not (
            torch.is_grad_enabled()
            and (input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
        )
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
    )


def _packed_product(input: torch.Tensor, packed: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """`(..., in_features)` to `(..., out_features)`. Flattens to two dimensions by itself, whatever the strides."""
    # Nothing is fused to it.
    return torch.ops.mkldnn._linear_pointwise.default(input, packed, bias, "none", [], "")


def _samples(weight: torch.Tensor) -> torch.Tensor:
    num_columns = weight.shape[1]
    step = max(1, weight.numel() // _NUM_SAMPLES)
    while math.gcd(step, num_columns) > 1:  # else they would all come from a few columns
        step -= 1
    return weight.detach().view(-1)[::step]


def _try_out(layer: nn.Linear, packing: _Packing) -> None:
    """
    Raises:
        `RuntimeError`: if the packed product is not the ordinary one.
    """
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, _EXPECTED_ROWS, _MAX_ROWS):
        rows = torch.randn(num_rows, weight.shape[1], generator=generator)
        with torch.autocast("cpu", enabled=False):
            ordinary, product = F.linear(rows, weight, bias), _packed_product(rows, packing.tensor, bias)
        tolerance = _RELATIVE_TOLERANCE * float(ordinary.abs().max())
        if not torch.allclose(product, ordinary, rtol=0, atol=tolerance, equal_nan=True):
            raise RuntimeError(
                f"for {num_rows} rows a weight of shape {tuple(weight.shape)} gave a result that is off by "
                f"{float((product - ordinary).abs().max()):.3g}, more than the {tolerance:.3g} of rounding"
            )

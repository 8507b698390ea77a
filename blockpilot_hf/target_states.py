"""What a drafter reads of a target on a known text, computed or kept on disk.

[`target_states`] gives the states as decoding sees them. [`TargetStatesReader`] rounds them to bfloat16 before they are
used, kept or not, so that both ways give the same numbers. A kept file is named by everything it depends on: another
text, target or set of layers is another file.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from .texts import Text

# A file takes a fraction of a second to write, so an unfinished one of this age was left by a killed run.
_STALE_AFTER_S = 600


@dataclass(frozen=True)
class TargetStates:
    """
    Args:
        context (`torch.FloatTensor` of shape `(length, hidden_size * num_taps)`): The drafter's context.
        last (`torch.FloatTensor` of shape `(length, hidden_size)`): What the target's head reads.
    """

    context: torch.Tensor
    last: torch.Tensor


@torch.no_grad()
def target_states(target: Any, target_layer_ids: Sequence[int], text: Text) -> TargetStates:
    """
    States of a text by one pass of the target, in its own dtype and on its device.

    Args:
        target_layer_ids (`Sequence[int]`): Layers whose outputs are the context, as in [`DFlashConfig`].
    """
    ids = torch.tensor([text.ids], device=target.device)
    taps = [i + 1 for i in target_layer_ids]
    # The last state comes after the final norm, whichever layers are asked for.
    outputs = target.get_decoder()(input_ids=ids, output_hidden_states=taps, use_cache=False)
    context = torch.cat([outputs.hidden_states[i] for i in taps], dim=-1)[0]
    return TargetStates(context=context, last=outputs.last_hidden_state[0])


class TargetStatesReader:
    """
    States of texts, rounded to bfloat16, in the target's dtype: `reader(text)`.

    Args:
        target (`PreTrainedModel`): Computes in its own dtype.
        target_layer_ids (`list[int]`): Layers whose outputs are the context, as in [`DFlashConfig`].
        folder (`Path`, *optional*): Where states are kept, [`bytes_per_token`] each; computed at every call without.
        fingerprint (`str`): Of the target's weights; part of the files' names.
    """

    def __init__(self, target: Any, target_layer_ids: list[int], *, folder: Path | None, fingerprint: str):
        self.target = target
        self.target_layer_ids = target_layer_ids
        self.folder = folder
        self._key = f"{fingerprint} {target_layer_ids} {target.dtype}"
        if folder is not None:
            _remove_stale_files(folder)

    @property
    def bytes_per_token(self) -> int:
        """Disk that the states of a token take."""
        hidden_size = self.target.config.get_text_config(decoder=True).hidden_size
        return 2 * hidden_size * (len(self.target_layer_ids) + 1)

    def __call__(self, text: Text) -> TargetStates:
        """
        States of `text` in the target's dtype.

        Raises:
            `OSError`: if they cannot be written to the folder; nothing of them stays there.
        """
        path = self._path(text)
        tensors = None if path is None else _load(path)
        if tensors is None:
            states = target_states(self.target, self.target_layer_ids, text)
            tensors = {
                "context": states.context.to("cpu", torch.bfloat16).contiguous(),
                "last": states.last.to("cpu", torch.bfloat16).contiguous(),
            }
            if path is not None:
                _save(tensors, path)
        dtype, device = self.target.dtype, self.target.device
        # A copy: memory of a mapped file is not aligned, and CPU kernels then sum in another order.
        return TargetStates(**{name: tensor.to(device, dtype, copy=True) for name, tensor in tensors.items()})

    def has(self, text: Text) -> bool:
        """Whether the states of `text` are kept already."""
        path = self._path(text)
        return path is not None and path.is_file()

    def _path(self, text: Text) -> Path | None:
        if self.folder is None:
            return None
        key = f"{self._key} {text.ids}"
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"


def _load(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        return load_file(path) if path.is_file() else None
    except SafetensorError:  # damaged from outside: computed again
        return None


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Under its final name a file is always whole."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not `save_file`, which has an unfinished file of its own, under a name that nobody knows after a kill.
        beside.write_bytes(save(tensors))
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(
            f"The target's states cannot be written to {path.parent}: {error}. Free some space, name a folder on "
            "another disk, or have them computed at every visit."
        ) from error


def _remove_stale_files(folder: Path) -> None:
    """What killed runs left. Young files may be those of another run that shares the folder."""
    for unfinished in folder.glob("*.safetensors.*"):
        with contextlib.suppress(FileNotFoundError):  # finished or removed by another run meanwhile
            if time.time() - unfinished.stat().st_mtime > _STALE_AFTER_S:
                unfinished.unlink()


def weights_fingerprint(model: Any) -> str:
    """
    16 hex digits of the SHA-256 over names, shapes and values of all parameters, as bfloat16: the same whatever dtype
    the weights were loaded in, as long as the file holds bfloat16.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        values = parameter.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


__all__ = ["TargetStates", "TargetStatesReader", "target_states", "weights_fingerprint"]

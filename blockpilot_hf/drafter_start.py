"""The drafter that training starts from: sizes and last layers of the target.

A drafter reads the target's middle layers and writes for its head, which is what the target's own last layers do. So
they are a far better start than random weights, and `fc` starts as the identity on the last tap plus a little noise.
"""

from typing import Any

import torch
from torch import nn

from .checks import num_decoder_layers, vocab_rows
from .drafter_sizes import drafter_config
from .modeling_dflash import DFlashDraftModel

DEFAULT_BLOCK_SIZE = 8
DEFAULT_NUM_LAYERS = 3

_NOISE = 0.02


def drafter_from_target(
    target: Any,
    *,
    mask_token_id: int,
    num_layers: int = DEFAULT_NUM_LAYERS,
    block_size: int = DEFAULT_BLOCK_SIZE,
    target_layer_ids: list[int] | None = None,
    seed: int = 0,
) -> DFlashDraftModel:
    """
    A drafter for `target`, in float32, started from the target's last layers where their shapes fit.

    Args:
        target (`PreTrainedModel`): A decoder whose layers are of the Llama or Qwen kind; others give a random start.
        mask_token_id (`int`): An id of the target's vocabulary that does not occur in texts.
        num_layers (`int`, *optional*, defaults to 3): Layers of the drafter.
        block_size (`int`, *optional*, defaults to 8): Positions of a block in training, the anchor included.
        target_layer_ids (`list[int]`, *optional*):
            Layers that the drafter reads; five spread over the target by default, fewer where it has hardly more.
        seed (`int`, *optional*, defaults to 0): Of the random part.

    Returns:
        [`DFlashDraftModel`] on the CPU in float32, in training mode.

    Raises:
        `ValueError`: for a mask token or layers that the target does not have.
    """
    num_target_layers, rows = num_decoder_layers(target), vocab_rows(target)
    if not 0 <= mask_token_id < rows:
        raise ValueError(
            f"`mask_token_id` must be a row of the target's embedding, 0 to {rows - 1}, got {mask_token_id}."
        )
    if not 1 <= num_layers <= num_target_layers:
        raise ValueError(
            f"`num_layers` must be 1 to {num_target_layers}, the layers of the target to start from, got {num_layers}."
        )
    config = drafter_config(
        target,
        num_layers=num_layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
    )
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        drafter = DFlashDraftModel(config).float()
        nn.init.normal_(drafter.fc.weight, std=_NOISE / len(config.target_layer_ids) ** 0.5)
    with torch.no_grad():
        drafter.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    decoder = target.get_decoder()
    if _is_of_our_kind(decoder):
        for ours, theirs in zip(drafter.layers, decoder.layers[-num_layers:], strict=True):
            _copy_fitting(theirs, ours)
        _copy_fitting(decoder.norm, drafter.norm)
    return drafter.train()


def _is_of_our_kind(decoder: Any) -> bool:
    """Whether parameters of one name mean the same in the drafter: norms before attention and MLP, and plain ones."""
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if layers is None or norm is None:
        return False
    parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    return all({name for name, _ in layer.named_children()} == parts for layer in layers) and _is_plain(norm)


@torch.no_grad()
def _is_plain(norm: nn.Module) -> bool:
    """Whether `norm` is an RMSNorm that multiplies by its weight. Some multiply by one more than it, some shift."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.is_meta:
        return False
    probe = torch.linspace(-1, 2, len(weight), device=weight.device).to(weight.dtype)
    expected = nn.functional.rms_norm(probe.float(), probe.shape, weight.float())
    return torch.allclose(norm(probe).float(), expected, rtol=0.05, atol=1e-3)


@torch.no_grad()
def _copy_fitting(source: nn.Module, destination: nn.Module) -> None:
    """Copies the parameters that both have under one name and in one shape."""
    theirs = dict(source.named_parameters())
    for name, parameter in destination.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape and theirs[name].is_floating_point():
            parameter.copy_(theirs[name])


__all__ = ["DEFAULT_BLOCK_SIZE", "DEFAULT_NUM_LAYERS", "drafter_from_target"]

"""The sizes that a drafter for a target has: those of the target, with fewer layers."""

from typing import Any

from .checks import num_decoder_layers, vocab_rows
from .configuration_dflash import DFlashConfig, default_target_layer_ids

_NUM_TAPS = 5  # as in the published drafters, however few layers draft


def drafter_config(
    target: Any, *, num_layers: int, block_size: int, mask_token_id: int, target_layer_ids: list[int] | None = None
) -> DFlashConfig:
    """
    The config of a drafter that fits a target.

    Args:
        target (`PreTrainedModel`): A decoder.
        num_layers (`int`): Layers of the drafter.
        block_size (`int`): Recorded as the training block size, the anchor included.
        mask_token_id (`int`): Token that stands at the positions to be drafted.
        target_layer_ids (`list[int]`, *optional*):
            Layers that the drafter reads; five spread over the target by default, fewer where it has hardly more.

    Returns:
        [`DFlashConfig`]

    Raises:
        `ValueError`: for layers that the target does not have.
    """
    size, num_target_layers = target.config.get_text_config(decoder=True), num_decoder_layers(target)
    return DFlashConfig(
        vocab_size=vocab_rows(target),
        hidden_size=size.hidden_size,
        intermediate_size=getattr(size, "intermediate_size", None) or 4 * size.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=getattr(size, "num_key_value_heads", None) or size.num_attention_heads,
        head_dim=getattr(size, "head_dim", None) or size.hidden_size // size.num_attention_heads,
        hidden_act=getattr(size, "hidden_act", None) or "silu",
        max_position_embeddings=size.max_position_embeddings,
        rms_norm_eps=getattr(size, "rms_norm_eps", 1e-6),
        rope_parameters=_rope_parameters(size),
        layer_types=["full_attention"] * num_layers,
        target_layer_ids=target_layer_ids
        or list(dict.fromkeys(default_target_layer_ids(num_target_layers, _NUM_TAPS))),
        num_target_layers=num_target_layers,
        mask_token_id=mask_token_id,
        block_size=block_size,
        final_logit_softcapping=getattr(size, "final_logit_softcapping", None),
        target_name_or_path=size._name_or_path or target.config._name_or_path or None,
    )


def _rope_parameters(size: Any) -> dict[str, Any]:
    rope = getattr(size, "rope_parameters", None) or {}
    plain = rope.get("rope_type") == "default" and "rope_theta" in rope
    return dict(rope) if plain else {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}


__all__ = ["drafter_config"]

"""Drafting after many anchors of one known text at once, as `draft_block` would after each of them.

Decoding drafts one block, verifies it, and drafts the next. With the whole text and the target's states known, all
blocks can be drafted in one pass: each attends to the context before its anchor and to itself. Training and replay
stand on this. Knows nothing of decoding.
"""

from typing import Any

import torch
from torch import nn

from .candidate_generator import raw_embedding


def draft_states(
    drafter: Any, context_hidden_states: torch.Tensor, anchors: torch.LongTensor, noise_embeds: torch.Tensor
) -> torch.Tensor:
    """
    The drafter's states of blocks at `anchors`, each with the context before its anchor only.

    Args:
        drafter ([`DFlashDraftModel`]): With the `sdpa` or `eager` attention.
        context_hidden_states (`torch.FloatTensor` of shape `(length, hidden_size * num_taps)`):
            Target states of the text.
        anchors (`torch.LongTensor` of shape `(num_anchors,)`): Positions of the anchor tokens, at least 1.
        noise_embeds (`torch.FloatTensor` of shape `(num_anchors, block_size, hidden_size)`): See [`noise_embeds`].

    Returns:
        `torch.FloatTensor` of shape `(num_anchors, block_size, hidden_size)`.

    Raises:
        `ValueError`: for a drafter with another attention implementation.
    """
    implementation = drafter.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            "Drafting after many anchors at once needs a mask of its own, which the 'sdpa' and 'eager' attention take, "
            f"got {implementation!r}. Load the drafter with `attn_implementation='sdpa'`."
        )
    num_anchors, block_size, hidden_size = noise_embeds.shape
    context = drafter.hidden_norm(drafter.fc(context_hidden_states)).unsqueeze(0)
    hidden_states = noise_embeds.reshape(1, num_anchors * block_size, hidden_size)
    context_positions = torch.arange(context.shape[1], device=context.device)
    block_positions = (anchors[:, None] + torch.arange(block_size, device=context.device)).flatten()
    block_anchors = anchors.repeat_interleave(block_size)
    block_index = torch.arange(num_anchors, device=context.device).repeat_interleave(block_size)
    keys = torch.cat([context_positions, block_positions])
    position_embeddings = drafter.rotary_emb(hidden_states, keys.unsqueeze(0))
    masks: dict[tuple[bool, int | None], torch.Tensor] = {}
    for layer in drafter.layers:
        kind = (layer.self_attn.is_causal, layer.self_attn.sliding_window)
        if kind not in masks:
            visible = torch.cat(
                [context_positions < block_anchors[:, None], block_index == block_index[:, None]], dim=1
            ) & _reach(block_positions[:, None], keys, *kind)
            # Added to the scores: both attention implementations take that form.
            mask = torch.zeros(visible.shape, dtype=hidden_states.dtype, device=visible.device)
            masks[kind] = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[None, None]
        hidden_states = layer(
            hidden_states,
            context=context,
            position_embeddings=position_embeddings,
            attention_mask=masks[kind],
            cache=None,
        )
    return drafter.norm(hidden_states).view(num_anchors, block_size, hidden_size)


def _reach(queries: torch.Tensor, keys: torch.Tensor, is_causal: bool, window: int | None) -> torch.Tensor:
    seen = keys <= queries if is_causal else torch.ones_like(keys <= queries)
    return seen if window is None else seen & ((queries - keys).abs() < window)


@torch.no_grad()
def noise_embeds(drafter: Any, embedding: nn.Module, anchor_ids: torch.LongTensor, block_size: int) -> torch.Tensor:
    """
    What the drafter denoises: the embeddings of each anchor token and of `block_size - 1` mask tokens. The embedding is
    the target's, so no gradient goes back to it.

    Args:
        embedding (`nn.Module`): The target's input embedding.
        anchor_ids (`torch.LongTensor` of shape `(num_anchors,)`): Anchor tokens.

    Returns:
        `torch.FloatTensor` of shape `(num_anchors, block_size, hidden_size)`, in the drafter's dtype.
    """
    ids = anchor_ids.new_full((len(anchor_ids), block_size), drafter.config.mask_token_id)
    ids[:, 0] = anchor_ids
    embeds = raw_embedding(embedding, ids).to(drafter.device, drafter.dtype)
    return embeds * getattr(drafter.config, "input_embedding_scale", 1.0)


__all__ = ["draft_states", "noise_embeds"]

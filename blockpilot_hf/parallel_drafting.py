"""Drafting after many anchors of known texts at once, as `draft_block` would after each of them.

Decoding drafts one block, verifies it, and drafts the next. With the whole text and the target's states known, any
number of blocks can be drafted in one pass, of different sizes too: each attends to the context before its anchor and
to itself. Training and replay stand on this. Knows nothing of decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from .candidate_generator import raw_embedding


@dataclass(frozen=True)
class Blocks:
    """
    Blocks in the rows of a batch, one after another, padded on the right. A row is a text.

    Args:
        anchors (`torch.LongTensor` of shape `(rows, width)`): Position of the anchor that each block position belongs
            to; 0 in the padding.
        offsets (`torch.LongTensor` of shape `(rows, width)`): Place within the block, 0 for the anchor itself.
        index (`torch.LongTensor` of shape `(rows, width)`): Number of the block within the row; -1 in the padding.
    """

    anchors: torch.Tensor
    offsets: torch.Tensor
    index: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> "Blocks":
        """
        Args:
            rows (`Sequence[Sequence[tuple[int, int]]]`): Per row the blocks, each as its anchor's position, at least 1,
                and its size.
        """
        width = max(sum(size for _, size in row) for row in rows)
        table = []
        for row in rows:
            places = [(anchor, j, i) for i, (anchor, size) in enumerate(row) for j in range(size)]
            table.append(places + [(0, 0, -1)] * (width - len(places)))
        return cls(*torch.tensor(table, device=device).unbind(-1))

    @property
    def positions(self) -> torch.Tensor:
        """Positions in the text `(rows, width)`."""
        return self.anchors + self.offsets


class DraftContext:
    """
    Keys and values that a drafter's layers have of texts, made once and attended to by any number of blocks.

    Args:
        layers (`list[tuple(torch.Tensor, torch.Tensor)]`): Per layer keys and values `(rows, heads, length, head_dim)`.
    """

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]]):
        self.layers = layers

    @classmethod
    @torch.no_grad()
    def of(cls, drafter: Any, context_hidden_states: torch.Tensor) -> "DraftContext":
        """
        Of one text.

        Args:
            context_hidden_states (`torch.FloatTensor` of shape `(length, hidden_size * num_taps)`): The target's
                states, from the text's first token on.
        """
        context = drafter.hidden_norm(drafter.fc(context_hidden_states.to(drafter.device, drafter.dtype)))
        positions = torch.arange(len(context), device=context.device).unsqueeze(0)
        embeddings = drafter.rotary_emb(context.unsqueeze(0), positions)
        return cls([_keys_and_values(layer.self_attn, context, *embeddings) for layer in drafter.layers])

    @classmethod
    def of_rows(cls, contexts: Sequence["DraftContext"]) -> "DraftContext":
        """One batch of several, padded on the right, where no block looks."""

        def padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            length = max(part.shape[2] for part in parts)
            return torch.cat([nn.functional.pad(part, (0, 0, 0, length - part.shape[2])) for part in parts])

        layers = zip(*(context.layers for context in contexts), strict=True)
        return cls([(padded([k for k, _ in same]), padded([v for _, v in same])) for same in layers])

    @property
    def length(self) -> int:
        """Positions, padding included."""
        return self.layers[0][0].shape[2]

    def rows(self, kept: Sequence[int]) -> "DraftContext":
        """Some of the rows, in this order."""
        index = torch.tensor(kept, device=self.layers[0][0].device)
        return DraftContext([(keys[index], values[index]) for keys, values in self.layers])

    def before(self, length: int) -> "DraftContext":
        """The first `length` positions, without a copy."""
        return DraftContext([(keys[:, :, :length], values[:, :, :length]) for keys, values in self.layers])

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As an attention calls its cache; nothing is kept of the blocks."""
        known_keys, known_values = self.layers[layer_idx]
        return torch.cat([known_keys, keys], dim=2), torch.cat([known_values, values], dim=2)


def draft_states(
    drafter: Any, context_hidden_states: torch.Tensor, anchors: torch.LongTensor, noise_embeds: torch.Tensor
) -> torch.Tensor:
    """
    The drafter's states of blocks of one size at `anchors` of one text, each with the context before its anchor only.
    Gradients go back to all weights of the drafter.

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
    num_anchors, block_size, hidden_size = noise_embeds.shape
    device = noise_embeds.device
    blocks = Blocks(
        anchors=anchors.repeat_interleave(block_size).unsqueeze(0),
        offsets=torch.arange(block_size, device=device).repeat(num_anchors).unsqueeze(0),
        index=torch.arange(num_anchors, device=device).repeat_interleave(block_size).unsqueeze(0),
    )
    # Not as a `DraftContext`: gradient checkpointing takes caches away from layers.
    context = drafter.hidden_norm(drafter.fc(context_hidden_states)).unsqueeze(0)
    states = _through_layers(drafter, noise_embeds.reshape(1, -1, hidden_size), blocks, context, None)
    return states.view(num_anchors, block_size, hidden_size)


@torch.no_grad()
def draft_blocks(drafter: Any, context: DraftContext, blocks: Blocks, noise_embeds: torch.Tensor) -> torch.Tensor:
    """
    The drafter's states of blocks of any sizes in several texts.

    Args:
        context ([`DraftContext`]): With a row for each of the blocks' rows, and all positions before their anchors.
        noise_embeds (`torch.FloatTensor` of shape `(rows, width, hidden_size)`): See [`embed_noise`].

    Returns:
        `torch.FloatTensor` of shape `(rows, width, hidden_size)`, of no meaning in the padding.

    Raises:
        `ValueError`: for a drafter with another attention implementation.
    """
    nothing_new = noise_embeds[:, :0]
    # Further context is before no anchor.
    context = context.before(int(blocks.anchors.max()))
    return _through_layers(drafter, noise_embeds, blocks, nothing_new, context)


def _through_layers(
    drafter: Any, hidden_states: torch.Tensor, blocks: Blocks, context: torch.Tensor, known: DraftContext | None
) -> torch.Tensor:
    """Context comes either as states `(1, length, hidden_size)`, or as what is known of it, with none to add."""
    implementation = drafter.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            "Drafting after many anchors at once needs a mask of its own, which the 'sdpa' and 'eager' attention take, "
            f"got {implementation!r}. Load the drafter with `attn_implementation='sdpa'`."
        )
    positions = blocks.positions
    before = torch.arange(context.shape[1] if known is None else known.length, device=positions.device)
    keys = torch.cat([before.expand(len(positions), -1), positions], dim=1)
    embeddings = drafter.rotary_emb(hidden_states, keys if known is None else positions)
    in_block = torch.cat(
        [before < blocks.anchors[:, :, None], blocks.index[:, None] == blocks.index[:, :, None]], dim=2
    )
    masks: dict[tuple[bool, int | None], torch.Tensor] = {}
    for layer in drafter.layers:
        kind = (layer.self_attn.is_causal, layer.self_attn.sliding_window)
        if kind not in masks:
            visible = in_block & _reach(positions[:, :, None], keys[:, None], *kind)
            # Added to the scores: both attention implementations take that form.
            mask = torch.zeros(visible.shape, dtype=hidden_states.dtype, device=visible.device)
            masks[kind] = mask.masked_fill(~visible, torch.finfo(mask.dtype).min).unsqueeze(1)
        hidden_states = layer(
            hidden_states,
            context=context,
            position_embeddings=embeddings,
            attention_mask=masks[kind],
            cache=known,
        )
    return drafter.norm(hidden_states)


def _keys_and_values(
    attention: Any, context: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`DFlashAttention`] puts those of its context `(length, hidden_size)` into a cache: the keys rotated."""
    shape = (1, len(context), -1, attention.head_dim)
    keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
    values = attention.v_proj(context).view(shape).transpose(1, 2)
    return keys * cos.unsqueeze(1) + rotate_half(keys) * sin.unsqueeze(1), values


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
    return embed_noise(drafter, embedding, ids)


@torch.no_grad()
def embed_noise(drafter: Any, embedding: nn.Module, ids: torch.LongTensor) -> torch.Tensor:
    """
    Embeddings of anchor and mask tokens as a drafter takes them.

    Args:
        embedding (`nn.Module`): The target's input embedding.
        ids (`torch.LongTensor` of shape `(rows, width)`): Anchor tokens, and mask tokens elsewhere.

    Returns:
        `torch.FloatTensor` of shape `(rows, width, hidden_size)`, in the drafter's dtype.
    """
    embeds = raw_embedding(embedding, ids).to(drafter.device, drafter.dtype)
    return embeds * getattr(drafter.config, "input_embedding_scale", 1.0)


__all__ = ["Blocks", "DraftContext", "draft_blocks", "draft_states", "embed_noise", "noise_embeds"]

"""The DFlash drafter (arXiv 2602.06036): from a block of noise to the hidden states of the drafted tokens, in one pass.

`DFlashDraftModel.forward` keeps the contract of transformers' native drafters (`noise_embeds`, `context_hidden_states`,
`position_ids`, `attention_mask`, `cache`), so the same object also serves stock
`generate(assistant_model=drafter, speculation_type="dflash")`. Published checkpoints load as they are, without running
their remote code. It knows nothing of tokens, embeddings or heads: those are the target's, and are borrowed per call.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dflash import DFlashConfig
from .exact_loading import ExactPreTrainedModel
from .packing import PackedLinear, pack_linear_weights


@dataclass
class DFlashDraftOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(batch_size, block_size, hidden_size)`):
            States of the block's positions. Position 0 is the anchor; the target's head on 1 to `block_size - 1` gives
            the logits of the drafted tokens.
        cache (`Cache`, *optional*): Keys and values of the context and of this block.
    """

    last_hidden_state: torch.FloatTensor | None = None
    cache: Cache | None = None


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return states * cos + rotate_half(states) * sin


class DFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """Frequencies stay float32 when the model is cast, as in a loaded one: rounded, they turn far positions astray."""

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            if self._buffers[name].dtype != buffer.dtype:
                self._buffers[name] = buffer.to(self._buffers[name].device)
        return self


class DFlashAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block. Context ones stay in the cache."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = config.layer_is_causal(layer_idx)
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        rows, width, _ = hidden_states.shape
        both = torch.cat([context, hidden_states], dim=1)
        q = self.q_norm(self.q_proj(hidden_states).view(rows, width, -1, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(both).view(rows, both.shape[1], -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(both).view(rows, both.shape[1], -1, self.head_dim).transpose(1, 2)
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        # Positions span context and block; the queries are the block's, at the end.
        q = _rotate(q, cos[:, :, -width:], sin[:, :, -width:])
        k = _rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, _ = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
        )
        return self.o_proj(attended.reshape(rows, width, -1))


class DFlashDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashDraftModel(ExactPreTrainedModel):
    config: DFlashConfig
    config_class = DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]  # noqa: RUF012  (the attribute that transformers reads)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _loading_hint = (
        "A DFlash drafter has exactly `fc`, `hidden_norm`, `norm` and `layers.*`, and `shortlist_ids` with a "
        "`shortlist_size`: embedding and head are the target's."
    )
    _card_name = "DFlash drafter"
    _card_text = (
        "Proposes a block of tokens in one pass ([DFlash](https://arxiv.org/abs/2602.06036)). The target verifies it "
        "in one pass: `generate` needs fewer passes and gives the same text."
    )
    _card_tags = ("dflash", "speculative-decoding", "block-diffusion")

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        context_size = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(context_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.register_buffer("shortlist_ids", None)
        if config.shortlist_size is not None:
            self.register_buffer("shortlist_ids", torch.arange(config.shortlist_size))
        self._shortlist_head: tuple[Any, ...] | None = None
        self.post_init()

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> DFlashDraftOutput:
        r"""
        Args:
            noise_embeds (`torch.FloatTensor` of shape `(batch_size, block_size, hidden_size)`):
                Embeddings of the anchor token and of `block_size - 1` mask tokens.
            context_hidden_states (`torch.FloatTensor` of shape `(batch_size, context_length, hidden_size * num_taps)`):
                Target states at `config.target_layer_ids`, joined on the last axis, of the tokens committed since the
                last call. `context_length` may be 0.
            position_ids (`torch.LongTensor` of shape `(batch_size, context_length + block_size)`, *optional*):
                Positions of context and block: keys are made for both, queries only for the block.
            attention_mask (`torch.Tensor`, *optional*):
                `(batch_size, cached_length + context_length + block_size)`, 1 for real tokens, 0 for padding.
            cache (`Cache`, *optional*):
                Keys and values of earlier context. Those of this call are appended; the caller crops the block's again.

        Returns:
            [`DFlashDraftOutput`]
        """
        context = self.hidden_norm(self.fc(context_hidden_states))
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            length = context.shape[1] + noise_embeds.shape[1]
            position_ids = torch.arange(start, start + length, device=noise_embeds.device).unsqueeze(0)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        masks: dict[tuple[bool, int | None], torch.Tensor | None] = {}
        hidden_states = noise_embeds
        for layer in self.layers:
            kind = (layer.self_attn.is_causal, layer.self_attn.sliding_window)
            if kind not in masks:
                masks[kind] = self._block_mask(layer.self_attn, noise_embeds, context.shape[1], attention_mask, cache)
            hidden_states = layer(
                hidden_states,
                context=context,
                position_embeddings=position_embeddings,
                attention_mask=masks[kind],
                cache=cache,
            )
        return DFlashDraftOutput(last_hidden_state=self.norm(hidden_states), cache=cache)

    def draft_logits(self, hidden_states: torch.Tensor, head: nn.Module) -> torch.Tensor:
        """
        Logits of drafted tokens by the target's head, with the checkpoint's multiplier and soft cap.

        Args:
            hidden_states (`torch.FloatTensor` of shape `(num_positions, hidden_size)`): In the head's dtype and device.
            head (`nn.Module`): The target's output embedding.

        Returns:
            `torch.FloatTensor` of shape `(num_positions, vocab_size)`, -inf outside the shortlist where there is one.
        """
        ids = self.shortlist_ids
        rows = None if ids is None else self._rows_of(head, ids)
        logits = (head if rows is None else rows)(hidden_states)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        if ids is None or rows is None:
            return logits
        spread = logits.new_full((len(logits), head.out_features), -torch.inf)
        return spread.index_copy_(1, ids.to(logits.device), logits)

    def set_shortlist(self, ids: torch.LongTensor | None) -> None:
        """
        Draft these tokens only, or all with `None`.

        Args:
            ids (`torch.LongTensor` of shape `(shortlist_size,)`, *optional*): Ids of the target's vocabulary.
        """
        self.shortlist_ids = None if ids is None else ids.to(self.device)
        self.config.shortlist_size = None if ids is None else len(ids)
        self._shortlist_head = None

    def _rows_of(self, head: nn.Module, ids: torch.Tensor) -> nn.Module | None:
        """The shortlist's rows of a head, kept while its weight stays the same; `None` for a head that is not plain."""
        # Not as attributes: a packed layer takes note when its weight is read.
        weight, bias = head._parameters.get("weight"), head._parameters.get("bias")
        if not isinstance(head, nn.Linear) or type(weight) is not nn.Parameter or not weight.is_floating_point():
            return None
        if weight.is_meta or weight.shape[0] < self.config.vocab_size:
            return None
        version = None if weight.is_inference() else weight._version
        kept = self._shortlist_head
        if kept is None or kept[0] is not weight or kept[1] is not bias or kept[2] != (weight.data_ptr(), version):
            ids = ids.to(weight.device)
            rows = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
            rows.weight = nn.Parameter(weight.detach()[ids], requires_grad=False)
            if bias is not None:
                rows.bias = nn.Parameter(bias.detach()[ids], requires_grad=False)
            if isinstance(head, PackedLinear):
                pack_linear_weights(rows)
            kept = self._shortlist_head = (weight, bias, (weight.data_ptr(), version), rows)
        return kept[3]

    def __getstate__(self):
        # The target's rows stay with the target.
        return {**self.__dict__, "_shortlist_head": None}

    def _block_mask(self, attention, noise_embeds, context_length, attention_mask, cache):
        """The mask of one layer kind, in the form that the attention implementation wants (`None`: all is visible)."""
        width = noise_embeds.shape[1]
        # The layer is asked, not the cache: `DFlashCache` adds an offset of its own to what its layers say.
        index = attention.layer_idx
        layer = cache.layers[index] if cache is not None and index < len(cache.layers) else None
        cached = layer.get_seq_length() if layer is not None else 0
        new = context_length + width
        kv_length, kv_offset = layer.get_mask_sizes(new) if layer is not None else (new, 0)
        is_causal, window = attention.is_causal, attention.sliding_window

        def visible(batch_idx, head_idx, q_idx, kv_idx):
            seen = kv_idx >= 0
            if is_causal:
                seen = seen & (kv_idx <= q_idx)
            if window is not None:
                seen = seen & (q_idx - kv_idx < window) & (kv_idx - q_idx < window)
            return seen

        return ALL_MASK_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            batch_size=noise_embeds.shape[0],
            q_length=width,
            kv_length=kv_length,
            q_offset=cached + context_length,
            kv_offset=kv_offset,
            mask_function=visible,
            attention_mask=None if attention_mask is None else attention_mask.bool(),
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=not is_causal and window is None,
            dtype=noise_embeds.dtype,
            device=noise_embeds.device,
            config=self.config,
        )


def supports_draft_contract(drafter) -> bool:
    """Whether `drafter` looks like a block-diffusion drafter, whatever package its class comes from."""
    config = getattr(drafter, "config", None)
    return all(hasattr(config, name) for name in ("target_layer_ids", "block_size", "mask_token_id"))


__all__ = ["DFlashDraftModel", "DFlashDraftOutput", "supports_draft_contract"]

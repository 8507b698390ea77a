"""What a call, a pair and a policy must satisfy, checked before the first pass. Only errors and warnings live here."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.utils import logging

from .modeling_dflash import supports_draft_contract

logger = logging.get_logger(__name__)

# Generation settings that ask for another way of proposing tokens than the drafter's.
_OTHER_PROPOSERS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")


# "prompt": one block size for the whole answer. "flight": each step decides anew.
ADAPT = ("prompt", "flight")


def check_adapt(adapt: Any, block_size: Any = None) -> None:
    """Raise if `adapt` is no way to decide, or one that goes against a block size fixed by the same caller."""
    if adapt is not None and adapt not in ADAPT:
        raise ValueError(f"`adapt` must be one of {', '.join(map(repr, ADAPT))}, got {adapt!r}.")
    if adapt == "flight" and block_size is not None:
        raise ValueError(
            f"`adapt='flight'` decides the block size at every step, and `block_size={block_size}` fixes it. Give one "
            "of the two."
        )


def check_lookup(lookup: Any, adapt: str | None) -> None:
    """Raise if `lookup` is no answer, or asks for what only a flight does."""
    if lookup is not None and not isinstance(lookup, bool):
        raise TypeError(f"`lookup` must be `True`, `False` or left out, got {lookup!r}.")
    if lookup and adapt == "prompt":
        raise ValueError(
            "`lookup=True` copies from the text so far where that pays, which only steps that decide in flight do, and "
            "here one block size holds for the whole answer. Leave `lookup` out, or pass `adapt='flight'`."
        )


def default_adapt(policy: Any) -> str:
    """How a call decides that was told nothing: in flight, unless its policy names one size for the whole answer."""
    names_one_size = policy is not None and getattr(policy.config, "head", "") != "curve"
    return "prompt" if names_one_size else "flight"


def check_block_size(block_size: Any) -> None:
    if isinstance(block_size, bool) or not isinstance(block_size, Integral) or block_size < 1:
        raise ValueError(
            f"`block_size` must be an integer >= 1, got {block_size!r}. Leave it out to let the policy choose."
        )


def check_drafter(drafter: Any) -> None:
    """Raise if `drafter` is not an object that drafts blocks; no target is needed for this."""
    if not supports_draft_contract(drafter):
        raise TypeError(
            f"A drafter needs `config.target_layer_ids`, `config.block_size` and `config.mask_token_id`, got "
            f"{type(drafter).__name__}. Pass a DFlash drafter, e.g. `DFlashDraftModel.from_pretrained(...)`."
        )
    if isinstance(drafter, nn.Module) and any(parameter.is_meta for parameter in drafter.parameters()):
        raise ValueError("The drafter's weights are on the meta device. Load them before generating.")


def check_call(model: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], batch_size: int) -> None:
    """Refuse what block decoding cannot do exactly, as early as it can be known: before any pass of the target."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model. Block drafting works with decoder-only targets."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "`inputs_embeds` cannot be used with a block drafter, which needs token ids. Pass `input_ids`."
        )
    other = [name for name in _OTHER_PROPOSERS if getattr(generation_config, name, None)]
    if other:
        raise ValueError(f"{other} ask for another way of drafting. Leave them out: the drafter proposes the tokens.")
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"Generation mode '{mode.value}' cannot be used with a block drafter. Supported are greedy search and "
            f"sampling: set `num_beams=1` (got {generation_config.num_beams})."
        )
    if generation_config.prefill_chunk_size is not None:
        raise ValueError(
            "`prefill_chunk_size` is not supported: the drafter needs the states of the whole prompt. Leave it out."
        )
    if generation_config.use_cache is False:
        raise ValueError(
            "`use_cache=False` (given, or set in the model's config) cannot be used with a block drafter, which needs "
            "the cache. Pass `use_cache=True`."
        )
    _check_cache(model, generation_config, model_kwargs.get("cache"))
    _check_quantization(model)
    _check_selection(model, generation_config)
    if batch_size > 1:
        _check_batch(generation_config, model_kwargs)


def _check_cache(model: Any, generation_config: GenerationConfig, cache: Any) -> None:
    name = type(model).__name__
    if cache is None:
        raise _no_cache(model)
    if generation_config.cache_implementation == "quantized" or "Quantized" in type(cache).__name__:
        raise ValueError("A quantized cache cannot take back a rejected draft. Use the default cache, or 'static'.")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state, which cannot be rolled back after a rejected draft. "
            "Use plain `generate` for this model."
        )


def _check_quantization(model: Any) -> None:
    """Activations scaled over a whole pass make a token's logits depend on how many others are verified with it."""
    for name, module in model.named_modules():
        packed = getattr(module, "_packed_params", None)
        is_dynamic = type(module).__module__.startswith("torch.ao.nn.quantized.dynamic")
        if is_dynamic and getattr(packed, "dtype", None) == torch.qint8:
            raise ValueError(
                f"`{name}` of the target is dynamically quantised to int8: its activations are scaled over the whole "
                "pass, so a block would not give what single tokens give. Use weight-only quantisation."
            )


def _check_selection(model: Any, generation_config: GenerationConfig) -> None:
    """Attention to the k best keys breaks exact ties, which repeated tokens make, by the width of the pass."""
    window = getattr(model.config.get_text_config(decoder=True), "keep_window_size", None)
    if window is not None and generation_config.max_length > window:
        raise ValueError(
            f"Beyond {window} tokens (`keep_window_size`) {type(model).__name__} attends to the best keys only, and "
            f"ties among them fall differently in a wider pass. Keep the sequence to {window} tokens (got `max_length` "
            f"{generation_config.max_length}), or use plain `generate`."
        )


def _no_cache(model: Any) -> ValueError:
    return ValueError(
        f"{type(model).__name__} does not use a transformers `Cache`: a rejected draft could not be taken back. "
        "Use plain `generate` for this model."
    )


def check_croppable(model: Any, cache: Any) -> None:
    """Whether a cache can be cropped is known only after the prefill, when its layers exist."""
    if cache is None:
        raise _no_cache(model)
    if not cache.is_croppable:
        raise ValueError(
            f"The cache of {type(model).__name__} ({type(cache).__name__}) cannot be cropped, so a rejected draft "
            "could not be taken back. Use a dynamic cache, or plain `generate` for models with a recurrent state."
        )


def check_user_cache(cache: Any, input_length: int, mask_length: int | None) -> None:
    """A filled cache passed by the user must come with all the tokens it holds, and with at least one more."""
    cached = cache.get_seq_length()
    if mask_length is not None and mask_length > input_length:
        raise ValueError(
            f"The cache holds {cached} tokens that are not in `input_ids` ({input_length} given, attention mask over "
            f"{mask_length}). The drafter needs the states of every token, which the cache does not hold: pass the "
            "full sequence as `input_ids`."
        )
    if cached >= input_length:
        raise ValueError(
            f"The cache holds {cached} tokens, but `input_ids` only {input_length}. Pass the full sequence with at "
            "least one token more than the cache holds, or leave the cache out."
        )


def _check_batch(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    if generation_config.guidance_scale is not None and generation_config.guidance_scale != 1:
        raise ValueError("`guidance_scale` keeps a state over the whole batch. Pass one row at a time.")
    whole = {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"}
    other = sorted(key for key, value in model_kwargs.items() if key not in whole and hasattr(value, "shape"))
    if other:
        raise ValueError(f"A batch is decoded row by row, and {other} cannot be split. Pass one row at a time.")


def check_pair(target: Any, drafter: Any) -> None:
    """
    Raise if `drafter` cannot draft for `target`, warn once if it was made for another one.

    Raises:
        `ValueError`: layers, hidden size, vocabulary or mask id do not fit.
    """
    ours, theirs = drafter.config, target.config.get_text_config(decoder=True)
    num_layers = num_decoder_layers(target)
    if max(ours.target_layer_ids) >= num_layers:
        raise ValueError(
            f"The drafter reads target layers {list(ours.target_layer_ids)}, but {type(target).__name__} has only "
            f"{num_layers}. Use the target that the drafter was trained for."
        )
    recorded = getattr(ours, "num_target_layers", None)
    if recorded is not None and recorded != num_layers:
        raise ValueError(
            f"The drafter was trained for a target of {recorded} layers, {type(target).__name__} has {num_layers}. "
            "Use the target that the drafter was trained for."
        )
    if ours.hidden_size != theirs.hidden_size:
        raise ValueError(
            f"The drafter's hidden size is {ours.hidden_size}, the target's {theirs.hidden_size}. They must be equal: "
            "the drafter borrows the target's embedding and head."
        )
    width = getattr(target.get_input_embeddings(), "embedding_dim", ours.hidden_size)
    if width != ours.hidden_size:
        raise ValueError(
            f"The embedding of {type(target).__name__} is {width} wide, its layers {theirs.hidden_size}: a drafter "
            "could not borrow it. Supported are targets whose embedding is as wide as their layers."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(f"{type(target).__name__} has no output embedding (head) that the drafter could borrow.")
    _check_vocabulary(ours, vocab_rows(target))
    if not 0 <= ours.mask_token_id < vocab_rows(target):
        raise ValueError(
            f"The drafter's `mask_token_id` {ours.mask_token_id} is not a row of the target's embedding "
            f"({vocab_rows(target)} rows). If the target was resized, restore the rows it was trained with."
        )
    _check_mask_row(target, ours.mask_token_id)
    _warn_other_name("drafter", getattr(ours, "target_name_or_path", None), target)


def _check_vocabulary(ours: Any, num_rows: int) -> None:
    """Equal sizes, or sizes so close that they are one vocabulary with another padding or a few rows added."""
    recorded = getattr(ours, "vocab_size", None)
    if recorded is None or recorded == num_rows:
        return
    difference, larger = abs(recorded - num_rows), max(recorded, num_rows)
    if difference > min(1024, larger // 4):
        raise ValueError(
            f"The drafter was trained for a vocabulary of {recorded} tokens, the target has {num_rows}. Drafted ids "
            "would mean other tokens: use the target that the drafter was trained for."
        )
    logger.warning_once(
        f"The target's vocabulary has {num_rows} rows, the drafter's {recorded}: taken as the same tokens with another "
        f"padding. Only ids below {min(recorded, num_rows)} are proposed."
    )


def _check_mask_row(target: Any, mask_token_id: int) -> None:
    weight: Any = getattr(target.get_input_embeddings(), "weight", None)
    # Quantised tables are classes of their own, whose rows need not be readable.
    if type(weight) is nn.Parameter and not weight.is_meta and not weight[mask_token_id].any():
        logger.warning_once(
            f"The target's embedding of `mask_token_id` {mask_token_id} is all zeros. If the drafter was trained with "
            "an added mask token, load the embedding that it was trained with."
        )


def check_policy(policy: Any, target: Any, drafter: Any) -> None:
    """Raise if `policy` cannot be asked for this target, warn once if it was made for another target or drafter."""
    if not callable(getattr(policy, "choose", None)) or not hasattr(getattr(policy, "config", None), "block_sizes"):
        raise TypeError(
            "`policy` must be a BlockPilot policy, its folder or Hub id, `False` or `None`, got "
            f"{type(policy).__name__}."
        )
    config = policy.config
    num_logits = getattr(target.get_output_embeddings(), "out_features", None)
    if getattr(config, "features", None) == "logits" and num_logits not in (None, config.vocab_size):
        raise ValueError(
            f"The policy reads the logits of {config.vocab_size} tokens, the target has {num_logits}. Use the policy "
            "that was made for this target, or pass `policy=False`."
        )
    if getattr(config, "features", None) == "compact+context":
        size = getattr(drafter.config, "hidden_size", None)
        if not hasattr(drafter, "fc") or not hasattr(drafter, "hidden_norm") or size != config.context_size:
            raise ValueError(
                f"The policy reads the context of {config.context_size} numbers that a DFlash drafter makes with its "
                f"layers `fc` and `hidden_norm`, and the drafter is a {type(drafter).__name__} with `hidden_size` "
                f"{size}. Use the policy that was made for this drafter, or pass `policy=False`."
            )
    _warn_other_name("policy", getattr(config, "target_name_or_path", None), target)
    _warn_other_name("policy", getattr(config, "drafter_name_or_path", None), drafter)


def check_states(target: Any, states: Sequence[torch.Tensor]) -> None:
    """The hidden states that a drafter reads, `(1, length, hidden_size)` each; a few targets keep several streams."""
    shapes = [tuple(state.shape) for state in states if state.ndim != 3]
    if shapes:
        raise ValueError(
            f"{type(target).__name__} has hidden states of shape {shapes[0]}, a drafter reads (1, length, "
            "hidden size). Use plain `generate` for this model."
        )


def num_decoder_layers(target: Any) -> int:
    """Layers with a hidden state each. Configs may count other things: halves of layers, or the encoder's."""
    layers = getattr(target.get_decoder(), "layers", None)
    return target.config.get_text_config(decoder=True).num_hidden_layers if layers is None else len(layers)


def unwrapped(model: Any) -> Any:
    """The model behind `torch.compile` and data parallelism; PEFT's own `generate` finds its base by itself."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and not hasattr(type(model), "generate"):
            inner = getattr(model, "module", None)
        if inner is None:
            return model
        model = inner


def vocab_rows(target: Any) -> int:
    """Rows of the target's input embedding, looked up now: a target may be resized at any time."""
    embedding = target.get_input_embeddings()
    return getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0]


def _warn_other_name(what: str, recorded: str | None, model: Any) -> None:
    """Compared by the last part of the path: the same model is often loaded from another place."""
    name = getattr(model.config, "_name_or_path", None) or ""
    if recorded and name and _last_part(recorded) != _last_part(name):
        logger.warning_once(
            f"The {what} was made for '{recorded}' and is used with '{name}'. The output stays the same, but it may be "
            "slower."
        )


def _last_part(name: str) -> str:
    return name.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1].lower()

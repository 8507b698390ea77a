"""A drafter of this package in the form of the authors' own package `dflash` (PyPI), to time the two side by side."""

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .packing import PackedLinear, pack_linear_weights

_KEPT = (
    "attention_bias",
    "block_size",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "is_causal",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "rms_norm_eps",
    "sliding_window",
    "vocab_size",
)


def peer_drafter(drafter: Any) -> Any:
    """
    The same weights as a `dflash.model.DFlashDraftModel`, in the same dtype, on the same device, packed where ours is.
    A shortlist stays behind: that package drafts from the whole vocabulary.

    Raises:
        `ImportError`: if `dflash` is not installed.
        `ValueError`: for a drafter that it cannot load.
    """
    from dflash.model import DFlashDraftModel

    config = drafter.config
    scales = {name: getattr(config, name, None) for name in ("input_embedding_scale", "output_multiplier")}
    fields = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **{name: value for name, value in scales.items() if value not in (None, 1.0)},
        },
        "rope_parameters": dict(config.rope_parameters),
        "use_sliding_window": "sliding_attention" in (config.layer_types or []),
        "max_window_layers": config.num_hidden_layers,
        **{name: getattr(config, name, None) for name in _KEPT},
    }
    own = dict(drafter.named_parameters())
    with tempfile.TemporaryDirectory(prefix="blockpilot-peer-") as folder:
        Path(folder, "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
        weights = {name: value.detach().cpu().contiguous() for name, value in own.items()}
        save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model, report = DFlashDraftModel.from_pretrained(folder, dtype=drafter.dtype, output_loading_info=True)
    wrong = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    if wrong:
        raise ValueError(f"The package dflash cannot take this drafter: {', '.join(wrong[:3])} differ.")
    model = model.to(drafter.device).eval()
    if any(isinstance(module, PackedLinear) for module in drafter.modules()):
        pack_linear_weights(model)
    return model


def peer_generate(
    drafter: Any,
    target: Any,
    input_ids: torch.LongTensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
) -> torch.LongTensor:
    """
    `dflash_generate` at the drafter's block size.

    Returns:
        `torch.LongTensor` of shape `(1, length)`: prompt and answer.
    """
    from dflash.model import dflash_generate

    stop = target.generation_config.eos_token_id
    stops = None if stop is None else [stop] if isinstance(stop, int) else list(stop)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it names the cache as older versions of transformers do
        return dflash_generate(drafter, target, input_ids, max_new_tokens, stops, temperature)


__all__ = ["peer_drafter", "peer_generate"]

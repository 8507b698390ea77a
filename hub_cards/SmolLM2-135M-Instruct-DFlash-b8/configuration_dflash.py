"""Configuration of a DFlash drafter (arXiv 2602.06036), in this project's form and in the published one.

A published checkpoint describes itself as a `qwen3` model with a `dflash_config` section; `DFlashConfig` reads that
form and its own, and refuses what it does not know instead of guessing. This is the one place that knows how
checkpoint configs differ. It knows nothing of weights or of the target beyond the sizes that the checkpoint recorded.
"""

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .sharing import SharedConfig

# Keys of `dflash_config` whose meaning is known. Everything else may change the output, so it is an error.
_DFLASH_KEYS = (
    "block_size",
    "final_logit_softcapping",
    "input_embedding_scale",
    "mask_token_id",
    "num_target_layers",
    "output_multiplier",
    "target_layer_ids",
)
# Sizes and settings of the decoder layers, copied from a published config as they are.
_REQUIRED_KEYS = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)
_OPTIONAL_KEYS = (
    "attention_bias",
    "attention_dropout",
    "dtype",
    "hidden_act",
    "initializer_range",
    "is_causal",
    "name_or_path",
    "torch_dtype",
)
_SUPPORTED = (
    "Supported are DFlash checkpoints as published by z-lab (`dflash_config`) and folders saved by this package."
)


class DFlashConfig(SharedConfig):
    r"""
    Configuration of [`DFlashDraftModel`]. The defaults are those of the published drafter for Qwen3-4B.

    Args:
        vocab_size (`int`, *optional*, defaults to 151936):
            Rows of the target's embedding that the drafter was trained with; it has no embedding of its own.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
        hidden_act, max_position_embeddings, initializer_range, rms_norm_eps, attention_bias, attention_dropout,
        rope_parameters:
            As in `Qwen3Config`. `rope_theta` is read from `rope_parameters` first, then from the top level.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` per layer; all full by default.
        sliding_window (`int`, *optional*):
            Width of the window of sliding layers: a query sees keys less than `sliding_window` positions away.
        is_causal (`bool`, *optional*):
            Whether a block position sees only earlier ones. `None` means causal in sliding layers and bidirectional in
            full ones, as the published checkpoints do.
        block_size (`int`, *optional*, defaults to 16):
            Positions of a block, the anchor included, in training.
        mask_token_id (`int`, *optional*, defaults to 151669):
            Id of the target's vocabulary whose embedding stands at the positions to be denoised.
        target_layer_ids (`list[int]`, *optional*):
            Zero-based target layers whose outputs are joined as context; id `k` is `hidden_states[k + 1]`.
        num_target_layers (`int`, *optional*):
            Decoder layers of the target.
        input_embedding_scale, output_multiplier (`float`, *optional*, defaults to 1.0):
            Factors on the borrowed embedding and on the borrowed head's logits.
        final_logit_softcapping (`float`, *optional*):
            `c * tanh(logits / c)` on the logits, after the multiplier.
        shortlist_size (`int`, *optional*):
            Number of tokens that drafts are made of, when they are not the whole vocabulary: the ids are with the
            weights, as `shortlist_ids`. Drafting then reads these rows of the target's head only (the idea of FR-Spec,
            arXiv 2502.14856). Other tokens come from the target alone, so it changes speed and not the output.
        target_name_or_path, target_revision, target_fingerprint (`str`, *optional*):
            The target that the drafter was trained for.
        policy, policy_revision (`str`, *optional*):
            Hub id or folder of the policy to use with this drafter. A relative folder counts from the drafter's own.
        blockpilot_version (`str`, *optional*): Version of the package that wrote the drafter.

    Raises:
        `ValueError`: if a value cannot work, or a loaded file lacks a value that would have to be guessed.
    """

    model_type = "blockpilot_dflash"

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict = None  # type: ignore[assignment]
    attention_bias: bool = False
    attention_dropout: float = 0.0
    layer_types: list[str] = None  # type: ignore[assignment]  # derived in `__post_init__`, as the next ones
    sliding_window: int | None = None
    is_causal: bool | None = None
    tie_word_embeddings: bool = False

    block_size: int = 16
    mask_token_id: int = 151669
    target_layer_ids: list[int] = None  # type: ignore[assignment]
    num_target_layers: int = 36
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    shortlist_size: int | None = None

    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_fingerprint: str | None = None
    policy: str | None = None
    policy_revision: str | None = None
    blockpilot_version: str | None = None

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        self.target_layer_ids = list(self.target_layer_ids)
        super().__post_init__(**kwargs)
        self._check_values()

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether the positions of a block see only earlier ones in layer `layer_idx`."""
        if self.is_causal is None:
            return self.layer_types[layer_idx] == "sliding_attention"
        return self.is_causal

    def _check_values(self) -> None:
        if not _is_int(self.block_size) or self.block_size < 2:
            raise ValueError(
                f"`block_size` of a drafter must be an integer >= 2 (the anchor and at least one drafted token), "
                f"got {self.block_size!r}."
            )
        if not _is_int(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be an id of the target's vocabulary, 0 to {self.vocab_size - 1}, got "
                f"{self.mask_token_id!r}. It is the token that the drafter was trained to denoise."
            )
        size = self.shortlist_size
        if size is not None and (not _is_int(size) or not 1 <= size <= self.vocab_size):
            raise ValueError(
                f"`shortlist_size` must be an integer from 1 to `vocab_size` {self.vocab_size}, got {size!r}. "
                "Leave it out to draft over the whole vocabulary."
            )
        ids = self.target_layer_ids
        if not ids or not all(_is_int(i) and 0 <= i < self.num_target_layers for i in ids):
            raise ValueError(
                f"`target_layer_ids` must be zero-based layers of the target, 0 to {self.num_target_layers - 1}, got "
                f"{ids}."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` must name {self.num_hidden_layers} layers (`num_hidden_layers`), got "
                f"{self.layer_types}."
            )
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(f"`layer_types` may hold 'full_attention' and 'sliding_attention', got {unknown}.")
        window = self.sliding_window or 0
        if "sliding_attention" in self.layer_types and (not _is_int(window) or window < 1):
            raise ValueError(
                f"`sliding_window` must be a positive integer when a layer slides, got {self.sliding_window!r}."
            )
        rope_type = self.rope_parameters["rope_type"]
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(
                f"`rope_parameters['rope_type']` must be one of {sorted(['default', *ROPE_INIT_FUNCTIONS])}, got "
                f"{rope_type!r}."
            )

    # Both entry points: `from_pretrained` compares `model_type` between them and would warn about 'qwen3'.
    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return _own_form(config_dict, str(pretrained_model_name_or_path)), kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        return super().from_dict(_own_form(config_dict, config_dict.get("name_or_path") or "the config"), **kwargs)


def default_target_layer_ids(num_target_layers: int, num_context_layers: int) -> list[int]:
    """Evenly spaced target layers from the second to the third last one (DFlash, arXiv 2602.06036)."""
    if num_context_layers == 1:
        return [num_target_layers // 2]
    step = max(num_target_layers - 4, 0) / (num_context_layers - 1)
    return [min(round(1 + i * step), num_target_layers - 1) for i in range(num_context_layers)]


def is_dflash_config_dict(config_dict: dict[str, Any]) -> bool:
    """Whether a loaded `config.json` describes a drafter that [`DFlashConfig`] is responsible for."""
    return config_dict.get("model_type") == DFlashConfig.model_type or "dflash_config" in config_dict


def _own_form(config_dict: dict[str, Any], source: str) -> dict[str, Any]:
    """The config in this package's form; `source` is named in errors. Leaves a dict in that form as it is."""
    if config_dict.get("model_type") == DFlashConfig.model_type:
        _check_present(config_dict, (*_REQUIRED_KEYS, "mask_token_id", "block_size", "target_layer_ids"), source)
        _rope_parameters(config_dict, source)
        return config_dict
    _check_is_dflash(config_dict, source)
    section = config_dict["dflash_config"] or {}

    def value(key, default=None):
        return section.get(key, config_dict.get(key, default))

    _check_present(config_dict, _REQUIRED_KEYS, source)
    own = {key: config_dict[key] for key in (*_REQUIRED_KEYS, *_OPTIONAL_KEYS) if config_dict.get(key) is not None}
    own["model_type"] = DFlashConfig.model_type
    for key in ("mask_token_id", "block_size", "num_target_layers"):
        if value(key) is None:
            raise ValueError(f"{source} lacks `dflash_config.{key}`. It cannot be guessed: add it to config.json.")
        own[key] = value(key)
    own["target_layer_ids"] = value("target_layer_ids") or default_target_layer_ids(
        own["num_target_layers"], own["num_hidden_layers"]
    )
    for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        if value(key) is not None:
            own[key] = float(value(key))
    if not own.get("final_logit_softcapping", 0) > 0:
        own.pop("final_logit_softcapping", None)
    own["rope_parameters"] = _rope_parameters(config_dict, source)
    own["layer_types"], own["sliding_window"] = _layer_types(config_dict, source)
    return own


def _check_is_dflash(config_dict: dict[str, Any], source: str) -> None:
    speculators = sorted(key for key in config_dict if key.startswith("speculators"))
    if speculators:
        raise ValueError(f"{source} is in the speculators format (found {speculators}). {_SUPPORTED}")
    if "dflash_config" not in config_dict:
        raise ValueError(
            f"{source} is not a DFlash drafter: model_type {config_dict.get('model_type')!r} without a "
            f"`dflash_config`. {_SUPPORTED}"
        )
    section = config_dict["dflash_config"] or {}
    architectures = config_dict.get("architectures") or []
    selector = sorted(key for key in section if key.startswith(("selector_", "conv_")))
    if selector or any("DFlash2" in name for name in architectures):
        raise ValueError(f"{source} is a DFlash 2 drafter (found {selector or architectures}). {_SUPPORTED}")
    unknown = sorted(set(section) - set(_DFLASH_KEYS))
    if unknown:
        raise ValueError(
            f"{source} has `dflash_config` keys that may change the output and are not known here: {unknown}. "
            f"Known are {list(_DFLASH_KEYS)}."
        )
    reduced = config_dict.get("draft_vocab_size")
    if reduced is not None and reduced != config_dict.get("vocab_size"):
        raise ValueError(
            f"{source} drafts over a vocabulary of its own (`draft_vocab_size` {reduced}). "
            "Supported are drafters that share the target's vocabulary and head."
        )


def _check_present(config_dict: dict[str, Any], keys: tuple[str, ...], source: str) -> None:
    missing = [key for key in keys if config_dict.get(key) is None]
    if missing:
        raise ValueError(f"{source} lacks {missing}. They cannot be guessed: add them to config.json.")


def _rope_parameters(config_dict: dict[str, Any], source: str) -> dict[str, Any]:
    """Old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) rotary settings as one dict; nested values win."""
    nested = config_dict.get("rope_parameters") or {}
    rope = dict(config_dict.get("rope_scaling") or nested)
    if any(isinstance(part, dict) for part in rope.values()):
        raise ValueError(
            f"{source} has rotary settings per layer type ({sorted(rope)}). One set for all layers is supported."
        )
    theta = rope.get("rope_theta", nested.get("rope_theta", config_dict.get("rope_theta")))
    if theta is None:
        raise ValueError(f"{source} lacks `rope_theta`, both in `rope_parameters` and at the top level of config.json.")
    rope["rope_theta"] = theta
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    return rope


def _layer_types(config_dict: dict[str, Any], source: str) -> tuple[list[str], int | None]:
    num_layers, window = config_dict["num_hidden_layers"], config_dict.get("sliding_window")
    use_window = config_dict.get("use_sliding_window")
    layer_types = config_dict.get("layer_types")
    if layer_types is None:
        if use_window and window is not None and config_dict.get("max_window_layers") is not None:
            full = min(config_dict["max_window_layers"], num_layers)
            layer_types = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
        elif use_window is False or window is None:
            layer_types = ["full_attention"] * num_layers
        else:
            raise ValueError(
                f"{source} has `sliding_window` {window} but neither `layer_types` nor `use_sliding_window`. "
                "Which layers slide cannot be guessed: add `layer_types` to config.json."
            )
    if "sliding_attention" not in layer_types:
        return list(layer_types), None
    if use_window is False:
        raise ValueError(
            f"{source} has sliding layers in `layer_types` but `use_sliding_window` false. Make the two agree in "
            "config.json."
        )
    return list(layer_types), window


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

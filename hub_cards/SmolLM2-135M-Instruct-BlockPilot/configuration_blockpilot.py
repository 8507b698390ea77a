"""What a saved policy says about itself: candidate block sizes, head, features, and what it was made for.

The contract: a `BlockPilotConfig` that exists has been checked, here or on a machine that has only this file next to
`config.json`. It knows nothing of weights, of how features are computed (see `features.py`) or of decoding.
"""

import math
from dataclasses import field
from itertools import pairwise
from typing import Any

from .sharing import SharedConfig

HEADS = ("choice", "curve")
FEATURES = ("compact", "logits", "compact+context")

# Version of the function from prefill output to features. It goes up whenever `policy_features` gives other numbers for
# the same input: a head is worth nothing on features that it was not trained on.
FEATURE_VERSION = 1
NUM_LOG_PROBS = 64
# Sorted log-probabilities, entropy, margin, temperature, top-k, top-p.
NUM_COMPACT_FEATURES = NUM_LOG_PROBS + 5
# By head. The paper's; and one that keeps a curve head below a million parameters for drafters 4096 wide.
_HIDDEN_SIZES = {"choice": 2048, "curve": 128}

_RECORDS = (
    "target_name_or_path",
    "target_revision",
    "target_fingerprint",
    "drafter_name_or_path",
    "drafter_revision",
    "drafter_fingerprint",
    "blockpilot_version",
)


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_sampling(*, temperature: float | None = None, top_k: int | None = None, top_p: float | None = None) -> None:
    """
    Raise if sampling settings are not ones that `generate` could run with.

    Args:
        temperature (`float`, *optional*): 0 for greedy decoding, `None` when not recorded.
        top_k (`int`, *optional*): 0 or `None` when not used.
        top_p (`float`, *optional*): 1 or `None` when not used.

    Raises:
        `ValueError`: If one of them is out of range.
    """
    if temperature is not None and not (_is_number(temperature) and temperature >= 0):
        raise ValueError(f"`temperature` must be a number >= 0, got {temperature!r}. Pass 0 for greedy decoding.")
    if top_k is not None and not _is_integer(top_k, 0):
        raise ValueError(f"`top_k` must be an integer >= 0, got {top_k!r}. Leave it out when top-k is not used.")
    if top_p is not None and not (_is_number(top_p) and 0 <= top_p <= 1):
        raise ValueError(f"`top_p` must be a number from 0 to 1, got {top_p!r}. Leave it out when top-p is not used.")


class BlockPilotConfig(SharedConfig):
    r"""
    Configuration of a [`BlockPilotPolicy`].

    Args:
        block_sizes (`list[int]`, *optional*, defaults to `[14, 15, 16, 17, 18]`):
            Candidate block sizes, anchor token included, in increasing order. 1 stands for plain decoding. Output `i`
            of the head is the score of `block_sizes[i]`. Those of a `"curve"` head begin with 1.
        head (`str`, *optional*, defaults to `"choice"`):
            `"choice"`: one score per candidate, the largest wins (https://huggingface.co/papers/2606.31315).
            `"curve"`: the acceptance length at every candidate. Which size wins is up to the seconds of its steps.
        features (`str`, *optional*, defaults to `"compact"`):
            `"compact"`: a summary of the target's distribution at the last prompt position, and the sampling settings.
            `"logits"`: that position's logits over the whole vocabulary, as in the paper.
            `"compact+context"`: `"compact"`, and the drafter's projected context at that position.
        feature_version (`int`, *optional*, defaults to 1):
            Version of the feature definition that the weights were trained on.
        hidden_size (`int`, *optional*):
            Width of the two hidden layers; by default 2048 for head `"choice"`, as in the paper, and 128 for `"curve"`.
        dropout (`float`, *optional*, defaults to 0.2):
            Dropout after each hidden layer, in training only.
        vocab_size (`int`, *optional*):
            Width of the target's logits. Needed for `features="logits"`.
        context_size (`int`, *optional*):
            The drafter's `hidden_size`. Needed for `features="compact+context"`.
        sampling (`dict[str, Any]`, *optional*):
            Settings the policy was made for, under the keys `temperature` (0 for greedy), `top_k` and `top_p`. A key
            that is left out was not recorded. Grouped in one field because transformers drops generation settings that
            stand at the top level of a model config.
        target_name_or_path, target_revision, target_fingerprint (`str`, *optional*):
            The target the policy was made for, and a fingerprint of its weights.
        drafter_name_or_path, drafter_revision, drafter_fingerprint (`str`, *optional*):
            The drafter the policy was made for, and a fingerprint of its weights.
        blockpilot_version (`str`, *optional*):
            Version of the package that made the policy.

    Raises:
        `ValueError`: If a field has a value that is not allowed.
    """

    model_type = "blockpilot_policy"

    block_sizes: list[int] = field(default_factory=lambda: [14, 15, 16, 17, 18])
    head: str = "choice"
    features: str = "compact"
    feature_version: int = FEATURE_VERSION
    hidden_size: int | None = None
    dropout: float = 0.2
    vocab_size: int | None = None
    context_size: int | None = None
    sampling: dict[str, Any] | None = None
    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_fingerprint: str | None = None
    drafter_name_or_path: str | None = None
    drafter_revision: str | None = None
    drafter_fingerprint: str | None = None
    blockpilot_version: str | None = None

    def __post_init__(self, **kwargs):
        if isinstance(self.block_sizes, list | tuple):
            # A copy: the caller's list stays the caller's.
            self.block_sizes = list(self.block_sizes)
        if self.hidden_size is None:
            self.hidden_size = _HIDDEN_SIZES.get(self.head)
        super().__post_init__(**kwargs)
        self._check_fields()

    @property
    def num_features(self) -> int:
        """Width of the head's input."""
        if self.features == "logits":
            assert self.vocab_size is not None
            return self.vocab_size
        if self.features == "compact+context":
            assert self.context_size is not None
            return NUM_COMPACT_FEATURES + self.context_size
        return NUM_COMPACT_FEATURES

    def validate(self) -> None:
        """Check every field again. Called on saving and by the model, since attributes can be set after creation."""
        super().validate()
        self._check_fields()

    def _check_fields(self) -> None:
        sizes = self.block_sizes
        if not isinstance(sizes, list) or not sizes or not all(_is_integer(size, 1) for size in sizes):
            raise ValueError(
                f"`block_sizes` must be a non-empty list of integers >= 1, got {sizes!r}. "
                "List the candidate block sizes, for example [14, 15, 16, 17, 18]."
            )
        if any(left >= right for left, right in pairwise(sizes)):
            raise ValueError(
                f"`block_sizes` must be strictly increasing, got {sizes!r}. "
                "Sort them, and the rows of the last layer with them."
            )
        if self.head not in HEADS:
            raise ValueError(
                f"`head` must be one of {list(HEADS)}, got {self.head!r}. "
                "Use one of these, or a newer version of this code."
            )
        if self.head == "curve" and (sizes[0] != 1 or len(sizes) < 2):
            raise ValueError(
                f'`block_sizes` must be 1, plain decoding, and larger ones for `head="curve"`, got {sizes!r}. '
                "Add what is missing, for example [1, 2, 4, 8]."
            )
        if self.features not in FEATURES:
            raise ValueError(
                f"`features` must be one of {list(FEATURES)}, got {self.features!r}. "
                "Use one of these, or a newer version of this code."
            )
        if self.feature_version != FEATURE_VERSION or isinstance(self.feature_version, bool):
            raise ValueError(
                f"`feature_version` {self.feature_version!r} is unknown, this code computes version {FEATURE_VERSION}. "
                "Train the policy again, or use the version of this code that it was trained with."
            )
        if not _is_integer(self.hidden_size, 1):
            raise ValueError(f"`hidden_size` must be an integer >= 1, got {self.hidden_size!r}. The paper uses 2048.")
        if not (_is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ValueError(f"`dropout` must be a number from 0 to below 1, got {self.dropout!r}. The paper uses 0.2.")
        if self.vocab_size is not None and not _is_integer(self.vocab_size, 1):
            raise ValueError(
                f"`vocab_size` must be an integer >= 1, got {self.vocab_size!r}. Use the width of the target's logits."
            )
        if self.context_size is not None and not _is_integer(self.context_size, 1):
            raise ValueError(
                f"`context_size` must be an integer >= 1, got {self.context_size!r}. Use the drafter's `hidden_size`."
            )
        if self.features == "compact+context" and self.context_size is None:
            raise ValueError(
                '`context_size` must be set for `features="compact+context"`, got None. Use the drafter\'s '
                '`hidden_size`, or `features="compact"`, which fits any drafter.'
            )
        if self.features == "logits" and self.vocab_size is None:
            raise ValueError(
                '`vocab_size` must be set for `features="logits"`, got None. Use the width of the target\'s logits, '
                'or `features="compact"`, which fits any vocabulary.'
            )
        if self.sampling is not None:
            allowed = ("temperature", "top_k", "top_p")
            if not isinstance(self.sampling, dict) or not set(self.sampling) <= set(allowed):
                raise ValueError(
                    f"`sampling` must be a dict with keys from {list(allowed)}, got {self.sampling!r}. "
                    "Leave it out when the settings are not known."
                )
            check_sampling(**self.sampling)
        for name in _RECORDS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"`{name}` must be a string or None, got {value!r}. Leave it out when not known.")


__all__ = ["BlockPilotConfig"]

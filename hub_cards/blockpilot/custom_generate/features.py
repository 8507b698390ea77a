"""From the target's prefill output to the input of a policy: the one definition, for training and inference.

The contract: `policy_features` is a pure function of the raw logits at the last prompt position (before any logits
processor), of the sampling settings and, for one kind, of what the drafter reads there ([`projected_context`]). Its
result is finite whatever comes in, and a change of its numbers goes with a new `FEATURE_VERSION`. It does not know the
target, the policy's weights or the block sizes.
"""

from typing import Any

import torch

from .configuration_blockpilot import FEATURE_VERSION, FEATURES, NUM_COMPACT_FEATURES, NUM_LOG_PROBS, check_sampling

# Log-probabilities are cut off here, in nats: rarer than this, tokens look alike to a policy. Also stands for tokens
# that cannot occur (padded vocabulary rows at -inf) and for ranks that a small vocabulary does not have.
LOG_PROB_FLOOR = -50.0
# From here on sampling is all but uniform. Keeps any setting inside the range of float16.
MAX_TEMPERATURE = 10.0
# Projected context has gone through a norm and stays far below this, which float16 still holds.
MAX_CONTEXT = 1e4


def policy_features(
    logits: torch.Tensor,
    *,
    kind: str,
    context: torch.Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> torch.Tensor:
    """
    Features of one policy input per row.

    `"compact"` holds, in this order: the 64 largest log-probabilities, descending, at least `LOG_PROB_FLOOR`; the
    entropy in nats; the largest minus the second log-probability; the temperature, 0 for greedy decoding and at most
    `MAX_TEMPERATURE`; `64 / (64 + top_k)`, 0 when top-k is not used; top-p, 1 when it is not used. Settings that
    change nothing look the same as unused ones: top-k and top-p in greedy decoding, a top-k that spares the whole
    vocabulary.

    `"compact+context"` holds these, then the projected context with every number cut off at `MAX_CONTEXT` on both sides
    and 0 for a NaN.

    `"logits"` holds the logits themselves, as in https://huggingface.co/papers/2606.31315: the settings play no part.

    A NaN counts as a token that cannot occur, as -inf does. Where logits must stand for themselves, such a token gets
    the row's smallest finite logit, and +inf the largest one (0 in a row without any).

    Args:
        logits (`torch.Tensor` of shape `(rows, vocab_size)`):
            Raw target logits at the last prompt position, of any floating dtype, on any device. Left as they are.
        kind (`str`):
            `"compact"`, `"compact+context"` or `"logits"`, the field `features` of the policy's config.
        context (`torch.Tensor` of shape `(rows, context_size)`, *optional*):
            From [`projected_context`], needed for `"compact+context"` and not looked at otherwise.
        temperature (`float`, *optional*, defaults to 0.0):
            Sampling temperature, 0 for greedy decoding.
        top_k (`int`, *optional*):
            Tokens that top-k sampling keeps, 0 or `None` when not used.
        top_p (`float`, *optional*):
            Probability that top-p sampling keeps, 1 or `None` when not used.

    Returns:
        `torch.Tensor` of shape `(rows, num_features)`, float32, on the device of `logits`. `num_features` is
        `NUM_COMPACT_FEATURES`, that and `context_size`, or `vocab_size`.

    Raises:
        `ValueError`: If `logits` is not a matrix of floating-point numbers, `context` is needed and is none of as many
            rows, or `kind` or a setting is not allowed.
    """
    if logits.ndim != 2 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"`logits` must be floating-point of shape (rows, vocab_size), got {logits.dtype} of shape "
            f"{tuple(logits.shape)}. Pass the target's logits at the last prompt position, one row per prompt."
        )
    if kind not in FEATURES:
        raise ValueError(f"`kind` must be one of {list(FEATURES)}, got {kind!r}. Use the policy's `config.features`.")
    if temperature is None:
        raise ValueError("`temperature` must be a number >= 0, got None. Pass 0 for greedy decoding, 1 when not set.")
    check_sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    more = _checked_context(context, len(logits)) if kind == "compact+context" else None

    logits = logits.detach().float()
    if kind == "logits":
        return _finite_logits(logits)

    vocab_size = logits.shape[-1]
    # +inf becomes the largest float. A row without a single token that can occur leaves the softmax as NaN.
    log_probs = torch.nan_to_num(logits, nan=-torch.inf, neginf=-torch.inf).log_softmax(-1)
    log_probs = log_probs.nan_to_num(nan=LOG_PROB_FLOOR).clamp(min=LOG_PROB_FLOOR)
    entropy = torch.special.entr(log_probs.exp()).sum(-1, keepdim=True)
    top = log_probs.topk(min(NUM_LOG_PROBS, vocab_size), dim=-1).values
    top = torch.nn.functional.pad(top, (0, NUM_LOG_PROBS - top.shape[-1]), value=LOG_PROB_FLOOR)

    drawing = _setting_features(temperature, top_k, top_p, vocab_size)
    settings = torch.tensor(drawing, dtype=torch.float32, device=logits.device).expand(len(logits), -1)
    parts = [top, entropy, top[:, :1] - top[:, 1:2], settings]
    return torch.cat(parts if more is None else [*parts, more.to(logits.device)], dim=-1)


@torch.no_grad()
def projected_context(drafter: Any, context_hidden_states: torch.Tensor) -> torch.Tensor:
    """
    What a DFlash drafter makes of the target's states before its layers read them. Those of the last prompt position
    are features of the kind `"compact+context"`.

    Args:
        drafter (`PreTrainedModel`): With the layers `fc` and `hidden_norm`.
        context_hidden_states (`torch.Tensor` of shape `(rows, hidden_size * num_taps)`):
            Target states at the drafter's `target_layer_ids`, joined on the last axis, of any floating dtype.

    Returns:
        `torch.Tensor` of shape `(rows, context_size)`, float32, on the device of the drafter. `context_size` is the
        drafter's `hidden_size`.

    Raises:
        `ValueError`: If the drafter has no such layers, or they read states of another width.
    """
    fc, norm = getattr(drafter, "fc", None), getattr(drafter, "hidden_norm", None)
    if fc is None or norm is None:
        raise ValueError(
            f"Projected context needs a DFlash drafter, with layers `fc` and `hidden_norm`, got "
            f'{type(drafter).__name__}. Use a policy with `features="compact"`, which fits any drafter.'
        )
    if context_hidden_states.ndim != 2 or context_hidden_states.shape[-1] != fc.in_features:
        raise ValueError(
            f"`context_hidden_states` must have shape (rows, {fc.in_features}), got "
            f"{tuple(context_hidden_states.shape)}. Join the target's states at the drafter's `target_layer_ids` on "
            "the last axis, one row per position."
        )
    return norm(fc(context_hidden_states.to(drafter.device, drafter.dtype))).float()


def _checked_context(context: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Projected context `(rows, context_size)` as features."""
    if context is None:
        raise ValueError(
            '`context` must be given for `kind="compact+context"`, got None. Pass `projected_context(drafter, '
            "context_hidden_states)` of the last prompt position, one row per prompt."
        )
    if context.ndim != 2 or len(context) != rows or not context.is_floating_point():
        raise ValueError(
            f"`context` must be floating-point of shape ({rows}, context_size), a row for each of `logits`, got "
            f"{context.dtype} of shape {tuple(context.shape)}. Compute it with `projected_context`."
        )
    context = context.detach().float().nan_to_num(nan=0.0, posinf=MAX_CONTEXT, neginf=-MAX_CONTEXT)
    return context.clamp(-MAX_CONTEXT, MAX_CONTEXT)


def _finite_logits(logits: torch.Tensor) -> torch.Tensor:
    """Logits `(rows, vocab_size)` with whatever is not finite put at the ends of the row's finite range."""
    is_finite = logits.isfinite()
    low = logits.where(is_finite, torch.inf).amin(-1, keepdim=True)
    high = logits.where(is_finite, -torch.inf).amax(-1, keepdim=True)
    ends = torch.where(logits == torch.inf, high, low)
    return logits.where(is_finite, ends.where(is_finite.any(-1, keepdim=True), 0.0))


def _setting_features(temperature: float, top_k: int | None, top_p: float | None, vocab_size: int) -> list[float]:
    """The three features that tell how tokens are drawn."""
    if temperature == 0:
        return [0.0, 0.0, 1.0]
    return [
        min(float(temperature), MAX_TEMPERATURE),
        # Falls from 1 towards 0, which no limit means, and tells the usual values (10 to 100) well apart.
        NUM_LOG_PROBS / (NUM_LOG_PROBS + top_k) if top_k and top_k < vocab_size else 0.0,
        1.0 if top_p is None else float(top_p),
    ]


__all__ = [
    "FEATURE_VERSION",
    "LOG_PROB_FLOOR",
    "MAX_CONTEXT",
    "MAX_TEMPERATURE",
    "NUM_COMPACT_FEATURES",
    "policy_features",
    "projected_context",
]

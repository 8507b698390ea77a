"""Pure functions from drafter logits to a `DraftBlock`, and from a `DraftBlock` and target logits to committed tokens.

Verified positions are walked in emission order: logits processors on that prefix, pick, append, stopping criteria, as
plain `generate` does it for one token after the other. So processors, criteria and random numbers are used exactly as
there, and with argmax proposals the output is plain `generate`'s own for the same seed, up to the target's numerics at
different widths. Nothing here knows models or caches.
"""

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList


@dataclass(frozen=True)
class DraftBlock:
    """
    What a drafter proposes after the anchor.

    Args:
        token_ids (`torch.LongTensor` of shape `(rows, block_size - 1)`): The drafted tokens.
        q (`tuple[torch.LongTensor, torch.FloatTensor]`, *optional*):
            `(candidate_ids, probs)`, both `(rows, block_size - 1, num_candidates)`: the float32 distribution that each
            token was drawn from. `None` means one-hot: the token is the drafter's argmax.
        confidence (`torch.FloatTensor` of shape `(rows, block_size - 1)`):
            The drafter's largest probability at each position. With one-hot q that is the drafted token's own; for a
            drawn token it says nothing of the draw, so that decisions which read it keep the law of the output.
    """

    token_ids: torch.LongTensor
    q: tuple[torch.Tensor, torch.Tensor] | None
    confidence: torch.Tensor


@dataclass(frozen=True)
class DraftSampling:
    """Settings for drawn proposals: temperature > 0, top_k 0 and top_p 1 when unused."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Verified:
    """
    The outcome of one verification.

    Args:
        token_ids (`torch.LongTensor` of shape `(1, num_committed)`): Accepted tokens and the target's own last one.
        stopped (`bool`): Whether a stopping criterion fired on the last one.
        scores (`tuple[torch.FloatTensor]`, *optional*): Past scores and the new ones, `(1, vocab_size)` per token.
        logits (`tuple[torch.FloatTensor]`): Raw float32 logits of the committed tokens, if they were asked for.
    """

    token_ids: torch.LongTensor
    stopped: bool
    scores: tuple[torch.Tensor, ...] | None
    logits: tuple[torch.Tensor, ...]


def propose(logits: torch.Tensor, sampling: DraftSampling | None = None) -> DraftBlock:
    """
    Tokens from the drafter's logits: the argmax of each position, or a draw from its filtered distribution.

    Args:
        logits (`torch.FloatTensor` of shape `(rows, block_size - 1, vocab_size)`):
            Non-finite values, of a broken drafter, are replaced: a bad proposal costs speed, never correctness.
        sampling (`DraftSampling`, *optional*): Draw with these settings instead of taking the argmax.
    """
    logits = torch.nan_to_num(logits.float(), nan=0.0, posinf=1e4, neginf=-1e4)
    if sampling is None:
        top, token_ids = logits.max(dim=-1)
        return DraftBlock(token_ids, None, torch.exp(top - logits.logsumexp(dim=-1)))
    candidate_ids, probs = _filtered_distribution(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    drawn = torch.multinomial(probs.flatten(0, 1), num_samples=1).view(*probs.shape[:2], 1)
    token_ids = candidate_ids.gather(-1, drawn)[..., 0]
    return DraftBlock(token_ids, (candidate_ids, probs), probs.amax(dim=-1))


def _filtered_distribution(scores: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates and their probabilities after top-k and top-p, sorted by probability when one of them is used."""
    vocab_size = scores.shape[-1]
    if not 0 < top_k < vocab_size and top_p >= 1.0:
        return torch.arange(vocab_size, device=scores.device).expand_as(scores), scores.softmax(dim=-1)
    scores, candidate_ids = scores.topk(top_k if 0 < top_k < vocab_size else vocab_size, dim=-1)
    probs = scores.softmax(dim=-1)
    if top_p < 1.0:
        # The smallest set whose mass reaches top_p: a candidate stays while the mass before it is below top_p.
        probs = probs * (probs.cumsum(dim=-1) - probs < top_p)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return candidate_ids, probs


def verify_block(
    draft: DraftBlock | None,
    logits: torch.Tensor,
    input_ids: torch.LongTensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    do_sample: bool = False,
    past_scores: tuple[torch.Tensor, ...] | None = None,
    keep_logits: bool = False,
) -> Verified:
    """
    Commit the drafted tokens that the target would have emitted itself, and its own token after them.

    Args:
        draft (`DraftBlock`, *optional*): Its first `width - 1` tokens are verified; `None` when `width` is 1.
        logits (`torch.FloatTensor` of shape `(1, width, vocab_size)`):
            Target logits at the anchor and at the drafted positions; those at position `j` judge drafted token `j`.
        input_ids (`torch.LongTensor` of shape `(1, length)`): The sequence so far; its last token is the anchor.
        do_sample (`bool`): Draw each pick, else take the argmax.
        past_scores (`tuple`, *optional*): Scores so far, extended and shown to the criteria; `None`: not recorded.
        keep_logits (`bool`): Also return the raw logits of the committed tokens.

    Returns:
        [`Verified`]
    """
    width, length = logits.shape[1], input_ids.shape[1]
    drafted = input_ids[:, :0] if draft is None else draft.token_ids[:, : width - 1].to(input_ids.device)
    # Accepted tokens are the drafted ones, so the prefix of position j is the beginning of one buffer.
    buffer = torch.cat([input_ids, drafted], dim=-1)
    drafted_list = drafted[0].tolist()
    raw_logits: tuple[torch.Tensor, ...] = ()
    scores = past_scores
    picks = None
    if not do_sample and not len(logits_processor) and past_scores is None and not keep_logits:
        # Nothing looks at single positions: all picks at once, one synchronisation.
        picks = logits[0].argmax(dim=-1).tolist()

    committed: list[int] = []
    stopped = False
    for j in range(width):
        prefix = buffer[:, : length + j]
        if picks is not None:
            pick = picks[j]
        else:
            position_logits = logits[:, j].to(copy=True, dtype=torch.float32, device=input_ids.device)
            position_scores = logits_processor(prefix, position_logits)
            if scores is not None:
                scores += (position_scores,)
            if keep_logits:
                raw_logits += (position_logits,)
            pick = _pick(position_scores, draft, j, do_sample, is_drafted=j < width - 1)
        committed.append(pick)
        is_accepted = j < width - 1 and pick == drafted_list[j]
        if is_accepted:
            sequence = buffer[:, : length + j + 1]
        else:
            sequence = torch.cat([prefix, torch.tensor([[pick]], device=prefix.device)], dim=-1)
        stopped = bool(stopping_criteria(sequence, scores))
        if stopped or not is_accepted:
            break
    # Long also after a prompt of another integer type, as plain `generate` appends them.
    token_ids = torch.tensor([committed], device=input_ids.device)
    return Verified(token_ids, stopped, scores, raw_logits)


def _pick(scores: torch.Tensor, draft: DraftBlock | None, j: int, do_sample: bool, *, is_drafted: bool) -> int:
    """The token emitted at one position, from the processed scores `(1, vocab_size)`."""
    if not do_sample:
        return int(scores.argmax(dim=-1))
    p = scores.softmax(dim=-1)
    if is_drafted and draft is not None and draft.q is not None:
        candidate_ids, q = (part[0, j].to(p.device) for part in draft.q)
        return _rejection_pick(p[0], int(draft.token_ids[0, j]), candidate_ids, q)
    # The same draw as plain `generate` makes, one row at a time: the same seed gives the same token.
    return int(torch.multinomial(p, num_samples=1))


def _rejection_pick(p: torch.Tensor, drafted: int, candidate_ids: torch.Tensor, q: torch.Tensor) -> int:
    """
    Speculative sampling (arXiv 2211.17192, algorithm 1): keep a token drawn from q with probability min(1, p/q), else
    draw from the residual norm(max(0, p - q)). The result is distributed as p.
    """
    q_drafted = q[candidate_ids == drafted].sum()
    if torch.rand((), device=p.device) * q_drafted < p[drafted]:
        return drafted
    residual = p.index_add(0, candidate_ids, q, alpha=-1.0).clamp_min(0.0)
    # No residual means p equals q up to rounding: then p itself is the right law.
    return int(torch.multinomial(residual if residual.sum() > 0 else p, num_samples=1))

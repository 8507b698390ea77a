"""What decoding would have accepted at each block size, on texts whose tokens are known.

With one-hot proposals the text is the target's at every block size, so whether a drafted token is accepted depends on
the anchor's position and the block size alone: it must equal the text's token, and so must those before it. [`walk`]
takes the steps that decoding would take, at all sizes and in several texts together; [`replay`] tells the accepted
count after every anchor of one text. Both speak of the numerics that they ran in: with states as [`target_states`]
gives them in float32, of decoding in float32. Neither knows of sampling: the text says what was drawn.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .checks import vocab_rows
from .parallel_drafting import Blocks, DraftContext, draft_blocks, embed_noise
from .texts import Text
from .verification import propose

# Of one size, in one text and pass.
_ANCHORS_AT_ONCE = 128
# Of all blocks in a batch of texts.
_POSITIONS_AT_ONCE = 2048
# Of the contexts in one batch of texts, padding included.
_CONTEXT_AT_ONCE = 8192
# Where the head is asked for whole distributions.
_HEAD_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Replay:
    """
    Args:
        text (`Text`): The text.
        num_accepted (`dict[int, list[int]]`):
            By block size, for each answer token but the last as anchor, how many drafted tokens would be accepted.
        confidence (`dict[int, torch.FloatTensor]`, *optional*):
            By block size, the drafter's probability of each drafted token `(num_anchors, block_size - 1)`; 0 where it
            is not asked.
    """

    text: Text
    num_accepted: dict[int, list[int]]
    confidence: dict[int, torch.Tensor] | None = None

    def steps(self, block_size: int) -> list[int]:
        """
        Accepted counts of the verification steps that decoding at `block_size` takes, in order.

        Raises:
            `ValueError`: for a size above 1 that was not replayed.
        """
        remaining, walked, position = len(self.text.answer_ids) - 1, [], 0
        if block_size == 1:
            return [0] * remaining
        if block_size not in self.num_accepted:
            raise ValueError(f"Block size {block_size} was not replayed, only {sorted({1, *self.num_accepted})}.")
        accepted = self.num_accepted[block_size]
        while position < remaining:
            count = min(accepted[position], remaining - position - 1)
            walked.append(count)
            position += count + 1
        return walked

    def acceptance_length(self, block_size: int) -> float:
        """Tokens per verification step at `block_size`; 0 for an answer of one token, which the prefill gives."""
        steps = self.steps(block_size)
        return (len(self.text.answer_ids) - 1) / len(steps) if steps else 0.0


@torch.no_grad()
def replay(
    target: Any,
    drafter: Any,
    text: Text,
    context_hidden_states: torch.Tensor,
    block_sizes: Sequence[int],
    *,
    with_confidence: bool = False,
) -> Replay:
    """
    Accepted counts of `text` after every anchor of its answer, at each block size above 1.

    Args:
        context_hidden_states (`torch.FloatTensor` of shape `(length, hidden_size * num_taps)`):
            The target's states of the text, in the target's dtype.
        block_sizes (`Sequence[int]`): 1 is plain decoding and needs no drafter pass.
        with_confidence (`bool`, *optional*, defaults to `False`): Also the drafter's confidence. Takes longer.

    Returns:
        [`Replay`]
    """
    sizes = sorted({size for size in block_sizes if size > 1})
    first, end = len(text.prompt_ids), len(text.ids) - 1
    counts: dict[int, list[int]] = {size: [] for size in sizes}
    confidence = {size: torch.zeros(max(0, end - first), size - 1) for size in sizes} if with_confidence else None
    if sizes and first < end:
        context = DraftContext.of(drafter, context_hidden_states[:end])
        judge = _Judge(target, drafter, context_hidden_states.dtype)
        for size in sizes:
            # Past its position limit a drafter is not asked.
            anchors = range(first, int(min(end, max(first, judge.limit - size + 1))))
            for start in range(0, len(anchors), _ANCHORS_AT_ONCE):
                blocks = [(anchor, size) for anchor in anchors[start : start + _ANCHORS_AT_ONCE]]
                found = judge([text.ids], context, [blocks], with_confidence=with_confidence)
                counts[size] += found.num_accepted[0]
                if confidence is not None and found.confidence is not None:
                    confidence[size][start : start + len(blocks)] = found.confidence
            counts[size] += [0] * (end - first - len(anchors))
    return Replay(text=text, num_accepted=counts, confidence=confidence)


@torch.no_grad()
def walk(
    target: Any,
    drafter: Any,
    texts: Sequence[Text],
    contexts: Iterable[torch.Tensor],
    block_sizes: Sequence[int],
) -> list[dict[int, tuple[int, ...]]]:
    """
    The verification steps that decoding takes on each text at each block size. A round drafts one block for every text
    and size that has not come to the end of its text, all in one pass.

    Args:
        contexts (`Iterable[torch.Tensor]`): The target's states of each text `(length, hidden_size * num_taps)`, in the
            target's dtype. Taken one after another, and none is kept.
        block_sizes (`Sequence[int]`): 1 is plain decoding and needs no drafter pass.

    Returns:
        `list[dict[int, tuple[int, ...]]]`: per text and block size the accepted counts of all steps, in order.
    """
    sizes = sorted(set(block_sizes))
    states = iter(contexts)
    walked: list[dict[int, tuple[int, ...]]] = []
    for batch in _batches(texts, sizes):
        rows = []
        for text in batch:
            context = next(states)
            dtype = context.dtype
            rows.append(DraftContext.of(drafter, context[: len(text.ids) - 1]))
        walked += _walk_batch(_Judge(target, drafter, dtype), batch, DraftContext.of_rows(rows), sizes)
    return walked


def _batches(texts: Sequence[Text], sizes: Sequence[int]) -> Iterator[Sequence[Text]]:
    """Neighbours, as many as memory allows: the blocks' positions and the contexts in one pass are limited."""
    width, start = sum(sizes), 0
    while start < len(texts):
        end, longest = start + 1, len(texts[start].ids)
        while end < len(texts) and (end + 1 - start) * width <= _POSITIONS_AT_ONCE:
            longest = max(longest, len(texts[end].ids))
            if (end + 1 - start) * longest > _CONTEXT_AT_ONCE:
                break
            end += 1
        yield texts[start:end]
        start = end


def _walk_batch(
    judge: "_Judge", texts: Sequence[Text], context: DraftContext, sizes: Sequence[int]
) -> list[dict[int, tuple[int, ...]]]:
    counts: list[dict[int, list[int]]] = [{size: [] for size in sizes} for _ in texts]

    def next_block(row: int, size: int) -> tuple[int, int] | None:
        """Where the walker drafts next; without drafting it goes on to there, or to the end."""
        text, taken = texts[row], counts[row][size]
        anchor = len(text.prompt_ids) + sum(taken) + len(taken)
        left = len(text.ids) - 1 - anchor
        # Plain steps: past the drafter's limit, and for a last token, which needs no draft.
        if left > 1 and size > 1 and anchor + size <= judge.limit:
            return anchor, size
        taken.extend([0] * left)
        return None

    in_batch = list(range(len(texts)))  # the texts that have a row of `context`
    while True:
        blocks = {row: [block for size in sizes if (block := next_block(row, size))] for row in in_batch}
        busy = [row for row in in_batch if blocks[row]]
        if not busy:
            return [{size: tuple(steps) for size, steps in of_text.items()} for of_text in counts]
        if len(busy) < len(in_batch):
            context = context.rows([in_batch.index(row) for row in busy])
            in_batch = busy
        found = judge([texts[row].ids for row in busy], context, [blocks[row] for row in busy])
        for row, accepted in zip(busy, found.num_accepted, strict=True):
            for (anchor, size), count in zip(blocks[row], accepted, strict=True):
                # The last token is always the target's own pick.
                counts[row][size].append(min(count, len(texts[row].ids) - 2 - anchor))


@dataclass(frozen=True)
class _Judged:
    """The accepted count of each block by row, and the confidence `(num_blocks, longest - 1)` if it was asked for."""

    num_accepted: list[list[int]]
    confidence: torch.Tensor | None = None


class _Judge:
    """
    Drafts blocks in texts and counts, for each, the drafted tokens that are the text's, up to the first other one.

    Args:
        head_dtype (`torch.dtype`): Of the target's states: as in decoding, the head computes in it.
    """

    def __init__(self, target: Any, drafter: Any, head_dtype: torch.dtype):
        self.drafter, self.head_dtype = drafter, head_dtype
        self.embedding, self.head = target.get_input_embeddings(), target.get_output_embeddings()
        self.head_device = getattr(getattr(self.head, "weight", None), "device", target.device)
        self.num_ids = min(getattr(drafter.config, "vocab_size", None) or vocab_rows(target), vocab_rows(target))
        # An anchor and its block must end here.
        self.limit = getattr(drafter.config, "max_position_embeddings", None) or math.inf

    def __call__(
        self,
        ids: Sequence[tuple[int, ...]],
        context: DraftContext,
        rows: Sequence[Sequence[tuple[int, int]]],
        *,
        with_confidence: bool = False,
    ) -> _Judged:
        """
        Args:
            ids (`Sequence[tuple[int, ...]]`): Tokens of each row's text.
            context ([`DraftContext`]): A row for each.
            rows: Blocks of each row, as [`Blocks.of`] takes them.
        """
        device = self.drafter.device
        blocks = Blocks.of(rows, device)
        width = blocks.index.shape[1]
        anchor_ids = [[ids[row][anchor] for anchor, _ in found] for row, found in enumerate(rows)]
        sizes = [size for found in rows for _, size in found]
        # Places of the anchors in all positions, row after row.
        places, expected = [], []
        for row, found in enumerate(rows):
            place = row * width
            for anchor, size in found:
                places.append(place)
                place += size
                # What a block should say; past the end of the text no token is right.
                follow = ids[row][anchor + 1 : anchor + size]
                expected.append([*follow, *[-1] * (max(sizes) - 1 - len(follow))])
        noise_ids = torch.full(blocks.index.shape, self.drafter.config.mask_token_id, device=device)
        starts = torch.tensor(places, device=device)
        noise_ids.view(-1)[starts] = torch.tensor([i for row_ids in anchor_ids for i in row_ids], device=device)
        states = draft_blocks(self.drafter, context, blocks, embed_noise(self.drafter, self.embedding, noise_ids))
        judge = self._count_all if with_confidence else self._count
        accepted, confidence = judge(states.flatten(0, 1), starts, sizes, torch.tensor(expected, device=device))
        return _Judged([[accepted.pop(0) for _ in found] for found in rows], confidence)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        drafted = states.to(self.head_device, self.head_dtype)
        return self.drafter.draft_logits(drafted, self.head)[:, : self.num_ids]

    def _count(
        self, states: torch.Tensor, starts: torch.Tensor, sizes: list[int], expected: torch.Tensor
    ) -> tuple[list[int], None]:
        """The head is much of the cost, and nothing counts after the first token that differs."""
        lengths = torch.tensor(sizes, device=states.device)
        accepted = torch.zeros_like(lengths)
        alive = torch.arange(len(sizes), device=states.device)
        for k in range(1, max(sizes)):
            alive = alive[lengths[alive] > k]
            if len(alive) == 0:
                break
            picks = self._logits(states[starts[alive] + k]).argmax(-1)
            alive = alive[picks.to(alive.device) == expected[alive, k - 1]]
            accepted[alive] += 1
        return accepted.tolist(), None

    def _count_all(
        self, states: torch.Tensor, starts: torch.Tensor, sizes: list[int], expected: torch.Tensor
    ) -> tuple[list[int], torch.Tensor]:
        """With the confidence in every drafted token, also after the first one that differs."""
        offsets = torch.arange(1, max(sizes), device=states.device)
        is_drafted = offsets < torch.tensor(sizes, device=states.device)[:, None]
        places = (starts[:, None] + offsets)[is_drafted]
        drafts = [propose(self._logits(states[part])[None]) for part in places.split(_HEAD_ROWS_AT_ONCE)]
        drafted = torch.full_like(expected, -1).masked_scatter(
            is_drafted, torch.cat([draft.token_ids[0] for draft in drafts]).to(expected.device)
        )
        confidence = torch.zeros(expected.shape, device=states.device).masked_scatter(
            is_drafted, torch.cat([draft.confidence[0] for draft in drafts]).to(states.device)
        )
        is_right = (drafted == expected) & is_drafted
        return is_right.long().cumprod(-1).sum(-1).tolist(), confidence.cpu()


def check_replayable(drafter: Any) -> None:
    """
    Raises:
        `ValueError`: for a drafter that drafts in a way of its own.
    """
    if hasattr(drafter, "draft_block") or not hasattr(drafter, "draft_logits"):
        raise ValueError(
            f"Replay needs a DFlash drafter, which drafts by its layers alone, got a {type(drafter).__name__}. Name "
            "one that was trained for this target."
        )


def acceptance_by_group(replays: Sequence[Replay], block_size: int) -> dict[str, dict[str, float | int]]:
    """
    By category and in `all`: acceptance length as the mean over texts, their number, and the number of their prompts,
    which may have several texts each. Prompts are told apart by their ids, as where they are held out.
    """
    groups: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for one in replays:
        found = one.text.prompt_hash, one.acceptance_length(block_size)
        for name in {one.text.category, "all"}:  # texts without a category are in `all` alone
            groups[name].append(found)
    return {
        name: {
            "acceptance_length": sum(tau for _, tau in found) / len(found),
            "num_prompts": len({prompt for prompt, _ in found}),
            "num_texts": len(found),
        }
        for name, found in sorted(groups.items())
    }


__all__ = ["Replay", "acceptance_by_group", "check_replayable", "replay", "walk"]

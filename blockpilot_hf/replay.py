"""What decoding would have accepted at each block size, on a text whose tokens are known.

With one-hot proposals the text is the target's at every block size, so whether a drafted token is accepted depends on
the anchor's position and the block size alone: it must equal the text's token, and so must those before it. One
drafter pass over many anchors gives all accepted counts, and walking `p -> p + accepted + 1` gives the steps that
decoding would take. It speaks of the numerics that it ran in: with states as [`target_states`] gives them in float32,
of decoding in float32. Knows nothing of sampling: the text says what was drawn.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .checks import vocab_rows
from .parallel_drafting import draft_states, noise_embeds
from .texts import Text

_ANCHORS_AT_ONCE = 128


@dataclass(frozen=True)
class Replay:
    """
    Args:
        text (`Text`): The text.
        num_accepted (`dict[int, list[int]]`):
            By block size, for each answer token but the last as anchor, how many drafted tokens would be accepted.
    """

    text: Text
    num_accepted: dict[int, list[int]]

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
    target: Any, drafter: Any, text: Text, context_hidden_states: torch.Tensor, block_sizes: Sequence[int]
) -> Replay:
    """
    Accepted counts of `text` after every anchor of its answer, at each block size above 1.

    Args:
        context_hidden_states (`torch.FloatTensor` of shape `(length, hidden_size * num_taps)`):
            The target's states of the text, in the target's dtype.
        block_sizes (`Sequence[int]`): 1 is plain decoding and needs no drafter pass.

    Returns:
        [`Replay`]
    """
    ids = torch.tensor(text.ids, device=drafter.device)
    head = target.get_output_embeddings()
    shared = min(getattr(drafter.config, "vocab_size", None) or vocab_rows(target), vocab_rows(target))
    limit = getattr(drafter.config, "max_position_embeddings", None) or math.inf
    anchors = torch.arange(len(text.prompt_ids), len(ids) - 1, device=drafter.device)
    context = context_hidden_states.to(drafter.device, drafter.dtype)
    padded = torch.cat([ids, ids.new_full((max(block_sizes),), -1)])  # no token after the end is accepted
    counts: dict[int, list[int]] = {}
    for block_size in sorted({size for size in block_sizes if size > 1}):
        found: list[int] = []
        # Past its position limit a drafter is not asked.
        within = anchors[anchors + block_size <= limit]
        for part in within.split(_ANCHORS_AT_ONCE) if len(within) else ():
            noise = noise_embeds(drafter, target.get_input_embeddings(), ids[part], block_size)
            states = draft_states(drafter, context[: int(part[-1])], part, noise)[:, 1:]
            expected = padded[part[:, None] + torch.arange(1, block_size, device=part.device)]
            accepted = torch.zeros(len(part), dtype=torch.long, device=part.device)
            alive = torch.arange(len(part), device=part.device)
            # The head is most of the cost, and nothing counts after the first token that differs.
            for k in range(block_size - 1):
                # As in decoding, the head computes in the dtype of the target's states.
                logits = drafter.draft_logits(states[alive, k].to(context_hidden_states), head)[:, :shared]
                alive = alive[logits.argmax(-1).to(part.device) == expected[alive, k]]
                if len(alive) == 0:
                    break
                accepted[alive] += 1
            found += accepted.tolist()
        counts[block_size] = found + [0] * (len(anchors) - len(within))
    return Replay(text=text, num_accepted=counts)


def acceptance_by_group(replays: Sequence[Replay], block_size: int) -> dict[str, dict[str, float | int]]:
    """Acceptance length as the mean over prompts, and their number, by category and in `all`."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one in replays:
        for name in {one.text.category, "all"}:  # texts without a category are in `all` alone
            groups[name].append(one.acceptance_length(block_size))
    return {
        name: {"acceptance_length": sum(values) / len(values), "num_prompts": len(values)}
        for name, values in sorted(groups.items())
    }


__all__ = ["Replay", "acceptance_by_group", "replay"]

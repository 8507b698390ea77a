"""The loss of drafter training (arXiv 2602.06036, section 4.2, and what worked at small size).

The cross-entropy of the drafted positions, weighted exp(-(k - 1) / gamma) by position k, after random anchors in the
answers; a share of it is taken against the target's whole distribution instead of its one token, which says more per
text. Embedding and head are the target's, frozen, and the loss runs over the tokens that occur in the training answers,
since the others cost time and teach nothing. Knows nothing of steps and files.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .drafter_recipe import DrafterTrainingConfig
from .modeling_dflash import DFlashDraftModel
from .parallel_drafting import draft_states, noise_embeds
from .target_states import TargetStates, TargetStatesReader
from .texts import Text


class DrafterLoss:
    """
    Args:
        target (`PreTrainedModel`): Embedding and head are taken from it.
        drafter ([`DFlashDraftModel`]): In float32.
        config ([`DrafterTrainingConfig`]): The recipe.
        occurring (`torch.LongTensor` of shape `(num_occurring,)`): Tokens that the loss runs over, rising.
        read_states ([`TargetStatesReader`]): The target's states of a text.
    """

    def __init__(
        self,
        target: Any,
        drafter: DFlashDraftModel,
        config: DrafterTrainingConfig,
        occurring: torch.Tensor,
        read_states: TargetStatesReader,
    ):
        self.target, self.drafter, self.config, self.read_states = target, drafter, config, read_states
        head = target.get_output_embeddings()
        self.head = _rows_of_head(head, occurring)
        self._class_of = torch.full((head.weight.shape[0],), -1)
        self._class_of[occurring] = torch.arange(len(occurring))

    def __call__(self, text: Text, generator: torch.Generator) -> tuple[torch.Tensor, int]:
        """
        The weighted loss of random anchors of one text.

        Args:
            generator (`torch.Generator`): Draws the anchors, and the block size where there are several.

        Returns:
            `tuple(torch.Tensor, int)`: a scalar, and the number of drafted positions.
        """
        return self.of_states(text, self.read_states(text), generator)

    def of_states(
        self, text: Text, states: TargetStates, generator: torch.Generator, block_size: int | None = None
    ) -> tuple[torch.Tensor, int]:
        """As the call, with the target's states at hand, and at a given block size where one is wanted."""
        device = self.drafter.device
        ids = torch.tensor(text.ids, device=device)
        first, last = len(text.prompt_ids), len(ids) - 2  # an anchor needs a token after it
        choices = torch.randperm(last - first + 1, generator=generator)[: self.config.anchors_per_sequence]
        anchors = (choices + first).sort().values.to(device)
        block_size = block_size or self._draw_block_size(generator)
        offsets = torch.arange(1, block_size, device=device)
        positions = anchors[:, None] + offsets
        inside = positions < len(ids)
        labels = self._class_of.to(device)[ids[positions.clamp_max(len(ids) - 1)]]
        used = inside & (labels >= 0)
        weights = torch.exp(-(offsets - 1) / self.config.gamma_at(block_size)).expand_as(used)[used]
        noise = noise_embeds(self.drafter, self.target.get_input_embeddings(), ids[anchors], block_size)
        # The state that predicts a token is that of the token before it.
        before = states.last[(positions - 1)[used]].to(self.head.weight.dtype)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.mixed_precision == "bf16"):
            drafted = draft_states(self.drafter, states.context.to(self.drafter.dtype), anchors, noise)[:, 1:]
            logits = self.drafter.draft_logits(drafted[used], self.head).float()
            if self.config.distillation > 0:
                with torch.no_grad():
                    teacher = self.drafter.draft_logits(before, self.head).float().softmax(-1)
        loss = hard = F.cross_entropy(logits, labels[used], reduction="none")
        if self.config.distillation > 0:
            soft = F.cross_entropy(logits, teacher, reduction="none")
            loss = self.config.distillation * soft + (1 - self.config.distillation) * hard
        # No position is used where all that could be drafted is too rare to be learned.
        return (loss * weights).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny), int(used.sum())

    def _draw_block_size(self, generator: torch.Generator) -> int:
        sizes = self.config.block_sizes
        if sizes is None:
            return self.drafter.config.block_size
        return sizes[int(torch.randint(len(sizes), (1,), generator=generator))]


def _rows_of_head(head: nn.Module, rows: torch.Tensor) -> nn.Linear:
    """The frozen head restricted to some tokens."""
    part = nn.Linear(head.weight.shape[1], len(rows), bias=head.bias is not None, device="meta")
    part.weight = nn.Parameter(head.weight.detach()[rows.to(head.weight.device)].float().clone(), requires_grad=False)
    if head.bias is not None:
        part.bias = nn.Parameter(head.bias.detach()[rows.to(head.bias.device)].float().clone(), requires_grad=False)
    return part


__all__ = ["DrafterLoss"]

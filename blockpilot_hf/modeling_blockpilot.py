"""The policy: a small head that reads the target's prefill and picks the block size of a prompt.

The contract: `choose` is a function of the weights and of its arguments alone. It touches no state, so several threads
may share a policy, and it never sees a clock or the drafter: what the drafter reads comes as a tensor, and seconds come
from a frozen table. What is done with the chosen size is not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils import ModelOutput

from .configuration_blockpilot import BlockPilotConfig
from .exact_loading import ExactPreTrainedModel
from .features import policy_features


@dataclass
class PolicyOutput(ModelOutput):
    """
    Output of [`BlockPilotPolicy`].

    Args:
        scores (`torch.Tensor` of shape `(rows, num_block_sizes)`):
            Of each of `config.block_sizes`, in that order: an unnormalised score for head `"choice"`, the predicted
            acceptance length, from 1 to that size, for `"curve"`.
    """

    scores: torch.Tensor | None = None


@dataclass(frozen=True)
class PolicyChoice:
    """
    The decision for one prompt.

    Args:
        block_size (`int`): The chosen block size, one of the policy's candidates.
        scores (`dict[int, float]`):
            Score of every candidate, by block size in increasing order; for head `"curve"` the predicted tokens per
            second over those of plain decoding.
        reason (`str`): Why this size, in words for the trace.
        acceptance_lengths (`dict[int, float]`, *optional*):
            Predicted acceptance length of every candidate, for head `"curve"`.
    """

    block_size: int
    scores: dict[int, float]
    reason: str
    acceptance_lengths: dict[int, float] | None = None


def choose_by_seconds(
    acceptance_lengths: Mapping[int, float], costs: Any, context_length: int | None = None
) -> tuple[int, dict[int, float]]:
    """
    The size of the most tokens per second, and the smallest among equals.

    Args:
        acceptance_lengths (`Mapping[int, float]`): By block size, in increasing order.
        costs ([`CostTable`]): Of this code or of a copy; its `speedup` is all that is used.
        context_length (`int`, *optional*): Tokens before the block, the table's reference length without.

    Returns:
        `tuple(int, dict[int, float])`: that size, and the speedup over plain decoding by size.
    """
    speedups = {size: costs.speedup(size, tau, context_length) for size, tau in acceptance_lengths.items()}
    # `max` keeps the first of equals, and the sizes increase.
    return max(speedups, key=speedups.__getitem__), speedups


class BlockPilotPolicy(ExactPreTrainedModel):
    """
    Head `"choice"` of BlockPilot (https://huggingface.co/papers/2606.31315): two hidden layers with ReLU and dropout,
    the second one residual, and one score per candidate block size. Weights and initialisation follow the paper's
    code, layer names included, so that its state dict fits.

    Head `"curve"` has the same layers. It gives an acceptance length `1 + (b - 1) * sigmoid(output)` for every
    candidate `b` above 1, and 1 for plain decoding, which no weights are needed for.

    Args:
        config ([`BlockPilotConfig`]): The checked configuration.
    """

    config_class = BlockPilotConfig
    base_model_prefix = "policy"
    main_input_name = "features"
    _loading_hint = (
        "Save the policy again with `save_pretrained`, or correct `block_sizes`, `head`, `features`, `vocab_size`, "
        "`context_size` or `hidden_size` in its config.json."
    )
    _card_name = "BlockPilot policy"
    _card_text = (
        "Reads the target's prefill and picks the block size of a prompt for block-diffusion speculative decoding "
        "([BlockPilot](https://arxiv.org/abs/2606.31315))."
    )
    _card_tags = ("blockpilot", "speculative-decoding")

    def __init__(self, config: BlockPilotConfig):
        super().__init__(config)
        config.validate()
        self.layers = nn.ModuleList(
            [nn.Linear(config.num_features, config.hidden_size), nn.Linear(config.hidden_size, config.hidden_size)]
        )
        is_curve = config.head == "curve"
        self.fc_out = nn.Linear(config.hidden_size, len(config.block_sizes) - is_curve)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            if module is self.fc_out:
                init.xavier_uniform_(module.weight)
            else:
                init.kaiming_uniform_(module.weight, nonlinearity="relu")
            init.zeros_(module.bias)

    def forward(self, features: torch.Tensor) -> PolicyOutput:
        """
        Score the candidate block sizes. Dropout is active in training mode.

        Args:
            features (`torch.Tensor` of shape `(rows, config.num_features)`):
                From [`policy_features`], of any floating dtype, on any device.

        Returns:
            [`PolicyOutput`] with `scores` of shape `(rows, num_block_sizes)`: in the policy's dtype for head
            `"choice"`, in float32 or wider for `"curve"`.

        Raises:
            `ValueError`: If the width of `features` is not `config.num_features`.
        """
        return PolicyOutput(scores=self._score(features, is_training=self.training))

    def _score(self, features: torch.Tensor, *, is_training: bool) -> torch.Tensor:
        if features.ndim != 2 or features.shape[-1] != self.config.num_features:
            raise ValueError(
                f"`features` must have shape (rows, {self.config.num_features}), got {tuple(features.shape)}. "
                f"Compute them with `policy_features(logits, kind={self.config.features!r})`."
            )

        def dropout(hidden: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(hidden, self.config.dropout, training=is_training)

        first, second = self.layers
        hidden = features.to(self.device, self.dtype)
        hidden = dropout(first(hidden).relu())
        hidden = hidden + dropout(second(hidden).relu())
        outputs = self.fc_out(hidden)
        return self._curve(outputs) if self.config.head == "curve" else outputs

    def _curve(self, outputs: torch.Tensor) -> torch.Tensor:
        """Acceptance lengths `(rows, num_block_sizes)` from the last layer's outputs `(rows, num_block_sizes - 1)`."""
        # Half precision would tell acceptance lengths apart by one part in a hundred.
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        reach = torch.tensor([size - 1 for size in self.config.block_sizes[1:]], device=outputs.device)
        return torch.cat([torch.ones_like(outputs[:, :1]), 1 + reach * outputs.sigmoid()], dim=-1)

    @torch.no_grad()
    def choose(
        self,
        logits: torch.Tensor,
        *,
        context: torch.Tensor | None = None,
        costs: Any = None,
        context_length: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> PolicyChoice:
        """
        Pick the block size for one prompt: the largest score wins, or for head `"curve"` the most tokens per second
        that its acceptance lengths give under a cost table; and the smallest size among equals.

        Args:
            logits (`torch.Tensor` of shape `(vocab_size,)` or `(1, vocab_size)`):
                Raw target logits at the last prompt position, of any floating dtype, on any device.
            context (`torch.Tensor` of shape `(context_size,)` or `(1, context_size)`, *optional*):
                [`projected_context`] at that position, needed for `features="compact+context"`.
            costs ([`CostTable`], *optional*):
                Seconds of the passes, needed for head `"curve"`. A `"choice"` head does not look at them.
            context_length (`int`, *optional*):
                Tokens of the prompt, for tables that know several lengths; their reference length without.
            temperature (`float`, *optional*, defaults to 0.0):
                Sampling temperature of the call, 0 for greedy decoding.
            top_k (`int`, *optional*):
                Top-k of the call, 0 or `None` when not used.
            top_p (`float`, *optional*):
                Top-p of the call, 1 or `None` when not used.

        Returns:
            [`PolicyChoice`].

        Raises:
            `ValueError`: If there is not exactly one row, if `context` or `costs` are needed and missing, if the policy
                was made for another vocabulary or another size of context, or if a score is not finite.
        """
        name = self.name_or_path or type(self).__name__
        if logits.ndim == 1:
            logits = logits[None]
        if logits.ndim != 2 or len(logits) != 1:
            raise ValueError(
                f"`logits` must have shape (vocab_size,) or (1, vocab_size), got {tuple(logits.shape)}. "
                "Pass the last prompt position of one prompt, and call `choose` once per prompt."
            )
        if self.config.features == "logits" and logits.shape[-1] != self.config.vocab_size:
            raise ValueError(
                f"`logits` must have the {self.config.vocab_size} columns that policy {name!r} was made for, got "
                f'{logits.shape[-1]}. Use a policy made for this target, or one with `features="compact"`.'
            )
        if self.config.head == "curve" and costs is None:
            raise ValueError(
                f"`costs` must be given to policy {name!r}, which predicts acceptance lengths and leaves the choice to "
                'the seconds of a step (`head="curve"`), got None. Pass a cost table, such as '
                "`costs_for(target, drafter)`."
            )
        if self.config.features == "compact+context":
            context = self._one_context(context, name)
        features = policy_features(
            logits,
            kind=self.config.features,
            context=context,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        # Never with dropout, and without switching `training` on an object that other threads may be using.
        values = self._score(features, is_training=False)[0].float()
        if not values.isfinite().all():
            raise ValueError(
                f"The scores of policy {name!r} must be finite, got {values.tolist()}. "
                "Load it in float32 or bfloat16 if it runs in float16, else train or download it again."
            )
        scores = dict(zip(self.config.block_sizes, values.tolist(), strict=True))
        if self.config.head == "curve":
            block_size, speedups = choose_by_seconds(scores, costs, context_length)
            reason = (
                f"policy: {scores[block_size]:.2f} tokens per step expected, {speedups[block_size]:.2f} times plain "
                f"decoding, the most of {len(scores)} sizes"
            )
            return PolicyChoice(block_size, speedups, reason, scores)
        # `max` keeps the first of equals, and the sizes increase.
        block_size = max(scores, key=scores.__getitem__)
        return PolicyChoice(block_size, scores, f"policy: largest of {len(scores)} scores")

    def _one_context(self, context: torch.Tensor | None, name: str) -> torch.Tensor:
        """Projected context of one prompt, `(1, context_size)`."""
        if context is None:
            raise ValueError(
                f'`context` must be given to policy {name!r}, which has `features="compact+context"`, got None. Pass '
                "`projected_context(drafter, context_hidden_states)` of the last prompt position."
            )
        if context.ndim == 1:
            context = context[None]
        if context.shape != (1, self.config.context_size):
            raise ValueError(
                f"`context` must have shape (1, {self.config.context_size}), the `hidden_size` of the drafter that "
                f"policy {name!r} was made for, got {tuple(context.shape)}. Use a policy made for this drafter, or one "
                'with `features="compact"`.'
            )
        return context


__all__ = ["BlockPilotPolicy", "PolicyChoice", "PolicyOutput", "choose_by_seconds"]

"""The policy: a small head that reads the target's prefill and picks the block size of a prompt.

The contract: `choose` is a function of the weights and of its arguments alone. It touches no state, so several threads
may share a policy, and it never sees a clock or the drafter. What is done with the chosen size is not known here.
"""

from dataclasses import dataclass

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
            Unnormalised score of each of `config.block_sizes`, in that order.
    """

    scores: torch.Tensor | None = None


@dataclass(frozen=True)
class PolicyChoice:
    """
    The decision for one prompt.

    Args:
        block_size (`int`): The chosen block size, one of the policy's candidates.
        scores (`dict[int, float]`): Score of every candidate, by block size in increasing order.
        reason (`str`): Why this size, in words for the trace.
    """

    block_size: int
    scores: dict[int, float]
    reason: str


class BlockPilotPolicy(ExactPreTrainedModel):
    """
    Head `"choice"` of BlockPilot (https://huggingface.co/papers/2606.31315): two hidden layers with ReLU and dropout,
    the second one residual, and one score per candidate block size. Weights and initialisation follow the paper's
    code, layer names included, so that its state dict fits.

    Args:
        config ([`BlockPilotConfig`]): The checked configuration.
    """

    config_class = BlockPilotConfig
    base_model_prefix = "policy"
    main_input_name = "features"
    _loading_hint = (
        "Save the policy again with `save_pretrained`, or correct `block_sizes`, `features`, `vocab_size` or "
        "`hidden_size` in its config.json."
    )

    def __init__(self, config: BlockPilotConfig):
        super().__init__(config)
        config.validate()
        self.layers = nn.ModuleList(
            [nn.Linear(config.num_features, config.hidden_size), nn.Linear(config.hidden_size, config.hidden_size)]
        )
        self.fc_out = nn.Linear(config.hidden_size, len(config.block_sizes))
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
            [`PolicyOutput`] with `scores` of shape `(rows, num_block_sizes)` in the policy's dtype.

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
        return self.fc_out(hidden)

    @torch.no_grad()
    def choose(
        self,
        logits: torch.Tensor,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> PolicyChoice:
        """
        Pick the block size for one prompt: the largest score wins, and the smallest size among equals.

        Args:
            logits (`torch.Tensor` of shape `(vocab_size,)` or `(1, vocab_size)`):
                Raw target logits at the last prompt position, of any floating dtype, on any device.
            temperature (`float`, *optional*, defaults to 0.0):
                Sampling temperature of the call, 0 for greedy decoding.
            top_k (`int`, *optional*):
                Top-k of the call, 0 or `None` when not used.
            top_p (`float`, *optional*):
                Top-p of the call, 1 or `None` when not used.

        Returns:
            [`PolicyChoice`].

        Raises:
            `ValueError`: If there is not exactly one row, if a policy with `features="logits"` was made for another
                vocabulary, or if a score is not finite.
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
        features = policy_features(logits, kind=self.config.features, temperature=temperature, top_k=top_k, top_p=top_p)
        # Never with dropout, and without switching `training` on an object that other threads may be using.
        values = self._score(features, is_training=False)[0].float()
        if not values.isfinite().all():
            raise ValueError(
                f"The scores of policy {name!r} must be finite, got {values.tolist()}. "
                "Load it in float32 or bfloat16 if it runs in float16, else train or download it again."
            )
        scores = dict(zip(self.config.block_sizes, values.tolist(), strict=True))
        # `max` keeps the first of equals, and the sizes increase.
        block_size = max(scores, key=scores.__getitem__)
        return PolicyChoice(block_size, scores, f"policy: largest of {len(scores)} scores")


__all__ = ["BlockPilotPolicy", "PolicyChoice", "PolicyOutput"]

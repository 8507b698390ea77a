"""The settings of drafter training. Their defaults are the ones that the embedded target's drafter is trained with."""

import math
from dataclasses import dataclass

from .drafter_start import DEFAULT_BLOCK_SIZE


def default_gamma(block_size: int) -> float:
    """How slowly weights fall along a block: 4, 5 and 7 for sizes 8, 10 and 16 (arXiv 2602.06036), linear between."""
    return min(block_size / 2, 5 + (block_size - 10) / 3)


@dataclass(frozen=True, kw_only=True)
class DrafterTrainingConfig:
    """
    Args:
        steps (`int`, *optional*, defaults to 5500):
            Optimiser steps. A resumed run may be given another number: the learning rate then follows the new schedule
            from where the run stands.
        sequences_per_step (`int`, *optional*, defaults to 2): Texts per optimiser step.
        anchors_per_sequence (`int`, *optional*, defaults to 24): Random anchors in each text's answer per visit.
        learning_rate (`float`, *optional*, defaults to 0.001):
            Of AdamW, after the warm-up; a cosine takes it to `min_learning_rate`.
        min_learning_rate (`float`, *optional*, defaults to 1e-05): What it ends at.
        warmup_ratio (`float`, *optional*, defaults to 0.02): Share of the steps in which the rate rises from 0.
        weight_decay (`float`, *optional*, defaults to 0.01): Of AdamW, on all weights.
        max_grad_norm (`float`, *optional*, defaults to 1.0): Longer gradients are scaled down to this norm.
        gamma (`float`, *optional*, defaults to 4.0):
            Position k of a block weighs `exp(-(k - 1) / gamma)`; see [`default_gamma`] for other block sizes than 8.
        distillation (`float`, *optional*, defaults to 0.5):
            Share of the loss taken against the target's distribution, 0 to 1.
        seed (`int`, *optional*, defaults to 0): Of the order of the texts and of the anchors.

    Raises:
        `ValueError`: for a value out of range.
    """

    steps: int = 5500
    sequences_per_step: int = 2
    anchors_per_sequence: int = 24
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-5
    warmup_ratio: float = 0.02
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    gamma: float = default_gamma(DEFAULT_BLOCK_SIZE)
    distillation: float = 0.5
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "sequences_per_step", "anchors_per_sequence"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}.")
        for name in ("learning_rate", "gamma", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be above 0 and finite, got {getattr(self, name)!r}.")
        for name in ("distillation", "warmup_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be between 0 and 1, got {getattr(self, name)!r}.")
        for name in ("min_learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be at least 0 and finite, got {getattr(self, name)!r}.")

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine from `learning_rate` to `min_learning_rate`."""
        warmup = max(1, round(self.steps * self.warmup_ratio))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        span = self.learning_rate - self.min_learning_rate
        return self.min_learning_rate + 0.5 * span * (1 + math.cos(math.pi * progress))


__all__ = ["DrafterTrainingConfig", "default_gamma"]

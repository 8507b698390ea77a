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
        sequences_per_step (`int`, *optional*, defaults to 2): Texts per optimiser step, before `accumulation`.
        accumulation (`int`, *optional*, defaults to 1):
            How many times `sequences_per_step` texts make one optimiser step. Memory does not grow with either: texts
            are passed one by one.
        anchors_per_sequence (`int`, *optional*, defaults to 24): Random anchors in each text's answer per visit.
        learning_rate (`float`, *optional*, defaults to 0.001):
            Of AdamW, after the warm-up; a cosine takes it to `min_learning_rate`.
        min_learning_rate (`float`, *optional*, defaults to 1e-05): What it ends at.
        warmup_ratio (`float`, *optional*, defaults to 0.02): Share of the steps in which the rate rises from 0.
        weight_decay (`float`, *optional*, defaults to 0.01): Of AdamW, on all weights.
        max_grad_norm (`float`, *optional*, defaults to 1.0): Longer gradients are scaled down to this norm.
        gamma (`float`, *optional*, defaults to 4.0):
            Position k of a block weighs `exp(-(k - 1) / gamma)`; with `None` each block size has its
            [`default_gamma`].
        block_sizes (`tuple[int, ...]`, *optional*):
            One of them is drawn for every visit of a text, the drafter's own size among them; by default it is always
            the drafter's own.
        distillation (`float`, *optional*, defaults to 0.5):
            Share of the loss taken against the target's distribution, 0 to 1.
        mixed_precision (`str`, *optional*, defaults to `"no"`):
            `"bf16"` computes the drafter's passes in bfloat16 where that is safe; weights, moments and loss stay in
            float32.
        min_token_count (`int`, *optional*, defaults to 1):
            The loss runs over the tokens that occur at least so often in the training answers, and the drafter will
            propose no other. With large vocabularies 2 makes training and drafting quicker and costs next to nothing:
            what was seen once is seldom got right.
        seed (`int`, *optional*, defaults to 0): Of the order of the texts, of the anchors and of the drawn block sizes.

    Raises:
        `ValueError`: for a value out of range.
    """

    steps: int = 5500
    sequences_per_step: int = 2
    accumulation: int = 1
    anchors_per_sequence: int = 24
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-5
    warmup_ratio: float = 0.02
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    gamma: float | None = default_gamma(DEFAULT_BLOCK_SIZE)
    block_sizes: tuple[int, ...] | None = None
    distillation: float = 0.5
    mixed_precision: str = "no"
    min_token_count: int = 1
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "sequences_per_step", "accumulation", "anchors_per_sequence", "min_token_count"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}.")
        for name in ("learning_rate", "gamma", "max_grad_norm"):
            value = getattr(self, name)
            if not (value is None and name == "gamma") and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be above 0 and finite, got {getattr(self, name)!r}.")
        for name in ("distillation", "warmup_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be between 0 and 1, got {getattr(self, name)!r}.")
        for name in ("min_learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be at least 0 and finite, got {getattr(self, name)!r}.")
        sizes = self.block_sizes
        if sizes is not None and (list(sizes) != sorted(set(sizes)) or not sizes or sizes[0] < 2):
            raise ValueError(
                f"`block_sizes` must be rising block sizes of at least 2, such as (4, 8, 16), got {sizes!r}. Leave "
                "them out to train at the drafter's own size."
            )
        if self.mixed_precision == "fp16":
            raise ValueError(
                "`mixed_precision` cannot be 'fp16': its small gradients become 0 without loss scaling, which is not "
                "there. Use 'bf16', or 'no'."
            )
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"`mixed_precision` must be 'no' or 'bf16', got {self.mixed_precision!r}.")

    @property
    def texts_per_step(self) -> int:
        """Texts that one optimiser step learns from."""
        return self.sequences_per_step * self.accumulation

    def gamma_at(self, block_size: int) -> float:
        """How slowly weights fall along a block of that size."""
        return default_gamma(block_size) if self.gamma is None else self.gamma

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine from `learning_rate` to `min_learning_rate`."""
        warmup = max(1, round(self.steps * self.warmup_ratio))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        span = self.learning_rate - self.min_learning_rate
        return self.min_learning_rate + 0.5 * span * (1 + math.cos(math.pi * progress))


__all__ = ["DrafterTrainingConfig", "default_gamma"]

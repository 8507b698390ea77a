"""Plain `generate` and ours on one prompt, timed back to back: how fast each is, and whether they say the same."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from .generate import BlockPilot
from .parity import compare_prompt, first_difference
from .trace import DecodeTrace

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Measurement:
    """
    Medians over the rounds, and the comparison of the two texts.

    Args:
        trace (`DecodeTrace`): Of our median call.
        total_s, plain_total_s (`float`): Seconds of the median call, from ids to ids: prefill, policy and decoding.
        plain_num_new_tokens (`int`): Of plain `generate`.
        repeats (`int`): Rounds; in each both are timed once.
        first_difference (`int`, *optional*): Position of the first new token that differs; `None`: identical.
        gap (`float`, *optional*): Score gap of the two tokens there in plain decoding, where it can be measured.
        is_explained (`bool`): Identical, or rounding explains the difference, see [`compare_prompt`].
    """

    trace: DecodeTrace
    total_s: float
    plain_total_s: float
    plain_num_new_tokens: int
    repeats: int
    first_difference: int | None = None
    gap: float | None = None
    is_explained: bool = True

    @property
    def tokens_per_second(self) -> float:
        """Ours."""
        return self.trace.num_new_tokens / self.total_s

    @property
    def plain_tokens_per_second(self) -> float:
        """Of plain `generate`."""
        return self.plain_num_new_tokens / self.plain_total_s

    @property
    def speedup(self) -> float:
        """Our tokens per second over plain `generate`'s."""
        return self.tokens_per_second / self.plain_tokens_per_second


def measure(
    target: Any,
    pilot: BlockPilot,
    input_ids: torch.LongTensor,
    *,
    block_size: int | None = None,
    seed: int = 0,
    repeats: int = 1,
    **generate_kwargs: Any,
) -> Measurement:
    """
    Time both after a short warm-up, in turns: what goes first in one round goes second in the next.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): The prompt.
        block_size (`int`, *optional*): Fixes our block size.
        generate_kwargs: For both, `max_new_tokens` among them.
    """
    fixed: dict[str, Any] = {} if block_size is None else {"block_size": block_size}

    def timed(is_ours: bool, **more: Any) -> tuple[float, Any]:
        kwargs = {**generate_kwargs, "return_dict_in_generate": True, **more}
        torch.manual_seed(seed)
        start = time.perf_counter()
        if is_ours:
            output = pilot.generate(target, input_ids, **fixed, **kwargs)
        else:
            output = type(target).generate(target, input_ids, **kwargs)
        if target.device.type != "cpu":
            torch.accelerator.synchronize(target.device)
        return time.perf_counter() - start, output

    few = min(_WARM_UP_TOKENS, generate_kwargs["max_new_tokens"])
    for is_ours in (False, True):
        timed(is_ours, max_new_tokens=few)
    runs: dict[bool, list[tuple[float, Any]]] = {False: [], True: []}
    for number in range(repeats):
        for is_ours in (False, True) if number % 2 == 0 else (True, False):
            runs[is_ours].append(timed(is_ours))
    (plain_s, plain), (ours_s, ours) = (_median(runs[is_ours]) for is_ours in (False, True))
    length = input_ids.shape[1]
    difference = first_difference(plain.sequences[0, length:].tolist(), ours.sequences[0, length:].tolist())
    gap, is_explained = None, difference is None
    if difference is not None:
        again = compare_prompt(target, pilot, input_ids, [block_size], seed=seed, **generate_kwargs)[0]
        if again.first_difference == difference:  # else the target itself does not repeat
            gap, is_explained = again.gap, again.explained
    return Measurement(
        trace=ours.blockpilot,
        total_s=ours_s,
        plain_total_s=plain_s,
        plain_num_new_tokens=plain.sequences.shape[1] - length,
        repeats=repeats,
        first_difference=difference,
        gap=gap,
        is_explained=is_explained,
    )


def _median(runs: list[tuple[float, Any]]) -> tuple[float, Any]:
    """The middle one of the runs; of an even number the quicker of the two, so that it is a run that took place."""
    return sorted(runs, key=lambda run: run[0])[(len(runs) - 1) // 2]

"""Does a sweep tell the truth? The walked steps of a text against decoding its prompt at every block size, and what
either of them takes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .generate import BlockPilot
from .replay import check_replayable, walk
from .sweep import prefill_and_context
from .texts import Text


@dataclass(frozen=True)
class ReplayCheck:
    """
    One text, written by plain `generate`.

    Args:
        temperature (`float`): 0 for greedy.
        num_new_tokens (`int`): Of the text.
        decoded, replayed (`dict[int, list[int]]`): By block size the accepted counts of all steps, in order.
        other_texts (`list[int]`): Block sizes at which decoding gave another text than plain `generate`.
        plain_s, decode_s (`float`): Seconds of plain `generate`, and of decoding at all block sizes.
    """

    temperature: float
    num_new_tokens: int
    decoded: dict[int, list[int]]
    replayed: dict[int, list[int]]
    other_texts: list[int]
    plain_s: float
    decode_s: float

    @property
    def differing(self) -> list[int]:
        """Block sizes at which the text, the number of steps or an accepted count differs."""
        return [
            size for size, steps in self.decoded.items() if steps != self.replayed[size] or size in self.other_texts
        ]


def check_replay(
    target: Any,
    pilot: BlockPilot,
    input_ids: torch.LongTensor,
    block_sizes: Sequence[int],
    sampling: Sequence[dict[str, Any]],
    *,
    max_new_tokens: int,
    seed: int = 0,
) -> tuple[list[ReplayCheck], float]:
    """
    For each way of sampling: plain `generate` writes a text, and the same seed decodes it again at every block size.
    Then all these texts are walked together, the target's passes over them included.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): The prompt.
        block_sizes (`Sequence[int]`): Sizes to compare.
        sampling (`Sequence[dict]`): Keywords of `generate`, one set per text: `do_sample`, `temperature` and so on.
        max_new_tokens (`int`): New tokens at most.
        seed (`int`, *optional*): Of every call.

    Returns:
        `tuple(list[ReplayCheck], float)`: one per text, and the seconds that walking took.

    Raises:
        `ValueError`: for a drafter that cannot be replayed.
    """
    check_replayable(pilot.drafter)
    length, sizes = input_ids.shape[1], sorted(set(block_sizes))
    texts: list[Text] = []
    found: list[dict[str, Any]] = []
    for keywords in sampling:
        inputs = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "max_new_tokens": max_new_tokens,
            "return_dict_in_generate": True,
            **keywords,
        }
        torch.manual_seed(seed)
        plain, plain_s = _timed(lambda inputs=inputs: type(target).generate(target, **inputs))
        temperature = float(keywords.get("temperature") or 1.0) if keywords.get("do_sample") else 0.0
        ids = plain.sequences[0].tolist()
        texts.append(Text("", "", tuple(ids[:length]), tuple(ids[length:]), temperature=temperature))
        decoded, other_texts, decode_s = {}, [], 0.0
        for size in sizes:
            torch.manual_seed(seed)
            output, seconds = _timed(lambda inputs=inputs, size=size: pilot.generate(target, **inputs, block_size=size))
            decode_s += seconds
            decoded[size] = [step.num_accepted for step in output.blockpilot.steps]
            if not torch.equal(output.sequences, plain.sequences):
                other_texts.append(size)
        found.append({"decoded": decoded, "other_texts": other_texts, "plain_s": plain_s, "decode_s": decode_s})

    def walk_all() -> list[dict[int, tuple[int, ...]]]:
        contexts = (prefill_and_context(target, pilot.drafter, text)[1] for text in texts)
        return walk(target, pilot.drafter, texts, contexts, sizes)

    walked, replay_s = _timed(walk_all)
    checks = [
        ReplayCheck(
            temperature=text.temperature,
            num_new_tokens=len(text.answer_ids),
            replayed={size: list(counts) for size, counts in steps.items()},
            **fields,
        )
        for text, fields, steps in zip(texts, found, walked, strict=True)
    ]
    return checks, replay_s


def _timed(call: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return result, time.perf_counter() - start


__all__ = ["ReplayCheck", "check_replay"]

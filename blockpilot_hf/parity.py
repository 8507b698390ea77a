"""Is the output plain `generate`'s own? Compares prompt by prompt, and explains every difference or says it cannot.

A wider pass computes the same numbers in another order. In float32 that changes nothing that is emitted; in bfloat16 it
can turn a near-tie. A difference counts as explained only if that is measurably what happened.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .checks import num_decoder_layers
from .configuration_dflash import DFlashConfig, default_target_layer_ids
from .generate import BlockPilot
from .verification import DraftBlock


@dataclass(frozen=True)
class Comparison:
    """
    One prompt at one block size against plain `generate`.

    Args:
        block_size (`int`, *optional*): The size asked for; `None` let the policy choose.
        used_block_size (`int`): The size used.
        num_new_tokens (`int`): Of plain `generate`.
        acceptance_length (`float`): Tau of this run.
        first_difference (`int`, *optional*): New-token position of the first difference; `None`: identical.
        gap (`float`, *optional*): Score gap of the two tokens there, in the width-1 pass of plain decoding.
        change (`float`, *optional*): Largest change of a score there between width 1 and the width used.
        explained (`bool`): Identical, or: the two tokens are the top two of the width-1 pass and `gap <= change`.
        plain_s, ours_s (`float`): Seconds of the two calls.
    """

    block_size: int | None
    used_block_size: int
    num_new_tokens: int
    acceptance_length: float
    first_difference: int | None = None
    gap: float | None = None
    change: float | None = None
    explained: bool = True
    plain_s: float = 0.0
    ours_s: float = 0.0


def compare_prompt(
    target: Any,
    pilot: BlockPilot,
    input_ids: torch.LongTensor,
    block_sizes: Sequence[int | None],
    *,
    seed: int = 0,
    on_plain: Callable[[torch.LongTensor], None] | None = None,
    **generate_kwargs: Any,
) -> list[Comparison]:
    """
    Plain `generate` once, then ours at every block size, each from the same seed.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): The prompt.
        block_sizes: Sizes to compare; `None` for the policy's choice.
        on_plain (`Callable`, *optional*):
            Gets plain `generate`'s sequence before the others run; a scripted drafter needs it.
        generate_kwargs: For both, e.g. `max_new_tokens`, `do_sample`, `temperature`.
    """

    def run(call: Callable[..., Any], **more: Any) -> tuple[Any, float]:
        torch.manual_seed(seed)
        start = time.perf_counter()
        output = call(input_ids=input_ids, **generate_kwargs, return_dict_in_generate=True, **more)
        return output, time.perf_counter() - start

    def ours(**more: Any) -> Any:
        return pilot.generate(target, **more)

    plain, plain_s = run(type(target).generate.__get__(target))
    if on_plain is not None:
        on_plain(plain.sequences)
    length = input_ids.shape[1]
    num_new = plain.sequences.shape[1] - length
    comparisons = []
    for size in block_sizes:
        fixed = {} if size is None else {"block_size": size}
        output, ours_s = run(ours, **fixed)
        difference = first_difference(*(each.sequences[0, length:].tolist() for each in (plain, output)))
        gap = change = None
        explained = difference is None
        if difference is not None:
            # Both once more, now keeping scores; without them the loop takes its quick path, which is the one to test.
            plain_scores, _ = run(type(target).generate.__get__(target), output_scores=True)
            our_scores, _ = run(ours, output_scores=True, **fixed)
            noise = _sampling_noise(plain_scores, difference, seed) if generate_kwargs.get("do_sample") else None
            gap, change, explained = _explain(plain_scores, our_scores, length, difference, noise)
        comparisons.append(
            Comparison(
                block_size=size,
                used_block_size=output.blockpilot.block_size,
                num_new_tokens=num_new,
                acceptance_length=output.blockpilot.acceptance_length,
                first_difference=difference,
                gap=gap,
                change=change,
                explained=explained,
                plain_s=plain_s,
                ours_s=ours_s,
            )
        )
    return comparisons


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first token that differs, or where the shorter one ends; `None` if they are equal."""
    shared = min(len(a), len(b))
    unequal = (i for i in range(shared) if a[i] != b[i])
    return next(unequal, None if len(a) == len(b) else shared)


def _explain(
    plain: Any, ours: Any, length: int, position: int, noise: torch.Tensor | None
) -> tuple[float | None, float | None, bool]:
    """Gap of the two tokens and largest score change at the first difference, and whether they explain it."""
    repeated = first_difference(*(each.sequences[0, length:].tolist() for each in (plain, ours)))
    ends = [min(output.sequences.shape[1] - length, len(output.scores)) for output in (plain, ours)]
    if repeated != position or position >= min(ends):  # not the same again, or one of the two ended there
        return None, None, False
    pair = tuple(int(output.sequences[0, length + position]) for output in (plain, ours))
    narrow, wide = plain.scores[position][0], ours.scores[position][0]
    if noise is not None:
        # A draw is the argmax of log p - log e with exponential noise e, the same in both runs.
        narrow, wide = narrow.log_softmax(-1) - noise.log(), wide.log_softmax(-1) - noise.log()
    finite = narrow.isfinite() & wide.isfinite()
    change = float((narrow - wide)[finite].abs().max())
    gap = float(narrow[pair[0]] - narrow[pair[1]])
    # By value: in bfloat16 more than two tokens may share the top.
    are_top_two = bool(narrow[list(pair)].min() >= narrow.topk(2).values[1])
    return gap, change, are_top_two and gap <= change


def _sampling_noise(plain: Any, position: int, seed: int) -> torch.Tensor | None:
    """The exponential noise of the draw at `position`, by drawing again from the same seed up to there."""
    torch.manual_seed(seed)
    for scores in plain.scores[:position]:
        torch.multinomial(scores.softmax(dim=-1), num_samples=1)
    return torch.empty_like(plain.scores[position]).exponential_(1)[0]


class ScriptedDrafter:
    """
    A drafter that knows the answer and proposes each of its tokens with a given probability, else a wrong one. It makes
    acceptance of any length occur with any target, trained drafter or not.

    Args:
        target (`PreTrainedModel`): The target to draft for.
        accuracy (`float`, *optional*, defaults to 2/3): Share of proposed tokens that are right.
        block_size (`int`, *optional*, defaults to 16): What it counts as trained for.
    """

    def __init__(self, target: Any, accuracy: float = 2 / 3, block_size: int = 16, seed: int = 0):
        if not 0.0 <= accuracy <= 1.0:
            raise ValueError(f"`accuracy` of a scripted drafter must be between 0 and 1, got {accuracy}.")
        text = target.config.get_text_config(decoder=True)
        num_layers = num_decoder_layers(target)
        self.config = DFlashConfig(
            vocab_size=target.get_input_embeddings().num_embeddings,
            hidden_size=text.hidden_size,
            num_target_layers=num_layers,
            target_layer_ids=default_target_layer_ids(num_layers, 1) * min(2, num_layers),
            num_hidden_layers=1,
            mask_token_id=target.get_input_embeddings().num_embeddings - 1,
            block_size=block_size,
            max_position_embeddings=2**20,
        )
        self.accuracy = accuracy
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.script = torch.zeros(0, dtype=torch.long)
        self._seed = seed

    def follow(self, sequence: torch.LongTensor) -> None:
        """Take `(1, length)` ids, prompt and answer, as the right ones."""
        self.script = sequence[0].cpu()

    def draft_block(
        self, anchor_ids: torch.LongTensor, context: torch.Tensor, *, position: int, block_size: int
    ) -> DraftBlock:
        """`block_size - 1` tokens of the script after the anchor at `position`; right or wrong by the place alone."""
        token_ids = torch.zeros(1, block_size - 1, dtype=torch.long)
        known = self.script[position + 1 : position + block_size]
        token_ids[0, : len(known)] = known
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * position + block_size)
        is_wrong = torch.rand(block_size - 1, generator=generator) >= self.accuracy
        token_ids[0, is_wrong] = (token_ids[0, is_wrong] + 1) % self.config.vocab_size
        return DraftBlock(token_ids, None, torch.full((1, block_size - 1), self.accuracy))

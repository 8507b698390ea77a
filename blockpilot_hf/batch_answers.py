"""Answers to many prompts at once, by `generate` alone: what a target writes at a temperature, and nothing else."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria


@torch.no_grad()
def answer_batch(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    pad_token_id: int | None = None,
) -> list[tuple[list[int], bool]]:
    """
    Answers to prompts of any lengths in one batch, padded on the left. The global random state is left as it was.

    The law is the target's own at the temperature: of its generation config only the end tokens hold.

    Args:
        prompts (`Sequence[Sequence[int]]`): Token ids.
        temperature (`float`): 0 for greedy.
        pad_token_id (`int`, *optional*): What fills the rows up; never seen by the target.

    Returns:
        `list[tuple[list[int], bool]]`: ids up to and with the first end token, and whether there was one.
    """
    device, longest = target.device, max(map(len, prompts))
    end_ids = end_token_ids(target)
    pad = next((i for i in (pad_token_id, *sorted(end_ids)) if i is not None), 0)
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    config = GenerationConfig(
        do_sample=temperature > 0,
        eos_token_id=sorted(end_ids) or None,
        pad_token_id=pad,
        return_dict_in_generate=True,
        **sampling,
    )
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = list(range(len(prompts)))
    cache = None
    with _in_place_of_its_own(target, config), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        while open_rows:
            start = ids.shape[1]
            config.max_new_tokens = max_new_tokens - (start - longest)
            output = target.generate(
                ids,
                attention_mask=mask,
                cache=cache,
                generation_config=config,
                stopping_criteria=[_ManyEnded(end_ids, start)],
            )
            for row, new_ids in zip(open_rows, output.sequences[:, start:].tolist(), strict=True):
                answers[row] += _cut(new_ids, end_ids)
            is_open = [not end_ids & set(answers[row][-1:]) for row in open_rows]
            if output.sequences.shape[1] == longest + max_new_tokens or not any(is_open):
                break
            # The others alone from here on.
            kept = torch.tensor([i for i, is_one in enumerate(is_open) if is_one], device=device)
            open_rows = [open_rows[i] for i in kept.tolist()]
            ids = output.sequences[kept]
            mask = torch.cat([mask[kept], mask.new_ones(len(kept), ids.shape[1] - start)], dim=-1)
            cache = output.cache
            cache.batch_select_indices(kept)
    return [(ids, bool(end_ids & set(ids[-1:]))) for ids in answers]


class _ManyEnded(StoppingCriteria):
    """Ends the call once an eighth of the rows have ended: they would be computed to the end of the longest one."""

    def __init__(self, end_ids: set[int], start: int):
        self.end_ids, self.start = sorted(end_ids), start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new_ids = input_ids[:, self.start :]
        has_ended = torch.isin(new_ids, torch.tensor(self.end_ids, device=new_ids.device)).any(dim=-1)
        return (has_ended.sum() * 8 >= len(has_ended)).expand(len(has_ended)) & bool(self.end_ids)


def end_token_ids(target: Any) -> set[int]:
    """All that end an answer: those of the generation config, or of the config if that names none."""
    for config in (target.generation_config, target.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return set(ids) if isinstance(ids, list | tuple) else {int(ids)}
    return set()


def set_generation_values(target: Any) -> dict[str, Any]:
    """What the target's generation config sets of the distribution, and [`answer_batch`] leaves aside."""
    own, plain = target.generation_config.to_dict(), GenerationConfig().to_dict()
    names = ["temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "suppress_tokens"]
    names += ["repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "begin_suppress_tokens", "min_new_tokens"]
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
    found = {name: own.get(name) for name in names if own.get(name) != plain.get(name)}
    return {name: value for name, value in found.items() if value and value != neutral.get(name)}


def _cut(ids: list[int], end_ids: set[int]) -> list[int]:
    """Up to and with the first end token."""
    return ids[: next((i + 1 for i, token_id in enumerate(ids) if token_id in end_ids), len(ids))]


@contextlib.contextmanager
def _in_place_of_its_own(target: Any, config: GenerationConfig) -> Iterator[None]:
    """`generate` fills what a config leaves open from the target's own, penalties and thresholds too."""
    own, target.generation_config = target.generation_config, config
    try:
        yield
    finally:
        target.generation_config = own


__all__ = ["answer_batch", "end_token_ids", "set_generation_values"]

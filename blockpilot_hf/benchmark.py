"""A benchmark's rounds: every method once on one prompt, in an order that turns from round to round.

A round is one prompt at one temperature. Its lines are added to a file as it ends, and what the files hold is not run
again. Over several processes the rounds are dealt out; seeds and orders are those of the round, so what is measured is
the same but for the times.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .benchmark_methods import PLAIN, Answer, Method, timed_answer
from .json_lines import append_line, read_lines
from .parity import first_difference
from .prompts import Prompt, encode_prompt

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Round:
    """
    Args:
        place (`int`): Among all rounds, which turns the order of the methods.
        set_name (`str`): Of the prompts.
        prompt ([`Prompt`]): All of its turns belong to the round.
        temperature (`float`): 0 is greedy.
        repeat (`int`): How often it was done before.
    """

    place: int
    set_name: str
    prompt: Prompt
    temperature: float
    repeat: int

    @property
    def key(self) -> tuple[str, str, float, int]:
        """What tells it from others."""
        return self.set_name, self.prompt.id, self.temperature, self.repeat


def make_rounds(sets: Mapping[str, Sequence[Prompt]], temperatures: Sequence[float], repeats: int) -> list[Round]:
    """
    All rounds in their order: all prompts once, then again, so that a run that is stopped has seen every kind.

    Args:
        sets (`Mapping[str, Sequence[Prompt]]`): By name.
    """
    rounds: list[Round] = []
    for repeat in range(repeats):
        for name, prompts in sets.items():
            for prompt in prompts:
                for temperature in temperatures:
                    rounds.append(Round(len(rounds), name, prompt, temperature, repeat))
    return rounds


def read_rounds(folder: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """
    The lines of all processes of earlier calls.

    Args:
        folder (`Path`): With one file of JSON lines per process.
        run (`dict`): Settings of this call.

    Raises:
        `ValueError`: if they are of other settings.
    """
    return [line for path in sorted(folder.glob("*.jsonl")) for line in read_lines(path, run)]


def round_of(line: Mapping[str, Any]) -> tuple[str, str, float, int]:
    """The [`Round.key`] of a line."""
    return line["set"], line["prompt"], line["temperature"], line["repeat"]


def run_rounds(
    target: Any,
    tokenizer: Any,
    methods: Mapping[str, Method],
    rounds: Iterable[Round],
    path: Path,
    *,
    run: dict[str, Any],
    settings: Callable[[float], dict[str, Any]],
    max_new_tokens: int,
    seed: int = 0,
) -> None:
    """
    Run rounds after a short warm-up of every method, and add their lines to a file.

    Args:
        methods (`Mapping[str, Method]`): By name; those that cannot run are passed over.
        path (`Path`): Of this process.
        run (`dict`): Settings that go with every line.
        settings (`Callable`): From a temperature to keywords of `generate`.
    """
    can_run = {name: method for name, method in methods.items() if not method.reason}
    warmed: set[tuple[str, bool]] = set()
    for one in rounds:
        names = [name for name, method in can_run.items() if one.temperature > 0 or not method.for_sampling]
        turn = one.place % len(names)
        order = [*names[turn:], *names[:turn]]
        kwargs = settings(one.temperature)
        history: list[tuple[str, str]] = []
        lines = []
        for number, text in enumerate(one.prompt.turns, start=1):
            ids = encode_prompt(tokenizer, text, history=history).to(target.device)
            for name in order:
                if (name, one.temperature > 0) not in warmed:
                    few = min(WARM_UP_TOKENS, max_new_tokens)
                    timed_answer(can_run[name], target, ids, seed=seed, max_new_tokens=few, **kwargs)
                    warmed.add((name, one.temperature > 0))
            answers = {
                name: timed_answer(can_run[name], target, ids, seed=seed, max_new_tokens=max_new_tokens, **kwargs)
                for name in order
            }
            plain = answers[PLAIN].new_ids
            history.append((text, tokenizer.decode(plain, skip_special_tokens=True)))
            calls = {name: _call_facts(target, ids, answers[name], plain, one.temperature) for name in names}
            lines.append(
                {
                    "run": run,
                    "set": one.set_name,
                    "prompt": one.prompt.id,
                    "category": one.prompt.category,
                    "turn": number,
                    "temperature": one.temperature,
                    "repeat": one.repeat,
                    "place": one.place,
                    "prompt_hash": _hash(ids[0].tolist()),
                    "num_prompt_tokens": ids.shape[1],
                    "order": order,
                    "calls": calls,
                }
            )
        # All turns or none: one that goes on from a first answer cannot be taken up without it.
        for line in lines:
            append_line(path, line)


def _call_facts(
    target: Any, ids: torch.LongTensor, answer: Answer, plain: tuple[int, ...], temperature: float
) -> dict[str, Any]:
    difference = first_difference(plain, answer.new_ids)
    facts: dict[str, Any] = {
        **answer.facts(),
        "block_size": answer.block_size,
        "text_hash": _hash(answer.new_ids),
        "first_difference": difference,
        "gap": None,
        "is_near_tie": None,
    }
    if answer.steps is not None:
        facts["steps"] = answer.steps
    # Of sampled texts that differ there is no more to say: peers draw other random numbers.
    if difference is not None and temperature == 0:
        facts["gap"], facts["is_near_tie"] = near_tie(target, ids, plain, answer.new_ids, difference)
    return facts


@torch.inference_mode()
def near_tie(
    target: Any, input_ids: torch.LongTensor, plain: Sequence[int], other: Sequence[int], position: int
) -> tuple[float | None, bool | None]:
    """
    How near the two tokens at the first difference of greedy texts are, and whether rounding can turn them: whether
    their scores are apart by no more than a pass over more positions changes a score there.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): The prompt.
        plain, other (`Sequence[int]`): The two answers.
        position (`int`): Of the difference.

    Returns:
        `tuple(float | None, bool | None)`: the gap, and the verdict; `None` where one of the texts ends.
    """
    if position >= min(len(plain), len(other)) or input_ids.shape[1] + position < 2:
        return None, None
    device = input_ids.device
    before = torch.cat([input_ids[0], torch.tensor(plain[:position], dtype=torch.long, device=device)])[None]
    after = torch.tensor(other[position : position + 7], dtype=torch.long, device=device)[None]

    def scores(last: torch.Tensor) -> torch.Tensor:
        """Of the first of the positions in the last pass."""
        cache = target(before[:, :-1], use_cache=True, logits_to_keep=1).cache
        return target(last, cache=cache, use_cache=True).logits[0, 0].float()

    narrow, wide = scores(before[:, -1:]), scores(torch.cat([before[:, -1:], after], dim=-1))
    gap = float(narrow[plain[position]] - narrow[other[position]])
    return gap, bool(abs(gap) <= float((narrow - wide).abs().max()))


def _hash(ids: Iterable[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


__all__ = [
    "WARM_UP_TOKENS",
    "Round",
    "make_rounds",
    "near_tie",
    "read_rounds",
    "round_of",
    "run_rounds",
]

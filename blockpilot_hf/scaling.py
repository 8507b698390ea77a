"""What calls cost by the length of prompt and answer: seconds, peak memory, and bytes of both caches at the end.

A cell is a prompt length and an answer length, with every method once per repeat, in turns. All answers have exactly
the length asked for. A repeat is another text, because how much is accepted depends on it; what is asked for at the end
of a text is the same at all lengths.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .benchmark_methods import Method, timed_answer
from .benchmark_prompts import load_prompt_set
from .benchmark_sets import EMBEDDED
from .candidate_generator import position_limits
from .json_lines import append_line
from .peak_memory import peak_memory
from .prompts import encode_prompt

PROMPT_LENGTHS = (64, 256, 1024, 4096)
ANSWER_LENGTHS = (32, 128, 512, 1024)
# An answer's first token comes from the prefill, so shorter ones have no time per token.
SHORTEST_ANSWER = 2
# The first token may be one that a text has to begin with, the second is of the text.
SHORTEST_PROMPT = 2
_WARM_UP_TOKENS = 8
# Letters of a prompt that 64 tokens hold whole, about.
_SHORT = 200


@dataclass(frozen=True)
class Cell:
    """
    Args:
        prompt_length, answer_length (`int`): In tokens.
        repeat (`int`): How often these lengths were done before, with other texts.
    """

    prompt_length: int
    answer_length: int
    repeat: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells it from others."""
        return self.prompt_length, self.answer_length, self.repeat


@dataclass
class Watched:
    """
    The caches that the passes of a call went through, and the process's seconds of processor when the prefill was done.
    """

    target: Any = None
    drafter: Any = None
    prefilled_cpu_s: float | None = None


@dataclass
class Lengths:
    """
    What is measured: prompt lengths with the shortest answer, answer lengths with the shortest prompt.

    Args:
        prompt_lengths, answer_lengths (`list[int]`): Rising.
        left_out (`list[str]`): What does not fit before the last position, in words.
    """

    prompt_lengths: list[int]
    answer_lengths: list[int]
    left_out: list[str] = field(default_factory=list)

    def cells(self, repeats: int) -> list[Cell]:
        """All lengths once, then again, so that a run that is stopped has seen every one."""
        pairs = [(length, self.answer_lengths[0]) for length in self.prompt_lengths]
        pairs += [(self.prompt_lengths[0], length) for length in self.answer_lengths]
        return [Cell(*pair, repeat) for repeat in range(repeats) for pair in dict.fromkeys(pairs)]


def fitting_lengths(target: Any, drafter: Any, prompt_lengths: Sequence[int], answer_lengths: Sequence[int]) -> Lengths:
    """
    Lengths that a pair has positions for.

    Raises:
        `ValueError`: if none of one kind is left, or one is too short to be measured.
    """
    if min(prompt_lengths, default=0) < SHORTEST_PROMPT:
        raise ValueError(
            f"`--prompt-lengths` takes whole numbers from {SHORTEST_PROMPT}, got {list(prompt_lengths)}. Name others."
        )
    if min(answer_lengths, default=0) < SHORTEST_ANSWER:
        raise ValueError(
            f"`--answer-lengths` takes whole numbers from {SHORTEST_ANSWER}, got {list(answer_lengths)}: the first "
            "token comes from the prefill. Name others."
        )
    ends = [("target", limit) for limit, is_hard in position_limits(target) if is_hard]
    if own := getattr(drafter.config, "max_position_embeddings", None):
        ends.append(("drafter", own))
    who, most = min(ends, key=lambda end: end[1], default=("", 0))
    prompts, answers = sorted({*prompt_lengths}), sorted({*answer_lengths})
    if not most:
        return Lengths(prompts, answers)
    kept = Lengths(
        [length for length in prompts if length + answers[0] <= most],
        [length for length in answers if prompts[0] + length <= most],
    )
    kept.left_out = [
        f"{kind} of {length:,} tokens: with {other} of {beside:,} past the {most:,} positions of the {who}"
        for kind, lengths, have, other, beside in (
            ("prompts", prompts, kept.prompt_lengths, "answers", answers[0]),
            ("answers", answers, kept.answer_lengths, "prompts", prompts[0]),
        )
        for length in lengths
        if length not in have
    ]
    if not kept.prompt_lengths or not kept.answer_lengths:
        raise ValueError(
            f"Prompts of {prompts[0]:,} and answers of {answers[0]:,} tokens do not fit into the {most:,} positions of "
            f"the {who}. Name shorter ones with `--prompt-lengths` and `--answer-lengths`."
        )
    return kept


def prompt_of_length(tokenizer: Any, length: int, repeat: int = 0) -> torch.LongTensor:
    """
    A short prompt of the package's own, after the others as a system message, which is cut at its beginning: the same
    is asked for at all lengths, as far as it fits. A text's first token stays the first.

    Args:
        length (`int`): Tokens wanted.
        repeat (`int`, *optional*, defaults to 0): Another prompt for each.

    Returns:
        `torch.LongTensor` of shape `(1, length)`
    """
    texts = ["\n\n".join(prompt.turns) for prompt in load_prompt_set(EMBEDDED)]
    short = [text for text in texts if len(text) <= _SHORT]
    asked = short[repeat % len(short)]
    others = [text for text in texts if text != asked]
    while True:
        ids = encode_prompt(tokenizer, asked, system="\n\n".join(others))
        if ids.shape[1] >= length:
            return torch.cat([ids[:, :1], ids[:, ids.shape[1] - length + 1 :]], dim=-1)
        others += others


@contextmanager
def watched_caches(target: Any, drafter: Any) -> Iterator[Watched]:
    """Note the caches of a call's passes. A drafter that is no model has none."""
    seen = Watched()

    def note(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            setattr(seen, name, getattr(output, "cache", None))
            if seen.prefilled_cpu_s is None:
                seen.prefilled_cpu_s = time.process_time()

        return hook

    models = {"target": target, "drafter": drafter}
    handles = [
        model.register_forward_hook(note(name), with_kwargs=True)
        for name, model in models.items()
        if isinstance(model, torch.nn.Module)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a cache holds; 0 without one."""
    tensors = (getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def run_cells(
    target: Any,
    drafter: Any,
    tokenizer: Any,
    methods: Mapping[str, Method],
    cells: Iterable[tuple[int, Cell]],
    path: Path,
    *,
    run: dict[str, Any],
    seed: int = 0,
) -> None:
    """
    Measure cells after a short warm-up of every method, and add a line to a file as each ends.

    Args:
        methods (`Mapping[str, Method]`): By name.
        cells (`Iterable[tuple[int, Cell]]`): With their places among all, which turn the order of the methods.
        path (`Path`): Of the lines.
        run (`dict`): Settings that go with every line.
    """
    is_warm = False
    for place, cell in cells:
        ids = prompt_of_length(tokenizer, cell.prompt_length, cell.repeat).to(target.device)
        turn = place % len(methods)
        order = [*list(methods)[turn:], *list(methods)[:turn]]
        if not is_warm:
            few = prompt_of_length(tokenizer, min(cell.prompt_length, PROMPT_LENGTHS[0])).to(target.device)
            for name in order:
                _measured(methods[name], target, drafter, few, _WARM_UP_TOKENS, seed)
            is_warm = True
        calls = {name: _measured(methods[name], target, drafter, ids, cell.answer_length, seed) for name in order}
        append_line(
            path,
            {
                "run": run,
                "prompt_length": cell.prompt_length,
                "answer_length": cell.answer_length,
                "repeat": cell.repeat,
                "order": order,
                "calls": {name: calls[name] for name in methods},
            },
        )


def cell_of(line: Mapping[str, Any]) -> Cell:
    """That a line is of."""
    return Cell(line["prompt_length"], line["answer_length"], line["repeat"])


def _measured(
    method: Method, target: Any, drafter: Any, ids: torch.LongTensor, answer_length: int, seed: int
) -> dict[str, Any]:
    """One call, with exactly as many new tokens."""
    with watched_caches(target, drafter) as seen, peak_memory(target.device) as peak:
        started_cpu_s = time.process_time()
        answer = timed_answer(
            method,
            target,
            ids,
            seed=seed,
            max_new_tokens=answer_length,
            min_new_tokens=answer_length,
            do_sample=False,
        )
        ended_cpu_s = time.process_time()
    assert seen.prefilled_cpu_s is not None, "there is no call without a prefill"
    return {
        **answer.facts(),
        # Of the processor, all threads together: on a CPU they hold where others have the machine too.
        "cpu_s": ended_cpu_s - started_cpu_s,
        "decode_cpu_s": ended_cpu_s - seen.prefilled_cpu_s,
        "time_per_token_s": answer.decode_s / (answer_length - 1),
        "peak_memory_bytes": peak.num_bytes,
        "target_cache_bytes": cache_bytes(seen.target),
        "drafter_cache_bytes": cache_bytes(seen.drafter),
    }


__all__ = [
    "ANSWER_LENGTHS",
    "PROMPT_LENGTHS",
    "Cell",
    "Lengths",
    "Watched",
    "cache_bytes",
    "cell_of",
    "fitting_lengths",
    "prompt_of_length",
    "run_cells",
    "watched_caches",
]

"""Prompts to the target's own answers: batches cut before they are dealt out, each with a seed of its own.

A batch is a unit of [`run_units`]: what it gives depends on it and the target alone.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .batch_answers import answer_batch
from .prompts import Prompt, encode_prompt

COLUMNS = {
    "id": "string",
    "prompt_id": "string",
    "turn": "int32",
    "prompt": "string",
    "prompt_ids": "int32[]",
    "answer": "string",
    "answer_ids": "int32[]",
    "finish": "string",
    "category": "string",
    "source": "string",
    "temperature": "float64",
    "seed": "int64",
    "target": "string",
    "target_revision": "string",
    "target_fingerprint": "string",
}


@dataclass(frozen=True)
class TextsRecipe:
    """
    How answers are made.

    Args:
        temperatures (`tuple[float, ...]`): 0 for greedy answers. Above 0 the whole distribution is sampled from.
        samples (`int`): Answers to a prompt per temperature above 0.
        max_new_tokens (`int`): Tokens of an answer at most.
        batch_size (`int`): Prompts that are answered together.
        seed (`int`): Every batch gets its own from it.
        num_turns (`int`): Turns of a prompt that are answered at most.
        system (`str`, *optional*): System message.
        template_options (`dict`, *optional*): What else the chat template takes.

    Raises:
        `ValueError`: for values that are none.
    """

    temperatures: tuple[float, ...] = (0.0,)
    samples: int = 1
    max_new_tokens: int = 256
    batch_size: int = 32
    seed: int = 0
    num_turns: int = 2
    system: str | None = None
    template_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "batch_size", "num_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {getattr(self, name)}.")
        bad = [t for t in self.temperatures if not 0.0 <= t < float("inf")]
        if bad or not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(
                f"`temperatures` must be different numbers >= 0, at least one, got {list(self.temperatures)}. "
                "0 is greedy."
            )
        if self.samples > 1 and not any(self.temperatures):
            raise ValueError(
                f"`samples` is {self.samples}, and every answer is greedy, so all would be the same. Add a temperature "
                "above 0."
            )

    @property
    def passes(self) -> list[tuple[float, int]]:
        """Temperature and sample of every pass over the prompts."""
        return [(t, sample) for t in self.temperatures for sample in range(self.samples if t else 1)]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with the ids of its first turn."""

    prompt: Prompt
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TextsUnit:
    """Prompts that are answered together."""

    prompts: tuple[EncodedPrompt, ...]
    temperature: float
    sample: int
    seed: int


@dataclass(frozen=True)
class EncodedPrompts:
    """
    Args:
        prompts (`list[EncodedPrompt]`): By length, then id.
        too_long (`list[str]`): Ids of prompts that leave no room for an answer.
        repeated (`list[str]`): Ids of prompts with the tokens of an earlier one.
    """

    prompts: list[EncodedPrompt]
    too_long: list[str]
    repeated: list[str]


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_prompt_tokens: int | None,
    system: str | None = None,
    template_options: dict[str, Any] | None = None,
) -> EncodedPrompts:
    """
    Prompts that can be answered, in the order in which they are.

    Args:
        max_prompt_tokens (`int`, *optional*): Longer prompts are left out.
        system, template_options (*optional*): See [`TextsRecipe`].

    Raises:
        `ValueError`: if none is left.
    """
    kept: dict[tuple[int, ...], EncodedPrompt] = {}
    too_long, repeated = [], []
    for prompt in prompts:
        ids = tuple(encode_prompt(tokenizer, prompt.turns[0], system, template_options=template_options)[0].tolist())
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            too_long.append(prompt.id)
        elif ids in kept and kept[ids].prompt.turns == prompt.turns:
            repeated.append(prompt.id)
        else:
            # Prompts of one first and different later turns are kept apart.
            kept[ids if ids not in kept else (*ids, -1, len(kept))] = EncodedPrompt(prompt, ids)
    if not kept:
        raise ValueError(
            f"No prompt leaves room for an answer: all {len(too_long)} have more than {max_prompt_tokens} tokens. "
            "Allow fewer new tokens, or shorten the prompts."
        )
    ordered = sorted(kept.values(), key=lambda encoded: (len(encoded.ids), encoded.prompt.id))
    return EncodedPrompts(ordered, too_long, repeated)


def cut_units(prompts: Sequence[EncodedPrompt], recipe: TextsRecipe) -> list[TextsUnit]:
    """
    Batches of prompts of like length, once per temperature and sample.

    Raises:
        `ValueError`: if two texts would have the same id.
    """
    batches = [prompts[i : i + recipe.batch_size] for i in range(0, len(prompts), recipe.batch_size)]
    cut = [(batch, temperature, sample) for temperature, sample in recipe.passes for batch in batches]
    units = [TextsUnit(tuple(batch), t, sample, _unit_seed(recipe.seed, i)) for i, (batch, t, sample) in enumerate(cut)]
    seen: set[str] = set()
    for unit in units:
        for encoded in unit.prompts:
            for turn in range(min(recipe.num_turns, len(encoded.prompt.turns))):
                name = text_id(encoded.prompt.id, turn, unit.temperature, unit.sample)
                if name in seen:
                    raise ValueError(f"Two texts would have the id {name!r}. Rename the prompt {encoded.prompt.id!r}.")
                seen.add(name)
    return units


def text_id(prompt_id: str, turn: int, temperature: float, sample: int) -> str:
    """The prompt's own id for the first turn's greedy answer."""
    name = f"{prompt_id}-turn-{turn + 1}" if turn else prompt_id
    return f"{name}-t{temperature:g}-s{sample + 1}" if temperature else name


def prompts_fingerprint(prompts: Sequence[EncodedPrompt]) -> str:
    """16 hex digits over all that rows take from the prompts."""
    digest = hashlib.sha256()
    for encoded in prompts:
        prompt = encoded.prompt
        digest.update(json.dumps([prompt.id, prompt.category, prompt.source, prompt.turns, encoded.ids]).encode())
    return digest.hexdigest()[:16]


class TargetAnswers:
    """
    Rows of a unit: `answers(unit)`.

    Args:
        target (`PreTrainedModel`): Answers, on its own device.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        recipe ([`TextsRecipe`]): How.
        facts (`dict`): The same in every row: `target`, `target_revision`, `target_fingerprint`.
    """

    def __init__(self, target: Any, tokenizer: Any, recipe: TextsRecipe, facts: dict[str, Any]):
        self.target, self.tokenizer, self.recipe, self.facts = target, tokenizer, recipe, facts
        self.max_prompt_tokens = max_prompt_tokens(target, recipe.max_new_tokens)

    def __call__(self, unit: TextsUnit) -> list[dict[str, Any]]:
        """Rows, by turn and in the order of the unit's prompts, as [`COLUMNS`]."""
        rows = []
        histories: list[list[tuple[str, str]]] = [[] for _ in unit.prompts]
        asked = [(i, list(encoded.ids)) for i, encoded in enumerate(unit.prompts)]
        for turn in range(self.recipe.num_turns):
            if turn:
                asked = list(self._next_turns(unit, histories, turn))
            if not asked:
                break
            answers = answer_batch(
                self.target,
                [ids for _, ids in asked],
                max_new_tokens=self.recipe.max_new_tokens,
                temperature=unit.temperature,
                seed=unit.seed + turn,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            for (i, ids), (answer_ids, is_finished) in zip(asked, answers, strict=True):
                prompt = unit.prompts[i].prompt
                answer = self.tokenizer.decode(answer_ids, skip_special_tokens=True)
                histories[i].append((prompt.turns[turn], answer))
                rows.append(
                    {
                        "id": text_id(prompt.id, turn, unit.temperature, unit.sample),
                        "prompt_id": prompt.id,
                        "turn": turn,
                        "prompt": prompt.turns[turn],
                        "prompt_ids": ids,
                        "answer": answer,
                        "answer_ids": answer_ids,
                        "finish": "stop" if is_finished else "length",
                        "category": prompt.category,
                        "source": prompt.source,
                        "temperature": unit.temperature,
                        "seed": unit.seed + turn,
                        **self.facts,
                    }
                )
        return rows

    def _next_turns(
        self, unit: TextsUnit, histories: list[list[tuple[str, str]]], turn: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Of the prompts that have one and whose turn before was answered."""
        for i, encoded in enumerate(unit.prompts):
            turns = encoded.prompt.turns
            if turn < len(turns) and len(histories[i]) == turn:
                ids = encode_prompt(
                    self.tokenizer, turns[turn], self.recipe.system, histories[i], self.recipe.template_options
                )[0].tolist()
                if self.max_prompt_tokens is None or len(ids) <= self.max_prompt_tokens:
                    yield i, ids


def max_prompt_tokens(target: Any, max_new_tokens: int) -> int | None:
    """Tokens of a prompt that leave room for the answer in the target's positions; `None` if it names no limit."""
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return None if positions is None else positions - max_new_tokens


def _unit_seed(seed: int, i: int) -> int:
    """Below 2^48, so that it stays exact wherever it is written."""
    return int.from_bytes(hashlib.sha256(f"{seed} {i}".encode()).digest()[:6], "big")


__all__ = [
    "COLUMNS",
    "EncodedPrompt",
    "EncodedPrompts",
    "TargetAnswers",
    "TextsRecipe",
    "TextsUnit",
    "cut_units",
    "encode_prompts",
    "max_prompt_tokens",
    "prompts_fingerprint",
    "text_id",
]

"""What a visitor may ask for, and the limits of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

IN_FLIGHT, BY_SECONDS, PAPER, FIXED = RULES = ("in flight", "by seconds", "paper", "fixed size")
MAX_BLOCK_SIZE = 16
MAX_TEMPERATURE = 5.0
MAX_SEED = 2**32 - 1
# No tokenizer in use makes so few tokens of so many characters: longer prompts are not even encoded.
_CHARACTERS_PER_TOKEN = 64


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    max_new_tokens: int = 256
    max_prompt_tokens: int = 512

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Limits":
        """`MAX_NEW_TOKENS` and `MAX_PROMPT_TOKENS`, whole numbers from 1."""
        given = {}
        for name in ("max_new_tokens", "max_prompt_tokens"):
            text = environment.get(name.upper(), "").strip()
            if text:
                if not text.isdecimal() or int(text) < 1:
                    raise ValueError(f"`{name.upper()}` must be a whole number from 1, got {text!r}.")
                given[name] = int(text)
        return cls(**given)


@dataclass(frozen=True)
class Request:
    """One prompt and its settings. `block_size` counts for the rule `"fixed size"` only."""

    prompt: str
    max_new_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0
    rule: str = IN_FLIGHT
    block_size: int = 8
    compare: bool = False

    def checked(self, limits: Limits) -> "Request":
        """
        The same with whole numbers as such: from JSON and from sliders they may come as floats.

        Raises:
            `ValueError`: for the first value that is not allowed, with what is.
        """
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise ValueError("The prompt is empty. Type a question or a task.")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"The prompt holds half a character (position {error.start}). Remove it.") from error
        most = limits.max_prompt_tokens * _CHARACTERS_PER_TOKEN
        if len(self.prompt) > most:
            raise ValueError(
                f"The prompt has {len(self.prompt):,} characters, and {limits.max_prompt_tokens:,} tokens are allowed. "
                "Shorten it."
            )
        if self.rule not in RULES:
            raise ValueError(f"`rule` must be one of {', '.join(map(repr, RULES))}, got {self.rule!r}.")
        if not isinstance(self.compare, bool):
            raise ValueError(f"`compare` must be true or false, got {self.compare!r}.")
        temperature = self.temperature
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not is_number or not 0.0 <= temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"`temperature` must be a number from 0 (greedy) to {MAX_TEMPERATURE:g}, got {temperature!r}."
            )
        return replace(
            self,
            temperature=float(temperature),
            max_new_tokens=_whole("max_new_tokens", self.max_new_tokens, 1, limits.max_new_tokens),
            seed=_whole("seed", self.seed, 0, MAX_SEED),
            block_size=_whole("block_size", self.block_size, 1, MAX_BLOCK_SIZE),
        )


def _whole(name: str, value: Any, least: int, most: int) -> int:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_whole or value != int(value) or not least <= value <= most:
        raise ValueError(f"`{name}` must be a whole number from {least:,} to {most:,}, got {value!r}.")
    return int(value)

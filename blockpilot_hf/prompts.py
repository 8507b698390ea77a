"""Prompts from files and strings to input ids. Knows chat templates, not models."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Prompt:
    """A prompt as read: `turns` are the user's messages, in order."""

    id: str
    turns: tuple[str, ...]
    category: str = ""


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """
    Prompts of a file: `.jsonl` with `turns` (a list) or `prompt` (a string), and optionally `id` and `category`; any
    other file is one prompt per non-empty line.

    Args:
        path (`str` or `Path`): The file.
        limit (`int`, *optional*): That many prompts, spread evenly over the file, so that every part of it occurs.

    Raises:
        `ValueError`: for a line without a prompt, with its number; for two prompts of one id; for a file without any.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    # Not `splitlines`: it also splits at characters that JSON strings may hold, such as U+2028.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            prompts.append(
                _parse(line, f"{path}:{number}", number) if path.suffix == ".jsonl" else _plain(line, number)
            )
    if not prompts:
        raise ValueError(
            f"{path} holds no prompt. Expected JSON lines with `turns` or `prompt`, or one prompt per line."
        )
    repeated = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{path} has several prompts with the id {repeated[0]!r}. Results are kept by id: rename them."
        )
    if limit is not None and limit < len(prompts):
        prompts = [prompts[i * len(prompts) // limit] for i in range(limit)]
    return prompts


def _plain(line: str, number: int) -> Prompt:
    return Prompt(id=f"line-{number}", turns=(line.strip(),))


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}). Expected one object per line.") from error
    turns = entry.get("turns", entry.get("prompt")) if isinstance(entry, dict) else None
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where} has no prompt. Expected `turns`, a list of strings, or `prompt`, a string.")
    return Prompt(
        id=str(entry.get("id", f"line-{number}")), turns=tuple(turns), category=str(entry.get("category", ""))
    )


def encode_prompt(tokenizer: Any, text: str, system: str | None = None) -> torch.LongTensor:
    """
    Ids of a user message `(1, length)`, in the tokenizer's chat template with the generation prompt where it has one.

    Raises:
        `ValueError`: for a prompt without tokens.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
    else:
        ids = tokenizer(f"{system}\n\n{text}" if system else text, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise ValueError(f"The prompt {text!r} has no tokens. Pass some text.")
    return ids

"""Prompts from files and strings to input ids. Knows chat templates, not models."""

import json
from collections import Counter
from collections.abc import Sequence
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


def sample_prompts() -> list[Prompt]:
    """The three prompts that come with the package: maths, code and translation."""
    return read_prompts(Path(__file__).with_name("sample_prompts.jsonl"))


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """
    Prompts of a file: `.jsonl` with `turns` (a list) or `prompt` (a string), and optionally `id` and `category`; any
    other file is one prompt per non-empty line.

    Args:
        path (`str` or `Path`): The file.
        limit (`int`, *optional*): That many prompts, spread evenly over the file, so that every part of it occurs.

    Raises:
        `ValueError`: for a line without a prompt, with its number; for two prompts of one id; for a file without any;
            for a file that is not UTF-8.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Convert it.") from error
    # Not `splitlines`: it also splits at characters that JSON strings may hold, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
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


def encode_prompt(
    tokenizer: Any, text: str, system: str | None = None, history: Sequence[tuple[str, str]] = ()
) -> torch.LongTensor:
    """
    Ids of a user message `(1, length)`, in the tokenizer's chat template with the generation prompt where it has one;
    else messages and answers are joined by blank lines.

    Args:
        text (`str`): The message.
        system (`str`, *optional*): System message; without it the template's own default holds.
        history (`Sequence[tuple[str, str]]`, *optional*): Earlier messages of the user, each with the answer to it.

    Raises:
        `ValueError`: for a prompt without tokens, and for messages that the chat template refuses.
    """
    if getattr(tokenizer, "chat_template", None):
        from jinja2 import TemplateError

        messages = [{"role": "system", "content": system}] if system else []
        for question, answer in history:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": text})
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, return_tensors="pt"
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"The tokenizer's chat template refuses messages of the roles {roles}: {error}") from error
    else:
        parts = [system] if system else []
        parts += [part for pair in history for part in pair]
        ids = tokenizer("\n\n".join([*parts, text]), return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise ValueError(f"The prompt {text!r} has no tokens. Pass some text.")
    return ids

"""Prompts from files, tables and strings to input ids. Knows chat templates, not models."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Prompt:
    """A prompt as read: `turns` are the user's messages, in order; `source` says where it is from."""

    id: str
    turns: tuple[str, ...]
    category: str = ""
    source: str = ""


def sample_prompts() -> list[Prompt]:
    """The three prompts that come with the package: maths, code and translation."""
    return read_prompts(Path(__file__).with_name("sample_prompts.jsonl"))


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """
    Prompts of a file: `.jsonl` with `turns` (a list) or `prompt` (a string), and optionally `id`, `category` and
    `source`; any other file is one prompt per non-empty line.

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
    _check_ids(prompts, path)
    return [prompts[i] for i in spread_indices(len(prompts), limit)]


def prompts_of_rows(
    rows: Iterable[dict[str, Any]],
    *,
    prompt_column: str,
    id_column: str | None = None,
    category_column: str | None = None,
    category: str = "",
    source: str = "",
) -> tuple[list[Prompt], int]:
    """
    Prompts of a table's rows.

    Args:
        prompt_column (`str`):
            Its values are a message, a list of messages (the turns), or a list of chat messages with `role` and
            `content`, of which the user's are taken.
        id_column (`str`, *optional*): By default ids are the rows' numbers.
        category_column (`str`, *optional*): `category` is for all rows where it is not given.
        source (`str`, *optional*): For all rows.

    Returns:
        `tuple(list[Prompt], int)`: the prompts, and the number of rows that were left out because they have none.

    Raises:
        `ValueError`: for a value that is none of these, with its row; for two rows of one id.
    """
    prompts, num_empty = [], 0
    for number, row in enumerate(rows):
        where = f"row {number} of {source}, column `{prompt_column}`"
        turns = turns_of(row[prompt_column], where, "Name another column with `--prompt-column`.")
        if not turns:
            num_empty += 1
            continue
        name = f"row-{number}" if id_column is None else str(row[id_column])
        kind = category if category_column is None else str(row[category_column] or "")
        prompts.append(Prompt(name, turns, kind, source))
    _check_ids(prompts, source)
    return prompts, num_empty


def spread_indices(count: int, limit: int | None) -> list[int]:
    """`limit` of `count` indices, spread evenly over them; all without a limit."""
    kept = count if limit is None else min(limit, count)
    return [i * count // kept for i in range(kept)]


def turns_of(value: Any, where: str, todo: str) -> tuple[str, ...]:
    """
    The user's messages in a table's value; none if one of them is blank.

    Args:
        value (`Any`): A message, a list of messages, or a list of chat messages with `role` and `content`.
        where (`str`): What the value is called in errors.
        todo (`str`): What an error advises.

    Raises:
        `ValueError`: for a value that is none of these.
    """
    messages = [value] if isinstance(value, str) else value or []
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        messages = [message.get("content") for message in messages if message.get("role") == "user"]
    if not isinstance(messages, list) or not all(isinstance(message, str) for message in messages):
        raise ValueError(
            f"{where} is not a prompt: {str(value)[:80]!r}. Expected a string, a list of strings, or a list of chat "
            f"messages. {todo}"
        )
    return tuple(messages) if all(message.strip() for message in messages) else ()


def _check_ids(prompts: Sequence[Prompt], where: Any) -> None:
    repeated = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise ValueError(
            f"{where} has several prompts with the id {repeated[0]!r}. Results are kept by id: rename them."
        )


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
        id=str(entry.get("id", f"line-{number}")),
        turns=tuple(turns),
        category=str(entry.get("category", "")),
        source=str(entry.get("source", "")),
    )


def encode_prompt(
    tokenizer: Any,
    text: str,
    system: str | None = None,
    history: Sequence[tuple[str, str]] = (),
    template_options: Mapping[str, Any] | None = None,
) -> torch.LongTensor:
    """
    Ids of a user message `(1, length)`, in the tokenizer's chat template with the generation prompt where it has one;
    else messages and answers are joined by blank lines.

    Args:
        text (`str`): The message.
        system (`str`, *optional*): System message; without it the template's own default holds.
        history (`Sequence[tuple[str, str]]`, *optional*): Earlier messages of the user, each with the answer to it.
        template_options (`Mapping[str, Any]`, *optional*): What else the chat template takes, such as
            `enable_thinking`.

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
                messages,
                add_generation_prompt=True,
                return_dict=False,
                return_tensors="pt",
                **(template_options or {}),
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

"""Texts that a target wrote: prompt and answer ids, read from disk, and split by prompt. Knows no models."""

import gzip
import hashlib
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .units import check_finished, is_finished, require_extra


@dataclass(frozen=True)
class Text:
    """
    A prompt and the target's own answer to it, as ids. `prompt_ids` are those that `generate` was given.

    Args:
        prompt_id (`str`, *optional*): One prompt may have several texts: turns, temperatures, samples.
        source (`str`, *optional*): Where the prompt is from.
        temperature (`float`, *optional*): 0 for greedy answers.
        seed (`int`, *optional*): Of the random numbers that the answer was drawn with.
    """

    id: str
    category: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    prompt_id: str = ""
    source: str = ""
    temperature: float = 0.0
    seed: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.answer_ids

    @property
    def prompt_hash(self) -> str:
        """Hex SHA-256 of the prompt's ids: one prompt under two names is still one prompt."""
        return hashlib.sha256(" ".join(map(str, self.prompt_ids)).encode()).hexdigest()


def read_texts(path: str | Path) -> list[Text]:
    """
    Texts of a dataset folder as `blockpilot prepare` writes it, or of a `.jsonl` or `.jsonl.gz` file, with
    `prompt_ids`, `answer_ids` and optionally the other fields of [`Text`].

    Answers of fewer than two tokens are left out: nothing can be drafted in them.

    Raises:
        `ValueError`: for a line that is no such object, with its number; for a file or folder without texts, or one
            that is cut off or not finished.
        `ImportError`: for a folder, if `datasets` is not installed.
    """
    path = Path(path)
    texts = [text for text in (_of_folder(path) if path.is_dir() else _of_file(path)) if len(text.answer_ids) > 1]
    if not texts:
        raise ValueError(f"{path} holds no text with an answer. Expected `prompt_ids` and `answer_ids` of each.")
    return texts


def _of_file(path: Path) -> list[Text]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            return [_parse(line, f"{path}:{number}", number) for number, line in enumerate(lines, 1) if line.strip()]
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path} is cut off or damaged ({error}). Copy it again.") from error


def _of_folder(path: Path) -> list[Text]:
    check_finished(path)
    if not is_finished(path):
        raise ValueError(
            f"{path} holds no dataset. Expected a folder that `blockpilot prepare` wrote, or a .jsonl file."
        )
    rows = require_extra("datasets").load_from_disk(str(path))
    missing = {"prompt_ids", "answer_ids"} - set(rows.column_names)
    if "num_accepted" in rows.column_names:
        raise ValueError(
            f"{path} is a sweep. Name the texts that it was made from, as `blockpilot prepare` wrote them."
        )
    if missing:
        raise ValueError(
            f"{path} has no column {' and '.join(sorted(missing))}, it has {', '.join(rows.column_names)}. "
            "Expected texts as `blockpilot prepare` writes them."
        )
    rows = rows.select_columns([name for name in rows.column_names if name in Text.__dataclass_fields__])
    return [_text(row, f"{path}, row {number}", f"row-{number}") for number, row in enumerate(rows)]


def _parse(line: str, where: str, number: int) -> Text:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}). Expected one object per line.") from error
    return _text(entry, where, f"line-{number}")


def _text(entry: Any, where: str, default_id: str) -> Text:
    ids: list[Any] = [entry.get(key) if isinstance(entry, dict) else None for key in ("prompt_ids", "answer_ids")]
    if not all(_are_ids(part) for part in ids) or not ids[0]:
        raise ValueError(f"{where} is not a text. Expected `prompt_ids` and `answer_ids`, lists of token ids.")
    try:
        temperature, seed = float(entry.get("temperature") or 0.0), int(entry.get("seed") or 0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} has a `temperature` or `seed` that is no number ({error}).") from error
    return Text(
        id=str(entry.get("id", default_id)),
        category=str(entry.get("category") or "all"),
        prompt_ids=tuple(ids[0]),
        answer_ids=tuple(ids[1]),
        prompt_id=str(entry.get("prompt_id") or ""),
        source=str(entry.get("source") or ""),
        temperature=temperature,
        seed=seed,
    )


def _are_ids(part: Any) -> bool:
    return isinstance(part, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in part)


def check_texts(texts: list[Text], *, vocab_size: int, max_length: int) -> None:
    """
    Args:
        vocab_size (`int`): Tokens of the target.
        max_length (`int`): Positions of the target.

    Raises:
        `ValueError`: naming the first text with an id that the target does not have, or with too many tokens.
    """
    for text in texts:
        if max(text.ids) >= vocab_size:
            raise ValueError(
                f"Text {text.id!r} holds the token id {max(text.ids)}, the target has 0 to {vocab_size - 1}. Texts "
                "must be in the ids of the target's own tokenizer."
            )
    too_long = [text for text in texts if len(text.ids) > max_length]
    if too_long:
        raise ValueError(
            f"Text {too_long[0].id!r} has {len(too_long[0].ids)} tokens, the target takes {max_length} "
            f"({len(too_long)} of {len(texts)} texts are too long). Shorten them or leave them out."
        )


def prompt_numbers(rows: Sequence[Any]) -> list[int]:
    """
    A number from 0 for each row's prompt, in order of appearance. Rows with one prompt hash belong together whatever
    their names, and so do the turns of a conversation, which have one prompt id: the second holds the first.

    Args:
        rows (`Sequence`): Texts, or what else has a `prompt_hash` and a `prompt_id`.
    """
    leader: dict[str, str] = {}

    def find(key: str) -> str:
        while leader.setdefault(key, key) != key:
            key = leader[key]
        return key

    for row in rows:
        if row.prompt_id:
            leader[find(f"hash {row.prompt_hash}")] = find(f"id {row.prompt_id}")
    numbers: dict[str, int] = {}
    return [numbers.setdefault(find(f"hash {row.prompt_hash}"), len(numbers)) for row in rows]


def split_by_prompt(texts: list[Text], per_category: int) -> tuple[list[Text], list[Text]]:
    """
    Texts to train on and texts to validate on, by the prompts' hashes: the same prompts are held out whatever the order
    of the file, and no prompt is on both sides, nor are two turns of a conversation.

    Args:
        per_category (`int`): Prompts of each category that are held out, at most a fifth of the category.

    Returns:
        `tuple(list[Text], list[Text])`: both in the order of `texts`.

    Raises:
        `ValueError`: for a negative number.
    """
    if per_category < 0:
        raise ValueError(f"`per_category` must be an integer >= 0, got {per_category}.")
    numbers = prompt_numbers(texts)
    first: dict[int, tuple[str, str]] = {}  # a prompt is known by the smallest of its texts' hashes
    for number, text in zip(numbers, texts, strict=True):
        key = (text.prompt_hash, text.category)
        first[number] = min(key, first.get(number, key))
    groups: dict[str, list[int]] = defaultdict(list)
    for number in sorted(first, key=first.__getitem__):
        groups[first[number][1]].append(number)
    held_out = {number for group in groups.values() for number in group[: min(per_category, len(group) // 5)]}
    pairs = list(zip(numbers, texts, strict=True))
    return [text for n, text in pairs if n not in held_out], [text for n, text in pairs if n in held_out]


def spread(texts: list[Text], limit: int) -> list[Text]:
    """`limit` texts at most, a like share of every category, sorted by category and prompt hash."""
    ordered = sorted(texts, key=lambda text: (text.category, text.prompt_hash))
    count = min(limit, len(ordered))
    return [ordered[i * len(ordered) // count] for i in range(count)]


def first_of_each_category(texts: list[Text], count: int) -> list[Text]:
    """The first `count` texts of each category, in the order of `texts`."""
    seen: Counter[str] = Counter()
    kept = []
    for text in texts:
        if seen[text.category] < count:
            seen[text.category] += 1
            kept.append(text)
    return kept


__all__ = ["Text", "check_texts", "first_of_each_category", "prompt_numbers", "read_texts", "split_by_prompt", "spread"]

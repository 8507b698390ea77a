"""Texts that tiny targets wrote, for the tests of what drafter training stands on."""

import json
from pathlib import Path
from typing import Any

from conftest import make_prompt, plain_generate

from blockpilot_hf.texts import Text


def make_text(
    target: Any, *, seed: int = 0, length: int = 8, num_new: int = 24, category: str = "all", **settings: Any
) -> Text:
    """The target's greedy answer to a random prompt."""
    prompt = make_prompt(length, seed=seed)
    answer = plain_generate(target, prompt, max_new_tokens=num_new, do_sample=False, **settings)[0, length:]
    return Text(f"text-{seed}", category, tuple(prompt[0].tolist()), tuple(answer.tolist()))


def make_texts(target: Any, count: int, *, num_categories: int = 2, first_seed: int = 100) -> list[Text]:
    """Answers of different lengths, in categories `a`, `b` and so on."""
    return [
        make_text(
            target, seed=first_seed + i, length=5 + i % 4, num_new=20 + i % 5, category="abcdef"[i % num_categories]
        )
        for i in range(count)
    ]


def write_texts(path: Path, texts: list[Text]) -> Path:
    """A file as `read_texts` reads it."""
    entries = [
        {"id": text.id, "category": text.category, "prompt_ids": text.prompt_ids, "answer_ids": text.answer_ids}
        for text in texts
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path

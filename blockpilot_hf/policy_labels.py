"""Examples for the policy: the features of a prompt and the acceptance length that it has at every block size.

Either decoded at each size, which is the truth and takes as long as it says, or replayed on the target's own answer,
which gives the same numbers where the text is the same and takes a fraction. Examples are written as they come, so that
a long run can be stopped and goes on where it was.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .features import policy_features
from .generate import BlockPilot
from .json_lines import append_line
from .policy_training import PolicyExample
from .replay import replay
from .target_states import target_states
from .texts import Text


def decoded_example(
    target: Any, pilot: BlockPilot, text: Text, block_sizes: Sequence[int], *, max_new_tokens: int
) -> PolicyExample:
    """
    Decode the prompt of `text` greedily at every block size.

    Args:
        text ([`Text`]): Only its prompt is used; `answer_ids` may be empty.
        block_sizes (`Sequence[int]`): 1 needs no decoding: its acceptance length is 1.
        max_new_tokens (`int`): New tokens at most.
    """
    input_ids = torch.tensor([text.prompt_ids], device=target.device)
    taus, features = {1: 1.0}, None
    for size in sorted(set(block_sizes) - {1}, reverse=True):
        output = pilot.generate(
            target,
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            block_size=size,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=features is None,
        )
        if features is None:
            features = policy_features(output.logits[0], kind="compact")[0].tolist()
        # An answer of one token has no step; every block size is then as good as plain decoding.
        taus[size] = output.blockpilot.acceptance_length or 1.0
    return _example(text, features, taus, block_sizes)


@torch.no_grad()
def replayed_example(
    target: Any,
    drafter: Any,
    text: Text,
    block_sizes: Sequence[int],
    *,
    max_new_tokens: int,
) -> PolicyExample:
    """
    Replay the answer of `text` at every block size.

    Args:
        max_new_tokens (`int`): Only that much of the answer counts.
    """
    shown = Text(text.id, text.category, text.prompt_ids, text.answer_ids[:max_new_tokens])
    context = target_states(target, drafter.config.target_layer_ids, shown).context
    walk = replay(target, drafter, shown, context, block_sizes)
    prompt = torch.tensor([text.prompt_ids], device=target.device)
    logits = target(input_ids=prompt, logits_to_keep=1, use_cache=False).logits[:, -1]
    features = policy_features(logits, kind="compact")[0].tolist()
    return _example(text, features, {size: walk.acceptance_length(size) for size in block_sizes}, block_sizes)


def _example(text: Text, features: list[float] | None, taus: dict[int, float], sizes: Sequence[int]) -> PolicyExample:
    assert features is not None, "a size above 1 is among the candidates"
    return PolicyExample(
        id=text.id,
        category=text.category,
        prompt_hash=text.prompt_hash,
        features=tuple(features),
        acceptance_length={size: taus[size] for size in sorted(sizes)},
    )


def append_example(path: Path, example: PolicyExample, settings: dict[str, Any]) -> None:
    """Adds one example to a file."""
    append_line(path, {"settings": settings, **asdict(example)})


def read_examples(path: Path, settings: dict[str, Any] | None = None) -> list[PolicyExample]:
    """
    Examples of a file; none if it is not there.

    Raises:
        `ValueError`: if they were made with other settings than `settings`.
    """
    examples = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found = entry.pop("settings")
        if settings is not None and found != settings:
            other = {key: found.get(key) for key in settings if found.get(key) != settings[key]}
            raise ValueError(
                f"{path} holds examples of other settings ({other}). Use the same ones to go on, or another folder."
            )
        entry["features"] = tuple(entry["features"])
        entry["acceptance_length"] = {int(size): tau for size, tau in entry["acceptance_length"].items()}
        examples.append(PolicyExample(**entry))
    return examples


__all__ = ["append_example", "decoded_example", "read_examples", "replayed_example"]

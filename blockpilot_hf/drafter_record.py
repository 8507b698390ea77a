"""What is kept of a trained drafter: its folder, and what it is worth on texts that it never saw."""

import copy
import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .drafter_checkpoint import written_whole
from .modeling_dflash import DFlashDraftModel
from .replay import Replay, acceptance_by_group, replay
from .target_states import target_states
from .texts import Text

_PACKAGES = ("blockpilot-hf", "torch", "transformers", "safetensors")


def package_versions() -> dict[str, str]:
    """Of the packages that results depend on."""
    return {name: version(name) for name in _PACKAGES}


def save_drafter(
    drafter: DFlashDraftModel, folder: Path, *, target_fingerprint: str, shortlist_ids: torch.LongTensor | None = None
) -> None:
    """
    Write `drafter` in bfloat16 to `folder`, which is whole at any time. The drafter itself stays as it is.

    Args:
        shortlist_ids (`torch.LongTensor` of shape `(shortlist_size,)`, *optional*): The tokens that it drafts.

    Raises:
        `OSError`: if it cannot be written.
    """
    rounded = copy.deepcopy(drafter).to(torch.bfloat16).eval()
    rounded.set_shortlist(shortlist_ids)
    rounded.config.target_fingerprint = target_fingerprint
    rounded.config.blockpilot_version = version("blockpilot-hf")
    with written_whole(folder) as beside:
        rounded.save_pretrained(beside)


def replay_texts(
    target: Any, drafter: Any, texts: Sequence[Text], should_stop: Callable[[], bool] = lambda: False
) -> list[Replay] | None:
    """
    Replays of `texts` at the drafter's block size, from states as decoding sees them.

    Args:
        should_stop (`Callable`, *optional*): Asked before every text.

    Returns:
        `list[Replay]`, or `None` if it was stopped.
    """
    walks = []
    for text in texts:
        if should_stop():
            return None
        context = target_states(target, drafter.config.target_layer_ids, text).context
        walks.append(replay(target, drafter, text, context, [drafter.config.block_size]))
    return walks


def acceptance_record(walks: Sequence[Replay], block_size: int) -> dict[str, Any]:
    """Acceptance length by category and in all, with the number of prompts, and prompt by prompt."""
    return {
        "block_size": block_size,
        "acceptance_length": acceptance_by_group(walks, block_size),
        "per_prompt": [
            {
                "id": walk.text.id,
                "category": walk.text.category,
                "num_new_tokens": len(walk.text.answer_ids),
                "num_steps": len(walk.steps(block_size)),
                "acceptance_length": walk.acceptance_length(block_size),
            }
            for walk in walks
        ],
    }


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Under its name only when whole."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


__all__ = ["acceptance_record", "package_versions", "replay_texts", "save_drafter", "write_json"]

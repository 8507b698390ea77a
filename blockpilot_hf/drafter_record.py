"""What is kept of a trained drafter: its folder, and what it is worth on texts that it never saw."""

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from .drafter_checkpoint import written_whole
from .drafter_training import DrafterTrainer, acceptance_groups
from .json_lines import write_json
from .modeling_dflash import DFlashDraftModel
from .processes import Processes
from .replay import Replay, replay
from .target_states import target_states, weights_fingerprint
from .texts import Text, first_of_each_category, prompt_numbers, split_by_prompt

TRAINING_PROMPTS = "training_prompts.json"
VALIDATION = "validation.json"

_PACKAGES = ("blockpilot-hf", "torch", "transformers", "safetensors")


def package_versions() -> dict[str, str]:
    """Of the packages that results depend on."""
    return {name: version(name) for name in _PACKAGES}


def short_hash(text: Text) -> str:
    """What says of a prompt that it was trained on: the start of its hash."""
    return text.prompt_hash[:16]


@dataclass(frozen=True)
class TrainingPrompts:
    """
    Which prompts weights were trained on.

    Args:
        hashes (`frozenset[str]`): The first 16 hex digits of the prompts' hashes.
        is_complete (`bool`): `False` if they were trained on others before, of which there is no record.
    """

    hashes: frozenset[str] = frozenset()
    is_complete: bool = True


def write_training_prompts(folder: Path, texts_or_hashes: Iterable[Text | str], *, is_complete: bool = True) -> None:
    """
    Put on record, beside weights, which prompts they were trained on, so that others are taken to judge them.

    Args:
        texts_or_hashes (`Iterable[Text | str]`): Texts, or the hashes of their prompts.
        is_complete (`bool`, *optional*, defaults to `True`): See [`TrainingPrompts`].
    """
    hashes = {short_hash(one) if isinstance(one, Text) else one[:16] for one in texts_or_hashes}
    write_json(folder / TRAINING_PROMPTS, {"is_complete": is_complete, "prompt_hashes": sorted(hashes)})


def read_training_prompts(folder: str | Path) -> TrainingPrompts | None:
    """
    Which prompts the weights in a folder, or under a Hub id, were trained on; `None` if that is not on record.

    Raises:
        `ValueError`: if the record is damaged.
    """
    found = cached_file(
        str(folder),
        TRAINING_PROMPTS,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return None
    try:
        record = json.loads(Path(found).read_text(encoding="utf-8"))
        return TrainingPrompts(frozenset(record["prompt_hashes"]), record.get("is_complete", True))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{found} does not say which prompts were trained on ({error!r}). Copy the folder again."
        ) from error


def source_record(path: Path, texts: Sequence[Text]) -> dict[str, Any]:
    """Name, hash and number of texts of a file; the hash of a dataset folder is that of its texts."""
    if path.is_dir():
        digest = hashlib.sha256("\n".join(f"{text.prompt_hash} {text.answer_ids}" for text in texts).encode())
    else:
        digest = hashlib.sha256(path.read_bytes())
    return {"name": path.name, "sha256": digest.hexdigest(), "num_texts": len(texts)}


def hold_out(
    texts: list[Text], per_category: int, *, validation: list[Text] | None = None, earlier: Collection[str] = ()
) -> tuple[list[Text], list[Text]]:
    """
    Texts to train on, and texts that a drafter can be judged on: of prompts that no training saw.

    Args:
        texts (`list[Text]`): All that are there to train on.
        per_category (`int`): See [`split_by_prompt`].
        validation (`list[Text]`, *optional*): To be judged on, instead of a part of `texts`.
        earlier (`Collection[str]`, *optional*):
            Hashes of prompts that the start was trained on, as [`TrainingPrompts`] has them. Such prompts are trained
            on again and not held out.

    Raises:
        `ValueError`: if prompts of `validation` are trained on, or were.
    """
    if validation is None:
        _, held_out = split_by_prompt(texts, per_category)
        numbers = prompt_numbers(texts)
        seen = {n for n, text in zip(numbers, texts, strict=True) if short_hash(text) in earlier}
        out = {id(text) for text in held_out}
        apart = [id(text) in out and number not in seen for number, text in zip(numbers, texts, strict=True)]
        pairs = list(zip(apart, texts, strict=True))
        return [text for is_out, text in pairs if not is_out], [text for is_out, text in pairs if is_out]
    known = {short_hash(text) for text in texts} | set(earlier)
    # Prompts of other files may have the same ids, so a conversation is known by its source too.
    conversations = {(text.source, text.prompt_id) for text in texts if text.source and text.prompt_id}
    both = [text for text in validation if short_hash(text) in known or (text.source, text.prompt_id) in conversations]
    if both:
        raise ValueError(
            "Validation texts whose prompts are trained on, or that the start was trained on: "
            f"{len(both)} of {len(validation)}, the first is {both[0].id!r}. Take texts of other prompts, or take "
            "these away on one side."
        )
    return texts, validation


def quick_part(held_out: list[Text], per_category: int) -> list[Text]:
    """Some texts of each category at each temperature, in their order: enough to see how a run is getting on."""
    kept: list[Text] = []
    for temperature in {text.temperature for text in held_out}:
        same = [text for text in held_out if text.temperature == temperature]
        kept += first_of_each_category(same, per_category)
    places = {id(text): place for place, text in enumerate(held_out)}
    return sorted(kept, key=lambda text: places[id(text)])


def save_drafter(
    drafter: DFlashDraftModel,
    folder: Path,
    *,
    target_fingerprint: str,
    shortlist_ids: torch.LongTensor | None = None,
    training_prompts: Collection[Text | str] = (),
    is_complete: bool = True,
) -> None:
    """
    Write `drafter` in bfloat16 to `folder`, which is whole at any time. The drafter itself stays as it is.

    Args:
        shortlist_ids (`torch.LongTensor` of shape `(shortlist_size,)`, *optional*): The tokens that it drafts.
        training_prompts, is_complete (*optional*): See [`write_training_prompts`].

    Raises:
        `OSError`: if it cannot be written.
    """
    rounded = copy.deepcopy(drafter).to(torch.bfloat16).eval()
    rounded.set_shortlist(shortlist_ids)
    rounded.config.target_fingerprint = target_fingerprint
    rounded.config.blockpilot_version = version("blockpilot-hf")
    with written_whole(folder) as beside:
        rounded.save_pretrained(beside)
        write_training_prompts(beside, training_prompts, is_complete=is_complete)


def replay_texts(
    target: Any,
    drafter: Any,
    texts: Sequence[Text],
    should_stop: Callable[[], bool] = lambda: False,
    processes: Processes | None = None,
) -> list[Replay] | None:
    """
    Replays of `texts` at the drafter's block size, from states as decoding sees them.

    Args:
        should_stop (`Callable`, *optional*): Asked before every text.
        processes ([`Processes`], *optional*): Those that share the texts; each gets all replays.

    Returns:
        `list[Replay]`, or `None` if it was stopped.
    """

    def accepted(text: Text) -> dict[int, list[int]]:
        context = target_states(target, drafter.config.target_layer_ids, text).context
        return replay(target, drafter, text, context, [drafter.config.block_size]).num_accepted

    found = (processes or Processes()).deal(texts, accepted, should_stop)
    return None if found is None else [Replay(*pair) for pair in zip(texts, found, strict=True)]


def acceptance_record(walks: Sequence[Replay], block_size: int) -> dict[str, Any]:
    """Acceptance length by category and in all, with the numbers of prompts and texts, and text by text."""
    return {
        "block_size": block_size,
        "acceptance_length": acceptance_groups(walks, block_size),
        "per_prompt": [
            {
                "id": walk.text.id,
                "category": walk.text.category,
                "temperature": walk.text.temperature,
                "num_new_tokens": len(walk.text.answer_ids),
                "num_steps": len(walk.steps(block_size)),
                "acceptance_length": walk.acceptance_length(block_size),
            }
            for walk in walks
        ],
    }


def progress_of(folder: str | Path) -> list[dict[str, Any]]:
    """
    How a drafter came to what it is, from the record in its folder or beside it; empty without one.

    Args:
        folder (`str` or `Path`): The drafter's.
    """
    folder = Path(folder)
    for record_path in (folder / VALIDATION, folder.parent / VALIDATION):
        if folder.is_dir() and record_path.is_file():
            record = json.loads(record_path.read_text(encoding="utf-8"))
            run, settings = record["run_info"], record["settings"]
            texts_per_step = settings["sequences_per_step"] * settings.get("accumulation", 1)
            end = _progress(
                run["num_steps"], texts_per_step, record["meta_info"]["num_texts"], run["training_s"], record
            )
            return record.get("progress") or [{"run": 1, **end}]
    return []


def _progress(step: int, texts_per_step: int, num_texts: int, seconds: float, found: dict[str, Any]) -> dict[str, Any]:
    visits = step * texts_per_step
    return {
        "step": step,
        "num_visits": visits,
        "num_texts": min(visits, num_texts),  # every epoch sees every text once
        "training_s": round(seconds, 1),
        "acceptance_length": found["acceptance_length"],
    }


def run_record(
    trainer: DrafterTrainer,
    drafter: Any,
    walks: Sequence[Replay],
    *,
    command: str,
    made_of: dict[str, Any],
    training_prompts: Collection[Text | str],
    earlier_progress: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """
    What a finished run puts on record.

    Args:
        trainer ([`DrafterTrainer`]): At its last step.
        drafter ([`DFlashDraftModel`]): As it was written and judged.
        walks (`Sequence[Replay]`): Of what was held out.
        command (`str`): What the run was started with.
        made_of (`dict`): Files and start, as the command knows them.
        training_prompts (`Collection[Text | str]`): Those on record beside the drafter.
        earlier_progress (`Sequence[dict]`, *optional*): Of the drafter that the run started from.
    """
    state, acceptance = trainer.state, acceptance_record(walks, drafter.config.block_size)
    number = 1 + max((entry["run"] for entry in earlier_progress), default=0)
    validations = [entry for entry in trainer.log.up_to(state.step) if "acceptance_length" in entry]
    validations.append({"step": state.step, "seconds": state.seconds, **acceptance})
    progress = [
        {
            "run": number,
            **_progress(entry["step"], trainer.config.texts_per_step, len(trainer.texts), entry["seconds"], entry),
        }
        for entry in validations
    ]
    temperatures = Counter(text.temperature for text in trainer.texts)
    return {
        "run_info": {
            "command": command,
            "finished_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "num_steps": trainer.state.step,
            "training_s": round(trainer.state.seconds, 1),
            "num_drafted_positions": trainer.state.num_tokens,
            "num_processes": trainer.processes.count,
        },
        "meta_info": {
            "versions": package_versions(),
            "target_name_or_path": drafter.config.target_name_or_path,
            "target_fingerprint": trainer.fingerprint,
            "target_dtype": str(trainer.target.dtype).removeprefix("torch."),
            "drafter_fingerprint": weights_fingerprint(drafter),
            "num_parameters": drafter.num_parameters(),
            **made_of,
            "num_texts": len(trainer.texts),
            "temperatures": {f"{temperature:g}": count for temperature, count in sorted(temperatures.items())},
            "num_training_prompts": len({short_hash(t) if isinstance(t, Text) else t for t in training_prompts}),
            "num_held_out": len(walks),
        },
        "settings": asdict(trainer.config) | {"target_layer_ids": drafter.config.target_layer_ids},
        "progress": [*earlier_progress, *progress],
        **acceptance,
    }


__all__ = [
    "VALIDATION",
    "TrainingPrompts",
    "acceptance_record",
    "hold_out",
    "package_versions",
    "progress_of",
    "quick_part",
    "read_training_prompts",
    "replay_texts",
    "run_record",
    "save_drafter",
    "short_hash",
    "source_record",
    "write_json",
    "write_training_prompts",
]

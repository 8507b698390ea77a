"""A sweep: what decoding does on known texts at every block size, as a dataset.

The steps come from walking the target's own answers ([`walk`]), so all sizes are compared on one and the same text, at
a fraction of what decoding it at every size takes. Next to them stand the features that a policy reads of the prompt.
"""

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .candidate_generator import position_limits
from .checks import check_pair, vocab_rows
from .features import policy_features, projected_context
from .packing import PackedLinear
from .replay import Replay, check_replayable, replay, walk
from .target_states import weights_fingerprint
from .texts import Text, check_texts
from .units import Progress, is_finished, read_settings, require_extra, run_units

_TEXTS_PER_UNIT = 8

_COLUMNS = {
    "id": "string",
    "prompt_id": "string",
    "category": "string",
    "temperature": "float64",
    "seed": "int64",
    "prompt_hash": "string",
    "num_prompt_tokens": "int32",
    "num_new_tokens": "int32",
    "num_accepted": "int32[][]",  # in the order of the settings' `block_sizes`
    "features": "float32[]",
    "context": "float32[]",
}
_LOGITS = {"logits": "float32[]"}
# By `position_sizes`, then by anchor; the confidence of all drafted tokens of an anchor follows that of the one before.
_POSITIONS = {
    "accepted_at": "int32[][]",
    "confidence_at": "float32[][]",
    "prompt_ids": "int32[]",
    "answer_ids": "int32[]",
}


@dataclass(frozen=True)
class SweepRow:
    """
    One text.

    Args:
        prompt_hash (`str`): As [`Text.prompt_hash`].
        num_new_tokens (`int`): Of the answer. The first one comes from the prefill, so steps give one less.
        num_accepted (`dict[int, tuple[int, ...]]`): By block size, the accepted count of every step, in order.
        features (`tuple[float, ...]`): The `compact` features of the prefill, for this text's sampling settings.
        context (`tuple[float, ...]`, *optional*):
            The drafter's projected context at the last prompt position; older sweeps have none.
        logits (`tuple[float, ...]`, *optional*): The target's logits at the last prompt position, if they were kept.
        accepted_at (`dict[int, tuple[int, ...]]`, *optional*):
            By block size, how many drafted tokens are accepted after each answer token but the last, for the sizes at
            which they were kept.
        confidence_at (`dict[int, tuple[tuple[float, ...], ...]]`, *optional*):
            Likewise, the drafter's confidence in each of the drafted tokens.
        prompt_ids, answer_ids (`tuple[int, ...]`, *optional*):
            The text itself, kept with the positions; older sweeps have none.
    """

    id: str
    prompt_id: str
    category: str
    temperature: float
    seed: int
    prompt_hash: str
    num_prompt_tokens: int
    num_new_tokens: int
    num_accepted: dict[int, tuple[int, ...]]
    features: tuple[float, ...]
    context: tuple[float, ...] | None = None
    logits: tuple[float, ...] | None = None
    accepted_at: dict[int, tuple[int, ...]] | None = None
    confidence_at: dict[int, tuple[tuple[float, ...], ...]] | None = None
    prompt_ids: tuple[int, ...] | None = None
    answer_ids: tuple[int, ...] | None = None

    def num_steps(self, block_size: int) -> int:
        """
        Verification steps at a block size.

        Raises:
            `ValueError`: for a size that was not swept.
        """
        if block_size not in self.num_accepted:
            raise ValueError(f"Block size {block_size} was not swept, only {sorted(self.num_accepted)}.")
        return len(self.num_accepted[block_size])

    def acceptance_length(self, block_size: int) -> float:
        """Tokens per verification step at a block size; 1 where there is no step, as in plain decoding."""
        steps = self.num_steps(block_size)
        return (self.num_new_tokens - 1) / steps if steps else 1.0


@dataclass(frozen=True)
class Sweep:
    """
    Args:
        rows (`list[SweepRow]`): The texts, from the shortest to the longest.
        block_sizes (`tuple[int, ...]`): Rising.
        settings (`dict`): What the rows depend on: models, block sizes, texts.
    """

    rows: list[SweepRow]
    block_sizes: tuple[int, ...]
    settings: dict[str, Any]


def write_sweep(
    target: Any,
    drafter: Any,
    texts: Sequence[Text],
    block_sizes: Sequence[int],
    output: str | Path,
    *,
    max_new_tokens: int | None = None,
    keep_logits: bool = False,
    position_sizes: Sequence[int] = (),
    target_name: str | None = None,
    drafter_name: str | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """
    Walk all texts at all block sizes and keep what comes out in a folder, some texts at a time: a second call goes on,
    and several processes share the work ([`run_units`]).

    Args:
        texts (`Sequence[Text]`): With ids of their own.
        block_sizes (`Sequence[int]`): 1 is plain decoding, and costs nothing.
        output (`str` or `Path`): Folder of the dataset.
        max_new_tokens (`int`, *optional*): Only that much of every answer counts, as if decoding had ended there.
        keep_logits (`bool`, *optional*): Keep the prefill's logits too, for policies that read the whole vocabulary.
        position_sizes (`Sequence[int]`, *optional*):
            Those of the block sizes at which also accepted counts and the drafter's confidence after every anchor are
            kept (columns `accepted_at` and `confidence_at`), and the texts, for decisions in flight. Takes longer.
        target_name, drafter_name (`str`, *optional*): For the settings; by default as the models' configs name them.
        progress (`Callable`, *optional*): See [`run_units`].

    Returns:
        [`Sweep`]

    Raises:
        `ValueError`: for texts that the target cannot have written, two texts of one id, block sizes that are none, a
            drafter that cannot be replayed, and an output folder of other settings.
        `ImportError`: if `datasets` is not installed.
    """
    sizes = sorted(set(block_sizes))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"`block_sizes` must be integers >= 1, got {list(block_sizes)}.")
    at = sorted(set(position_sizes))
    if missing := sorted(set(at) - set(sizes)):
        raise ValueError(f"`position_sizes` must be among the block sizes {sizes}, got {missing} too.")
    check_pair(target, drafter)
    check_replayable(drafter)
    texts = [replace(text, answer_ids=text.answer_ids[:max_new_tokens]) for text in texts]
    limits = [limit for limit, _ in position_limits(target)]
    check_texts(texts, vocab_size=vocab_rows(target), max_length=min(limits, default=2**62))
    seen: set[str] = set()
    for text in texts:
        if text.id in seen:
            raise ValueError(f"Several texts have the id {text.id!r}. Results are kept by id: rename them.")
        seen.add(text.id)
    ordered = sorted(texts, key=lambda text: (len(text.ids), text.id))
    settings = {
        "target": target_name or _name_of(target),
        "target_fingerprint": weights_fingerprint(target),
        "drafter": drafter_name or _name_of(drafter),
        "drafter_fingerprint": weights_fingerprint(drafter),
        "training_block_size": drafter.config.block_size,
        "block_sizes": sizes,
        "dtype": str(target.dtype).removeprefix("torch."),
        "is_packed": any(isinstance(module, PackedLinear) for module in target.modules()),
        "max_new_tokens": max_new_tokens,
        "texts_fingerprint": _fingerprint(ordered),
        "temperatures": sorted({text.temperature for text in texts}),
        "keep_context": True,
        "keep_logits": keep_logits,
        "position_sizes": at,
    }

    def compute(unit: list[Text]) -> list[dict[str, Any]]:
        return _rows(target, drafter, unit, sizes, keep_logits=keep_logits, position_sizes=at)

    run_units(
        [ordered[i : i + _TEXTS_PER_UNIT] for i in range(0, len(ordered), _TEXTS_PER_UNIT)],
        compute,
        output,
        settings=settings,
        columns={**_COLUMNS, **(_LOGITS if keep_logits else {}), **(_POSITIONS if at else {})},
        description=f"units of {_TEXTS_PER_UNIT} texts",
        progress=progress,
    )
    return read_sweep(output)


def read_sweep(path: str | Path) -> Sweep:
    """
    A sweep from its folder.

    Raises:
        `ValueError`: if the folder holds none, or one that is not finished.
        `ImportError`: if `datasets` is not installed.
    """
    settings = read_settings(path)
    if "block_sizes" not in settings or not is_finished(path):
        raise ValueError(f"{path} holds no sweep. Name a folder that `blockpilot sweep` wrote.")
    rows = require_extra("datasets").load_from_disk(str(path))
    sizes = tuple(settings["block_sizes"])
    wanted = [name for name in SweepRow.__dataclass_fields__ if name in rows.column_names]
    # Older sweeps kept the positions of all sizes or of none.
    at = tuple(settings.get("position_sizes") or sizes)
    return Sweep([_row(entry, sizes, at) for entry in rows.select_columns(wanted)], sizes, settings)


def prefill_and_context(target: Any, drafter: Any, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What a prefill of the text's prompt shows a policy, and what the drafter reads of the whole text, by one pass.

    Returns:
        `tuple(torch.Tensor, torch.Tensor)`: logits `(1, vocab_size)` at the last prompt position, and states
        `(length, hidden_size * num_taps)`.
    """
    last = len(text.prompt_ids) - 1
    taps = [i + 1 for i in drafter.config.target_layer_ids]
    inputs: dict[str, Any] = {"input_ids": torch.tensor([text.ids], device=target.device)}
    is_selective = "logits_to_keep" in inspect.signature(target.forward).parameters
    if is_selective:
        inputs["logits_to_keep"] = torch.tensor([last], device=target.device)
    with torch.no_grad():
        outputs = target(**inputs, output_hidden_states=taps, use_cache=False)
    logits = outputs.logits[:, 0] if is_selective else outputs.logits[:, last]
    return logits, torch.cat([outputs.hidden_states[i] for i in taps], dim=-1)[0]


def _rows(
    target: Any, drafter: Any, texts: list[Text], sizes: list[int], *, keep_logits: bool, position_sizes: list[int]
) -> list[dict[str, Any]]:
    prefills: list[torch.Tensor] = []
    projected: list[torch.Tensor] = []
    replays: list[Replay] = []
    walked: list[dict[int, tuple[int, ...]]] = []

    def contexts() -> Iterator[torch.Tensor]:
        for text in texts:
            logits, context = prefill_and_context(target, drafter, text)
            prefills.append(logits.float())
            last = len(text.prompt_ids) - 1
            projected.append(projected_context(drafter, context[last : last + 1]))
            yield context

    if position_sizes:
        walked_sizes = [size for size in sizes if size not in position_sizes]
        kept = []
        for text, context in zip(texts, contexts(), strict=True):
            replays.append(replay(target, drafter, text, context, position_sizes, with_confidence=True))
            kept.append(context)
        walked = walk(target, drafter, texts, kept, walked_sizes) if walked_sizes else [{} for _ in texts]
        for of_text, found in zip(walked, replays, strict=True):
            of_text.update({size: tuple(found.steps(size)) for size in position_sizes})
    else:
        walked = walk(target, drafter, texts, contexts(), sizes)
    rows = []
    for i, text in enumerate(texts):
        features = policy_features(prefills[i], kind="compact", temperature=text.temperature)
        row = {
            "id": text.id,
            "prompt_id": text.prompt_id or text.id,
            "category": text.category,
            "temperature": text.temperature,
            "seed": text.seed,
            "prompt_hash": text.prompt_hash,
            "num_prompt_tokens": len(text.prompt_ids),
            "num_new_tokens": len(text.answer_ids),
            "num_accepted": [list(walked[i][size]) for size in sizes],
            "features": features[0].tolist(),
            "context": projected[i][0].tolist(),
        }
        if keep_logits:
            row["logits"] = policy_features(prefills[i], kind="logits")[0].tolist()
        if position_sizes:
            accepted = {1: [0] * (len(text.answer_ids) - 1), **replays[i].num_accepted}
            confidence = replays[i].confidence or {}
            row |= {"prompt_ids": list(text.prompt_ids), "answer_ids": list(text.answer_ids)}
            row["accepted_at"] = [accepted[size] for size in position_sizes]
            row["confidence_at"] = [confidence[size].flatten().tolist() if size > 1 else [] for size in position_sizes]
        rows.append(row)
    return rows


def _row(entry: dict[str, Any], sizes: tuple[int, ...], position_sizes: tuple[int, ...]) -> SweepRow:
    counts = zip(sizes, entry["num_accepted"], strict=True)
    optional = {name: entry.get(name) for name in ("context", "logits", "prompt_ids", "answer_ids")}
    return SweepRow(
        **{
            **entry,
            "num_accepted": {size: tuple(steps) for size, steps in counts},
            "features": tuple(entry["features"]),
            **{name: None if values is None else tuple(values) for name, values in optional.items()},
            **_by_position(entry, position_sizes),
        }
    )


def _by_position(entry: dict[str, Any], sizes: tuple[int, ...]) -> dict[str, Any]:
    if entry.get("confidence_at") is None:  # older sweeps kept accepted counts alone
        return {"accepted_at": None, "confidence_at": None}
    confidence = {}
    for size, values in zip(sizes, entry["confidence_at"], strict=True):
        per_anchor = size - 1
        confidence[size] = tuple(
            tuple(values[i : i + per_anchor]) for i in range(0, len(values), per_anchor or len(values) or 1)
        )
    accepted = zip(sizes, entry["accepted_at"], strict=True)
    return {"accepted_at": {size: tuple(counts) for size, counts in accepted}, "confidence_at": confidence}


def _fingerprint(texts: Sequence[Text]) -> str:
    """16 hex digits over ids, tokens and sampling settings."""
    entries = [
        [text.id, text.prompt_id, text.prompt_ids, text.answer_ids, text.temperature, text.seed, text.category]
        for text in texts
    ]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def _name_of(model: Any) -> str:
    """Without the folders above it: they are others on every machine."""
    return str(model.config._name_or_path).rstrip("/").rpartition("/")[2]


__all__ = ["Sweep", "SweepRow", "prefill_and_context", "read_sweep", "write_sweep"]

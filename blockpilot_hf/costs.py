"""Seconds of a drafting and of a verifying pass by width, for one target, drafter, device, dtype and thread count.

A table is measured once and stored; decisions and labels read it, never a clock. It speaks of the machine that it was
measured on and says which.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from .candidate_generator import BlockPilotCandidateGenerator
from .json_lines import write_json


@dataclass(frozen=True)
class CostTable:
    """
    Args:
        verify_s (`dict[int, float]`): Seconds of a target pass by width; width 1 is a step of plain decoding.
        draft_s (`dict[int, float]`): Seconds of drafting a block, by block size above 1.
        context_length (`int`): Tokens before the block when it was measured.
        measured_on (`dict[str, Any]`): Target, drafter, device, dtype, threads and versions.
    """

    verify_s: dict[int, float]
    draft_s: dict[int, float]
    context_length: int
    measured_on: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if 1 not in self.verify_s or any(size not in self.verify_s for size in self.draft_s):
            raise ValueError(
                f"A cost table needs the target's seconds at width 1 and at every drafted size, got widths "
                f"{sorted(self.verify_s)} and drafted sizes {sorted(self.draft_s)}. Measure it again."
            )
        if not all(seconds > 0 for seconds in (*self.verify_s.values(), *self.draft_s.values())):
            raise ValueError("Seconds in a cost table must be above 0. Measure it again.")

    @property
    def block_sizes(self) -> list[int]:
        """Sizes that a step can be priced at."""
        return [1, *sorted(self.draft_s)]

    def step_s(self, block_size: int) -> float:
        """Seconds of a step at `block_size`: drafting and verifying, or one plain pass."""
        return self.verify_s[1] if block_size == 1 else self.draft_s[block_size] + self.verify_s[block_size]

    def speedup(self, block_size: int, acceptance_length: float) -> float:
        """Tokens per second at `block_size` over those of plain decoding, prefill aside."""
        return acceptance_length * self.verify_s[1] / self.step_s(block_size)

    def save(self, path: Path) -> None:
        """Under its name only when whole."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "CostTable":
        """
        Raises:
            `ValueError`: if the file is no cost table.
        """
        try:
            entry = json.loads(Path(path).read_text(encoding="utf-8"))
            seconds = {
                name: {int(width): float(s) for width, s in entry[name].items()} for name in ("verify_s", "draft_s")
            }
            return cls(**seconds, context_length=entry["context_length"], measured_on=entry.get("measured_on", {}))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a cost table ({error!r}). Leave it out to measure one.") from error


_STEPS_IN_A_ROW = 4


@torch.no_grad()
def measure_costs(
    target: Any, drafter: Any, block_sizes: Sequence[int], *, context_length: int = 256, repeats: int = 6
) -> CostTable:
    """
    Time both passes at every block size in short runs of steps, sizes in turn, and take medians.

    Args:
        block_sizes (`Sequence[int]`): Candidates; 1 is always measured.
        context_length (`int`, *optional*, defaults to 256): Tokens before the block.
        repeats (`int`, *optional*, defaults to 6): Rounds over all sizes, of four timed steps each.
    """
    sizes = sorted({1, *block_sizes})
    vocab_size, length = target.get_input_embeddings().weight.shape[0], context_length + max(sizes)
    ids = torch.randint(0, vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(target.device)
    taps = [i + 1 for i in drafter.config.target_layer_ids]
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    states = target(
        input_ids=ids[:, :context_length], cache=cache, output_hidden_states=taps, logits_to_keep=1
    ).hidden_states
    cache.activate_past_recording()
    seconds: dict[tuple[str, int], list[float]] = {}

    def timed(key: tuple[str, int] | None, call: Callable[..., Any], **kwargs: Any) -> None:
        _synchronize(target.device)
        start = time.perf_counter()
        call(**kwargs)
        _synchronize(target.device)
        if key is not None:
            seconds.setdefault(key, []).append(time.perf_counter() - start)

    for _ in range(repeats):
        for size in sizes:
            block = ids[:, context_length : context_length + size]
            more = {"output_hidden_states": taps} if size > 1 else {}
            generator = BlockPilotCandidateGenerator(
                drafter, target, target.generation_config, policy=None, block_size=size
            )
            generator.observe(states, context_length - 2)
            # As in the midst of an answer: steps of one size follow each other, with two new tokens of context each.
            # The first one takes in the whole context and is not timed.
            for step in range(_STEPS_IN_A_ROW + 1):
                if size > 1:
                    timed(("draft", size) if step else None, generator.draft_block, anchor_ids=ids[:, :1])
                    generator.observe(states, 2)
                timed(("verify", size) if step else None, target, input_ids=block, cache=cache, **more)
                cache.crop(-size)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    return CostTable(
        verify_s={size: median["verify", size] for size in sizes},
        draft_s={size: median["draft", size] for size in sizes if size > 1},
        context_length=context_length,
        measured_on={
            "target": target.config._name_or_path,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type,
            "num_threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "num_repeats": repeats,
        },
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = ["CostTable", "measure_costs"]

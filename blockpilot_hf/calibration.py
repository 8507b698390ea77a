"""Measuring a cost table: both passes by width and context length, for one pair as it runs here.

Widths take turns, inputs are the same for all, and what is kept are medians, fitted so that they rise. Nothing here
runs unless it is asked for: decoding reads kept tables only.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import DynamicCache

from .candidate_generator import BlockPilotCandidateGenerator, position_limits
from .costs import CostTable, costs_key, kept_costs_path
from .default_costs import LARGEST_DEFAULT_SIZE, kept_costs

DEFAULT_CONTEXT_LENGTHS = (64, 512)
DEFAULT_SECONDS = 10.0

Progress = Callable[[Sequence[Any], str], Iterator[Any]]

# Steps of one width follow each other, as in the midst of an answer.
_STEPS_IN_A_ROW = 2
_NEW_TOKENS = 2  # of context that a draft takes in
_MAX_ROUNDS = 12


def default_block_sizes(drafter: Any) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to the larger of 16 and the block size that the drafter was trained for."""
    largest = max(LARGEST_DEFAULT_SIZE, int(drafter.config.block_size))
    steps = sorted(size << i for i in range(largest.bit_length()) for size in (2, 3))
    return [1, *(size for size in steps if size < largest), largest]


def calibrate(
    target: Any,
    drafter: Any,
    block_sizes: Sequence[int] | None = None,
    *,
    context_lengths: Sequence[int] | None = None,
    seconds: float = DEFAULT_SECONDS,
    force: bool = False,
    progress: Progress | None = None,
) -> tuple[CostTable, bool]:
    """
    The kept table of this pair and machine; measured and kept where there is none, or none with these block sizes and
    context lengths. What the kept one has is measured along, so that no call takes from another what it asked for.

    Args:
        force (`bool`, *optional*, defaults to `False`): Measure anew whatever is kept.

    Returns:
        `tuple[CostTable, bool]`: the table, and whether it was measured now.
    """
    key = costs_key(target, drafter)
    kept = kept_costs(key)
    sizes = set(block_sizes or ()) | {1}
    lengths = set(_within_limits(target, drafter, context_lengths, max(sizes)) if context_lengths else ())
    if kept is not None:
        if not force and kept.covers(sizes, lengths):
            return kept, False
        sizes, lengths = sizes | {*kept.verify_s}, lengths | {*kept.context_lengths}
    elif block_sizes is None:
        sizes = set(default_block_sizes(drafter))
    table = measure_costs(
        target,
        drafter,
        sorted(sizes),
        context_lengths=sorted(lengths) or DEFAULT_CONTEXT_LENGTHS,
        seconds=seconds,
        progress=progress,
    )
    table.save(kept_costs_path(key))
    return table, True


@torch.no_grad()
def measure_costs(
    target: Any,
    drafter: Any,
    block_sizes: Sequence[int] | None = None,
    *,
    context_lengths: Sequence[int] = DEFAULT_CONTEXT_LENGTHS,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress | None = None,
) -> CostTable:
    """
    Time both passes at every block size and context length: after a warm-up of each, in rounds over all of them, two
    steps of each in a row, as many rounds as fit into the time, and at least one.

    Args:
        block_sizes (`Sequence[int]`, *optional*): 1 is always measured; by default [`default_block_sizes`].
        context_lengths (`Sequence[int]`, *optional*, defaults to `(64, 512)`):
            Tokens before the block, cut to what fits before the position limits of both models.
        seconds (`float`, *optional*, defaults to 10.0): About how long the rounds may take in all.
        progress (`Callable`, *optional*): Called with the items of a stage and its name, iterates over them.

    Returns:
        [`CostTable`]: fitted ([`rising`]), with the medians themselves in `measured`.
    """
    sizes = sorted({1, *(block_sizes or default_block_sizes(drafter))})
    lengths = _within_limits(target, drafter, context_lengths, max(sizes))
    progress = progress or (lambda items, name: iter(items))
    started = time.perf_counter()
    bench = _Bench(target, drafter, max(lengths) + max(sizes))
    # Neighbours in time are what is compared: lengths of one width, then widths. Every other round runs backwards, so
    # that a machine that becomes slower or quicker favours none.
    cells = [(length, size) for size in sizes for length in lengths]
    for length, size in progress(cells, "warm-up"):
        bench.run(length, size, steps=1)
    bench.samples.clear()
    warmed = time.perf_counter()
    for length, size in progress(cells, "first round"):
        bench.run(length, size, steps=_STEPS_IN_A_ROW)
    round_s = time.perf_counter() - warmed
    left = seconds - (time.perf_counter() - started)
    rounds = min(max(int(left / round_s), 0), _MAX_ROUNDS - 1)
    if rounds:
        plan = [cell for number in range(rounds) for cell in (cells if number % 2 else cells[::-1])]
        for length, size in progress(plan, "more rounds"):
            bench.run(length, size, steps=_STEPS_IN_A_ROW)

    def medians(kind: str, size: int) -> list[float]:
        return [statistics.median(bench.samples[kind, length, size]) for length in lengths]

    verify = {size: medians("verify", size) for size in sizes}
    draft = {size: medians("draft", size) for size in sizes if size > 1}
    key = costs_key(target, drafter)
    on_threads = f", {key['num_threads']} thread{'s' * (key['num_threads'] > 1)}" if key["num_threads"] else ""
    return CostTable(
        context_lengths=tuple(lengths),
        verify_s=_fitted(verify),
        draft_s=_fitted(draft),
        key=key,
        source=f"measured in {key['dtype']} on {key['device']}{on_threads}",
        measured={
            "target": _name_of(target),
            "drafter": _name_of(drafter),
            "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "num_samples": (rounds + 1) * _STEPS_IN_A_ROW,
            "verify_s": {str(size): row for size, row in verify.items()},
            "draft_s": {str(size): row for size, row in draft.items()},
            # What keeping the drafter's layers adds to a plain pass, as where a later block is to start from them.
            "plain_with_layers_s": medians("plain with layers", 1),
        },
    )


class _Bench:
    """The pair with a text before it, and what its passes took: seconds by kind, context length and width."""

    def __init__(self, target: Any, drafter: Any, num_tokens: int):
        self.samples: dict[tuple[str, int, int], list[float]] = {}
        self._target, self._drafter = target, drafter
        vocab_size = target.get_input_embeddings().weight.shape[0]
        ids = torch.randint(0, vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
        self._ids = ids.to(target.device)
        self._taps = {"output_hidden_states": [i + 1 for i in drafter.config.target_layer_ids]}
        self._contexts: dict[int, tuple[Any, Any]] = {}
        self._generators: dict[tuple[int, int], BlockPilotCandidateGenerator] = {}

    def run(self, length: int, size: int, *, steps: int) -> None:
        """Steps of one width after `length` tokens, each timed. The first of all takes in the whole context."""
        cache, states = self._context(length)
        block = self._ids[:, length : length + size]
        generator = self._generator(length, size, states) if size > 1 else None
        for _ in range(steps):
            if generator is None:
                self._timed(("plain with layers", length, 1), self._target, input_ids=block, cache=cache, **self._taps)
                cache.crop(-1)
                self._timed(("verify", length, 1), self._target, input_ids=block, cache=cache)
            else:
                self._timed(("draft", length, size), generator.draft_block, anchor_ids=self._ids[:, :1])
                generator.observe(states, _NEW_TOKENS)
                self._timed(("verify", length, size), self._target, input_ids=block, cache=cache, **self._taps)
            cache.crop(-size)

    def _context(self, length: int) -> tuple[Any, Any]:
        """The target's cache and states of the first `length` tokens."""
        if length not in self._contexts:
            cache = DynamicCache(config=self._target.config.get_text_config(decoder=True))
            states = self._target(
                input_ids=self._ids[:, :length], cache=cache, logits_to_keep=1, **self._taps
            ).hidden_states
            cache.activate_past_recording()
            self._contexts[length] = cache, states
        return self._contexts[length]

    def _generator(self, length: int, size: int, states: Any) -> BlockPilotCandidateGenerator:
        if (length, size) not in self._generators:
            trained = int(self._drafter.config.block_size)
            generator = BlockPilotCandidateGenerator(
                self._drafter, self._target, self._target.generation_config, block_size=min(size, trained)
            )
            generator.block_size = size  # set here: larger ones than in training are measured without a warning
            generator.observe(states, length)
            self._generators[length, size] = generator
        return self._generators[length, size]

    def _timed(self, key: tuple[str, int, int], call: Callable[..., Any], **kwargs: Any) -> None:
        self._synchronize()
        start = time.perf_counter()
        call(**kwargs)
        self._synchronize()
        self.samples.setdefault(key, []).append(time.perf_counter() - start)

    def _synchronize(self) -> None:
        for device in {self._target.device, self._drafter.device}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)


def rising(values: Iterable[float]) -> list[float]:
    """
    The closest values, by squares, that never fall: neighbours that do are replaced by their mean (pool adjacent
    violators).
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (right, more), (left, count) = pools.pop(), pools.pop()
            pools.append(((left * count + right * more) / (count + more), count + more))
    return [mean for mean, count in pools for _ in range(count)]


def _fitted(rows: dict[int, list[float]]) -> dict[int, tuple[float, ...]]:
    """
    Seconds that fall neither with the width nor with the context. What each stretch of context adds rises with the
    width as well, so that wide passes stay the dearer ones beyond the longest context, where the last slope goes on.
    """
    if not rows:
        return {}
    columns = list(zip(*rows.values(), strict=True))
    added = [[longer - shorter for shorter, longer in zip(*two, strict=True)] for two in pairwise(columns)]
    parts = [rising(columns[0]), *([max(0.0, s) for s in rising(column)] for column in added)]
    return {size: tuple(accumulate(parts_of)) for size, parts_of in zip(rows, zip(*parts, strict=True), strict=True)}


def _within_limits(target: Any, drafter: Any, lengths: Iterable[int], largest: int) -> list[int]:
    """Context lengths, cut so that all blocks fit before the position limits."""
    grown = _NEW_TOKENS * _STEPS_IN_A_ROW * (_MAX_ROUNDS + 1)  # of the drafter's context, over all rounds
    limits = [boundary - largest for boundary, _ in position_limits(target)]
    if own := getattr(drafter.config, "max_position_embeddings", None):
        limits.append(own - largest - grown)
    room = min(limits, default=None)
    if room is not None and room < _NEW_TOKENS:
        raise ValueError(
            f"A block of {largest} does not fit before the position limits of target and drafter. Measure smaller ones."
        )
    return sorted({max(_NEW_TOKENS, length if room is None else min(length, room)) for length in lengths})


def _name_of(model: Any) -> str:
    """Without the folders above it: they are others on every machine."""
    named = str(getattr(model.config, "_name_or_path", None) or type(model).__name__)
    return named.rstrip("/").rpartition("/")[2]


__all__ = [
    "DEFAULT_CONTEXT_LENGTHS",
    "DEFAULT_SECONDS",
    "calibrate",
    "default_block_sizes",
    "measure_costs",
    "rising",
]

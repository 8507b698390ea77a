"""The one decode loop: prefill, choose, then draft, verify, commit. Every caller goes through `Decoding`.

A `Decoding` is one row of one call. It is prepared by `model.generate`, which hands over processors, criteria and model
keywords as for its own decoding methods, and it knows nothing of streaming, batches or output formats.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import logging

from .candidate_generator import BlockPilotCandidateGenerator
from .checks import check_croppable, check_user_cache
from .trace import DecodeTrace, StepRecord
from .verification import Verified, verify_block

logger = logging.get_logger(__name__)

# A drafter for this target has something accepted long before; one for another target never has.
_MANY_STEPS = 32


class Decoding:
    """
    One row being decoded: call [`prefill`], then iterate over [`steps`].

    Args:
        model (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): The prompt, padding included.
        generator (`BlockPilotCandidateGenerator`): The draft side, fresh.
        logits_processor, stopping_criteria, generation_config: As `generate` prepares them for `_sample`.
        model_kwargs (`dict`): As `generate` prepares them, with an empty `cache`.
        row (`int`): Row of the batch, for the records.
        time_steps (`bool`, *optional*): Measure single steps; by default only where that needs no synchronisation.

    Attributes (as they grow):
        input_ids, scores, logits, hidden_states, attentions, cache: What plain `generate` returns for this row.
        trace (`DecodeTrace`): The record of the call.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.LongTensor,
        generator: BlockPilotCandidateGenerator,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        row: int = 0,
        time_steps: bool | None = None,
    ):
        config = generation_config
        returns_dict = config.return_dict_in_generate
        self.model = model
        self.input_ids = input_ids
        self.generator = generator
        self.stopped = False
        self.trace = DecodeTrace()
        self.cache: Any = None
        self.scores: tuple[torch.Tensor, ...] | None = () if returns_dict and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if returns_dict and config.output_logits else None
        self.hidden_states: tuple | None = () if returns_dict and config.output_hidden_states else None
        self.attentions: tuple | None = () if returns_dict and config.output_attentions else None
        self._logits_processor = logits_processor
        self._stopping_criteria = stopping_criteria
        self._config = config
        self._model_kwargs = dict(model_kwargs)
        self._row = row
        self._synchronises = model.device.type != "cpu"
        self._times_steps = not self._synchronises if time_steps is None else time_steps

    def prefill(self) -> torch.LongTensor:
        """
        Pass the prompt through the target, emit its first token, and choose the block size.

        Returns:
            `torch.LongTensor` of shape `(1, 1)`: the first new token.
        """
        start = time.perf_counter()
        inputs = self.model.prepare_inputs_for_generation(self.input_ids, is_first_iteration=True, **self._model_kwargs)
        outputs = self.model(**{**inputs, **self._capture()}, return_dict=True)
        self.cache = getattr(outputs, "cache", None)
        if self.generator.needs_context or self.cache is None:
            check_croppable(self.model, self.cache)
        verified = self._verify(None, outputs.logits[:, -1:])
        prefilled = time.perf_counter()
        self.trace.prefill_s = prefilled - start

        self.trace.block_size = self.generator.choose(
            outputs.logits[:, -1], outputs.hidden_states, self.input_ids.shape[1]
        )
        self.trace.scores, self.trace.reason = self.generator.scores, self.generator.reason
        self.trace.adapt = self.generator.adapt
        self.trace.costs = "" if self.generator.costs is None else self.generator.costs.source
        self.trace.policy_s = time.perf_counter() - prefilled
        mask = self._model_kwargs.get("attention_mask")
        self.generator.observe(outputs.hidden_states, self.input_ids.shape[1] if mask is None else mask[0].bool())
        positions = self._model_kwargs.get("position_ids")
        if positions is not None:
            self.generator.locate_anchor(int(positions[..., -1].max()) + 1)
        if self.generator.needs_context:
            # Only now: while recording, sliding layers would keep every state of a long prompt.
            self.cache.activate_past_recording()
        self._keep_states(outputs, self.input_ids.shape[1], is_prefill=True)
        self._append(verified)
        return verified.token_ids

    def steps(self) -> Iterator[StepRecord]:
        """Draft, verify and commit until a stopping criterion fires; yields a record per verification step."""
        while not self.stopped:
            start = time.perf_counter()
            record = self._step()
            self.trace.steps.append(record)
            self.trace.decode_s += time.perf_counter() - start
            yield record

    def warn_if_useless(self) -> None:
        """Say so, once in a process, if a drafter had many chances and not one of its tokens was accepted."""
        drafting = [step for step in self.trace.steps if step.source == "drafter"]
        if len(drafting) >= _MANY_STEPS and not any(step.num_accepted for step in drafting):
            logger.warning_once(
                f"No drafted token was accepted in {len(drafting)} steps. The output is right, but drafting only costs "
                "time: check that the drafter was trained for this target."
            )

    def _step(self) -> StepRecord:
        generator = self.generator
        start = self._now()
        width, reason = generator.plan(self._config.max_length - self.input_ids.shape[1], self.input_ids)
        draft = generator.draft_block(self.input_ids[:, -1:]) if width > 1 else None
        block = self.input_ids
        if draft is not None:
            width, reason = generator.trim(draft, width, reason)
            block = torch.cat([block, draft.token_ids[:, : width - 1].to(block.device)], dim=-1)
        drafted = self._now()
        inputs = self.model.prepare_inputs_for_generation(
            block, next_sequence_length=width, **extend_inputs(self._model_kwargs, width - 1)
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        outputs = self.model(**{**inputs, **self._capture()}, return_dict=True)
        verified = self._verify(draft, outputs.logits[:, -width:])
        kept = verified.token_ids.shape[1]
        # The cache keeps the anchor and the accepted tokens; the last committed token is the next anchor.
        self.cache = outputs.cache
        if generator.needs_context:
            commit(self.cache, kept, width)
        verified_at = self._now()
        if generator.needs_context:
            generator.observe(tuple(h if h is None else h[:, -width:] for h in outputs.hidden_states), kept)
        generator.learn(width, kept - 1, was_drafted=draft is not None)
        self._keep_states(outputs, kept, is_prefill=False)
        self._append(verified)
        return StepRecord(
            block_size=generator.block_size,
            verify_width=width,
            draft_ids=() if draft is None else tuple(draft.token_ids[0].tolist()),
            committed_ids=tuple(verified.token_ids[0].tolist()),
            num_accepted=kept - 1,
            row=self._row,
            draft_s=drafted - start if self._times_steps else None,
            verify_s=verified_at - drafted if self._times_steps else None,
            reason=reason,
            source=generator.source,
        )

    def _verify(self, draft, logits: torch.Tensor) -> Verified:
        return verify_block(
            draft,
            logits,
            self.input_ids,
            logits_processor=self._logits_processor,
            stopping_criteria=self._stopping_criteria,
            do_sample=bool(self._config.do_sample),
            past_scores=self.scores,
            keep_logits=self.logits is not None,
        )

    def _append(self, verified: Verified) -> None:
        num_new = verified.token_ids.shape[1]
        self.input_ids = torch.cat([self.input_ids, verified.token_ids], dim=-1)
        self._model_kwargs = {**extend_inputs(self._model_kwargs, num_new), "cache": self.cache}
        self.trace.num_new_tokens += num_new
        self.stopped = verified.stopped
        self.scores = verified.scores
        if self.logits is not None:
            self.logits += verified.logits

    def _capture(self) -> dict[str, Any]:
        """All layers when the user wants hidden states too, else only the drafter's."""
        return {} if self._config.output_hidden_states else self.generator.model_kwargs_overrides

    def _keep_states(self, outputs: Any, kept: int, *, is_prefill: bool) -> None:
        """Hidden states and attentions as plain `generate` returns them: one entry per emitted token."""
        if self.hidden_states is not None:
            states = outputs.hidden_states
            if is_prefill:
                self.hidden_states += (states,)
            else:
                self.hidden_states += tuple(tuple(h[:, j : j + 1] for h in states) for j in range(kept))
        if self.attentions is not None:
            if is_prefill:
                self.attentions += (outputs.attentions,)
            else:
                layers = _attention_layers(self.cache, len(outputs.attentions), self.model.config)
                self.attentions += tuple(
                    tuple(_query_row(a, j, layer) for a, layer in zip(outputs.attentions, layers, strict=True))
                    for j in range(kept)
                )

    def _now(self) -> float:
        if self._times_steps and self._synchronises:
            torch.accelerator.synchronize(self.model.device)
        return time.perf_counter()


def commit(cache: Any, kept: int, width: int) -> None:
    """
    Leave `kept` of the last `width` positions in the target's cache. Nothing else touches the cache after a step.

    Also called when all are kept: cropping by 0 is what shrinks sliding layers back to their window.
    """
    cache.crop(kept - width)


def reset_user_cache(input_ids: torch.LongTensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """A filled cache holds no states for the drafter: its tokens go through the target again, into the same cache."""
    cache, mask = model_kwargs["cache"], model_kwargs.get("attention_mask")
    if cache.get_seq_length() == 0:
        return
    # `generate` drops a mask of ones and notes its length.
    mask_length = getattr(config, "_mask_length", None) if mask is None else mask.shape[1]
    check_user_cache(cache, input_ids.shape[1], mask_length)
    logger.warning_once("The tokens in the passed cache are computed again: the drafter needs their hidden states.")
    cache.reset()


def extend_inputs(model_kwargs: dict[str, Any], num_new: int) -> dict[str, Any]:
    """
    The model keywords for `num_new` more tokens, in a new dict: mask, positions and token types go on as they ended.

    Args:
        model_kwargs (`dict`):
            `attention_mask` `(1, length)`, `position_ids` `(..., 1, length)`, token types `(1, length)`.
        num_new (`int`): How many tokens follow.
    """
    extended = dict(model_kwargs)
    if num_new == 0:
        return extended
    mask, positions = extended.get("attention_mask"), extended.get("position_ids")
    if mask is not None:
        extended["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], num_new)], dim=-1)
    if positions is not None:
        ahead = torch.arange(1, num_new + 1, dtype=positions.dtype, device=positions.device)
        extended["position_ids"] = torch.cat([positions, positions[..., -1:] + ahead], dim=-1)
    types = extended.get("token_type_ids")
    if types is not None:
        extended["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, num_new)], dim=-1)
    types = extended.get("mm_token_type_ids")
    if types is not None:  # generated tokens are text
        extended["mm_token_type_ids"] = torch.cat([types, types.new_zeros(types.shape[0], num_new)], dim=-1)
    return extended


def _attention_layers(cache: Any, num_attentions: int, config: Any) -> list[Any]:
    """The cache's layer for each attention returned. Some kernels return none, some caches hold layers never used."""
    layers = [layer for layer in cache.layers if hasattr(layer, "is_sliding")]  # others hold no keys
    if num_attentions > len(layers):
        # Target layers may share keys and values; then one of their own type tells how far they look back.
        types = config.get_text_config(decoder=True).layer_types
        of_type = dict(zip(types, layers, strict=False))
        layers = [of_type[kind] for kind in types]
    return layers[:num_attentions]


def _query_row(attention: torch.Tensor, j: int, layer: Any) -> torch.Tensor:
    """
    Attention of block position `j` `(1, heads, 1, keys)` over the keys that a pass of it alone would have had: none of
    later positions, in sliding layers none from before its window, in static layers all that were allocated.
    """
    row, width = attention[:, :, j : j + 1], attention.shape[2]
    if width == 1 or layer.is_compileable:
        return row
    row = row[..., : attention.shape[3] - (width - 1 - j)]
    return row[..., -layer.sliding_window :] if layer.is_sliding else row

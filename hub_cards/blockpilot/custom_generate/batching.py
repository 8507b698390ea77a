"""Rows of a batch: split what `generate` prepared into rows, and join what the rows gave into one output.

Rows are decoded one after the other for now, because they accept different numbers of tokens.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
)
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.utils import logging

from .trace import DecodeTrace

logger = logging.get_logger(__name__)

_HOLD_ROWS = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)


@dataclass
class BlockPilotOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the record of how it was decoded in `blockpilot`."""

    blockpilot: DecodeTrace | None = None


@dataclass
class RowInputs:
    """What one row is decoded from; shapes are those of a batch of one."""

    index: int
    input_ids: torch.LongTensor
    model_kwargs: dict[str, Any]
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList


def split_rows(
    input_ids: torch.LongTensor,
    model_kwargs: dict[str, Any],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
) -> Iterator[RowInputs]:
    """Row after row, each with an empty cache; a single row is passed through as it is."""
    num_rows = input_ids.shape[0]
    if num_rows == 1:
        yield RowInputs(0, input_ids, model_kwargs, logits_processor, stopping_criteria)
        return
    _check_padding(stopping_criteria)
    logger.warning_once(
        f"A batch is decoded row by row (got {num_rows} rows): correct, but not faster than single calls."
    )
    for index in range(num_rows):
        # One cache for all rows, emptied in between: only one row's states are held at a time.
        model_kwargs["cache"].reset()
        of_row = {key: _row_of(key, value, index, num_rows) for key, value in model_kwargs.items()}
        processors = LogitsProcessorList(
            _processor_of_row(processor, index, num_rows) for processor in logits_processor
        )
        yield RowInputs(index, input_ids[index : index + 1], of_row, processors, stopping_criteria)


def _check_padding(stopping_criteria: StoppingCriteriaList) -> None:
    """`generate` pads a finished row only where there is an end token; without one, it runs on until all are done."""
    own = [type(c).__name__ for c in stopping_criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    if own and not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
        raise ValueError(
            f"Without an end token, a row that {own} end runs on in plain `generate` until all rows are done, which "
            "cannot be decoded row by row. Pass `eos_token_id=`, or one row at a time."
        )


def _row_of(key: str, value: Any, index: int, num_rows: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    batch_dim = 1 if key == "position_ids" and value.ndim == 3 else 0
    # Positions of a batch without padding are shared by all rows.
    return value.narrow(batch_dim, index, 1) if value.shape[batch_dim] == num_rows else value


def _processor_of_row(processor: Any, index: int, num_rows: int) -> Any:
    """
    The processors of transformers that hold something for every row of the batch get the row's own, and those that keep
    a state start anew with each row. What the user passed stays the one object that it is.
    """
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(index, ids), num_beams=1)
    if not isinstance(processor, _HOLD_ROWS):
        return processor
    processor = copy.copy(processor)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        if isinstance(processor.prompt_ignore_length, torch.Tensor):
            processor.prompt_ignore_length = processor.prompt_ignore_length[index : index + 1]
    elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        # These two know the prompts, of which `num_return_sequences` rows share one.
        prompt = index * processor.encoder_input_ids.shape[0] // num_rows
        processor.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        prompt = index * processor.batch_size // num_rows
        processor.generated_ngrams, processor.batch_size = processor.generated_ngrams[prompt : prompt + 1], 1
    return processor


def collect(decodings: Sequence[Any], generation_config: GenerationConfig) -> "torch.LongTensor | BlockPilotOutput":
    """
    What `generate` returns, from finished rows ([`Decoding`]).

    Sequences are padded on the right with the pad token; scores, logits, hidden states and attentions of tokens after a
    row's end are zeros. The cache is returned for a single row only.
    """
    pad_token = generation_config._pad_token_tensor
    sequences = _pad_ids([d.input_ids for d in decodings], 0 if pad_token is None else int(pad_token))
    if not generation_config.return_dict_in_generate:
        return sequences
    return BlockPilotOutput(
        sequences=sequences,
        scores=_join([d.scores for d in decodings]),
        logits=_join([d.logits for d in decodings]),
        attentions=_join([d.attentions for d in decodings]),
        hidden_states=_join([d.hidden_states for d in decodings]),
        cache=decodings[0].cache if len(decodings) == 1 else None,
        blockpilot=DecodeTrace.of_rows([d.trace for d in decodings]),
    )


def _pad_ids(rows: Sequence[torch.LongTensor], pad_token_id: int) -> torch.LongTensor:
    length = max(row.shape[1] for row in rows)
    padded = [torch.nn.functional.pad(row, (0, length - row.shape[1]), value=pad_token_id) for row in rows]
    return torch.cat(padded, dim=0)


def _join(rows: Sequence[Any]) -> Any:
    """Equally nested tuples of tensors `(1, ...)` as one nesting of `(rows, ...)`, with zeros where a row ended."""
    if len(rows) == 1 or all(row is None for row in rows):
        return rows[0]
    longest = max(rows, key=lambda row: len(row) if isinstance(row, tuple) else 0)
    if isinstance(longest, tuple):
        return tuple(
            _join([row[i] if isinstance(row, tuple) and i < len(row) else _zeros_like(longest[i]) for row in rows])
            for i in range(len(longest))
        )
    return torch.cat(list(rows), dim=0)


def _zeros_like(value: Any) -> Any:
    return tuple(_zeros_like(v) for v in value) if isinstance(value, tuple) else torch.zeros_like(value)

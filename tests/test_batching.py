"""Several rows: each gets what it would get alone, and the joined output has the form that `generate` gives a batch."""

import logging

import pytest
import torch
from conftest import make_drafter, make_prompt, make_target, pilot_generate, plain_generate
from transformers import LogitsProcessor, StoppingCriteria, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from blockpilot_hf import BlockPilot, batching

DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
LENGTHS = (4, 11, 7)


def make_batch(lengths=LENGTHS):
    """Left-padded rows `(rows, longest)`, their mask, and the rows alone."""
    rows = [make_prompt(length, seed=length) for length in lengths]
    longest = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])
    return ids, mask, rows


@pytest.fixture
def messages():
    """What `batching` logs, as in a process that has not said anything yet."""
    kept = []

    class Keep(logging.Handler):
        def emit(self, record):
            kept.append(record.getMessage())

    logger, handler = batching.logger, Keep()
    type(logger).warning_once.cache_clear()
    logger.addHandler(handler)
    yield kept
    logger.removeHandler(handler)


@pytest.mark.parametrize("eos", [None, "of the first row"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
def test_rows_get_their_own_answers_padded_as_generate_pads(kind, eos):
    target = make_target(kind)
    pilot = BlockPilot(make_drafter(target))
    ids, mask, rows = make_batch()
    if eos is not None:  # a token that the first row emits, so that it ends before the others
        eos = [int(plain_generate(target, rows[0], max_new_tokens=4)[0, -1])]
    kwargs = {"max_new_tokens": 14, "eos_token_id": eos, "pad_token_id": 0}
    plain = plain_generate(target, ids, attention_mask=mask, **kwargs)
    ours = pilot_generate(pilot, target, ids, attention_mask=mask, **kwargs)
    assert torch.equal(ours, plain)
    for row, answer in zip(rows, ours, strict=True):
        alone = plain_generate(target, row, **kwargs)[0, row.shape[1] :]
        assert answer[ids.shape[1] :][: len(alone)].tolist() == alone.tolist()
        assert not answer[ids.shape[1] :][len(alone) :].any()
    assert eos is None or not ours[0, -1]


def test_a_batch_without_a_mask_takes_padding_from_the_pad_token_as_generate_does(target, drafter):
    ids, _, _ = make_batch()
    plain = plain_generate(target, ids, max_new_tokens=9)
    assert torch.equal(pilot_generate(BlockPilot(drafter), target, ids, max_new_tokens=9), plain)
    same_length = make_prompt(6, rows=3)
    plain = plain_generate(target, same_length, max_new_tokens=9)
    assert torch.equal(pilot_generate(BlockPilot(drafter), target, same_length, max_new_tokens=9), plain)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 2.0, "repetition_penalty": 1.3},
        {
            "watermarking_config": SynthIDTextWatermarkingConfig(
                keys=[654, 400, 836], ngram_len=3, context_history_size=16
            )
        },
    ],
    ids=lambda options: next(iter(options), "none"),
)
def test_num_return_sequences_gives_as_many_rows(target, drafter, options):
    pilot = BlockPilot(drafter)
    ids = make_prompt(6, rows=2)
    out = pilot_generate(
        pilot, target, ids, do_sample=True, num_return_sequences=3, max_new_tokens=10, **options, **DICT
    )
    assert out.sequences.shape == (6, 16) and len(out.blockpilot.rows) == 6
    assert torch.equal(out.sequences[:, :6], ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in out.sequences[:3].tolist()}) > 1
    # Rows are drawn one after the other from the one random stream.
    torch.manual_seed(0)
    rows = [ids[i // 3 : i // 3 + 1] for i in range(6)]
    alone = [type(target).generate(target, row, do_sample=True, max_new_tokens=10, **options) for row in rows]
    assert torch.equal(out.sequences, torch.cat(alone))


def test_more_greedy_return_sequences_are_refused_as_by_generate(target, drafter):
    ids = make_prompt(6)
    with pytest.raises(ValueError) as plain:
        plain_generate(target, ids, num_return_sequences=2, max_new_tokens=4)
    with pytest.raises(ValueError) as ours:
        pilot_generate(BlockPilot(drafter), target, ids, num_return_sequences=2, max_new_tokens=4)
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("eos", [None, list(range(3, 64, 9))])
def test_scores_logits_states_and_attentions_are_joined_as_plain_gives_them(eos):
    target = make_target(attn_implementation="eager")
    ids, mask, _ = make_batch()
    kwargs = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "eos_token_id": eos,
        "output_hidden_states": True,
        "output_attentions": True,
        **DICT,
    }
    plain = plain_generate(target, ids, **kwargs)
    ours = pilot_generate(BlockPilot(make_drafter(target)), target, ids, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    ends = [row.num_new_tokens for row in ours.blockpilot.rows]
    assert len(ours.scores) == len(plain.scores) == max(ends)
    assert (eos is None) == (min(ends) == 8)
    for step in range(max(ends)):
        live = [row for row, end in enumerate(ends) if step < end]
        done = [row for row, end in enumerate(ends) if step >= end]
        pairs = [(ours.scores[step], plain.scores[step]), (ours.logits[step], plain.logits[step])]
        if step > 0:  # the prefill's entries also hold what padding attends to, which nothing reads
            pairs += zip(ours.hidden_states[step], plain.hidden_states[step], strict=True)
            pairs += zip(ours.attentions[step], plain.attentions[step], strict=True)
        for mine, right in pairs:
            assert mine.shape == right.shape
            torch.testing.assert_close(mine[live], right[live], rtol=1e-3, atol=1e-4)
            assert not mine[done].any()
    for mine, right in zip(ours.hidden_states[0], plain.hidden_states[0], strict=True):
        torch.testing.assert_close(mine[:, -1], right[:, -1], rtol=1e-3, atol=1e-4)
    assert ours.cache is None


def test_prefix_allowed_tokens_fn_gets_the_rows_number(target, drafter):
    asked = []

    def allowed(batch_id, ids):
        asked.append(batch_id)
        return list(range(1 + 15 * batch_id, 16 + 15 * batch_id))

    ids, mask, _ = make_batch()
    kwargs = {"attention_mask": mask, "prefix_allowed_tokens_fn": allowed, "max_new_tokens": 9}
    plain = plain_generate(target, ids, **kwargs)
    asked.clear()
    ours = pilot_generate(BlockPilot(drafter), target, ids, **kwargs)
    assert torch.equal(ours, plain)
    assert set(asked) == {0, 1, 2}


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 2.0},
        {"encoder_no_repeat_ngram_size": 1},
        {"bad_words_ids": [[9, 26], [58]], "sequence_bias": [[[7], 3.0]]},
        {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash", context_width=2)},
    ],
    ids=str,
)
def test_processors_that_know_the_rows_get_the_rows_own(target, drafter, options):
    """The repetition penalty skips the padding of each row; the encoder ones look at each row's prompt."""
    ids, mask, _ = make_batch()
    kwargs = {"attention_mask": mask, "max_new_tokens": 14, **options}
    plain = plain_generate(target, ids, **kwargs)
    assert torch.equal(pilot_generate(BlockPilot(drafter), target, ids, **kwargs), plain)
    assert not torch.equal(plain, plain_generate(target, ids, attention_mask=mask, max_new_tokens=14))


def test_min_new_tokens_of_rows_counts_from_the_padded_length(target, drafter):
    ids, mask, _ = make_batch()
    kwargs = {
        "attention_mask": mask,
        "min_new_tokens": 5,
        "eos_token_id": list(range(0, 64, 3)),
        "max_new_tokens": 14,
        "forced_eos_token_id": 3,
    }
    plain = plain_generate(target, ids, **kwargs)
    assert torch.equal(pilot_generate(BlockPilot(drafter), target, ids, **kwargs), plain)


def test_position_ids_of_the_user_are_split_by_row(target, drafter):
    ids, mask, _ = make_batch()
    positions = (mask.cumsum(-1) - 1).clamp_min(0) + torch.tensor([[5], [0], [40]])
    kwargs = {"attention_mask": mask, "position_ids": positions, "max_new_tokens": 9}
    plain = plain_generate(target, ids, **kwargs)
    assert torch.equal(pilot_generate(BlockPilot(drafter), target, ids, **kwargs), plain)


class StopOn(StoppingCriteria):
    """Ends each row on a multiple of seven, as plain's criteria do for a batch."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


def test_criteria_of_the_user_end_rows_one_by_one(target, drafter):
    ids, mask, _ = make_batch()
    kwargs = {"attention_mask": mask, "stopping_criteria": [StopOn()], "eos_token_id": 63, "max_new_tokens": 14}
    plain = plain_generate(target, ids, **kwargs)
    ours = pilot_generate(BlockPilot(drafter), target, ids, **kwargs)
    assert torch.equal(ours, plain)


def test_rows_that_plain_would_let_run_on_are_refused(target, drafter):
    ids = make_prompt(6, rows=2)
    kwargs = {"stopping_criteria": [StopOn()], "max_new_tokens": 6}
    with pytest.raises(ValueError, match="eos_token_id"):
        pilot_generate(BlockPilot(drafter), target, ids, **kwargs)
    assert torch.equal(
        pilot_generate(BlockPilot(drafter), target, ids, eos_token_id=63, **kwargs),
        plain_generate(target, ids, eos_token_id=63, **kwargs),
    )
    assert torch.equal(
        pilot_generate(BlockPilot(drafter), target, ids, max_new_tokens=6),
        plain_generate(target, ids, max_new_tokens=6),
    )


def test_a_static_cache_serves_row_after_row(target, drafter):
    ids, mask, _ = make_batch()
    kwargs = {"attention_mask": mask, "cache_implementation": "static", "max_new_tokens": 9}
    plain = plain_generate(target, ids, **kwargs)
    assert torch.equal(pilot_generate(BlockPilot(drafter), target, ids, **kwargs), plain)


class Puts(BaseStreamer):
    def __init__(self):
        self.count = 0

    def put(self, value):
        self.count += 1

    def end(self):
        self.count += 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"streamer": Puts()}, "one row at a time, got 2 rows"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"num_beams": 2}, "num_beams=1"),
        ({"something_per_row": torch.zeros(2, 4)}, "something_per_row|model_kwargs"),
    ],
    ids=["streamer", "guidance", "beams", "tensor"],
)
def test_what_rows_cannot_share_is_refused_before_any_pass(target, drafter, kwargs, message):
    hook = target.register_forward_pre_hook(lambda *args: pytest.fail("refused too late"))
    try:
        with pytest.raises(ValueError, match=message):
            pilot_generate(BlockPilot(drafter), target, make_prompt(6, rows=2), max_new_tokens=4, **kwargs)
    finally:
        hook.remove()
    if "streamer" in kwargs:
        assert kwargs["streamer"].count == 0
    if "guidance_scale" in kwargs:  # the nearest good call
        pilot_generate(BlockPilot(drafter), target, make_prompt(6), max_new_tokens=4, **kwargs)


def test_that_rows_take_turns_is_said_once(target, drafter, messages):
    for _ in range(2):
        pilot_generate(BlockPilot(drafter), target, make_prompt(6, rows=2), max_new_tokens=3)
    assert len([m for m in messages if "row by row" in m]) == 1
    pilot_generate(BlockPilot(drafter), target, make_prompt(6), max_new_tokens=3)
    assert len(messages) == 1


def test_steps_are_reported_row_after_row_with_the_rows_number(target, drafter):
    records = []
    ids, mask, _ = make_batch()
    out = pilot_generate(
        BlockPilot(drafter), target, ids, attention_mask=mask, max_new_tokens=10, on_step=records.append, **DICT
    )
    assert records == out.blockpilot.steps
    assert [r.row for r in records] == sorted(r.row for r in records) and {r.row for r in records} == {0, 1, 2}
    for row, trace in enumerate(out.blockpilot.rows):
        assert trace.steps == [r for r in records if r.row == row]


class StatefulBan(LogitsProcessor):
    def __init__(self):
        self.rows = []

    def __call__(self, input_ids, scores):
        self.rows.append(input_ids.shape[0])
        return scores


def test_a_processor_of_the_user_gets_rows_one_at_a_time(target, drafter):
    """The known difference to a plain batch: documented, and visible to a processor only in the shape that it gets."""
    processor = StatefulBan()
    pilot_generate(BlockPilot(drafter), target, make_prompt(6, rows=2), logits_processor=[processor], max_new_tokens=3)
    assert processor.rows == [1] * 6

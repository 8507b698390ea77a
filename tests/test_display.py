"""Answers as text: pieces, brackets, the strip of steps, and the lines of figures."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cli_models import byte_tokenizer
from conftest import make_prompt, make_target, plain_generate, scripted_pilot
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockpilot_hf.display import (
    PLAIN_SYMBOLS,
    Piece,
    PieceStream,
    acceptance_line,
    answer_pieces,
    are_accepted,
    block_size_line,
    bracketed,
    counted,
    flight_line,
    identity_words,
    shortened,
    speed_line,
    step_strip,
    without_controls,
)
from blockpilot_hf.trace import DecodeTrace, StepRecord


def word_tokenizer():
    """Words whose space belongs to them and is dropped at the start of a text, as SentencePiece has it; and bytes."""
    words = ["<unk>", "<eos>", "▁the", "▁cat", "s", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    core.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def step(accepted, *, width=4, own="new", drafted=None):
    """A step that accepted so many drafted tokens; its last committed token is its own or a drafted one."""
    draft = tuple(range(100, 99 + width)) if drafted is None else drafted
    last = 7 if own == "new" else draft[accepted]
    return StepRecord(width, width, draft, (*draft[:accepted], last), accepted)


def trace_of(*steps, **fields):
    return DecodeTrace(steps=list(steps), num_new_tokens=1 + sum(len(s.committed_ids) for s in steps), **fields)


# --- pieces ---


def show_one_by_one(tokenizer, ids, flags):
    stream = PieceStream(tokenizer)
    pieces = [piece for i, flag in zip(ids, flags, strict=True) for piece in stream.put([i], [flag])]
    pieces += stream.end()
    assert stream.text == "".join(piece.text for piece in pieces) and stream.end() == []
    return stream.text


@pytest.mark.parametrize("seed", range(4))
def test_pieces_together_are_what_the_tokenizer_decodes_even_of_noise(seed):
    tokenizer = byte_tokenizer()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, len(tokenizer), (60,), generator=generator).tolist()
    flags = (torch.rand(60, generator=generator) < 0.5).tolist()
    assert show_one_by_one(tokenizer, ids, flags) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(4))
def test_pieces_together_are_what_a_tokenizer_of_words_and_bytes_decodes(seed):
    tokenizer = word_tokenizer()
    generator = torch.Generator().manual_seed(seed)
    parts = [["▁the"], ["▁cat"], ["s"], ["▁"], ["<eos>"], *([f"<0x{b:02X}>" for b in c.encode()] for c in "é日😀a")]
    chosen = torch.randint(0, len(parts), (40,), generator=generator).tolist()
    ids = tokenizer.convert_tokens_to_ids([token for i in chosen for token in parts[i]])
    flags = (torch.rand(len(ids), generator=generator) < 0.5).tolist()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in text and show_one_by_one(tokenizer, ids, flags) == text


@pytest.mark.parametrize("text", ["a😀b", "日本語です", "né à Paris", "👩‍👧 ok"])
def test_characters_of_several_tokens_come_whole_and_at_once(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > len(text)
    stream = PieceStream(tokenizer)
    shown = ""
    for i, token_id in enumerate(ids):
        new = "".join(piece.text for piece in stream.put([token_id], [False]))
        shown += new
        assert text.startswith(shown)
        # Nothing is held back that could be shown: what is missing is a part of one character.
        rest = tokenizer.decode(ids[: i + 1])[len(shown) :]
        assert set(rest) <= {"\ufffd"}
    assert shown == text and stream.end() == []


def test_a_character_that_the_answer_was_cut_off_in_comes_at_the_end():
    tokenizer = byte_tokenizer()
    ids = tokenizer("a😀", add_special_tokens=False).input_ids[:-1]
    stream = PieceStream(tokenizer)
    assert stream.put(ids, [True] * len(ids)) == [Piece("a", True)]
    assert stream.end() == [Piece("\ufffd", True)]


def test_a_character_counts_as_accepted_only_with_all_of_its_tokens():
    tokenizer = byte_tokenizer()
    ids = tokenizer("é", add_special_tokens=False).input_ids
    assert len(ids) == 2
    for flags in ([True, True], [True, False], [False, True], [False, False]):
        assert PieceStream(tokenizer).put(ids, flags) == [Piece("é", all(flags))]


def test_spaces_between_words_stay_and_the_first_one_goes():
    tokenizer = word_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("▁the", "▁cat", "s", "▁the")]
    stream = PieceStream(tokenizer)
    assert stream.put(ids, [False, True, True, False]) == [
        Piece("the", False),
        Piece(" cats", True),
        Piece(" the", False),
    ]


def test_special_tokens_give_no_text():
    tokenizer = byte_tokenizer()
    ids = [*tokenizer("ab", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    stream = PieceStream(tokenizer)
    assert stream.put(ids, [False, True, False]) == [Piece("a", False), Piece("b", True)]
    assert stream.end() == [] and stream.text == "ab"


# --- accepted or the target's own ---


def test_the_last_token_of_a_step_is_the_targets_own():
    assert are_accepted(step(0)) == [False]
    assert are_accepted(step(2)) == [True, True, False]
    assert are_accepted(step(3)) == [True, True, True, False]
    assert are_accepted(StepRecord(1, 1, (), (5,), 0)) == [False]


def test_a_stop_inside_the_accepted_run_ends_on_an_accepted_token():
    assert are_accepted(step(1, own="drafted")) == [True, True]


def test_a_drafted_token_that_was_not_verified_is_not_accepted():
    """At the end of the budget fewer positions are verified than were drafted."""
    record = StepRecord(block_size=4, verify_width=2, draft_ids=(1, 2, 3), committed_ids=(1, 2), num_accepted=1)
    assert are_accepted(record) == [True, False]


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_marks_of_a_real_answer_follow_its_drafts(accuracy):
    tokenizer = byte_tokenizer()
    target = make_target("llama", vocab_size=len(tokenizer))
    prompt = make_prompt()
    plain = plain_generate(target, prompt, max_new_tokens=40, do_sample=False)
    pilot = scripted_pilot(target, plain, accuracy)
    output = pilot.generate(target, prompt, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    trace, ids = output.blockpilot, output.sequences[0, prompt.shape[1] :].tolist()
    flags = [flag for record in trace.steps for flag in are_accepted(record)]
    assert len(flags) == trace.num_new_tokens - 1
    assert sum(flags) == sum(record.num_accepted for record in trace.steps)
    assert (sum(flags) > 0) is (accuracy > 0) and not all(flags)
    pieces = answer_pieces(tokenizer, ids, trace)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert any(piece.is_accepted for piece in pieces) is (accuracy > 0)
    assert all(a.is_accepted != b.is_accepted for a, b in pairwise(pieces))


def test_brackets_enclose_accepted_runs_without_the_space_around_them():
    pieces = [Piece("The", False), Piece(" old", True), Piece(" cat\n", True), Piece("sat", False), Piece(" ", True)]
    assert bracketed(pieces) == "The ⟦old cat⟧\nsat "
    assert bracketed(pieces, brackets=("[[", "]]")) == "The [[old cat]]\nsat "
    assert bracketed([]) == ""


# --- the strip ---


def test_the_strip_has_a_symbol_per_token_and_a_group_per_step():
    trace = trace_of(step(2), step(0), step(1, own="drafted"), block_size=4)
    assert step_strip(trace) == ["· ▮▮· · ▮▮"]
    assert step_strip(trace, symbols=PLAIN_SYMBOLS) == [". ##. . ##"]
    copied = trace_of(step(2), replace(step(2), source="lookup"), block_size=4)
    assert step_strip(copied) == ["· ▮▮· ▯▯·"] and step_strip(copied, symbols=PLAIN_SYMBOLS) == [". ##. ==."]


@pytest.mark.parametrize("width", [10, 23, 40, 80])
def test_the_strip_breaks_between_steps_and_fits(width):
    trace = trace_of(*(step(i % 4) for i in range(50)), block_size=4)
    lines = step_strip(trace, width=width, max_lines=99)
    assert max(map(len, lines)) <= width
    whole = step_strip(trace, width=10**6)
    assert len(whole) == 1 and " ".join(lines) == whole[0]
    assert len(whole[0].replace(" ", "")) == trace.num_new_tokens


def test_a_long_strip_says_how_much_is_left_out():
    trace = trace_of(*(step(1) for _ in range(50)), block_size=4)
    whole = step_strip(trace, width=20, max_lines=99)
    cut = step_strip(trace, width=20, max_lines=4)
    assert cut[:3] == whole[:3] and len(cut) == 4
    shown = sum(len(line.split()) for line in cut[:3]) - 1  # the first group is the prefill's
    assert cut[3] == f"… {50 - shown} more steps"
    assert step_strip(trace, width=20, max_lines=len(whole)) == whole


# --- lines ---


def test_the_block_size_comes_with_every_score_and_the_chosen_one_in_brackets():
    trace = DecodeTrace(block_size=4, scores={1: -0.25, 4: 1.5, 8: 0.000123}, reason="policy: largest of 3 scores")
    assert block_size_line(trace) == "block size 4 (policy: largest of 3 scores; 1: -0.25, [4: 1.5], 8: 0.000123)"
    assert block_size_line(DecodeTrace(block_size=8, reason="fixed by the caller")) == (
        "block size 8 (fixed by the caller)"
    )


def test_tau_and_speed_are_the_traces():
    trace = trace_of(step(2), step(1), prefill_s=0.5, policy_s=0.25, decode_s=0.25)
    assert acceptance_line(trace) == "tau 2.50 tokens per step: 5 in 2 steps, and 1 from the prefill"
    assert speed_line(trace).startswith("6.0 tokens per second: 6 tokens in 1.00 s (prefill 0.50, ")
    assert speed_line(trace, 2.0).startswith("3.0 tokens per second: 6 tokens in 2.00 s (prefill 0.50, ")
    assert acceptance_line(trace_of()) == "no verification step: 1 token from the prefill"


def test_identity_in_words():
    assert identity_words(None, None) == "identical"
    assert identity_words(17, 0.0625) == "identical up to token 17, gap 0.0625"
    assert identity_words(0, None) == "identical up to token 0, gap unknown"


def test_small_helpers():
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert shortened("one\ntwo  three", 9) == "one two …" and shortened("one\n two", 9) == "one two"
    assert without_controls("a\tb\nc\x1b[31m\x07\r") == "a\tb\nc\ufffd[31m\ufffd\ufffd"


def test_the_line_of_a_flight_counts_what_steps_drafted_and_verified():
    by = {"source": "drafter"}
    steps = [
        StepRecord(4, 4, (1, 2, 3), (1, 2), 1, **by),
        StepRecord(8, 3, (1,) * 7, (5,), 0, **by),
        StepRecord(1, 1, (), (6,), 0),
    ]
    trace = DecodeTrace(adapt="flight", costs="measured on this machine", steps=steps)
    assert flight_line(trace) == (
        "in flight: 1 x 4, 1 x 8 drafted, 3.5 of a block verified on average, 1 plain step; costs: measured on this "
        "machine"
    )
    assert flight_line(DecodeTrace(adapt="flight", costs="given", steps=steps[2:] * 2)) == (
        "in flight: 2 plain steps; costs: given"
    )
    copies = [
        StepRecord(9, 9, (1,) * 8, (1, 1), 1, source="lookup"),
        StepRecord(4, 4, (1,) * 3, (5,), 0, source="lookup"),
    ]
    assert flight_line(DecodeTrace(adapt="flight", costs="given", steps=[*copies, *steps[2:]])) == (
        "in flight: 2 steps copied from the text so far, 6.5 verified on average, 1 plain step; costs: given"
    )

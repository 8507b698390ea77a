"""Cells of prompt and answer lengths on a tiny pair: exact lengths, the bytes of caches, and what does not fit."""

import json

import pytest
import torch
from cli_models import byte_tokenizer
from conftest import make_drafter, make_prompt, make_target, plain_generate

from blockpilot_hf import BlockPilot
from blockpilot_hf.benchmark_methods import FLIGHT, PLAIN, make_methods
from blockpilot_hf.parity import ScriptedDrafter
from blockpilot_hf.scaling import (
    Cell,
    Lengths,
    cache_bytes,
    cell_of,
    fitting_lengths,
    prompt_of_length,
    run_cells,
    watched_caches,
)

NAMES = (PLAIN, "size 8", FLIGHT)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def pair(tokenizer):
    target = make_target("llama", vocab_size=len(tokenizer) + 4)
    return target, make_drafter(target)


def test_prompts_have_their_length_the_same_beginning_and_the_same_end(tokenizer):
    prompts = {length: prompt_of_length(tokenizer, length) for length in (2, 40, 300, 30_000)}
    longest = prompts[30_000]
    for length, ids in prompts.items():
        assert ids.shape == (1, length)
        assert ids[0, 0] == longest[0, 0]
        assert torch.equal(ids[:, 1:], longest[:, 30_001 - length :])
    assert tokenizer.decode(longest[0]).endswith("<|assistant|>")
    assert len({tokenizer.decode(prompt_of_length(tokenizer, 60, repeat)[0]) for repeat in range(4)}) == 4


def test_what_is_asked_for_stands_whole_in_short_prompts(tokenizer):
    for repeat in range(30):
        text = tokenizer.decode(prompt_of_length(tokenizer, 300, repeat)[0])
        assert "<|user|>" in text.removeprefix("<|system|>")


def test_lengths_past_the_last_position_are_left_out_and_named(pair):
    target, drafter = pair  # 512 positions, and 1,024
    lengths = fitting_lengths(target, drafter, [64, 32, 4096, 500], [32, 480, 481])
    assert (lengths.prompt_lengths, lengths.answer_lengths) == ([32, 64], [32, 480])
    assert lengths.left_out == [
        "prompts of 500 tokens: with answers of 32 past the 512 positions of the target",
        "prompts of 4,096 tokens: with answers of 32 past the 512 positions of the target",
        "answers of 481 tokens: with prompts of 32 past the 512 positions of the target",
    ]
    short = make_drafter(target, max_position_embeddings=100)
    assert "answers of 90 tokens: with prompts of 20 past the 100 positions of the drafter" in (
        fitting_lengths(target, short, [20], [80, 90]).left_out
    )
    # A scripted drafter has no positions of its own.
    assert fitting_lengths(target, ScriptedDrafter(target), [64], [32]).left_out == []


@pytest.mark.parametrize(
    ("prompts", "answers", "message"),
    [
        ([1, 8], [4], "`--prompt-lengths` takes whole numbers from 2"),
        ([], [4], "`--prompt-lengths` takes whole numbers from 2"),
        ([8], [1], "`--answer-lengths` takes whole numbers from 2.*prefill"),
        ([600], [32], "Prompts of 600 and answers of 32 tokens do not fit into the 512 positions of the target"),
    ],
)
def test_lengths_that_cannot_be_measured_are_refused(pair, prompts, answers, message):
    with pytest.raises(ValueError, match=message):
        fitting_lengths(*pair, prompts, answers)


def test_cells_vary_one_length_at_a_time_and_all_come_before_any_again():
    cells = Lengths([8, 16], [4, 6, 9]).cells(2)
    once = [(8, 4), (16, 4), (8, 6), (8, 9)]
    assert [cell.key for cell in cells] == [(*pair, repeat) for repeat in (0, 1) for pair in once]


@pytest.fixture(scope="module")
def lines(pair, tokenizer, tmp_path_factory):
    target, drafter = pair
    known = make_methods(target, BlockPilot(drafter, False))
    path = tmp_path_factory.mktemp("cells") / "cells.jsonl"
    cells = list(enumerate(Lengths([8, 30], [4, 21]).cells(1)))
    methods = {name: known[name] for name in NAMES}
    run_cells(target, drafter, tokenizer, methods, cells, path, run={"seed": 0})
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_cell_is_a_line_with_every_method_in_turns(lines):
    assert [cell_of(line) for line in lines] == [Cell(8, 4), Cell(30, 4), Cell(8, 21)]
    assert [line["order"][0] for line in lines] == [*NAMES]
    for line in lines:
        assert [*line["calls"]] == [*NAMES] and line["run"] == {"seed": 0}


def test_answers_have_exactly_the_length_and_caches_the_bytes_that_follow_from_it(lines, pair):
    target, drafter = pair
    for line in lines:
        length = line["prompt_length"] + line["answer_length"] - 1  # the last token is in no cache
        for name, call in line["calls"].items():
            assert call["num_new_tokens"] == line["answer_length"], name
            assert call["acceptance_length"] == (line["answer_length"] - 1) / call["num_steps"]
            per_token = 2 * 4 * target.config.num_key_value_heads * target.config.head_dim
            assert call["target_cache_bytes"] == length * target.config.num_hidden_layers * per_token, name
            own = (
                2 * 4 * drafter.config.num_key_value_heads * drafter.config.head_dim * drafter.config.num_hidden_layers
            )
            assert call["drafter_cache_bytes"] % own == 0
            assert call["drafter_cache_bytes"] <= length * own
            assert 0 <= call["decode_cpu_s"] <= call["cpu_s"]
            assert call["peak_memory_bytes"] is None or call["peak_memory_bytes"] >= 0
        assert line["calls"][PLAIN]["drafter_cache_bytes"] == 0 < line["calls"]["size 8"]["drafter_cache_bytes"]
        assert line["calls"][PLAIN]["num_steps"] == line["answer_length"] - 1


def test_an_end_of_text_does_not_shorten_an_answer(tokenizer, tmp_path):
    target = make_target("llama", vocab_size=len(tokenizer) + 4)
    prompt = prompt_of_length(tokenizer, 8)
    target.generation_config.eos_token_id = int(plain_generate(target, prompt, max_new_tokens=2)[0, -1])
    assert plain_generate(target, prompt, max_new_tokens=9).shape[1] == 10  # it would
    known = make_methods(target, BlockPilot(make_drafter(target), False))
    path = tmp_path / "cells.jsonl"
    run_cells(target, None, tokenizer, {name: known[name] for name in NAMES}, [(0, Cell(8, 9))], path, run={})
    calls = json.loads(path.read_text())["calls"]
    assert {call["num_new_tokens"] for call in calls.values()} == {9}


def test_watching_ends_with_the_call(pair):
    target, drafter = pair
    with watched_caches(target, drafter) as seen:
        plain_generate(target, make_prompt(5), max_new_tokens=3, do_sample=False)
    assert cache_bytes(seen.target) > 0 and cache_bytes(seen.drafter) == 0 == cache_bytes(None)
    cache = seen.target
    plain_generate(target, make_prompt(5), max_new_tokens=3, do_sample=False)
    assert seen.target is cache and not target._forward_hooks and not drafter._forward_hooks

"""Prompts to a target's own answers."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_models import byte_tokenizer
from conftest import make_target, plain_generate

from blockpilot_hf.prompts import Prompt, encode_prompt
from blockpilot_hf.target_texts import (
    COLUMNS,
    TargetAnswers,
    TextsRecipe,
    cut_units,
    encode_prompts,
    max_prompt_tokens,
    prompts_fingerprint,
)

FACTS = {"target": "tiny", "target_revision": None, "target_fingerprint": "0"}


def alone(target, prompt, num_new):
    """Plain greedy `generate` of one row."""
    return plain_generate(target, torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False, pad_token_id=0)[
        0, len(prompt) :
    ].tolist()


PROMPTS = [
    Prompt(f"p{i}", (f"say {'x' * (i % 5)}{i}", "more")[: 1 + i % 2], "ab"[i % 2], "some set") for i in range(11)
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def encoded(tokenizer, prompts=PROMPTS, room=None, system=None):
    return encode_prompts(tokenizer, prompts, max_prompt_tokens=room, system=system)


def test_prompts_are_sorted_by_length_and_cut_once_per_temperature_and_sample(tokenizer):
    prompts = encoded(tokenizer).prompts
    assert [(len(e.ids), e.prompt.id) for e in prompts] == sorted((len(e.ids), e.prompt.id) for e in prompts)
    recipe = TextsRecipe(temperatures=(0.0, 0.7), samples=2, batch_size=4)
    units = cut_units(prompts, recipe)
    assert [(u.temperature, u.sample, len(u.prompts)) for u in units] == [
        (t, sample, size) for t, sample in ((0.0, 0), (0.7, 0), (0.7, 1)) for size in (4, 4, 3)
    ]
    assert len({u.seed for u in units}) == 9 and all(0 <= u.seed < 2**48 for u in units)
    # The order of the file does not matter, the seed does.
    assert cut_units(encoded(tokenizer, PROMPTS[::-1]).prompts, recipe) == units
    other = cut_units(prompts, TextsRecipe(temperatures=(0.0, 0.7), samples=2, batch_size=4, seed=1))
    assert not {u.seed for u in units} & {u.seed for u in other}


def test_prompts_without_room_and_repeated_ones_are_left_out_and_named(tokenizer):
    prompts = [Prompt("a", ("xx",)), Prompt("b", ("x" * 30,)), Prompt("c", ("xx",)), Prompt("d", ("xx", "more"))]
    num = len(encode_prompt(tokenizer, "x" * 30)[0])
    found = encoded(tokenizer, prompts, room=num)
    assert [e.prompt.id for e in found.prompts] == ["a", "d", "b"]
    assert (found.too_long, found.repeated) == ([], ["c"])
    found = encoded(tokenizer, prompts, room=num - 1)
    assert found.too_long == ["b"] and "b" not in [e.prompt.id for e in found.prompts]
    with pytest.raises(ValueError, match="No prompt leaves room for an answer: all 4 have more than 1 tokens"):
        encoded(tokenizer, prompts, room=1)


def test_room_is_what_the_positions_leave():
    assert max_prompt_tokens(make_target(max_position_embeddings=100), 30) == 70
    unlimited = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    assert max_prompt_tokens(SimpleNamespace(config=unlimited), 30) is None


def test_rows_hold_the_prompt_the_answer_and_where_both_are_from(tokenizer):
    target = make_target("llama", vocab_size=len(tokenizer))
    recipe = TextsRecipe(temperatures=(0.0, 1.0), samples=2, batch_size=4, max_new_tokens=10)
    answers = TargetAnswers(target, tokenizer, recipe, FACTS)
    units = cut_units(encoded(tokenizer).prompts, recipe)
    rows = [row for unit in units for row in answers(unit)]
    # Five of the eleven prompts have two turns, each answered once greedily and twice by lot.
    assert len(rows) == 16 * 3 == len({row["id"] for row in rows})
    assert all(set(row) == set(COLUMNS) for row in rows)
    by_id = {row["id"]: row for row in rows}
    assert {"p1", "p1-turn-2", "p1-t1-s1", "p1-turn-2-t1-s2"} <= set(by_id)
    first, second = by_id["p1-t1-s2"], by_id["p1-turn-2-t1-s2"]
    assert first["prompt_ids"] == encode_prompt(tokenizer, first["prompt"])[0].tolist()
    assert first["answer"] == tokenizer.decode(first["answer_ids"], skip_special_tokens=True)
    # The history is the answer of that very sample.
    assert second["prompt"] == "more" and second["turn"] == 1
    history = [(first["prompt"], first["answer"])]
    assert second["prompt_ids"] == encode_prompt(tokenizer, "more", history=history)[0].tolist()
    assert by_id["p1-t1-s1"]["answer_ids"] != first["answer_ids"]
    assert {(r["prompt_id"], r["category"], r["source"]) for r in rows if r["id"] == "p1-turn-2"} == {
        ("p1", "b", "some set")
    }
    assert {(r["temperature"], r["finish"]) for r in rows} <= {(t, f) for t in (0.0, 1.0) for f in ("stop", "length")}
    greedy = [row for row in rows if row["temperature"] == 0.0]
    assert all(row["answer_ids"] == alone(target, row["prompt_ids"], 10) for row in greedy)
    # A unit gives the same rows whenever it is asked, here after all the others.
    assert answers(units[4]) == [row for row in rows if row["id"] in {r["id"] for r in answers(units[4])}]


def test_later_turns_stop_at_the_limit_and_where_they_leave_no_room(tokenizer):
    target = make_target("llama", vocab_size=len(tokenizer), max_position_embeddings=200)
    prompts = [Prompt("a", ("one", "two", "three")), Prompt("b", ("one more", "x" * 190))]

    def ids(num_turns):
        recipe = TextsRecipe(num_turns=num_turns, max_new_tokens=10, system="s")
        [unit] = cut_units(encoded(tokenizer, prompts, system="s").prompts, recipe)
        return [row["id"] for row in TargetAnswers(target, tokenizer, recipe, FACTS)(unit)]

    assert ids(1) == ["a", "b"]
    assert ids(2) == ["a", "b", "a-turn-2"]
    assert ids(9) == ["a", "b", "a-turn-2", "a-turn-3"]


def test_ids_that_would_meet_are_refused(tokenizer):
    prompts = [Prompt("a", ("one", "two")), Prompt("a-turn-2", ("three",))]
    with pytest.raises(ValueError, match=r"Two texts would have the id 'a-turn-2'\. Rename the prompt"):
        cut_units(encoded(tokenizer, prompts).prompts, TextsRecipe())
    assert len(cut_units(encoded(tokenizer, prompts).prompts, TextsRecipe(num_turns=1))) == 1


def test_the_fingerprint_is_of_all_that_rows_take_from_prompts(tokenizer):
    def fingerprint(*fields, system=None):
        return prompts_fingerprint(encoded(tokenizer, [Prompt(*fields)], system=system).prompts)

    base = ("a", ("one", "two"), "maths", "set")
    others = [("b", *base[1:]), ("a", ("one", "2"), *base[2:]), (*base[:2], "code", "set"), (*base[:3], "other")]
    found = {fingerprint(*fields) for fields in [base, *others]} | {fingerprint(*base, system="s")}
    assert len(found) == 6 and fingerprint(*base) in found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": ()}, "`temperatures` must be different numbers >= 0, at least one, got \\[\\]"),
        ({"temperatures": (0.0, -1.0)}, "got \\[0.0, -1.0\\]"),
        ({"temperatures": (1.0, 1.0)}, "must be different"),
        ({"temperatures": (float("nan"),)}, "got \\[nan\\]"),
        ({"samples": 2}, "`samples` is 2, and every answer is greedy"),
        ({"samples": 0}, "`samples` must be an integer >= 1, got 0"),
        ({"batch_size": 0}, "`batch_size` must be an integer >= 1"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be an integer >= 1"),
        ({"num_turns": 0}, "`num_turns` must be an integer >= 1"),
    ],
)
def test_recipes_that_are_none_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TextsRecipe(**settings)
    assert TextsRecipe(temperatures=(0.0, 1.0), samples=2).passes == [(0.0, 0), (1.0, 0), (1.0, 1)]


def test_translation_prompts_are_many_and_different():
    path = Path(__file__).parents[1] / "docs" / "translation_prompts.jsonl"
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [entry["id"] for entry in entries] == [f"translation-{i:03d}" for i in range(len(entries))]
    assert len(entries) >= 320 and len({entry["turns"][0] for entry in entries}) == len(entries)
    assert {entry["category"] for entry in entries} == {"translation"}


def test_options_of_the_chat_template_reach_every_turn(tokenizer):
    """As for templates that can be told not to think."""
    template = tokenizer.chat_template
    target = make_target("llama", vocab_size=len(tokenizer), max_position_embeddings=300)
    tokenizer.chat_template = template + "{% if quiet %}quiet{% endif %}"
    try:
        recipe = TextsRecipe(max_new_tokens=5, template_options={"quiet": True})
        found = encode_prompts(
            tokenizer, [Prompt("a", ("one", "two"))], max_prompt_tokens=None, template_options=recipe.template_options
        )
        [unit] = cut_units(found.prompts, recipe)
        rows = TargetAnswers(target, tokenizer, recipe, FACTS)(unit)
        assert [tokenizer.decode(row["prompt_ids"]).endswith("quiet") for row in rows] == [True, True]
    finally:
        tokenizer.chat_template = template

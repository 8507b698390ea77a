"""Prompt files and chat templates."""

import json

import pytest
import torch
from jinja2 import TemplateError

from blockpilot_hf.prompts import Prompt, encode_prompt, prompts_of_rows, read_prompts, sample_prompts, spread_indices


def write(path, *entries):
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries), encoding="utf-8")
    return path


def test_json_lines_give_turns_ids_categories_and_sources(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        {"id": 7, "turns": ["one", "two"], "category": "qa"},
        "",
        {"prompt": "three", "source": "some set"},
    )
    assert read_prompts(file) == [
        Prompt("7", ("one", "two"), "qa"),
        Prompt("line-3", ("three",), source="some set"),
    ]


def test_other_files_hold_a_prompt_per_line(tmp_path):
    file = write(tmp_path / "a.txt", "one", "   ", '{"prompt": "kept as text"}')
    assert [p.turns[0] for p in read_prompts(file)] == ["one", '{"prompt": "kept as text"}']


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_only_line_feeds_end_a_line(tmp_path, separator):
    """JSON allows these characters inside strings, and `str.splitlines` splits at them."""
    text = f"before{separator}after"
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [p.turns for p in read_prompts(file)] == [(text,)]


def test_windows_line_ends_and_byte_order_marks_are_no_part_of_a_prompt(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n{"prompt": "two"}\r\n')
    assert [p.turns for p in read_prompts(file)] == [("one",), ("two",)]


@pytest.mark.parametrize(
    "line", ['{"prompt": ', "[]", "3", "{}", '{"turns": []}', '{"turns": [1]}', '{"prompt": ""}', '{"turns": null}']
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line):
    file = write(tmp_path / "a.jsonl", {"prompt": "good"}, line)
    with pytest.raises(ValueError, match=r"a\.jsonl:2 "):
        read_prompts(file)


def test_a_file_without_prompts_is_refused(tmp_path):
    for name in ("a.jsonl", "a.txt"):
        with pytest.raises(ValueError, match="holds no prompt"):
            read_prompts(write(tmp_path / name, "", " "))


def test_two_prompts_of_one_id_are_refused(tmp_path):
    file = write(tmp_path / "a.jsonl", {"id": "x", "prompt": "one"}, {"id": "x", "prompt": "two"})
    with pytest.raises(ValueError, match="several prompts with the id 'x'"):
        read_prompts(file)


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 12, 13, None])
def test_a_limit_spreads_over_the_whole_file(tmp_path, limit):
    file = write(tmp_path / "a.txt", *(str(i) for i in range(12)))
    picked = [int(p.turns[0]) for p in read_prompts(file, limit)]
    count = min(limit or 12, 12)
    assert len(picked) == count and picked == sorted(set(picked))
    gaps = [b - a for a, b in zip(picked, [*picked[1:], 12], strict=True)]
    assert picked[0] == 0 and max(gaps) - min(gaps) <= 1


class FakeTokenizer:
    """One id per character; as much of a tokenizer as is asked for."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def __call__(self, text, return_tensors):
        ids = torch.tensor([[ord(c) for c in text]], dtype=torch.long)
        return type("Encoding", (), {"input_ids": ids})

    def apply_chat_template(self, messages, add_generation_prompt, return_dict, return_tensors):
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt
        return self(text, return_tensors).input_ids


def text_of(ids):
    return "".join(map(chr, ids[0].tolist()))


def test_a_chat_template_is_used_where_there_is_one():
    assert text_of(encode_prompt(FakeTokenizer("t"), "hi")) == "<user>hi<assistant>"
    assert text_of(encode_prompt(FakeTokenizer("t"), "hi", system="be brief")) == (
        "<system>be brief<user>hi<assistant>"
    )
    assert text_of(encode_prompt(FakeTokenizer(), "hi")) == "hi"
    assert text_of(encode_prompt(FakeTokenizer(), "hi", system="be brief")) == "be brief\n\nhi"


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        encode_prompt(FakeTokenizer(), "")


def test_earlier_turns_come_before_the_message():
    history = [("one", "two"), ("three", "four")]
    assert text_of(encode_prompt(FakeTokenizer("t"), "five", system="s", history=history)) == (
        "<system>s<user>one<assistant>two<user>three<assistant>four<user>five<assistant>"
    )
    assert text_of(encode_prompt(FakeTokenizer(), "five", system="s", history=history[:1])) == "s\n\none\n\ntwo\n\nfive"


def test_a_message_that_the_template_refuses_is_told():
    class Refusing(FakeTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            if messages[0]["role"] == "system":
                raise TemplateError("System role not supported")
            return super().apply_chat_template(messages, **kwargs)

    with pytest.raises(ValueError, match="refuses messages of the roles system, user: System role not supported"):
        encode_prompt(Refusing("t"), "hi", system="be brief")
    assert text_of(encode_prompt(Refusing("t"), "hi")) == "<user>hi<assistant>"


def test_a_file_in_another_encoding_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text \(.* at byte 3\)"):
        read_prompts(file)
    file.write_text("café", encoding="utf-8")
    assert read_prompts(file)[0].turns == ("café",)


def test_the_samples_are_one_of_each_kind():
    assert [prompt.category for prompt in sample_prompts()] == ["maths", "code", "translation"]
    assert all(len(prompt.turns) == 1 for prompt in sample_prompts())


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
]


@pytest.mark.parametrize(
    ("value", "turns"), [("one", ("one",)), (["one", "two"], ("one", "two")), (CHAT, ("one", "two"))]
)
def test_a_column_holds_a_message_turns_or_a_chat(value, turns):
    prompts, num_empty = prompts_of_rows([{"q": value}], prompt_column="q", category="qa", source="set")
    assert prompts == [Prompt("row-0", turns, "qa", "set")] and num_empty == 0


def test_rows_without_a_prompt_are_left_out_and_counted():
    rows = [{"q": "one"}, {"q": None}, {"q": " "}, {"q": []}, {"q": ["a", ""]}, {"q": CHAT[:1]}, {"q": "two"}]
    prompts, num_empty = prompts_of_rows(rows, prompt_column="q")
    assert [p.id for p in prompts] == ["row-0", "row-6"] and num_empty == 5


@pytest.mark.parametrize("value", [3, [1], {"role": "user", "content": "one"}, [["one"]]])
def test_a_value_that_is_no_prompt_is_named_by_its_row(value):
    with pytest.raises(ValueError, match=r"row 1 of set, column `q` is not a prompt: .*Name another column with"):
        prompts_of_rows([{"q": "one"}, {"q": value}], prompt_column="q", source="set")


def test_ids_and_categories_come_from_columns():
    rows = [{"q": "one", "n": 4, "kind": "a"}, {"q": "two", "n": 5, "kind": None}]
    prompts, _ = prompts_of_rows(rows, prompt_column="q", id_column="n", category_column="kind", category="unused")
    assert [(p.id, p.category) for p in prompts] == [("4", "a"), ("5", "")]
    with pytest.raises(ValueError, match="set has several prompts with the id '4'"):
        prompts_of_rows([rows[0], rows[0]], prompt_column="q", id_column="n", source="set")


def test_a_limit_spreads_evenly():
    assert spread_indices(6, 3) == [0, 2, 4] and spread_indices(3, 6) == spread_indices(3, None) == [0, 1, 2]
    assert spread_indices(0, 6) == []

"""Prompt files and chat templates."""

import json

import pytest
import torch
from jinja2 import TemplateError

from blockpilot_hf.prompts import Prompt, encode_prompt, read_prompts, sample_prompts


def write(path, *entries):
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries), encoding="utf-8")
    return path


def test_json_lines_give_turns_ids_and_categories(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        {"id": 7, "turns": ["one", "two"], "category": "qa"},
        "",
        {"prompt": "three"},
    )
    assert read_prompts(file) == [Prompt("7", ("one", "two"), "qa"), Prompt("line-3", ("three",))]


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

import dataclasses
import json

import pytest

from blockpilot_hf.drafter_record import (
    TrainingPrompts,
    hold_out,
    quick_part,
    read_training_prompts,
    short_hash,
    source_record,
    write_training_prompts,
)
from blockpilot_hf.texts import Text


def make_texts(count, *, first=0, category="a", temperature=0.0):
    return [
        Text(f"{category}-{i}", category, (i, 1), (2, 3), temperature=temperature) for i in range(first, first + count)
    ]


def test_training_prompts_are_read_as_they_were_written(tmp_path):
    texts = make_texts(3)
    # One prompt with two answers, and one by its hash alone, are each one prompt.
    again = dataclasses.replace(texts[0], answer_ids=(4, 5))
    write_training_prompts(tmp_path, [*texts, again, texts[1].prompt_hash, "0" * 16])
    expected = {"0" * 16} | {text.prompt_hash[:16] for text in texts}
    assert read_training_prompts(tmp_path) == TrainingPrompts(frozenset(expected))
    content = json.loads((tmp_path / "training_prompts.json").read_text())
    assert content == {"is_complete": True, "prompt_hashes": sorted(expected)}
    assert [path.name for path in tmp_path.iterdir()] == ["training_prompts.json"]


def test_weights_without_such_a_record_say_nothing_and_a_damaged_one_is_refused(tmp_path):
    assert read_training_prompts(tmp_path) is None
    (tmp_path / "training_prompts.json").write_text('{"prompt_hashes": ["ab')
    with pytest.raises(ValueError, match="does not say which prompts were trained on"):
        read_training_prompts(tmp_path)


def test_no_prompt_is_on_both_sides_and_none_that_the_start_saw_is_held_out():
    texts = make_texts(20)
    known, held_out = hold_out(texts, 3)
    assert len(held_out) == 3 and sorted([*known, *held_out], key=texts.index) == texts
    seen = {short_hash(held_out[0])}
    more, fewer = hold_out(texts, 3, earlier=seen)
    assert fewer == held_out[1:] and held_out[0] in more and more == [text for text in texts if text in more]


def test_validation_texts_must_be_of_other_prompts():
    texts, others = make_texts(4), make_texts(3, first=50)
    assert hold_out(texts, 1, validation=others) == (texts, others)
    with pytest.raises(ValueError, match=r"whose prompts are trained on.*: 1 of 4, the first is 'a-2'"):
        hold_out(texts, 1, validation=[*others, dataclasses.replace(texts[2], temperature=1.0)])
    with pytest.raises(ValueError, match=r"or that the start was trained on: 1 of 3"):
        hold_out(texts, 1, validation=others, earlier={short_hash(others[1])})


def test_the_quick_part_has_every_category_at_every_temperature():
    held_out = [
        text
        for first, (category, temperature) in enumerate([("a", 0.0), ("a", 1.0), ("b", 0.0)])
        for text in make_texts(4, first=10 * first, category=category, temperature=temperature)
    ]
    held_out = held_out[::-1]
    found = quick_part(held_out, 2)
    assert found == [text for text in held_out if text in found] and len(found) == 6
    assert {(text.category, text.temperature) for text in found} == {("a", 0.0), ("a", 1.0), ("b", 0.0)}


def test_a_folder_is_known_by_its_texts_and_a_file_by_its_bytes(tmp_path):
    texts = make_texts(3)
    folder, file = tmp_path / "folder", tmp_path / "file.jsonl"
    folder.mkdir()
    file.write_text("{}")
    of_folder, of_file = source_record(folder, texts), source_record(file, texts)
    assert of_folder["name"] == "folder" and of_folder["num_texts"] == 3
    (folder / "more").write_text("not a text")
    assert source_record(folder, texts) == of_folder != source_record(folder, texts[:2])
    file.write_text("{ }")
    assert source_record(file, texts)["sha256"] != of_file["sha256"]


def make_conversations(count, source="set"):
    """Each with two turns, the second greedy and sampled: prompts with hashes of their own."""
    return [
        Text(f"{i}-{turn}-{t}", "a", (i, turn, *([t] if turn else [])), (2, 3), f"p{i}", source, float(t))
        for i in range(count)
        for turn in range(2)
        for t in range(2)
    ]


def test_the_turns_of_a_conversation_are_on_one_side():
    texts = make_conversations(20)
    known, held_out = hold_out(texts, 3)
    assert len(held_out) == 12 and {text.prompt_id for text in known}.isdisjoint(text.prompt_id for text in held_out)
    seen = next(text for text in held_out if text.prompt_ids[1:] == (0,))
    more, fewer = hold_out(texts, 3, earlier={short_hash(seen)})
    assert {text.prompt_id for text in held_out} - {text.prompt_id for text in fewer} == {seen.prompt_id}
    assert len(more) + len(fewer) == len(texts)


def test_later_turns_of_what_is_trained_on_do_not_validate():
    texts = make_conversations(4)
    first, later = [t for t in texts if t.prompt_ids[1] == 0], [t for t in texts if t.prompt_ids[1] == 1]
    with pytest.raises(ValueError, match="8 of 8, the first is '0-1-0'"):
        hold_out(first, 1, validation=later)
    # Another file may use the same ids.
    others = [dataclasses.replace(text, source="another") for text in later]
    assert hold_out(first, 1, validation=others) == (first, others)

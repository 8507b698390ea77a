import dataclasses
import json

import pytest

from blockpilot_hf.drafter_record import (
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
    assert read_training_prompts(tmp_path) == expected
    content = json.loads((tmp_path / "training_prompts.json").read_text())
    assert content == {"prompt_hashes": sorted(expected)}
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
    with pytest.raises(ValueError, match=r"1 of 4 validation texts have prompts that are trained on.* is 'a-2'"):
        hold_out(texts, 1, validation=[*others, dataclasses.replace(texts[2], temperature=1.0)])
    with pytest.raises(ValueError, match=r"1 of 3 validation texts.* or that the start was trained on"):
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

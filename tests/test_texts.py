import gzip
import json
import random

import datasets
import pytest
from drafter_texts import write_texts

from blockpilot_hf.texts import Text, check_texts, first_of_each_category, read_texts, split_by_prompt, spread


def text(i: int, category: str = "a", answer=(7, 8, 9)) -> Text:
    return Text(f"{category}-{i}", category, (1, 2, i), tuple(answer))


TEXTS = [text(i, category) for category in ("a", "b") for i in range(30)]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_file_gives_back_the_texts_that_were_written(tmp_path, suffix):
    path = tmp_path / f"texts{suffix}"
    lines = write_texts(tmp_path / "plain.jsonl", TEXTS).read_bytes()
    path.write_bytes(gzip.compress(lines) if suffix.endswith("gz") else lines)
    assert read_texts(path) == TEXTS
    assert read_texts(str(path))[0].ids == (1, 2, 0, 7, 8, 9)


def test_answers_too_short_to_draft_in_and_empty_lines_are_left_out(tmp_path):
    path = tmp_path / "texts.jsonl"
    entries = [{"prompt_ids": [1], "answer_ids": answer} for answer in ([], [2], [2, 3])]
    path.write_text("\n\n".join(map(json.dumps, entries)) + "\n")
    assert read_texts(path) == [Text("line-5", "all", (1,), (2, 3))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "texts.jsonl:2 is not JSON"),
        ("[1, 2]", "texts.jsonl:2 is not a text. Expected `prompt_ids` and `answer_ids`"),
        ('{"prompt_ids": [1]}', "texts.jsonl:2 is not a text"),
        ('{"prompt_ids": [], "answer_ids": [1, 2]}', "texts.jsonl:2 is not a text"),
        ('{"prompt_ids": [1, -1], "answer_ids": [1, 2]}', "texts.jsonl:2 is not a text"),
        ('{"prompt_ids": [true], "answer_ids": [1, 2]}', "texts.jsonl:2 is not a text"),
        ('{"prompt_ids": "12", "answer_ids": [1, 2]}', "texts.jsonl:2 is not a text"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path, line, message):
    path, good = tmp_path / "texts.jsonl", '{"prompt_ids": [1], "answer_ids": [1, 2]}'
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=r"texts\.jsonl:2") as raised:
        read_texts(path)
    assert message in str(raised.value)
    path.write_text(f"{good}\n{good}\n")
    assert len(read_texts(path)) == 2


def test_a_file_without_texts_and_one_that_is_cut_off_are_refused(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt_ids": [1], "answer_ids": [2]}\n')
    with pytest.raises(ValueError, match="holds no text with an answer"):
        read_texts(path)
    whole = gzip.compress(write_texts(path, TEXTS).read_bytes())
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz is cut off or damaged .*Copy it again"):
        read_texts(cut)


def test_the_hash_of_a_prompt_is_of_its_ids_alone():
    assert text(1).prompt_hash == Text("other", "b", (1, 2, 1), (4, 5)).prompt_hash
    # Not of their digits in a row.
    assert Text("", "", (1, 23), ()).prompt_hash != Text("", "", (12, 3), ()).prompt_hash


def test_the_same_prompts_are_held_out_whatever_the_order_of_the_file():
    train, held_out = split_by_prompt(TEXTS, 4)
    assert len(train) == 52 and [t.category for t in held_out] == ["a"] * 4 + ["b"] * 4
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    again, held_out_again = split_by_prompt(shuffled, 4)
    assert set(held_out_again) == set(held_out) and set(again) == set(train)
    # Both keep the order that they were given.
    assert again == [t for t in shuffled if t not in held_out]


def test_no_prompt_is_on_both_sides_under_another_name_or_answer():
    twins = [Text(f"twin of {t.id}", "other", t.prompt_ids, (3, 3)) for t in TEXTS]
    train, held_out = split_by_prompt(TEXTS + twins, 3)
    assert held_out and not {t.prompt_hash for t in train} & {t.prompt_hash for t in held_out}
    assert len(train) + len(held_out) == 2 * len(TEXTS)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (4, 0), (5, 1), (24, 4), (60, 12), (500, 20)])
def test_at_most_a_fifth_of_a_category_is_held_out(count, expected):
    train, held_out = split_by_prompt([text(i) for i in range(count)], 20)
    assert len(held_out) == expected and len(train) == count - expected


def test_none_can_be_held_out_but_not_fewer():
    assert split_by_prompt(TEXTS, 0) == (TEXTS, [])
    with pytest.raises(ValueError, match="`per_category` must be an integer >= 0, got -1"):
        split_by_prompt(TEXTS, -1)


def test_a_part_holds_a_like_share_of_every_category_in_whatever_order_the_file_is():
    part = spread(TEXTS, 10)
    assert [t.category for t in part] == ["a"] * 5 + ["b"] * 5 and len(set(part)) == 10
    assert spread(list(reversed(TEXTS)), 10) == part
    assert set(spread(TEXTS, 1000)) == set(TEXTS) and len(spread(TEXTS, 60)) == 60


def test_the_first_of_each_category_come_in_order():
    mixed = [text(0, "b"), text(0), text(1, "b"), text(1), text(2, "b")]
    assert first_of_each_category(mixed, 2) == mixed[:4]
    assert first_of_each_category(mixed, 1) == mixed[:2]


def test_a_text_that_the_target_cannot_read_is_named():
    texts = [text(1), text(5), text(6, answer=[3] * 8), text(7, answer=[3] * 9)]
    check_texts(texts, vocab_size=10, max_length=12)
    with pytest.raises(ValueError, match=r"Text 'a-1' holds the token id 9, the target has 0 to 8\. .*own tokenizer"):
        check_texts(texts, vocab_size=9, max_length=12)
    with pytest.raises(
        ValueError, match=r"Text 'a-6' has 11 tokens, the target takes 10 \(2 of 4 texts are too long\)"
    ):
        check_texts(texts, vocab_size=10, max_length=10)


DRAWN = [
    Text("p-t1-s1", "all", (1, 2), (3, 4, 5), prompt_id="p", source="some set", temperature=1.0, seed=2**47 + 1),
    Text("p", "maths", (1, 2), (3, 4), prompt_id="p", source="some set"),
]


def rows_of(texts):
    return [{**t.__dict__, "prompt_ids": list(t.prompt_ids), "answer_ids": list(t.answer_ids)} for t in texts]


def test_where_a_text_is_from_and_how_it_was_drawn_is_read_from_files_and_folders(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of(DRAWN)))
    assert read_texts(file) == DRAWN
    # Other columns are not looked at, and an empty category is the same as none.
    more = [{**row, "finish": "stop", "category": row["category"].replace("all", "")} for row in rows_of(DRAWN)]
    datasets.Dataset.from_list(more).save_to_disk(str(tmp_path / "folder"))
    assert read_texts(tmp_path / "folder") == DRAWN == read_texts(str(tmp_path / "folder"))


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no dataset\. Expected a folder that `blockpilot prepare` wrote"):
        read_texts(tmp_path)
    datasets.Dataset.from_list([{"prompt_ids": [1], "text": "a"}]).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(ValueError, match="has no column answer_ids, it has prompt_ids, text"):
        read_texts(tmp_path / "other")
    datasets.Dataset.from_list([{"prompt_ids": [1], "answer_ids": [2]}]).save_to_disk(str(tmp_path / "short"))
    with pytest.raises(ValueError, match="holds no text with an answer"):
        read_texts(tmp_path / "short")
    datasets.Dataset.from_list([{"prompt_ids": [1], "answer_ids": [2, 3]}]).save_to_disk(str(tmp_path / "good"))
    assert read_texts(tmp_path / "good") == [Text("row-0", "all", (1,), (2, 3))]
    (tmp_path / "good" / "state.json").unlink()
    (tmp_path / "good" / "settings.json").write_text("{}")
    with pytest.raises(ValueError, match="good is not finished"):
        read_texts(tmp_path / "good")


def test_a_temperature_that_is_no_number_is_named(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt_ids": [1], "answer_ids": [1, 2], "temperature": "hot"}\n')
    with pytest.raises(ValueError, match=r"texts\.jsonl:1 has a `temperature` or `seed` that is no number"):
        read_texts(path)
    path.write_text('{"prompt_ids": [1], "answer_ids": [1, 2], "temperature": "0.5", "seed": null}\n')
    assert (read_texts(path)[0].temperature, read_texts(path)[0].seed) == (0.5, 0)


def test_a_sweep_is_told_from_texts(tmp_path):
    datasets.Dataset.from_dict({"id": ["a"], "num_accepted": [[[0]]]}).save_to_disk(tmp_path / "sweep")
    with pytest.raises(ValueError, match=r"is a sweep\. Name the texts that it was made from"):
        read_texts(tmp_path / "sweep")

"""Rounds of a benchmark: order, resumption, turns, and what is said of a text that differs."""

import json

import pytest
import torch
from conftest import make_prompt, make_target, plain_generate

from blockpilot_hf import benchmark
from blockpilot_hf.benchmark import (
    make_rounds,
    near_tie,
    read_rounds,
    round_of,
    run_rounds,
)
from blockpilot_hf.benchmark_methods import Answer, Method
from blockpilot_hf.parity import first_difference
from blockpilot_hf.prompts import Prompt

RUN = {"target": "t"}


class Tokenizer:
    """One token a word."""

    chat_template = None

    def __call__(self, text, return_tensors):
        class Ids:
            input_ids = torch.tensor([[len(word) for word in text.split()]])

        return Ids

    def decode(self, ids, skip_special_tokens):
        return " ".join("x" * i for i in ids)


class Target:
    device = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch):
    """Names of methods as they are called, with ids and keywords; every answer is that of plain."""
    seen = []

    def answer(method, target, ids, *, seed, **kwargs):
        seen.append((method.title, ids[0].tolist(), seed, kwargs))
        return Answer((7, 8, 9), 3.0, 1.0, 0.0, 2.0, 0.5, 1.0, 2)

    monkeypatch.setattr(benchmark, "timed_answer", answer)
    return seen


METHODS = {
    "plain": Method("plain", "plain", print),
    "flight": Method("flight", "ours", print, is_default=True),
    "flight_drawn": Method("drawn", "ours", print, for_sampling=True),
    "paper": Method("paper", "ours", reason="not there"),
}


def run(rounds, path, methods=METHODS, **more):
    run_rounds(
        Target,
        Tokenizer(),
        methods,
        rounds,
        path,
        run=RUN,
        settings=lambda temperature: {"do_sample": temperature > 0},
        max_new_tokens=20,
        **more,
    )


def prompts(count=3):
    return [Prompt(f"p{i}", ("one two three",), "math") for i in range(count)]


def test_rounds_go_over_all_prompts_before_they_repeat():
    rounds = make_rounds({"a": prompts(2), "b": prompts(1)}, [0.0, 1.0], 2)
    keys = [one.key for one in rounds]
    assert keys[:5] == [
        ("a", "p0", 0.0, 0),
        ("a", "p0", 1.0, 0),
        ("a", "p1", 0.0, 0),
        ("a", "p1", 1.0, 0),
        ("b", "p0", 0.0, 0),
    ]
    assert len(keys) == len(set(keys)) == 12 and [one.repeat for one in rounds] == [0] * 6 + [1] * 6
    assert [one.place for one in rounds] == list(range(12))


def test_methods_are_warmed_once_and_then_go_in_turns(calls, tmp_path):
    run(make_rounds({"a": prompts(3)}, [0.0], 1), tmp_path / "0.jsonl", seed=5)
    titles = [title for title, *_ in calls]
    assert titles == ["plain", "flight", "plain", "flight", "flight", "plain", "plain", "flight"]
    assert [kwargs["max_new_tokens"] for *_, kwargs in calls] == [8, 8, 20, 20, 20, 20, 20, 20]
    assert {seed for _, _, seed, _ in calls} == {5}
    lines = read_rounds(tmp_path, RUN)
    assert [line["order"] for line in lines] == [["plain", "flight"], ["flight", "plain"], ["plain", "flight"]]
    assert list(lines[0]["calls"]) == ["plain", "flight"]
    assert lines[0]["calls"]["flight"]["other_s"] == pytest.approx(0.5)


def test_what_is_for_sampling_runs_when_sampling_only(calls, tmp_path):
    run(make_rounds({"a": prompts(1)}, [0.0, 1.0], 1), tmp_path / "0.jsonl")
    greedy, sampled = read_rounds(tmp_path, RUN)
    assert "flight_drawn" not in greedy["calls"] and "flight_drawn" in sampled["calls"]


def test_a_second_turn_goes_on_from_plains_answer(calls, tmp_path):
    two = [Prompt("two", ("one two", "three"), "math")]
    run(make_rounds({"a": two}, [0.0], 1), tmp_path / "0.jsonl")
    first, second = read_rounds(tmp_path, RUN)
    assert (first["turn"], second["turn"]) == (1, 2)
    assert second["num_prompt_tokens"] == 2 + 3 + 1 and calls[-1][1] == [3, 3, 7, 8, 9, 5]


def test_lines_of_all_processes_are_read_and_other_settings_refused(calls, tmp_path):
    rounds = make_rounds({"a": prompts(4)}, [0.0], 1)
    for index in range(2):
        run(rounds[index::2], tmp_path / f"{index}.jsonl")
    assert {round_of(line) for line in read_rounds(tmp_path, RUN)} == {one.key for one in rounds}
    with pytest.raises(ValueError, match="other settings"):
        read_rounds(tmp_path, {"target": "another"})


def test_a_prompt_that_was_cut_off_leaves_no_line(calls, tmp_path, monkeypatch):
    """A second turn alone could not be taken up again."""
    two = [Prompt("two", ("one two", "three"), "math")]
    answer, count = benchmark.timed_answer, []

    def breaks(*args, **kwargs):
        count.append(1)
        if len(count) == 5:
            raise KeyboardInterrupt
        return answer(*args, **kwargs)

    monkeypatch.setattr(benchmark, "timed_answer", breaks)
    with pytest.raises(KeyboardInterrupt):
        run(make_rounds({"a": two}, [0.0], 1), tmp_path / "0.jsonl")
    assert read_rounds(tmp_path, RUN) == []


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2, 3], [1, 2], 2), ([], [4], 0)],
)
def test_first_difference(a, b, expected):
    assert first_difference(a, b) == expected


def test_a_tie_is_told_from_another_text():
    target = make_target("llama")
    prompt = make_prompt(9)
    plain = plain_generate(target, prompt, max_new_tokens=6, do_sample=False)[0, 9:].tolist()
    with torch.no_grad():
        logits = target(torch.cat([prompt, torch.tensor([plain[:3]])], dim=-1)).logits[0, -1]
    second, worst = logits.topk(2).indices[1].item(), logits.argmin().item()
    for token in (second, worst):
        gap, verdict = near_tie(target, prompt, plain, [*plain[:3], token, 1, 2], 3)
        assert gap == pytest.approx(float(logits[plain[3]] - logits[token]), abs=1e-4) and verdict is False
    with torch.no_grad():  # two tokens whose rows of the head are the same have the same score
        head = target.get_output_embeddings().weight
        head[worst] = head[plain[3]]
    gap, verdict = near_tie(target, prompt, plain, [*plain[:3], worst, 1], 3)
    assert gap == 0 and verdict is True
    assert near_tie(target, prompt, plain, plain[:2], 2) == (None, None)


def test_differences_are_explained_where_texts_are_greedy(tmp_path, monkeypatch):
    target = make_target("llama")
    texts = {"plain": (7, 8, 9), "flight": (7, 5, 9)}

    def answer(method, target, ids, *, seed, **kwargs):
        return Answer(texts[method.title], 3.0, 1.0, 0.0, 2.0, None, 1.0, 2)

    monkeypatch.setattr(benchmark, "timed_answer", answer)
    methods = {name: METHODS[name] for name in texts}
    run_rounds(
        target,
        Tokenizer(),
        methods,
        make_rounds({"a": prompts(1)}, [0.0, 1.0], 1),
        tmp_path / "0.jsonl",
        run=RUN,
        settings=lambda temperature: {},
        max_new_tokens=3,
    )
    greedy, sampled = (line["calls"]["flight"] for line in read_rounds(tmp_path, RUN))
    assert greedy["first_difference"] == 1 and greedy["gap"] is not None and greedy["is_near_tie"] is False
    assert sampled["first_difference"] == 1 and sampled["gap"] is None and sampled["is_near_tie"] is None
    assert greedy["other_s"] is None
    json.dumps(greedy)

"""The embedded prompts, and prompt sets by name, by file and from a Hub."""

import io
import json
import sys
from collections import Counter

import datasets
import pytest
from local_hub import LocalHub
from python_process import PythonSession, is_error

from blockpilot_hf import benchmark_prompts
from blockpilot_hf.benchmark_prompts import PROMPT_SETS, load_prompt_set, prompt_set_facts
from blockpilot_hf.benchmark_sets import HUB_SETS
from blockpilot_hf.evaluation_rules import GROUPS, group_of
from blockpilot_hf.prompts import Prompt

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# A row of each set with its other columns, what `load_dataset` is asked for, and the prompt.
ROWS = {
    "gsm8k": (
        {"question": "1 + 1?", "answer": "2"},
        ("openai/gsm8k", "main", "test"),
        "1 + 1?" + BOXED,
        "gsm8k",
    ),
    "math500": (
        {"problem": "x", "solution": "y", "level": 3},
        ("HuggingFaceH4/MATH-500", None, "test"),
        "x" + BOXED,
        "math",
    ),
    "aime24": ({"id": 60, "problem": "x"}, ("HuggingFaceH4/aime_2024", None, "train"), "x" + BOXED, "math"),
    "aime25": ({"problem_idx": 1, "problem": "x"}, ("MathArena/aime_2025", None, "train"), "x" + BOXED, "math"),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        ("openai/openai_humaneval", None, "test"),
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```",
        "humaneval",
    ),
    "mbpp": (
        {"task_id": 2, "prompt": "Write f.", "code": "pass"},
        ("google-research-datasets/mbpp", "sanitized", "test"),
        "Write f.",
        "code",
    ),
    "swe-bench": (
        {"instance_id": "a__b-1", "problem_statement": "It fails."},
        ("princeton-nlp/SWE-bench_Lite", None, "test"),
        "Problem Statement:\nIt fails.\nPlease fix the issue described above.",
        "code",
    ),
    "alpaca": (
        {"instruction": "Sort.", "input": "3, 1", "output": "1, 3"},
        ("tatsu-lab/alpaca", None, "train"),
        "Sort.\n\nInput:\n3, 1",
        "instruction",
    ),
    "mt-bench": (
        {"prompt_id": 81, "category": "coding", "prompt": ["one", "two"], "reference": []},
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        ("one", "two"),
        "coding",
    ),
}


@pytest.fixture
def asked(monkeypatch):
    """What `load_dataset` was asked for; it answers with `asked.rows`."""

    class Asked(list):
        rows: list

    calls = Asked()

    def load_dataset(path, name=None, *, split, revision=None, data_files=None):
        calls.append((path, name, split, revision) if data_files is None else (path, data_files, split))
        return datasets.Dataset.from_list(calls.rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


# Our own


def test_embedded_prompts_are_balanced_over_the_groups_at_every_multiple_of_six():
    prompts = load_prompt_set("embedded")
    assert len(prompts) == 48
    groups = [group_of(prompt.category) for prompt in prompts]
    assert groups[: len(GROUPS)] == list(GROUPS)
    for limit in range(6, 49, 6):
        assert load_prompt_set("embedded", limit) == prompts[:limit]
        assert Counter(groups[:limit]) == dict.fromkeys(GROUPS, limit // 6)
    assert [prompt.id for prompt in prompts] == [f"{group}-{i // 6 + 1}" for i, group in enumerate(groups)]
    assert all(prompt.category in GROUPS[group] for prompt, group in zip(prompts, groups, strict=True))


def test_embedded_prompts_are_all_different_and_of_many_lengths():
    prompts = load_prompt_set("embedded")
    turns = [turn for prompt in prompts for turn in prompt.turns]
    assert len({" ".join(turn.lower().split()) for turn in turns}) == len(turns)
    assert Counter(len(prompt.turns) for prompt in prompts) == {1: 46, 2: 2}
    assert {prompt.source for prompt in prompts} == {"blockpilot_hf (Apache-2.0)"}
    lengths = [len(prompt.turns[0].split()) for prompt in prompts]
    assert min(lengths) < 25 and max(lengths) > 120 and max(lengths) < 200
    passages = [p.turns[0].split("\n\n", 1)[1] for p in prompts if group_of(p.category) == "summary"]
    assert all(60 <= len(passage.split()) <= 150 for passage in passages)


# By name


@pytest.mark.parametrize("name", ROWS)
def test_named_sets_are_asked_for_as_published_and_formatted_as_in_the_papers(asked, name):
    row, place, prompt, category = ROWS[name]
    asked.rows = [row]
    (found,) = load_prompt_set(name)
    assert asked == [(*place, None)]
    assert found.turns == ((prompt,) if isinstance(prompt, str) else prompt)
    assert (found.id, found.category) == (f"{name}-0", category)
    assert group_of(found.category) in GROUPS
    assert found.source.startswith(f"{place[0]}:{place[1] or ''}:{place[2]}:")


def test_an_instruction_without_input_stands_alone(asked):
    asked.rows = [{"instruction": "Sing.", "input": ""}]
    assert load_prompt_set("alpaca")[0].turns == ("Sing.",)


def test_contest_problems_are_read_from_their_files_and_show_the_code_to_start_from(asked, monkeypatch):
    files = []

    def hf_hub_download(*args, **options):
        files.append((*args, options))
        return f"cached/{args[1]}"

    monkeypatch.setattr(benchmark_prompts, "hf_hub_download", hf_hub_download)
    asked.rows = [
        {"question_content": "Add.", "starter_code": "class Solution:", "private_test_cases": "large"},
        {"question_content": "Add.", "starter_code": "", "private_test_cases": "large"},
    ]
    given, free = (prompt.turns[0] for prompt in load_prompt_set("livecodebench@v6"))
    names = ["test.jsonl", *(f"test{i}.jsonl" for i in range(2, 7))]
    assert asked == [("json", {"test": [f"cached/{name}" for name in names]}, "test")]
    options = {"repo_type": "dataset", "revision": "v6"}
    assert files == [("livecodebench/code_generation_lite", name, options) for name in names]
    middle = (
        "passes all tests. You will NOT return anything except for the program\n\n### Question:\nAdd.\n\n### Format: "
    )
    end = "```\n\n### Answer: (use the provided format with backticks)"
    assert given.startswith("You are an expert Python programmer. You will be given") and middle in given
    assert given.endswith(f"Use the following code structure:\n```python\nclass Solution:\n{end}")
    assert free.endswith(f"Write your code in the following format:\n```python\n# YOUR CODE HERE\n{end}")


def test_spec_bench_is_read_from_its_repository(monkeypatch):
    addresses = []
    lines = [{"question_id": 81, "category": "writing", "turns": ["a", "b"]}, {"category": "rag", "turns": ["c"]}]

    def urlopen(address, timeout):
        addresses.append(address)
        return io.BytesIO("\n".join(map(json.dumps, lines)).encode())

    monkeypatch.setattr(benchmark_prompts, "is_offline_mode", lambda: False)
    monkeypatch.setattr(benchmark_prompts.urllib.request, "urlopen", urlopen)
    address = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/{}/data/spec_bench/question.jsonl"
    assert load_prompt_set("spec-bench") == [
        Prompt("spec-bench-0", ("a", "b"), "writing", address.format("main")),
        Prompt("spec-bench-1", ("c",), "rag", address.format("main")),
    ]
    load_prompt_set("spec-bench@0abc")
    assert addresses == [address.format("main"), address.format("0abc")]
    lines.clear()
    with pytest.raises(OSError, match=r"cannot be read from https.*It is empty\. Save that file"):
        load_prompt_set("spec-bench")


def test_a_limit_spreads_evenly_and_keeps_the_ids(asked):
    asked.rows = [{"question": f"q{i}"} for i in range(10)]
    found = load_prompt_set("gsm8k", 3)
    assert [prompt.id for prompt in found] == ["gsm8k-0", "gsm8k-3", "gsm8k-6"]
    assert [prompt.turns[0][:2] for prompt in found] == ["q0", "q3", "q6"]
    assert found == [prompt for prompt in load_prompt_set("gsm8k") if prompt in found]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit):
    with pytest.raises(ValueError, match=f"`limit` must be an integer >= 1, got {limit}"):
        load_prompt_set("embedded", limit)
    assert len(load_prompt_set("embedded", 1)) == 1


def test_revisions_and_other_places_can_be_named(asked):
    asked.rows = [{"question": "q", "problem": "p", "turns": ["t", "u"], "category": "rag"}]
    (pinned,) = load_prompt_set("gsm8k@1a2b")
    (other,) = load_prompt_set("aime25=math-ai/aime25")
    (whole,) = load_prompt_set("aime25=math-ai/aime25@v1:c:test:question")
    (bare,) = load_prompt_set("owner/name")
    (full,) = load_prompt_set("hf://owner/name@refs/pr/5::dev:question")
    assert asked == [
        ("openai/gsm8k", "main", "test", "1a2b"),
        ("math-ai/aime25", None, "train", None),
        ("math-ai/aime25", "c", "test", "v1"),
        ("owner/name", None, "test", None),
        ("owner/name", None, "dev", "refs/pr/5"),
    ]
    assert (other.turns, whole.turns) == (("p" + BOXED,), ("q" + BOXED,))
    assert (pinned.source, pinned.category) == ("openai/gsm8k@1a2b:main:test:question", "gsm8k")
    assert bare == Prompt("name-0", ("t", "u"), "rag", "owner/name::test")
    assert full.turns == ("q",) and full.id == "name-0"
    assert load_prompt_set(full.source)[0] == full


def test_columns_that_are_not_there_are_told_with_those_that_are(asked):
    asked.rows = [{"query": "q", "answer": 1}]
    with pytest.raises(ValueError, match=r"no column 'question', which .* It has query, answer\. .*`gsm8k=owner/name:"):
        load_prompt_set("gsm8k")
    with pytest.raises(ValueError, match=r"no column turns, prompt, messages\. .*`owner/name:config.*: query, answer"):
        load_prompt_set("owner/name")
    with pytest.raises(ValueError, match=r"row 0 of .*column `answer` is not a prompt: '1'.* Name another column as"):
        load_prompt_set("owner/name:::answer")
    assert load_prompt_set("gsm8k=owner/name:::query")[0].turns == ("q" + BOXED,)


def test_rows_without_a_prompt_are_left_out(asked):
    asked.rows = [{"prompt": " "}, {"prompt": "p"}]
    assert [prompt.id for prompt in load_prompt_set("humaneval")] == ["humaneval-1"]
    asked.rows = [{"prompt": " "}]
    with pytest.raises(ValueError, match="holds no prompt in the column 'prompt'"):
        load_prompt_set("humaneval")


# By file


def test_files_are_read_and_spread(tmp_path, monkeypatch):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": f"p{i}", "category": "qa"}) + "\n" for i in range(4)))
    assert load_prompt_set(file, 2) == [
        Prompt("0", ("p0",), "qa", "mine.jsonl"),
        Prompt("2", ("p2",), "qa", "mine.jsonl"),
    ]
    text = tmp_path / "gsm8k"
    text.write_text("one\ntwo\n")
    monkeypatch.chdir(tmp_path)
    assert [prompt.turns for prompt in load_prompt_set("./gsm8k")] == [("one",), ("two",)]
    with pytest.raises(ValueError, match=r"\./nowhere' is no prompt set"):
        load_prompt_set("./nowhere")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").mkdir()
    with pytest.raises(ValueError, match="a/b is a folder, not a file of prompts"):
        load_prompt_set("a/b")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "'gsm8' is no prompt set. Did you mean gsm8k?"),
        ("MT_Bench", "Did you mean mt-bench?"),
        ("xyzzy", "'xyzzy' is no prompt set. Name a .jsonl or text file"),
        ("mine.jsonl", "The file mine.jsonl does not exist."),
        ("data/mine.jsonl", "The file data/mine.jsonl does not exist."),
        ("embedded@main", "embedded has no revisions"),
        ("gsm8k@", "gsm8k takes @revision or =owner/name:config:split:column after it"),
        ("gsm8k=nothing", "gsm8k takes @revision"),
        ("a/b/c", "'a/b/c' is no prompt set."),
        ("", "'' is no prompt set."),
    ],
)
def test_unknown_names_are_told_what_is_known(name, message):
    with pytest.raises(ValueError) as caught:
        load_prompt_set(name)
    assert message in str(caught.value)
    assert all(known in str(caught.value) for known in PROMPT_SETS)


def test_help_has_a_line_for_every_set():
    assert list(PROMPT_SETS) == ["embedded", *HUB_SETS]
    assert all(0 < len(line) < 90 and "\n" not in line for line in PROMPT_SETS.values())


def test_without_datasets_the_install_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"`datasets` is needed .*pip install 'blockpilot-hf\[train\]'"):
        load_prompt_set("gsm8k")
    assert load_prompt_set("embedded", 1)


# Facts


def test_facts_tell_prompts_apart_by_ids_turns_and_order(tmp_path):
    prompts = load_prompt_set("embedded", 3)
    facts = prompt_set_facts("embedded", prompts)
    assert (facts["name"], facts["num_prompts"], facts["source"]) == ("embedded", 3, "blockpilot_hf (Apache-2.0)")
    changed = [
        prompts[::-1],
        prompts[:2],
        [*prompts[:2], Prompt("other", prompts[2].turns)],
        [*prompts[:2], Prompt(prompts[2].id, (prompts[2].turns[0] + " ",))],
        [*prompts[:2], Prompt(prompts[2].id, (*prompts[2].turns, "more"))],
    ]
    hashes = [prompt_set_facts("embedded", other)["sha256"] for other in changed]
    assert len({facts["sha256"], *hashes}) == 6 and len(facts["sha256"]) == 64
    relabelled = [Prompt(prompt.id, prompt.turns, "qa", "elsewhere") for prompt in prompts]
    assert prompt_set_facts("embedded", relabelled)["sha256"] == facts["sha256"]
    assert prompt_set_facts("embedded", [*relabelled, *prompts])["source"] is None


def test_facts_hold_no_folder(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("one\n")
    facts = prompt_set_facts(str(file), load_prompt_set(file))
    assert facts["name"] == "mine.txt" and str(tmp_path) not in str(facts)


# With the real clients

CARD = """---
configs:
- config_name: main
  data_files: [{split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: test, path: socratic/test-*}]
---
"""
LOAD = """
from blockpilot_hf.benchmark_prompts import load_prompt_set
result = [[p.id, p.turns[0]] for p in load_prompt_set(name)]
"""
REFUSED = """
from blockpilot_hf.benchmark_prompts import load_prompt_set
result = raised(load_prompt_set, name)
"""
DOWNLOAD = """
from huggingface_hub import snapshot_download
result = snapshot_download("openai/gsm8k", repo_type="dataset")
"""


@pytest.fixture(scope="module")
def hub():
    def parquet(text):
        file = io.BytesIO()
        datasets.Dataset.from_list([{"question": f"{text} {i}", "answer": ""} for i in range(2)]).to_parquet(file)
        return file.getvalue()

    line = json.dumps({"question_content": "Add.", "starter_code": "", "difficulty": "easy"}).encode() + b"\n"
    files = {"README.md": CARD.encode()}
    files |= {f"{config}/test-0.parquet": parquet(config) for config in ("main", "socratic")}
    with LocalHub() as hub:
        hub.put("openai/gsm8k", files, repo_type="dataset")
        parts = {file: line for file in HUB_SETS["livecodebench"].files}
        hub.put(
            "livecodebench/code_generation_lite", {**parts, "code_generation_lite.py": b"1 / 0"}, repo_type="dataset"
        )
        yield hub


def process(hub, home, *, offline=False):
    """A process that finds this package, with what it keeps in the folder `home`."""
    environment = hub.environment(home, offline=offline)
    if offline:
        environment["HF_DATASETS_OFFLINE"] = "1"
    return PythonSession(environment, is_bare=False)


def test_sets_come_from_the_hub_and_its_refusals_are_one_sentence(hub, tmp_path):
    with process(hub, tmp_path) as session:
        main = session.run(LOAD, name="gsm8k")
        assert main == [[f"gsm8k-{i}", f"main {i}{BOXED}"] for i in range(2)]
        other = session.run(LOAD, name="gsm8k=openai/gsm8k:socratic")
        assert other == [[f"gsm8k-{i}", f"socratic {i}{BOXED}"] for i in range(2)]
        assert [name for name, _ in session.run(LOAD, name="livecodebench")] == [f"livecodebench-{i}" for i in range(6)]
        refused = {
            "gsm8k@nope": ("OSError", "Revision 'nope' doesn't exist"),
            "math500": ("OSError", "doesn't exist on the Hub or cannot be accessed. Check the id"),
            "livecodebench/code_generation_lite": ("OSError", "Dataset scripts are no longer supported"),
            "openai/gsm8k:nope": ("ValueError", "Available: ['main', 'socratic']. Choose configuration and split"),
            "openai/gsm8k:main:train": ("ValueError", 'Unknown split "train".'),
            "openai/gsm8k": ("ValueError", "Config name is missing."),
        }
        for name, (kind, message) in refused.items():
            assert is_error(session.run(REFUSED, name=name), kind, None, message)


def test_offline_is_told_with_what_to_do_and_what_hf_download_brought_is_found(hub, tmp_path):
    parts = " ".join(HUB_SETS["livecodebench"].files)
    refused = {
        "gsm8k": "or choose `--prompts embedded`.",
        "gsm8k@v1": "Run `hf download openai/gsm8k --repo-type dataset --revision v1` where it can",
        "livecodebench": f"`hf download livecodebench/code_generation_lite {parts} --repo-type dataset`",
        "spec-bench": "HF_HUB_OFFLINE is set. Save that file where there is a network",
    }
    with process(hub, tmp_path, offline=True) as session:
        with hub.watch() as requests:
            assert len(session.run(LOAD, name="embedded")) == 48
            for name, message in refused.items():
                assert is_error(session.run(REFUSED, name=name), "OSError", None, message)
        assert requests == []
        with PythonSession(hub.environment(tmp_path)) as other:
            other.run(DOWNLOAD)
        with hub.watch() as requests:
            assert session.run(LOAD, name="gsm8k") == [[f"gsm8k-{i}", f"main {i}{BOXED}"] for i in range(2)]
        assert requests == []

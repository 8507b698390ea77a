"""`blockpilot prepare` on a tiny saved target, through `main` as the installed script calls it."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import datasets
import pytest
import torch
from cli_models import byte_tokenizer
from conftest import make_target

from blockpilot_hf import cli, cli_prepare
from blockpilot_hf.target_states import weights_fingerprint
from blockpilot_hf.target_texts import COLUMNS, TargetAnswers
from blockpilot_hf.texts import read_texts


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """`target` with its tokenizer, and `prompts.jsonl`: eleven prompts, five of them of two turns."""
    root = tmp_path_factory.mktemp("prepare")
    tokenizer = byte_tokenizer()
    make_target("llama", vocab_size=len(tokenizer), eos_token_id=1).save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    entries = [
        {"id": f"p{i}", "turns": [f"say {'x' * (i % 5)}{i}", "more"][: 1 + i % 2], "category": "ab"[i % 2]}
        for i in range(11)
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return root


def command_of(root, output, *arguments, source=None):
    command = ["prepare", source or root / "prompts.jsonl", "--output", output, "--target", root / "target"]
    command += ["--dtype", "float32", "--max-new-tokens", 12, "--batch-size", 4, *arguments]
    return [str(part) for part in command]


@pytest.fixture
def run(root, monkeypatch, capsys):
    """`run(output, *arguments)` to `(status, stdout, stderr)`."""

    def run(output, *arguments, source=None):
        monkeypatch.setattr(sys, "argv", ["blockpilot", *command_of(root, output, *arguments, source=source)])
        monkeypatch.delenv("COLUMNS", raising=False)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


SAMPLED = ("--temperatures", "0,1", "--samples", 2)


@pytest.fixture(scope="module")
def unbroken(root, tmp_path_factory):
    """The dataset of one process that nothing stopped, greedy and sampled."""
    output = tmp_path_factory.mktemp("unbroken") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["blockpilot", *command_of(root, output, *SAMPLED)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 0
    return output


def rows_in(output):
    return datasets.load_from_disk(str(output)).to_list()


def test_it_says_what_it_will_do_and_what_came_of_it(run, tmp_path):
    status, out, err = run(tmp_path / "out", *SAMPLED)
    assert status == 0 and err == ""
    assert "11 prompts, 48 answers (one per turn and temperature) in 9 batches at temperature 0, 1, at most 12" in out
    assert "tokens each and 576 together" in out
    rows = rows_in(tmp_path / "out")
    tokens = sum(len(row["answer_ids"]) for row in rows)
    stopped = 100 * sum(row["finish"] == "stop" for row in rows) / 48
    assert f"48 answers, {tokens:,} tokens, {tokens / 48:.1f} on average; {stopped:.1f} % end by themselves" in out
    assert f'load it with datasets.load_from_disk("{tmp_path / "out"}")' in out
    assert "per second" in out and "note:" not in out
    # Once more: nothing is done, nothing is measured.
    status, out, _ = run(tmp_path / "out", *SAMPLED)
    assert status == 0 and "finished before: nothing to do" in out and "per second" not in out
    assert "48 answers" in out and rows_in(tmp_path / "out") == rows


def test_rows_name_their_target_and_are_texts(root, unbroken):
    rows = rows_in(unbroken)
    assert list(rows[0]) == list(COLUMNS)
    texts = read_texts(unbroken)
    assert len(texts) == sum(len(row["answer_ids"]) > 1 for row in rows) > 40
    assert {text.source for text in texts} == {"prompts.jsonl"} and {t.temperature for t in texts} == {0.0, 1.0}
    model, _ = cli_prepare.load_target(str(root / "target"), "float32")
    found = {(row["target"], row["target_revision"], row["target_fingerprint"]) for row in rows}
    assert found == {(str(root / "target"), None, weights_fingerprint(model))}
    settings = json.loads((unbroken / "settings.json").read_text())
    assert settings["temperatures"] == [0.0, 1.0] and settings["target_fingerprint"] == weights_fingerprint(model)


def test_interrupted_it_ends_with_130_and_goes_on_to_the_same_dataset(run, unbroken, monkeypatch, tmp_path):
    answer, asked = TargetAnswers.__call__, []

    def interrupted(self, unit):
        asked.append(unit)
        if len(asked) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return answer(self, unit)

    monkeypatch.setattr(TargetAnswers, "__call__", interrupted)
    status, _, err = run(tmp_path / "out", *SAMPLED)
    assert status == 130 and "interrupted" in err
    assert len(list((tmp_path / "out" / "units").glob("*.parquet"))) == 3
    assert run(tmp_path / "out", *SAMPLED)[0] == 0
    assert len(asked) == 4 + 6
    assert rows_in(tmp_path / "out") == rows_in(unbroken)


def test_other_settings_prompts_or_targets_do_not_mix(run, root, unbroken, tmp_path):
    for arguments, name in (((*SAMPLED, "--seed", 1), "seed"), (("--temperatures", "0,0.5"), "temperatures")):
        status, _, err = run(unbroken, *arguments)
        assert status == 2 and f"holds results of other settings: `{name}` was" in err
    fewer = tmp_path / "prompts.jsonl"
    fewer.write_text("\n".join((root / "prompts.jsonl").read_text().splitlines()[1:]))
    status, _, err = run(unbroken, *SAMPLED, source=fewer)
    assert status == 2 and "`num_prompts` was 11 and is 10 now" in err and "prompts_fingerprint" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperatures", "0,hot"), "`--temperatures` takes numbers separated by commas, such as 0,1, got '0,hot'."),
        (("--temperatures", "0,0"), "must be different numbers >= 0"),
        (("--samples", 2), "`samples` is 2, and every answer is greedy"),
        (("--dtype", "int8"), "`--dtype` must be one of"),
        (("--batch-size", 0), "See `blockpilot prepare --help`"),
        (("--target", "./nowhere"), "`--target` names the folder ./nowhere, which does not exist."),
    ],
)
def test_bad_options_are_told_before_anything_is_loaded(run, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(cli_prepare, "load_target", lambda *a, **k: pytest.fail("loaded"))
    status, _, err = run(tmp_path / "out", *arguments)
    assert status == 2 and message in err and not (tmp_path / "out").exists()


def test_an_output_folder_of_something_else_is_told_before_anything_is_loaded(run, monkeypatch, tmp_path):
    monkeypatch.setattr(cli_prepare, "load_target", lambda *a, **k: pytest.fail("loaded"))
    (tmp_path / "a.jpg").touch()
    status, _, err = run(tmp_path)
    assert status == 2 and "holds other files, and is not the output of an earlier call" in err


# --- sources ---


def prompts_of(source, limit=None, category="", **options):
    defaults = {"config": None, "split": "train", "prompt_column": None, "id_column": None, "category_column": None}
    return cli_prepare._read_source(str(source), limit, category, {**defaults, **options})


def test_files_keep_what_they_say_and_get_the_rest(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "one", "category": "qa", "source": "set"}\n{"prompt": "two"}\n')
    found, num_empty = prompts_of(file, category="other")
    assert [(p.turns, p.category, p.source) for p in found] == [
        (("one",), "qa", "set"),
        (("two",), "other", "a.jsonl"),
    ]
    assert num_empty == 0
    (tmp_path / "plain").write_text("one\ntwo\nthree\n")
    assert [p.turns for p in prompts_of(tmp_path / "plain", limit=2)[0]] == [("one",), ("two",)]


ROWS = [{"question": f"what is {i}?", "key": f"k{i}", "kind": "ab"[i % 2]} for i in range(5)] + [
    {"question": "", "key": "k5", "kind": "a"}
]


@pytest.mark.parametrize("kind", ["parquet", "json", "csv", "folder", "saved"])
def test_datasets_on_this_machine_are_read_by_their_columns(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_list(ROWS)
    path = tmp_path / "set" if kind in ("folder", "saved") else tmp_path / f"set.{kind}"
    if kind == "saved":
        rows.save_to_disk(str(path))
    elif kind == "folder":
        path.mkdir()
        rows.to_parquet(str(path / "test.parquet"))
    else:
        getattr(rows, f"to_{kind}")(str(path))
    columns = {"prompt_column": "question", "id_column": "key", "category_column": "kind"}
    found, num_empty = prompts_of(path, split="test" if kind == "folder" else "train", **columns)
    assert [(p.id, p.turns, p.category, p.source) for p in found] == [
        (f"k{i}", (f"what is {i}?",), "ab"[i % 2], path.name) for i in range(5)
    ]
    assert num_empty == 1
    assert [p.id for p in prompts_of(path, limit=2, split="test" if kind == "folder" else "train", **columns)[0]] == [
        "k0",
        "k2",
    ]


def test_columns_that_are_not_there_are_told_with_those_that_are(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(
        ValueError, match=r"has no column `turns`, `prompt` or `messages`\. Name one with `--prompt-column`: q"
    ):
        prompts_of(tmp_path / "set")
    for option in ("prompt_column", "id_column", "category_column"):
        with pytest.raises(
            ValueError, match=f"has no column `x`. Name one with `--{option.replace('_', '-')}`: question"
        ):
            prompts_of(tmp_path / "set", **{"prompt_column": "question", option: "x"})
    assert len(prompts_of(tmp_path / "set", prompt_column="question")[0]) == 5


def test_what_is_neither_here_nor_on_the_hub_is_told(run, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("./nowhere", "prompts.jsonl", tmp_path / "a.parquet"):
        status, _, err = run(tmp_path / "out", source=name)
        assert status == 2 and f"{name} does not exist. Name a file of prompts, a folder, or a dataset" in err
    status, _, err = run(tmp_path / "out", source="someone/nonesuch")
    assert (
        status == 1
        and "The dataset someone/nonesuch cannot be loaded" in err
        and "check its name and the network" in err
    )


def test_what_is_left_out_is_said(run, root, tmp_path):
    file = tmp_path / "prompts.jsonl"
    prompts = [{"prompt": "one"}, {"prompt": "one"}, {"prompt": "x" * 600}, {"turns": ["two", "y" * 600]}]
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    status, out, _ = run(tmp_path / "out", source=file)
    assert status == 0
    assert "note: 1 prompt left out for want of room for an answer (more than 500 tokens), 'line-3'" in out
    assert "note: 1 prompt left out as repeated, 'line-2' the first of them" in out
    assert "note: 1 later turn left out for want of room for an answer" in out
    assert [row["id"] for row in rows_in(tmp_path / "out")] == ["line-1", "line-4"]


def test_generation_settings_that_do_not_apply_are_said(run, root, monkeypatch, tmp_path):
    load = cli_prepare.load_target

    def with_penalty(*arguments, **options):
        model, tokenizer = load(*arguments, **options)
        model.generation_config.repetition_penalty = 1.1
        return model, tokenizer

    monkeypatch.setattr(cli_prepare, "load_target", with_penalty)
    status, out, _ = run(tmp_path / "out")
    assert status == 0 and "without its generation config's repetition_penalty 1.1" in out


# --- processes ---


def environment():
    # What the fixtures set for one process; each of these has a core's share anyway.
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def test_two_processes_of_accelerate_give_the_dataset_of_one(root, unbroken, tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [*launcher, "-m", "blockpilot_hf.cli", *command_of(root, tmp_path / "out", *SAMPLED)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("48 answers") == 2 and done.stdout.count("2 processes") == 1  # before and after, by one
    assert rows_in(tmp_path / "out") == rows_in(unbroken)


@pytest.mark.slow
def test_killed_at_random_moments_it_goes_on_to_the_same_dataset(root, unbroken, tmp_path):
    command = [sys.executable, "-m", "blockpilot_hf.cli", *command_of(root, tmp_path / "out", *SAMPLED)]
    chance = random.Random(0)
    for _ in range(3):
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
        while process.poll() is None and not (tmp_path / "out" / "units").is_dir():
            time.sleep(0.01)
        time.sleep(chance.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows_in(tmp_path / "out") == rows_in(unbroken)


@pytest.mark.gpu
def test_on_a_gpu_rows_end_where_they_end_alone(root, tmp_path, run):
    status, _, _ = run(tmp_path / "out", "--max-new-tokens", 60)
    assert status == 0 and torch.cuda.is_available()
    target = make_target("llama", vocab_size=len(byte_tokenizer()), eos_token_id=1).cuda()
    for row in rows_in(tmp_path / "out"):
        ids = torch.tensor([row["prompt_ids"]], device="cuda")
        plain = target.generate(ids, max_new_tokens=60, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
        assert row["answer_ids"] == plain


@pytest.mark.parametrize("options", ["thinking", "[1]", '{"tokenize": true}'])
def test_template_options_that_are_none_are_refused(run, tmp_path, options):
    status, _, err = run(tmp_path / "out", "--template-options", options)
    assert status == 2 and "`--template-options` takes a JSON object" in err


def test_template_options_are_on_record(run, tmp_path):
    status, _, _ = run(tmp_path / "out", "--template-options", '{"enable_thinking": false}')
    assert status == 0
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["template_options"] == {"enable_thinking": False}


def test_columns_of_a_jsonl_file_are_honoured(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "one", "question": "two", "kind": "qa"}\n')
    found, _ = prompts_of(file, prompt_column="question", category_column="kind")
    assert [(p.turns, p.category) for p in found] == [(("two",), "qa")]
    with pytest.raises(ValueError, match=r"has no column `nonsense`. Name one with `--prompt-column`: prompt"):
        prompts_of(file, prompt_column="nonsense")
    text = tmp_path / "a.txt"
    text.write_text("one\n")
    assert [p.turns for p in prompts_of(text)[0]] == [("one",)]
    with pytest.raises(ValueError, match=r"it is a text file, which has no columns. Leave the column options out"):
        prompts_of(text, prompt_column="question")


def test_texts_are_no_prompts_unless_their_column_is_named(tmp_path):
    rows = {"prompt": ["one"], "prompt_ids": [[1]], "answer_ids": [[2, 3]]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "texts")
    with pytest.raises(ValueError, match="holds texts, which are answered already"):
        prompts_of(tmp_path / "texts")
    assert [p.turns for p in prompts_of(tmp_path / "texts", prompt_column="prompt")[0]] == [("one",)]

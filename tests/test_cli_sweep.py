"""`blockpilot sweep` and `blockpilot check-replay` on a tiny saved pair, through `main` as the script does."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import plain_generate
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockpilot_hf import cli_sweep
from blockpilot_hf import sweep as sweep_module
from blockpilot_hf.cli_sweep import parse_block_sizes
from blockpilot_hf.prompts import encode_prompt
from blockpilot_hf.sweep import read_sweep
from blockpilot_hf.texts import Text

pytest_plugins = ["cli_models"]

COUNT = 10


@pytest.fixture(scope="module")
def answers(folders):
    """Of the tiny target, to ten prompts: greedy ones and one sampled."""
    model = AutoModelForCausalLM.from_pretrained(folders / "target").eval()
    tokenizer = AutoTokenizer.from_pretrained(folders / "target")
    texts = []
    for i in range(COUNT):
        prompt = encode_prompt(tokenizer, f"text {i}")
        kind = {"do_sample": True, "temperature": 1.0, "top_k": 0} if i == COUNT - 1 else {"do_sample": False}
        answer = plain_generate(model, prompt, seed=7, max_new_tokens=9 + i % 4, **kind)[0, prompt.shape[1] :]
        text = Text(f"p{i}", ("code", "maths")[i % 2], tuple(prompt[0].tolist()), tuple(answer.tolist()))
        texts.append(replace(text, temperature=1.0, seed=7) if kind["do_sample"] else text)
    return texts


@pytest.fixture
def texts_file(tmp_path, answers):
    file = tmp_path / "texts.jsonl"
    names = ("id", "category", "prompt_ids", "answer_ids", "temperature", "seed")
    file.write_text("".join(json.dumps({name: getattr(text, name) for name in names}) + "\n" for text in answers))
    return file


@pytest.fixture
def swept(run, folders, texts_file, tmp_path):
    """`swept(*arguments)` runs `sweep` on the texts to a folder `out`, by default at sizes 1 to 4."""

    def call(*arguments, output="out", **settings):
        named = () if "--block-sizes" in arguments else ("--block-sizes", "1-4")
        given = ("--output", tmp_path / output, "--drafter", folders / "drafter", *named, *arguments)
        return (*run("sweep", texts_file, *given, **settings), tmp_path / output)

    return call


def test_sweep_writes_a_sweep_and_shows_tau_by_category_and_temperature(swept, answers):
    status, out, _, folder = swept()
    assert status == 0
    sweep = read_sweep(folder)
    assert sweep.block_sizes == (1, 2, 3, 4) and {row.id for row in sweep.rows} == {text.id for text in answers}
    assert (sweep.settings["target"], sweep.settings["drafter"]) == ("target", "drafter")
    greedy = [row for row in sweep.rows if row.temperature == 0]
    header = re.search(r"tau by block size, temperature 0\n\s*(category.*)", out)[1]
    assert header.split() == ["category", "1", "2", "3", "4"]
    found = re.findall(r"^ ?(\w+) \((\d+)\) +(.*)$", out, flags=re.MULTILINE)
    assert [(name, int(count)) for name, count, _ in found] == [
        ("code", 5), ("maths", 4), ("all", 9), ("maths", 1), ("all", 1)
    ]  # fmt: skip
    for i, size in enumerate(sweep.block_sizes):
        tau = sum(row.acceptance_length(size) for row in greedy) / len(greedy)
        assert found[2][2].split()[i] == f"{tau:.2f}"
    assert "tau by block size, temperature 1" in out and f"10 texts in {folder}" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_many_sizes_are_shown_in_parts_that_fit(swept):
    status, out, _, folder = swept("--block-sizes", "1,3-16")
    assert status == 0 and len(read_sweep(folder).rows) == COUNT
    shown = [size for line in re.findall(r"^ *category(.*)$", out, flags=re.MULTILINE) for size in line.split()]
    assert shown == 2 * [str(size) for size in (1, *range(3, 17))]  # for greedy texts, and for sampled ones
    assert max(map(len, out.splitlines())) <= 80


def test_limit_takes_a_like_share_of_every_category_and_answers_can_be_cut(swept):
    folder = swept("--limit", 4, "--max-new-tokens", 5, "--keep-logits", "--all-positions")[3]
    sweep = read_sweep(folder)
    assert sorted(row.category for row in sweep.rows) == ["code", "code", "maths", "maths"]
    assert {row.num_new_tokens for row in sweep.rows} == {5} and sweep.rows[0].logits is not None
    assert sweep.settings["position_sizes"] == [1, 2, 3, 4] and sweep.settings["max_new_tokens"] == 5


def test_positions_can_be_kept_at_some_sizes(swept):
    status, _, err, _ = swept("--all-positions", "--position-sizes", "2")
    assert (status, "exclude each other" in err) == (2, True), err
    status, _, err, _ = swept("--position-sizes", "2,9")
    assert (status, "must be among the block sizes [1, 2, 3, 4], got [9] too" in " ".join(err.split())) == (2, True)
    status, _, err, folder = swept("--position-sizes", "2,4")
    assert status == 0, err
    assert {tuple(row.accepted_at) for row in read_sweep(folder).rows} == {(2, 4)}


def test_an_interrupted_sweep_ends_with_130_and_goes_on(swept, monkeypatch):
    walk, calls = sweep_module.walk, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return walk(*args)

    monkeypatch.setattr(sweep_module, "walk", interrupted)
    assert swept()[0] == 130
    status, out, _, folder = swept()
    assert status == 0 and len(calls) == 3
    again = swept()
    assert again[1] == out and len(calls) == 3  # nothing is computed again
    assert read_sweep(swept(output="unbroken")[3]) == read_sweep(folder)
    status, _, err, _ = swept("--block-sizes", "1,2")
    assert status == 2 and "holds results of other settings: `block_sizes` was [1, 2, 3, 4]" in " ".join(err.split())


def test_two_processes_give_what_one_gives(swept, folders, texts_file, tmp_path):
    one = read_sweep(swept()[3])
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "blockpilot_hf.cli", "sweep", str(texts_file), "--output", str(tmp_path / "two")]
    command += ["--target", str(folders / "target"), "--drafter", str(folders / "drafter"), "--block-sizes", "1-4"]
    started = [
        subprocess.Popen(
            command,
            # Another number of threads sums in another order.
            env={**os.environ, **threads, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert "tau by block size" in ended[0][0] and ended[1][0] == ""  # one of them tells
    assert read_sweep(tmp_path / "two") == one


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1-4", [1, 2, 3, 4]), ("8,1,2", [1, 2, 8]), (" 1, 3-5 ,4", [1, 3, 4, 5]), ("16", [16]), ("3-3", [3])],
)
def test_block_sizes_are_lists_and_ranges(text, sizes):
    assert parse_block_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "0-3", "4-2", "1-", "-3", "a", "1,,2", "1-2-3", "1.5"])
def test_block_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r"`--block-sizes` takes integers >= 1 and rising ranges of them"):
        parse_block_sizes(text)


def test_what_cannot_be_swept_is_told_in_one_line(swept, run, folders, texts_file, tmp_path):
    for arguments, message in (
        (("--block-sizes", "2-1"), "rising ranges of them, separated by commas, got '2-1'"),
        (("--drafter", "scripted"), "Replay needs a DFlash drafter"),
        (("--max-new-tokens", 1), "Invalid value for '--max-new-tokens'"),
    ):
        status, _, err, folder = swept(*arguments)
        assert status == 2 and message in " ".join(err.split()) and not folder.exists()
    status, _, err = run("sweep", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert status == 2 and "nowhere" in err
    status, _, err = run(
        "sweep", texts_file, texts_file, "--output", tmp_path / "out", "--drafter", folders / "drafter"
    )
    assert status == 2 and re.search(r"Several texts have the id 'p\d'", err)


@pytest.fixture
def checked(run, folders, prompts):
    def call(*arguments, **settings):
        given = ("--prompts", prompts, "--drafter", folders / "drafter", "--block-sizes", "1-4", *arguments)
        return run("check-replay", *given, "--max-new-tokens", 8, **settings)

    return call


def test_check_replay_counts_identical_runs_and_times_both(checked):
    status, out, _ = checked()
    assert status == 0 and out.rstrip().endswith("identical 24 / 24")
    rows = re.findall(r"^ *(\d) +(\d+) +3 / 3 +(\d+) +(\d\.\d\d)", out, flags=re.MULTILINE)
    assert [(row[0], row[1]) for row in rows] == [(t, b) for t in "01" for b in "1234"]
    assert rows[0][2:] == ("21", "1.00")  # plain decoding: 7 steps of each prompt
    flat = " ".join(out.split())
    times = re.search(
        r"replay ([\d.]+) s, decoding at every size ([\d.]+) s: ([\d.]+) times cheaper, the target's", flat
    )
    assert times and re.search(r"\(cpu, \d+ threads?\) plain generate, which wrote the texts: [\d.]+ s", flat)
    assert max(map(len, out.splitlines())) <= 80


def test_check_replay_ends_with_status_one_and_says_where(checked, monkeypatch):
    check = cli_sweep.check_replay

    def wrong(*args, **kwargs):
        checks, seconds = check(*args, **kwargs)
        steps = checks[0].replayed[3]
        checks[0].replayed[3] = [*steps[:2], steps[2] + 1]
        return checks, seconds

    monkeypatch.setattr(cli_sweep, "check_replay", wrong)
    status, out, _ = checked("--limit", 1, "--temperatures", "0.5")
    assert status == 1 and out.rstrip().endswith("identical 3 / 4")
    flat = " ".join(out.split())
    assert re.search(r"p\[0\], temperature 0.5, block size 3: \d steps by decoding, 3 by replay; the first other", flat)
    assert re.search(r"is step 3, which accepted (\d) by decoding and (\d) by replay", flat)


def test_check_replay_goes_on_where_it_was_stopped(checked, tmp_path, monkeypatch):
    file, check, calls = tmp_path / "check.jsonl", cli_sweep.check_replay, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return check(*args, **kwargs)

    monkeypatch.setattr(cli_sweep, "check_replay", interrupted)
    assert checked("--output", file)[0] == 130
    lines = file.read_text().splitlines()
    assert len(lines) == 1
    with file.open("a") as opened:
        opened.write(lines[0][:50])  # cut off
    status, out, _ = checked("--output", file)
    assert status == 0 and len(calls) == 4 and "identical 24 / 24" in out
    assert checked("--output", file)[1] == out and len(calls) == 4
    status, _, err = checked("--output", file, "--seed", 1)
    assert status == 2 and "holds results of other settings ({'seed': 0})" in " ".join(err.split())


def test_check_replay_refuses_temperatures_that_are_none(checked):
    for text in ("", "-1", "hot", "0,nan", "inf"):
        status, _, err = checked("--temperatures", text)
        assert status == 2 and "`--temperatures` takes numbers >= 0, separated by commas" in " ".join(err.split())


def test_a_check_of_one_file_of_weights_reads_the_right_numbers(checked, tmp_path):
    """What is read from the file is what was computed: sizes are numbers again, not text."""
    file = tmp_path / "check.jsonl"
    checked("--output", file, "--limit", 1)
    entry = json.loads(file.read_text())
    known = cli_sweep._read_checks(file, entry["run"])
    (checks, seconds, machine) = known["p[0]"]
    assert list(checks[0].decoded) == [1, 2, 3, 4] and checks[0].differing == [] and seconds == entry["replay_s"]
    assert machine["num_threads"] == torch.get_num_threads()


def test_a_folder_one_level_above_the_drafter_is_told(run, folders, texts_file, tmp_path):
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "drafter").symlink_to(folders / "drafter")
    status, _, err = run("sweep", texts_file, "--output", tmp_path / "out", "--drafter", run_folder)
    assert status == 2 and f"the drafter is {run_folder}/drafter" in err
    status, _, _ = run(
        *("sweep", texts_file, "--output", tmp_path / "out", "--drafter", run_folder / "drafter"),
        *("--block-sizes", "1,2", "--limit", 1),
    )
    assert status == 0

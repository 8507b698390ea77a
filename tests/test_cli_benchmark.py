"""`blockpilot benchmark` on the tiny pair: record, resumption, presets, refusals, and several processes."""

import json
import os
import subprocess
import sys

import pytest

from blockpilot_hf import cli_benchmark
from blockpilot_hf.benchmark_reading import read_record

pytest_plugins = ["cli_models"]

QUICK = ("--max-new-tokens", "12", "--bootstrap", "50", "--no-plots")


def pair(folders):
    return ["--drafter", str(folders / "drafter"), "--policy", "none"]


def record_of(folder):
    return read_record(folder / "benchmark.json")


def without_times(entry):
    """What a second run has to give again."""
    if isinstance(entry, dict):
        return {name: without_times(value) for name, value in entry.items() if not name.endswith("_s")}
    return [without_times(one) for one in entry] if isinstance(entry, list) else entry


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    """A whole run in a process of its own, at two temperatures."""
    root = tmp_path_factory.mktemp("benchmark")
    prompts = root / "prompts.jsonl"
    lines = [
        {"id": f"p{i}", "prompt": f"text {i}", "category": kind} for i, kind in enumerate(("math", "coding", "qa"))
    ]
    lines.append({"id": "two", "turns": ["first", "second"], "category": "math"})
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [*pair(folders), "--target", str(folders / "target"), "--dtype", "float32", "--prompts", str(prompts)]
    return root, [*arguments, "--temperatures", "0,1", *QUICK]


def environment():
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return alone | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def start(arguments, output, *launcher):
    command = [*(launcher or [sys.executable]), "-m", "blockpilot_hf.cli", "benchmark", *arguments]
    done = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone(made):
    root, arguments = made
    return start(arguments, root / "alone"), root / "alone"


def test_record_has_every_prompt_turn_and_method(alone):
    printed, folder = alone
    record = record_of(folder)
    assert record["run_info"]["status"] == "whole" and record["run_info"]["num_processes"] == 1
    assert [(line["prompt"], line["temperature"], line["turn"]) for line in record["per_prompt"]] == [
        (name, heat, turn)
        for name, turns in (("p0", 1), ("p1", 1), ("p2", 1), ("two", 2))
        for heat in (0.0, 1.0)
        for turn in range(1, turns + 1)
    ]
    ran = {name for name, method in record["methods"].items() if not method["reason"]}
    ours = {"size 4", "size 8", "flight_drafts", "flight", "flight_drawn"}
    assert ran == {"plain", "stock_dflash", "prompt_lookup", "dflash", *ours}
    assert "--policy" in record["methods"]["seconds"]["reason"]
    greedy, sampled = record["results"]
    assert set(greedy["groups"]["all"]["methods"]) == ran - {"flight_drawn"}
    assert set(sampled["groups"]["all"]["methods"]) == ran
    for name, told in greedy["groups"]["all"]["methods"].items():
        assert told["num_identical"] == 4, name
    assert sampled["groups"]["all"]["methods"]["flight"]["num_identical"] == 4
    assert greedy["num_prompts"] == 4 and list(greedy["groups"]) == ["maths", "code", "qa", "all"]
    assert record["meta_info"]["prompts"][0]["num_prompts"] == 4
    assert record["meta_info"]["drafter"]["training_block_size"] == 8
    assert "in flight" in printed and "record: " in printed


def test_a_finished_run_is_only_shown_again(made, alone):
    _, arguments = made
    before = record_of(alone[1])
    assert "in flight" in start(arguments, alone[1])
    after = record_of(alone[1])
    assert after["per_prompt"] == before["per_prompt"] and after["results"] == before["results"]


def test_two_processes_measure_what_one_does_but_for_times(made, alone):
    root, arguments = made
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    start(arguments, root / "two", *launcher, "--main_process_port", "0")
    assert sorted(path.name for path in (root / "two" / "rounds").iterdir()) == ["0.jsonl", "1.jsonl"]
    one, two = record_of(alone[1]), record_of(root / "two")
    assert two["run_info"]["num_processes"] == 2
    assert without_times(two["per_prompt"]) == without_times(one["per_prompt"])
    for name in ("settings", "methods", "costs", "meta_info"):
        assert two[name] == one[name], name


def test_a_run_that_is_stopped_keeps_what_it_has_and_goes_on(run, folders, prompts, tmp_path, monkeypatch):
    arguments = [
        *pair(folders),
        "--prompts",
        prompts,
        "--output",
        tmp_path / "out",
        "--methods",
        "size 8,flight",
        *QUICK,
    ]
    done, run_rounds = [], cli_benchmark.run_rounds

    def stopped(target, tokenizer, methods, rounds, *more, **kwargs):
        def some():
            for one in rounds:
                if len(done) == 2:
                    raise KeyboardInterrupt
                done.append(one.prompt.id)
                yield one

        return run_rounds(target, tokenizer, methods, some(), *more, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cli_benchmark, "run_rounds", stopped)
        status, out, _ = run("benchmark", *arguments)
    assert status == 130 and "the same command goes on" in out
    record = record_of(tmp_path / "out")
    assert record["run_info"]["status"] == "stopped" and len(record["per_prompt"]) == 2
    assert run("benchmark", *arguments)[0] == 0
    again = record_of(tmp_path / "out")
    assert again["run_info"]["status"] == "whole" and len(again["per_prompt"]) == 3
    assert again["per_prompt"][:2] == record["per_prompt"]
    assert set(again["methods"]) == {"plain", "size 8", "flight"}


def test_other_settings_do_not_go_into_the_same_folder(run, folders, prompts, tmp_path):
    arguments = [*pair(folders), "--prompts", prompts, "--output", tmp_path / "out", "--methods", "flight", *QUICK]
    assert run("benchmark", *arguments)[0] == 0
    status, _, err = run("benchmark", *arguments, "--seed", "3")
    assert status == 2 and "other settings" in err and "--output" in err
    # More of the same is no other setting.
    assert run("benchmark", *arguments, "--temperatures", "0,1", "--repeats", "2")[0] == 0
    record = record_of(tmp_path / "out")
    assert len(record["per_prompt"]) == 12
    assert record["results"][0]["groups"]["all"]["methods"]["flight"]["spread"] is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--methods", "fast"], "`--methods` takes names of plain, stock_dflash"),
        (["--temperatures", "warm"], "`--temperatures` takes numbers"),
        (["--temperatures", "-1"], "numbers from 0"),
        (["--block-sizes", "0"], "whole numbers from 1"),
        (["--prompts", "gsm9k"], "gsm8k"),
        (["--paper-policy", "./nowhere"], "does not exist"),
    ],
)
def test_what_is_wrong_is_told(run, folders, tmp_path, given, message):
    status, _, err = run("benchmark", *pair(folders), "--output", tmp_path, *QUICK, *given)
    assert status == 2 and message in err and err.count("\n") == 1


def test_presets_say_how_much_and_what_is_given_goes_first(run, folders, tmp_path, monkeypatch):
    seen = {}

    class Enough(Exception):
        pass

    def load(name, limit):
        seen.update(name=name, limit=limit)
        raise ValueError("enough")

    monkeypatch.setattr(cli_benchmark, "load_prompt_set", load)
    for arguments, limit in (
        (["--preset", "quick"], 6),
        (["--preset", "full"], 24),
        (["--preset", "quick", "--limit", "2"], 2),
    ):
        assert run("benchmark", *pair(folders), *arguments)[0] == 2
        assert seen == {"name": "embedded", "limit": limit}


def test_plots_are_drawn_beside_the_record(run, folders, prompts, tmp_path):
    pytest.importorskip("matplotlib")
    status, _, _ = run(
        "benchmark",
        *pair(folders),
        "--prompts",
        prompts,
        "--output",
        tmp_path,
        "--max-new-tokens",
        "8",
        "--bootstrap",
        "20",
    )
    assert status == 0 and len(list(tmp_path.glob("*.png"))) == 4

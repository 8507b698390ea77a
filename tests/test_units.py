"""Units of work: any number of processes, and any kill and resume, give the same dataset."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import datasets
import pytest
from filelock import FileLock

from blockpilot_hf import units as units_module
from blockpilot_hf.cli_console import progress_bar, units_bar
from blockpilot_hf.units import check_finished, check_output, processes, read_settings, require_extra, run_units

COLUMNS = {"id": "string", "ids": "int32[]", "runs": "int32[][]", "score": "float32", "is_odd": "bool"}
NUM_UNITS = 9


def rows_of(unit):
    """Some units have no rows at all."""
    return [
        {"id": f"{unit}-{j}", "ids": [unit, j], "runs": [[j], []], "score": unit / 3, "is_odd": unit % 2 == 1}
        for j in range(unit % 3)
    ]


EXPECTED = [row for unit in range(NUM_UNITS) for row in rows_of(unit)]
NAMES = [row["id"] for row in EXPECTED]


def run(output, compute=rows_of, count=NUM_UNITS, **options):
    options = {"settings": {"a": 1}, "columns": COLUMNS, **options}
    return run_units(list(range(count)), compute, output, **options)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    for names in units_module._RANKS:
        for name in names:
            monkeypatch.delenv(name, raising=False)


def share(monkeypatch, index, count):
    monkeypatch.setenv("RANK", str(index))
    monkeypatch.setenv("WORLD_SIZE", str(count))


def test_rows_come_in_the_order_of_units_and_load_again(tmp_path):
    rows = run(tmp_path / "out")
    assert rows["id"] == NAMES and rows.column_names == list(COLUMNS)
    again = datasets.load_from_disk(str(tmp_path / "out"))
    assert again.to_list() == rows.to_list()
    assert rows[0] == {**EXPECTED[0], "score": pytest.approx(1 / 3)}
    assert str(again.features["ids"]) == str(datasets.Features({"ids": datasets.List(datasets.Value("int32"))})["ids"])
    # Nothing else stays there.
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {".lock", "data-00000-of-00001.arrow", "dataset_info.json", "settings.json", "state.json"}


def test_columns_can_be_found_from_the_rows(tmp_path):
    rows = run_units([1, 2.5, None], lambda unit: [{"x": unit}], tmp_path / "out", settings={})
    assert rows["x"] == [1.0, 2.5, None]


def test_a_finished_folder_is_loaded_and_nothing_is_computed(tmp_path):
    first = run(tmp_path / "out")
    assert run(tmp_path / "out", compute=lambda unit: 1 / 0).to_list() == first.to_list()


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path):
    computed = []

    def compute(unit):
        if unit == 5 and 5 not in computed:
            computed.append(unit)
            raise KeyboardInterrupt
        computed.append(unit)
        return rows_of(unit)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", compute)
    with pytest.raises(ValueError, match=r"out is not finished\. Run the command that writes it once more"):
        check_finished(tmp_path / "out")
    assert run(tmp_path / "out", compute)["id"] == NAMES
    assert sorted(computed) == sorted([*range(NUM_UNITS), 5])
    check_finished(tmp_path / "out")


def test_any_number_of_processes_gives_the_dataset_of_one(tmp_path, monkeypatch):
    alone = run(tmp_path / "alone")
    who = {}
    for index in (2, 0, 1):
        with monkeypatch.context() as patch:
            share(patch, index, 3)
            # Each stops when its own units are done, as if it were killed then.
            own = range(index, NUM_UNITS, 3)

            def compute(unit, index=index, own=own):
                if unit not in own:
                    raise KeyboardInterrupt
                who[unit] = index
                return rows_of(unit)

            try:
                shared = run(tmp_path / "shared", compute)
            except KeyboardInterrupt:
                shared = None
    assert who == {unit: unit % 3 for unit in range(NUM_UNITS)}
    assert shared is not None and shared.to_list() == alone.to_list()
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow", "settings.json"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "shared" / name).read_bytes()


def test_a_process_helps_with_units_that_nobody_works_on(tmp_path, monkeypatch):
    share(monkeypatch, 1, 4)
    assert run(tmp_path / "out")["id"] == NAMES


def test_a_unit_that_another_process_works_on_is_waited_for(tmp_path):
    lock = FileLock(tmp_path / "out" / "units" / "00004.lock")
    (tmp_path / "out" / "units").mkdir(parents=True)
    (tmp_path / "out" / "settings.json").write_text('{"a": 1}')
    computed, seen = [], []
    result = {}

    def work():
        result["rows"] = run(tmp_path / "out", lambda unit: computed.append(unit) or rows_of(unit), progress=watch)

    def watch(done, name):
        assert len(done) == NUM_UNITS
        for unit in done:
            seen.append(unit)
            yield unit

    with lock:
        thread = threading.Thread(target=work)
        thread.start()
        while len(seen) < NUM_UNITS - 1 and thread.is_alive():
            time.sleep(0.01)
        assert 4 not in computed and 4 not in seen
    thread.join()
    assert computed[-1] == 4 and seen[-1] == 4 and result["rows"]["id"] == NAMES


def test_a_run_killed_while_the_dataset_is_put_together_goes_on(tmp_path, monkeypatch):
    replace = os.replace

    def killed(source, goal):
        if Path(goal).name == "state.json":
            raise KeyboardInterrupt
        replace(source, goal)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out")
    assert not (tmp_path / "out" / "state.json").exists()
    assert run(tmp_path / "out", compute=lambda unit: 1 / 0)["id"] == NAMES


def test_results_that_cannot_be_written_leave_no_half_a_file(tmp_path, monkeypatch):
    import pyarrow.parquet

    def full(table, path):
        Path(path).write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet, "write_table", full)
        with pytest.raises(OSError, match=r"00000\.parquet cannot be written: .*No space left.*it goes on"):
            run(tmp_path / "out")
    assert not list((tmp_path / "out" / "units").glob("*.parquet*"))
    assert run(tmp_path / "out")["id"] == NAMES


@pytest.mark.parametrize("done", [False, True])
def test_other_settings_are_refused_and_told(tmp_path, done):
    if done:
        run(tmp_path / "out", settings={"sizes": (1, 2), "name": "x"})
    else:
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "out", lambda unit: 1 / 0, settings={"sizes": (1, 2), "name": "x"})
    with pytest.raises(ValueError, match=r"other settings: `sizes` was \[1, 2\] and is \[1, 3\] now\. Use the same"):
        run(tmp_path / "out", settings={"sizes": (1, 3), "name": "x"})
    assert run(tmp_path / "out", settings={"sizes": [1, 2], "name": "x"})["id"] == NAMES
    assert read_settings(tmp_path / "out") == {"sizes": [1, 2], "name": "x"}


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(ValueError, match="holds other files, and is not the output of an earlier call"):
        run(tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir() if path.name != ".lock"] == ["a.jpg"]
    with pytest.raises(ValueError, match=r"a\.jpg is a file"):
        check_output(tmp_path / "photos" / "a.jpg")
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty")
    check_output(tmp_path / "not there")
    with pytest.raises(ValueError, match=r"has no settings\.json"):
        read_settings(tmp_path / "empty")


def test_without_units_and_with_unknown_types_nothing_is_started(tmp_path):
    with pytest.raises(ValueError, match="no units"):
        run(tmp_path / "out", count=0)
    with pytest.raises(ValueError, match=r"Column 'id' has the type 'text'\. Allowed: bool, .*string"):
        run(tmp_path / "out", columns={"id": "text"})


@pytest.mark.parametrize("names", units_module._RANKS)
def test_the_launchers_tell_who_we_are(monkeypatch, names):
    assert processes() == (0, 1)
    monkeypatch.setenv(names[0], "2")
    monkeypatch.setenv(names[1], "3")
    assert processes() == (2, 3)
    for bad in ("3", "-1", ""):
        monkeypatch.setenv(names[0], bad)
        with pytest.raises(ValueError, match=f"`{names[0]}` must be an index below `{names[1]}`, got '{bad}' and '3'"):
            processes()


def test_a_missing_extra_names_its_installation():
    with pytest.raises(ImportError, match=r"`nonesuch\.part` is needed .*pip install 'blockpilot-hf\[train\]'"):
        require_extra("nonesuch.part")
    assert require_extra("json") is json


def test_what_was_done_before_comes_first(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", lambda unit: rows_of(unit) if unit != 3 else signal.raise_signal(signal.SIGINT))
    (tmp_path / "out" / "units" / "00001.parquet").unlink()
    seen = []

    def watch(done, name):
        assert (len(done), done.num_before, name) == (NUM_UNITS, 2, "parts")
        for unit in done:
            seen.append(unit)
            yield unit

    assert run(tmp_path / "out", progress=watch, description="parts")["id"] == NAMES
    assert seen == [0, 2, 1, *range(3, NUM_UNITS)]


@pytest.mark.parametrize("bar", [progress_bar, units_bar])
def test_the_bars_of_the_commands_go_through_all_units(tmp_path, bar):
    assert run(tmp_path / "out", progress=bar)["id"] == NAMES


# Without the package, so that a process starts quickly.
_PROCESS = """
import importlib.util, json, sys, time
spec = importlib.util.spec_from_file_location("units", sys.argv[1])
units = importlib.util.module_from_spec(spec)
spec.loader.exec_module(units)

def compute(unit):
    time.sleep(0.02)
    return [{"id": f"{unit}-{j}", "ids": [unit, j]} for j in range(unit % 4)]

print("started", flush=True)
units.run_units(list(range(30)), compute, sys.argv[2], settings={"a": 1}, columns={"id": "string", "ids": "int32[]"})
"""


def start(output, index=0, count=1):
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS, units_module.__file__, str(output)],
        env={**os.environ, "RANK": str(index), "WORLD_SIZE": str(count)},
        stdout=subprocess.PIPE,
    )


def test_processes_killed_at_random_and_started_again_give_the_dataset_of_one(tmp_path):
    expected = [{"id": f"{unit}-{j}", "ids": [unit, j]} for unit in range(30) for j in range(unit % 4)]
    output, chance = tmp_path / "out", random.Random(0)
    for _ in range(4):
        pair = [start(output, index, 2) for index in range(2)]
        for process in pair:
            process.stdout.readline()
        num_units = chance.randrange(1, 20)
        while all(process.poll() is None for process in pair):
            if len(list(output.glob("units/*.parquet"))) >= num_units:
                break
            time.sleep(0.001)
        for process in pair:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        if (output / "state.json").is_file():
            break
    pair = [start(output, index, 2) for index in range(2)]
    for process in pair:
        process.communicate()
        assert process.returncode == 0
    assert datasets.load_from_disk(str(output)).to_list() == expected
    assert not (output / "units").exists()

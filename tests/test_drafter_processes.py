"""Several processes train as one does: started by the launchers, stopped, and what they exchange."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import make_target
from drafter_texts import make_texts, write_texts
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from blockpilot_hf.processes import Processes

LAUNCH = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"],
    # Without a GPU, `--multi_gpu` is what makes it start more than one process.
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("processes")
    target = make_target("llama")
    target.save_pretrained(root / "target")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))).save_pretrained(
        root / "target"
    )
    write_texts(root / "texts.jsonl", make_texts(target, 15))
    return root


def command(root, launcher, output, steps=6):
    port = ["--main_process_port", "0"] if launcher == "accelerate" else []
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"] if launcher == "torchrun" else port
    arguments = ["train-drafter", root / "texts.jsonl", "--output", output, "--target", root / "target"]
    arguments += ["--dtype", "float32", "--steps", steps, "--layers", 1, "--block-size", 4, "--mask-token-id", 63]
    arguments += ["--validate-every", 4, "--checkpoint-every", 2, "--anchors", 6]
    return [*map(str, [*LAUNCH[launcher], *port, "-m", "blockpilot_hf.cli", *arguments])]


def environment():
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return alone | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def train(root, launcher, output, **settings):
    done = subprocess.run(
        command(root, launcher, output, **settings), capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_log(folder):
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


@pytest.fixture(scope="module")
def alone(root, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone") / "run"
    train(root, "alone", output)
    return output


def assert_same_drafter(first, second):
    ours, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (first, second))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    records = [json.loads((folder / "validation.json").read_text()) for folder in (first, second)]
    for name in ("acceptance_length", "per_prompt", "settings", "meta_info"):
        assert records[0][name] == records[1][name]
    checkpoints = [load_file(folder / "checkpoint" / "drafter.safetensors") for folder in (first, second)]
    assert all(torch.equal(checkpoints[0][name], tensor) for name, tensor in checkpoints[1].items())
    assert read_log(first) == read_log(second)


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_processes_train_the_drafter_of_one_bit_by_bit(root, alone, tmp_path, launcher):
    out = train(root, launcher, tmp_path / "run")
    assert_same_drafter(tmp_path / "run", alone)
    # One speaks for both.
    assert "processes: 2" in out and out.count("step 6 of 6") == 1 and out.count("record: ") == 1
    assert json.loads((tmp_path / "run" / "validation.json").read_text())["run_info"]["num_processes"] == 2


@pytest.mark.slow
def test_one_process_goes_on_with_the_run_of_two(root, tmp_path):
    train(root, "torchrun", tmp_path / "run", steps=3)
    assert read_log(tmp_path / "run")[-1]["step"] == 3
    # The rate follows the number of steps, so a run of six from the start is another one.
    train(root, "alone", tmp_path / "run", steps=6)
    train(root, "alone", tmp_path / "other", steps=3)
    train(root, "alone", tmp_path / "other", steps=6)
    assert_same_drafter(tmp_path / "run", tmp_path / "other")


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_one_step_with_a_checkpoint(root, tmp_path):
    output = tmp_path / "run"
    process = subprocess.Popen(
        command(root, "torchrun", output, steps=3000),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        deadline = time.monotonic() + 200
        while not (output / "log.jsonl").exists() or len(read_log(output)) < 5:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.1)
        os.kill(second_process(process.pid), signal.SIGTERM)
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode != 0 and "stopped: the checkpoint of step" in out
    step = json.loads((output / "checkpoint" / "state.json").read_text())["step"]
    assert f"the checkpoint of step {step} is in" in out and read_log(output)[-1]["step"] == step
    assert step < 3000 and not (output / "drafter").exists() and not list(output.glob("checkpoint.*"))


def second_process(launcher):
    """The child of `launcher` that is not the main process."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True).stdout
    for child in children.split():
        settings = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if b"RANK=1" in settings:
            return int(child)
    raise AssertionError(f"no second process among {children.split()}")


def test_alone_nothing_is_exchanged_and_items_keep_their_order():
    processes = Processes.current()
    assert (processes.index, processes.count, processes.is_main) == (0, 1, True)
    assert processes.sum([1.5, 2.0]) == [1.5, 2.0] and processes.largest(True) == 1 and processes.gather("x") == ["x"]
    assert processes.deal([3, 1, 2], lambda item: item * 10) == [30, 10, 20]
    asked = []
    assert processes.deal([1, 2, 3], asked.append, lambda: len(asked) == 2) is None and asked == [1, 2]


EXCHANGE = """
import json, sys, torch
from blockpilot_hf.processes import Processes
with Processes.current() as processes:
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    if processes.index == 0:
        parameters[0].grad = torch.arange(6.0).view(2, 3)
    parameters[1].grad = torch.full((4,), 1.0 + processes.index)
    processes.sum_gradients(parameters)
    found = {
        "sum": processes.sum([1.0, processes.index]),
        "any": processes.largest(processes.index == 1),
        "gather": processes.gather(processes.index),
        "deal": processes.deal(list(range(5)), lambda item: (item, processes.index)),
        "stopped": processes.deal(list(range(5)), lambda item: item, lambda: processes.index == 1),
        "gradients": [p.grad.tolist() for p in parameters],
    }
    # Not printed: two processes may write into one line.
    with open(f"{sys.argv[1]}-{processes.index}.json", "w") as file:
        json.dump(found, file)
"""


def test_two_processes_exchange_alike(tmp_path):
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    launch = [*LAUNCH["torchrun"], "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*launch, tmp_path / "exchange.py", tmp_path / "found"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"found-{index}.json").read_text()) for index in range(2))
    assert first == second
    assert first == {
        "sum": [2.0, 1.0],
        "any": 1,
        "gather": [0, 1],
        "deal": [[0, 0], [1, 1], [2, 0], [3, 1], [4, 0]],
        "stopped": None,
        "gradients": [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [3.0] * 4],
    }

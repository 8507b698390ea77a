import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from test_target_states import small_files_only

from blockpilot_hf.drafter_checkpoint import (
    TrainingLog,
    TrainingState,
    find_whole,
    load_checkpoint,
    save_checkpoint,
    written_whole,
)


def make_run(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(40, 30)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 40)).square().sum().backward()
    optimizer.step()


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoint of one step, and the run that it is of."""
    model, optimizer = make_run()
    train(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, TrainingState(1, 20, 0.5, {"seed": 0}))
    return tmp_path, model, optimizer


def weights_after(folder, settings=None):
    model, optimizer = make_run(seed=1)
    state = load_checkpoint(folder, model, optimizer, settings or {"seed": 0})
    train(model, optimizer)
    return state, model.weight


def test_a_run_goes_on_as_if_it_had_not_ended(saved):
    folder, model, optimizer = saved
    state, weight = weights_after(folder)
    train(model, optimizer)
    assert state == TrainingState(1, 20, 0.5, {"seed": 0})
    assert torch.equal(weight, model.weight)


def test_without_a_checkpoint_nothing_is_touched(tmp_path):
    model, optimizer = make_run()
    before = model.weight.clone()
    assert load_checkpoint(tmp_path, model, optimizer, {}) is None
    assert torch.equal(model.weight, before) and not list(tmp_path.iterdir())


def test_settings_must_be_the_same_where_the_checkpoint_knows_them(saved):
    folder, _, _ = saved
    model, optimizer = make_run(seed=1)
    before = model.weight.clone()
    with pytest.raises(
        ValueError, match=r"is of another run: `seed` was 0 there and is 1 now\. .*another output folder"
    ):
        load_checkpoint(folder, model, optimizer, {"seed": 1})
    assert torch.equal(model.weight, before)
    # A version before this one may have recorded fewer settings.
    assert load_checkpoint(folder, model, optimizer, {"seed": 0, "new": 3}).step == 1
    assert load_checkpoint(folder, model, optimizer, {"seed": 0, "new": 3}, defaults={"new": 3, "seed": 1}).step == 1
    with pytest.raises(ValueError, match="`new` was 2 there and is 3 now"):
        load_checkpoint(folder, model, optimizer, {"seed": 0, "new": 3}, defaults={"new": 2})


@pytest.mark.parametrize("killed", ["while writing", "between the two moves", "while removing the one before"])
def test_a_run_that_was_killed_at_any_moment_of_saving_can_go_on_and_save_again(saved, killed):
    folder, model, optimizer = saved
    checkpoint, beside, before = (folder / name for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
    _, expected = weights_after(folder)
    shutil.copytree(checkpoint, beside)
    if killed == "while writing":
        (beside / "state.json").unlink()
    elif killed == "between the two moves":
        os.replace(checkpoint, before)
    else:
        os.replace(checkpoint, before)
        os.replace(beside, checkpoint)
        (before / "state.json").unlink()
    assert torch.equal(weights_after(folder)[1], expected)

    save_checkpoint(folder, model, optimizer, TrainingState(2, settings={"seed": 0}))
    assert weights_after(folder)[0].step == 2
    assert [path.name for path in folder.iterdir()] == ["checkpoint"]


def test_at_no_moment_of_saving_is_there_no_whole_checkpoint(saved, monkeypatch):
    """Also when the one before was found under its old name: that one was removed before the new one had its place."""
    folder, model, optimizer = saved
    os.replace(folder / "checkpoint", folder / "checkpoint.old")
    removed, moved = shutil.rmtree, os.replace
    moments = []

    def watched(do):
        def call(*args, **kwargs):
            do(*args, **kwargs)
            moments.append(find_whole(folder / "checkpoint"))

        return call

    monkeypatch.setattr("blockpilot_hf.drafter_checkpoint.shutil.rmtree", watched(removed))
    monkeypatch.setattr("blockpilot_hf.drafter_checkpoint.os.replace", watched(moved))
    for step in (2, 3):
        save_checkpoint(folder, model, optimizer, TrainingState(step, settings={"seed": 0}))
    assert len(moments) >= 6 and None not in moments
    assert weights_after(folder)[0].step == 3


@pytest.mark.parametrize("part", ["weights", "moments"])
def test_a_full_disk_is_told_and_the_checkpoint_before_stays(saved, monkeypatch, part):
    folder, model, optimizer = saved
    if part == "moments":  # the first file fits

        def save(tensors, path):
            path.touch() if path.name == "drafter.safetensors" else save_file(tensors, path)

        monkeypatch.setattr("blockpilot_hf.drafter_checkpoint.save_file", save)
    with small_files_only(), pytest.raises(OSError, match=r"checkpoint cannot be written: .*still there"):
        save_checkpoint(folder, model, optimizer, TrainingState(2, settings={"seed": 0}))
    assert [path.name for path in folder.iterdir()] == ["checkpoint"]
    assert weights_after(folder)[0].step == 1


def test_a_folder_takes_the_place_of_another_only_when_it_is_whole(tmp_path):
    folder = tmp_path / "folder"
    with written_whole(folder) as beside:
        (beside / "a").write_text("1")
        assert not folder.exists()
    with pytest.raises(KeyError), written_whole(folder) as beside:
        (beside / "b").write_text("2")
        raise KeyError
    assert [path.name for path in folder.iterdir()] == ["a"]
    with written_whole(folder) as beside:
        (beside / "c").write_text("3")
    assert [path.name for path in folder.iterdir()] == ["c"] and find_whole(folder) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.skipif(os.name != "posix", reason="rights are those of POSIX")
@pytest.mark.parametrize(("umask", "usual"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_in_it_can_be_read_by_whom_others_beside_them_can_be(tmp_path, umask, usual):
    before = os.umask(umask)
    try:
        with written_whole(tmp_path / "folder") as beside:
            save_file({"a": torch.zeros(1)}, beside / "model.safetensors")
            (beside / "closed").touch(0o600)
            (beside / "plain").write_text("")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "folder").iterdir()}
    assert modes == {"model.safetensors": usual, "closed": usual, "plain": usual}


def test_the_log_loses_later_steps_and_half_a_line(tmp_path):
    log = TrainingLog(tmp_path / "new" / "log.jsonl")
    assert log.cut_after(3) == []
    entries = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 1 / 3}, {"step": 2, "acceptance_length": {}}, {"step": 3}]
    for entry in entries:
        log.append(entry)
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert log.cut_after(2) == entries[:3]
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == entries[:3]
    written = log.path.stat().st_mtime_ns
    assert log.cut_after(2) == entries[:3] and log.path.stat().st_mtime_ns == written
    assert log.up_to(1) == entries[:1] and log.up_to() == entries[:3] and log.path.stat().st_mtime_ns == written
    assert log.cut_after(0) == [] and log.path.read_text() == ""

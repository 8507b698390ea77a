import dataclasses
import types

import pytest
import torch
from drafter_texts import make_text, make_texts

from blockpilot_hf import drafter_estimate
from blockpilot_hf.drafter_estimate import RunEstimate, available_memory, estimate_disk, estimate_run
from blockpilot_hf.drafter_recipe import DrafterTrainingConfig
from blockpilot_hf.drafter_start import drafter_from_target
from blockpilot_hf.drafter_training import DrafterTrainer
from blockpilot_hf.training_display import estimate_lines


@pytest.fixture(scope="module")
def texts(target):
    return make_texts(target, 6)


def make_trainer(target, texts, output_dir, *, states_dir=None, **settings):
    drafter = drafter_from_target(target, mask_token_id=63, num_layers=1, block_size=4)
    config = DrafterTrainingConfig(**{"steps": 9, "anchors_per_sequence": 6, **settings})
    return DrafterTrainer(target, drafter, texts, [], config, output_dir, states_dir)


def estimate(trainer, **settings):
    return estimate_run(trainer.compute_loss, trainer.optimizer, trainer.texts, **{"num_steps": 9, **settings})


def test_the_trial_changes_nothing(target, texts, tmp_path):
    trainer = make_trainer(target, texts, tmp_path / "run", states_dir=tmp_path / "states")
    trainer.drafter.eval()
    before = {name: p.clone() for name, p in trainer.drafter.named_parameters()}
    random_state = torch.get_rng_state()
    estimate(trainer)
    assert torch.equal(torch.get_rng_state(), random_state) and not trainer.drafter.training
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in trainer.drafter.named_parameters())
    assert not trainer.optimizer.state and list(tmp_path.iterdir()) == []


def test_weights_gradients_and_moments_are_counted_and_moments_that_are_there_are_not(target, texts, tmp_path):
    trainer = make_trainer(target, texts, tmp_path)
    weights = 4 * trainer.drafter.num_parameters()
    found = estimate(trainer)
    assert found.present_bytes == {"target": 4 * target.num_parameters(), "drafter": weights}
    assert found.coming_bytes["gradients"] == weights and found.coming_bytes["moments"] == 2 * weights
    trainer.train(checkpoint_every=100, validate_every=100)
    assert estimate(trainer).coming_bytes["moments"] == 0


def test_more_anchors_larger_blocks_and_longer_texts_take_more_memory(target, texts, tmp_path):
    def activations(texts=texts, **settings):
        return estimate(make_trainer(target, texts, tmp_path, **settings)).coming_bytes["the longest text"]

    usual = activations()
    assert activations(anchors_per_sequence=12) > usual
    assert activations(block_sizes=(2, 4)) == usual < activations(block_sizes=(4, 16))  # the largest one counts
    assert activations([*texts, make_text(target, num_new=40)]) > usual


def test_visits_and_processes_decide_what_is_still_to_be_computed(target, texts, tmp_path):
    recomputed = make_trainer(target, texts, tmp_path / "a", accumulation=3)
    assert estimate(recomputed).num_passes == 9 * 2 * 3
    assert estimate(recomputed, num_processes=2).num_passes == 27
    kept = make_trainer(target, texts, tmp_path / "b", states_dir=tmp_path / "states")
    assert estimate(kept).num_passes == 6  # however often each is visited
    for text in texts[:4]:
        kept.read_states(text)
    assert estimate(kept).num_passes == 2
    assert estimate(kept, num_steps=1).num_passes == 1  # a third of the texts is visited


def test_a_run_that_does_not_fit_is_refused_with_what_takes_the_memory(target, texts, tmp_path, monkeypatch):
    trainer = make_trainer(target, texts, tmp_path)
    needed = sum(estimate(trainer).coming_bytes.values())
    monkeypatch.setattr(drafter_estimate, "available_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match=r"needs about .* GB of memory more \(gradients .* the longest text .*anchors"):
        estimate(trainer)
    assert all(p.grad is None for p in trainer.drafter.parameters())
    monkeypatch.setattr(drafter_estimate, "available_memory", lambda device: needed)
    assert estimate(trainer).available_bytes == needed
    # Processes on a CPU share its memory.
    with pytest.raises(ValueError, match="of memory more"):
        estimate(trainer, num_processes=2)


def test_scores_that_cannot_fit_are_refused_without_a_trial(target, texts, tmp_path, monkeypatch):
    trainer = make_trainer(target, texts, tmp_path, anchors_per_sequence=10**9, block_sizes=(4, 10**9))
    monkeypatch.setattr(drafter_estimate, "available_memory", lambda device: 10**10)
    monkeypatch.setattr(drafter_estimate, "_try", lambda *args: pytest.fail("tried"))
    with pytest.raises(ValueError, match="scores of a text"):
        estimate(trainer)


def test_available_memory_is_a_number_of_bytes_of_this_machine():
    assert 2**20 < available_memory(torch.device("cpu")) <= 2**63


def test_disk_is_needed_for_states_that_are_visited_and_not_there(target, texts, tmp_path, monkeypatch):
    reader = make_trainer(target, texts, tmp_path / "run", states_dir=tmp_path / "states").read_states
    tokens = sum(len(text.ids) for text in texts)
    assert estimate_disk(reader, texts, 1000).needed_bytes == tokens * reader.bytes_per_token
    assert estimate_disk(reader, texts, 3).needed_bytes == round(tokens / 2) * reader.bytes_per_token
    reader(texts[0])
    left = (tokens - len(texts[0].ids)) * reader.bytes_per_token
    assert estimate_disk(reader, texts, 1000).needed_bytes == left
    usage = types.SimpleNamespace(free=left - 1)
    monkeypatch.setattr(drafter_estimate.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"are free\. Name a folder on another disk with `--states`, or pass"):
        estimate_disk(reader, texts, 1000)
    usage.free = left
    assert estimate_disk(reader, texts, 1000).free_bytes == left
    assert estimate_disk(make_trainer(target, texts, tmp_path).read_states, texts, 1000) is None


def test_the_estimate_in_words():
    found = RunEstimate(
        num_steps=2320,
        step_s=0.9,
        states_s=1.1,
        num_passes=3273,
        present_bytes={"target": 538_000_000, "drafter": 49_000_000},
        coming_bytes={"gradients": 49_000_000, "moments": 98_000_000, "the longest text": 350_000_000},
        available_bytes=12_100_000_000,
    )
    memory, time = estimate_lines(found)
    assert memory == (
        "memory: about 1.08 GB (target 0.54, drafter 0.05, gradients 0.05, moments 0.10, the longest text 0.35; "
        "12.1 GB are available)"
    )
    assert time == (
        "time: about 1:34:48 for 2,320 steps (0.9 s a step, 1.1 s more for each text whose states are not kept), "
        "validations apart"
    )
    _, kept = estimate_lines(dataclasses.replace(found, num_passes=0, step_s=0.02))
    assert kept == "time: about 0:00:46 for 2,320 steps (20 ms a step), validations apart"

import dataclasses
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import make_target
from drafter_texts import make_text, make_texts
from safetensors.torch import load_file

from blockpilot_hf.drafter_recipe import DrafterTrainingConfig, default_gamma
from blockpilot_hf.drafter_start import drafter_from_target
from blockpilot_hf.drafter_training import DrafterTrainer, acceptance_groups
from blockpilot_hf.replay import Replay
from blockpilot_hf.target_states import TargetStatesReader, target_states
from blockpilot_hf.texts import Text

STEPS = 9


@pytest.fixture(scope="module")
def texts(target):
    return make_texts(target, 10)


def make_trainer(target, texts, output_dir, *, states_dir=None, block_size=4, **settings):
    """A trainer from the start, as a new process would make it: seven texts to train on, three to validate on."""
    drafter = drafter_from_target(target, mask_token_id=63, num_layers=1, block_size=block_size)
    config = DrafterTrainingConfig(**{"steps": STEPS, "anchors_per_sequence": 6, **settings})
    return DrafterTrainer(target, drafter, texts[:7], texts[7:], config, output_dir, states_dir)


def train(trainer, **settings):
    return trainer.train(**{"checkpoint_every": 3, "validate_every": 4, **settings})


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}


def assert_same_run(first, second, *, log=True):
    """Weights, checkpoint and log, but for the seconds."""
    ours, theirs = weights_of(first), weights_of(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    saved = [load_file(trainer.output_dir / "checkpoint" / "drafter.safetensors") for trainer in (first, second)]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in ours)
    moments = [load_file(trainer.output_dir / "checkpoint" / "optimizer.safetensors") for trainer in (first, second)]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
    if log:
        assert read_log(first.output_dir) == read_log(second.output_dir)


def read_log(folder):
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert all(entry.pop("seconds") >= 0 for entry in entries)
    return entries


@pytest.fixture(scope="module")
def unbroken(target, texts, tmp_path_factory):
    trainer = make_trainer(target, texts, tmp_path_factory.mktemp("unbroken"))
    assert train(trainer) is True
    return trainer


# --- what is learnt ---


def test_the_loss_falls_and_the_acceptance_length_rises(target, texts, tmp_path):
    trainer = make_trainer(target, texts, tmp_path, steps=60, learning_rate=5e-3, distillation=0.0)
    trainer.validation = texts[:4]  # known ones: ten texts of a random target teach nothing about others
    before, losses = trainer.validate()["all"]["acceptance_length"], []
    train(trainer, on_step=lambda step, loss: losses.append(loss), validate_every=1000)
    after = trainer.validate()["all"]["acceptance_length"]
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert after > 1.3 * before and after > 1.5


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_other_targets_train_too(kind, tmp_path):
    target = make_target(kind)
    trainer = make_trainer(target, make_texts(target, 8), tmp_path, steps=20, learning_rate=5e-3)
    losses = []
    assert train(trainer, on_step=lambda step, loss: losses.append(loss))
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_target_in_bfloat16_trains_a_drafter_in_float32(texts, tmp_path):
    target = make_target().to(torch.bfloat16)
    trainer = make_trainer(target, texts, tmp_path, steps=3)
    before = weights_of(trainer)
    assert train(trainer)
    after = weights_of(trainer)
    assert all(p.dtype == torch.float32 for p in after.values())
    assert not torch.equal(after["fc.weight"], before["fc.weight"])
    assert target.dtype == torch.bfloat16


@pytest.mark.parametrize("distillation", [0.0, 0.3, 1.0])
def test_the_loss_is_the_weighted_cross_entropy_after_every_anchor(target, tmp_path, distillation):
    """Anchor by anchor, by the drafter's own forward, with the whole vocabulary's scores cut to what occurs."""
    text = make_text(target, num_new=7)
    other = make_text(target, seed=1, num_new=7)
    trainer = make_trainer(
        target, [text, other], tmp_path, block_size=5, anchors_per_sequence=50, distillation=distillation, gamma=1.5
    )
    drafter, head = trainer.drafter, target.get_output_embeddings()
    occurring = sorted({*text.answer_ids, *other.answer_ids})
    states = target_states(target, drafter.config.target_layer_ids, text)
    context, last = (part.to(torch.bfloat16).float()[None] for part in (states.context, states.last))
    total, weight, count = 0.0, 0.0, 0
    for anchor in range(len(text.prompt_ids), len(text.ids) - 1):
        noise = target.get_input_embeddings()(torch.tensor([[text.ids[anchor], 63, 63, 63, 63]]))
        drafted = head(drafter(noise, context[:, :anchor]).last_hidden_state[0])[:, occurring]
        for k in range(1, 5):
            if anchor + k < len(text.ids):  # the text ends there: nothing to learn beyond
                label = torch.tensor(occurring.index(text.ids[anchor + k]))
                wanted = head(last[0, anchor + k - 1])[occurring].softmax(-1)
                hard, soft = F.cross_entropy(drafted[k], label), F.cross_entropy(drafted[k], wanted)
                w = math.exp(-(k - 1) / 1.5)
                total, weight = total + w * (distillation * soft + (1 - distillation) * hard), weight + w
                count += 1
    loss, num_tokens = trainer.loss(text, torch.Generator())
    assert num_tokens == count == 4 + 4 + 4 + 3 + 2 + 1
    torch.testing.assert_close(loss, total / weight)


def test_no_gradient_reaches_the_target(texts, tmp_path):
    target = make_target()
    assert all(p.requires_grad for p in target.parameters())
    before = {name: p.clone() for name, p in target.named_parameters()}
    train(make_trainer(target, texts, tmp_path, steps=2))
    for name, parameter in target.named_parameters():
        assert parameter.grad is None and parameter.requires_grad and torch.equal(parameter, before[name])


def test_the_loss_of_mixed_block_sizes_is_that_of_the_size_that_was_drawn(target, texts, tmp_path):
    mixed = make_trainer(target, texts, tmp_path, block_sizes=(2, 4, 8), gamma=None)
    alone = {
        size: make_trainer(target, texts, tmp_path, block_size=size, gamma=default_gamma(size)) for size in (2, 4, 8)
    }
    drawn = []
    for seed in range(30):
        loss, count = mixed.loss(texts[0], torch.Generator().manual_seed(seed))
        # Six anchors give five times as many positions at size 8 as ends of the text leave at size 2.
        of_size = {size: one.loss(texts[0], torch.Generator().manual_seed(seed)) for size, one in alone.items()}
        matching = [size for size, (theirs, number) in of_size.items() if number == count and torch.equal(theirs, loss)]
        assert len(matching) == 1
        drawn += matching
    assert set(drawn) == {2, 4, 8} and max(map(drawn.count, (2, 4, 8))) < 20


def test_the_drafters_own_block_size_must_be_trained(target, texts, tmp_path):
    with pytest.raises(ValueError, match=r"The drafter's block size is 4, the recipe trains \(2, 8\)"):
        make_trainer(target, texts, tmp_path, block_sizes=(2, 8))
    assert make_trainer(target, texts, tmp_path, block_sizes=(2, 4)).drafter.config.block_size == 4


def test_accumulated_texts_make_the_step_that_as_many_texts_at_once_make(target, texts, tmp_path):
    first = make_trainer(target, texts, tmp_path / "a", sequences_per_step=3, accumulation=2, steps=4)
    second = make_trainer(target, texts, tmp_path / "b", sequences_per_step=6, steps=4)
    for trainer in (first, second):
        train(trainer)
    assert_same_run(first, second)


def test_mixed_precision_computes_passes_in_bfloat16_and_keeps_weights_in_float32(target, texts, tmp_path):
    plain, mixed = (
        make_trainer(target, texts, tmp_path / name, mixed_precision=name, steps=30, learning_rate=5e-3)
        for name in ("no", "bf16")
    )
    losses = {}
    for trainer in (plain, mixed):
        computed: set[torch.dtype] = set()

        def watch(module, given, result, computed=computed):
            computed.add(result.dtype)

        hook = trainer.drafter.fc.register_forward_hook(watch)
        ours = losses[trainer] = []
        train(trainer, on_step=lambda step, loss, ours=ours: ours.append(loss), validate_every=100)
        hook.remove()
        assert computed == {torch.bfloat16 if trainer is mixed else torch.float32}
    assert losses[plain] != losses[mixed] and losses[mixed] == pytest.approx(losses[plain], rel=0.1)
    assert sum(losses[mixed][-5:]) < sum(losses[mixed][:5])
    assert all(p.dtype == torch.float32 for p in mixed.drafter.parameters())
    moments = mixed.optimizer.state_dict()["state"].values()
    assert all(moment["exp_avg"].dtype == torch.float32 for moment in moments)


def test_a_run_with_all_options_is_resumed_as_the_unbroken_one(target, texts, tmp_path):
    settings = {"block_sizes": (2, 4), "gamma": None, "accumulation": 2, "mixed_precision": "bf16"}
    whole = make_trainer(target, texts, tmp_path / "a", **settings)
    train(whole)
    steps = []
    train(
        make_trainer(target, texts, tmp_path / "b", **settings),
        on_step=lambda step, loss: steps.append(step),
        should_stop=lambda: len(steps) == 5,
    )
    resumed = make_trainer(target, texts, tmp_path / "b", **settings)
    assert resumed.resume() == 5
    train(resumed)
    assert_same_run(resumed, whole)


def test_acceptance_is_told_by_temperature_where_there_are_several(target, texts):
    def walk(temperature, accepted):
        text = dataclasses.replace(texts[0], category="maths", temperature=temperature)
        return Replay(text, {4: [accepted] * (len(text.answer_ids) - 1)})

    cold, hot = [walk(0.0, 3), walk(0.0, 1)], [walk(0.7, 0)]
    groups = acceptance_groups([*cold, *hot], 4)
    assert set(groups) == {"maths", "all", "all, temperature 0", "all, temperature 0.7"}
    assert groups["all, temperature 0.7"] == {"acceptance_length": 1.0, "num_prompts": 1, "num_texts": 1}
    expected = sum(one.acceptance_length(4) for one in cold) / 2
    assert groups["all, temperature 0"] == {"acceptance_length": expected, "num_prompts": 1, "num_texts": 2}
    assert set(acceptance_groups(cold, 4)) == {"maths", "all"}


# --- which texts ---


def visited(trainer, monkeypatch):
    """Texts in the order in which training reads them."""
    seen, compute = [], trainer.loss
    monkeypatch.setattr(trainer, "loss", lambda text, generator: seen.append(text) or compute(text, generator))
    train(trainer)
    return seen


def test_every_epoch_sees_every_text_once_in_another_order(target, texts, tmp_path, monkeypatch):
    seen = visited(make_trainer(target, texts, tmp_path, steps=14, sequences_per_step=2), monkeypatch)
    epochs = [seen[i : i + 7] for i in range(0, 28, 7)]
    assert all(sorted(epoch, key=texts.index) == texts[:7] for epoch in epochs)
    assert len({tuple(text.id for text in epoch) for epoch in epochs}) == 4


def test_what_is_held_out_is_never_trained_on(target, texts, tmp_path, monkeypatch):
    seen = visited(make_trainer(target, texts, tmp_path, steps=10), monkeypatch)
    assert len(seen) == 20 and not set(seen) & set(texts[7:])


def test_the_seed_decides_the_order_and_the_anchors(target, texts, tmp_path, monkeypatch):
    orders = [
        [t.id for t in visited(make_trainer(target, texts, tmp_path / name, steps=4, seed=seed), monkeypatch)]
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert orders[0] == orders[1] != orders[2]


# --- stopping and going on ---


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [1, 2, 3, 4, 8, 9])
def test_killed_after_any_step_and_resumed_it_is_the_unbroken_run(target, texts, tmp_path, unbroken, at):
    def kill(step, loss):
        if step == at:
            raise Killed

    with pytest.raises(Killed):
        train(make_trainer(target, texts, tmp_path), on_step=kill)
    resumed = make_trainer(target, texts, tmp_path)
    assert resumed.resume() == max(step for step in (0, 3, 4, 6, 8) if step < at)
    assert train(resumed) is True
    assert_same_run(resumed, unbroken)


def test_killed_twice_within_one_step_it_is_still_the_unbroken_run(target, texts, tmp_path, unbroken):
    """In the middle of a validation, and after a line of the log without its checkpoint."""

    def kill(*args):
        raise Killed

    for settings in ({"on_validation": kill}, {"on_step": lambda step, loss: kill() if step == 5 else None}):
        with pytest.raises(Killed):
            train(make_trainer(target, texts, tmp_path), **settings)
    resumed = make_trainer(target, texts, tmp_path)
    train(resumed)
    assert_same_run(resumed, unbroken)


def test_a_killed_process_leaves_what_another_goes_on_with(target, texts, tmp_path, unbroken):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import torch\n"
        "from conftest import make_target\n"
        "from drafter_texts import make_texts\n"
        "from test_drafter_training import make_trainer, train\n"
        "torch.set_num_threads(1)\n"
        "target = make_target()\n"
        f"trainer = make_trainer(target, make_texts(target, 10), Path({str(tmp_path)!r}))\n"
        "train(trainer, on_step=lambda step, loss: step == 5 and os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    resumed = make_trainer(target, texts, tmp_path)
    assert resumed.resume() == 4
    train(resumed)
    assert_same_run(resumed, unbroken)


@pytest.mark.parametrize("after", [1, 4, 6, 9])
def test_asked_to_stop_it_leaves_a_checkpoint_of_that_step(target, texts, tmp_path, unbroken, after):
    steps = []
    stopped = make_trainer(target, texts, tmp_path)
    finished = train(stopped, on_step=lambda step, loss: steps.append(step), should_stop=lambda: len(steps) >= after)
    assert finished is (after == STEPS) and steps[-1] == after
    resumed = make_trainer(target, texts, tmp_path)
    assert resumed.resume() == after
    train(resumed)
    assert_same_run(resumed, unbroken)


def test_asked_to_stop_while_it_validates_it_validates_again_when_it_goes_on(target, texts, tmp_path, unbroken):
    asked, seen = [], []
    stopped = make_trainer(target, texts, tmp_path)
    read = stopped.read_states

    def watched(text):
        asked.extend([True] * (text in texts[7:]))  # one of the held-out texts is being read
        return read(text)

    stopped.read_states = watched
    assert train(stopped, should_stop=lambda: bool(asked), on_validation=lambda *a: seen.append(a)) is False
    assert len(asked) == 1 and not seen and read_log(tmp_path)[-1]["step"] == 4
    resumed = make_trainer(target, texts, tmp_path)
    train(resumed, on_validation=lambda step, groups: seen.append(step))
    assert seen == [4, 8]
    assert_same_run(resumed, unbroken)


def test_validation_is_logged_with_its_numbers(unbroken, texts):
    entries = [entry for entry in read_log(unbroken.output_dir) if "acceptance_length" in entry]
    assert [entry["step"] for entry in entries] == [4, 8]
    groups = entries[-1]["acceptance_length"]
    assert groups["all"]["num_prompts"] == 3 and groups["all"]["acceptance_length"] >= 1
    assert {name for name in groups if name != "all"} == {text.category for text in texts[7:]}
    steps = [entry for entry in read_log(unbroken.output_dir) if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    assert all(entry["learning_rate"] == unbroken.config.learning_rate_at(entry["step"] - 1) for entry in steps)


def test_a_run_without_validation_texts_trains(target, texts, tmp_path):
    trainer = make_trainer(target, texts[:7], tmp_path, steps=4)
    assert train(trainer, validate_every=1) is True
    assert trainer.validate() == {}


def test_kept_states_train_to_the_weights_of_recomputed_ones(target, texts, tmp_path, unbroken):
    for _ in range(2):  # the second run reads them all
        kept = make_trainer(target, texts, tmp_path / "run", states_dir=tmp_path / "states")
        train(kept)
        assert_same_run(kept, unbroken)
        for path in (tmp_path / "run").glob("**/*"):
            if path.is_file():
                path.unlink()
        (tmp_path / "run" / "checkpoint").rmdir()
    assert len(list((tmp_path / "states").iterdir())) == 10


def test_what_an_attempt_without_a_checkpoint_logged_does_not_stay(target, texts, tmp_path):
    """Its lines used to stay, twice the same step."""
    with pytest.raises(Killed):
        train(make_trainer(target, texts, tmp_path, steps=2), on_step=lambda *a: (_ for _ in ()).throw(Killed))
    train(make_trainer(target, texts, tmp_path, steps=2))
    assert [entry["step"] for entry in read_log(tmp_path)] == [1, 2]


def test_the_number_of_steps_may_change_on_the_way(target, texts, tmp_path):
    train(make_trainer(target, texts, tmp_path, steps=4))
    longer = make_trainer(target, texts, tmp_path, steps=6)
    assert longer.resume() == 4
    losses = []
    assert train(longer, on_step=lambda step, loss: losses.append(step)) and losses == [5, 6]
    entries = [entry for entry in read_log(tmp_path) if "loss" in entry]
    assert entries[-1]["learning_rate"] == longer.config.learning_rate_at(5)
    # Fewer than were done: nothing is left to do.
    shorter = make_trainer(target, texts, tmp_path, steps=2)
    assert train(shorter, on_step=lambda *a: pytest.fail("trained")) and shorter.state.step == 6


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"learning_rate": 2e-3}, "learning_rate"),
        ({"seed": 1}, "seed"),
        ({"gamma": 3.0}, "gamma"),
        ({"distillation": 0.4}, "distillation"),
        ({"block_size": 5}, "drafter"),
        ({"block_sizes": (2, 4)}, "block_sizes"),
        ({"mixed_precision": "bf16"}, "mixed_precision"),
        ({"accumulation": 2}, "accumulation"),
        ({"target": make_target(seed=1)}, "target"),
        ({"target": make_target().to(torch.bfloat16)}, "dtype"),
        ({"order": [0, 2, 3, 4, 5, 6, 7]}, "texts"),
        ({"order": [1, 0, 2, 3, 4, 5, 6]}, "order of the texts"),
        ({"start": 2.0}, "start"),
    ],
)
def test_other_settings_are_refused(unbroken, target, texts, change, name):
    settings = {key: value for key, value in change.items() if key not in ("target", "order", "start")}
    chosen = [texts[i] for i in change.get("order", range(7))] + texts[7:]
    trainer = make_trainer(change.get("target", target), chosen, unbroken.output_dir, **settings)
    if "start" in change:
        with torch.no_grad():
            trainer.drafter.fc.weight.mul_(change["start"])
        trainer = DrafterTrainer(target, trainer.drafter, texts[:7], texts[7:], trainer.config, unbroken.output_dir)
    before = weights_of(trainer)
    with pytest.raises(ValueError, match=f"is of another run: `{name}` was .* and is .* now"):
        train(trainer)
    assert all(torch.equal(p, before[k]) for k, p in trainer.drafter.named_parameters())
    assert make_trainer(target, texts, unbroken.output_dir).resume() == STEPS


def test_a_checkpoint_that_knows_fewer_settings_is_resumed(target, texts, tmp_path, unbroken):
    """As those that were written before the start, the dtype and the order of the texts were recorded."""
    train(make_trainer(target, texts, tmp_path), should_stop=lambda: True)
    path = tmp_path / "checkpoint" / "state.json"
    state = json.loads(path.read_text())
    assert set(state) == {"step", "num_tokens", "seconds", "settings"}
    for name in ("start", "dtype", "order of the texts"):
        del state["settings"][name]
    path.write_text(json.dumps(state))
    resumed = make_trainer(target, texts, tmp_path)
    assert resumed.resume() == 1
    train(resumed)
    assert_same_run(resumed, unbroken)


# --- what goes wrong ---


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_numbers_that_are_not_finite_stop_the_run_before_they_reach_the_weights(
    target, texts, tmp_path, unbroken, monkeypatch, broken
):
    trainer = make_trainer(target, texts, tmp_path)
    compute, kept = trainer.loss, {}

    def spoilt(text, generator):
        loss, count = compute(text, generator)
        if trainer.state.step == 5:
            kept.update(weights_of(trainer))
            if broken == "loss":
                return loss * math.nan, count
            loss.register_hook(lambda grad: grad * math.inf)
        return loss, count

    monkeypatch.setattr(trainer, "loss", spoilt)
    with pytest.raises(FloatingPointError, match=r"Step 6 has the loss .* below 0\.001"):
        train(trainer)
    assert all(torch.equal(p, kept[name]) for name, p in trainer.drafter.named_parameters())
    assert read_log(tmp_path)[-1]["step"] == 5
    resumed = make_trainer(target, texts, tmp_path)
    assert resumed.resume() == 4
    train(resumed)
    assert_same_run(resumed, unbroken)


def test_texts_must_fit_the_target(texts, tmp_path):
    target = make_target(max_position_embeddings=30)
    with pytest.raises(ValueError, match=r"Text 'strange' holds the token id 64, the target has 0 to 63"):
        make_trainer(target, [*texts[:3], Text("strange", "a", (1, 64), (2, 3))], tmp_path)
    long = make_text(make_target(), length=8, num_new=23)
    with pytest.raises(ValueError, match=r"Text 'text-0' has 31 tokens, the target takes 30"):
        make_trainer(target, [long], tmp_path)
    fits = Text(long.id, long.category, long.prompt_ids, long.answer_ids[:-1])
    assert train(make_trainer(target, [fits], tmp_path, steps=1))


def test_a_drafter_of_another_target_and_no_texts_are_refused(target, texts, tmp_path):
    drafter = drafter_from_target(make_target(hidden_size=64), mask_token_id=63, num_layers=1)
    with pytest.raises(ValueError, match="hidden size is 64, the target's 32"):
        DrafterTrainer(target, drafter, texts, [], DrafterTrainingConfig(), tmp_path)
    with pytest.raises(ValueError, match="There is no text to train on"):
        make_trainer(target, [], tmp_path)


def test_states_are_read_by_the_layers_of_the_drafter(target, texts, tmp_path):
    trainer = make_trainer(target, texts, tmp_path)
    assert isinstance(trainer.read_states, TargetStatesReader)
    assert trainer.read_states.target_layer_ids == trainer.drafter.config.target_layer_ids


def test_tokens_below_the_least_count_are_neither_learned_nor_proposed(target, tmp_path):
    common, rare = Text("1", "all", (1, 2, 3), (5, 6, 5, 6, 5)), Text("2", "all", (1, 2, 4), (7, 8, 9))
    drafter = drafter_from_target(target, mask_token_id=63, num_layers=1, block_size=4)
    config = DrafterTrainingConfig(steps=2, anchors_per_sequence=6, min_token_count=2)
    trainer = DrafterTrainer(target, drafter, [common, rare], [], config, tmp_path)
    assert trainer.occurring.tolist() == [5, 6]
    # All of the second text is too rare: it teaches nothing, and breaks nothing.
    loss, num_positions = trainer.loss(rare, torch.Generator().manual_seed(0))
    assert loss.item() == 0 and num_positions == 0
    assert train(trainer) and all(p.isfinite().all() for p in trainer.drafter.parameters())


def test_a_least_count_that_no_token_reaches_is_refused(target, texts, tmp_path):
    with pytest.raises(ValueError, match=r"No token occurs 1000 times .* Lower `min_token_count`"):
        make_trainer(target, texts, tmp_path, min_token_count=1000)

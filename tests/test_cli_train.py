"""`blockpilot train-drafter` on a tiny saved target, through `main` as the installed script calls it."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_prompt, make_target, plain_generate
from drafter_texts import make_texts, write_texts
from filelock import FileLock
from safetensors.torch import load_file
from test_target_states import small_files_only
from tokenizers import Tokenizer, models
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

from blockpilot_hf import BlockPilot, cli, training_plot
from blockpilot_hf.drafter_record import TrainingPrompts, read_training_prompts, replay_texts
from blockpilot_hf.drafter_training import DrafterTrainer
from blockpilot_hf.loading import load_drafter
from blockpilot_hf.replay import replay
from blockpilot_hf.target_states import target_states, weights_fingerprint
from blockpilot_hf.texts import read_texts, split_by_prompt


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """`target`, a tiny one with a tokenizer, and `texts.jsonl` that it wrote: 15 prompts in two categories."""
    root = tmp_path_factory.mktemp("train")
    target = make_target("llama")
    target.save_pretrained(root / "target")
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(root / "target")
    write_texts(root / "texts.jsonl", make_texts(target, 15))
    return root


@pytest.fixture
def run(root, monkeypatch, capsys):
    """`run(output, *arguments)` to `(status, stdout, stderr)`: six steps of one layer unless told otherwise."""

    def run(output, *arguments, texts=None, target=True, mask=True, steps=6):
        files = texts if isinstance(texts, list) else [texts or root / "texts.jsonl"]
        command = ["blockpilot", "train-drafter", *files, "--output", output, "--steps", steps]
        command += ["--dtype", "float32", *(["--target", root / "target"] if target else [])]
        if "--init" not in arguments:
            command += ["--layers", 1, "--block-size", 4, *(["--mask-token-id", 63] if mask else [])]
        command += ["--validate-every", 4, "--checkpoint-every", 2, "--anchors", 6, *arguments]
        monkeypatch.setattr(sys, "argv", [str(part) for part in command])
        monkeypatch.setenv("COLUMNS", "100")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def finished(root, tmp_path_factory):
    """The folder of a run from start to end, for tests that only look."""
    output = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        command = ["blockpilot", "train-drafter", root / "texts.jsonl", "--output", output, "--steps", 6]
        command += ["--dtype", "float32", "--target", root / "target", "--layers", 1, "--block-size", 4]
        command += ["--mask-token-id", 63, "--validate-every", 4, "--checkpoint-every", 2, "--anchors", 6]
        patch.setattr(sys, "argv", [str(part) for part in command])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 0
    return output


def signals_in_step(monkeypatch, number, step, *, times=1):
    """As if the user pressed Ctrl-C, or the machine asked to end, in the middle of a step."""
    take = DrafterTrainer.train_step

    def interrupted(self, done):
        result = take(self, done)
        if done + 1 == step:
            for _ in range(times):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
        return result

    monkeypatch.setattr(DrafterTrainer, "train_step", interrupted)


def step_lines(folder):
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


# --- a run ---


def test_interrupted_and_resumed_it_ends_with_the_drafter_of_an_unbroken_run(run, monkeypatch, tmp_path, finished):
    with monkeypatch.context() as patch:
        signals_in_step(patch, signal.SIGINT, 3)
        status, out, _ = run(tmp_path / "run")
    assert status == 130
    assert "stopped: the checkpoint of step 3 is in" in out and "the same command again" in out
    assert f"blockpilot train-drafter {tmp_path.parent}" in out.replace(
        str(Path(sys.argv[2]).parent), str(tmp_path.parent)
    )
    assert not (tmp_path / "run" / "drafter").exists() and not (tmp_path / "run" / "validation.json").exists()

    status, out, _ = run(tmp_path / "run")
    assert status == 0 and "resuming at step 3 of 6" in out
    ours, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (tmp_path / "run", finished))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert step_lines(tmp_path / "run") == step_lines(finished)
    records = [json.loads((folder / "validation.json").read_text()) for folder in (tmp_path / "run", finished)]
    for name in ("acceptance_length", "per_prompt", "settings", "meta_info"):
        assert records[0][name] == records[1][name]


def test_the_result_loads_anywhere_and_decodes_the_targets_own_text(root, finished):
    target = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32)
    prompt, settings = make_prompt(), {"max_new_tokens": 20, "do_sample": False}
    plain = plain_generate(target, prompt, **settings)
    folder = finished / "drafter"
    for drafter in (load_drafter(folder, dtype=torch.float32), AutoModel.from_pretrained(folder)):
        output = BlockPilot(drafter.float().eval()).generate(target, prompt, **settings)
        assert torch.equal(output, plain)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["block_size"] == 4 and config["num_hidden_layers"] == 1
    assert Path(config["target_name_or_path"]).name == "target"
    assert config["target_fingerprint"] == weights_fingerprint(target) and config["blockpilot_version"]
    written = load_file(finished / "drafter" / "model.safetensors")
    answers = {i for text in split_by_prompt(read_texts(root / "texts.jsonl"), 20)[0] for i in text.answer_ids}
    assert written.pop("shortlist_ids").tolist() == sorted(answers)
    assert all(tensor.dtype == torch.bfloat16 for tensor in written.values())
    assert not list(finished.glob("*.new")) and not list(finished.glob("*.old"))


def test_the_record_says_what_the_drafter_is_worth_and_what_it_was_made_of(root, finished):
    record = json.loads((finished / "validation.json").read_text())
    target = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32)
    drafter = load_drafter(finished / "drafter", dtype=torch.float32)
    train, held_out = split_by_prompt(read_texts(root / "texts.jsonl"), 20)
    assert len(held_out) == 2 and record["block_size"] == 4
    # By the drafter as it was written, with the target's states as decoding sees them.
    for text, found in zip(held_out, record["per_prompt"], strict=True):
        context = target_states(target, drafter.config.target_layer_ids, text).context
        walk = replay(target, drafter, text, context, [4])
        assert found == {
            "id": text.id,
            "category": text.category,
            "temperature": 0.0,
            "num_new_tokens": len(text.answer_ids),
            "num_steps": len(walk.steps(4)),
            "acceptance_length": walk.acceptance_length(4),
        }
    groups = record["acceptance_length"]
    assert {name: group["num_prompts"] for name, group in groups.items()} == {"a": 1, "all": 2, "b": 1}
    mean = sum(found["acceptance_length"] for found in record["per_prompt"]) / 2
    assert groups["all"]["acceptance_length"] == pytest.approx(mean)
    made_of = record["meta_info"]
    assert made_of["target_fingerprint"] == weights_fingerprint(target) and made_of["target_dtype"] == "float32"
    assert made_of["drafter_fingerprint"] == weights_fingerprint(drafter)
    digest = hashlib.sha256((root / "texts.jsonl").read_bytes()).hexdigest()
    assert made_of["texts"] == [{"name": "texts.jsonl", "sha256": digest, "num_texts": 15}]
    assert made_of["num_texts"] == len(train) == 13 and made_of["temperatures"] == {"0": 13}
    assert made_of["num_training_prompts"] == len({text.prompt_hash for text in train}) and "init" not in made_of
    assert {"blockpilot-hf", "torch", "transformers"} <= made_of["versions"].keys()
    assert record["run_info"]["num_steps"] == 6 and record["run_info"]["training_s"] > 0
    assert record["run_info"]["command"].startswith("blockpilot train-drafter ")
    assert record["settings"]["gamma"] == 2.0 and record["settings"]["anchors_per_sequence"] == 6


def test_what_is_judged_is_the_drafter_as_it_was_written(run, monkeypatch, tmp_path):
    judged = []

    def spy(target, drafter, *args):
        judged.append({name: p.clone() for name, p in drafter.named_parameters()})
        return replay_texts(target, drafter, *args)

    monkeypatch.setattr("blockpilot_hf.drafter_run.replay_texts", spy)
    run(tmp_path / "run", steps=1)
    written = load_file(tmp_path / "run" / "drafter" / "model.safetensors")
    del written["shortlist_ids"]
    assert all(torch.equal(judged[0][name], tensor.float()) for name, tensor in written.items())
    assert judged[0]["fc.weight"].dtype == torch.float32  # the target's


def test_before_it_starts_it_says_what_is_coming(run, root, tmp_path):
    status, out, err = run(tmp_path / "run", steps=1)
    train, _ = split_by_prompt(read_texts(root / "texts.jsonl"), 20)
    assert status == 0 and err == ""
    assert f"texts: 13, {sum(len(t.ids) for t in train):,} tokens" in out
    assert "held out: 2 prompts of 2 categories" in out
    drafter = load_drafter(tmp_path / "run" / "drafter")
    assert f"drafter: {drafter.num_parameters():,} parameters, layers 1, block size 4" in out
    assert f"kept in {tmp_path / 'run' / 'states'}, " in out and "GB are free" in out
    assert "step 1 of 1, loss" in out and "\x1b" not in out
    table = [line.split() for line in out.splitlines()]
    assert ["category", "tau", "prompts"] in table and ["all", *out.split("all")[-1].split()[:2]] in table


def test_validations_are_shown_as_they_come_and_the_last_one_is_on_all(run, tmp_path):
    _, out, _ = run(tmp_path / "run")
    titles = [line for line in out.splitlines() if "acceptance length" in line]
    assert titles == [
        "acceptance length (tau) at step 4, block size 4",
        "acceptance length (tau) on all that is held out, block size 4",
    ]


def test_a_finished_run_says_so_and_writes_nothing(run, finished):
    before = stamps(finished)
    status, out, _ = run(finished)
    assert status == 0 and "finished before, at step 6: nothing to do" in out
    assert "on all that is held out" in out and str(finished / "drafter") in out
    assert stamps(finished) == before


@pytest.mark.parametrize("missing", ["drafter", "validation.json"])
def test_a_finished_run_makes_what_is_missing_without_training(run, monkeypatch, tmp_path, missing):
    run(tmp_path / "run")
    path = tmp_path / "run" / missing
    before = json.loads((tmp_path / "run" / "validation.json").read_text())
    path.rename(tmp_path / "away")
    monkeypatch.setattr(DrafterTrainer, "train_step", lambda *args: pytest.fail("trained"))
    status, _, _ = run(tmp_path / "run")
    after = json.loads((tmp_path / "run" / "validation.json").read_text())
    assert status == 0 and path.exists() and (tmp_path / "run" / "drafter" / "model.safetensors").is_file()
    assert after["acceptance_length"] == before["acceptance_length"] and after["meta_info"] == before["meta_info"]


def test_more_steps_go_on_from_a_finished_run(run, tmp_path):
    run(tmp_path / "run", steps=4)
    status, out, _ = run(tmp_path / "run", steps=6)
    assert status == 0 and "resuming at step 4 of 6" in out
    assert json.loads((tmp_path / "run" / "validation.json").read_text())["run_info"]["num_steps"] == 6


# --- signals ---


def test_a_request_to_end_leaves_a_checkpoint_too(run, monkeypatch, tmp_path):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signals_in_step(monkeypatch, signal.SIGTERM, 5)
    status, out, _ = run(tmp_path / "run")
    assert status == 143 and "the checkpoint of step 5" in out
    assert json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())["step"] == 5
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_second_interrupt_ends_at_once(run, monkeypatch, tmp_path):
    signals_in_step(monkeypatch, signal.SIGINT, 5, times=2)
    status, _, _ = run(tmp_path / "run")
    assert status == 130
    assert json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())["step"] == 4


def test_interrupted_while_it_is_judged_the_drafter_is_judged_again(run, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        signals_in_step(patch, signal.SIGINT, 6)
        status, out, _ = run(tmp_path / "run")
    assert status == 130 and "the checkpoint of step 6" in out
    assert not (tmp_path / "run" / "validation.json").exists()
    status, out, _ = run(tmp_path / "run")
    assert status == 0 and (tmp_path / "run" / "validation.json").is_file()


def test_the_record_of_fewer_steps_does_not_stand_for_more(run, monkeypatch, tmp_path):
    run(tmp_path / "run", steps=4)
    with monkeypatch.context() as patch:
        signals_in_step(patch, signal.SIGINT, 6)
        assert run(tmp_path / "run", steps=6)[0] == 130
    status, out, _ = run(tmp_path / "run", steps=6)
    assert status == 0 and "at step 6 already" in out
    assert json.loads((tmp_path / "run" / "validation.json").read_text())["run_info"]["num_steps"] == 6


# --- options ---


def test_recomputed_states_give_the_same_drafter_and_take_no_disk(run, tmp_path, finished):
    status, out, _ = run(tmp_path / "run", "--recompute")
    assert status == 0 and "computed at every visit" in out and not (tmp_path / "run" / "states").exists()
    assert len(list((finished / "states").iterdir())) > 0
    ours, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (tmp_path / "run", finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_states_may_lie_elsewhere_and_are_not_computed_twice(run, tmp_path):
    _, out, _ = run(tmp_path / "first", "--states", tmp_path / "kept")
    assert f"kept in {tmp_path / 'kept'}" in out and len(list((tmp_path / "kept").iterdir())) > 0
    before = stamps(tmp_path / "kept")
    run(tmp_path / "second", "--states", tmp_path / "kept")
    assert stamps(tmp_path / "kept") == before


def test_a_part_of_the_texts_can_be_trained_on(run, tmp_path):
    status, out, _ = run(tmp_path / "run", "--limit", 5, steps=1)
    assert status == 0 and "texts: 5, " in out and "held out: 2 prompts" in out


def test_another_drafter_can_be_the_start(run, root, tmp_path, finished):
    status, out, _ = run(tmp_path / "run", "--init", finished / "drafter", "--learning-rate", 1e-9, steps=1)
    assert status == 0 and "block size 4" in out
    drafters = [load_drafter(folder / "drafter") for folder in (tmp_path / "run", finished)]
    ours, theirs = (dict(drafter.named_parameters()) for drafter in drafters)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # Without it, or from another one, it is another run.
    status, _, err = run(tmp_path / "run", "--learning-rate", 1e-9, "--target-layers", "0,1", steps=1)
    assert status != 0 and "is of another run" in err


def test_a_start_keeps_nothing_that_was_true_of_its_old_weights(run, tmp_path):
    drafter = make_drafter(make_target("llama"), policy="../policy", target_fingerprint="old", block_size=8)
    drafter.save_pretrained(tmp_path / "start")
    status, out, _ = run(tmp_path / "run", "--init", tmp_path / "start", "--block-size", 5, steps=1)
    assert status == 0 and "layers 2, block size 5" in out
    config = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert config.get("policy") is None and config["target_fingerprint"] != "old"


def test_without_held_out_prompts_it_trains_and_says_that_it_judges_nothing(run, tmp_path):
    status, out, _ = run(tmp_path / "run", "--validation-prompts", 0)
    assert status == 0 and "held out: no prompt" in out and "tau" not in out.replace("(see", "")
    record = json.loads((tmp_path / "run" / "validation.json").read_text())
    assert record["acceptance_length"] == {} and record["per_prompt"] == []


def test_a_mask_token_that_texts_contain_is_told(run, root, tmp_path):
    texts = read_texts(root / "texts.jsonl")
    status, out, _ = run(tmp_path / "run", "--mask-token-id", texts[0].answer_ids[0], mask=False, steps=1)
    assert status == 0 and "in it; better take one that none has" in out


def test_mixed_block_sizes_train_and_the_largest_is_the_drafters(run, root, tmp_path):
    status, out, _ = run(tmp_path / "run", "--mixed-block-sizes", "4,2")
    assert status == 0 and "block sizes in training: 2, 4" in out and "block size 4," in out
    record = json.loads((tmp_path / "run" / "validation.json").read_text())
    assert record["settings"]["block_sizes"] == [2, 4] and record["settings"]["gamma"] is None
    assert json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())["block_size"] == 4
    # The same command goes on: what was read again from the checkpoint is what was written.
    status, out, _ = run(tmp_path / "run", "--mixed-block-sizes", "2,4", steps=7)
    assert status == 0 and "resuming at step 6 of 7" in out
    status, _, err = run(tmp_path / "run", "--mixed-block-sizes", "2,3,4", steps=8)
    assert status == 2 and "`block_sizes` was [2, 4] there and is [2, 3, 4] now" in err


def test_a_run_of_a_version_without_an_option_does_not_go_on_with_it(run, tmp_path):
    run(tmp_path / "run", steps=2)
    state = tmp_path / "run" / "checkpoint" / "state.json"
    content = json.loads(state.read_text())
    for name in ("mixed_precision", "block_sizes", "accumulation"):
        del content["settings"][name]
    state.write_text(json.dumps(content))
    status, _, err = run(tmp_path / "run", "--mixed-precision", "bf16", steps=4)
    assert status == 2 and "`mixed_precision` was 'no' there and is 'bf16' now" in err
    status, out, _ = run(tmp_path / "run", steps=4)
    assert status == 0 and "resuming at step 2 of 4" in out


def test_texts_of_several_files_are_trained_on_and_each_is_on_record(run, root, tmp_path):
    texts = read_texts(root / "texts.jsonl")
    files = [write_texts(tmp_path / "a.jsonl", texts[:8]), write_texts(tmp_path / "b.jsonl", texts[8:])]
    status, out, _ = run(tmp_path / "run", texts=files)
    assert status == 0 and "texts: 13, " in out
    found = json.loads((tmp_path / "run" / "validation.json").read_text())["meta_info"]["texts"]
    assert [(entry["name"], entry["num_texts"]) for entry in found] == [("a.jsonl", 8), ("b.jsonl", 7)]
    assert [entry["sha256"] for entry in found] == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_texts_of_other_prompts_can_be_what_it_is_judged_on(run, root, tmp_path):
    others = make_texts(make_target("llama"), 4, first_seed=900)
    file = write_texts(tmp_path / "others.jsonl", others)
    status, out, _ = run(tmp_path / "run", "--validation-texts", file)
    assert status == 0 and "texts: 15, " in out and "held out: 4 prompts" in out
    record = json.loads((tmp_path / "run" / "validation.json").read_text())
    assert [found["id"] for found in record["per_prompt"]] == [text.id for text in others]
    assert record["meta_info"]["validation_texts"]["name"] == "others.jsonl"


def test_a_prompt_that_is_trained_on_is_no_test(run, root, tmp_path):
    known = read_texts(root / "texts.jsonl")[3]
    # The answer may be another one, as at another temperature.
    again = dataclasses.replace(known, id="again", answer_ids=known.answer_ids[::-1])
    file = write_texts(tmp_path / "held.jsonl", [*make_texts(make_target("llama"), 1, first_seed=900), again])
    status, _, err = run(tmp_path / "run", "--validation-texts", file)
    assert status == 2 and "trained on: 1 of 2, the first is 'again'" in err


def test_what_was_trained_on_is_on_record_through_all_drafters_that_it_came_from(run, root, tmp_path, finished):
    trained = {text.prompt_hash[:16] for text in split_by_prompt(read_texts(root / "texts.jsonl"), 20)[0]}
    assert read_training_prompts(finished / "drafter") == TrainingPrompts(frozenset(trained))
    others = make_texts(make_target("llama"), 5, first_seed=900)
    status, _, _ = run(
        tmp_path / "run", "--init", finished / "drafter", texts=write_texts(tmp_path / "o.jsonl", others), steps=1
    )
    assert status == 0
    expected = trained | {text.prompt_hash[:16] for text in others}
    assert read_training_prompts(tmp_path / "run" / "drafter") == TrainingPrompts(frozenset(expected))
    meta = json.loads((tmp_path / "run" / "validation.json").read_text())["meta_info"]
    assert meta["num_training_prompts"] == len(expected) and meta["num_texts"] == 5
    fingerprint = json.loads((finished / "validation.json").read_text())["meta_info"]["drafter_fingerprint"]
    assert meta["init"] == {"name": "drafter", "fingerprint": fingerprint}
    # How acceptance grew over both runs, each ending with what was found on all that was held out.
    before, now = (json.loads((folder / "validation.json").read_text()) for folder in (finished, tmp_path / "run"))
    assert now["progress"][: len(before["progress"])] == before["progress"]
    assert [entry["run"] for entry in now["progress"]] == [1] * len(before["progress"]) + [2]
    for record in (before, now):
        assert record["progress"][-1]["acceptance_length"] == record["acceptance_length"]
    assert now["progress"][-1]["step"] == 1 and now["progress"][-1]["num_visits"] == 2
    # What the start has seen cannot judge what came of it.
    seen = next(text for text in read_texts(root / "texts.jsonl") if text.prompt_hash[:16] in trained)
    file = write_texts(tmp_path / "held.jsonl", [seen])
    arguments = ["--init", finished / "drafter", "--validation-texts", file]
    status, _, err = run(tmp_path / "two", *arguments, texts=tmp_path / "o.jsonl", steps=1)
    assert status == 2 and "or that the start was trained on" in err


def test_validations_tell_temperatures_apart(run, root, tmp_path):
    texts = make_texts(make_target("llama"), 12, first_seed=700, num_categories=1)
    drawn = [dataclasses.replace(text, temperature=1.0) for text in texts[6:]]
    entries = [
        {
            "id": t.id,
            "category": "a",
            "prompt_ids": t.prompt_ids,
            "answer_ids": t.answer_ids,
            "temperature": t.temperature,
        }
        for t in (*texts[:6], *drawn)
    ]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert run(tmp_path / "run", texts=file)[0] == 0
    record = json.loads((tmp_path / "run" / "validation.json").read_text())
    groups, found = record["acceptance_length"], record["per_prompt"]
    for temperature in {one["temperature"] for one in found}:
        own = [one["acceptance_length"] for one in found if one["temperature"] == temperature]
        group = groups.get(f"all, temperature {temperature:g}", groups["all"])
        assert group["acceptance_length"] == pytest.approx(sum(own) / len(own))
        assert group["num_prompts"] == group["num_texts"] == len(own)  # each prompt has one
    assert sum(record["meta_info"]["temperatures"].values()) == 10


def test_a_run_is_drawn_and_a_finished_one_only_drawn(run, monkeypatch, tmp_path):
    plot = tmp_path / "run.png"
    status, out, _ = run(tmp_path / "run", "--plot", plot)
    assert status == 0 and f"plot: {plot}" in out and plot.read_bytes().startswith(b"\x89PNG")
    plot.unlink()
    before = stamps(tmp_path / "run")
    monkeypatch.setattr(DrafterTrainer, "train_step", lambda *args: pytest.fail("trained"))
    status, out, _ = run(tmp_path / "run", "--plot", plot)
    assert status == 0 and "nothing to do" in out and plot.is_file() and stamps(tmp_path / "run") == before


def test_a_picture_in_a_new_output_shows_the_final_tau_when_drawn_again_too(run, monkeypatch, tmp_path):
    drawn, draw = [], training_plot.draw_log

    def watched(log, path, **settings):
        drawn.append(settings)
        draw(log, path, **settings)

    monkeypatch.setattr("blockpilot_hf.drafter_run.draw_log", watched)
    plot = tmp_path / "run" / "plots" / "training.png"
    assert run(tmp_path / "run", "--plot", plot)[0] == 0 and plot.is_file()
    record = json.loads((tmp_path / "run" / "validation.json").read_text())
    final = {"step": 6, "acceptance_length": record["acceptance_length"]}
    assert [settings["final"] for settings in drawn] == [None, final]  # at step 4 and at the end
    assert drawn[0]["title"] == "drafter for target, block size 4"
    plot.unlink()
    assert run(tmp_path / "run", "--plot", plot)[0] == 0 and plot.is_file()
    assert drawn[2] == drawn[1]
    assert [entry["step"] for entry in record["progress"]] == [4, 6]


def test_before_it_starts_it_says_what_it_will_take(run, tmp_path):
    _, out, _ = run(tmp_path / "run", steps=3)
    assert re.search(r"memory: about \d+\.\d\d GB \(target \d.*gradients .*moments .*are available\)", out)
    assert re.search(
        r"time: about 0:00:\d\d for 3 steps \(.* a step, .* more for each text whose states are not kept", out
    )
    assert run(tmp_path / "run", steps=3)[1].count("time: about") == 0


def test_a_run_that_memory_will_not_hold_is_refused_before_it_starts(run, monkeypatch, tmp_path):
    monkeypatch.setattr("blockpilot_hf.drafter_estimate.available_memory", lambda device: 1000)
    status, _, err = run(tmp_path / "run")
    assert status == 2 and "GB of memory more (gradients " in err and "Take fewer `--anchors`" in err
    assert not (tmp_path / "run" / "checkpoint").exists()


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ([], {"mask": False}, "needs `--mask-token-id`: the id of a token that texts do not contain"),
        (["--recompute", "--states", "x"], {}, "`--states` keeps the target's states, `--recompute` does not"),
        (["--target-layers", "1,x"], {}, "`--target-layers` takes layer numbers separated by commas"),
        (["--learning-rate", 0], {}, "`learning_rate` must be above 0"),
        (["--distillation", 2], {}, "`distillation` must be between 0 and 1"),
        (["--init", "/no/drafter"], {}, "/no/drafter"),
        (["--mixed-block-sizes", "4,x"], {}, "`--mixed-block-sizes` takes block sizes separated by commas"),
        (["--mixed-block-sizes", "1,4"], {}, "`block_sizes` must be rising block sizes of at least 2"),
        (["--mixed-block-sizes", "2,8"], {}, "The drafter's block size 4 is not among `--mixed-block-sizes` 2,8"),
        (["--mixed-precision", "fp16"], {}, "small gradients become 0 without loss scaling"),
        (["--plot", "run.pdf"], {}, "its name must end in .png, got 'run.pdf'"),
        (["--plot", "/no/folder/run.png"], {}, "is in a folder that does not exist"),
        (["--plot", "{output}/drafter/run.png"], {}, "which training replaces as a whole. Name a file beside it"),
        (["--validation-texts", ".", "--validation-prompts", 3], {}, "takes the place of `--validation-prompts`"),
    ],
)
def test_what_is_asked_for_wrongly_is_told_before_the_target_is_loaded(
    run, monkeypatch, tmp_path, arguments, settings, message
):
    monkeypatch.setattr("blockpilot_hf.cli_train.load_target", lambda *a, **k: pytest.fail("loaded"))
    arguments = [str(one).format(output=tmp_path / "run") for one in arguments]
    status, out, err = run(tmp_path / "run", *arguments, **settings)
    assert status in (1, 2) and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_a_start_comes_with_its_own_sizes(run, tmp_path, finished):
    status, _, err = run(tmp_path / "run", "--init", finished / "drafter", "--layers", 2, "--mask-token-id", 3)
    assert status == 2 and "`--init` brings a drafter with its own sizes, so --layers, --mask-token-id cannot" in err


def test_layers_that_the_target_does_not_have_are_refused(run, tmp_path):
    status, _, err = run(tmp_path / "run", "--target-layers", "0,4")
    assert status == 2 and "`target_layer_ids` must be zero-based layers of the target, 0 to 3" in err
    assert run(tmp_path / "run", "--target-layers", "0,3", steps=1)[0] == 0


def test_texts_of_another_tokenizer_are_refused_by_name(run, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"id": "odd", "prompt_ids": [1], "answer_ids": [2, 64]}\n')
    status, _, err = run(tmp_path / "run", texts=tmp_path / "texts.jsonl")
    assert status == 2 and "Text 'odd' holds the token id 64" in err


def test_the_folder_of_a_run_with_other_settings_is_refused(run, finished):
    before = stamps(finished)
    status, _, err = run(finished, "--learning-rate", 2e-3)
    assert status == 2 and "is of another run: `learning_rate` was 0.001 there and is 0.002 now" in err
    assert stamps(finished) == before


def test_two_processes_do_not_train_in_one_folder(run, tmp_path):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        status, _, err = run(tmp_path / "run")
    assert status == 2 and "Another process trains in" in err
    assert run(tmp_path / "run", steps=1)[0] == 0


def test_a_loss_that_is_not_finite_ends_in_one_line_and_keeps_the_checkpoint(run, monkeypatch, tmp_path):
    compute = DrafterTrainer.loss

    def spoilt(self, text, generator):
        loss, count = compute(self, text, generator)
        return loss * (float("nan") if self.state.step == 4 else 1.0), count

    monkeypatch.setattr(DrafterTrainer, "loss", spoilt)
    status, _, err = run(tmp_path / "run")
    assert status == 1 and err.startswith("error: Step 5 has the loss nan") and err.count("\n") == 1
    assert json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())["step"] == 4


def test_states_for_which_there_is_no_room_are_refused_before_anything_is_computed(run, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "blockpilot_hf.drafter_estimate.shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})
    )
    status, _, err = run(tmp_path / "run")
    assert status == 2 and "are free" in err and "`--recompute`" in err and not (tmp_path / "run" / "states").exists()
    assert run(tmp_path / "run", "--recompute", steps=1)[0] == 0


def test_a_disk_that_fills_up_ends_in_one_line(run, tmp_path):
    with small_files_only():
        status, _, err = run(tmp_path / "run")
    assert status == 1 and "cannot be written to" in err and err.count("\n") == 1
    assert list((tmp_path / "run" / "states").iterdir()) == []
    assert run(tmp_path / "run")[0] == 0


def test_a_start_without_its_prompts_leaves_the_list_incomplete(run, finished, tmp_path):
    """Else a drafter that was trained on held-out prompts would pass for one that was not."""
    start = tmp_path / "start"
    shutil.copytree(finished / "drafter", start)
    (start / "training_prompts.json").unlink()
    status, out, _ = run(tmp_path / "run", "--init", start, steps=1)
    assert status == 0 and "does not say on which prompts it was trained" in " ".join(out.split())
    prompts = read_training_prompts(tmp_path / "run" / "drafter")
    assert not prompts.is_complete and prompts.hashes == read_training_prompts(finished / "drafter").hashes

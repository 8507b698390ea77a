"""`blockpilot train-policy` on sweeps with a known law, and on one of a tiny saved pair whose policy then decodes."""

import json
from dataclasses import replace

import pytest
import torch
from cli_models import folders, run  # noqa: F401  (fixtures)
from conftest import make_prompt, plain_generate
from drafter_texts import make_text
from sweeps import COSTS, SIZES, make_rows, make_sweep, save_sweep
from transformers import AutoModelForCausalLM

from blockpilot_hf import BlockPilot
from blockpilot_hf.drafter_record import read_training_prompts
from blockpilot_hf.loading import load_drafter, load_policy
from blockpilot_hf.policy_training import split_rows
from blockpilot_hf.sweep import write_sweep
from blockpilot_hf.target_states import weights_fingerprint

QUICK = ["--epochs", "8", "--bootstrap", "50", "--hidden-size", "16"]


@pytest.fixture
def train(run, tmp_path):  # noqa: F811
    """`train(sweep, *arguments)` to `(status, stdout, stderr, output folder)`; the output is kept between calls."""

    def train(sweep, *arguments, priced=True, target=False, columns=100):
        output = tmp_path / "out"
        more = ["--costs", tmp_path / "costs.json"] if priced else []
        COSTS.save(tmp_path / "costs.json")
        return *run("train-policy", sweep, "--output", output, *QUICK, *more, *arguments, target=target,
                    columns=columns), output  # fmt: skip

    return train


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return save_sweep(tmp_path_factory.mktemp("sweep") / "train", make_sweep(make_rows(60, 0)))


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_rule_by_seconds_learns_and_says_so_next_to_the_controls(train, swept, tmp_path):
    other = save_sweep(tmp_path / "test", make_sweep(make_rows(30, 1)))
    status, out, err, output = train(swept, "--block-sizes", "1,4,6", "--test", other, "--epochs", 40)
    assert status == 0, err
    for words in ("training size 4", "best constant", "random of 3", "best per text (time)", "residuals shuffled"):
        assert words in out
    assert "trained on 48 prompts, stopped by 12 others" in out
    record = read(output / "training.json")
    assert record["num_prompts"] == {"train": 48, "validation": 12, "test": 30}
    assert record["settings"]["block_sizes"] == [1, 4, 6]
    assert record["costs"]["verify_s"]["4"] == list(COSTS.verify_s[4])
    rules = record["results"]["test"][0]["comparisons"][0]["groups"]["all"]["rules"]
    assert rules["policy out"]["speedup"]["estimate"] > rules["random"]["speedup"]["estimate"]
    policy = load_policy(output / "policy")
    assert weights_fingerprint(policy) == record["meta_info"]["policy_fingerprint"]
    config = policy.config
    assert (config.block_sizes, config.sampling) == ([1, 4, 6], {"temperature": 0.0})
    assert (config.target_name_or_path, config.target_fingerprint) == ("tiny-target", "t" * 16)
    assert (config.drafter_name_or_path, config.drafter_fingerprint) == ("tiny-drafter", "d" * 16)
    assert read_training_prompts(output / "policy").hashes == {row.prompt_hash[:16] for row in make_rows(60, 0)}


def test_rule_by_tau_needs_no_costs_and_takes_the_window_around_the_training_size(train, swept):
    status, out, err, output = train(swept, "--rule", "tau", priced=False)
    assert status == 0, err
    assert load_policy(output / "policy").config.block_sizes == [2, 3, 4, 5, 6]
    assert "times plain [" not in out
    record = read(output / "training.json")
    assert record["costs"] is None
    assert list(record["results"]["validation"][0]["comparisons"][0]["shuffled"]) == ["tau"]
    assert not (output / "costs.json").exists()
    status, _, err, _ = train(swept, "--rule", "tau", "--window", "3,4,5", priced=False)
    assert status == 0, err
    assert load_policy(output / "policy").config.block_sizes == [3, 4, 5]


def test_a_curve_is_trained_without_a_rule_and_judged_under_the_table_next_to_the_controls(train, tmp_path):
    rows, others = make_rows(60, 0, context_size=5), make_rows(30, 1, context_size=5)
    folder = save_sweep(tmp_path / "context", make_sweep(rows))
    other = save_sweep(tmp_path / "test", make_sweep(others))
    quick = ["--epochs", 40, "--seeds", 2, "--learning-rate", 0.01, "--batch-size", 8]
    arguments = ["--head", "curve", "--features", "compact+context", *quick, "--test", other]
    status, out, err, output = train(folder, *arguments)
    assert status == 0, err
    for words in (
        "r2 of log tau",
        "acceptance length by block size",
        "best constant",
        "residuals shuffled",
        "times plain",
    ):
        assert words in out
    config = load_policy(output / "policy").config
    assert (config.head, config.context_size, config.block_sizes) == ("curve", 5, list(SIZES))
    record = read(output / "training.json")
    assert record["settings"]["head"] == "curve"
    assert set(record["curve_accuracy"]) == {"validation", "test"}
    entry = record["curve_accuracy"]["test"][-1]
    assert entry["block_size"] == 6 and entry["r2"] > 0.3
    assert entry["mean_absolute_error"] < entry["mean_absolute_error_of_the_mean"]
    rules = record["results"]["test"][0]["comparisons"][0]["groups"]["all"]["rules"]
    assert rules["policy out"]["speedup"]["estimate"] > rules["best_constant_speedup"]["speedup"]["estimate"]
    # As narrow as a phone, and not a table wider than that.
    status, out, err, _ = train(folder, *arguments, columns=60)
    assert status == 0 and "6: tau" in out, err
    assert max(map(len, out[out.index("acceptance length by") :].split("of the mean:")[0].splitlines())) <= 60


def test_options_of_the_other_head_are_refused(train, swept):
    curve = ["--head", "curve"]
    for arguments, message in (
        ([*curve, "--rule", "tau"], "`--rule` goes with head 'choice', got 'tau'"),
        ([*curve, "--window", "1,4"], "`--window` goes with head 'choice' and rule 'tau'"),
        ([*curve, "--class-weights"], "are for head 'choice'"),
        ([*curve, "--features", "compact+context"], "the drafter's context, and the sweep has none (text "),
        (["--head", "curves"], "`head` must be one of choice, curve, got 'curves'"),
    ):
        status, _, err, output = train(swept, *arguments, columns=200)
        assert (status, message in err) == (2, True), (arguments, err)
        assert not (output / "policy").exists()
    status, _, err, output = train(swept, *curve, "--block-sizes", "4,6")
    assert status == 0, err
    assert load_policy(output / "policy").config.block_sizes == [1, 4, 6]  # plain decoding can always be chosen


def test_of_several_seeds_the_best_in_validation_is_kept(train, swept):
    status, out, err, output = train(swept, "--block-sizes", "1,4,6", "--seeds", 3, "--seed", 5)
    assert status == 0, err
    record = read(output / "training.json")
    assert [entry["seed"] for entry in record["seeds"]] == [5, 6, 7]
    best = max(record["seeds"], key=lambda entry: entry["validation"])
    assert record["settings"]["seed"] == best["seed"]
    assert out.count("(kept)") == 1
    fingerprint = record["meta_info"]["policy_fingerprint"]
    assert train(swept, "--block-sizes", "1,4,6", "--seed", best["seed"])[0] == 0
    assert read(output / "training.json")["meta_info"]["policy_fingerprint"] == fingerprint


def test_texts_of_several_temperatures_are_examples_of_one_prompt(train, tmp_path):
    rows = make_rows(20, 0, temperatures=(0.0, 1.0))
    folder = save_sweep(tmp_path / "two", make_sweep(rows))
    status, _, err, output = train(folder, "--block-sizes", "1,4,6", "--objective", "speed")
    assert status == 0, err
    record = read(output / "training.json")
    assert record["num_prompts"] == {"train": 16, "validation": 4}
    assert record["num_texts"] == {"train": 32, "validation": 8}
    assert [result["temperature"] for result in record["results"]["validation"]] == [0.0, 1.0]
    assert load_policy(output / "policy").config.sampling is None
    assert len(split_rows(rows, 0.2)[1]) == 8


def test_a_sweep_of_a_real_pair_gives_a_policy_that_decodes_exactly(train, folders, tmp_path):  # noqa: F811
    target = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=torch.float32).eval()
    drafter = load_drafter(folders / "drafter")
    texts = [make_text(target, seed=i, num_new=8) for i in range(12)]
    sizes = sorted({1, 2, 4, drafter.config.block_size})
    write_sweep(target, drafter, texts, sizes, tmp_path / "sweep")
    arguments = ["--block-sizes", "1,2,4", "--drafter", folders / "drafter"]
    status, _, err, output = train(tmp_path / "sweep", *arguments, priced=False, target=True)
    assert status == 0, err
    costs = read(output / "costs.json")
    assert sorted(map(int, costs["verify_s"])) == sizes  # all of the sweep's, for policies with other candidates
    policy = load_policy(output / "policy")
    assert policy.config.target_fingerprint == weights_fingerprint(target)
    pilot, ids = BlockPilot(drafter, policy), make_prompt(6)
    plain = plain_generate(target, ids, max_new_tokens=8, do_sample=False)
    assert pilot.generate(target, ids, max_new_tokens=8, do_sample=False).tolist() == plain.tolist()
    # Measured once: the second run reads the table, and needs no models.
    status, _, err, _ = train(tmp_path / "sweep", "--block-sizes", "1,2,4", priced=False)
    assert status == 0, err
    assert read(output / "costs.json") == costs


def test_costs_of_another_pair_are_not_measured(train, folders, swept):  # noqa: F811
    arguments = ["--block-sizes", "1,4,6", "--drafter", folders / "drafter"]
    status, _, err, output = train(swept, *arguments, priced=False, target=True)
    assert status == 2
    assert "The sweep is of another target (tiny-target, weights tttt" in err
    assert not (output / "costs.json").exists()


def test_what_cannot_work_is_said_before_anything_is_trained(train, swept, tmp_path):
    elsewhere = save_sweep(tmp_path / "b", make_sweep(make_rows(9, 3), drafter_fingerprint="e" * 16))
    inside = save_sweep(tmp_path / "c", make_sweep(make_rows(60, 0)[:3]))
    (tmp_path / "none").mkdir()
    for sweep, arguments, message in (
        (swept, ["--rule", "best"], "`rule` must be one of tau, seconds"),
        (swept, ["--rule", "tau", "--block-sizes", "1,4"], "`--block-sizes` goes with rule 'seconds'"),
        (swept, ["--window", "3,4"], "`--window` goes with rule 'tau'"),
        (swept, ["--block-sizes", "1,4,9"], "The sweep has no block sizes [9], only [1, 2, 3, 4, 5, 6]"),
        (swept, ["--block-sizes", "4"], "at least two sizes"),
        (swept, ["--block-sizes", "0,4"], "integers >= 1"),
        (swept, ["--block-sizes", "1,4", "--features", "logits"], "--keep-logits"),
        (swept, ["--block-sizes", "1,4", "--objective", "speed", "--class-weights"], "`class_weights` weigh"),
        (swept, ["--block-sizes", "1,4", "--test", elsewhere], "is a sweep of another pair: `drafter_fingerprint`"),
        (swept, ["--block-sizes", "1,4", "--test", inside], "3 prompts of"),
        (tmp_path / "none", ["--block-sizes", "1,4"], "none"),
    ):
        status, _, err, output = train(sweep, *arguments)
        assert (status, message in err) == (2, True), (arguments, err)
        assert not (output / "policy").exists()


def test_a_sweep_that_lacks_the_default_window_is_explained(train, tmp_path):
    rows = make_rows(20, 0)
    narrow = tuple(size for size in SIZES if size < 6)
    rows = [replace(row, num_accepted={size: row.num_accepted[size] for size in narrow}) for row in rows]
    sweep = replace(make_sweep(rows, block_sizes=list(narrow)), block_sizes=narrow)
    folder = save_sweep(tmp_path / "narrow", sweep)
    status, _, err, _ = train(folder, "--rule", "tau", priced=False, columns=400)
    assert status == 2
    for words in (
        "The default `--window` of rule 'tau' is 2 to 6, two around the training size 4, and the sweep lacks 6",
        "`--window 2,3,4,5`", "sweep with `--block-sizes 1-6`",
    ):  # fmt: skip
        assert words in err
    status, _, err, _ = train(folder, "--rule", "tau", "--window", "2,3,4,5", priced=False)
    assert status == 0, err


def test_a_cost_table_without_a_candidate_is_refused(train, swept, tmp_path):
    few = tmp_path / "few.json"
    few.write_text(json.dumps({"verify_s": {"1": 1.0, "4": 1.2}, "draft_s": {"4": 0.2}, "context_length": 8}))
    status, _, err, output = train(swept, "--block-sizes", "1,4,6", "--costs", few, priced=False)
    assert status == 2
    assert "has no seconds for block sizes [6]" in err
    status, _, err, output = train(swept, "--block-sizes", "1,4", "--costs", few, priced=False)
    assert status == 0, err
    assert read(output / "costs.json")["draft_s"] == {"4": [0.2]}

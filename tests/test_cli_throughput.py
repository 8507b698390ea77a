"""`blockpilot evaluate --objective throughput`: simulated under cost tables, really timed, and what is refused."""

import json
from dataclasses import replace

import pytest
from cli_models import folders, run  # noqa: F401  (fixtures)
from conftest import constant_policy, plain_generate
from sweeps import COSTS, SIZES, TRAINING_SIZE, make_rows, make_sweep, save_sweep
from throughput_rows import constant_curve, positioned_row, save_positioned
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockpilot_hf import cli_evaluate, cli_throughput
from blockpilot_hf.cli_throughput import load_tables, table_for
from blockpilot_hf.costs import CostTable, costs_key
from blockpilot_hf.drafter_record import write_training_prompts
from blockpilot_hf.evaluation_display import figure
from blockpilot_hf.loading import load_drafter
from blockpilot_hf.prompts import encode_prompt
from blockpilot_hf.sweep import write_sweep
from blockpilot_hf.texts import Text
from blockpilot_hf.throughput_card import throughput_section

FLAT = CostTable((8,), {1: (1.0,), 8: (1.0,)}, {2: (0.01,), 8: (0.01,)}, {"dtype": "float32"}, "measured here")
PASSES = CostTable((0,), {1: (1.0,), 8: (3.0,)}, {2: (0.2,), 8: (0.2,)}, {"device_class": "slow"}, "default for slow")
QUICK = ["--bootstrap", "50"]
CATEGORIES = ("gsm8k", "humaneval")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """Sweeps made up, policies and tables."""
    root = tmp_path_factory.mktemp("made-up")
    rows = [positioned_row(f"r{i}", i % 3, category=CATEGORIES[i % 2]) for i in range(24)]
    save_positioned(root / "test", make_sweep(rows))
    save_sweep(root / "train", make_sweep(make_rows(12)))
    for name, policy in (("sure", constant_curve(0.9)), ("four", constant_policy(4))):
        policy.config.target_fingerprint, policy.config.drafter_fingerprint = "t" * 16, "d" * 16
        policy.save_pretrained(root / name)
        write_training_prompts(root / name, [])
    for name, table in (("one", COSTS), ("flat", FLAT), ("passes", PASSES)):
        table.save(root / f"{name}.json")
    return root


@pytest.fixture
def evaluate(run, made_up, tmp_path):  # noqa: F811
    def evaluate(*arguments, sweep=None, train=None, costs=("one",), columns=80):
        named = [part for name in costs for part in ("--costs", made_up / f"{name}.json")]
        output = tmp_path / "out"
        status, out, err = run(
            "evaluate", sweep or made_up / "test", "--train", train or made_up / "train", "--objective", "throughput",
            "--output", output, *QUICK, *named, *arguments, target=False, columns=columns,
        )  # fmt: skip
        path = output / "throughput.json"
        return status, out, err, json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    return evaluate


def test_all_rules_stand_side_by_side_under_every_table(evaluate, made_up):
    policies = ["--policy", made_up / "sure", "--policy", made_up / "four"]
    status, out, err, record = evaluate(*policies, costs=("one", "passes"), columns=100)
    assert status == 0, err
    for words in (
        "simulated, greedy: 24 prompts, cost table one (given)", "cost table passes (default for slow)",
        "training size 4", "best constant",
        "policy sure", "policy four", "flight, sure", "best size per text", "best per step", "tok/s", "tok/pass",
        "12 *", "policy four 4 for 24", "too few for a claim",
        "a pass is one of plain decoding",
    ):  # fmt: skip
        assert words in out, words
    assert [result["table"] for result in record["results"]] == ["one", "passes"]
    assert [result["is_in_seconds"] for result in record["results"]] == [True, False]
    rules = record["results"][0]["groups"]["all"]["rules"]
    assert list(rules) == [
        "plain", "training_size", "best_constant", "policy sure", "policy four", "flight", "flight sure",
        "best_per_text", "best_per_step",
    ]  # fmt: skip
    told = rules["flight sure"]["speedup"]
    assert f"{told['estimate']:.2f} [{told['low']:.2f} {told['high']:.2f}]" in out
    # What is said of all prompts follows from what is said of each.
    each = [entry["seconds"]["one"] for entry in record["per_prompt"]]
    assert told["estimate"] == pytest.approx(sum(one["plain"] / one["flight sure"] for one in each) / 24)
    assert rules["training_size"]["share_slow"]["estimate"] == pytest.approx(8 / 24)
    assert record["per_prompt"][0]["chosen"]["one"]["four"] == 4
    assert record["settings"]["max_new_tokens"] == 25
    assert record["settings"]["flight_block_sizes"] == [2, 4]
    assert record["overlap"]["lists"]["policy four"]["is_checked"] is True
    assert record["timed"] is None
    assert record["costs"]["passes"] == PASSES.to_dict()
    assert any("fixed size 16 is left out" in note for note in record["notes"])
    assert not any("restricted" in note for note in record["notes"])


def test_fixed_sizes_can_be_named(evaluate):
    status, out, err, record = evaluate("--fixed", "6", "--fixed", "4")
    assert status == 0, err
    # The training size is told anyway.
    assert [rule for rule in record["results"][0]["groups"]["all"]["rules"] if "fixed" in rule] == ["fixed 6"]
    assert "fixed 6" in out
    status, _, err, _ = evaluate("--fixed", "7", columns=200)
    assert (status, "`--fixed` needs block sizes [7], and the sweep has [1, 2, 3, 4, 5, 6]" in err) == (2, True), err


@pytest.mark.parametrize("columns", [80, 40])
def test_nothing_is_wider_than_the_terminal(evaluate, made_up, columns):
    policies = ["--policy", made_up / "sure", "--policy", made_up / "four"]
    status, out, err, _ = evaluate(*policies, costs=("one", "passes"), columns=columns)
    assert status == 0, err
    assert max(len(line) for line in out.splitlines() if "/" not in line or "tok" in line) <= columns
    assert "\x1b" not in out


def test_what_does_not_go_together_is_refused_before_anything_is_read(evaluate, made_up, run, tmp_path):  # noqa: F811
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    tau = ["evaluate", made_up / "test", "--train", made_up / "train", *QUICK]
    one, flat = ["--costs", made_up / "one.json"], ["--costs", made_up / "flat.json"]
    for arguments, message in (
        ([*tau, "--objective", "speed"], "`--objective` must be one of tau, throughput, got 'speed'"),
        ([*tau, "--fixed", "4"], "`--fixed` goes with `--objective throughput`"),
        ([*tau, "--timed", prompts], "`--timed` goes with `--objective throughput`"),
        ([*tau, *one, *flat], "takes one cost table, got 2"),
        ([*tau, "--objective", "throughput"], "needs a cost table"),
        ([*tau, "--objective", "throughput", *one, *one], "A `--costs` is given twice"),
        ([*tau, "--objective", "throughput", *one, "--timed", prompts], "Name it with `--timed-output`"),
        ([*tau, "--objective", "throughput", *one, "--timed-output", tmp_path / "t"], "goes with `--timed PROMPTS`"),
    ):
        status, _, err = run(*arguments, target=False, columns=300)
        assert (status, message in err) == (2, True), err


def test_a_sweep_without_positions_is_refused(evaluate, made_up, tmp_path):
    save_sweep(tmp_path / "bare", make_sweep(make_rows(6, 5)))
    status, _, err, record = evaluate(sweep=tmp_path / "bare", columns=300)
    assert (status, record) == (2, None)
    assert "the sweep kept none. Sweep again with `--all-positions`" in err


def test_sizes_without_a_price_are_left_out_or_named(evaluate, made_up):
    table = CostTable((8,), {1: (1.0,), 4: (1.2,)}, {2: (0.2,), 4: (0.2,)})
    table.save(made_up / "few.json")
    status, out, err, record = evaluate(costs=("few",), columns=300)
    assert status == 0, err
    assert "block sizes 5, 6 are left out: not every cost table has their seconds." in out
    assert record["settings"]["block_sizes"] == [1, 2, 3, 4]
    status, _, err, _ = evaluate("--policy", made_up / "sure", costs=("few",), columns=300)
    assert (status, "Policy sure needs block sizes [6], which the cost table few has no seconds for" in err) == (
        2,
        True,
    )


def test_flights_that_are_restricted_are_told(evaluate, tmp_path):
    def save(save_as, rows, name):
        sweep = make_sweep(rows, training_block_size=6, block_sizes=[1, 3, 6])
        return save_as(tmp_path / name, replace(sweep, block_sizes=(1, 3, 6)))

    sweep = save(save_positioned, [positioned_row(f"r{i}", i % 3) for i in range(6)], "test")
    train = save(save_sweep, make_rows(6), "train")
    status, out, err, record = evaluate(sweep=sweep, train=train, columns=300)
    assert status == 0, err
    assert record["settings"]["flight_block_sizes"] == [3, 6]
    assert (
        "flights without a policy are restricted to block sizes 3, 6: no positions were swept at 2, or they have no"
        in out
    )


def test_prompts_that_were_trained_on_are_refused_or_dropped(evaluate, made_up, tmp_path):
    seen = replace(positioned_row("r0", 0), accepted_at=None, confidence_at=None)
    save_sweep(tmp_path / "train", make_sweep([*make_rows(4), seen]))
    status, _, err, _ = evaluate(train=tmp_path / "train", columns=300)
    assert (status, "1 in the training sweep" in err) == (2, True), err
    status, out, err, record = evaluate("--drop-overlap", train=tmp_path / "train", columns=300)
    assert status == 0, err
    assert record["results"][0]["num_prompts"] == 23
    assert "1 prompts that were trained on are left out" in out


def test_tables_have_the_shortest_names_that_tell_them_apart(tmp_path):
    for name in ("a/costs.json", "b/costs.json", "b/other.json", "a/other.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        COSTS.save(path)
    for given, names in (
        (["a/costs.json"], ["a"]),
        (["a/costs.json", "b/costs.json"], ["a", "b"]),
        (["a/other.json", "b/other.json"], ["a/other", "b/other"]),
        (["a/costs.json", "b/other.json"], ["a", "other"]),
    ):
        assert list(load_tables([tmp_path / one for one in given])) == names


@pytest.fixture(scope="module")
def world(folders, tmp_path_factory):  # noqa: F811
    """Sweeps of the tiny pair, prompts of the held-out one, a flat table and a curve."""
    root = tmp_path_factory.mktemp("world")
    target = AutoModelForCausalLM.from_pretrained(folders / "target").eval()
    tokenizer = AutoTokenizer.from_pretrained(folders / "target")
    drafter = load_drafter(folders / "drafter")

    def texts(prefix, count):
        found = []
        for i in range(count):
            ids = encode_prompt(tokenizer, f"{prefix} {i}")
            answer = plain_generate(target, ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
            found.append(Text(f"{prefix}{i}", CATEGORIES[i % 2], tuple(ids[0].tolist()), tuple(answer.tolist())))
        return found

    names = {"target_name": "target", "drafter_name": "drafter"}
    held_out, train = texts("held", 3), texts("train", 2)
    sizes = (1, 2, 4, 8)
    write_sweep(target, drafter, held_out, sizes, root / "test", position_sizes=sizes, max_new_tokens=16, **names)
    write_sweep(target, drafter, train, sizes, root / "train", max_new_tokens=16, **names)
    FLAT.save(root / "flat.json")
    constant_curve(0.5, (1, 2, 8)).save_pretrained(root / "curve")
    entries = [{"id": text.id, "prompt": f"held {i}", "category": text.category} for i, text in enumerate(held_out)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (root / "seen.jsonl").write_text(json.dumps({"id": "seen", "prompt": "train 0"}) + "\n" + json.dumps(entries[0]))
    return root


@pytest.fixture
def timed(run, world, folders, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))

    def timed(*arguments, prompts="prompts.jsonl", costs="flat.json", columns=80):
        status, out, err = run(
            "evaluate", world / "test", "--train", world / "train", "--objective", "throughput", "--costs",
            world / costs, "--policy", world / "curve", "--drafter", folders / "drafter", "--timed", world / prompts,
            "--max-new-tokens", 12, "--output", tmp_path / "out", *QUICK, *arguments, columns=columns,
        )  # fmt: skip
        path = tmp_path / "out" / "throughput.json"
        return status, out, err, json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    return timed


def test_a_timed_run_is_kept_told_and_not_run_twice(timed, tmp_path, monkeypatch):
    status, out, err, record = timed()
    assert status == 0, err
    path = tmp_path / "out" / "timed-float32.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["held0", "held1", "held2"]
    names = ["plain", "size 8", *dict.fromkeys(["size 8", f"size {record['timed']['best_constant']}"])]
    assert list(lines[0]["calls"]) == [
        *dict.fromkeys(names), "policy curve", "flight", "flight curve", "flight_lookup", "flight_lookup curve"
    ]  # fmt: skip
    assert all(call["is_identical"] for line in lines for call in line["calls"].values())
    assert lines[1]["order"][0] == lines[0]["order"][1]
    told = record["timed"]
    assert (told["source"], told["dtype"], told["num_prompts"]) == ("measured here", "float32", 3)
    assert list(told["groups"]) == ["maths", "code", "all"]
    assert list(told["groups"]["all"]["rules"]) == [
        "plain", "training_size", "best_constant", "policy curve", "flight", "flight curve", "flight_lookup",
        "flight_lookup curve",
    ]  # fmt: skip
    assert told["groups"]["all"]["rules"]["flight"]["num_identical"] == 3
    assert max(len(line) for line in out.splitlines() if "/" not in line or "3/3" in line) <= 80
    for words in ("timed, float32, greedy: 3 prompts, costs: measured here", "3/3", "timed/table", "same text"):
        assert words in " ".join(out.split()), words
    monkeypatch.setattr(cli_throughput, "load_target", None)  # a finished file needs no models
    again = timed()
    assert again[0] == 0, again[2]
    assert again[3]["timed"] == told
    assert len(path.read_text().splitlines()) == 3


def test_a_record_becomes_a_section_of_a_card(timed):
    status, _, err, record = timed()
    assert status == 0, err
    simulated = {**record, "timed": None}
    section = throughput_section([record, simulated])
    [result] = record["results"]
    told = result["groups"]["all"]["rules"]["flight curve"]["speedup"]
    assert f"| flight, policy | {figure(told)} |" in section
    assert f"Timed, float32, greedy: {record['timed']['num_prompts']} prompts" in section
    assert section.count(record["run_info"]["command"]) == 2
    assert "Timed, float32" not in throughput_section([simulated])
    assert "| flight, policy |" not in throughput_section([record, {**simulated, "results": []}]).split("Timed, ")[0]
    assert throughput_section([]) == ""
    with pytest.raises(ValueError, match="of different sweeps"):
        throughput_section([record, {**record, "meta_info": {"sweep": {}}}])


def test_a_timed_run_goes_on_where_it_stopped_and_refuses_other_settings(timed, tmp_path):
    status, _, err, record = timed("--limit", 1)
    assert (status, record["timed"]["num_prompts"]) == (0, 1), err
    path = tmp_path / "out" / "timed-float32.jsonl"
    first = path.read_text()
    path.write_text(first + '{"cut off')
    status, _, err, record = timed()
    assert (status, record["timed"]["num_prompts"]) == (0, 3), err
    assert path.read_text().startswith(first)
    status, _, err, _ = timed("--seed", 5, columns=300)
    assert (status, "holds results of other settings" in err, "`--timed-output`" in err) == (2, True, True), err


def test_timed_prompts_that_were_trained_on_are_refused_or_dropped(timed):
    status, _, err, record = timed(prompts="seen.jsonl", columns=300)
    assert status == 2
    assert "1 prompts of `--timed` were trained on, the first is 'seen' in the training sweep" in err
    assert record["timed"] is None  # what was simulated before is kept
    status, out, err, record = timed("--drop-overlap", prompts="seen.jsonl", columns=300)
    assert (status, record["timed"]["num_prompts"]) == (0, 1), err
    assert "1 prompts of `--timed` that were trained on are left out" in out


def test_models_of_another_sweep_are_refused(evaluate, folders, world, tmp_path, run, made_up):  # noqa: F811
    status, _, err = run(
        "evaluate", made_up / "test", "--train", made_up / "train", "--objective", "throughput", "--costs",
        made_up / "one.json", "--drafter", folders / "drafter", "--timed", world / "prompts.jsonl", *QUICK,
        "--timed-output", tmp_path / "t.jsonl", columns=300,
    )  # fmt: skip
    assert (status, "The sweep is of another target (tiny-target, weights tttt" in err) == (2, True), err
    assert not (tmp_path / "t.jsonl").exists()


def test_the_table_of_a_timed_run_is_one_that_was_measured_for_it(folders, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    target = AutoModelForCausalLM.from_pretrained(folders / "target")
    drafter = load_drafter(folders / "drafter")
    key = costs_key(target, drafter)

    def with_key(**entries):
        return CostTable((8,), {1: (1.0,)}, {2: (0.1,)}, entries, "given")

    fits, other = with_key(**key), with_key(**{**key, "dtype": "bfloat16"})
    assert table_for({"other": other, "fits": fits}, target, drafter) is fits
    partly = with_key(dtype="float32", num_threads=key["num_threads"])
    assert table_for({"other": other, "partly": partly}, target, drafter) is partly
    for unfit in (other, with_key(), with_key(dtype="float32", num_threads=99)):
        assert table_for({"unfit": unfit}, target, drafter).source.startswith(("default", "cautious"))


def test_the_objective_is_acceptance_length_unless_asked(run, made_up, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cli_evaluate, "throughput", None)
    status, out, err = run(
        "evaluate", made_up / "test", "--train", made_up / "train", "--costs", made_up / "one.json", *QUICK,
        "--shuffles", "10", target=False,
    )  # fmt: skip
    assert status == 0, err
    assert f"training size {TRAINING_SIZE}" in out and len(SIZES) == 6

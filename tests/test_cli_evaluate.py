"""`blockpilot evaluate`: tables, record and plots, and never on prompts that a training saw."""

import json

import pytest
from cli_models import folders, run  # noqa: F401  (fixtures)
from sweeps import COSTS, SIZES, make_rows, make_sweep, save_sweep

from blockpilot_hf import cli_evaluate
from blockpilot_hf.costs import CostTable
from blockpilot_hf.drafter_record import write_training_prompts
from blockpilot_hf.policy_training import PolicyTrainingConfig, train_policy
from blockpilot_hf.target_states import weights_fingerprint

TRAIN, TEST = make_rows(60, 0), make_rows(66, 1, temperatures=(0.0, 1.0))
QUICK = ["--bootstrap", "50", "--shuffles", "20"]


def save_policy(folder, sizes, *, known=TRAIN, target="t" * 16, rule="seconds"):
    config = PolicyTrainingConfig(epochs=10, rule=rule)
    policy, _ = train_policy(TRAIN, make_rows(20, 9), sizes, config, COSTS)
    policy.config.target_fingerprint, policy.config.drafter_fingerprint = target, "d" * 16
    policy.save_pretrained(folder)
    if known is not None:
        write_training_prompts(folder, [row.prompt_hash for row in known])
    return policy


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """`train` and `test` sweeps, policies `fast` and `tau`, a `drafter` with its list, and `costs.json`."""
    root = tmp_path_factory.mktemp("world")
    save_sweep(root / "train", make_sweep(TRAIN))
    save_sweep(root / "test", make_sweep(TEST))
    save_policy(root / "fast", [1, 4, 6])
    save_policy(root / "tau", [2, 3, 4, 5, 6], rule="tau")
    (root / "drafter").mkdir()
    write_training_prompts(root / "drafter", ["0" * 64])
    COSTS.save(root / "costs.json")
    return root


@pytest.fixture
def evaluate(run, world, tmp_path, monkeypatch):  # noqa: F811
    """`evaluate(*arguments)` to `(status, stdout, stderr, record)`."""

    def evaluate(*arguments, sweep="test", drafter=True, costs=True, columns=100, plots=False):
        output = tmp_path / "out"
        if not plots:  # they take longer than all the rest, and have tests of their own
            monkeypatch.setattr(cli_evaluate, "draw_tau", lambda *arguments: None)
            monkeypatch.setattr(cli_evaluate, "draw_choices", lambda *arguments: None)
        named = ["--drafter", world / "drafter"] if drafter else []
        named += ["--costs", world / "costs.json"] if costs else []
        status, out, err = run("evaluate", world / sweep, "--train", world / "train", "--output", output, *QUICK,
                               *named, *arguments, target=False, columns=columns)  # fmt: skip
        path = output / "evaluation.json"
        return status, out, err, json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    return evaluate


def test_policies_are_judged_next_to_the_controls_and_put_on_record(evaluate, world, tmp_path):
    status, out, err, record = evaluate("--policy", world / "fast", "--policy", world / "tau", plots=True)
    assert status == 0, err
    for words in (
        "greedy: 66 prompts", "temperature 1: 66 prompts", "training size 4", "best constant", "random of 5",
        "best per text (tau)", "residuals shuffled", "texts by chosen size, policy fast", "95 % bootstrap interval",
    ):  # fmt: skip
        assert words in out, words
    greedy, sampled = record["results"]
    assert [one["policies"] for one in greedy["comparisons"]] == [["tau"], ["fast"]]
    rules = greedy["comparisons"][1]["groups"]["all"]["rules"]
    told = rules["policy fast"]["speedup"]
    assert f"{told['estimate']:.2f} [{told['low']:.2f} {told['high']:.2f}]" in out
    assert sampled["best_constant_chosen_on"] == {"temperatures": [0.0], "num_prompts": 60}
    assert record["settings"]["num_resamples"] == 50
    assert record["meta_info"]["sweep"]["target_fingerprint"] == "t" * 16
    assert record["overlap"]["lists"]["policy fast"] == {
        "is_checked": True, "num_prompts_known": 60, "num_prompts_shared": 0,
    }  # fmt: skip
    assert record["notes"] == []
    assert record["costs"]["verify_s"]["1"] == [1.0]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "evaluation.json", "tau_by_block_size.png", "chosen_sizes.png",
    }  # fmt: skip
    # What is said of all prompts follows from what is said of each.
    entries = [entry for entry in record["per_prompt"] if entry["temperature"] == 0]
    mean = sum(entry["acceptance_length"][str(entry["chosen"]["fast"])] for entry in entries) / len(entries)
    assert rules["policy fast"]["tau"]["estimate"] == pytest.approx(mean)
    assert len(record["per_prompt"]) == 132
    tokens = sum(entry["num_new_tokens"] - 1 for entry in entries)
    steps = sum(entry["num_steps"]["4"] for entry in entries)
    assert rules["training_size"]["tokens_per_step"]["estimate"] == pytest.approx(tokens / steps)


def test_policies_on_record_are_the_weights_that_were_judged(evaluate, world):
    policy = save_policy(world / "again", [1, 6])
    _, _, _, record = evaluate("--policy", world / "again")
    assert record["meta_info"]["policies"]["again"]["fingerprint"] == weights_fingerprint(policy)
    assert record["meta_info"]["policies"]["again"]["block_sizes"] == [1, 6]


def test_without_policies_and_prices_the_sweep_alone_is_told(evaluate, tmp_path):
    status, out, err, record = evaluate(costs=False, plots=True)
    assert status == 0, err
    assert "times plain" not in out
    assert record["costs"] is None
    assert [one["block_sizes"] for one in record["results"][0]["comparisons"]] == [[2, 3, 4, 5, 6], list(SIZES)]
    assert not (tmp_path / "out" / "chosen_sizes.png").exists()


@pytest.mark.parametrize("which", ["policy", "drafter", "train"])
def test_prompts_that_were_trained_on_are_refused_or_dropped(evaluate, world, which):
    seen, sweep, arguments = TEST[6:10:2], "test", ["--policy", world / "fast"]
    if which == "policy":
        save_policy(world / "knows", [1, 4], known=[*TRAIN, *seen])
        arguments = ["--policy", world / "knows"]
    elif which == "drafter":
        (world / "other").mkdir()
        write_training_prompts(world / "other", [row.prompt_hash for row in seen])
        arguments += ["--drafter", world / "other"]
    else:
        sweep, seen = "mixed", TRAIN[3:5]
        save_sweep(world / "mixed", make_sweep([*TEST, *seen]))
        save_policy(world / "listless", [1, 4], known=None)
        arguments = ["--policy", world / "listless"]
    drafter = which != "drafter"
    status, _, err, record = evaluate(*arguments, sweep=sweep, drafter=drafter)
    assert status == 2
    assert f"2 in the {'training sweep' if which == 'train' else which}" in err
    assert f"the first is '{seen[0].id}'" in err
    assert "--drop-overlap" in err
    assert record is None
    status, out, err, record = evaluate(*arguments, "--drop-overlap", sweep=sweep, drafter=drafter)
    assert status == 0, err
    assert "2 prompts that were trained on are left out" in out
    assert record["overlap"]["num_prompts_dropped"] == 2
    # A prompt goes with all of its texts.
    assert not {row.prompt_id for row in seen} & {entry["prompt_id"] for entry in record["per_prompt"]}
    assert record["results"][0]["num_prompts"] == (66 if which == "train" else 64)


def test_nothing_left_after_dropping_is_said(evaluate, world):
    save_policy(world / "all", [1, 4], known=TEST)
    status, _, err, _ = evaluate("--policy", world / "all", "--drop-overlap")
    assert status == 2
    assert "nothing is left to judge" in err


def test_a_missing_list_is_said_and_put_on_record(evaluate, world):
    save_policy(world / "silent", [1, 4], known=None)
    status, out, err, record = evaluate("--policy", world / "silent", drafter=False, columns=300)
    assert status == 0, err
    assert "policy silent has no list of its training prompts" in out
    assert "drafter is not named with `--drafter`" in out
    assert record["overlap"]["lists"]["policy silent"] == {"is_checked": False}
    assert len(record["notes"]) == 2


def test_a_list_that_is_not_complete_is_used_and_said(evaluate, world):
    save_policy(world / "partly", [1, 4])
    path = world / "partly" / "training_prompts.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_complete": False}))
    status, out, err, record = evaluate("--policy", world / "partly", columns=300)
    assert status == 0, err
    assert "policy partly was trained on prompts that its list lacks" in out
    entry = record["overlap"]["lists"]["policy partly"]
    assert entry["is_checked"] is False and entry["num_prompts_shared"] == 0 < entry["num_prompts_known"]


def test_costs_of_another_target_are_said(evaluate, world):
    table = CostTable((8,), {1: (1.0,), 10: (1.0,)}, {2: (0.1,), 10: (0.1,)}, {"target": "other"})
    table.save(world / "other.json")
    status, out, err, _ = evaluate(
        "--policy", world / "fast", "--costs", world / "other.json", costs=False, columns=300
    )
    assert status == 0, err
    assert "was measured with the target other, the sweep was made with" in out


def test_a_policy_of_another_pair_is_warned_of(evaluate, world):
    save_policy(world / "stranger", [1, 4], target="u" * 16)
    status, out, _, record = evaluate("--policy", world / "stranger", columns=300)
    assert status == 0
    assert "policy stranger was made for another target: weights uuuu" in out
    assert "another target" in record["notes"][0]


def test_sizes_without_a_price_have_no_speeds(evaluate, world):
    CostTable((8,), {1: (1.0,), 4: (1.2,)}, {4: (0.2,)}).save(world / "few.json")
    save_policy(world / "small", [1, 4])
    arguments = ["--policy", world / "small", "--costs", world / "few.json"]
    status, out, err, record = evaluate(*arguments, costs=False, columns=300)
    assert status == 0, err
    assert "no speeds are printed for the comparison of block sizes 2, 3, 4, 5, 6: " in out
    assert "has no seconds for 5, 6." in out
    assert out.count("no speeds are printed") == 1
    assert "run `blockpilot train-policy` with a new `--output` and without `--costs`" in out
    around, own = record["results"][0]["comparisons"]
    assert "speedup" not in around["best_constant"]
    assert "speedup" in own["best_constant"]


def test_a_folder_around_the_policy_is_refused_and_the_policy_pointed_to(evaluate, world, monkeypatch):
    save_policy(world / "run" / "policy", [1, 4])
    monkeypatch.chdir(world)
    status, _, err, _ = evaluate("--policy", "run", columns=300)
    assert status == 2
    assert "`--policy run` is" in err
    assert "the policy is run/policy" in err
    status, out, err, record = evaluate("--policy", "run/policy", columns=300)
    assert status == 0, err
    assert list(record["meta_info"]["policies"]) == ["run"]
    assert "policy policy" not in out


def test_policies_have_the_shortest_names_that_tell_them_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a/policy", "b/policy", "b/c", "a/c"):
        (tmp_path / folder).mkdir(parents=True)
    for given, names in (
        (["a/policy"], ["a"]),
        (["a/policy", "b/policy"], ["a", "b"]),
        (["a/c", "b/c"], ["a/c", "b/c"]),
        (["a/c/", "someone/pilot"], ["c", "pilot"]),
        (["one/pilot", "two/pilot"], ["one/pilot", "two/pilot"]),
        (["a/policy", "a"], ["a/policy", "a"]),
        (["a/c", "c"], ["a/c", "c"]),  # the second is no folder here: a name on the Hub
    ):
        assert list(cli_evaluate._names(given)) == names
    monkeypatch.chdir(tmp_path / "a")
    assert list(cli_evaluate._names(["policy"])) == ["a"]


def test_groups_can_be_named_in_a_file(evaluate, world, tmp_path):
    groups = tmp_path / "groups.json"
    groups.write_text('{"everything": ["gsm8k", "humaneval"]}')
    status, _, err, record = evaluate("--policy", world / "fast", "--groups", groups)
    assert status == 0, err
    assert list(record["results"][0]["comparisons"][0]["groups"]) == ["everything", "other", "all"]
    for text, message in (
        ("{", "is not JSON"), ('{"a": "gsm8k"}', "must map names"), ('{"all": []}', "none of them 'all'"),
        ('{"a": ["x"], "b": ["x"]}', "has x in several groups"),
    ):  # fmt: skip
        groups.write_text(text)
        status, _, err, _ = evaluate("--policy", world / "fast", "--groups", groups)
        assert (status, message in err) == (2, True), err


def test_other_pairs_and_sizes_are_refused(evaluate, world, run, tmp_path):  # noqa: F811
    save_sweep(world / "elsewhere", make_sweep(TRAIN, target_fingerprint="u" * 16))
    arguments = ["--output", tmp_path / "out", *QUICK]
    status, _, err = run(
        "evaluate", world / "test", "--train", world / "elsewhere", *arguments, target=False, columns=200
    )
    assert status == 2
    assert "is a sweep of another pair: `target_fingerprint`" in err
    save_policy(world / "wide", [1, 4])
    policy_config = world / "wide" / "config.json"
    policy_config.write_text(policy_config.read_text().replace("4\n", "16\n"))
    status, _, err, _ = evaluate("--policy", world / "wide", columns=200)
    assert status == 2
    assert "the sweep has no block sizes [16]" in err
    status, _, err, _ = evaluate("--policy", world / "gone", columns=300)
    assert (status, "gone, which does not exist" in err) == (2, True)
    status, _, err, _ = evaluate("--policy", world / "fast", "--policy", world / "fast")
    assert (status, "given twice" in err) == (2, True)


def test_sweeps_that_differ_otherwise_are_noted(evaluate, world, run, tmp_path):  # noqa: F811
    save_sweep(world / "longer", make_sweep(TRAIN, max_new_tokens=99))
    status, out, err = run(
        "evaluate", world / "test", "--train", world / "longer", "--costs", world / "costs.json", *QUICK,
        target=False, columns=300,
    )  # fmt: skip
    assert status == 0, err
    assert "has `max_new_tokens` 99, the sweep has 25" in out


@pytest.mark.parametrize("columns", [80, 40])
def test_nothing_is_wider_than_the_terminal(evaluate, world, columns):
    status, out, err, _ = evaluate("--policy", world / "fast", "--policy", world / "tau", columns=columns)
    assert status == 0, err
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= columns

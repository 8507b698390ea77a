"""The policy learns which block size is best, from features that tell; prompts are on one side of a split only."""

from dataclasses import replace

import pytest
import torch
from sweeps import COSTS, KINDS, SIZES, TRAINING_SIZE, hash_of, make_row, make_rows

from blockpilot_hf.costs import CostTable
from blockpilot_hf.features import NUM_COMPACT_FEATURES, policy_features
from blockpilot_hf.policy_training import (
    PolicyTrainingConfig,
    best_choice,
    best_epoch,
    curve_accuracy,
    label_weights,
    policy_choices,
    prompt_numbers,
    split_rows,
    train_policy,
    values,
    window,
    with_steps,
)

CANDIDATES = [1, 4, 6]
CONTEXT = {"head": "curve", "features": "compact+context"}
# Blocks that cost the same at every size, and blocks that cost their width.
FLAT = CostTable(context_lengths=(8,), verify_s={1: (1.0,), 6: (1.0,)}, draft_s={2: (0.4,), 6: (0.4,)})
STEEP = CostTable(context_lengths=(8,), verify_s={1: (1.0,), 6: (6.0,)}, draft_s={2: (0.1,), 6: (0.5,)})


@pytest.fixture(scope="module")
def sides():
    return make_rows(240, 0), make_rows(80, 1), make_rows(80, 2)


def worth_of(policy, rows, sizes, rule="seconds"):
    """Mean worth of the policy's choices, of the best constant and of the best per prompt."""
    worth = values(rows, sizes, rule, COSTS)
    picked = torch.tensor([sizes.index(size) for size in policy_choices(policy, rows)])
    return (
        worth.gather(1, picked[:, None]).mean().item(),
        worth.mean(0).max().item(),
        worth.max(1).values.mean().item(),
    )


@pytest.mark.parametrize(("objective", "rule"), [("speed", "seconds"), ("label", "seconds"), ("label", "tau")])
def test_a_policy_learns_what_the_features_tell(sides, objective, rule):
    train, validation, test = sides
    config = PolicyTrainingConfig(objective=objective, rule=rule, epochs=60)
    policy, log = train_policy(train, validation, CANDIDATES, config, COSTS)
    own, constant, best = worth_of(policy, test, CANDIDATES, rule)
    assert constant + 0.05 < own <= best + 1e-6
    assert best_epoch(log)["validation"] >= log[0]["validation"]


def test_without_anything_to_learn_from_the_policy_is_no_better_than_the_best_constant():
    train, validation, test = (make_rows(n, seed, tells=False) for n, seed in ((240, 3), (80, 4), (200, 5)))
    policy, _ = train_policy(train, validation, CANDIDATES, PolicyTrainingConfig(epochs=30), COSTS)
    own, constant, _ = worth_of(policy, test, CANDIDATES)
    assert own < constant + 0.1


def test_a_head_over_the_vocabulary_learns_too():
    train, validation, test = (make_rows(n, seed, with_logits=True) for n, seed in ((240, 0), (80, 1), (80, 2)))
    config = PolicyTrainingConfig(features="logits", epochs=60)
    policy, _ = train_policy(train, validation, CANDIDATES, config, COSTS)
    assert (policy.config.features, policy.config.vocab_size) == ("logits", 9)
    own, constant, _ = worth_of(policy, test, CANDIDATES)
    assert own > constant + 0.05
    # As in decoding, from the logits alone.
    assert policy.choose(torch.tensor(test[0].logits)).block_size == policy_choices(policy, test[:1])[0]
    with pytest.raises(ValueError, match="--keep-logits"):
        train_policy(make_rows(9, 0), make_rows(9, 1), CANDIDATES, config, COSTS)


@pytest.fixture(scope="module")
def curve():
    """Trained on what the context alone tells, and texts that it has not seen."""
    train, validation, test = (make_rows(n, seed, context_size=12) for n, seed in ((240, 0), (80, 1), (80, 2)))
    policy, log = train_policy(train, validation, CANDIDATES, PolicyTrainingConfig(**CONTEXT, epochs=60))
    return policy, log, train, test


def test_a_curve_learns_acceptance_lengths_from_context(curve):
    policy, log, train, test = curve
    assert (policy.config.head, policy.config.context_size, policy.training) == ("curve", 12, False)
    assert best_epoch(log)["validation"] > 0.5 > log[0]["validation"]
    accuracy = curve_accuracy(policy, test, train)
    assert [entry["block_size"] for entry in accuracy] == [4, 6]
    found, mean = values(test, CANDIDATES, "tau"), values(train, CANDIDATES, "tau").mean(0)
    for i, entry in enumerate(accuracy, 1):
        assert entry["mean"] == pytest.approx(found[:, i].mean().item())
        assert entry["mean_absolute_error"] < 0.5 * entry["mean_absolute_error_of_the_mean"]
        assert entry["mean_absolute_error_of_the_mean"] == pytest.approx((found[:, i] - mean[i]).abs().mean().item())
        assert 0.5 < entry["r2"] <= 1


def test_one_curve_is_right_under_every_table(curve):
    policy, _, _, test = curve
    flat, steep = policy_choices(policy, test, FLAT), policy_choices(policy, test, STEEP)
    assert set(flat) == {1, 4, 6} and set(steep) == {1}
    for costs in (FLAT, COSTS):
        worth = values(test, CANDIDATES, "seconds", costs)
        picked = torch.tensor([CANDIDATES.index(size) for size in policy_choices(policy, test, costs)])
        own = worth.gather(1, picked[:, None]).mean()
        assert worth.mean(0).max() + 0.05 < own <= worth.max(1).values.mean() + 1e-6


def test_choices_of_a_curve_are_those_that_decoding_would_take(curve):
    policy, _, _, test = curve
    growing = CostTable(
        context_lengths=(4, 9), verify_s={1: (1.0, 1.0), 6: (1.0, 6.0)}, draft_s={2: (0.4, 0.4), 6: (0.4, 0.4)}
    )
    logits, rows = torch.randn(12, 200) * 3, []
    for i, row in enumerate(test[:12]):
        features = policy_features(logits[i : i + 1], kind="compact")[0].tolist()
        rows.append(replace(row, features=tuple(features), num_prompt_tokens=4 + 5 * (i % 2)))
    for costs in (FLAT, COSTS, growing):
        decoded = [
            policy.choose(
                logits[i], context=torch.tensor(row.context), costs=costs, context_length=row.num_prompt_tokens
            ).block_size
            for i, row in enumerate(rows)
        ]
        assert policy_choices(policy, rows, costs) == decoded
    with pytest.raises(ValueError, match=r"predicts acceptance lengths and chooses by `costs` .*, got None"):
        policy_choices(policy, rows)


def test_a_curve_of_texts_that_nothing_tells_apart_is_their_mean():
    train, validation, test = (make_rows(n, s, tells=False, context_size=12) for n, s in ((240, 3), (80, 4), (80, 5)))
    config = PolicyTrainingConfig(**CONTEXT, epochs=40, patience=5)
    policy, _ = train_policy(train, validation, CANDIDATES, config)
    mean = values(train, CANDIDATES, "tau").log().mean(0).exp()
    for i, entry in enumerate(curve_accuracy(policy, test, train), 1):
        assert entry["mean_predicted"] == pytest.approx(mean[i].item(), rel=0.15)
        assert entry["r2"] < 0.1


def test_a_curve_tells_the_temperatures_of_one_prompt_apart():
    def drawn(number, seed):
        rows = make_rows(number, seed, temperatures=(0.0, 1.0), tells=False)
        known, unknown = (make_row("x", kind).num_accepted for kind in (KINDS[2], KINDS[0]))
        return [replace(row, num_accepted=unknown if row.temperature else known) for row in rows]

    config = PolicyTrainingConfig(head="curve", epochs=60, learning_rate=0.01)
    policy, _ = train_policy(drawn(100, 0), drawn(30, 1), CANDIDATES, config)
    test = drawn(20, 2)
    picked = zip(policy_choices(policy, test, FLAT), test, strict=True)
    assert sum(size == (1 if row.temperature else 6) for size, row in picked) >= 36  # of 40, and one size gets 20


def test_a_curve_needs_rows_with_context_and_no_rule():
    config = PolicyTrainingConfig(**CONTEXT, epochs=1)
    with pytest.raises(ValueError, match=r"needs the drafter's context, and the sweep has none \(text '0-0'\)"):
        train_policy(make_rows(9, 0), make_rows(9, 1), CANDIDATES, config)
    policy, _ = train_policy(make_rows(9, 0), make_rows(9, 1), CANDIDATES, replace(config, features="compact"))
    assert policy.config.num_features == NUM_COMPACT_FEATURES
    with pytest.raises(ValueError, match="must be 1, plain decoding, and larger ones"):
        train_policy(make_rows(9, 0), make_rows(9, 1), [4, 6], replace(config, features="compact"))


def test_the_same_seed_gives_the_same_curve():
    train, validation = make_rows(30, 0, context_size=3), make_rows(9, 1, context_size=3)
    config = PolicyTrainingConfig(**CONTEXT, epochs=3, input_dropout=0.3)
    one, two, other = (
        train_policy(train, validation, CANDIDATES, replace(config, seed=seed))[0].state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["fc_out.weight"], other["fc_out.weight"])


def test_choices_are_those_that_decoding_would_take(sides):
    train, validation, test = sides
    policy, _ = train_policy(train, validation, CANDIDATES, PolicyTrainingConfig(epochs=20), COSTS)
    logits = torch.randn(4, 200) * 3
    rows = [
        make_row(f"r{i}", {}, features=tuple(policy_features(logits[i : i + 1], kind="compact")[0].tolist()))
        for i in range(4)
    ]
    assert policy_choices(policy, rows) == [policy.choose(logits[i]).block_size for i in range(4)]
    assert len(set(policy_choices(policy, test))) == 3


def test_the_same_seed_gives_the_same_policy_and_the_global_random_state_stays(sides):
    train, validation, _ = sides
    config = PolicyTrainingConfig(epochs=3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, _ = train_policy(train, validation, CANDIDATES, config, COSTS)
    assert torch.equal(torch.rand(3), expected)
    two, _ = train_policy(train, validation, CANDIDATES, config, COSTS)
    other, _ = train_policy(train, validation, CANDIDATES, PolicyTrainingConfig(epochs=3, seed=1), COSTS)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc_out.weight, other.fc_out.weight)


def test_raw_features_go_in_and_settings_that_never_varied_have_no_say(sides):
    train, validation, _ = sides
    policy, _ = train_policy(train, validation, CANDIDATES, PolicyTrainingConfig(epochs=5), COSTS)
    features = torch.tensor([train[0].features])
    sampled = features.clone()
    sampled[:, -3:] = torch.tensor([1.0, 0.5, 0.9])
    assert torch.equal(policy(features).scores, policy(sampled).scores)
    assert policy(features).scores.abs().max() < 100  # far from the mean of -29 that was taken off


def test_training_stops_when_the_validation_has_not_got_better_for_a_while(sides):
    train, validation, _ = sides
    _, log = train_policy(train, validation, CANDIDATES, PolicyTrainingConfig(epochs=100, patience=3), COSTS)
    assert len(log) == best_epoch(log)["epoch"] + 3 < 100


def test_the_papers_label_is_the_largest_tau_and_the_smallest_size_on_ties():
    rows = [make_row(f"kind {i}", kind) for i, kind in enumerate(KINDS)]
    sizes = window(TRAINING_SIZE)
    assert sizes == [2, 3, 4, 5, 6]
    assert [sizes[i] for i in best_choice(values(rows, sizes, "tau")).tolist()] == [2, 4, 6]
    assert window(8) == [6, 7, 8, 9, 10]
    assert window(2) == [1, 2, 3, 4]
    assert best_choice(torch.tensor([[1.0, 2.0, 2.0], [3.0, 2.0, 3.0], [0.0, 1.0, 2.0]])).tolist() == [1, 0, 2]


def test_worth_by_seconds_is_the_tables_speedup():
    row = make_row("a", KINDS[2])
    worth = values([row], SIZES, "seconds", COSTS)[0].tolist()
    assert worth == pytest.approx([COSTS.speedup(size, row.acceptance_length(size)) for size in SIZES])
    assert worth[0] == 1.0


def test_class_weights_are_inverse_to_how_often_a_label_is_the_best():
    worth = torch.tensor([[2.0, 1.0, 1.0]] * 6 + [[1.0, 1.0, 2.0]] * 2)
    weights = label_weights(worth)
    assert weights.tolist() == pytest.approx([8 / 12, 0.0, 8 / 4])
    labels = best_choice(worth)
    assert weights[labels].sum().item() == pytest.approx(len(worth))


def test_class_weights_make_the_head_name_rare_labels():
    draw = make_rows(300, 7, tells=False)
    rare = [row for i, row in enumerate(draw) if row.num_accepted[6][0] == 5 or i % 12 == 0]
    train, validation = split_rows(rare, 0.2)
    counts = {}
    for is_on in (False, True):
        config = PolicyTrainingConfig(class_weights=is_on, epochs=8, seed=1, dropout=0.0)
        policy, _ = train_policy(train, validation, CANDIDATES, config, COSTS)
        with torch.no_grad():
            mass = policy(torch.tensor([row.features for row in train])).scores.softmax(-1).mean(0)
        counts[is_on] = (mass[0] + mass[1]).item()
    assert counts[True] > counts[False]


def test_all_texts_of_a_prompt_are_on_one_side_whatever_the_order():
    rows = make_rows(50, 0, temperatures=(0.0, 0.7, 1.0))
    # The second turn of a conversation, and a prompt that stands there under two names.
    rows.append(make_row("turn two", {}, prompt_id="0-3", prompt_hash=hash_of("turn two")))
    rows.append(make_row("twin", {}, prompt_id="twin", prompt_hash=hash_of("0-5")))
    train, validation = split_rows(rows, 0.2)
    assert len({row.prompt_id for row in validation} - {"twin"}) == 10
    for key in (lambda row: row.prompt_id, lambda row: row.prompt_hash):
        assert not {key(row) for row in train} & {key(row) for row in validation}
    assert {row.id for row in split_rows(rows[::-1], 0.2)[1]} == {row.id for row in validation}
    with pytest.raises(ValueError, match="others to validate on, got 1 in all"):
        split_rows(rows[:3], 0.2)
    assert [len(side) for side in split_rows(rows[:6], 0.2)] == [3, 3]


def test_prompt_numbers_join_hashes_and_conversations():
    def row(prompt_id, name):
        return make_row("x", {}, prompt_hash=name, prompt_id=prompt_id)

    rows = [row("a", "1"), row("b", "2"), row("a", "3"), row("c", "2"), row("d", "4")]
    assert prompt_numbers(rows) == [0, 1, 0, 1, 2]


def test_a_prompt_on_both_sides_is_refused(sides):
    train, validation, _ = sides
    with pytest.raises(ValueError, match="both sides"):
        train_policy(train, [*validation, train[0]], CANDIDATES, PolicyTrainingConfig(epochs=1), COSTS)
    with pytest.raises(ValueError, match="Both sides need texts"):
        train_policy(train, [], CANDIDATES, PolicyTrainingConfig(epochs=1), COSTS)


def test_answers_without_a_step_are_left_out():
    rows = [make_row("one token", {}, num_new_tokens=1), make_row("two", {}, num_new_tokens=2)]
    assert [row.id for row in with_steps(rows)] == ["two"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"head": "rank"},
        {"objective": "tau"},
        {"rule": "speed"},
        {"features": "all"},
        {"hidden_size": 0},
        {"epochs": 1.5},
        {"input_dropout": 1.0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PolicyTrainingConfig(**wrong)
    with pytest.raises(ValueError, match="class_weights"):
        PolicyTrainingConfig(class_weights=True, objective="speed")
    PolicyTrainingConfig(class_weights=True, objective="label")
    for labels in ({"class_weights": True}, {"objective": "speed"}):
        with pytest.raises(ValueError, match="`class_weights` and `objective` are for head 'choice'"):
            PolicyTrainingConfig(head="curve", **labels)
    PolicyTrainingConfig(head="curve")

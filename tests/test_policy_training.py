"""The policy learns which block size is fastest, from features that tell, and is compared with constants honestly."""

import random

import pytest
import torch

from blockpilot_hf.configuration_blockpilot import NUM_COMPACT_FEATURES
from blockpilot_hf.costs import CostTable
from blockpilot_hf.policy_training import (
    PolicyExample,
    PolicyTrainingConfig,
    best_choice,
    compare_rules,
    speeds,
    train_policy,
)

SIZES = [1, 4, 8]
COSTS = CostTable(verify_s={1: 1.0, 4: 1.2, 8: 1.6}, draft_s={4: 0.3, 8: 0.4}, context_length=8)
# Fastest at 1 (1.0 against 0.8 and 0.6), at 4 (1.4 against 1.2) and at 8 (2.5 against 2.0).
KINDS = [{1: 1.0, 4: 1.2, 8: 1.2}, {1: 1.0, 4: 2.1, 8: 2.4}, {1: 1.0, 4: 3.0, 8: 5.0}]


def examples(number: int, seed: int, tells: bool = True) -> list[PolicyExample]:
    draw = random.Random(seed)
    made = []
    for i in range(number):
        kind = draw.randrange(3)
        features = [draw.gauss(0, 1) for _ in range(NUM_COMPACT_FEATURES)]
        features[3] = -30 + 2.0 * kind if tells else features[3]
        features[-3:] = [0.0, 0.0, 1.0]  # greedy: the settings never vary
        made.append(PolicyExample(f"{seed}-{i}", f"kind {kind}", f"{seed}-{i}", tuple(features), KINDS[kind]))
    return made


@pytest.fixture(scope="module")
def sides():
    return examples(300, 0), examples(80, 1), examples(80, 2)


@pytest.mark.parametrize("objective", ["speed", "label"])
def test_a_policy_learns_what_the_features_tell(sides, objective):
    train, validation, test = sides
    policy, log = train_policy(train, validation, COSTS, SIZES, PolicyTrainingConfig(objective=objective, epochs=60))
    rules = compare_rules(policy, train, test, COSTS)["all"]
    best_constant = next(rules[rule]["speedup"] for rule in rules if rule.startswith("best constant"))
    assert rules["policy"]["speedup"] > best_constant + 0.05
    assert rules["policy"]["speedup"] <= rules["best per prompt"]["speedup"] + 1e-6
    assert max(entry["validation_speedup"] for entry in log) > log[0]["validation_speedup"]


def test_without_anything_to_learn_from_the_policy_is_no_better_than_the_best_constant():
    train, validation, test = (examples(n, seed, tells=False) for n, seed in ((300, 3), (80, 4), (200, 5)))
    policy, _ = train_policy(train, validation, COSTS, SIZES, PolicyTrainingConfig(epochs=30))
    rules = compare_rules(policy, train, test, COSTS)["all"]
    best_constant = next(rules[rule]["speedup"] for rule in rules if rule.startswith("best constant"))
    assert rules["policy"]["speedup"] < best_constant + 0.05


def test_the_same_seed_gives_the_same_policy_and_the_global_random_state_stays(sides):
    train, validation, _ = sides
    config = PolicyTrainingConfig(epochs=3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, _ = train_policy(train, validation, COSTS, SIZES, config)
    assert torch.equal(torch.rand(3), expected)
    two, _ = train_policy(train, validation, COSTS, SIZES, config)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_raw_features_go_in_and_settings_that_never_varied_have_no_say(sides):
    train, validation, _ = sides
    policy, _ = train_policy(train, validation, COSTS, SIZES, PolicyTrainingConfig(epochs=5))
    features = torch.tensor([train[0].features])
    sampled = features.clone()
    sampled[:, -3:] = torch.tensor([1.0, 0.5, 0.9])
    assert torch.equal(policy(features).scores, policy(sampled).scores)
    assert policy(features).scores.abs().max() < 100  # far from the mean of -29 that was taken off


def test_a_prompt_on_both_sides_is_refused(sides):
    train, validation, _ = sides
    with pytest.raises(ValueError, match="both sides"):
        train_policy(train, [*validation, train[0]], COSTS, SIZES, PolicyTrainingConfig(epochs=1))
    with pytest.raises(ValueError, match="Both sides need prompts"):
        train_policy(train, [], COSTS, SIZES, PolicyTrainingConfig(epochs=1))


def test_speeds_are_the_tables_and_the_smallest_of_equals_is_the_label(sides):
    value = speeds(sides[0][:1], SIZES, COSTS)
    taus = sides[0][0].acceptance_length
    assert value[0].tolist() == pytest.approx([1.0, taus[4] / 1.5, taus[8] / 2.0])
    assert best_choice(torch.tensor([[1.0, 2.0, 2.0], [3.0, 2.0, 3.0], [0.0, 1.0, 2.0]])).tolist() == [1, 0, 2]


def test_groups_count_their_prompts_and_choices(sides):
    train, validation, test = sides
    policy, _ = train_policy(train, validation, COSTS, SIZES, PolicyTrainingConfig(epochs=2))
    rules = compare_rules(policy, train, test, COSTS)
    assert sum(rules[name]["prompts"]["num_prompts"] for name in rules if name != "all") == len(test)
    assert sum(rules["all"]["policy's choices"].values()) == len(test)
    assert rules["all"]["constant 1"]["speedup"] == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [{"objective": "tau"}, {"hidden_size": 0}, {"epochs": 1.5}])
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PolicyTrainingConfig(**wrong)

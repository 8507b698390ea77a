"""The folders of `hub_cards/`: cards say what the records say, weights are those of the records, and the pair loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel

from blockpilot_hf import BlockPilot
from blockpilot_hf.benchmark_display import readme_table
from blockpilot_hf.cards import card_of_policy, drafter_card, policy_card, recipe_card, write_cards
from blockpilot_hf.embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME
from blockpilot_hf.evaluation_display import figure
from blockpilot_hf.export import RECIPE_NAME
from blockpilot_hf.loading import policy_of_drafter
from blockpilot_hf.target_states import weights_fingerprint

HUB_CARDS = Path(__file__).resolve().parent.parent / "hub_cards"
DRAFTER = HUB_CARDS / EMBEDDED_DRAFTER_NAME
RECIPE = HUB_CARDS / RECIPE_NAME
POLICIES = [HUB_CARDS / name for name in (EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME)]

of_every_policy = pytest.mark.parametrize("folder", POLICIES, ids=["seconds", "tau"])


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def judged(record, folder):
    """What the record says of the policy in `folder`, on all prompts, by temperature."""
    for result in record["results"]:
        for comparison in result["comparisons"]:
            if folder.name in comparison["policies"]:
                yield comparison["groups"]["all"]


def test_the_drafters_card_is_rendered_from_the_record_beside_it():
    """After new weights or records: `python -m blockpilot_hf.cards`."""
    assert (DRAFTER / "README.md").read_text(encoding="utf-8") == drafter_card(read(DRAFTER / "validation.json"))


@of_every_policy
def test_a_policys_card_is_rendered_from_the_records_beside_it(folder):
    assert (folder / "README.md").read_text(encoding="utf-8") == card_of_policy(folder)


def test_the_recipes_card_is_rendered_too():
    assert (RECIPE / "README.md").read_text(encoding="utf-8") == recipe_card()


@pytest.mark.parametrize("folder", [DRAFTER, *POLICIES, RECIPE], ids=["drafter", "seconds", "tau", "recipe"])
def test_front_matter_says_what_the_hub_needs(folder):
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == (None if folder == RECIPE else "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "custom_generate" in card.data.tags


def test_figures_of_the_drafters_card_follow_its_record():
    record = read(DRAFTER / "validation.json")
    record["acceptance_length"]["math"]["acceptance_length"] = 7.891
    assert f"| math | {record['acceptance_length']['math']['num_prompts']} | 7.89 [" in drafter_card(record)
    for entry in record["per_prompt"]:
        entry["acceptance_length"] = 6.543 if entry["category"] == "math" else entry["acceptance_length"]
    assert " | 7.89 [6.54 6.54] |" in drafter_card(record)


@of_every_policy
def test_figures_of_a_policys_card_follow_its_record(folder):
    record = read(folder / "evaluation.json")
    for group in judged(record, folder):
        group["rules"][f"policy {folder.name}"]["tau"] = {"estimate": 7.891, "low": 6.543, "high": 8.765}
    assert "| policy | 7.89 [6.54 8.77] |" in policy_card(record, folder.name)


def test_cards_of_the_folders_that_are_there_are_written(tmp_path):
    """Also where only one of the policies is."""
    for folder in (DRAFTER, POLICIES[0], RECIPE):
        shutil.copytree(folder, tmp_path / folder.name)
        (tmp_path / folder.name / "README.md").unlink()
    write_cards(tmp_path)
    for folder in (DRAFTER, POLICIES[0], RECIPE):
        assert (tmp_path / folder.name / "README.md").read_bytes() == (folder / "README.md").read_bytes()


@of_every_policy
def test_records_speak_of_the_weights_beside_them(folder):
    policy, record = AutoModel.from_pretrained(folder), read(folder / "evaluation.json")
    described, sweep = record["meta_info"]["policies"][folder.name], record["meta_info"]["sweep"]
    assert weights_fingerprint(policy) == described["fingerprint"]
    assert read(folder / "training.json")["meta_info"]["policy_fingerprint"] == described["fingerprint"]
    drafter, drafted = AutoModel.from_pretrained(DRAFTER), read(DRAFTER / "validation.json")["meta_info"]
    assert weights_fingerprint(drafter) == drafted["drafter_fingerprint"] == sweep["drafter_fingerprint"]
    assert drafter.config.target_fingerprint == drafted["target_fingerprint"] == sweep["target_fingerprint"]
    assert policy.config.drafter_fingerprint == sweep["drafter_fingerprint"]
    assert policy.config.block_sizes == described["block_sizes"]


@of_every_policy
def test_no_prompt_of_an_evaluation_was_trained_on(folder):
    record = read(folder / "evaluation.json")
    assert all(entry["is_checked"] for entry in record["overlap"]["lists"].values())
    assert any(name.startswith("drafter ") for name in record["overlap"]["lists"])
    assert all(group["num_prompts"] >= 20 for group in judged(record, folder))
    for name in ("policy", "drafter"):
        beside = folder if name == "policy" else DRAFTER
        assert read(beside / "training_prompts.json")["prompt_hashes"]


@of_every_policy
def test_means_of_a_policy_follow_from_its_prompts(folder):
    record = read(folder / "evaluation.json")
    for result, group in zip(record["results"], judged(record, folder), strict=True):
        taus = {}
        for entry in record["per_prompt"]:
            if entry["temperature"] == result["temperature"]:
                tau = entry["acceptance_length"][str(entry["chosen"][folder.name])]
                taus.setdefault(entry["prompt_id"], []).append(tau)
        mean = sum(sum(of_texts) / len(of_texts) for of_texts in taus.values()) / len(taus)
        # Prompts that are one under two ids count once there.
        assert group["rules"][f"policy {folder.name}"]["tau"]["estimate"] == pytest.approx(mean, rel=0.01)
        assert group["num_prompts"] == result["num_prompts"] <= len(taus)


def test_the_pilot_without_arguments_is_this_pair():
    pilot = BlockPilot.from_pretrained()
    assert Path(pilot.drafter.name_or_path) == DRAFTER
    assert torch.equal(pilot.drafter.fc.weight.bfloat16(), AutoModel.from_pretrained(DRAFTER).fc.weight)
    policy = policy_of_drafter(pilot.drafter)
    assert Path(policy.name_or_path).resolve() == POLICIES[0]
    assert sum(path.stat().st_size for path in HUB_CARDS.rglob("*.safetensors")) <= 30e6


def test_held_out_means_of_the_drafter_follow_from_its_prompts():
    record = read(DRAFTER / "validation.json")
    by_prompt = [entry for entry in record["per_prompt"] if entry["category"] == "math"]
    mean = sum((entry["num_new_tokens"] - 1) / entry["num_steps"] for entry in by_prompt) / len(by_prompt)
    assert record["acceptance_length"]["math"]["acceptance_length"] == pytest.approx(mean)
    assert record["acceptance_length"]["math"]["num_prompts"] == len(by_prompt) >= 20


def test_figures_of_the_readme_are_those_of_the_record():
    """After new records: the table under "Two commands" and the sentences below it."""
    readme = " ".join((HUB_CARDS.parent / "README.md").read_text(encoding="utf-8").split())
    folder = POLICIES[0]
    results = read(folder / "throughput.json")["results"]
    rules = [result["groups"]["all"]["rules"] for result in results]
    drafting, default = f"flight {folder.name}", f"flight_lookup {folder.name}"
    policies = [f"policy {path.name}" for path in POLICIES]
    for rule in ("training_size", "fixed 16", "best_constant", *policies, "flight", drafting, default, "best_per_text"):
        assert f"| {' | '.join(figure(own[rule]['speedup']) for own in rules)} |" in readme, rule
    assert f"{results[0]['num_prompts']} held-out prompts" in readme
    assert f"training prompts ({', '.join(str(result['best_constant']) for result in results)})" in readme
    for rule, name, more in (
        (drafting, "of_best_per_text", {"digits": 0, "percent": True}),
        (default, "over_best_constant", {}),
    ):
        first, second, third = (figure(own[rule][name]["tokens_per_second"], **more) for own in rules)
        assert f"{first}, {second} and {third} " in readme
    first, second, third = (f"{own[default]['least_speedup']:.2f}" for own in rules)
    assert f"slowest prompt comes to {first}, {second} and {third} times plain decoding" in readme
    timed = read(folder / "throughput-timed-float32.json")["timed"]["groups"]["all"]
    told = [figure(timed["rules"][rule]["speedup"]) for rule in (drafting, "best_constant", "training_size")]
    assert f"{told[0]} times plain in flight, {told[1]} at the best constant size and {told[2]} at size 8" in readme
    assert f"({timed['num_prompts']} of the prompts" in readme
    assert timed["rules"][drafting]["num_identical"] == timed["num_prompts"]
    emulated = read(folder / "throughput-timed-bfloat16.json")["timed"]
    rules, costs = emulated["groups"]["all"]["rules"], emulated["costs"]["verify_s"]
    assert f"a pass of 8 costs {costs['8'][0] / costs['1'][0]:.1f} plain ones" in readme
    assert f"{figure(rules[drafting]['speedup'])} with `lookup=False`, all texts identical" in readme
    assert f"size 8 comes to {figure(rules['training_size']['speedup'])}" in readme
    assert rules[drafting]["num_identical"] == emulated["groups"]["all"]["num_prompts"] == timed["num_prompts"]


def test_the_readmes_comparison_is_that_of_the_records():
    """After new records: `readme_table` of `blockpilot_hf/benchmark_display.py`, and the sentences below it."""
    text = (HUB_CARDS.parent / "README.md").read_text(encoding="utf-8")
    records = [read(path) for path in sorted(POLICIES[0].glob("benchmark*.json"))]
    assert readme_table(records) in text
    readme, by_dtype = " ".join(text.split()), {record["meta_info"]["machine"]["dtype"]: record for record in records}
    told, sampled = (result["groups"]["all"]["methods"] for result in by_dtype["float32"]["results"])
    first, second, third, fourth = (
        figure(told[name]["over_default"]) for name in ("plain", "prompt_lookup", "dflash", "stock_dflash")
    )
    assert all(one["over_default"]["low"] > 1 for name, one in told.items() if name != "flight"), "not the fastest"
    assert (
        f"the fastest of all: {first} times as fast as plain decoding, {second} as prompt lookup, {third} as `dflash` "
        f"0.1.0 and {fourth} as transformers' own DFlash" in readme
    )
    first, second = (figure(sampled[name]["over_default"]) for name in ("plain", "prompt_lookup"))
    assert f"it comes to {first} times plain decoding and {second} times prompt lookup" in readme
    assert f"({told['size 8']['acceptance_length']['estimate']:.1f} tokens per step at size 8)" in readme
    assert f"spends {told['flight']['overhead_share']['estimate'] * 100:.1f} % of its time" in readme
    for record in records:
        meta, run = record["meta_info"], record["run_info"]
        assert run["status"] == "whole" and run["notes"]
        assert meta["drafter"]["fingerprint"] == read(DRAFTER / "validation.json")["meta_info"]["drafter_fingerprint"]
        assert meta["policies"]["policy"]["fingerprint"] == weights_fingerprint(AutoModel.from_pretrained(POLICIES[0]))
        greedy = record["results"][0]["groups"]["all"]
        assert greedy["methods"]["flight"]["num_identical"] == greedy["num_prompts"]

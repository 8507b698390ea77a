"""The folders of `hub_cards/`: cards say what the records say, weights are those of the records, and the pair loads."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel

from blockpilot_hf import BlockPilot
from blockpilot_hf.cards import drafter_card, policy_card
from blockpilot_hf.embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME
from blockpilot_hf.loading import policy_of_drafter
from blockpilot_hf.target_states import weights_fingerprint

HUB_CARDS = Path(__file__).resolve().parent.parent / "hub_cards"
DRAFTER, POLICY = HUB_CARDS / EMBEDDED_DRAFTER_NAME, HUB_CARDS / EMBEDDED_POLICY_NAME


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("folder", "record", "render"),
    [(DRAFTER, "validation.json", drafter_card), (POLICY, "evaluation.json", policy_card)],
    ids=["drafter", "policy"],
)
def test_cards_are_rendered_from_the_records_beside_them(folder, record, render):
    """After new weights or records: `python -m blockpilot_hf.cards`."""
    assert (folder / "README.md").read_text(encoding="utf-8") == render(read(folder / record))
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "custom_generate" in card.data.tags


def test_figures_of_a_card_follow_its_record():
    record = read(DRAFTER / "validation.json")
    record["acceptance_length"]["math"]["acceptance_length"] = 7.891
    assert "| math | 20 | 7.89 |" in drafter_card(record)
    record = read(POLICY / "evaluation.json")
    record["results"]["test"]["all"]["policy"]["speedup"] = 7.891
    assert "7.891" in policy_card(record)


def test_records_speak_of_the_weights_beside_them():
    drafter = AutoModel.from_pretrained(DRAFTER)
    policy = AutoModel.from_pretrained(POLICY)
    drafted, chosen = read(DRAFTER / "validation.json")["meta_info"], read(POLICY / "evaluation.json")["meta_info"]
    assert weights_fingerprint(drafter) == drafted["drafter_fingerprint"] == chosen["drafter"]
    assert weights_fingerprint(policy) == chosen["policy"]
    assert drafter.config.target_fingerprint == drafted["target_fingerprint"] == chosen["target"]
    assert policy.config.drafter_fingerprint == chosen["drafter"]


def test_the_pilot_without_arguments_is_this_pair():
    pilot = BlockPilot.from_pretrained()
    assert Path(pilot.drafter.name_or_path) == DRAFTER
    assert torch.equal(pilot.drafter.fc.weight.bfloat16(), AutoModel.from_pretrained(DRAFTER).fc.weight)
    policy = policy_of_drafter(pilot.drafter)
    assert policy.config.block_sizes == read(POLICY / "evaluation.json")["meta_info"]["block_sizes"]
    assert sum(path.stat().st_size for path in HUB_CARDS.rglob("*.safetensors")) <= 30e6


def test_held_out_means_of_the_drafter_follow_from_its_prompts():
    record = read(DRAFTER / "validation.json")
    by_prompt = [entry for entry in record["per_prompt"] if entry["category"] == "math"]
    mean = sum((entry["num_new_tokens"] - 1) / entry["num_steps"] for entry in by_prompt) / len(by_prompt)
    assert record["acceptance_length"]["math"]["acceptance_length"] == pytest.approx(mean)
    assert record["acceptance_length"]["math"]["num_prompts"] == len(by_prompt) >= 20

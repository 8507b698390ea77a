"""Cards of policies from made-up records: what is told, and what a missing part leaves out."""

import json

import pytest
from huggingface_hub import ModelCard
from sweeps import COSTS, make_rows, make_sweep, save_sweep

from blockpilot_hf import cli, cli_evaluate
from blockpilot_hf.cards import card_of_policy, policy_card
from blockpilot_hf.embedded import EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME

NAMES = (EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME)


@pytest.fixture(scope="module")
def hub_cards(tmp_path_factory):
    """Two policies with their records, made by the commands."""
    root = tmp_path_factory.mktemp("cards")
    table = COSTS.to_dict()
    table["key"] = {"num_threads": 2, "device": "cpu", "dtype": "float32", "torch": "2"}
    (root / "costs.json").write_text(json.dumps(table))
    save_sweep(root / "train", make_sweep(make_rows(60, 0)))
    save_sweep(root / "test", make_sweep(make_rows(40, 1, temperatures=(0.0, 1.0))))
    quick, folders = ["--bootstrap", "20", "--costs", str(root / "costs.json")], [root / name for name in NAMES]
    for folder, more in zip(folders, (["--block-sizes", "1,4,6"], ["--rule", "tau"]), strict=True):
        arguments = [str(root / "train"), "--output", str(root / "out"), "--epochs", "5", *quick, *more]
        assert cli._run(["train-policy", *arguments]) == 0
        (root / "out" / "policy").rename(folder)
        (root / "out" / "training.json").rename(folder / "training.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_evaluate, "draw_tau", lambda *arguments: None)  # no part of a card
        patch.setattr(cli_evaluate, "draw_choices", lambda *arguments: None)
        policies = [part for folder in folders for part in ("--policy", str(folder))]
        arguments = [str(root / "test"), "--train", str(root / "train"), *policies, "--output", str(root / "out")]
        assert cli._run(["evaluate", *arguments, "--shuffles", "5", *quick]) == 0
    for folder in folders:
        (folder / "evaluation.json").write_bytes((root / "out" / "evaluation.json").read_bytes())
    return root


@pytest.mark.parametrize("name", NAMES)
def test_a_card_tells_the_figures_of_its_own_policy(hub_cards, name):
    record = json.loads((hub_cards / name / "evaluation.json").read_text())
    card = card_of_policy(hub_cards / name)
    ModelCard(card)  # front matter parses
    assert f"# {name}\n" in card
    for result in record["results"]:
        comparison = next(one for one in result["comparisons"] if name in one["policies"])
        told = comparison["groups"]["all"]["rules"][f"policy {name}"]["tau"]
        assert f"| policy | {told['estimate']:.2f} [{told['low']:.2f} {told['high']:.2f}] |" in card
    assert "### Greedy" in card
    assert "### Temperature 1" in card
    assert "Hashes of the prompts were compared with 3 of 4 lists of training prompts; none was on one." in card
    assert "Without a list: drafter." in card
    assert "stopped by 12 other" in card
    assert "Medians on 2 threads" in card
    other = next(one for one in NAMES if one != name)
    assert f"policy {other}:" not in card


def test_without_training_record_and_prices_the_card_leaves_them_out(hub_cards):
    record = json.loads((hub_cards / NAMES[0] / "evaluation.json").read_text())
    card = policy_card({**record, "costs": None}, NAMES[0])
    assert "## Costs" not in card
    assert "## Training" not in card
    record["overlap"] = {"lists": {"policy x": {"is_checked": True}}, "num_prompts_dropped": 3}
    assert "1 of 1 lists of training prompts; 3 that were on one were left out." in policy_card(record, NAMES[0])


def test_a_policy_that_the_record_does_not_have_is_refused(hub_cards):
    record = json.loads((hub_cards / NAMES[0] / "evaluation.json").read_text())
    with pytest.raises(ValueError, match="The record has no policy 'other', only"):
        policy_card(record, "other")
    del record["meta_info"]["policies"][NAMES[1]]
    assert policy_card(record, "other").count("| policy |") >= 2

"""A mirror of the Hub repositories with a tiny pair, in place of `hub_cards/`; also for processes of their own."""

import json
import shutil
from pathlib import Path

from conftest import constant_policy, make_drafter, make_target

from blockpilot_hf import loading
from blockpilot_hf.embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME
from blockpilot_hf.export import RECIPE_NAME, export

HUB_CARDS = Path(loading.__file__).parent.parent / "hub_cards"


def save_mirror(root: Path, *, block_size: int = 3) -> str:
    """
    Write `root/hub_cards`, with the cards of the real one.

    Returns:
        `str`: What `loading.__file__` has to be for `root/hub_cards` to be the mirror.
    """
    mirror = root / "hub_cards"
    models = {name: constant_policy(block_size) for name in (EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME)}
    for policy in models.values():
        policy.config.drafter_name_or_path = EMBEDDED_DRAFTER_NAME
    models[EMBEDDED_DRAFTER_NAME] = make_drafter(make_target(), policy=f"../{EMBEDDED_POLICY_NAME}")
    for name, model in models.items():
        model.save_pretrained(mirror / name)
        (mirror / name / "record.json").write_text(json.dumps({"command": "blockpilot sweep texts"}))
    for name in (*models, RECIPE_NAME):
        (mirror / name).mkdir(exist_ok=True)
        shutil.copy(HUB_CARDS / name / "README.md", mirror / name)
    return str(root / "package" / "loading.py")


def use_mirror(monkeypatch, root: Path) -> Path:
    """Have this process export and push the tiny mirror, and return its folder."""
    monkeypatch.setattr(loading, "__file__", save_mirror(root))
    export(root / "hub_cards")
    return root / "hub_cards"

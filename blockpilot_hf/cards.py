"""Cards of the recipe, the embedded drafter and its policies, rendered from the records that lie beside the weights.

Figures in a card come from `validation.json`, `evaluation.json`, `training.json`, `throughput*.json`,
`benchmark*.json` and `scaling*.json`, never from a keyboard.
"""

import json
import sys
from pathlib import Path
from typing import Any

from .benchmark_card import BENCHMARKS
from .drafter_card import drafter_card
from .embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME
from .export import RECIPE_NAME
from .policy_card import policy_card
from .recipe_card import recipe_card
from .scaling_card import SCALINGS
from .throughput_card import RECORDS


def write_cards(hub_cards: Path) -> None:
    """Renders the cards of all folders that are there anew."""
    recipe, drafter = hub_cards / RECIPE_NAME, hub_cards / EMBEDDED_DRAFTER_NAME
    if recipe.is_dir():
        (recipe / "README.md").write_text(recipe_card(), encoding="utf-8")
    if drafter.is_dir():
        (drafter / "README.md").write_text(drafter_card(_read(drafter / "validation.json")), encoding="utf-8")
    for name in (EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME):
        folder = hub_cards / name
        if folder.is_dir():
            (folder / "README.md").write_text(card_of_policy(folder), encoding="utf-8")


def card_of_policy(folder: Path) -> str:
    """The card that the records in a policy's folder give."""
    training = folder / "training.json"
    known = _read(training) if training.is_file() else None
    throughput = {path.name: _read(path) for path in sorted(folder.glob(RECORDS))}
    benchmarks = [_read(path) for path in sorted(folder.glob(BENCHMARKS))]
    scalings = [_read(path) for path in sorted(folder.glob(SCALINGS))]
    return policy_card(_read(folder / "evaluation.json"), folder.name, known, throughput, benchmarks, scalings)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    write_cards(Path(sys.argv[1] if len(sys.argv) > 1 else "hub_cards"))

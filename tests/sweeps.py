"""Sweeps made up for the tests of policy training and evaluation: what decoding accepted follows a known law."""

import hashlib
import json
import random
from dataclasses import asdict

from blockpilot_hf.configuration_blockpilot import NUM_COMPACT_FEATURES
from blockpilot_hf.costs import CostTable
from blockpilot_hf.sweep import Sweep, SweepRow

TRAINING_SIZE = 4
SIZES = (1, 2, 3, 4, 5, 6)
COSTS = CostTable(
    context_lengths=(8,),
    verify_s={1: (1.0,), 2: (1.05,), 3: (1.1,), 4: (1.2,), 5: (1.3,), 6: (1.4,)},
    draft_s={2: (0.2,), 3: (0.2,), 4: (0.25,), 5: (0.25,), 6: (0.3,)},
)
CATEGORIES = ("gsm8k", "humaneval", "other")


def hash_of(name):
    """As long as that of a text's prompt."""
    return hashlib.sha256(name.encode()).hexdigest()


def make_row(name, accepted, *, num_new_tokens=25, prompt_id=None, **fields):
    """
    A row that accepts `accepted[b]` tokens in every step but a shorter last one; sizes that are not named accept none.
    """
    counts = {}
    for size in SIZES:
        left, steps = num_new_tokens - 1, []
        while left:
            steps.append(min(accepted.get(size, 0), left - 1))
            left -= steps[-1] + 1
        counts[size] = tuple(steps)
    defaults = {
        "category": "all",
        "temperature": 0.0,
        "seed": 0,
        "prompt_hash": hash_of(prompt_id or name),
        "num_prompt_tokens": 7,
        "features": (0.0,) * NUM_COMPACT_FEATURES,
    }
    return SweepRow(
        id=name,
        prompt_id=prompt_id or name,
        num_new_tokens=num_new_tokens,
        num_accepted=counts,
        **{**defaults, **fields},
    )


# Best by tau and by seconds: plain decoding, the training size, the largest size.
KINDS = ({}, {2: 1, 3: 2, 4: 3, 5: 2, 6: 1}, {2: 1, 3: 2, 4: 3, 5: 4, 6: 5})


def make_rows(number, seed=0, *, tells=True, temperatures=(0.0,), with_logits=False, context_size=None):
    """
    Rows of three kinds; some features (or a logit) say which, if it `tells`. One text per prompt and temperature. With
    a `context_size` it is the first two numbers of the context that tell, and no feature.
    """
    draw = random.Random(seed)
    rows = []
    for i in range(number):
        kind = draw.randrange(3)
        for temperature in temperatures:
            features = [draw.gauss(0, 1) for _ in range(NUM_COMPACT_FEATURES)]
            context = None
            if context_size is not None:
                context = [draw.gauss(0, 1) for _ in range(context_size)]
                context[:2] = [2.0 * kind * tells + draw.gauss(0, 0.3) for _ in range(2)]
            elif tells:
                features[3:9] = [-30 + 2.0 * kind + draw.gauss(0, 0.3) for _ in range(6)]
            features[-3:] = [temperature, 0.0, 1.0]
            name = f"{seed}-{i}"
            logits = tuple([features[3] + 30, *features[9:17]]) if with_logits else None
            rows.append(
                make_row(
                    name if not temperature else f"{name}-t{temperature}",
                    KINDS[kind],
                    prompt_id=name,
                    category=CATEGORIES[i % 3],
                    temperature=temperature,
                    features=tuple(features),
                    context=None if context is None else tuple(context),
                    logits=logits,
                )
            )
    return rows


def make_sweep(rows, **settings):
    """With the settings that a sweep records."""
    return Sweep(
        rows=list(rows),
        block_sizes=SIZES,
        settings={
            "target": "tiny-target",
            "target_fingerprint": "t" * 16,
            "drafter": "tiny-drafter",
            "drafter_fingerprint": "d" * 16,
            "training_block_size": TRAINING_SIZE,
            "block_sizes": list(SIZES),
            "dtype": "float32",
            "max_new_tokens": 25,
            "texts_fingerprint": "x" * 16,
            "temperatures": sorted({row.temperature for row in rows}),
            **settings,
        },
    )


def save_sweep(folder, sweep):
    """A folder as `read_sweep` reads it."""
    import datasets

    entries = [
        {**asdict(row), "num_accepted": [list(row.num_accepted[size]) for size in sweep.block_sizes]}
        for row in sweep.rows
    ]
    for name in ("context", "logits"):
        if all(getattr(row, name) is None for row in sweep.rows):
            entries = [{key: value for key, value in entry.items() if key != name} for entry in entries]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(entries).save_to_disk(folder)
    (folder / "settings.json").write_text(json.dumps(sweep.settings))
    return folder

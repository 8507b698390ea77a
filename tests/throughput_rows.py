"""Sweep rows with positions, whose seconds can be worked out by hand, and a curve that is known."""

import json
from dataclasses import asdict, replace

import datasets
import torch
from sweeps import KINDS, SIZES, make_row

from blockpilot_hf import BlockPilotConfig, BlockPilotPolicy

NUM_NEW = 25


def with_positions(row, accepted, *, confidence=0.5):
    """Accepts `accepted[b]` tokens after every anchor, as far as there are any."""
    num_left = row.num_new_tokens - 1
    return replace(
        row,
        accepted_at={
            size: tuple(min(accepted.get(size, 0), num_left - i - 1) for i in range(num_left)) for size in SIZES
        },
        confidence_at={size: ((confidence,) * (size - 1),) * num_left for size in SIZES},
    )


def positioned_row(name, kind, **fields):
    """Of `KINDS`: 0 accepts nothing, 1 the most at size 4, 2 everything."""
    return with_positions(make_row(name, KINDS[kind], num_new_tokens=NUM_NEW, **fields), KINDS[kind])


def constant_curve(share, sizes=(1, 2, 4, 6)):
    """A head that predicts an acceptance length of `1 + share * (size - 1)` for every prompt."""
    config = BlockPilotConfig(block_sizes=list(sizes), head="curve", features="compact", hidden_size=1)
    policy = BlockPilotPolicy(config).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        policy.fc_out.bias.fill_(torch.tensor(share).logit())
    return policy


def save_positioned(folder, sweep):
    """A folder as `read_sweep` reads it, positions included."""
    entries = []
    for row in sweep.rows:
        entry = {name: value for name, value in asdict(row).items() if value is not None}
        entry["num_accepted"] = [list(row.num_accepted[size]) for size in sweep.block_sizes]
        entry["accepted_at"] = [list(row.accepted_at[size]) for size in sweep.block_sizes]
        entry["confidence_at"] = [
            [value for anchor in row.confidence_at[size] for value in anchor] for size in sweep.block_sizes
        ]
        entries.append(entry)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(entries).save_to_disk(folder)
    (folder / "settings.json").write_text(json.dumps(sweep.settings))
    return folder

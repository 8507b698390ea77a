"""The part of a card that tells what calls cost by length, from records of `blockpilot scaling`."""

from collections.abc import Mapping, Sequence
from typing import Any

from .benchmark_reading import record_labels
from .display import counted
from .evaluation_display import Table
from .scaling_display import told_scaling

SCALINGS = "scaling*.json"


def scaling_section(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; empty without a record."""
    if not records:
        return ""
    parts = ["## Cost against work"]
    for label, record in zip(record_labels(records), records, strict=True):
        told = list(told_scaling(record))
        last = max(i for i, part in enumerate(told) if isinstance(part, Table))
        parts += [part.markdown for part in told if isinstance(part, Table)]
        # Below the tables: what they hold, and growth next to plain's.
        parts.append("\n".join(f"- {line}" for line in told[last + 1 :]))
        run, meta = record["run_info"], record["meta_info"]
        machine = f"{meta['machine'].get('device_name')} with {counted(meta['machine']['num_threads'], 'thread')}"
        notes = f" {run['notes']}" if run.get("notes") else ""
        parts.append(f"Command ({label}): `{run['command']}`, on {machine}, torch {meta['versions']['torch']}.{notes}")
    return "\n\n".join(parts) + "\n"


__all__ = ["SCALINGS", "scaling_section"]

"""The part of a card that tells what calls cost by length, from records of `blockpilot scaling`."""

from collections.abc import Mapping, Sequence
from typing import Any

from .benchmark_reading import command_line, record_labels
from .scaling_display import LEGEND, growth_lines, growth_verdict, memory_table, shared_lines, time_table

SCALINGS = "scaling*.json"


def scaling_section(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; empty without a record."""
    if not records:
        return ""
    parts = ["## Cost against work"]
    for label, record in zip(record_labels(records), records, strict=True):
        for sweep in record["summary"]:
            parts += [time_table(record, sweep).markdown, memory_table(record, sweep).markdown]
        lines = [*shared_lines(record), LEGEND, *growth_lines(record), growth_verdict(record)]
        parts.append("\n".join(f"- {line}" for line in lines))
        parts.append(command_line(label, record))
    return "\n\n".join(parts) + "\n"


__all__ = ["SCALINGS", "scaling_section"]

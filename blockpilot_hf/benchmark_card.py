"""The part of a card that tells how the pair does next to others, from records of `blockpilot benchmark`."""

from collections.abc import Mapping, Sequence
from typing import Any

from .benchmark_display import groups_table, not_run_lines, readme_table, speeds_table, texts_table
from .benchmark_reading import command_line, main_results, record_labels

BENCHMARKS = "benchmark*.json"


def benchmark_section(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; empty without a record."""
    if not records:
        return ""
    parts = ["## Side by side", readme_table(records)]
    parts.append(
        "Times plain `generate` on prompts of our own, whole calls, in turns, mean over prompts, in brackets paired 95 % "
        "bootstrap intervals.\nHow to read it and how noise was handled: `docs/benchmark.md` of the package."
    )
    for label, record in zip(record_labels(records), records, strict=True):
        for result in main_results(record):
            tables = (speeds_table(record, result), texts_table(record, result), groups_table(record, result))
            parts += [table.markdown for table in tables]
        parts += [f"{label}: {line}" for line in not_run_lines(record)]
        parts.append(command_line(label, record))
    return "\n\n".join(parts) + "\n"


__all__ = ["BENCHMARKS", "benchmark_section"]

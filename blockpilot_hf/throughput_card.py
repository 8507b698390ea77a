"""The part of a policy's card that tells what deciding in flight gives, from records of `blockpilot evaluate`.

One record tells what was simulated, and others of the same sweep each a timed run. Knows nothing of models.
"""

from collections.abc import Sequence
from typing import Any

from .throughput_display import agreement_table, groups_table, ratios_table, speeds_table, timed_table

RECORDS = "throughput*.json"


def throughput_section(records: Sequence[dict[str, Any]]) -> str:
    """
    Markdown; empty without a record.

    Args:
        records (`Sequence[dict]`):
            As `throughput.json`. What is simulated comes from the one that was made without a timed run, if there is
            one, since timed runs are often made with fewer tables and policies.

    Raises:
        `ValueError`: if the records are of different sweeps.
    """
    if not records:
        return ""
    simulated = next((record for record in records if record["timed"] is None), records[0])
    if any(record["meta_info"]["sweep"] != simulated["meta_info"]["sweep"] for record in records):
        raise ValueError("The throughput records are of different sweeps. Make them from one.")
    parts = ["## In flight"]
    parts.append(
        "By default this policy's prediction is where decisions start, and every step goes on from there by what was "
        'accepted\n(`adapt="flight"`), copying from the text so far where that pays (lookup). Tokens per second of every way '
        "to decide, on\nheld-out prompts, simulated in the seconds of cost tables, prefill and policy aside:"
    )
    for result in simulated["results"]:
        parts += [speeds_table(result).markdown, ratios_table(result).markdown, groups_table(result).markdown]
    for record in records:
        if record["timed"] is not None:
            timed = record["timed"]
            parts += [timed_table(timed).markdown, agreement_table(timed).markdown, groups_table(timed).markdown]
    parts.append(
        "Times plain: mean over prompts of the speed over plain decoding, in brackets 95 % bootstrap intervals over "
        "prompts; least: of a prompt.\nTimed: whole calls, prefill included, in turns with plain `generate`; table: "
        "seconds of the very steps that were taken. The best size per text and\nthe best per step are known afterwards "
        "only."
    )
    parts.append("Commands:")
    parts.append("\n".join(f"- `{record['run_info']['command']}`{_notes(record)}" for record in records))
    return "\n\n".join(parts) + "\n"


def _notes(record: dict[str, Any]) -> str:
    notes = record["run_info"].get("notes")
    return f": {notes}" if notes else ""


__all__ = ["RECORDS", "throughput_section"]

"""An answer with its figures, and several of them as a record for programs and a table for people."""

from dataclasses import dataclass
from typing import Any

from .cli_measure import Measurement
from .display import identity_words, shortened
from .prompts import Prompt
from .trace import DecodeTrace


def answer_name(prompt: Prompt, turn: int) -> str:
    """The prompt's category and id, and the turn where there are several."""
    category = "" if prompt.category in ("", prompt.id) else f"{prompt.category} "
    return f"{category}{prompt.id}" + (f", turn {turn}" if len(prompt.turns) > 1 else "")


@dataclass(frozen=True)
class Answer:
    """The answer to one turn of a prompt, and what it took."""

    prompt: Prompt
    turn: int
    num_prompt_tokens: int
    text: str
    trace: DecodeTrace
    measured: Measurement | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values. Seconds and speed are the timed calls' where there are any."""
        trace = self.measured.trace if self.measured else self.trace
        total_s = self.measured.total_s if self.measured else trace.prefill_s + trace.policy_s + trace.decode_s
        entry = {
            "id": self.prompt.id,
            "category": self.prompt.category,
            "turn": self.turn,
            "prompt": self.prompt.turns[self.turn - 1],
            "text": self.text,
            "block_size": trace.block_size,
            "reason": trace.reason,
            "adapt": trace.adapt,
            "costs": trace.costs,
            "scores": {str(size): score for size, score in (trace.scores or {}).items()},
            "acceptance_length": trace.acceptance_length,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_new_tokens": trace.num_new_tokens,
            "num_steps": len(trace.steps),
            "tokens_per_second": trace.num_new_tokens / total_s,
            "total_s": total_s,
            "prefill_s": trace.prefill_s,
            "policy_s": trace.policy_s,
            "decode_s": trace.decode_s,
        }
        if self.measured:
            entry |= {
                "plain_tokens_per_second": self.measured.plain_tokens_per_second,
                "plain_total_s": self.measured.plain_total_s,
                "speedup": self.measured.speedup,
                "identical": self.measured.first_difference is None,
                "repeats": self.measured.repeats,
            }
            if self.measured.first_difference is not None:
                entry |= {
                    "first_difference": self.measured.first_difference,
                    "gap": self.measured.gap,
                    "explained": self.measured.is_explained,
                }
        return entry


def summary_of(answers: list[Answer]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table with an answer per row."""
    header = ["prompt", "block size", "tau", "tokens/s"]
    if answers[0].measured:
        header += ["plain tokens/s", "ratio", "identical"]
    rows = []
    for answer in answers:
        entry = answer.to_dict()
        row = [
            shortened(answer_name(answer.prompt, answer.turn), 24),
            str(entry["block_size"]),
            f"{entry['acceptance_length']:.2f}",
        ]
        row.append(f"{entry['tokens_per_second']:.1f}")
        if answer.measured:
            row += [f"{entry['plain_tokens_per_second']:.1f}", f"{entry['speedup']:.2f}"]
            words = identity_words(answer.measured.first_difference, answer.measured.gap)
            row.append(words.removeprefix("identical").strip() or "yes")
        rows.append(row)
    return header, rows


def record_of(answers: list[Answer]) -> dict[str, Any]:
    """One answer as it is; several as a list under `prompts`, with what they have in common."""
    entries = [answer.to_dict() for answer in answers]
    if len(entries) == 1:
        return entries[0]

    def mean(name: str) -> float:
        return sum(entry[name] for entry in entries) / len(entries)

    record = {
        "prompts": entries,
        "num_prompts": len(entries),
        "mean_acceptance_length": mean("acceptance_length"),
        "mean_tokens_per_second": mean("tokens_per_second"),
    }
    if "speedup" in entries[0]:
        record |= {
            "mean_plain_tokens_per_second": mean("plain_tokens_per_second"),
            "min_speedup": min(entry["speedup"] for entry in entries),
            "mean_speedup": mean("speedup"),
            "all_identical": all(entry["identical"] for entry in entries),
        }
    return record

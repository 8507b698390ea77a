"""A decoded answer as text for people: pieces that know where they come from, a strip of its steps, lines of figures.

Pure functions over a tokenizer and a [`DecodeTrace`]. Where the text goes, and in what colour, is the caller's part.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .trace import DecodeTrace, StepRecord

# Of a strip: drafted and accepted, copied and accepted, the target's own, left out. And for terminals without them.
SYMBOLS, PLAIN_SYMBOLS = ("▮", "▯", "·", "…"), ("#", "=", ".", "+")

# Bytes of a character that is not whole yet decode to this.
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """
    Text of one or several tokens.

    Args:
        text (`str`): Whole characters only.
        is_accepted (`bool`):
            Every token of it was drafted or copied, and accepted; else the target's own pick is among them.
    """

    text: str
    is_accepted: bool


class PieceStream:
    """
    Token ids to text as they come. A token that ends inside a character is held back until the character is whole, so
    the texts of all pieces together are what the tokenizer makes of all tokens together.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's. Special tokens give no text.
    """

    def __init__(self, tokenizer: Any):
        self.text = ""
        self._tokenizer = tokenizer
        # Decoding starts one piece early: many tokenizers drop the space of the first word that they decode.
        self._before: list[int] = []
        self._held: list[int] = []
        self._is_accepted = True

    def put(self, token_ids: Sequence[int], are_accepted: Sequence[bool]) -> list[Piece]:
        """Take tokens with [`are_accepted`] of each, and return what can be shown by now."""
        pieces = []
        for token_id, is_accepted in zip(token_ids, are_accepted, strict=True):
            self._held.append(int(token_id))
            self._is_accepted = self._is_accepted and is_accepted
            new = self._decode()
            if new and not new.endswith(_REPLACEMENT):
                pieces.append(self._take(new))
        return _joined(pieces)

    def end(self) -> list[Piece]:
        """What is still held back. A character that the answer was cut off in comes as U+FFFD."""
        new = self._decode() if self._held else ""
        return [self._take(new)] if new else []

    def _decode(self) -> str:
        before, both = (
            self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (self._before, self._before + self._held)
        )
        return both[len(before) :]

    def _take(self, text: str) -> Piece:
        piece = Piece(text, self._is_accepted)
        self.text += text
        self._before, self._held, self._is_accepted = self._held, [], True
        return piece


def are_accepted(step: StepRecord) -> list[bool]:
    """Whether each committed token of a step is an accepted draft; the others are the target's own picks."""
    last = step.num_accepted
    # A criterion that fires inside the accepted run ends the answer on a drafted token. Only `verify_width - 1` drafted
    # tokens were verified: a later one that equals the target's own pick is chance.
    is_drafted = last < step.verify_width - 1 and step.draft_ids[last] == step.committed_ids[last]
    return [True] * last + [is_drafted]


def answer_pieces(tokenizer: Any, token_ids: Sequence[int], trace: DecodeTrace) -> list[Piece]:
    """
    A whole answer in pieces.

    Args:
        token_ids (`Sequence[int]`): The `trace.num_new_tokens` new tokens.
        trace (`DecodeTrace`): The record of that one row.
    """
    flags = [False, *(flag for step in trace.steps for flag in are_accepted(step))]
    stream = PieceStream(tokenizer)
    return _joined([*stream.put(token_ids, flags), *stream.end()])


def bracketed(pieces: Iterable[Piece], *, brackets: tuple[str, str] = ("⟦", "⟧")) -> str:
    """The text with accepted runs in brackets, white space at a run's ends outside of them."""
    parts = []
    for piece in _joined(pieces):
        core = piece.text.strip()
        if piece.is_accepted and core:
            start = piece.text.index(core)
            end = start + len(core)
            parts += [piece.text[:start], brackets[0], core, brackets[1], piece.text[end:]]
        else:
            parts.append(piece.text)
    return "".join(parts)


def step_strip(
    trace: DecodeTrace, *, width: int = 80, max_lines: int = 8, symbols: Sequence[str] = SYMBOLS
) -> list[str]:
    """
    The answer as lines of one symbol per token, in one group per verification step; the first group is the prefill's
    token.

    Args:
        width (`int`): Columns of a line at most.
        max_lines (`int`): Lines at most; what is left out is counted in the last one.
        symbols (`Sequence[str]`):
            For an accepted token that was drafted, for one that was copied, for the target's own, and for what is left
            out.
    """
    drafted, copied, own, more = symbols
    groups = [own]
    for step in trace.steps:
        accepted = copied if step.source == "lookup" else drafted
        groups.append("".join(accepted if flag else own for flag in are_accepted(step)))
    lines: list[list[str]] = [[]]
    for group in groups:  # a step stays on one line
        if lines[-1] and len(" ".join([*lines[-1], group])) > width:
            lines.append([])
        lines[-1].append(group)
    left_out = sum(map(len, lines[max_lines - 1 :])) if len(lines) > max_lines else 0
    shown = [" ".join(line) for line in (lines[: max_lines - 1] if left_out else lines)]
    return [*shown, f"{more} {left_out} more steps"] if left_out else shown


def block_size_line(trace: DecodeTrace) -> str:
    """The chosen size, who chose it, and every score, the chosen size's in brackets."""
    scores = ", ".join(
        f"[{size}: {score:.3g}]" if size == trace.block_size else f"{size}: {score:.3g}"
        for size, score in (trace.scores or {}).items()
    )
    return f"block size {trace.block_size} ({trace.reason}{'; ' if scores else ''}{scores})"


def flight_line(trace: DecodeTrace) -> str:
    """What the steps of a flight drafted, copied and verified, and by which costs."""
    drafted = [step for step in trace.steps if step.source == "drafter"]
    copied = [step for step in trace.steps if step.source == "lookup"]
    sizes = Counter(step.block_size for step in drafted)
    parts = [f"{sizes[size]} x {size}" for size in sorted(sizes)]
    if drafted:
        parts[-1] += f" drafted, {_mean_width(drafted):.1f} of a block verified on average"
    if copied:
        steps = counted(len(copied), "step")
        parts.append(f"{steps} copied from the text so far, {_mean_width(copied):.1f} verified on average")
    plain = counted(len(trace.steps) - len(drafted) - len(copied), "plain step")
    return f"in flight: {', '.join([*parts, plain])}; costs: {trace.costs}"


def _mean_width(steps: Sequence[StepRecord]) -> float:
    return sum(step.verify_width for step in steps) / len(steps)


def acceptance_line(trace: DecodeTrace) -> str:
    """Tau and the number of steps."""
    if not trace.steps:
        return f"no verification step: {counted(trace.num_new_tokens, 'token')} from the prefill"
    return (
        f"tau {trace.acceptance_length:.2f} tokens per step: {trace.num_new_tokens - 1} in "
        f"{counted(len(trace.steps), 'step')}, and 1 from the prefill"
    )


def speed_line(trace: DecodeTrace, total_s: float | None = None) -> str:
    """
    Tokens per second, and where the seconds went.

    Args:
        total_s (`float`, *optional*): Seconds of the whole call; by default the sum of its parts in the trace.
    """
    if total_s is None:
        total_s = trace.prefill_s + trace.policy_s + trace.decode_s
    return (
        f"{trace.num_new_tokens / total_s:.1f} tokens per second: {counted(trace.num_new_tokens, 'token')} in "
        f"{total_s:.2f} s (prefill {trace.prefill_s:.2f}, policy {trace.policy_s:.3f}, decoding {trace.decode_s:.2f})"
    )


def identity_words(first_difference: int | None, gap: float | None) -> str:
    """
    "identical", or up to where.

    Args:
        first_difference (`int`, *optional*): Position of the first new token that differs: so many are the same.
        gap (`float`, *optional*): Score gap of the two tokens there in plain decoding; `None`: not measurable.
    """
    if first_difference is None:
        return "identical"
    return f"identical up to token {first_difference}, gap {'unknown' if gap is None else f'{gap:.4f}'}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `2,000 steps`; `2 batches` with a plural of its own."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def without_controls(text: str) -> str:
    """The text with control characters other than line feed and tab made visible: a terminal would obey them."""
    return "".join(
        _REPLACEMENT if unicodedata.category(character) == "Cc" and character not in "\n\t" else character
        for character in text
    )


def shortened(text: str, width: int) -> str:
    """The text on one line, its end left out where it is longer than `width`."""
    line = without_controls(" ".join(text.split()))
    return line if len(line) <= width else f"{line[: max(width - 1, 0)]}…"


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].is_accepted == piece.is_accepted:
            joined[-1] = Piece(joined[-1].text + piece.text, piece.is_accepted)
        else:
            joined.append(piece)
    return joined

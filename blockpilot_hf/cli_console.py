"""Where the commands write: a terminal with or without colour, a dumb one, or a pipe."""

import logging
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from .display import Piece, bracketed, without_controls

# Narrower than this, a table's rows are told in lines.
TABLE_WIDTH = 72
# In a pipe, which has no bar.
_LINE_EVERY_S = 60.0


class Marks(Enum):
    """How accepted tokens are told from the target's own."""

    AUTO = "auto"
    INLINE = "inline"
    STRIP = "strip"
    NONE = "none"


class Screen:
    """
    Standard output. Into a pipe goes plain text without escape codes, and an answer exactly as it is.

    Args:
        marks (`Marks`): `auto` marks in the text where it can be styled, else by a strip after it.
        is_quiet (`bool`): Show nothing but answers.
    """

    def __init__(self, marks: Marks = Marks.AUTO, *, is_quiet: bool = False):
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._is_quiet = is_quiet
        self.can_style = self._console.is_terminal and not self._console.is_dumb_terminal
        self.marks = (Marks.INLINE if self.can_style else Marks.STRIP) if marks == Marks.AUTO else marks
        self._held: list[Piece] = []
        self._ends_line = True
        self._has_headed = False

    @property
    def width(self) -> int:
        """Columns that lines should fit into."""
        return self._console.width

    @property
    def can_print_symbols(self) -> bool:
        """Whether the encoding has more than ASCII."""
        try:
            "▮·…⟦⟧".encode(self._console.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    @property
    def legend(self) -> str:
        """What the marks in the text mean."""
        if self.can_style:
            return f"{'underlined' if self._console.no_color else 'green, underlined'}: drafted and accepted"
        return f"in {' '.join(self._brackets)}: drafted and accepted"

    def write(self, pieces: Iterable[Piece]) -> None:
        """More of an answer, at once."""
        if self.marks != Marks.INLINE:
            self._out("".join(piece.text for piece in pieces))
        elif self.can_style:
            self._out("".join(self._styled(piece) for piece in pieces))
        else:
            # A run of accepted tokens may go on in the next step, so its closing bracket has to wait.
            self._held += pieces
            if self._held and not self._held[-1].is_accepted:
                self._flush_held()

    def end_answer(self) -> None:
        """The answer is over; what follows starts on a line of its own."""
        self._flush_held()
        if not self._ends_line:
            self._out("\n")

    def line(self, text: str = "", *, style: str = "") -> None:
        """A line about the answer."""
        if not self._is_quiet:
            # Lines in a pipe are for other programs, which look for them whole.
            wraps = self._console.is_terminal or "COLUMNS" in os.environ
            for part in _wrapped(without_controls(text), self.width) if wraps else [without_controls(text)]:
                self._console.print(Text(part, style=style), soft_wrap=True)

    def heading(self, title: str, text: str) -> None:
        """What the next answer is to."""
        if self._has_headed:
            self.line()
        self._has_headed = True
        self.line(title, style="bold")
        self.line(f"> {text}", style="dim")
        self.line()

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table, its first column on the left, or a line per row where there is no room for one."""
        if self._is_quiet:
            return
        self.line(title)
        if self.width < TABLE_WIDTH:
            for row in rows:
                cells = (f"{name} {cell}" for name, cell in zip(header[1:], row[1:], strict=True))
                self.line(f"{row[0]}: {', '.join(cells)}")
            return
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for i, name in enumerate(header):
            table.add_column(Text(name), justify="left" if i == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(without_controls(cell)) for cell in row))
        self._console.print(table)

    def json_line(self, line: str) -> None:
        """A line for programs: shown whole and always."""
        self._out(f"{line}\n")

    @property
    def _brackets(self) -> tuple[str, str]:
        return ("⟦", "⟧") if self.can_print_symbols else ("[[", "]]")

    def _styled(self, piece: Piece) -> str:
        text = without_controls(piece.text)
        if not piece.is_accepted:
            return text
        # Written out, because rich would expand tabs. A style left open over a line's end would colour the rest of it.
        code = "4" if self._console.no_color else "4;32"
        return "\n".join(f"\x1b[{code}m{part}\x1b[0m" if part else "" for part in text.split("\n"))

    def _flush_held(self) -> None:
        held, self._held = self._held, []
        self._out(bracketed(held, brackets=self._brackets))

    def _out(self, text: str) -> None:
        if text:
            self._ends_line = text.endswith("\n")
            print(text, end="", flush=True)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; those that go on with a sentence are indented as far as it is, and a little."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, max(width, 20), subsequent_indent=indent, break_on_hyphens=False) or [""]


@contextmanager
def held_notes() -> Iterator[None]:
    """Warnings of the package come as lines on stderr, after what is shown meanwhile."""
    notes: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    logger, handler = logging.getLogger(__package__), Keep(logging.WARNING)
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        for note in notes:
            print(f"note: {' '.join(note.split())}", file=sys.stderr, flush=True)


@contextmanager
def working(message: str) -> Iterator[None]:
    """
    A line on stderr while something takes its time, gone afterwards; nothing outside of a terminal. It stands still: a
    moving sign would take time from what is being timed.
    """
    console = Console(stderr=True)
    is_shown = console.is_terminal and not console.is_dumb_terminal
    if is_shown:
        print(message, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def units_bar(done: Any, name: str) -> Iterator[Any]:
    """
    The units one by one, under a bar on stderr, or with a line there now and then where that is no terminal. Rate and
    time left are those since the start, without what was done before: a unit may take minutes.
    """
    started = told = time.monotonic()

    def pace(completed: int) -> str:
        made, seconds = completed - done.num_before, time.monotonic() - started
        if made <= 0 or not seconds:
            return "-:--:-- left"
        left = timedelta(seconds=round((len(done) - completed) * seconds / made))
        rate = 60 * made / seconds
        return f"{rate:,.{0 if rate > 99 else 1}f} per minute, {left} left"

    class Pace(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(pace(int(task.completed)))

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Pace())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=len(done))
        for number, unit in enumerate(done, 1):
            progress.advance(task)
            if not console.is_terminal and time.monotonic() - told > _LINE_EVERY_S:
                told = time.monotonic()
                console.print(f"{name}: {number:,} of {len(done):,}, {pace(number)}", soft_wrap=True)
            yield unit


def progress_bar(items: Sequence[Any], name: str) -> Iterator[Any]:
    """The items one by one, under a bar on stderr where that is a terminal."""
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield from progress.track(items)

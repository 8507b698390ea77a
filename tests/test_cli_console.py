"""What reaches standard output on terminals and in pipes."""

import io
import logging
import re
import sys

import pytest

from blockpilot_hf import cli_console
from blockpilot_hf.cli_console import Marks, Screen, held_notes, progress_bar, working
from blockpilot_hf.display import Piece

PIECES = [Piece("The", False), Piece(" cat", True), Piece("\n\tsat", True), Piece(".", False)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Ascii(io.StringIO):
    encoding = "ascii"


@pytest.fixture
def shown(monkeypatch):
    """`shown(out, use, **environment)`: what `use(screen)` leaves on `out`."""

    def shown(out, use, *, marks=Marks.AUTO, is_quiet=False, **environment):
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", out)
        screen = Screen(marks, is_quiet=is_quiet)
        use(screen)
        return out.getvalue()

    return shown


def answer(screen):
    for piece in PIECES:
        screen.write([piece])
    screen.end_answer()


def test_an_answer_in_a_pipe_is_untouched(shown):
    assert shown(io.StringIO(), answer) == "The cat\n\tsat.\n"


def test_a_terminal_underlines_accepted_tokens_in_green(shown):
    assert shown(Terminal(), answer) == "The\x1b[4;32m cat\x1b[0m\n\x1b[4;32m\tsat\x1b[0m.\n"


def test_no_color_keeps_the_underline(shown):
    assert shown(Terminal(), answer, NO_COLOR="1") == "The\x1b[4m cat\x1b[0m\n\x1b[4m\tsat\x1b[0m.\n"


def test_a_dumb_terminal_gets_plain_text_and_the_strip(shown):
    def use(screen):
        assert screen.marks == Marks.STRIP
        answer(screen)
        screen.line("x", style="bold")

    assert shown(Terminal(), use, TERM="dumb") == "The cat\n\tsat.\nx\n"


@pytest.mark.parametrize(("out", "brackets"), [(io.StringIO, "⟦⟧"), (Ascii, ("[[", "]]"))])
def test_inline_marks_in_a_pipe_are_brackets_around_whole_runs(shown, out, brackets):
    start, end = brackets
    assert shown(out(), answer, marks=Marks.INLINE) == f"The {start}cat\n\tsat{end}.\n"


def test_brackets_come_as_soon_as_a_run_is_over(shown):
    def use(screen):
        screen.write(PIECES[:1])
        assert sys.stdout.getvalue() == "The"
        screen.write(PIECES[1:2])
        screen.write(PIECES[2:])
        assert sys.stdout.getvalue().endswith("sat⟧.")

    shown(io.StringIO(), use, marks=Marks.INLINE)


def test_no_marks_leave_a_terminal_plain(shown):
    assert shown(Terminal(), answer, marks=Marks.NONE) == "The cat\n\tsat.\n"


def test_control_characters_of_an_answer_do_not_reach_a_terminal(shown):
    def use(screen):
        screen.write([Piece("a\x1b[2Jb\n", False)])
        screen.line("c\x1b[2Jd")

    assert shown(Terminal(), use) == "a\ufffd[2Jb\nc\ufffd[2Jd\n"


def test_an_answer_that_ends_its_line_gets_no_second_line_end(shown):
    def use(screen):
        screen.write([Piece("done\n", False)])
        screen.end_answer()

    assert shown(io.StringIO(), use) == "done\n"


def test_lines_are_whole_in_a_pipe_and_wrapped_between_words_on_a_terminal(shown):
    text = "block size 6 (policy: largest of 6 scores; 1: -0.25, 2: 0.5, [6: 1.25])"

    def use(screen):
        screen.line(text)

    assert shown(io.StringIO(), use) == f"{text}\n"
    for out in (shown(Terminal(), use, COLUMNS="40"), shown(io.StringIO(), use, COLUMNS="40")):
        lines = out.splitlines()
        assert len(lines) == 2 and max(map(len, lines)) <= 40
        assert " ".join(line.strip() for line in lines) == text


ROWS = [["maths [b]", "6", "2.00"], ["a much longer name of a prompt", "4", "1.50"]]


def table(screen):
    screen.table("all", ["prompt", "block size", "tau"], ROWS)


def test_a_table_has_a_line_per_row(shown):
    lines = shown(io.StringIO(), table, COLUMNS="80").splitlines()
    assert lines[0] == "all" and lines[1].split() == ["prompt", "block", "size", "tau"]
    assert lines[3].split() == ["maths", "[b]", "6", "2.00"] and len(lines) == 5
    assert "\x1b" not in "".join(lines)


def test_a_narrow_table_is_told_in_lines(shown):
    out = shown(io.StringIO(), table, COLUMNS="40")
    assert max(map(len, out.splitlines())) <= 40 and "─" not in out
    assert "maths [b]: block size 6, tau 2.00" in out


def test_quiet_leaves_answers_and_json(shown):
    def use(screen):
        screen.heading("a", "b")
        answer(screen)
        screen.line("c")
        table(screen)
        screen.json_line("{}")

    assert shown(io.StringIO(), use, is_quiet=True) == "The cat\n\tsat.\n{}\n"


def test_a_line_for_programs_is_never_wrapped(shown):
    assert shown(Terminal(), lambda screen: screen.json_line("x " * 200), COLUMNS="40") == "x " * 200 + "\n"


def test_notes_wait_for_the_end_and_come_once(capsys, caplog):
    logger = logging.getLogger("blockpilot_hf.somewhere")
    with pytest.raises(KeyError), held_notes():
        logger.warning("mind\nthis")
        logger.info("not this")
        assert capsys.readouterr().err == ""
        raise KeyError
    assert capsys.readouterr().err == "note: mind this\n"
    assert not logging.getLogger("blockpilot_hf").handlers and logging.getLogger("blockpilot_hf").propagate


def test_a_sign_of_work_is_only_for_terminals_and_goes_away(monkeypatch, capsys):
    with working("timing"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    with working("timing"):
        assert err.getvalue() == "timing"
    assert err.getvalue() == "timing\r\x1b[2K"


def test_a_progress_bar_yields_everything_and_is_silent_in_a_pipe(capsys):
    assert list(progress_bar([1, 2, 3], "prompts")) == [1, 2, 3]
    assert capsys.readouterr() == ("", "")


def test_the_bar_tells_rate_and_time_left_of_what_this_run_does(monkeypatch, capsys):
    """Nine of twelve units were there at the start; the tenth took 30 seconds, so two more take a minute."""

    class Done:
        num_before = 9

        def __len__(self):
            return 12

        def __iter__(self):
            yield from range(12)

    now = [0.0]
    monkeypatch.setattr(cli_console.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    bar = cli_console.units_bar(Done(), "batches")
    for _ in range(9):
        next(bar)
    now[0] = 30.0
    next(bar)
    bar.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "batches" in shown and "10/12" in shown and "2.0 per minute, 0:01:00 left" in shown


def test_without_a_terminal_long_units_are_told_in_lines(monkeypatch, capsys):
    class Done(list):
        num_before = 0

    now = [0.0]
    monkeypatch.setattr(cli_console.time, "monotonic", lambda: now[0])
    for _ in cli_console.units_bar(Done([0, 1, 2, 3]), "batches"):
        now[0] += 40.0
    assert capsys.readouterr().err.splitlines() == [
        "batches: 3 of 4, 2.2 per minute, 0:00:27 left",
    ]

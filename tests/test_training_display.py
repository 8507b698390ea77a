import io
import itertools
import re

import pytest
from rich.console import Console

from blockpilot_hf import training_display
from blockpilot_hf.training_display import TrainingDisplay

GROUPS = {
    "all": {"acceptance_length": 1.5, "num_prompts": 30},
    "code": {"acceptance_length": 2.0, "num_prompts": 10},
    "maths": {"acceptance_length": 1.25, "num_prompts": 20},
}


@pytest.fixture(autouse=True)
def _a_clock_of_half_seconds(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(training_display.time, "monotonic", lambda: next(ticks) / 2)


def shown(first, last, num_steps, *, is_terminal=False, width=80):
    """What is printed over steps `first + 1` to `last`, the loss being the number of the step."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=width, highlight=False, color_system=None)
    with TrainingDisplay(console, first, num_steps) as display:
        for step in range(first + 1, last + 1):
            display.step(step, float(step), 1e-3)
    return out.getvalue()


def test_a_pipe_gets_a_line_now_and_then():
    lines = shown(0, 300, 300).splitlines()
    assert [line.split(",")[0] for line in lines] == [f"step {n} of 300" for n in (20, 100, 200, 300)]
    # The mean of the last hundred losses; half a second a step.
    assert lines[2] == "step 200 of 300, loss 150.500, learning rate 1.00e-03, 2.00 steps/s, 0:00:50 left"


def test_the_first_line_comes_soon_and_the_rate_only_when_it_means_something():
    lines = shown(1190, 1230, 5000).splitlines()
    assert "left" not in lines[0] and lines[0].startswith("step 1200")
    assert lines[1].startswith("step 1210 of 5000, loss 1200.500") and lines[1].endswith("0:31:35 left")


def test_a_slow_run_is_told_in_seconds_a_step(monkeypatch):
    ticks = itertools.count(step=2.5)
    monkeypatch.setattr(training_display.time, "monotonic", lambda: next(ticks))
    assert "2.50 s/step, 4:03:20 left" in shown(0, 20, 5860)


def test_what_is_no_step_does_not_count_into_the_rate(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(training_display.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, width=80), 0, 1000) as display:
        for step in range(1, 101):
            now[0] += 0.5
            display.step(step, 1.0, 1e-3)
            if step == 50:
                now[0] += 600  # a validation
                display.acceptance("so far", GROUPS)
    assert "2.00 steps/s" in out.getvalue().splitlines()[-1]


def test_a_terminal_gets_a_bar_that_goes_on_where_the_run_stood():
    out = shown(40, 70, 100, is_terminal=True)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert "70/100" in text and "loss 55.50, 2.00 steps/s, 0:00:15 left" in text
    assert "learning rate" not in text


def test_in_a_narrow_terminal_the_numbers_stay_readable():
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(40, 70, 5000, is_terminal=True, width=40))
    assert "70/5000 loss 55.50, 0:41:05 left" in out and "…" not in out


@pytest.mark.parametrize("width", [40, 80])
def test_the_table_has_every_category_with_its_number_of_prompts_and_all_last(width):
    out = io.StringIO()
    display = TrainingDisplay(Console(file=out, width=width, highlight=False), 0, 10)
    display.acceptance("tau so far", GROUPS)
    rows = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    assert rows[0] == ["tau", "so", "far"]
    assert [row for row in rows if len(row) == 3][1:] == [
        ["category", "tau", "prompts"],
        ["code", "2.000", "10"],
        ["maths", "1.250", "20"],
        ["all", "1.500", "30"],
    ]
    assert max(map(len, out.getvalue().splitlines())) <= width and "\x1b" not in out.getvalue()


def test_texts_have_a_column_where_a_prompt_has_several():
    def heads_and_last(groups):
        out = io.StringIO()
        TrainingDisplay(Console(file=out, width=80, highlight=False), 0, 10).acceptance("tau so far", groups)
        rows = [line.split() for line in out.getvalue().splitlines() if line.strip()]
        return rows[1], rows[-1]

    one = {"all": {"acceptance_length": 1.5, "num_prompts": 30, "num_texts": 30}}
    assert heads_and_last(one) == (["category", "tau", "prompts"], ["all", "1.500", "30"])
    two = {"code": {"acceptance_length": 2.0, "num_prompts": 9, "num_texts": 9}}
    two["all"] = {"acceptance_length": 1.5, "num_prompts": 30, "num_texts": 61}
    assert heads_and_last(two) == (["category", "tau", "prompts", "texts"], ["all", "1.500", "30", "61"])


def test_all_by_temperature_stands_below_all():
    out = io.StringIO()
    more = {f"all, temperature {t}": {"acceptance_length": 1.4, "num_prompts": 15} for t in ("1", "0.7")}
    TrainingDisplay(Console(file=out, width=80, highlight=False), 0, 10).acceptance("tau", more | GROUPS)
    names = [line.split("  ")[0].strip() for line in out.getvalue().splitlines() if "." in line]
    assert names == ["code", "maths", "all", "all, temperature 0.7", "all, temperature 1"]


def test_a_long_line_stays_whole_in_a_pipe():
    out = io.StringIO()
    TrainingDisplay(Console(file=out, width=40, highlight=False), 0, 10).line("x" * 100)
    assert out.getvalue() == "x" * 100 + "\n"

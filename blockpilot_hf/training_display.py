"""What a training run says while it goes on: a bar on a terminal, now and then a line into a pipe."""

import time
from collections import deque
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from .display import counted
from .drafter_estimate import DiskEstimate, RunEstimate

_LINE_EVERY = 100  # steps
_FIRST_LINE = 20
_BAR_WIDTH = 60  # columns; in fewer the numbers alone are told
_MEAN_OVER = 100  # a loss alone says little, texts differ too much


class TrainingDisplay:
    """
    Use as a context while steps are taken.

    Args:
        console (`Console`): Where to; a terminal gets a bar.
        step (`int`): Steps that are done already.
        num_steps (`int`): Steps of the whole run.
    """

    def __init__(self, console: Console, step: int, num_steps: int):
        self._console, self._num_steps, self._first = console, num_steps, step
        self._losses: deque[float] = deque(maxlen=_MEAN_OVER)
        self._seconds: deque[float] = deque(maxlen=_MEAN_OVER)
        self._before = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            bar = (TextColumn("step"), BarColumn(bar_width=None)) if console.width >= _BAR_WIDTH else ()
            columns = (*bar, MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=num_steps, completed=step, facts="")

    def __enter__(self) -> "TrainingDisplay":
        if self._bar is not None:
            self._bar.start()
        self._before = time.monotonic()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, loss: float, learning_rate: float) -> None:
        """One more step is done."""
        now = time.monotonic()
        self._losses.append(loss)
        self._seconds.append(now - self._before)
        self._before = now
        since, is_last = step - self._first, step == self._num_steps
        loss = sum(self._losses) / len(self._losses)
        # The first steps are not typical of the others.
        pace = self._pace(step) if since >= _FIRST_LINE else []
        if self._bar is not None:
            shown = pace if self._console.width >= _BAR_WIDTH else pace[-1:]
            self._bar.update(self._task, completed=step, facts=", ".join([f"loss {loss:.2f}", *shown]))
        elif step % _LINE_EVERY == 0 or since == _FIRST_LINE or is_last:
            facts = [f"step {step} of {self._num_steps}", f"loss {loss:.3f}", f"learning rate {learning_rate:.2e}"]
            self.line(", ".join([*facts, *pace]))

    def resume_clock(self) -> None:
        """What happened since the last step was no step."""
        self._before = time.monotonic()

    def line(self, text: str) -> None:
        """A line, above the bar where there is one."""
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def acceptance(self, title: str, groups: dict[str, Any]) -> None:
        """A table of acceptance lengths as `acceptance_by_group` gives them."""
        # Not as the table's own title, which wraps at the table's width.
        self.line(title)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("category", overflow="fold")
        table.add_column("tau", justify="right")
        table.add_column("prompts", justify="right")
        # Records of earlier versions know one number.
        num_texts = {name: group.get("num_texts", group["num_prompts"]) for name, group in groups.items()}
        has_more = any(num_texts[name] != group["num_prompts"] for name, group in groups.items())
        if has_more:
            table.add_column("texts", justify="right")
        # All of them comes last, and then all by temperature.
        for name in sorted(groups, key=lambda name: (name.startswith("all, "), name == "all", name)):
            group = groups[name]
            counts = [group["num_prompts"], *([num_texts[name]] if has_more else [])]
            table.add_row(name, f"{group['acceptance_length']:.3f}", *map(str, counts))
        self._console.print(table)
        self.resume_clock()

    def _pace(self, step: int) -> list[str]:
        """Rate and time left."""
        per_step = sum(self._seconds) / len(self._seconds)
        rate = f"{1 / per_step:.2f} steps/s" if per_step < 1 else f"{per_step:.2f} s/step"
        return [rate, f"{clock((self._num_steps - step) * per_step)} left"]


def disk_line(disk: DiskEstimate | None) -> str:
    """What becomes of the target's states."""
    if disk is None:
        return "target's states: computed at every visit"
    more, free = disk.needed_bytes / 1e9, disk.free_bytes / 1e9
    return f"target's states: kept in {disk.folder}, {more:.2f} GB more ({free:.1f} GB are free)"


def estimate_lines(estimate: RunEstimate) -> list[str]:
    """What the run will take."""
    parts = {**estimate.present_bytes, **estimate.coming_bytes}
    needed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    states = (
        f", {_brief(estimate.states_s)} more for each text whose states are not kept" if estimate.num_passes else ""
    )
    return [
        f"memory: about {sum(parts.values()) / 1e9:.2f} GB ({needed}; {estimate.available_bytes / 1e9:.1f} GB are "
        "available)",
        f"time: about {clock(estimate.total_s)} for {counted(estimate.num_steps, 'step')} "
        f"({_brief(estimate.step_s)} a step{states}), validations apart",
    ]


def _brief(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


def clock(seconds: float) -> str:
    """`h:mm:ss`."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


__all__ = ["TrainingDisplay", "clock", "disk_line", "estimate_lines"]

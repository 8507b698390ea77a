"""A picture of a training run, drawn from its log: loss, acceptance length, learning rate and pace."""

import io
import itertools
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .drafter_checkpoint import TrainingLog
from .training_display import clock
from .units import require_extra

_SMOOTHED_OVER = 100  # steps; a loss alone says little, texts differ too much
# Folders of a run that appear, and are replaced, as a whole.
_REPLACED = ("drafter", "checkpoint")


def check_plot(path: Path, output_dir: Path) -> None:
    """
    Args:
        output_dir (`Path`): Of the run, which makes the folders in it that are missing.

    Raises:
        `ValueError`: if it is not named as a picture, or there is no folder for it, or none where it would stay.
        `ImportError`: if matplotlib is not installed.
    """
    if path.suffix != ".png":
        raise ValueError(f"`--plot` writes a PNG picture, so its name must end in .png, got {str(path)!r}.")
    folder, output_dir = path.resolve().parent, output_dir.resolve()
    for name in _REPLACED:
        if folder.is_relative_to(output_dir / name):
            raise ValueError(
                f"`--plot {path}` is in {output_dir / name}, which training replaces as a whole. Name a file beside "
                f"it, such as {output_dir / path.name}."
            )
    if not (folder.is_dir() or folder.is_relative_to(output_dir)):
        raise ValueError(f"`--plot {path}` is in a folder that does not exist. Make {path.parent} first.")
    require_extra("matplotlib")


def draw_log(log: Path, path: Path, *, title: str = "", final: dict[str, Any] | None = None) -> None:
    """
    Draw `log.jsonl` of a training run as a PNG picture that appears whole.

    Args:
        log (`Path`): The log; lines of steps and of validations.
        path (`Path`): The picture.
        title (`str`, *optional*): Above it.
        final (`dict[str, Any]`, *optional*):
            `step` and `acceptance_length` of the finished run, judged on all that is held out. The log does not have
            it.

    Raises:
        `ValueError`: if the log has no step yet.
        `ImportError`: if matplotlib is not installed.
    """
    entries = TrainingLog(log).up_to()
    # A validation may stand in a line of its own or with its step.
    steps = [entry for entry in entries if "loss" in entry]
    if not steps:
        raise ValueError(f"{log} holds no step, so there is nothing to draw. Train first.")
    require_extra("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # without pyplot there is no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    (of_loss, of_tau), (of_rate, of_pace) = figure.subplots(2, 2, sharex=True)
    at = [entry["step"] for entry in steps]

    losses = [entry["loss"] for entry in steps]
    of_loss.plot(at, losses, color="tab:blue", alpha=0.2, linewidth=0.7)
    of_loss.plot(
        at, smoothed(losses), color="tab:blue", linewidth=1.6, label=f"mean of the last {_SMOOTHED_OVER} steps"
    )
    of_loss.set_ylim(*_without_outliers(losses))
    of_loss.set_title("loss")
    of_loss.legend(frameon=False)

    _draw_tau(of_tau, [entry for entry in entries if "acceptance_length" in entry], final)

    of_rate.plot(at, [entry["learning_rate"] for entry in steps], color="tab:green")
    of_rate.set_title("learning rate")
    of_rate.set_ylim(bottom=0)

    seconds = [steps[0]["seconds"], *(b["seconds"] - a["seconds"] for a, b in itertools.pairwise(steps))]
    of_pace.plot(at, seconds, color="tab:gray", alpha=0.2, linewidth=0.7)
    of_pace.plot(at, smoothed(seconds), color="black", linewidth=1.6)
    of_pace.set_ylim(0, _without_outliers(seconds)[1])
    of_pace.set_title(f"seconds a step ({clock(steps[-1]['seconds'])} in all)")

    for axes in (of_rate, of_pace):
        axes.set_xlabel("step")
    for axes in (of_loss, of_tau, of_rate, of_pace):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    picture = io.BytesIO()
    canvas.print_png(picture)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(picture.getvalue())
    os.replace(beside, path)


def _draw_tau(axes: Any, validations: Sequence[dict[str, Any]], final: dict[str, Any] | None) -> None:
    """
    A line per group, `all` in black; the names beside it say which. The end stands apart: it is the mean over more
    texts.
    """
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for entry in validations:
        for name, group in entry["acceptance_length"].items():
            lines[name].append((entry["step"], group["acceptance_length"]))
    ends = {name: points[-1] for name, points in lines.items()}
    if final is not None:
        ends |= {
            name: (final["step"], group["acceptance_length"]) for name, group in final["acceptance_length"].items()
        }
    for name in sorted(ends, key=lambda name: -ends[name][1]):
        style: dict[str, Any] = {"color": "black", "linewidth": 2} if name == "all" else {"linewidth": 1.3}
        points = lines.get(name, [])
        (line,) = axes.plot(
            [x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name, **style
        )
        if final is not None and name in final["acceptance_length"]:
            axes.plot(
                *zip(*points[-1:], ends[name], strict=True),
                color=line.get_color(),
                linestyle=":",
                marker="D",
                markevery=[len(points[-1:])],
            )
    axes.set_title("acceptance length (tau) at validations")
    if final is not None and ends:
        label = "at the end, on\nall that is held out"
        axes.plot([], [], color="gray", linestyle=":", marker="D", label=label)
    if ends:
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.text(0.5, 0.5, "none yet", transform=axes.transAxes, ha="center", color="gray")


def smoothed(values: Sequence[float], width: int = _SMOOTHED_OVER) -> list[float]:
    """The mean of each value and those before it, `width` in all."""
    total, means = 0.0, []
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        means.append(total / min(i + 1, width))
    return means


def _without_outliers(values: Sequence[float]) -> tuple[float, float]:
    """Limits between which nearly all values lie, so that a few do not flatten the others."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 100], ordered[-1 - len(ordered) // 100]
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


__all__ = ["check_plot", "draw_log", "smoothed"]

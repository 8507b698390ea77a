"""The picture of a scaling record: time per token and memory, against prompt length and against answer length."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .benchmark_methods import PLAIN
from .plot_style import GREY, RED, bare, new_figure, save_figure
from .scaling_display import clock, default_name, described_axis, first_and_last
from .units import require_extra

SCALING_PLOT = "scaling.png"


def draw_scaling(record: Mapping[str, Any], folder: Path, *, prefix: str = "") -> list[Path]:
    """
    As PNG: a column per axis, both scales logarithmic, a line per method.

    Args:
        folder (`Path`): Which is there.
        prefix (`str`, *optional*): What the name of the file starts with.

    Returns:
        `list[Path]`: What was drawn.

    Raises:
        `ImportError`: if matplotlib is not installed.
    """
    require_extra("matplotlib")
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    sweeps, (per_token, _, of) = record["summary"], clock(record)
    rows = (
        (per_token, 1e3, f"ms{of} per token"),
        ("peak_memory_bytes", 1e-6, "peak memory of a call (MB)"),
    )
    figure = new_figure(3.5 * len(sweeps), 5.2)
    panels = figure.subplots(len(rows), len(sweeps), squeeze=False, sharex="col", sharey="row")
    lines: dict[str, Any] = {}
    for (measure, factor, label), of_measure in zip(rows, panels, strict=True):
        for sweep, axes in zip(sweeps, of_measure, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            for name, (colour, marker, width, order) in _styles(record).items():
                points = [
                    (length, value * factor)
                    for length, value in zip(sweep["lengths"], sweep["methods"][name][measure], strict=True)
                    if value  # a logarithm has no place for 0
                ]
                if points:
                    (lines[name],) = axes.plot(
                        *zip(*points, strict=True),
                        color=colour,
                        marker=marker,
                        markersize=4.5,
                        linewidth=width,
                        zorder=order,
                        label=name,
                    )
            if all(value is None for name in record["methods"] for value in sweep["methods"][name][measure]):
                axes.text(0.5, 0.5, "not measured here", transform=axes.transAxes, ha="center", fontsize=9)
            axes.xaxis.set_major_locator(FixedLocator(sweep["lengths"]))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.4g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            bare(axes, grid="both")
            axes.tick_params(labelsize=8.5)
            axes.set_title(first_and_last(sweep, default_name(record), measure), fontsize=9, loc="left")
        of_measure[0].set_ylabel(label, fontsize=9)
    for sweep, axes in zip(sweeps, panels[-1], strict=True):
        axes.set_xlabel(described_axis(sweep), fontsize=9)
    figure.legend(
        list(lines.values()),
        [record["methods"][name]["title"] for name in lines],
        loc="outside upper center",
        ncols=len(lines),
        frameon=False,
        fontsize=9,
    )
    path = folder / f"{prefix}{SCALING_PLOT}"
    save_figure(figure, path)
    return [path]


def _styles(record: Mapping[str, Any]) -> dict[str, tuple[str, str, float, int]]:
    """Colour, marker, width and order by method; our default lies on top."""
    return {
        name: ("black", "s", 1.6, 3)
        if name == PLAIN
        else (RED, "o", 2.2, 4)
        if method["is_default"]
        else (GREY, "D", 1.6, 2)
        for name, method in record["methods"].items()
    }


__all__ = ["SCALING_PLOT", "draw_scaling"]

"""What the pictures of a benchmark share: figures without global state, colours for all eyes, labels apart."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .units import require_extra

# Okabe and Ito's, told apart by all kinds of colour vision.
BLUE, ORANGE, GREEN, PINK, RED, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F"


def new_figure(width: float, height: float) -> Any:
    """
    Args:
        width, height (`float`): In inches, as large as it is printed.

    Raises:
        `ImportError`: if matplotlib is not installed.
    """
    require_extra("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # without pyplot there is no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path, *, dpi: int = 160) -> None:
    """As a PNG picture, under its name only when whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(beside, format="png", dpi=dpi)
    os.replace(beside, path)


def bare(axes: Any, *, grid: str) -> None:
    """No frame where there is no scale, and a faint grid along `grid`, `x` or `y`."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)


def apart(values: Sequence[float], gap: float) -> list[float]:
    """Places for labels as near to `values` as they can be when neighbours keep `gap`."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    # Labels that touch are moved together, about the mean of where they belong.
    clusters: list[list[int]] = []
    places: list[float] = []

    def start(cluster: Sequence[int]) -> float:
        return sum(values[i] for i in cluster) / len(cluster) - gap * (len(cluster) - 1) / 2

    for i in order:
        clusters.append([i])
        while len(clusters) > 1 and start(clusters[-2]) + gap * len(clusters[-2]) > start(clusters[-1]):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    places = [0.0] * len(values)
    for cluster in clusters:
        for n, i in enumerate(cluster):
            places[i] = start(cluster) + gap * n
    return places


__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "PINK", "RED", "SKY", "apart", "bare", "new_figure", "save_figure"]

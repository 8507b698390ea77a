"""Pictures of single prompts of a benchmark: speed against context length, and against how well the drafter does."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .benchmark_reading import PLAIN, calls_by_prompt, default_method, main_results, methods_of, titles
from .evaluation_display import temperature_name
from .evaluation_rules import ALL
from .plot_style import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, apart, bare, new_figure, save_figure

# Prompts that a point of a line is the mean of, at least, and points of a line, at most.
_PER_BIN, _NUM_BINS = 10, 7
_COLOURS = (BLUE, GREEN, PINK, SKY, ORANGE, "#8C6D31")


def draw_context(record: Mapping[str, Any], path: Path) -> None:
    """Times plain against the prompt's length: a dot per prompt, a line through means of neighbours."""
    _draw(
        record,
        path,
        x_of=lambda calls: calls[0]["num_prompt_tokens"],
        speed="total_s",
        x_label="prompt length (tokens)",
        y_label="times plain, whole calls",
        is_log=True,
    )


def draw_quality(record: Mapping[str, Any], path: Path) -> bool:
    """
    Times plain of decoding alone against the acceptance length at the size that the drafter was trained for, with the
    bound: what that size would give if all but the passes of target and drafter were free.

    Returns:
        `bool`: Whether there is a picture; there is none of a run without that size.
    """
    size = training_method(record)
    if size is None:
        return False
    _draw(
        record,
        path,
        x_of=lambda calls: _mean_of(calls, size, "acceptance_length"),
        speed="decode_s",
        x_label=f"acceptance length of the prompt at the training size (tau, {titles(record)[size]})",
        y_label="times plain, decoding alone",
        bound_of=size,
    )
    return True


def training_method(record: Mapping[str, Any]) -> str | None:
    """The fixed size that the drafter was trained for, if it ran at every temperature."""
    name = f"size {record['meta_info']['drafter'].get('training_block_size')}"
    return name if all(name in methods_of(record, result) for result in main_results(record)) else None


def drawn_methods(record: Mapping[str, Any]) -> dict[str, str]:
    """Colours of the methods that are worth a line: all but plain and the other fixed sizes; our default is red."""
    ours, size = default_method(record), training_method(record)
    ran = {name for result in main_results(record) for name in methods_of(record, result)}
    colours = iter(_COLOURS)
    found = {
        name: RED if name == ours else GREY if name == size else next(colours, "black")
        for name, method in record["methods"].items()
        if method["kind"] in ("peer", "ours") or name == size
    }
    # A method keeps its colour whichever others ran, and the default lies on top.
    return {name: found[name] for name in sorted(found, key=lambda name: name == ours) if name in ran}


def _draw(
    record: Mapping[str, Any],
    path: Path,
    *,
    x_of: Callable[[Sequence[Mapping[str, Any]]], float],
    speed: str,
    x_label: str,
    y_label: str,
    is_log: bool = False,
    bound_of: str | None = None,
) -> None:
    """
    Args:
        x_of (`Callable`): From the rows of a prompt, one per repeat, to its place.
        speed (`str`): The seconds of a call that speeds are made of.
        bound_of (`str`, *optional*): The method whose bound is a line through 0.
    """
    colours, results = drawn_methods(record), main_results(record)
    figure = new_figure(5.0 * len(results) + 0.2, 4.3)
    panels = figure.subplots(1, len(results), sharey=True, sharex=True, squeeze=False)[0]
    ends: list[dict[str, tuple[float, float]]] = []
    points: list[np.ndarray] = []
    ours = default_method(record)
    for axes, result in zip(panels, results, strict=True):
        prompts = calls_by_prompt(record, result)
        axes.axhline(1.0, color="black", linewidth=1.0)
        if is_log:
            axes.set_xscale("log")
        ended = {}
        for name, colour in colours.items():
            having = [rows for rows in prompts if all({name, PLAIN} <= set(row["calls"]) for row in rows)]
            if not having:
                continue
            x = np.array([x_of(rows) for rows in having], dtype=float)
            y = np.array([_rate(rows, name, speed) / _rate(rows, PLAIN, speed) for rows in having])
            points.append(np.stack([x, y], axis=-1))
            if name == ours:  # dots of all would hide the lines
                axes.scatter(x, y, s=11, color=colour, alpha=0.35, linewidths=0, label=f"_{name}")
            at, means = binned(x, y)
            axes.plot(
                at, means, color=colour, linewidth=2.8 if name == ours else 1.7, marker="o", markersize=3.5, label=name
            )
            ended[name] = (float(at[-1]), float(means[-1]))
        if bound_of is not None:
            told = result["groups"][ALL]["methods"][bound_of]
            if told["bound"] and told["acceptance_length"]:
                slope = told["bound"]["estimate"] / told["acceptance_length"]["estimate"]
                axes.axline((0, 0), slope=slope, color="black", linestyle="--", linewidth=1.1, label="_bound")
        axes.set_title(f"{temperature_name(result['temperature'])}, {result['num_prompts']} prompts", fontsize=10)
        bare(axes, grid="y")
        ends.append(ended)
    _limit(panels[0], np.concatenate(points), is_log)
    low, high = panels[0].get_ylim()
    for axes, ended, result in zip(panels, ends, results, strict=True):
        ended = {PLAIN: (axes.get_xlim()[1], 1.0), **ended}
        names = {name: titles(record)[name] for name in ended}
        _label(axes, ended, names, {PLAIN: "black", **colours}, 0.056 * (high - low))
        if bound_of is not None and result["groups"][ALL]["methods"][bound_of]["bound"]:
            _label_bound(axes, f"bound of {titles(record)[bound_of]}")
    panels[0].set_ylabel(y_label)
    dots = f"; dots: prompts, {titles(record)[ours]}" if ours in colours else ""
    figure.supxlabel(f"{x_label}\nlines: means of prompts that are neighbours{dots}", fontsize=9.5)
    save_figure(figure, path)


def binned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of neighbours: `(num_prompts,)` each to `(num_bins,)` each, as many prompts in one bin as in another."""
    order = np.argsort(x, kind="stable")
    parts = np.array_split(order, max(1, min(_NUM_BINS, len(order) // _PER_BIN)))
    return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])


def _rate(rows: Sequence[Mapping[str, Any]], name: str, seconds: str) -> float:
    """Tokens per second over all repeats."""
    calls = [row["calls"][name] for row in rows]
    return sum(call["num_new_tokens"] for call in calls) / max(sum(call[seconds] for call in calls), 1e-9)


def _mean_of(rows: Sequence[Mapping[str, Any]], name: str, key: str) -> float:
    values = [row["calls"][name][key] for row in rows if name in row["calls"]]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def _limit(axes: Any, points: np.ndarray, is_log: bool) -> None:
    """All prompts but a few far ones are in sight; `points` is `(num_points, 2)`."""
    points = points[np.isfinite(points).all(1)]
    low, high = np.percentile(points[:, 1], [0.5, 99.7])
    axes.set_ylim(min(low, 1.0) - 0.05 * (high - low), high + 0.1 * (high - low))
    left, right = points[:, 0].min(), points[:, 0].max()
    if is_log:
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        axes.set_xlim(left / 1.15, right * 1.15)
        steps = [factor * 10**power for power in range(7) for factor in (1, 3)]
        axes.xaxis.set_major_locator(FixedLocator(steps))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        margin = 0.03 * (right - left) or 0.1  # of a single prompt
        axes.set_xlim(left - margin, right + margin)


def _label(
    axes: Any, ends: Mapping[str, tuple[float, float]], names: Mapping[str, str], colours: Any, gap: float
) -> None:
    """Names on the right, tied to the ends of their lines."""
    places = apart([y for _, y in ends.values()], gap)
    right = axes.get_xlim()[1]
    for (name, (x, y)), place in zip(ends.items(), places, strict=True):
        # Level as far as the edge, so that no tie crosses a line.
        axes.plot([x, right], [y, y], color=colours[name], linewidth=0.7, alpha=0.6, label="_tie", zorder=1)
        axes.annotate(
            names[name],
            (right, y),
            xytext=(1.05, place),
            textcoords=("axes fraction", "data"),
            color=colours[name],
            fontsize=8.5,
            fontweight="bold" if colours[name] == RED else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": colours[name], "linewidth": 0.7, "alpha": 0.6, "shrinkA": 1, "shrinkB": 0,
                "relpos": (0.0, 0.5),
            },
        )  # fmt: skip


def _label_bound(axes: Any, text: str) -> None:
    """Beside the upper end of the dashed line."""
    line = next(line for line in axes.get_lines() if line.get_label() == "_bound")
    right, high = axes.get_xlim()[1], axes.get_ylim()[1]
    x = min(right, high / line.get_slope())
    axes.annotate(
        text,
        (x, line.get_slope() * x),
        xytext=(-14, -2),
        textcoords="offset points",
        fontsize=8.5,
        ha="right",
        va="top",
    )


__all__ = ["binned", "draw_context", "draw_quality", "drawn_methods", "training_method"]

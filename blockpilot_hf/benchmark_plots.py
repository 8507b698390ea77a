"""The pictures of a benchmark's record: speed by method and group, where the time goes, and what it depends on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .benchmark_prompt_plots import draw_context, draw_quality
from .benchmark_reading import (
    PARTS,
    PLAIN,
    UNSPLIT,
    main_results,
    methods_of,
    peers_first,
    rows_of,
    seconds_per_token,
    titles,
)
from .evaluation_display import number, temperature_name
from .evaluation_rules import ALL, ENOUGH_PROMPTS
from .plot_style import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, bare, new_figure, save_figure
from .units import require_extra

SPEED_PLOT = "speed_by_group.png"
TIME_PLOT = "time_per_token.png"
CONTEXT_PLOT = "speed_by_context.png"
QUALITY_PLOT = "speed_by_tau.png"

_KINDS = {"peer": (BLUE, "s", "others"), "fixed": (GREY, "D", "fixed sizes"), "ours": (GREEN, "o", "ours")}
_DEFAULT = (RED, "o", "our default")
_SHADES = {"prefill": GREY, "policy": PINK, "draft": ORANGE, "verify": BLUE, UNSPLIT: SKY, "other": "black"}
_PART_NAMES = {UNSPLIT: "decoding, not told in parts"}


def check_plots(record: Mapping[str, Any], path: Path) -> None:
    """
    Args:
        path (`Path`): Of the record, for the message.

    Raises:
        `ValueError`: if the record has no single prompts, which pictures are made of.
    """
    if not all(rows_of(record, result) for result in main_results(record)):
        raise ValueError(
            f"{path} has no `per_prompt` of all its results, which pictures are made of. Leave out `--plots`, or name "
            "the whole record."
        )


def draw_benchmark(record: Mapping[str, Any], folder: Path, *, prefix: str = "") -> list[Path]:
    """
    All pictures of a record, as PNG.

    Args:
        folder (`Path`): Which is there.
        prefix (`str`, *optional*): What the names of the files start with.

    Returns:
        `list[Path]`: What was drawn.

    Raises:
        `ImportError`: if matplotlib is not installed.
    """
    paths = [folder / f"{prefix}{name}" for name in (SPEED_PLOT, TIME_PLOT, CONTEXT_PLOT, QUALITY_PLOT)]
    draw_speeds(record, paths[0])
    draw_time(record, paths[1])
    draw_context(record, paths[2])
    return paths if draw_quality(record, paths[3]) else paths[:3]


def draw_speeds(record: Mapping[str, Any], path: Path) -> None:
    """Times plain with intervals: a panel per group and temperature, a row per method, others first, ours last."""
    results = main_results(record)
    groups = list(dict.fromkeys(group for result in results for group in result["groups"]))
    ran = {name for result in results for name in methods_of(record, result)}
    names = [name for name in peers_first(record, list(record["methods"])) if name in ran and name != PLAIN]
    require_extra("matplotlib")
    from matplotlib.ticker import MultipleLocator

    figure = new_figure(1.5 * len(groups) + 1.7, (0.2 * len(names) + 0.75) * len(results) + 0.3)
    panels = figure.subplots(len(results), len(groups), squeeze=False, sharey=True, sharex=True)
    for result, of_result in zip(results, panels, strict=True):
        for axes, group in zip(of_result, groups, strict=True):
            judged = result["groups"].get(group, {"methods": {}, "num_prompts": 0, "is_enough": True})
            axes.axvline(1.0, color="black", linewidth=0.9)
            for place, name in enumerate(names):
                entry = judged["methods"].get(name, {}).get("speedup")
                if entry is None or entry["estimate"] is None:
                    continue
                colour, marker, _ = _style(record, name)
                right = entry["estimate"]
                if entry["low"] is not None and entry["high"] is not None:
                    ends = [[entry["estimate"] - entry["low"]], [entry["high"] - entry["estimate"]]]
                    axes.errorbar([entry["estimate"]], [place], xerr=ends, color=colour, linewidth=1.6)
                    right = entry["high"]
                # Of too few prompts no claim is made: hollow.
                face = colour if judged["is_enough"] else "white"
                axes.plot(
                    entry["estimate"], place, marker, color=colour, markersize=4.5, markerfacecolor=face, label=name
                )
                if record["methods"][name]["is_default"]:
                    axes.annotate(
                        number(entry["estimate"], 2),
                        (right, place),
                        xytext=(5, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8.5,
                        fontweight="bold",
                        color=colour,
                    )
            star = "" if judged["is_enough"] else " *"
            axes.set_title(f"{group} ({judged['num_prompts']}){star}", fontsize=9.5)
            axes.tick_params(axis="y", length=0)
            axes.tick_params(axis="x", labelsize=8.5)
            bare(axes, grid="x")
            axes.spines["left"].set_visible(False)
            if group == ALL:
                axes.set_facecolor("#F4F4F4")
        first = of_result[0]
        first.set_yticks(range(len(names)), [titles(record)[name] for name in names], fontsize=8.5)
        for label, name in zip(first.get_yticklabels(), names, strict=True):
            label.set_color(_style(record, name)[0])
            label.set_fontweight("bold" if record["methods"][name]["is_default"] else "normal")
        first.set_ylabel(temperature_name(result["temperature"]), fontsize=10, fontweight="bold")
    panels[0][0].invert_yaxis()
    left, right = panels[0][0].get_xlim()
    panels[0][0].set_xlim(left, right + 0.2 * (right - left))  # for the figures of the default
    panels[0][0].xaxis.set_major_locator(MultipleLocator(0.5 if right < 3 else 1.0))
    is_small = any(not group["is_enough"] for result in results for group in result["groups"].values())
    small = f"; * hollow: fewer than {ENOUGH_PROMPTS} prompts" if is_small else ""
    figure.supxlabel(f"times plain generate, whole calls: mean over prompts, 95 % interval{small}", fontsize=9.5)
    save_figure(figure, path)


def draw_time(record: Mapping[str, Any], path: Path) -> None:
    """Milliseconds per token as stacked bars, a panel per temperature, a bar per method."""
    results = main_results(record)
    ran = {name for result in results for name in methods_of(record, result)}
    names = [name for name in peers_first(record, list(record["methods"])) if name in ran]
    figure = new_figure(4.6 * len(results) + 1.6, 0.29 * len(names) + 1.3)
    panels = figure.subplots(1, len(results), squeeze=False, sharey=True, sharex=True)[0]
    seen: dict[str, Any] = {}
    longest = 0.0
    for axes, result in zip(panels, results, strict=True):
        for place, name in enumerate(names):
            if name not in methods_of(record, result):
                continue
            parts, left = seconds_per_token(record, result, name), 0.0
            for part in (*PARTS[:-1], UNSPLIT, PARTS[-1]):
                width = 1000 * (parts[part] or 0.0)
                if width:
                    hatch = {"hatch": "////", "edgecolor": "white", "linewidth": 0.0} if part == UNSPLIT else {}
                    (seen[part],) = axes.barh(place, width, 0.72, left=left, color=_SHADES[part], **hatch)
                    left += width
            text = f"{left:.1f}" if parts[UNSPLIT] is not None else f"{left:.1f} and decoding"
            axes.annotate(text, (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
            longest = max(longest, left)
        axes.set_title(f"{temperature_name(result['temperature'])}, {result['num_prompts']} prompts", fontsize=10)
        bare(axes, grid="x")
        axes.tick_params(axis="y", length=0)
    panels[0].set_xlim(0, 1.12 * longest)
    panels[0].set_yticks(range(len(names)), [titles(record)[name] for name in names], fontsize=9)
    for label, name in zip(panels[0].get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if record["methods"][name]["is_default"] else "normal")
    panels[0].invert_yaxis()
    figure.supxlabel("milliseconds per new token", fontsize=9.5)
    shown = [part for part in _SHADES if part in seen]
    figure.legend(
        [seen[part] for part in shown],
        [_PART_NAMES.get(part, part) for part in shown],
        loc="outside upper center",
        ncols=len(shown),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.4,
    )
    save_figure(figure, path)


def _style(record: Mapping[str, Any], name: str) -> tuple[str, str, str]:
    method = record["methods"][name]
    return _DEFAULT if method["is_default"] else _KINDS[method["kind"]]


__all__ = [
    "CONTEXT_PLOT",
    "QUALITY_PLOT",
    "SPEED_PLOT",
    "TIME_PLOT",
    "check_plots",
    "draw_benchmark",
    "draw_speeds",
    "draw_time",
]

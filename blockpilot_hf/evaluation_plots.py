"""Two pictures of an evaluation: acceptance length against block size, and the sizes that policies chose, by group."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .evaluation_rules import ALL
from .plot_style import new_figure, save_figure
from .units import require_extra

TAU_PLOT = "tau_by_block_size.png"
CHOICES_PLOT = "chosen_sizes.png"

# Okabe and Ito's, told apart by all kinds of colour vision; markers differ too.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F")
_MARKERS = "osD^vPX"


def draw_tau(results: Sequence[Mapping[str, Any]], training_block_size: int, path: Path) -> None:
    """
    Acceptance length against block size, a line per group and a panel per temperature, as a PNG picture.

    Args:
        results (`Sequence[Mapping]`): As [`evaluate`] gives them.
        training_block_size (`int`): Marked: what the drafter was trained for.
        path (`Path`): The picture; it appears whole.

    Raises:
        `ImportError`: if matplotlib is not installed.
    """
    figure = new_figure(5.4 * len(results) + 2, 4.4)
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    # One colour per group in all panels, whichever of them it is in.
    groups = list(dict.fromkeys(name for result in results for name in result["tau_by_block_size"] if name != ALL))
    # And one order of the legends: that of the lines at the right edge of the first panel that has them.
    heights: dict[str, float] = {}
    for result in results:
        for name, by_size in result["tau_by_block_size"].items():
            heights.setdefault(name, list(by_size.values())[-1]["estimate"])
    ranked = sorted(heights, key=lambda name: -heights[name])
    for axes, result in zip(panels, results, strict=True):
        counts = result["comparisons"][0]["groups"]
        for name, by_size in result["tau_by_block_size"].items():
            sizes = [int(size) for size in by_size]
            taus = [entry["estimate"] for entry in by_size.values()]
            i = groups.index(name) if name != ALL else -1
            style: dict[str, Any] = {"color": "black", "linewidth": 2.4, "zorder": 3}
            if name != ALL:
                style = {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)], "markersize": 5}
                style["linestyle"] = "-" if counts[name]["is_enough"] else ":"
            axes.plot(sizes, taus, label=f"{name} ({counts[name]['num_prompts']})", **style)
            ends = [[entry[end] for entry in by_size.values()] for end in ("low", "high")]
            if name == ALL and None not in (*ends[0], *ends[1]):
                axes.fill_between(sizes, *ends, color="black", alpha=0.15, linewidth=0)
        axes.axvline(training_block_size, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(
            " trained for", (training_block_size, 0.02), xycoords=("data", "axes fraction"), fontsize=8, va="bottom"
        )
        axes.set_title(_panel_title(result))
        axes.set_xlabel("block size (1 is plain decoding)")
        axes.set_xticks([int(size) for size in result["tau_by_block_size"][ALL]])
        axes.grid(alpha=0.3, linewidth=0.6)
        handles = dict(zip(result["tau_by_block_size"], axes.get_legend_handles_labels()[0], strict=True))
        axes.legend(
            handles=[handles[name] for name in ranked if name in handles],
            title="group (prompts)",
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            fontsize=9,
        )
    panels[0].set_ylabel("acceptance length (tokens per step)")
    for axes in panels[1:]:
        axes.tick_params(labelleft=True)
    is_small = any(not g["is_enough"] for r in results for g in r["comparisons"][0]["groups"].values())
    dotted = "; dotted: too few prompts for a claim" if is_small else ""
    figure.supxlabel(f"mean over prompts; band: 95 % interval of all{dotted}", fontsize=8)
    save_figure(figure, path, dpi=130)


def draw_choices(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """
    Chosen sizes as stacked bars by group, a row of panels per policy and a column per temperature, as a PNG picture.

    Raises:
        `ImportError`: if matplotlib is not installed.
        `ValueError`: if nothing was chosen because no policy was judged.
    """
    policies = {name: i for i, one in enumerate(results[0]["comparisons"]) for name in one["policies"]}
    if not policies:
        raise ValueError("No policy was judged, so there are no chosen sizes to draw. Name one with `--policy`.")
    require_extra("matplotlib")
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    compared = results[0]["comparisons"]
    sizes = sorted({size for i in policies.values() for size in compared[i]["block_sizes"]})
    # Sizes have an order, and so have these colours, in lightness too.
    shades = colormaps["cividis"]([i / max(1, len(sizes) - 1) for i in range(len(sizes))])
    num_groups = max(len(result["tau_by_block_size"]) for result in results)
    figure = new_figure(5.0 * len(results) + 1.6, (0.34 * num_groups + 1.1) * len(policies) + 0.4)
    panels = figure.subplots(len(policies), len(results), squeeze=False, sharex=True)
    for (policy, i), of_policy in zip(policies.items(), panels, strict=True):
        for axes, result in zip(of_policy, results, strict=True):
            groups = result["comparisons"][i]["groups"]
            for place, group in enumerate(groups.values()):
                left, total = 0.0, group["num_texts"]
                for size, count in group["choices"][policy].items():
                    at = sizes.index(int(size))
                    share = 100 * count / total
                    axes.barh(place, share, left=left, color=shades[at], edgecolor="white", linewidth=0.6)
                    if share >= 7:
                        # Dark colours carry light letters.
                        ink = "white" if at < len(sizes) / 2 else "black"
                        axes.text(left + share / 2, place, size, ha="center", va="center", fontsize=8, color=ink)
                    left += share
            names = [
                f"{name} ({group['num_prompts']}){'' if group['is_enough'] else ' *'}" for name, group in groups.items()
            ]
            axes.set_yticks(range(len(groups)), names, fontsize=9)
            axes.invert_yaxis()
            axes.set_xlim(0, 100)
            axes.set_title(f"{policy}\n{_panel_title(result)}", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("share of the texts, %")
    is_small = any(not g["is_enough"] for r in results for g in r["comparisons"][0]["groups"].values())
    if is_small:
        figure.supxlabel("* too few prompts for a claim", fontsize=8)
    figure.legend(
        handles=[Patch(color=shade, label=str(size)) for size, shade in zip(sizes, shades, strict=True)],
        title="block size",
        loc="outside right center",
        frameon=False,
    )
    save_figure(figure, path, dpi=130)


def _panel_title(result: Mapping[str, Any]) -> str:
    name = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}"
    return f"{name}, {result['num_prompts']} prompts"


__all__ = ["CHOICES_PLOT", "TAU_PLOT", "draw_choices", "draw_tau"]

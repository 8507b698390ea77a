"""Pictures of a benchmark show what the record says."""

import copy

import numpy as np
import pytest
from benchmark_records import COUNTS, make_record
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.text import Text

from blockpilot_hf import plot_style
from blockpilot_hf.benchmark_plots import check_plots, draw_benchmark, draw_speeds, draw_time
from blockpilot_hf.benchmark_prompt_plots import binned, draw_context, draw_quality, drawn_methods
from blockpilot_hf.evaluation_rules import ALL
from blockpilot_hf.plot_style import apart

SMALL = {"maths": 20, "code": 20, "translation": 5}


@pytest.fixture(scope="module")
def made():
    return make_record(counts=SMALL)


@pytest.fixture
def record(made):
    return copy.deepcopy(made)


@pytest.fixture
def drawn(monkeypatch):
    """The figures as they are saved."""
    figures, save = [], Figure.savefig

    def keep(figure, *arguments, **kwargs):
        figures.append(figure)
        save(figure, *arguments, **kwargs | {"dpi": 40})

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def of_label(axes, label):
    (line,) = (line for line in axes.get_lines() if line.get_label() == label)
    return line


def test_all_pictures_are_png_files(record, drawn, tmp_path):
    paths = draw_benchmark(record, tmp_path, prefix="float32-")
    assert sorted(path.name for path in paths) == sorted(path.name for path in tmp_path.iterdir())
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.name.startswith("float32-") for path in paths)
    assert len(paths) == len(drawn) == 4


def test_speeds_have_a_panel_per_group_and_a_dot_per_method(record, drawn, tmp_path):
    draw_speeds(record, tmp_path / "speeds.png")
    panels = np.array(drawn[0].axes).reshape(2, len(SMALL) + 1)
    for of_result, result in zip(panels, record["results"], strict=True):
        for axes, (group, judged) in zip(of_result, result["groups"].items(), strict=True):
            star = "" if judged["is_enough"] else " *"
            assert axes.get_title() == f"{group} ({judged['num_prompts']}){star}"
            for name, told in judged["methods"].items():
                if name != "plain":
                    dot = of_label(axes, name)
                    assert list(dot.get_xdata()) == [told["speedup"]["estimate"]]
                    assert (dot.get_markerfacecolor() == "white") == (not judged["is_enough"])
            bars = {tuple(bar.get_segments()[0][:, 0]) for bar in axes.collections}
            known = {(one["speedup"]["low"], one["speedup"]["high"]) for one in judged["methods"].values()}
            assert np.allclose(sorted(bars), sorted(known - {(1.0, 1.0)}))
    names = [label.get_text() for label in panels[0, 0].get_yticklabels()]
    assert names[:2] == ["transformers DFlash", "prompt lookup"]
    assert names[-1] == "in flight"
    assert "dflash 0.1.0" not in names and "plain generate" not in names


def test_bars_add_up_to_the_time_of_a_token(record, drawn, tmp_path):
    draw_time(record, tmp_path / "time.png")
    names = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    for axes, result in zip(drawn[0].axes, record["results"], strict=True):
        ends = {}
        for bar in axes.patches:
            place = round(bar.get_y() + bar.get_height() / 2)
            ends[place] = ends.get(place, 0.0) + bar.get_width()
        for name in result["groups"][ALL]["methods"]:
            rows = [r["calls"][name] for r in record["per_prompt"] if r["temperature"] == result["temperature"]]
            expected = 1000 * sum(call["total_s"] for call in rows) / sum(call["num_new_tokens"] for call in rows)
            assert ends[names.index(record["methods"][name]["title"])] == pytest.approx(expected)
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == ["prefill", "policy", "draft", "verify", "decoding, not told in parts", "other"]


def test_dots_are_the_prompts_and_lines_their_means(record, drawn, tmp_path):
    draw_context(record, tmp_path / "context.png")
    for axes, result in zip(drawn[0].axes, record["results"], strict=True):
        rows = [row for row in record["per_prompt"] if row["temperature"] == result["temperature"]]
        points = {
            (row["num_prompt_tokens"], row["calls"]["plain"]["total_s"] / row["calls"]["flight"]["total_s"])
            for row in rows
        }
        (dots,) = axes.collections
        assert np.allclose(sorted(map(tuple, dots.get_offsets())), sorted(points))
        x, y = (np.array(one) for one in zip(*sorted(points), strict=True))
        line = of_label(axes, "flight")
        assert np.allclose(line.get_ydata(), binned(x, y)[1])
        assert same_color(line.get_color(), dots.get_facecolor()[0][:3])
        # Every line has its name beside it, in its colour.
        written = {text.get_text(): text.get_color() for text in axes.texts}
        colours = {record["methods"][name]["title"]: colour for name, colour in drawn_methods(record).items()}
        assert written == {"plain generate": "black", **colours}


def test_speed_against_quality_has_the_bound_as_a_line(record, drawn, tmp_path):
    told = record["results"][0]["groups"][ALL]["methods"]["size 8"]
    told["bound"]["estimate"], told["acceptance_length"]["estimate"] = 1.8, 3.0
    assert draw_quality(record, tmp_path / "quality.png")
    axes = drawn[0].axes[0]
    assert of_label(axes, "_bound").get_slope() == pytest.approx(0.6)
    rows = [row for row in record["per_prompt"] if row["temperature"] == 0]
    points = [
        (
            row["calls"]["size 8"]["acceptance_length"],
            row["calls"]["plain"]["decode_s"] / row["calls"]["flight"]["decode_s"],
        )
        for row in rows
    ]
    assert np.allclose(sorted(map(tuple, axes.collections[0].get_offsets())), sorted(points))
    assert "bound of block size 8" in [text.get_text() for text in axes.texts]


def test_repeats_of_a_prompt_are_one_dot(record, drawn, tmp_path):
    again = copy.deepcopy(record["per_prompt"])
    for row in again:
        row["repeat"] = 1
        row["calls"]["flight"]["total_s"] *= 3
    record["per_prompt"] += again
    draw_context(record, tmp_path / "context.png")
    (dots,) = drawn[0].axes[0].collections
    assert len(dots.get_offsets()) == sum(SMALL.values())
    first = record["per_prompt"][0]["calls"]
    expected = first["plain"]["total_s"] / first["flight"]["total_s"] / 2
    assert any(np.isclose(y, expected) for _, y in dots.get_offsets())


def test_colours_are_distinct_and_the_default_is_drawn_last(record):
    colours = drawn_methods(record)
    assert list(colours) == ["stock_dflash", "prompt_lookup", "size 8", "paper", "seconds", "flight"]
    assert len(set(colours.values())) == len(colours)
    assert colours["flight"] == plot_style.RED
    everybody = drawn_methods(make_record(counts={"maths": 2}, not_run=()))
    assert {name: everybody[name] for name in colours} == colours
    assert len(set(everybody.values())) == len(everybody) == 7


@pytest.mark.filterwarnings("error")
def test_a_single_prompt_can_be_drawn(drawn, tmp_path):
    assert len(draw_benchmark(make_record(counts={"maths": 1}, temperatures=(0.0,)), tmp_path)) == 4


def test_without_the_training_size_there_is_no_picture_of_quality(record, drawn, tmp_path):
    for result in record["results"]:
        for group in result["groups"].values():
            del group["methods"]["size 8"]
    assert len(draw_benchmark(record, tmp_path)) == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_a_record_without_prompts_is_refused(record, tmp_path):
    check_plots(record, tmp_path / "r.json")
    record["per_prompt"] = [row for row in record["per_prompt"] if row["temperature"] == 0]
    with pytest.raises(ValueError, match=r"r\.json has no `per_prompt` of all its results.*Leave out `--plots`"):
        check_plots(record, tmp_path / "r.json")


def test_names_keep_apart_and_stay_near():
    values = [1.0, 1.01, 1.02, 2.0, 0.0]
    places = apart(values, 0.1)
    order = sorted(range(5), key=lambda i: values[i])
    assert [places[i] for i in order] == sorted(places)
    assert min(np.diff(sorted(places))) >= 0.1 - 1e-9
    assert (places[3], places[4]) == (2.0, 0.0)
    assert np.mean(places[:3]) == pytest.approx(1.01)
    assert apart([], 0.1) == []


def test_drawn_names_do_not_overlap(drawn, tmp_path):
    """With all groups and temperatures, as it is printed."""
    draw_context(make_record(counts=COUNTS), tmp_path / "context.png")
    figure = drawn[0]
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        boxes = [Text.get_window_extent(text, renderer) for text in axes.texts]  # without the ties
        assert len(boxes) > 5
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[i + 1 :])
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_bins_hold_as_many_prompts_each():
    x = np.arange(40.0)[::-1]
    at, means = binned(x, 2 * x)
    assert list(at) == [4.5, 14.5, 24.5, 34.5]
    assert list(means) == [9.0, 29.0, 49.0, 69.0]
    assert len(binned(x[:3], x[:3])[0]) == 1


def test_what_is_not_finished_is_not_under_the_name(record, tmp_path, monkeypatch):
    (tmp_path / "time.png").write_bytes(b"before")

    def interrupted(figure, path, **kwargs):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draw_time(record, tmp_path / "time.png")
    assert (tmp_path / "time.png").read_bytes() == b"before"


def test_a_missing_extra_is_named(record, tmp_path, monkeypatch):
    def missing(module):
        raise ImportError(f"{module}: pip install 'blockpilot-hf[train]'")

    monkeypatch.setattr(plot_style, "require_extra", missing)
    with pytest.raises(ImportError, match="matplotlib: pip install"):
        draw_time(record, tmp_path / "time.png")

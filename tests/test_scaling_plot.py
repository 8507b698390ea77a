"""The picture of a scaling record: four panels, and in them the figures of the summary."""

import numpy as np
import pytest
from scaling_records import METHODS, make_scaling_record

pytest.importorskip("matplotlib")

from blockpilot_hf import scaling_plot
from blockpilot_hf.plot_style import new_figure
from blockpilot_hf.scaling_plot import draw_scaling


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were made."""
    figures = []

    def make(width, height):
        figures.append(new_figure(width, height))
        return figures[-1]

    monkeypatch.setattr(scaling_plot, "new_figure", make)
    return figures


def lines_of(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_four_panels_hold_the_figures_of_the_summary(drawn, tmp_path):
    record = make_scaling_record()
    (path,) = draw_scaling(record, tmp_path, prefix="a-")
    assert path == tmp_path / "a-scaling.png" and path.read_bytes().startswith(b"\x89PNG")
    panels = np.array(drawn[0].axes).reshape(2, 2)
    for (measure, factor), of_measure in zip(
        (("time_per_token_s", 1e3), ("peak_memory_bytes", 1e-6)), panels, strict=True
    ):
        for axes, sweep in zip(of_measure, record["summary"], strict=True):
            assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
            found = lines_of(axes)
            assert set(found) == set(METHODS)
            for name, (x, y) in found.items():
                assert x == sweep["lengths"]
                assert np.allclose(y, [value * factor for value in sweep["methods"][name][measure]])
            told = sweep["growth"]["flight"][measure]
            assert f"{told['shortest']:.2f} to {told['longest']:.2f}" in axes.get_title(loc="left")
    assert [axes.get_xlabel() for axes in panels[1]] == [
        "prompt length (tokens), answers of 32",
        "answer length (tokens), prompts of 64",
    ]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [one["title"] for one in METHODS.values()]


@pytest.mark.filterwarnings("error")
def test_what_was_not_measured_has_a_panel_that_says_so(drawn, tmp_path):
    draw_scaling(make_scaling_record(prompts=(64,), memory=False), tmp_path)
    panels = np.array(drawn[0].axes).reshape(2, 2)
    assert all(lines_of(axes) for axes in panels[0])
    for axes in panels[1]:
        assert not lines_of(axes)
        assert [text.get_text() for text in axes.texts] == ["not measured here"]


def test_on_a_machine_that_others_used_too_the_processors_time_is_drawn(drawn, tmp_path):
    record = make_scaling_record()
    for sweep in record["summary"]:
        for told in sweep["methods"].values():
            told["cpu_per_token_s"] = [value / 2 for value in told["cpu_per_token_s"]]
    for cell in record["cells"]:
        for call in cell["calls"].values():
            call["cpu_s"] /= 2
    draw_scaling(record, tmp_path)
    axes = drawn[0].axes[0]
    assert axes.get_ylabel() == "ms of processor time per token, decoding"
    expected = record["summary"][0]["methods"]["flight"]["time_per_token_s"]
    assert np.allclose(lines_of(axes)["flight"][1], [500 * value for value in expected])

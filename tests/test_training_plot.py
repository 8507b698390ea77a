import json
import struct
import sys

import pytest

from blockpilot_hf.training_plot import check_plot, draw_log, smoothed


def write_log(path, num_steps=250, validations=(100, 200), **more):
    entries = []
    for step in range(1, num_steps + 1):
        entries.append({"step": step, "loss": 5 - step / 100, "learning_rate": 1e-3, "seconds": 0.5 * step})
        if step in validations:
            groups = {"all": {"acceptance_length": 1 + step / 1000, "num_prompts": 3}, **more}
            entries.append({"step": step, "acceptance_length": groups, "seconds": 0.5 * step})
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def axes(monkeypatch):
    """The axes of what is drawn, by title."""
    from matplotlib.figure import Figure

    figures, make = [], Figure.__init__
    monkeypatch.setattr(Figure, "__init__", lambda self, *a, **k: (figures.append(self), make(self, *a, **k))[1])
    return lambda: {axes.get_title().split(" (")[0]: axes for axes in figures[-1].axes}


def test_the_picture_shows_what_the_log_says(tmp_path, axes):
    code = {"acceptance_length": 2.0, "num_prompts": 2}
    draw_log(write_log(tmp_path / "log.jsonl", code=code), tmp_path / "run.png")
    found = axes()
    assert set(found) == {"loss", "acceptance length", "learning rate", "seconds a step"}
    raw, mean = (line.get_ydata() for line in found["loss"].lines)
    assert list(raw) == [5 - step / 100 for step in range(1, 251)]
    assert mean[99] == pytest.approx(sum(raw[:100]) / 100) and mean[249] == pytest.approx(sum(raw[150:]) / 100)
    lines = {line.get_label(): line.get_xydata().tolist() for line in found["acceptance length"].lines}
    assert lines == {"all": [[100, 1.1], [200, 1.2]], "code": [[100, 2.0], [200, 2.0]]}
    assert set(found["learning rate"].lines[0].get_ydata()) == {1e-3}
    assert set(found["seconds a step"].lines[0].get_ydata()) == {0.5}
    assert "0:02:05 in all" in found["seconds a step"].get_title()


def test_the_end_is_drawn_apart_in_the_colours_of_the_validations(tmp_path, axes):
    log = write_log(tmp_path / "log.jsonl", code={"acceptance_length": 2.0, "num_prompts": 2})
    groups = {name: {"acceptance_length": tau} for name, tau in (("all", 1.4), ("code", 1.9), ("new", 3.0))}
    draw_log(log, tmp_path / "run.png", final={"step": 250, "acceptance_length": groups})
    tau = axes()["acceptance length"]
    ends = {
        tuple(line.get_xydata()[-1]): line
        for line in tau.lines
        if line.get_linestyle() == ":" and len(line.get_xdata())
    }
    assert set(ends) == {(250, 1.4), (250, 1.9), (250, 3.0)}
    assert ends[250, 1.4].get_xydata().tolist() == [[200, 1.2], [250, 1.4]]
    colours = {line.get_label(): line.get_color() for line in tau.lines}
    assert [ends[250, value].get_color() for value in (1.4, 1.9, 3.0)] == [colours[n] for n in ("all", "code", "new")]
    names = [text.get_text() for text in tau.get_legend().get_texts()]
    assert names == ["new", "code", "all", "at the end, on\nall that is held out"]


def test_where_nothing_is_held_out_the_end_has_no_tau(tmp_path, axes):
    log = write_log(tmp_path / "log.jsonl", validations=())
    draw_log(log, tmp_path / "run.png", final={"step": 250, "acceptance_length": {}})
    assert [text.get_text() for text in axes()["acceptance length"].texts] == ["none yet"]


def test_missing_folders_are_fine_in_the_output_alone(tmp_path):
    output = tmp_path / "no" / "drafter"
    for path in (output / "run.png", output / "plots" / "a" / "run.png", tmp_path / "run.png"):
        check_plot(path, output)
    for path in (
        tmp_path / "no" / "run.png",
        output / ".." / "else" / "run.png",
        tmp_path / "no" / "drafter2" / "a.png",
    ):
        with pytest.raises(ValueError, match="folder that does not exist"):
            check_plot(path, output)
    for path in (output / "drafter" / "run.png", output / "checkpoint" / "a" / "run.png"):
        with pytest.raises(ValueError, match="which training replaces as a whole"):
            check_plot(path, output)
    assert list(tmp_path.iterdir()) == []


def test_it_is_a_picture_and_nothing_else_is_left(tmp_path):
    log = write_log(tmp_path / "log.jsonl", num_steps=1, validations=())
    draw_log(log, tmp_path / "run.png")
    content = (tmp_path / "run.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width > 800 and height > 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "run.png"]


def test_a_log_of_validations_in_the_lines_of_their_steps_is_drawn_too(tmp_path, axes):
    groups = {"all": {"acceptance_length": 1.5, "num_prompts": 3}}
    entry = {"step": 1, "loss": 2.0, "learning_rate": 1e-3, "acceptance_length": groups, "seconds": 1.0}
    (tmp_path / "log.jsonl").write_text(json.dumps(entry) + "\n")
    draw_log(tmp_path / "log.jsonl", tmp_path / "run.png")
    assert len(axes()["loss"].lines[0].get_ydata()) == len(axes()["acceptance length"].lines[0].get_ydata()) == 1


def test_drawing_does_not_meddle_with_the_pictures_of_others(tmp_path):
    """No window, no backend, no figure that stays."""
    already = "matplotlib.pyplot" in sys.modules
    draw_log(write_log(tmp_path / "log.jsonl"), tmp_path / "run.png")
    assert ("matplotlib.pyplot" in sys.modules) is already


def test_a_log_without_steps_and_a_wrong_name_are_refused(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "lo')
    with pytest.raises(ValueError, match="holds no step, so there is nothing to draw"):
        draw_log(tmp_path / "log.jsonl", tmp_path / "run.png")
    with pytest.raises(ValueError, match=r"must end in \.png, got 'run\.svg'"):
        check_plot(type(tmp_path)("run.svg"), tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'blockpilot-hf\[train\]'"):
        check_plot(tmp_path / "run.png", tmp_path)


def test_smoothing_is_the_mean_of_the_last_values():
    values = [float(i * i % 7) for i in range(20)]
    assert smoothed(values, 4) == pytest.approx([sum(values[max(0, i - 3) : i + 1]) / min(i + 1, 4) for i in range(20)])

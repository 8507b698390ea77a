"""Both pictures show what the results say, and appear whole."""

import copy

import pytest
from matplotlib.figure import Figure
from sweeps import COSTS, SIZES, TRAINING_SIZE, make_rows

from blockpilot_hf import plot_style
from blockpilot_hf.evaluation import evaluate
from blockpilot_hf.evaluation_plots import draw_choices, draw_tau
from blockpilot_hf.evaluation_rules import Comparison
from blockpilot_hf.policy_training import PolicyTrainingConfig, train_policy


@pytest.fixture(scope="module")
def results():
    train, rows = make_rows(60, 0), make_rows(45, 1, temperatures=(0.0, 1.0))
    policy, _ = train_policy(train, make_rows(20, 2), [1, 4, 6], PolicyTrainingConfig(epochs=5), COSTS)
    return evaluate(
        rows, train, [Comparison((2, 3, 4)), Comparison((1, 4, 6), {"mine": policy})], block_sizes=SIZES,
        training_block_size=TRAINING_SIZE, costs=COSTS, num_resamples=50, num_shuffles=5,
    )  # fmt: skip


@pytest.fixture
def drawn(monkeypatch):
    """The figures as they are saved."""
    figures, save = [], Figure.savefig

    def keep(figure, *arguments, **kwargs):
        figures.append(figure)
        save(figure, *arguments, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_a_line_per_group_goes_through_its_acceptance_lengths(results, drawn, tmp_path):
    draw_tau(results, TRAINING_SIZE, tmp_path / "tau.png")
    assert (tmp_path / "tau.png").read_bytes().startswith(b"\x89PNG")
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == ["greedy, 45 prompts", "temperature 1, 45 prompts"]
    lines = {line.get_label(): line for line in panels[0].get_lines()}
    for name in ("maths", "code", "other", "all"):
        label = "all (45)" if name == "all" else f"{name} (15)"
        expected = [entry["estimate"] for entry in results[0]["tau_by_block_size"][name].values()]
        assert list(lines[label].get_xdata()) == list(SIZES)
        assert list(lines[label].get_ydata()) == expected
        assert lines[label].get_linestyle() == ("-" if name == "all" else ":")  # of 15 prompts no claim is made
    colours = [line.get_color() for label, line in lines.items() if "(" in label]
    assert len(set(colours)) == 4


def test_legends_of_all_panels_have_one_order(results, drawn, tmp_path):
    changed = copy.deepcopy(results)
    for entry in changed[1]["tau_by_block_size"]["maths"].values():
        entry["estimate"] += 9  # above all others, in the second panel only
    draw_tau(changed, TRAINING_SIZE, tmp_path / "tau.png")
    one, two = ([text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn[0].axes)
    assert one == two
    edge = {name: list(by_size.values())[-1]["estimate"] for name, by_size in results[0]["tau_by_block_size"].items()}
    assert [label.partition(" (")[0] for label in one] == sorted(edge, key=lambda name: -edge[name])
    assert "dotted" in drawn[0].get_supxlabel()
    for result in changed:
        for group in result["comparisons"][0]["groups"].values():
            group["is_enough"] = True
    draw_tau(changed, TRAINING_SIZE, tmp_path / "tau.png")
    assert "dotted" not in drawn[1].get_supxlabel()


def test_bars_are_the_shares_of_the_chosen_sizes(results, drawn, tmp_path):
    draw_choices(results, tmp_path / "chosen.png")
    axes = drawn[0].axes[0]
    choices = results[0]["comparisons"][1]["groups"]["maths"]["choices"]["mine"]
    widths = [bar.get_width() for bar in axes.patches[:3]]
    assert widths == pytest.approx([100 * count / 15 for count in choices.values()])
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "maths (15) *",
        "code (15) *",
        "other (15) *",
        "all (45)",
    ]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["1", "4", "6"]


def test_without_policies_there_are_no_choices_to_draw(results, tmp_path):
    none = [{**result, "comparisons": result["comparisons"][:1]} for result in results]
    with pytest.raises(ValueError, match="No policy was judged"):
        draw_choices(none, tmp_path / "chosen.png")
    draw_tau(none, TRAINING_SIZE, tmp_path / "tau.png")
    assert [path.name for path in tmp_path.iterdir()] == ["tau.png"]


def test_what_is_not_finished_is_not_under_the_name(results, tmp_path, monkeypatch):
    """Interrupted while it is written: the picture before is still there."""
    (tmp_path / "tau.png").write_bytes(b"before")

    def interrupted(figure, path, **kwargs):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draw_tau(results, TRAINING_SIZE, tmp_path / "tau.png")
    assert (tmp_path / "tau.png").read_bytes() == b"before"


def test_a_missing_extra_is_named(results, tmp_path, monkeypatch):
    def missing(module):
        raise ImportError(f"{module}: pip install 'blockpilot-hf[train]'")

    monkeypatch.setattr(plot_style, "require_extra", missing)
    with pytest.raises(ImportError, match="matplotlib: pip install"):
        draw_tau(results, TRAINING_SIZE, tmp_path / "tau.png")

"""Measuring costs: what is timed, how medians become a table that rises, and when nothing is measured at all."""

import json

import pytest
import torch
from conftest import make_drafter, make_prompt, make_target, plain_generate

from blockpilot_hf import calibration
from blockpilot_hf.calibration import calibrate, default_block_sizes, measure_costs, rising
from blockpilot_hf.costs import costs_key, kept_costs_path
from blockpilot_hf.default_costs import costs_for

QUICK = {"context_lengths": [8, 24], "seconds": 0.0}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def pair():
    target = make_target()
    return target, make_drafter(target)


@pytest.fixture
def passes(pair, monkeypatch):
    """Widths of the target's passes as they come, with whether layers were captured."""
    seen, forward = [], pair[0].forward

    def counted(*arguments, **kwargs):
        seen.append((kwargs["input_ids"].shape[1], bool(kwargs.get("output_hidden_states"))))
        return forward(*arguments, **kwargs)

    monkeypatch.setattr(pair[0], "forward", counted)
    return seen


def ticks(monkeypatch, seconds):
    """A clock on which each timed pass takes what `seconds(kind, length, size)` says."""
    now = [0.0]
    timed = calibration._Bench._timed

    def slow(self, key, call, **kwargs):
        def later(**kwargs):
            call(**kwargs)
            now[0] += seconds(*key)

        timed(self, key, later, **kwargs)

    monkeypatch.setattr(calibration._Bench, "_timed", slow)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])


def test_measuring_covers_every_size_and_leaves_models_and_random_numbers_alone(pair):
    target, drafter = pair
    before = plain_generate(target, make_prompt(), max_new_tokens=8, do_sample=False)
    state = torch.get_rng_state()
    table = measure_costs(target, drafter, [2, 8, 4], **QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(table.verify_s) == [1, 2, 4, 8]
    assert sorted(table.draft_s) == [2, 4, 8]
    assert table.context_lengths == (8, 24)
    assert table.key == costs_key(target, drafter) and "float32" in table.source and "1 thread" in table.source
    assert plain_generate(target, make_prompt(), max_new_tokens=8, do_sample=False).tolist() == before.tolist()


def test_sizes_above_the_training_size_are_measured_without_a_warning(pair, monkeypatch):
    said = []
    monkeypatch.setattr("blockpilot_hf.candidate_generator.logger.warning_once", said.append)
    assert measure_costs(*pair, [16], **QUICK).block_sizes[-1] == 16 > pair[1].config.block_size
    assert said == []


def test_blocks_keep_the_drafters_layers_and_plain_passes_are_timed_with_and_without(pair, passes):
    table = measure_costs(*pair, [4], context_lengths=[8], seconds=0.0)
    steps = passes[1:]  # the first takes in the context
    assert passes[0] == (8, True)
    assert {width for width, _ in steps} == {1, 4}
    assert all(is_captured for width, is_captured in steps if width == 4)
    assert sum(is_captured for width, is_captured in steps if width == 1) * 2 == sum(w == 1 for w, _ in steps)
    assert len(table.measured["plain_with_layers_s"]) == 1


def test_the_table_holds_medians_of_what_the_clock_said(pair, monkeypatch):
    draws = iter(range(10_000))
    law = {"plain with layers": 0.5, "verify": 1.0, "draft": 0.25}
    # One in four passes is interrupted by something else.
    ticks(
        monkeypatch,
        lambda kind, length, size: law[kind] * size + length / 100 + 50 * (next(draws) % 7 == 3),
    )
    table = measure_costs(*pair, [2, 4], context_lengths=[8, 24], seconds=1200.0)
    assert table.measured["num_samples"] > 4
    for i, length in enumerate((8, 24)):
        for size in (1, 2, 4):
            assert table.verify_s[size][i] == pytest.approx(size + length / 100)
        for size in (2, 4):
            assert table.draft_s[size][i] == pytest.approx(0.25 * size + length / 100)
    assert table.measured["verify_s"]["4"] == pytest.approx(list(table.verify_s[4]))


def test_the_time_decides_how_many_rounds_there_are(pair, monkeypatch):
    ticks(monkeypatch, lambda kind, length, size: 1.0)
    samples = [
        measure_costs(*pair, [2], context_lengths=[8], seconds=seconds).measured["num_samples"]
        for seconds in (0.0, 30.0, 60.0, 1e6)
    ]
    # A round has 4 passes of width 1 and 2 steps of 2 passes each, so 8 s; the warm-up has half of that.
    assert samples == [2, 2 * 3, 2 * 7, 2 * 12]


def test_contexts_are_cut_to_the_position_limits():
    target = make_target(max_position_embeddings=40)
    table = measure_costs(target, make_drafter(target), [8], context_lengths=[16, 512], seconds=0.0)
    assert table.context_lengths == (16, 32)
    with pytest.raises(ValueError, match="A block of 39 does not fit"):
        measure_costs(target, make_drafter(target), [39], **QUICK)


def test_default_sizes_reach_the_drafters_own(pair):
    assert default_block_sizes(pair[1]) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert default_block_sizes(make_drafter(pair[0], block_size=28)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 28]
    assert default_block_sizes(make_drafter(pair[0], block_size=32))[-2:] == [24, 32]


# --- the fit ---


def test_what_rises_already_stays_as_it_is():
    assert rising([1.0, 2.0, 2.0, 5.0]) == [1.0, 2.0, 2.0, 5.0]
    assert rising([]) == []


def test_neighbours_that_fall_get_their_mean():
    assert rising([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert rising([2.0, 2.0, 0.5]) == [1.5, 1.5, 1.5]


def test_the_fit_is_the_closest_one_that_rises():
    from scipy.optimize import isotonic_regression

    for seed in range(20):
        values = torch.rand(9, generator=torch.Generator().manual_seed(seed)).tolist()
        assert rising(values) == pytest.approx(isotonic_regression(values).x.tolist())


def test_fitted_seconds_rise_with_width_and_context_far_beyond_what_was_measured(pair, monkeypatch):
    noise = torch.Generator().manual_seed(0)
    ticks(monkeypatch, lambda kind, length, size: 1 + 0.01 * size + float(torch.rand((), generator=noise)))
    table = measure_costs(*pair, [2, 3, 4, 6, 8], context_lengths=[8, 24, 48], seconds=0.0)
    raw = table.measured["verify_s"]
    assert any(raw[str(a)][i] > raw[str(b)][i] for a, b in ((1, 2), (2, 3), (3, 4), (4, 6), (6, 8)) for i in range(3))
    for at in (table.verify_at, table.draft_at):
        grid = [[at(width, length) for length in (8, 20, 48, 100, 5000)] for width in range(2, 13)]
        assert all(row == sorted(row) for row in grid)
        assert all(list(column) == sorted(column) for column in zip(*grid, strict=True))


# --- kept tables ---


def test_a_second_calibration_measures_nothing(pair, passes):
    table, is_new = calibrate(*pair, [1, 2, 4], **QUICK)
    assert is_new and passes
    passes.clear()
    again, is_new = calibrate(*pair, [1, 2, 4], **QUICK)
    assert (again, is_new, passes) == (table, False, [])
    assert calibrate(*pair)[1] is False and passes == []
    assert costs_for(*pair) == table and passes == []
    assert calibrate(*pair, [1, 2, 4], force=True, **QUICK)[1] is True and passes


def test_another_number_of_threads_is_measured_anew_and_kept_beside(pair, home):
    first, _ = calibrate(*pair, [2], **QUICK)
    torch.set_num_threads(2)
    assert costs_for(*pair).source.startswith("default")
    second, is_new = calibrate(*pair, [2], **QUICK)
    assert is_new and first.name != second.name
    assert sorted(path.stem for path in (home / "blockpilot" / "costs").iterdir()) == sorted([first.name, second.name])
    torch.set_num_threads(1)
    assert costs_for(*pair) == first


def test_sizes_that_the_kept_table_lacks_are_measured_along_with_its_own(pair):
    calibrate(*pair, [2, 4], context_lengths=[8], seconds=0.0)
    table, is_new = calibrate(*pair, [8], context_lengths=[24], seconds=0.0)
    assert is_new and sorted(table.verify_s) == [1, 2, 4, 8] and table.context_lengths == (8, 24)


def test_without_sizes_the_default_ones_are_measured(pair):
    table, _ = calibrate(*pair, **QUICK)
    assert sorted(table.verify_s) == default_block_sizes(pair[1])


def test_a_damaged_table_is_replaced(pair):
    path = kept_costs_path(costs_key(*pair))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    table, is_new = calibrate(*pair, [2], **QUICK)
    assert is_new and json.loads(path.read_text())["key"] == table.key


def test_an_interrupted_calibration_leaves_no_file(pair, home):
    def interrupted(items, name):
        yield items[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(*pair, [2], progress=interrupted, **QUICK)
    assert not list(home.rglob("*"))


def test_progress_sees_every_stage(pair):
    seen = []

    def progress(items, name):
        seen.append((name, len(items)))
        return iter(items)

    measure_costs(*pair, [2], context_lengths=[8], seconds=60.0, progress=progress)
    assert [name for name, _ in seen] == ["warm-up", "first round", "more rounds"]
    assert [number for _, number in seen][:2] == [2, 2]

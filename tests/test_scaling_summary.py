"""Medians by length, and growth next to plain's, from made-up cells."""

import pytest
from scaling_records import ANSWERS, METHODS, PROMPTS, STEP, TAU, make_line, make_lines

from blockpilot_hf.scaling_summary import MEASURES, summarize_scaling


def test_each_axis_has_the_cells_in_which_the_other_length_is_the_shortest():
    by_prompt, by_answer = summarize_scaling(make_lines(), [*METHODS])
    assert (by_prompt["axis"], by_prompt["lengths"], by_prompt["answer_length"]) == ("prompt_length", [*PROMPTS], 32)
    assert (by_answer["axis"], by_answer["lengths"], by_answer["prompt_length"]) == ("answer_length", [*ANSWERS], 64)
    for sweep in (by_prompt, by_answer):
        for name, told in sweep["methods"].items():
            assert [*told] == [*MEASURES], name
            assert all(len(values) == len(sweep["lengths"]) for values in told.values())
    for i, length in enumerate(PROMPTS):
        call = make_line(length, 32)["calls"]["flight"]
        told = by_prompt["methods"]["flight"]
        assert told["prefill_s"][i] == call["prefill_s"]
        assert told["time_per_step_s"][i] == pytest.approx(call["decode_s"] / call["num_steps"])
        assert told["overhead_per_step_s"][i] == pytest.approx(call["other_s"] / call["num_steps"])


def test_costs_that_keep_their_ratio_to_plains_do_not_grow():
    for sweep in summarize_scaling(make_lines(repeats=3), [*METHODS]):
        assert sweep["num_repeats"] == [3] * len(sweep["lengths"])
        for name in ("size 8", "flight"):
            told = sweep["growth"][name]
            assert told["time_per_token_s"]["shortest"] == pytest.approx(STEP[name] / TAU[name])
            assert told["time_per_step_s"]["longest"] == pytest.approx(STEP[name])
            assert told["peak_memory_bytes"]["shortest"] == pytest.approx(1.25)
            assert all(one["growth"] == pytest.approx(1.0) for one in told.values())
        assert "plain" not in sweep["growth"]


def test_what_ours_alone_take_for_every_token_of_the_prompt_is_growth():
    by_prompt, by_answer = summarize_scaling(make_lines(slower=0.1), [*METHODS])
    told = by_prompt["growth"]["flight"]["time_per_step_s"]

    def ratio(length):
        plain = 0.02 + 1e-5 * (length + 32)
        return (STEP["flight"] * plain + 1e-4 * length) / plain

    assert told["shortest"] == pytest.approx(ratio(64))
    assert told["growth"] == pytest.approx(ratio(1024) / ratio(64)) and told["growth"] > 2
    assert by_answer["growth"]["flight"]["time_per_step_s"]["growth"] < 1.01


def test_repeats_count_by_their_median_and_ratios_within_each():
    lines = make_lines(repeats=3)
    lines[0]["calls"]["flight"]["total_s"] = 1000.0
    by_prompt, _ = summarize_scaling(lines, [*METHODS])
    assert by_prompt["methods"]["flight"]["total_s"][0] == make_line(64, 32, 2)["calls"]["flight"]["total_s"]


def test_a_single_length_and_what_was_not_measured_have_no_growth():
    by_prompt, by_answer = summarize_scaling(make_lines(prompts=(64,), memory=False), [*METHODS])
    assert set(by_prompt["growth"]["flight"].values()) == {None}
    assert by_answer["growth"]["flight"]["peak_memory_bytes"] is None
    assert by_answer["methods"]["flight"]["peak_memory_bytes"] == [None] * len(ANSWERS)
    assert by_answer["growth"]["flight"]["time_per_step_s"]["growth"] > 0


def test_a_run_that_was_stopped_has_figures_of_what_it_has():
    lines = make_lines(repeats=2)[:5]
    by_prompt, by_answer = summarize_scaling(lines, [*METHODS])
    assert by_prompt["num_repeats"] == [2, 1, 1] and by_answer["num_repeats"] == [2, 1]

"""A scaling record in words: what tables hold, and what is said of growth."""

import pytest
from scaling_records import METHODS, make_scaling_record

from blockpilot_hf.evaluation_display import Table
from blockpilot_hf.scaling_display import (
    busy_share,
    call_table,
    growth_lines,
    growth_verdict,
    memory_table,
    steps_table,
    time_table,
    told_scaling,
)


@pytest.fixture
def record():
    return make_scaling_record()


def test_tables_have_a_row_per_length_and_the_figures_of_all_methods(record):
    sweep = record["summary"][0]
    for table in (time_table(record, sweep), steps_table(record, sweep), call_table(record, sweep)):
        assert [row[0] for row in table.rows] == ["64", "256", "1,024"]
        assert all(len(row) == len(table.header) for row in table.rows)
        assert all(method["title"] in table.header for method in METHODS.values())
        assert "answers of 32 tokens" in table.title
    told = sweep["methods"]
    first = time_table(record, sweep).rows[0]
    assert first[1:4] == [f"{1000 * told[name]['time_per_token_s'][0]:.1f}" for name in METHODS]
    assert first[4:] == ["2.00", "1.60"]
    memory = memory_table(record, sweep)
    last = [told[name]["peak_memory_bytes"][-1] / 1e6 for name in METHODS]
    assert memory.rows[-1][1:4] == [f"{value:.1f}" for value in last]
    assert memory.header[4:] == ["target's cache", "drafter's cache"] and memory.rows[-1][5] == "0.1"


def test_no_growth_is_said_with_its_number(record):
    verdict = growth_verdict(record)
    assert verdict.startswith("Growth: none that plain generate has not; at most 1.00 times its own")
    assert "1.00 over prompts of rising length (tau 1.60 to 1.60)" in verdict
    lines = list(growth_lines(record))
    assert len(lines) == 6
    assert "Prompts of 64 to 1,024 tokens, time per token: in flight takes 0.75 times plain's" in lines[0]
    assert "(tau 1.60 to 1.60); growth over plain's 1.00." in lines[0]
    assert "time per step: block size 8 takes 1.80 times plain's" in lines[1]


def test_growth_is_said_too_and_where_it_is():
    record = make_scaling_record(slower=0.1)
    told = record["summary"][0]["growth"]["size 8"]["time_per_step_s"]["growth"]
    verdict, per_token = growth_verdict(record).split(". Time per token")
    where = "(time per step of block size 8 over prompts of rising length)"
    assert verdict == f"Growth that plain generate has not: {told:.2f} {where} times its own" and told > 1.5
    assert f"{record['summary'][0]['growth']['flight']['time_per_token_s']['growth']:.2f} over prompts" in per_token


def test_a_text_that_is_accepted_less_is_no_growth_of_costs():
    record = make_scaling_record()
    told = record["summary"][0]["growth"]["flight"]["time_per_token_s"]
    told.update(longest=2 * told["longest"], growth=2.0)
    record["summary"][0]["methods"]["flight"]["acceptance_length"][-1] = 0.8
    verdict = growth_verdict(record)
    assert verdict.startswith("Growth: none") and "2.00 over prompts of rising length (tau 1.60 to 0.80)" in verdict


def test_what_was_not_measured_is_no_figure_and_no_verdict():
    record = make_scaling_record(memory=False)
    assert {row[1] for row in memory_table(record, record["summary"][0]).rows} == {"-"}
    assert sum("memory: not measured here" in line for line in growth_lines(record)) == 2
    short = make_scaling_record(prompts=(64,), answers=(32,))
    assert growth_verdict(short) == "Growth: too little was measured to tell."
    assert all("a single length" in line for line in growth_lines(short))


def test_everything_is_told_and_the_verdict_comes_last(record):
    record["settings"]["left_out"] = ["prompts of 4,096 tokens: too long"]
    record["run_info"].update(status="stopped", notes="Beside other work.")
    parts = list(told_scaling(record))
    assert sum(isinstance(part, Table) for part in parts) == 8
    lines = [part for part in parts if isinstance(part, str)]
    assert lines[-1] == growth_verdict(record)
    for words in ("left out: prompts of 4,096 tokens", "was stopped", "note: Beside other work.", "memory: kernel"):
        assert any(words in line for line in lines), words
    assert not any("The process had" in line for line in lines)


def test_a_machine_that_others_used_too_is_told(record):
    assert busy_share(record) == pytest.approx(1.0)
    for cell in record["cells"]:
        for call in cell["calls"].values():
            call["cpu_s"] = 0.4 * call["total_s"]
    parts = list(told_scaling(record))
    assert any(str(part).startswith("The process had 40 % of the time") for part in parts)
    assert sum("of processor time" in part.title for part in parts if isinstance(part, Table)) == 4
    record["meta_info"]["machine"]["device"] = "cuda"
    assert busy_share(record) is None

"""The part of a card that scaling records give."""

from scaling_records import make_scaling_record

from blockpilot_hf.scaling_card import scaling_section
from blockpilot_hf.scaling_display import growth_verdict, memory_table


def test_without_a_record_there_is_no_section():
    assert scaling_section([]) == ""


def test_section_has_the_tables_the_verdict_and_how_it_was_made():
    record = make_scaling_record()
    record["run_info"]["notes"] = "Beside other work."
    section = scaling_section([record, make_scaling_record("bfloat16", slower=0.1)])
    assert section.startswith("## Cost against work\n\n") and section.count("Command (") == 2
    assert memory_table(record, record["summary"][0]).markdown in section
    assert f"- {growth_verdict(record)}\n" in section and "- Growth that plain generate has not: " in section
    assert "on AMD EPYC with 1 thread, torch 2.13.0. Beside other work." in section

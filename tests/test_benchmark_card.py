"""The part of a card that benchmark records give."""

from benchmark_records import make_record

from blockpilot_hf.benchmark_card import benchmark_section
from blockpilot_hf.benchmark_display import readme_table


def test_without_a_record_there_is_no_section():
    assert benchmark_section([]) == ""


def test_section_has_the_table_of_all_records_and_the_details_of_each():
    records = [make_record("float32"), make_record("bfloat16")]
    records[0]["run_info"]["notes"] = "Beside other work."
    section = benchmark_section(records)
    assert section.startswith("## Side by side\n\n| times plain |") and readme_table(records) in section
    assert section.count("Command (") == 2 and "torch " in section and "Beside other work." in section
    assert section.count("did not run: it is not installed") == 2
    told = records[0]["results"][0]["groups"]["all"]["methods"]["flight"]["speedup"]
    told.update(estimate=7.891, low=7.5, high=8.25)
    assert "7.89 [7.50 8.25]" in benchmark_section(records) and "7.89 [7.50 8.25]" not in section

"""A benchmark's tables: figures are those of the record, they fit a terminal, and LaTeX can be compiled."""

import copy
import re

import pytest
from benchmark_records import COUNTS, NOT_RUN, make_record

from blockpilot_hf.benchmark_display import (
    WIDTH,
    compared_table,
    decoding_table,
    fitted,
    gains_table,
    groups_table,
    markdown_parts,
    readme_table,
    sets_table,
    speeds_table,
    texts_table,
    time_table,
    told_benchmark,
)
from blockpilot_hf.benchmark_latex import escaped, latex_table
from blockpilot_hf.benchmark_reading import main_results, methods_of, record_labels
from blockpilot_hf.evaluation_display import Table, figure
from blockpilot_hf.evaluation_rules import ALL

FEW = {"maths": 20, "translation": 3}


@pytest.fixture(scope="module")
def made():
    return make_record()


@pytest.fixture
def record(made):
    return copy.deepcopy(made)


def cells(table, column):
    place = table.header.index(column)
    return {row[0]: row[place] for row in table.rows}


def told_of(record, method, group=ALL, result=0):
    return record["results"][result]["groups"][group]["methods"][method]


def lines(record):
    return [part for part in told_benchmark(record) if isinstance(part, str)]


def tables(record):
    return [part for part in told_benchmark(record) if isinstance(part, Table)]


@pytest.mark.parametrize(
    ("table", "column", "key", "value", "shown"),
    [
        (speeds_table, "times plain", "speedup", (3.141, 3.0, 3.333), "3.14 [3.00 3.33]"),
        (speeds_table, "in flight over it", "over_default", (0.5, 0.25, 1.0), "0.50 [0.25 1.00]"),
        (speeds_table, "tau", "acceptance_length", (2.718, 2, 3), "2.72"),
        (speeds_table, "tok/s", "tokens_per_second", (12.345, 12, 13), "12.3"),
        (speeds_table, "tok/s", "tokens_per_second", (1.2345, 1, 2), "1.23"),
        (decoding_table, "times plain", "decode_speedup", (3.141, None, None), "3.14"),
        (decoding_table, "bound", "bound", (4.321, 4, 5), "4.32"),
        (decoding_table, "of bound", "of_bound", (0.876, 0.8, 0.9), "88 % [80 90]"),
        (decoding_table, "overhead", "overhead_share", (0.0456, 0.04, 0.05), "4.6 %"),
        (decoding_table, "overhead", "overhead_share", None, "-"),
        (texts_table, "least", "least_speedup", 0.123, "0.12"),
        (texts_table, "< 0.95", "num_slow", 7, "7"),
        (texts_table, "same text", "num_identical", 99, "99/120"),
        (texts_table, "near-ties", "num_explained", 5, "5"),
    ],
)
def test_a_cell_follows_the_record(record, table, column, key, value, shown):
    before = cells(table(record, record["results"][0]), column)
    is_interval = isinstance(value, tuple)
    told_of(record, "seconds")[key] = (
        dict(zip(("estimate", "low", "high"), value, strict=True)) if is_interval else value
    )
    after = cells(table(record, record["results"][0]), column)
    assert after.pop("by seconds, per prompt") == shown != before.pop("by seconds, per prompt")
    assert after == before


def test_groups_follow_the_record_and_small_ones_are_starred(record):
    result = record["results"][0]
    table = groups_table(record, result)
    assert table.header == ["method", *COUNTS, "all"]
    assert table.rows[0] == ["prompts", "24", "22", "21", "20", "9 *", "24", "120"]
    told_of(record, "paper", "code")["speedup"]["estimate"] = 9.876
    told_of(record, "prompt_lookup", "qa")["over_default"] = {"estimate": 8.765, "low": 8, "high": 9}
    assert cells(groups_table(record, result), "code")["paper's rule"] == "9.88"
    gains = gains_table(record, result)
    assert gains.header[1:] == ["plain generate", "transformers DFlash", "prompt lookup"]
    assert cells(gains, "prompt lookup")["qa (21)"] == "8.77 [8.00 9.00]"
    assert "translation (9 *)" in cells(gains, "prompt lookup")
    assert [line for line in lines(record) if line.startswith("* fewer than 20 prompts")]


def test_a_star_is_explained_only_where_there_is_one():
    enough = make_record(counts={"maths": 20})
    assert not [line for line in lines(enough) if "fewer than" in line]
    assert "fewer than" not in latex_table(enough)


def test_time_is_told_in_parts_and_as_a_whole(record):
    told_of(record, "flight")["seconds_per_token"] = {
        "prefill": 0.001, "policy": 0.0002, "draft": 0.003, "verify": 0.010, "other": 0.0005,
    }  # fmt: skip
    rows = {row[0]: row[1:] for row in time_table(record, record["results"][0]).rows}
    assert rows["in flight"] == ["1.00", "0.20", "3.00", "10.00", "0.50", "14.70"]
    calls = [row["calls"]["stock_dflash"] for row in record["per_prompt"] if row["temperature"] == 0]
    whole = 1000 * sum(call["total_s"] for call in calls) / sum(call["num_new_tokens"] for call in calls)
    assert rows["transformers DFlash"][2:] == ["-", "-", "-", f"{whole:.2f}"]
    del record["per_prompt"]  # what is not told in parts then has no whole either
    rows = {row[0]: row[1:] for row in time_table(record, record["results"][0]).rows}
    assert rows["transformers DFlash"][2:] == ["-"] * 4
    assert rows["in flight"][-1] == "14.70"


def test_what_did_not_run_is_named_with_the_reason_and_has_no_row(record):
    assert f"dflash 0.1.0 did not run: {NOT_RUN}" in lines(record)
    for table in tables(record):
        assert not any(row[0].startswith("dflash") for row in table.rows), table.title


def test_without_our_default_nothing_is_told_over_it():
    without = make_record(counts=FEW)
    without["methods"]["flight"]["reason"] = "it was left out."
    for result in without["results"]:
        for group in result["groups"].values():
            del group["methods"]["flight"]
    assert speeds_table(without, without["results"][0]).header == ["method", "times plain", "tau", "tok/s"]
    assert gains_table(without, without["results"][0]) is None
    assert not any("over it" in line for line in lines(without))
    assert "in flight" not in latex_table(without).partition("\\toprule")[2]


def test_plain_has_no_interval_and_the_default_is_not_compared_with_itself(record):
    table = speeds_table(record, record["results"][0])
    assert cells(table, "times plain")["plain generate"] == "1.00"
    assert cells(table, "in flight over it")["in flight"] == "-"
    assert cells(decoding_table(record, record["results"][0]), "bound")["plain generate"] == "-"


def test_tables_fit_a_terminal_of_80_columns(record):
    record["methods"]["paper"]["title"] = "the rule of the paper, as it stands"
    for table in tables(record):
        parts = fitted(table)
        for part in parts:
            widths = [max(map(len, column)) for column in zip(part.header, *part.rows, strict=True)]
            assert sum(widths) + 3 * (len(widths) - 1) <= WIDTH, part.title
        # Nothing is lost, and every row has its name.
        assert [row[0] for row in parts[-1].rows] == [row[0] for row in table.rows]
        assert [name for part in parts for name in part.header[1:]] == table.header[1:]
        for i, row in enumerate(table.rows):
            assert [cell for part in parts for cell in part.rows[i][1:]] == row[1:]
    assert fitted(tables(record)[0], 300) == [tables(record)[0]]


def test_a_stopped_run_its_notes_and_spread_are_told(record):
    record["run_info"] |= {"status": "stopped", "notes": "beside other work"}
    assert not any("Spread" in line for line in lines(record))
    told_of(record, "flight")["spread"] = 0.0213
    said = lines(record)
    assert any("was stopped" in line for line in said)
    assert "note: beside other work" in said
    assert any(line.startswith("Spread") for line in said)
    assert cells(texts_table(record, record["results"][0]), "spread")["in flight"] == "2.1 %"


def test_several_prompt_sets_have_columns_of_their_own():
    several = make_record(counts=FEW, temperatures=(0.0,), sets=("gsm8k", "mt_bench"))
    assert [result["set"] for result in main_results(several)] == [ALL]
    table = sets_table(several, 0.0)
    assert table.header == ["method", "gsm8k", "mt_bench", "all"]
    assert table.rows[0] == ["prompts", "23", "23", "46"]
    told_of(several, "flight", result=1)["speedup"]["estimate"] = 7.77
    assert cells(sets_table(several, 0.0), "mt_bench")["in flight"] == "7.77"
    assert "\\multicolumn{2}{c}{mt\\_bench} & \\multicolumn{2}{c}{Avg.}" in latex_table(several)
    assert sets_table(make_record(counts=FEW), 0.0) is None


def test_markdown_holds_every_table_and_no_name_ends_a_cell(record):
    record["methods"]["paper"]["title"] = "paper | rule\n2"
    text = markdown_parts(told_benchmark(record))
    assert len(re.findall(r"^\| --- ", text, flags=re.MULTILINE)) == len(tables(record))
    assert "\n- \\* fewer than 20" in text  # no list in the list
    assert "paper \\| rule 2" in text
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1
    assert f"- dflash 0.1.0 did not run: {NOT_RUN}" in text


def test_one_table_of_several_records_for_a_readme(record):
    other = make_record("bfloat16", not_run=("dflash", "stock_dflash"))
    header, rule, *rows = readme_table([record, other]).splitlines()
    assert header == (
        "| times plain | float32, greedy | float32, temperature 1 | bfloat16, greedy | bfloat16, temperature 1 |"
    )
    assert rule == "| --- | --- | --- | --- | --- |"
    shown = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ")[1:] for row in rows}
    assert list(shown) == ["**in flight**" if m["is_default"] else m["title"] for m in record["methods"].values()]
    assert shown["transformers DFlash"][2:] == ["-", "-"]
    assert shown["dflash 0.1.0"] == ["-"] * 4
    assert shown["**in flight**"] == [
        f"**{figure(told_of(one, 'flight', result=i)['speedup'])}**" for one in (record, other) for i in (0, 1)
    ]
    told_of(other, "size 4", result=1)["speedup"] = {"estimate": 6.5, "low": 6.0, "high": 7.0}
    assert compared_table([record, other]).rows[6][-1] == "6.50 [6.00 7.00]"


def test_records_are_told_apart_by_what_differs(record):
    def of(**machine):
        return {**record, "meta_info": {**record["meta_info"], "machine": machine}}

    one, two = of(dtype="float32", device_name="A"), of(dtype="float32", device_name="B")
    assert record_labels([one]) == ["float32"]
    assert record_labels([one, of(dtype="bfloat16", device_name="A")]) == ["float32", "bfloat16"]
    assert record_labels([one, two]) == ["float32, A", "float32, B"]
    assert record_labels([one, one]) == ["float32 (1)", "float32 (2)"]


def latex_cells(text):
    """Rows of figures by temperature block: `{method: [cell, ...]}` each."""
    blocks = []
    for line in text.splitlines():
        if "Temperature = " in line:
            blocks.append({})
        elif blocks and " & " in line:
            name, *found = line.strip().removesuffix(" \\\\").split(" & ")
            blocks[-1][name] = found
    return blocks


def test_latex_has_speedup_and_tau_per_group_and_their_averages(record):
    told_of(record, "size 6", "qa")["speedup"]["estimate"] = 5.0
    told_of(record, "size 6", "qa")["acceptance_length"]["estimate"] = 1.5
    blocks = latex_cells(latex_table(record))
    assert len(blocks) == 2
    for block, result in zip(blocks, record["results"], strict=True):
        assert len(block) == len(methods_of(record, result))
        assert {len(row) for row in block.values()} == {2 * (len(COUNTS) + 1)}
    qa = 2 * list(COUNTS).index("qa")
    assert blocks[0]["block size 6"][qa : qa + 2] == ["\\textbf{5.00}", "1.50"]
    speeds = [told_of(record, "size 6", group)["speedup"]["estimate"] for group in COUNTS]
    assert f"{sum(speeds) / len(speeds):.2f}" in blocks[0]["block size 6"][-2]
    assert blocks[0]["plain generate"] == ["1.00"] * 14


def test_latex_is_bold_where_a_column_has_its_best(record):
    for block in latex_cells(latex_table(record)):
        for column in zip(*block.values(), strict=True):
            values = [float(cell.removeprefix("\\textbf{").removesuffix("}")) for cell in column]
            assert [cell.startswith("\\textbf") for cell in column] == [value == max(values) for value in values]


def test_latex_has_no_average_where_a_figure_is_missing(record):
    told_of(record, "size 2", "code")["acceptance_length"] = None
    row = latex_cells(latex_table(record))[0]["block size 2"]
    assert (row[3], row[-1]) == ("--", "--")
    assert row[-2] != "--"


HOSTILE = "a_b & 100 % $x$ #1 {c} \\d ~ ^ < > | ` \n e"


def test_names_are_escaped_for_latex(record):
    record["methods"]["paper"]["title"] = HOSTILE
    record["methods"]["dflash"]["reason"] = HOSTILE
    for kind in ("target", "drafter"):
        record["meta_info"][kind]["name"] = HOSTILE
    for result in record["results"]:
        result["groups"] = {HOSTILE if name == "code" else name: group for name, group in result["groups"].items()}
    for line in latex_table(record).splitlines()[1:]:
        bare = line.replace(escaped(HOSTILE), "NAME").replace("$\\tau$", "").replace("$^{*}$", "")
        assert not re.search(r"(?<!\\)[$#_~^%]", bare), line
        without = re.sub(r"\\[{}]", "", bare)
        assert without.count("{") == without.count("}")
        assert "HOSTILE" not in bare and "a_b" not in bare


def test_escaping_keeps_every_character_and_one_line():
    assert escaped(HOSTILE) == (
        r"a\_b \& 100 \% \$x\$ \#1 \{c\} \textbackslash{}d \textasciitilde{} \textasciicircum{} "
        r"\textless{} \textgreater{} \textbar{} \textasciigrave{} e"
    )
    assert escaped("paper's rule, size 8") == "paper's rule, size 8"

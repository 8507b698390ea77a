"""`blockpilot report`: the same tables from anybody's record, and clear words about files that are none."""

import copy
import json
from pathlib import Path

import pytest
import typer
from benchmark_records import make_record, save_record
from typer.testing import CliRunner

from blockpilot_hf import cli_report
from blockpilot_hf.benchmark_display import markdown_parts, readme_table, told_benchmark
from blockpilot_hf.benchmark_latex import latex_table
from blockpilot_hf.benchmark_reading import read_record
from blockpilot_hf.cli_report import report_command

COUNTS = {"maths": 20, "translation": 4}


@pytest.fixture(scope="module")
def made():
    return make_record(counts=COUNTS)


@pytest.fixture
def record(made):
    return copy.deepcopy(made)


@pytest.fixture
def report(monkeypatch):
    """`report(*arguments)` to what the command printed, or its error, raised."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(report_command)

    def report(*arguments, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = CliRunner().invoke(app, [*map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return report


def test_a_terminal_gets_all_tables_within_its_columns(report, record, tmp_path):
    path = save_record(tmp_path / "benchmark.json", record)
    for columns in (80, 72, 100):
        status, shown = report(path, columns=columns)
        assert status == 0
        assert max(map(len, shown.splitlines())) <= columns
        for words in ("greedy: 24 prompts, float32", "temperature 1, decoding alone", "of bound", "did not run",
                      "by seconds, per prompt", "translation (4 *)", "* fewer than 20 prompts"):  # fmt: skip
            assert words in shown, words
    assert "continued" not in report(path, columns=200)[1]


def test_markdown_and_latex_come_alone(report, record, tmp_path):
    path = save_record(tmp_path / "benchmark.json", record)
    assert report(path, "--format", "markdown") == (0, markdown_parts(told_benchmark(record)))
    assert report(path, "--format", "latex") == (0, latex_table(record))


def test_several_records_get_one_table_together_first(report, record, tmp_path):
    other = make_record("bfloat16", counts=COUNTS)
    paths = [save_record(tmp_path / name / "benchmark.json", one) for name, one in (("a", record), ("b", other))]
    _, text = report(*paths, "--format", "markdown")
    assert text.startswith(readme_table([record, other]))
    assert "## float32\n\n" in text and "## bfloat16\n\n" in text
    _, shown = report(*paths)
    assert shown.lstrip().startswith("times plain\n")
    assert report(*paths, "--format", "latex")[1].count("\\begin{table*}") == 2


@pytest.mark.parametrize("format", ["terminal", "markdown", "latex"])
def test_tables_go_to_a_file(report, record, tmp_path, format):
    path = save_record(tmp_path / "benchmark.json", record)
    _, shown = report(path, "--format", format)
    output = tmp_path / "report.txt"
    _, said = report(path, "--format", format, "--output", output)
    assert output.read_text(encoding="utf-8") == shown.lstrip("\n")
    assert f"tables: {output}" in said.replace("\n", "") or output.name in said
    assert len(said.splitlines()) <= 4
    assert sorted(one.name for one in tmp_path.iterdir()) == ["benchmark.json", "report.txt"]


def test_pictures_of_several_records_have_names_of_their_own(report, record, tmp_path, monkeypatch):
    drawn = []

    def draw(record, folder, *, prefix=""):
        drawn.append((folder, prefix))
        return [folder / f"{prefix}speed.png"]

    monkeypatch.setattr(cli_report, "draw_benchmark", draw)
    path = save_record(tmp_path / "a.json", record)
    other = save_record(tmp_path / "b.json", make_record("bfloat16", counts=COUNTS))
    status, shown = report(path, "--plots", tmp_path / "plots", columns=400)
    assert (status, drawn) == (0, [(tmp_path / "plots", "")])
    assert f"plots: {tmp_path / 'plots' / 'speed.png'}" in shown
    report(path, other, "--plots", tmp_path / "plots")
    assert [prefix for _, prefix in drawn[1:]] == ["float32-", "bfloat16-"]
    _, text = report(path, "--plots", tmp_path / "plots", "--format", "latex")
    assert text == latex_table(record)  # for another program


def test_pictures_are_drawn_from_the_record(report, record, tmp_path):
    path = save_record(tmp_path / "benchmark.json", record)
    status, _ = report(path, "--plots", tmp_path / "plots")
    assert status == 0
    assert len(list((tmp_path / "plots").glob("*.png"))) == 4


def broken(change):
    record = make_record(counts={"maths": 2}, temperatures=(0.0,))
    change(record)
    return json.dumps(record)


def without(*keys):
    def change(record):
        place = record
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]

    return change


OF_ALL = ("results", 0, "groups", "all")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"run_info": {', "is no whole JSON file"),
        ("[1, 2]", "is no record of `blockpilot benchmark`: it is no object"),
        ("{}", "it has no sections, and lacks run_info, meta_info, settings, methods, results"),
        ('{"run_info": {}, "meta_info": {}, "settings": {}, "results": []}', "lacks methods"),
        (broken(without("methods")), "lacks methods. Name a `benchmark.json`"),
        (broken(lambda r: r.update(results=[])), "has no results: its run stopped"),
        (broken(without("meta_info", "machine")), "cannot show: `meta_info` lacks `machine`"),
        (broken(without("methods", "flight", "title")), "`methods`, flight lacks `title`"),
        (broken(without("methods", "plain")), "`methods` lacks `plain`"),
        (broken(lambda r: r["methods"]["flight"].update(kind="other")), "kind 'other', which is none of plain, peer"),
        (broken(without("methods", "size 8")), "size 8 is not in `methods`"),
        (broken(without(*OF_ALL)), "`results`, entry 0 lacks the group `all`"),
        (broken(without(*OF_ALL, "methods", "paper", "of_bound")), "all, paper lacks `of_bound`. Run"),
        (broken(lambda r: r["results"].append(3)), "`results`, entry 1 is no object"),
        (
            broken(lambda r: r["results"][0]["groups"]["all"]["methods"]["paper"].update(speedup=3)),
            "paper, `speedup` is no object",
        ),
        (
            broken(lambda r: r["results"][0]["groups"]["all"]["methods"]["paper"]["speedup"].update(low="x")),
            "`speedup` holds other things than numbers",
        ),
        (broken(without("per_prompt", 0, "category")), "`per_prompt`, entry 0 lacks `category`"),
    ],
)
def test_a_file_that_is_no_record_is_refused_with_what_is_wrong(report, tmp_path, text, message):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as raised:
        report(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_records_of_other_commands_are_refused(report):
    for path in (Path(__file__).parent.parent / "hub_cards").glob("*/*.json"):
        if path.name in ("evaluation.json", "throughput.json"):
            with pytest.raises(ValueError, match="is no record of `blockpilot benchmark`"):
                read_record(path)


def test_what_cannot_be_written_is_said_before_anything_is_read(report, record, tmp_path):
    path = save_record(tmp_path / "benchmark.json", record)
    with pytest.raises(ValueError, match="is in a folder that does not exist"):
        report(path, "--output", tmp_path / "none" / "report.md")
    with pytest.raises(ValueError, match="is one of the records, which it would replace"):
        report(path, "--output", path)
    assert report(path, "--format", "html")[0] == 2
    assert report(tmp_path / "missing.json")[0] == 2


def test_pictures_need_single_prompts_and_tables_do_not(report, record, tmp_path):
    del record["per_prompt"]
    path = save_record(tmp_path / "benchmark.json", record)
    assert report(path)[0] == 0
    with pytest.raises(ValueError, match="no `per_prompt` of all its results"):
        report(path, "--plots", tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_a_missing_extra_is_named_before_anything_is_read(report, tmp_path, monkeypatch):
    def missing(module):
        raise ImportError(f"{module}: pip install 'blockpilot-hf[train]'")

    monkeypatch.setattr(cli_report, "require_extra", missing)
    path = tmp_path / "benchmark.json"
    path.write_text("broken", encoding="utf-8")
    with pytest.raises(ImportError, match="matplotlib"):
        report(path, "--plots", tmp_path / "plots")

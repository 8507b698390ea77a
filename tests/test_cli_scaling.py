"""`blockpilot scaling` on the tiny pair: record, resumption, refusals, and the same again from the record alone."""

import json

import pytest
from scaling_records import make_scaling_record

from blockpilot_hf import cli_scaling
from blockpilot_hf.scaling_reading import read_scaling_record
from blockpilot_hf.scaling_summary import summarize_scaling

pytest_plugins = ["cli_models"]

QUICK = ("--prompt-lengths", "8,24", "--answer-lengths", "4,9", "--repeats", "1")


def pair(folders):
    return ["--drafter", str(folders / "drafter"), "--policy", "none"]


def test_record_table_and_picture(run, folders, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, _ = run("scaling", *pair(folders), *QUICK, "--prompt-lengths", "8,24,4096", "--output", tmp_path)
    assert status == 0
    record = read_scaling_record(tmp_path / "scaling.json")
    assert record["run_info"]["status"] == "whole" and record["run_info"]["command"].startswith("blockpilot scaling")
    assert record["settings"]["prompt_lengths"] == [8, 24] and record["settings"]["answer_lengths"] == [4, 9]
    assert record["settings"]["left_out"] == [
        "prompts of 4,096 tokens: with answers of 4 past the 512 positions of the target"
    ]
    assert "min_new_tokens" in record["settings"]["answers"]
    assert [*record["methods"]] == ["plain", "size 8", "flight"]
    assert [(cell["prompt_length"], cell["answer_length"]) for cell in record["cells"]] == [(8, 4), (24, 4), (8, 9)]
    assert record["summary"] == summarize_scaling(record["cells"], [*record["methods"]])
    assert record["meta_info"]["drafter"]["training_block_size"] == 8 and record["costs"]["verify_s"]
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    told = [line for line in out.splitlines() if line.startswith("Growth")]
    assert len(told) == 1 and "left out: prompts of 4,096 tokens" in out and "record:" in out

    again, shown, _ = run("report", tmp_path / "scaling.json", "--plots", tmp_path / "again", target=False)
    assert again == 0 and told[0] in shown
    assert (tmp_path / "again" / "scaling.png").is_file()


def test_a_run_that_is_stopped_keeps_what_it_has_and_goes_on(run, folders, tmp_path, monkeypatch):
    arguments = [*pair(folders), *QUICK, "--no-plots", "--output", tmp_path]
    run_cells = cli_scaling.run_cells

    def stopped(target, drafter, tokenizer, methods, cells, path, **kwargs):
        run_cells(target, drafter, tokenizer, methods, list(cells)[:2], path, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cli_scaling, "run_cells", stopped)
        status, out, _ = run("scaling", *arguments)
    assert status == 130 and "stopped with 2 of 3 cells; the same command goes on" in out
    first = read_scaling_record(tmp_path / "scaling.json")
    assert first["run_info"]["status"] == "stopped" and len(first["cells"]) == 2
    assert run("scaling", *arguments)[0] == 0
    whole = read_scaling_record(tmp_path / "scaling.json")
    assert whole["run_info"]["status"] == "whole" and whole["cells"][:2] == first["cells"] and len(whole["cells"]) == 3
    # More of the same is no other setting, a seed is.
    assert run("scaling", *arguments, "--answer-lengths", "4,9,12")[0] == 0
    assert read_scaling_record(tmp_path / "scaling.json")["cells"][:3] == whole["cells"]
    status, _, err = run("scaling", *arguments, "--seed", "3")
    assert status == 2 and "other settings" in err and "--output" in err
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--prompt-lengths", "few"], "`--prompt-lengths` takes numbers"),
        (["--prompt-lengths", "1"], "whole numbers from 2"),
        (["--answer-lengths", "1,4"], "`--answer-lengths` takes whole numbers from 2"),
        (["--prompt-lengths", "600"], "do not fit into the 512 positions of the target"),
        (["--policy", "./nowhere"], "does not exist"),
    ],
)
def test_what_is_wrong_is_told(run, folders, tmp_path, given, message):
    status, _, err = run("scaling", *pair(folders), "--output", tmp_path, "--no-plots", *given)
    assert status == 2 and message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def saved(tmp_path):
    def saved(name="scaling.json", change=lambda record: None, **more):
        record = make_scaling_record(**more)
        change(record)
        path = tmp_path / name
        path.write_text(json.dumps(record))
        return path

    return saved


def test_reports_are_markdown_too_and_several_at_once(run, saved):
    status, out, _ = run("report", saved(), "--format", "markdown", target=False)
    assert status == 0 and "| prompts | plain generate | block size 8 | in flight |" in out
    assert out.rstrip().splitlines()[-1].startswith("- Growth: none that plain generate has not")
    both = [saved("a.json"), saved("b.json", dtype="bfloat16")]
    status, out, _ = run("report", *both, "--format", "markdown", target=False)
    assert status == 0 and "## float32\n\n" in out and "## bfloat16\n\n" in out


def without(*keys):
    def change(record):
        place = record
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]

    return change


SWEEP = ("summary", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("summary"), "is no record of `blockpilot scaling`: it has run_info,"),
        (lambda r: r.update(summary=[]), "cannot show: `summary` is empty"),
        (without("meta_info", "machine"), "`meta_info` lacks `machine`"),
        (without("methods", "plain"), "`methods` lacks `plain`"),
        (without("methods", "flight", "title"), "`methods`, flight lacks `title`"),
        (lambda r: r["methods"].pop("flight") and r["methods"].pop("size 8"), "nothing beside `plain`"),
        (without(*SWEEP, "growth"), "`summary`, entry 0 lacks `growth`. Run `blockpilot scaling` again"),
        (without(*SWEEP, "answer_length"), "`summary`, entry 0 lacks `answer_length`"),
        (lambda r: r["summary"][0].update(axis="width"), "is of 'width', which is none of prompt_length"),
        (lambda r: r["summary"][0].update(lengths=[]), "entry 0 has no lengths"),
        (without(*SWEEP, "methods", "flight", "prefill_s"), "entry 0, flight lacks `prefill_s`"),
        (
            lambda r: r["summary"][0]["methods"]["flight"].update(prefill_s=[1]),
            "`prefill_s` is no number for each of 3 lengths",
        ),
        (without(*SWEEP, "growth", "flight", "peak_memory_bytes"), "flight lacks `peak_memory_bytes`"),
        (
            lambda r: r["summary"][0]["growth"]["flight"]["peak_memory_bytes"].update(growth="much"),
            "holds other things than numbers",
        ),
        (lambda r: r["summary"].append(3), "`summary`, entry 2 is no object"),
        (lambda r: r["cells"].append(3), "`cells`, entry 4 is no object"),
    ],
)
def test_broken_and_older_records_are_told_apart(run, saved, change, message):
    assert run("report", saved("good.json"), target=False)[0] == 0
    status, _, err = run("report", saved("bad.json", change), target=False)
    assert status == 2 and message in err and "bad.json" in err and err.count("\n") == 1


def test_what_cannot_be_shown_together_or_as_latex_is_refused(run, saved, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    status, _, err = run("report", saved(), other, target=False)
    assert status == 2 and "is a scaling record" in err and "Name records of one kind" in err
    status, _, err = run("report", saved(), "--format", "latex", target=False)
    assert status == 2 and "`--format latex` has tables of benchmarks only" in err

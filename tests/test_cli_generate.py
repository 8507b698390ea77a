"""`blockpilot generate` on a tiny saved pair, through `main` as the installed script calls it."""

import io
import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockpilot_hf import BlockPilot, cli_generate, cli_measure
from blockpilot_hf.cli_common import EMBEDDED, load_pilot
from blockpilot_hf.costs import CostTable
from blockpilot_hf.prompts import encode_prompt, sample_prompts
from blockpilot_hf.trace import DecodeTrace

pytest_plugins = ["cli_models"]


@pytest.fixture(scope="module")
def plain(folders):
    """`plain(text, new tokens)`: what plain `generate` answers."""
    target = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folders / "target")

    def plain(text, max_new_tokens, *, seed=None, **kwargs):
        ids = encode_prompt(tokenizer, text, kwargs.pop("system", None), kwargs.pop("history", ()))
        if seed is not None:
            torch.manual_seed(seed)
            kwargs.update(do_sample=True, top_k=0, top_p=1.0)
        output = target.generate(ids, max_new_tokens=max_new_tokens, **{"do_sample": False, **kwargs})
        return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

    return plain


def pipe(monkeypatch, content):
    """Put bytes, or nothing at all, on standard input."""
    stream = io.TextIOWrapper(io.BytesIO(content), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stream)


def last_object(out):
    """The last line, in which every number has to be finite."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no number")

    return json.loads(out.splitlines()[-1], parse_constant=refuse)


# --- text and lines ---


def test_the_answer_comes_first_and_is_plain_generates(run, folders, plain):
    status, out, _ = run("generate", "hello", "--max-new-tokens", 12, "--drafter", folders / "drafter")
    assert status == 0 and out.startswith(plain("hello", 12) + "\n\n")
    assert "\nblock size 8 (no policy" in out and "\ntau " in out and "12 tokens in" in out


@pytest.mark.parametrize("accuracy", ["0", "0.5", "1"])
def test_the_strip_tells_every_token(run, accuracy):
    out = run("generate", "hello", "--max-new-tokens", 17, "--drafter", f"scripted:{accuracy}", "--adapt", "prompt")[1]
    strip = out[out.index("tokens by step: ▮ drafted and accepted, · the target's own\n") :].split("\n")[1]
    assert strip.startswith("  · ") and len(strip.replace(" ", "")) == 17
    assert ("▮" in strip) is (accuracy != "0")
    if accuracy == "1":
        assert "tau 16.00 tokens per step: 16 in 1 step, and 1 from the prefill" in out
        assert strip == f"  · {'▮' * 15}·"


def test_text_is_shown_step_by_step(run, monkeypatch):
    """What is on the screen after each step, not what is there in the end."""
    seen = []
    write = cli_generate.Screen.write

    def watch(screen, pieces):
        write(screen, pieces)
        seen.append("".join(piece.text for piece in pieces))

    monkeypatch.setattr(cli_generate.Screen, "write", watch)
    run("generate", "hello", "--max-new-tokens", 10, "--drafter", "scripted:1", "--block-size", 4)
    assert [len(text) for text in seen] == [1, 4, 4, 1, 0]


def test_a_policy_chooses_and_all_scores_are_shown(run, folders):
    arguments = ["generate", "hello", "--max-new-tokens", 6, "--policy", folders / "policy"]
    status, out, _ = run(*arguments, "--json")
    record = last_object(out)
    assert status == 0 and set(record["scores"]) == {"2", "4", "8"}
    best = max(record["scores"], key=record["scores"].get)
    assert record["block_size"] == int(best) and f"\nblock size {best} (policy: " in out and f"[{best}: " in out
    assert all(f"{size}: {score:.3g}" in out for size, score in record["scores"].items())
    off = last_object(run(*arguments, "--policy", "none", "--json")[1])
    assert off["block_size"] == 16 and off["scores"] == {} and off["policy"] == "none"


def test_options_reach_the_target(run, plain):
    sampled = run("generate", "hi", "--max-new-tokens", 9, "--temperature", 0.8, "--seed", 3, "-q")[1]
    assert sampled == plain("hi", 9, seed=3, temperature=0.8) + "\n"
    assert run("generate", "hi", "--max-new-tokens", 9, "--temperature", 0.8, "--seed", 4, "-q")[1] != sampled
    instructed = run("generate", "hi", "--max-new-tokens", 9, "--system", "be brief", "-q")[1]
    assert (
        instructed == plain("hi", 9, system="be brief") + "\n" != run("generate", "hi", "--max-new-tokens", 9, "-q")[1]
    )


def test_marks_can_be_chosen(run, plain):
    arguments = ["generate", "hello", "--max-new-tokens", 12, "--drafter", "scripted:1"]
    inline = run(*arguments, "--marks", "inline")[1]
    assert "in ⟦ ⟧: drafted and accepted" in inline and "▮" not in inline
    assert inline.partition("\n")[0].translate({ord(c): None for c in "⟦⟧"}) == plain("hello", 12)
    none = run(*arguments, "--marks", "none")[1]
    assert none.startswith(plain("hello", 12)) and "▮" not in none and "⟦" not in none


def test_an_untrained_drafter_is_called_one(run):
    assert "untrained" in run("generate", "hello", "--max-new-tokens", 4, "--drafter", "untrained")[1]


def test_nothing_is_drafted_at_block_size_one_so_there_is_no_strip(run):
    out = run("generate", "hello", "--max-new-tokens", 4, "--block-size", 1)[1]
    assert "tokens by step" not in out and "tau 1.00 tokens per step: 3 in 3 steps" in out


@pytest.mark.parametrize("columns", [40, 76])
def test_lines_fit_the_width(run, prompts, columns):
    out = run("generate", "--prompts", prompts, "--limit", 2, "--max-new-tokens", 8, "--compare", columns=columns)[1]
    assert max(map(len, out.splitlines())) <= columns and "\x1b" not in out


# --- where prompts come from ---


def test_a_pipe_is_read_with_and_without_a_dash(run, monkeypatch, plain):
    expected = plain("größe", 6) + "\n"
    for arguments in ([], ["-"]):
        pipe(monkeypatch, "größe\n".encode())
        assert run("generate", *arguments, "--max-new-tokens", 6, "-q")[:2] == (0, expected)


def test_a_pipe_is_left_alone_when_a_prompt_is_given(run, monkeypatch, plain):
    pipe(monkeypatch, b"other")
    assert run("generate", "hello", "--max-new-tokens", 6, "-q")[1] == plain("hello", 6) + "\n"
    assert sys.stdin.read() == "other"


def test_several_prompts_are_answered_in_turn(run, monkeypatch, plain):
    pipe(monkeypatch, b"two")
    status, out, _ = run("generate", "one", "-", "three", "--max-new-tokens", 6, "-q")
    assert status == 0 and out == "".join(plain(text, 6) + "\n" for text in ("one", "two", "three"))


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        ([" "], b"", "The prompt is empty"),
        (["hi", ""], b"", "The prompt is empty"),
        ([], b"", "The prompt is empty. Pass some text as PROMPT, through a pipe, or in a file"),
        (["-"], b" \n", "The prompt is empty"),
        (["-", "-"], b"hi", "read once"),
        (["-"], b"caf\xe9", "Standard input is not UTF-8"),
        (["hi", "--samples"], b"", "exclude each other"),
        (["hi", "--limit", "1"], b"", "--prompts"),
    ],
)
def test_prompts_that_are_none_are_refused_before_anything_is_loaded(run, monkeypatch, arguments, content, message):
    monkeypatch.setattr(cli_generate, "load_target", lambda *a, **k: pytest.fail("loaded"))
    pipe(monkeypatch, content)
    status, out, err = run("generate", *arguments)
    assert status == 2 and out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_without_a_prompt_on_a_terminal_one_is_asked_for(run, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("typed"))
    status, _, err = run("generate")
    assert status == 2 and "There is nothing to answer. Pass a PROMPT" in err


def test_a_file_is_answered_with_headings_and_a_table(run, prompts, plain):
    status, out, _ = run("generate", "--prompts", prompts, "--max-new-tokens", 5, "--limit", 2, "--adapt", "prompt")
    assert status == 0
    for number, text in ((1, "text 0"), (2, "text 1")):
        assert f"[{number}/2] p[{number - 1}]\n> {text}\n\n{plain(text, 5)}\n" in out
    assert out.count("drafted and accepted") == 1  # the legend
    table = out[out.index("all prompts\n") :]
    assert table.count("p[0]") == table.count("p[1]") == 1 and "plain" not in table


def test_turns_follow_each_other_with_the_answers_between(run, tmp_path, plain):
    file = tmp_path / "turns.jsonl"
    file.write_text(json.dumps({"id": "x", "turns": ["one", "two"], "category": "chat"}))
    status, out, _ = run("generate", "--prompts", file, "--max-new-tokens", 7, "--json", "--marks", "none")
    first = plain("one", 7)
    second = plain("two", 7, history=[("one", first)])
    assert status == 0 and second != plain("two", 7)
    assert "[1/2] chat x, turn 1" in out and "[2/2] chat x, turn 2" in out
    assert [(e["turn"], e["prompt"], e["text"]) for e in last_object(out)["prompts"]] == [
        (1, "one", first),
        (2, "two", second),
    ]


def test_samples_are_three_prompts_of_different_kinds(run):
    status, out, _ = run("generate", "--samples", "--max-new-tokens", 3, "--json")
    record = last_object(out)
    assert status == 0 and [e["category"] for e in record["prompts"]] == ["maths", "code", "translation"]
    assert [e["prompt"] for e in record["prompts"]] == [prompt.turns[0] for prompt in sample_prompts()]


# --- the comparison, and JSON ---


def test_one_prompt_gives_one_object(run, folders, plain):
    status, out, _ = run("generate", "hello", "--max-new-tokens", 12, "--block-size", 4, "--json")
    record = last_object(out)
    assert status == 0 and record["text"] == plain("hello", 12) and record["block_size"] == 4
    assert record["num_new_tokens"] == 12 and record["scores"] == {} and record["reason"] == "fixed by the caller"
    assert record["acceptance_length"] == pytest.approx(11 / record["num_steps"])
    assert record["total_s"] == pytest.approx(record["prefill_s"] + record["policy_s"] + record["decode_s"])
    assert record["tokens_per_second"] == pytest.approx(12 / record["total_s"])
    assert (record["target"], record["drafter"], record["policy"]) == (str(folders / "target"), "scripted", "none")
    assert record["dtype"] == "float32" and record["num_threads"] == 1 and record["is_packed"] is False
    assert "identical" not in record and "speedup" not in record


def test_a_comparison_adds_ratio_and_verdict(run):
    status, out, _ = run("generate", "hello", "--max-new-tokens", 12, "--compare", "--repeats", 3, "--json")
    record = last_object(out)
    assert status == 0 and record["identical"] is True and record["repeats"] == 3
    assert record["speedup"] == pytest.approx(record["tokens_per_second"] / record["plain_tokens_per_second"])
    assert record["tokens_per_second"] == pytest.approx(12 / record["total_s"])
    assert f"{record['tokens_per_second']:.1f} tokens per second: 12 tokens" in out
    assert f"plain generate {record['plain_tokens_per_second']:.1f} tokens per second" in out
    assert f"ratio {record['speedup']:.2f} (medians of 3 calls each" in out
    assert "\ncompared: identical\n" in out


def test_several_prompts_give_one_object_with_what_they_have_in_common(run, prompts):
    status, out, _ = run("generate", "--prompts", prompts, "--max-new-tokens", 6, "--compare", "--json")
    record = last_object(out)
    each = record["prompts"]
    assert status == 0 and record["num_prompts"] == 3 and [e["id"] for e in each] == ["p[0]", "p[1]", "p[2]"]
    assert record["min_speedup"] == min(e["speedup"] for e in each)
    assert record["mean_speedup"] == pytest.approx(math.fsum(e["speedup"] for e in each) / 3)
    assert record["all_identical"] is True and record["drafter"] == "scripted"
    table = out[out.index("all prompts\n") :].splitlines()
    assert [line.split()[-1] for line in table if line.startswith("p[")] == ["yes"] * 3


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_answers_of_one_and_two_tokens(run, new_tokens):
    status, out, _ = run("generate", "hello", "--max-new-tokens", new_tokens, "--compare", "--json")
    record = last_object(out)
    assert status == 0 and record["num_steps"] == new_tokens - 1 and record["identical"] is True


def test_a_difference_is_told_with_its_place_and_gap(run, monkeypatch):
    found = cli_measure.Measurement(DecodeTrace(num_new_tokens=6), 2.0, 3.0, 6, 1, 4, 0.0625, True)
    monkeypatch.setattr(cli_generate, "measure", lambda *a, **k: found)
    status, out, _ = run("generate", "hello", "--max-new-tokens", 6, "--compare", "--json")
    record = last_object(out)
    assert status == 0 and record["speedup"] == 1.5
    assert (record["identical"], record["first_difference"], record["gap"]) == (False, 4, 0.0625)
    assert "compared: identical up to token 4, gap 0.0625 (a near-tie within rounding)" in out


# --- names ---


def test_without_a_drafter_the_embedded_pilot_answers(run, monkeypatch, folders):
    """On the tiny target, under the names of the embedded pair."""
    asked = []
    target, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folders / "target"),
        AutoTokenizer.from_pretrained(folders / "target"),
    )
    pilot = load_pilot(str(folders / "drafter"), str(folders / "policy"), target)

    def from_pretrained(cls, *, policy, pack, dtype, adapt, lookup, costs):
        assert dtype == target.dtype and (adapt, lookup, costs) == (None, None, None)
        asked.append((policy, pack))
        return pilot if policy is None else BlockPilot(pilot.drafter, policy)

    monkeypatch.setattr(cli_generate, "load_target", lambda *a, **k: (target, tokenizer))
    monkeypatch.setattr(BlockPilot, "from_pretrained", classmethod(from_pretrained))
    record = last_object(run("generate", "hello", "--max-new-tokens", 4, "--json", target=False)[1])
    assert record["drafter"] == EMBEDDED and record["block_size"] in (2, 4, 8) and asked == [(None, None)]
    arguments = ["generate", "hi", "--max-new-tokens", 4, "--policy", "none", "--no-pack", "--json"]
    record = last_object(run(*arguments, target=False)[1])
    assert record["policy"] == "none" and asked[1:] == [(False, False)]


def test_packing_is_left_to_the_embedded_target_unless_it_is_switched_off(run, monkeypatch):
    from blockpilot_hf import cli_common

    asked = []

    def load(**options):
        asked.append(options["pack"])
        raise OSError("enough")

    monkeypatch.setattr(cli_common, "load_embedded_target", load)
    run("generate", "hi", target=False)
    run("generate", "hi", "--no-pack", target=False)
    assert asked == [None, False]


# --- decisions in flight ---


def test_in_flight_the_text_is_the_same_and_the_steps_are_told(run, folders, plain, tmp_path):
    arguments = ["generate", "hello", "--max-new-tokens", 20, "--adapt", "flight", "--drafter", "scripted", "--json"]
    status, out, _ = run(*arguments)
    assert status == 0 and out.startswith(plain("hello", 20) + "\n\n")
    found = last_object(out)
    assert found["adapt"] == "flight" and "default" in found["costs"]
    assert "\nin flight: " in out and f"costs: {found['costs']}" in " ".join(out.split())
    costs = tmp_path / "costs.json"
    CostTable((0,), {1: (1.0,), 16: (1.1,)}, {2: (0.1,), 16: (0.1,)}, source="made up").save(costs)
    assert last_object(run(*arguments, "--costs", costs)[1])["costs"] == "made up"


def test_copies_are_told_and_can_be_turned_off(run, tmp_path):
    """A prompt that repeats itself, and costs by which copies pay and drafts do not."""
    costs = tmp_path / "costs.json"
    CostTable((0,), {1: (1.0,), 16: (1.01,)}, {2: (9.0,), 16: (9.0,)}).save(costs)
    arguments = ["generate", "abc abc abc abc", "--max-new-tokens", 20, "--drafter", "scripted", "--costs", costs]
    status, out, _ = run(*arguments)
    assert status == 0 and "copied from the text so far" in " ".join(out.split())
    status, without, _ = run(*arguments, "--no-lookup")
    assert status == 0 and "copied from" not in " ".join(without.split())
    assert without.split("\n\n")[0] == out.split("\n\n")[0]
    status, _, err = run(*arguments, "--lookup", "--adapt", "prompt")
    assert status == 2 and "`lookup=True` copies" in err


def test_in_flight_and_a_fixed_size_are_refused_together(run):
    status, _, err = run("generate", "hello", "--adapt", "flight", "--block-size", 4)
    assert status == 2 and "Give one of the two" in err

"""Figures of a benchmark: what they are by hand, and that they move with the lines."""

import pytest

from blockpilot_hf.benchmark_summary import summarize


def call(total, tokens=11, steps=10, *, draft=0.0, verify=None, difference=None, tie=None):
    """Of `total` seconds, one of prefill."""
    decode = total - 1.0
    verify = decode if verify is None else verify
    return {
        "total_s": total,
        "prefill_s": 1.0,
        "policy_s": 0.0,
        "decode_s": decode,
        "draft_s": draft,
        "verify_s": verify,
        "other_s": None if draft is None else decode - draft - verify,
        "num_new_tokens": tokens,
        "num_steps": steps,
        "first_difference": difference,
        "is_near_tie": tie,
    }


def line(prompt, calls, *, category="math", temperature=0.0, turn=1, repeat=0, set_name="embedded"):
    where = {"set": set_name, "prompt": prompt, "category": category, "turn": turn}
    return {**where, "temperature": temperature, "repeat": repeat, "calls": calls}


def told(lines, name="flight", group="all", **more):
    return summarize(lines, num_resamples=200, **more)[0]["groups"][group]["methods"][name]


def test_figures_of_one_prompt_by_hand():
    lines = [line("a", {"plain": call(11.0), "flight": call(6.0, steps=4, draft=1.0, verify=3.0)})]
    ours = told(lines)
    assert ours["speedup"]["estimate"] == pytest.approx(11 / 6)
    assert ours["decode_speedup"]["estimate"] == pytest.approx(10 / 5)
    assert ours["acceptance_length"]["estimate"] == pytest.approx(10 / 4)
    assert ours["bound"]["estimate"] == pytest.approx(10 / 4)
    assert ours["of_bound"]["estimate"] == pytest.approx(0.8)
    assert ours["overhead_share"]["estimate"] == pytest.approx(0.2)
    assert ours["tokens_per_second"]["estimate"] == pytest.approx(11 / 6)
    assert ours["over_default"]["estimate"] == 1 and told(lines, "plain")["over_default"]["estimate"] == pytest.approx(
        11 / 6
    )
    assert ours["seconds_per_token"] == pytest.approx(
        {"prefill": 1 / 11, "policy": 0.0, "draft": 1 / 11, "verify": 3 / 11, "other": 1 / 11}
    )
    assert ours["speedup"]["low"] is None, "one prompt has no interval"
    plain = told(lines, "plain")
    assert plain["speedup"]["estimate"] == 1 and plain["bound"] is None and plain["num_identical"] == 1


def test_speeds_are_means_over_prompts_with_intervals_in_pairs():
    lines = [
        line(f"p{i}", {"plain": call(11.0 + i), "flight": call((11.0 + i) / (2 if i % 2 else 1))}) for i in range(20)
    ]
    ours = told(lines)
    assert ours["speedup"]["estimate"] == pytest.approx(1.5)
    assert 1.2 < ours["speedup"]["low"] < 1.5 < ours["speedup"]["high"] < 1.8
    slower = told([line(f"p{i}", {"plain": call(10.0 + i), "flight": call(2 * (10.0 + i))}) for i in range(20)])
    assert slower["speedup"]["estimate"] == pytest.approx(0.5) and slower["num_slow"] == 20
    assert slower["speedup"]["low"] == pytest.approx(0.5), "pairs vary in nothing but their common part"


def test_turns_are_added_and_of_repeats_medians_count():
    turns = [
        line("a", {"plain": call(11.0), "flight": call(seconds)}, turn=turn) for turn, seconds in ((1, 6.0), (2, 11.0))
    ]
    assert told(turns)["speedup"]["estimate"] == pytest.approx(22 / 17)
    repeats = [
        line("a", {"plain": call(11.0), "flight": call(seconds)}, repeat=i)
        for i, seconds in enumerate((4.0, 5.5, 90.0))
    ]
    ours = told(repeats)
    assert ours["speedup"]["estimate"] == pytest.approx(2.0) and ours["spread"] == pytest.approx(86 / 5.5)
    assert told(turns)["spread"] is None


def test_texts_that_differ_are_counted_apart():
    calls = {
        "plain": call(11.0),
        "flight": call(6.0, difference=3, tie=True),
        "dflash": call(6.0, difference=2, tie=False),
    }
    lines = [line("a", calls), line("b", {"plain": call(11.0), "flight": call(6.0), "dflash": call(6.0)})]
    assert (told(lines)["num_identical"], told(lines)["num_explained"]) == (1, 1)
    assert (told(lines, "dflash")["num_identical"], told(lines, "dflash")["num_explained"]) == (1, 0)


def test_what_is_not_known_of_a_peer_stays_open():
    lines = [line("a", {"plain": call(11.0), "flight": call(5.0), "dflash": call(6.0, draft=None)})]
    peer = told(lines, "dflash")
    assert peer["bound"] is None and peer["overhead_share"] is None and peer["of_bound"] is None
    assert peer["seconds_per_token"]["draft"] is None and peer["seconds_per_token"]["verify"] == pytest.approx(5 / 11)


def test_groups_sets_and_temperatures_are_told_apart():
    lines = [
        line("a", {"plain": call(11.0), "flight": call(5.5)}),
        line("b", {"plain": call(11.0), "flight": call(11.0)}, category="translation"),
        line("a", {"plain": call(11.0), "flight": call(22.0)}, temperature=1.0),
        line("a", {"plain": call(11.0), "flight": call(11.0)}, set_name="gsm8k"),
    ]
    results = summarize(lines, num_resamples=10)
    assert [(one["temperature"], one["set"], one["num_prompts"]) for one in results] == [
        *((0.0, "all", 3), (0.0, "embedded", 2), (0.0, "gsm8k", 1)),
        *((1.0, "all", 1), (1.0, "embedded", 1)),
    ]
    groups = results[1]["groups"]
    assert list(groups) == ["maths", "translation", "all"] and not groups["all"]["is_enough"]
    assert groups["maths"]["methods"]["flight"]["speedup"]["estimate"] == pytest.approx(2.0)
    assert groups["all"]["methods"]["flight"]["speedup"]["estimate"] == pytest.approx(1.5)


def test_prompts_without_decoding_are_left_out_and_only_such_ones_refused():
    short = line("short", {"plain": call(1.0, tokens=1, steps=0), "flight": call(1.0, tokens=1, steps=0)})
    assert summarize([short, line("a", {"plain": call(11.0), "flight": call(5.5)})])[0]["num_prompts"] == 1
    with pytest.raises(ValueError, match="more than one token"):
        summarize([short])

"""What a benchmark times: every method gives an answer, plain's own where it promises so, with seconds that add up."""

import importlib.util

import pytest
import torch
from conftest import constant_policy, fit_drafter, make_drafter, make_prompt, make_target, plain_generate

from blockpilot_hf import BlockPilot, benchmark_methods
from blockpilot_hf.benchmark_methods import Method, make_methods, timed_answer
from blockpilot_hf.parity import ScriptedDrafter
from blockpilot_hf.peer_dflash import peer_drafter, peer_generate

GREEDY = {"do_sample": False, "max_new_tokens": 20}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 20}


@pytest.fixture(scope="module")
def pair():
    target = make_target("llama")
    drafter, prompt = make_drafter(target), make_prompt(11)
    fit_drafter(target, drafter, plain_generate(target, prompt, max_new_tokens=40, do_sample=False))
    return target, BlockPilot(drafter, False), prompt


@pytest.fixture(scope="module")
def methods(pair):
    target, pilot, _ = pair
    return make_methods(
        target, pilot, policy=constant_policy(4), paper_policy=constant_policy(3), block_sizes=[4, 8, 2]
    )


@pytest.fixture(scope="module")
def answers(pair, methods):
    target, _, prompt = pair
    return {name: timed_answer(method, target, prompt, seed=0, **GREEDY) for name, method in methods.items()}


def test_all_methods_are_there_in_the_order_of_tables(methods):
    assert list(methods) == [
        *("plain", "stock_dflash", "prompt_lookup", "dflash", "size 2", "size 4", "size 8"),
        *("paper", "seconds", "flight_drafts", "flight", "flight_drawn"),
    ]
    assert [name for name, method in methods.items() if method.is_default] == ["flight"]
    assert not [method.reason for method in methods.values() if method.reason]
    assert methods["dflash"].title == "dflash 0.1.0"


def test_greedy_texts_are_plain_generates_with_every_method(pair, answers):
    target, _, prompt = pair
    plain = plain_generate(target, prompt, **GREEDY)[0, prompt.shape[1] :].tolist()
    assert {name: list(answer.new_ids) for name, answer in answers.items()} == dict.fromkeys(answers, plain)


def test_seconds_add_up_and_passes_are_counted(answers):
    for name, answer in answers.items():
        assert answer.prefill_s > 0 and answer.decode_s > 0
        assert answer.prefill_s + answer.policy_s + answer.decode_s <= answer.total_s * 1.001
        known = [part for part in (answer.draft_s, answer.verify_s) if part is not None]
        assert sum(known) <= answer.decode_s * 1.001, name
        assert 1 <= answer.acceptance_length <= 11
    assert answers["plain"].num_steps == 19 and answers["plain"].acceptance_length == 1
    assert answers["plain"].draft_s == 0 and answers["stock_dflash"].draft_s is None
    for name in ("stock_dflash", "dflash", "size 8"):
        assert answers[name].num_steps < 12, "nothing was accepted"


def test_our_answers_bring_their_steps(answers):
    for name in ("size 4", "paper", "seconds", "flight"):
        answer = answers[name]
        assert len(answer.steps) == answer.num_steps
        assert sum(accepted + 1 for _, _, accepted in answer.steps) == len(answer.new_ids) - 1
    assert answers["size 4"].block_size == 4 and answers["paper"].block_size == 3
    assert answers["plain"].steps is None


def test_sampled_texts_of_ours_are_plains_for_the_seed_unless_drafts_are_drawn(pair, methods):
    target, _, prompt = pair
    found = {name: timed_answer(method, target, prompt, seed=3, **SAMPLED).new_ids for name, method in methods.items()}
    for name in ("size 2", "size 8", "paper", "seconds", "flight"):
        assert found[name] == found["plain"]
    other = timed_answer(methods["plain"], target, prompt, seed=4, **SAMPLED).new_ids
    assert other != found["plain"]
    assert all(len(ids) == 20 for ids in found.values())
    assert methods["flight_drawn"].for_sampling


def test_what_cannot_run_says_why(pair, monkeypatch):
    target, pilot, _ = pair
    monkeypatch.setattr(benchmark_methods.importlib.util, "find_spec", lambda name: None)
    methods = make_methods(target, pilot)
    assert "pip install --no-deps dflash" in methods["dflash"].reason
    assert "--paper-policy" in methods["paper"].reason and "--policy" in methods["seconds"].reason
    assert methods["flight"].reason == "" and methods["flight"].call is not None
    scripted = make_methods(target, BlockPilot(ScriptedDrafter(target), False))
    assert scripted["stock_dflash"].reason == "the drafter is no model"
    assert scripted["flight"].reason == ""


@pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="dflash is not installed")
def test_a_drafter_that_the_peer_cannot_take_is_listed_with_the_reason(pair, monkeypatch):
    target, pilot, _ = pair

    def refuse(drafter):
        raise ValueError("The package dflash cannot take this drafter: a differ.\nmore")

    monkeypatch.setattr(benchmark_methods, "peer_drafter", refuse)
    assert make_methods(target, pilot)["dflash"].reason == "The package dflash cannot take this drafter: a differ."


@pytest.mark.parametrize("fields", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}])
def test_the_peers_drafter_has_our_weights_and_drafts_the_same(fields):
    pytest.importorskip("dflash")
    target = make_target("qwen3")
    drafter, prompt = make_drafter(target, **fields), make_prompt(11)
    fit_drafter(target, drafter, plain_generate(target, prompt, max_new_tokens=40, do_sample=False))
    theirs = peer_drafter(drafter)
    ours = dict(drafter.named_parameters())
    assert {name for name, _ in theirs.named_parameters()} == set(ours)
    assert all(torch.equal(value, ours[name]) for name, value in theirs.named_parameters())
    text = peer_generate(theirs, target, prompt, max_new_tokens=20)
    assert torch.equal(text, plain_generate(target, prompt, **GREEDY))


def test_a_method_without_a_call_cannot_be_timed(pair):
    target, _, prompt = pair
    with pytest.raises(AssertionError, match="is not here"):
        timed_answer(Method("x", "peer", reason="is not here"), target, prompt, seed=0, **GREEDY)

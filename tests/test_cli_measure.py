"""Timing plain `generate` and ours: what is called, in which order, and what is made of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockpilot_hf import cli_measure
from blockpilot_hf.cli_common import load_pilot
from blockpilot_hf.parity import Comparison

pytest_plugins = ["cli_models"]


@pytest.fixture
def pair(folders):
    target = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=torch.float32)
    return target, load_pilot(str(folders / "drafter"), None, target), torch.randint(4, 60, (1, 8))


def test_both_are_called_in_turns_after_a_warm_up(pair, monkeypatch):
    target, pilot, ids = pair
    calls = []
    generate, ours = type(target).generate, pilot.generate

    def plain_call(model, *arguments, custom_generate=None, **kwargs):
        if custom_generate is None:
            calls.append(("plain", kwargs["max_new_tokens"]))
        return generate(model, *arguments, custom_generate=custom_generate, **kwargs)

    def our_call(model, *arguments, **kwargs):
        calls.append(("ours", kwargs["max_new_tokens"]))
        return ours(model, *arguments, **kwargs)

    monkeypatch.setattr(type(target), "generate", plain_call)
    monkeypatch.setattr(pilot, "generate", our_call)
    measured = cli_measure.measure(target, pilot, ids, block_size=4, repeats=3, max_new_tokens=20, do_sample=False)
    first, second = [("plain", 20), ("ours", 20)], [("ours", 20), ("plain", 20)]
    assert calls == [("plain", 8), ("ours", 8), *first, *second, *first]
    assert measured.first_difference is None and measured.trace.block_size == 4
    assert measured.trace.num_new_tokens == measured.plain_num_new_tokens == 20
    assert measured.tokens_per_second / measured.plain_tokens_per_second == measured.speedup


def test_the_median_call_is_one_that_took_place():
    runs = [(3.0, "c"), (1.0, "a"), (2.0, "b"), (9.0, "d")]
    assert cli_measure._median(runs[:1]) == (3.0, "c")
    assert cli_measure._median(runs[:3]) == (2.0, "b")
    assert cli_measure._median(runs) == (2.0, "b")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0), ([2, 1], [1, 1], 0)],
)
def test_the_first_difference_counts_what_is_the_same(a, b, expected):
    assert cli_measure.first_difference(a, b) == expected


def test_a_difference_is_explained_by_a_comparison_that_keeps_scores(pair, monkeypatch):
    """A head that answers otherwise in wide passes: no rounding, so it stays unexplained, and the place is the same."""
    target, pilot, ids = pair
    forward = target.lm_head.forward
    monkeypatch.setattr(target.lm_head, "forward", lambda h: forward(h if h.shape[1] == 1 else -h))
    measured = cli_measure.measure(target, pilot, ids, block_size=4, max_new_tokens=8, do_sample=False)
    assert measured.first_difference == 1 and measured.is_explained is False and measured.gap > 0
    monkeypatch.setattr(cli_measure, "compare_prompt", lambda *a, **k: [Comparison(4, 4, 8, 1.0)])
    again = cli_measure.measure(target, pilot, ids, block_size=4, max_new_tokens=8, do_sample=False)
    assert (again.first_difference, again.gap, again.is_explained) == (1, None, False)

"""Answers to many prompts at once are the target's own."""

import random

import pytest
import torch
from conftest import make_target, plain_generate

from blockpilot_hf.batch_answers import answer_batch, end_token_ids, set_generation_values

END_IDS = [5, 9, 33]


def random_prompts(count, *, seed=0, longest=19):
    draw = random.Random(seed)
    return [[draw.randrange(1, 60) for _ in range(draw.randrange(2, longest))] for _ in range(count)]


def ending_target(kind="llama", end_ids=END_IDS, **overrides):
    target = make_target(kind, **overrides)
    target.generation_config.eos_token_id = end_ids
    return target


def alone(target, prompt, num_new):
    """Plain greedy `generate` of one row."""
    return plain_generate(target, torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False, pad_token_id=0)[
        0, len(prompt) :
    ].tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3"])
def test_greedy_rows_are_those_of_each_prompt_alone(kind):
    """Whatever their lengths, the padding, and when the others end."""
    target, prompts = ending_target(kind), random_prompts(16)
    answers = answer_batch(target, prompts, max_new_tokens=24, temperature=0.0, seed=0)
    assert [ids for ids, _ in answers] == [alone(target, prompt, 24) for prompt in prompts]
    assert all(is_finished == (ids[-1] in END_IDS) for ids, is_finished in answers)
    # The test is about something only if rows end at different times.
    lengths = {len(ids) for ids, _ in answers}
    assert len(lengths) > 2 and 24 in lengths


@pytest.mark.parametrize("end_ids", [5, [5], None])
def test_end_tokens_may_be_one_or_none(end_ids):
    target, prompts = ending_target(end_ids=end_ids), random_prompts(6)
    answers = answer_batch(target, prompts, max_new_tokens=20, temperature=0.0, seed=0)
    assert [ids for ids, _ in answers] == [alone(target, prompt, 20) for prompt in prompts]
    assert end_ids is not None or not any(is_finished for _, is_finished in answers)


def test_the_config_names_the_end_where_the_generation_config_does_not():
    target = make_target("llama")
    assert end_token_ids(target) == set()
    target.config.eos_token_id = [7, 8]
    assert end_token_ids(target) == {7, 8}
    target.generation_config.eos_token_id = 9
    assert end_token_ids(target) == {9}


def test_the_padding_token_may_be_the_end_token():
    target, prompts = ending_target(), random_prompts(8)
    answers = answer_batch(target, prompts, max_new_tokens=20, temperature=0.0, seed=0, pad_token_id=5)
    assert [ids for ids, _ in answers] == [alone(target, prompt, 20) for prompt in prompts]


def test_one_new_token_and_one_prompt():
    target = ending_target()
    prompts = random_prompts(5)
    assert answer_batch(target, prompts, max_new_tokens=1, temperature=0.0, seed=0) == [
        (ids := alone(target, prompt, 1), ids[0] in END_IDS) for prompt in prompts
    ]
    assert len(answer_batch(target, prompts[:1], max_new_tokens=9, temperature=0.0, seed=0)) == 1


def test_the_seed_decides_and_the_random_state_stays():
    target, prompts = ending_target(), random_prompts(6)
    settings = {"max_new_tokens": 12, "temperature": 1.0}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = answer_batch(target, prompts, seed=1, **settings)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert answer_batch(target, prompts, seed=1, **settings) == first
    assert answer_batch(target, prompts, seed=2, **settings) != first


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_sampled_tokens_follow_the_targets_distribution(temperature):
    """First and second tokens, by the chi-square distance from what the target says."""
    target = make_target("llama", initializer_range=0.15)
    count, prompt = 3000, [3, 4, 5]
    answers = answer_batch(target, [prompt] * count, max_new_tokens=2, temperature=temperature, seed=0)
    with torch.no_grad():
        first = target(torch.tensor([prompt])).logits[0, -1].div(temperature).softmax(-1)
        rows = torch.tensor([[*prompt, i] for i in range(64)])
        second = first @ target(rows).logits[:, -1].div(temperature).softmax(-1)
    for position, law in enumerate((first, second)):
        seen = torch.bincount(torch.tensor([ids[position] for ids, _ in answers]), minlength=64).double()
        expected = law.double() * count
        likely = expected > 5
        statistic = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
        degrees = int(likely.sum())
        assert statistic < degrees + 5 * (2 * degrees) ** 0.5
        # Nothing is cut off: tokens of the tail come too.
        assert (seen[~likely].sum() - expected[~likely].sum()).abs() < 5 * expected[~likely].sum().sqrt() + 3


def test_settings_of_the_targets_generation_config_do_not_bend_the_answers():
    target, prompts = ending_target(), random_prompts(6)
    settings = [{"temperature": t, "seed": 3, "max_new_tokens": 16} for t in (0.0, 1.0)]
    plain = [answer_batch(target, prompts, **s) for s in settings]
    assert set_generation_values(target) == {}
    own = target.generation_config
    own.repetition_penalty, own.top_k, own.temperature, own.do_sample, own.no_repeat_ngram_size = 1.9, 3, 0.2, True, 2
    own.min_new_tokens, own.suppress_tokens = 15, list(range(10, 30))
    assert [answer_batch(target, prompts, **s) for s in settings] == plain
    assert target.generation_config is own and own.top_k == 3
    assert set_generation_values(target) == {
        "temperature": 0.2,
        "top_k": 3,
        "suppress_tokens": list(range(10, 30)),
        "repetition_penalty": 1.9,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 15,
    }

"""Caches of every kind: kept exact, or refused with the reason. The cache that is returned is plain's."""

import pytest
import torch
from conftest import (
    WINDOW,
    both_generate,
    make_drafter,
    make_prompt,
    make_target,
    pilot_generate,
    plain_generate,
    scripted_pilot,
)
from transformers import (
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
)

from blockpilot_hf import BlockPilot

PROMPT = make_prompt(10, seed=30)
DICT = {"return_dict_in_generate": True, "output_scores": True}
KINDS = ["qwen3", "mistral", "gemma3"]


def assert_same_cache(ours, plain):
    assert ours.get_seq_length() == plain.get_seq_length()
    for mine, right in zip(ours.layers, plain.layers, strict=True):
        assert mine.get_seq_length() == right.get_seq_length()
        assert mine.keys.shape == right.keys.shape
        torch.testing.assert_close(mine.keys, right.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(mine.values, right.values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_prompts_around_the_window_of_sliding_targets(kind, length, accuracy):
    """Cropping a full window needs the states that fell out of it; the returned cache holds plain's states."""
    target = make_target(kind)
    plain, ours = both_generate(target, make_prompt(length, seed=length), accuracy=accuracy, max_new_tokens=20, **DICT)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same_cache(ours.cache, plain.cache)


@pytest.mark.parametrize("eos", [None, [32, 58]])
@pytest.mark.parametrize("kind", KINDS)
def test_the_returned_cache_is_plains(kind, eos):
    target = make_target(kind)
    plain, ours = both_generate(target, PROMPT, accuracy=1.0, max_new_tokens=13, eos_token_id=eos, **DICT)
    assert_same_cache(ours.cache, plain.cache)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_with_the_returned_cache_is_as_from_scratch(kind, name):
    target = make_target(kind)
    pilot = BlockPilot(make_drafter(target))
    first = pilot_generate(pilot, target, PROMPT, max_new_tokens=9, **DICT)
    ids = torch.cat([first.sequences, make_prompt(6, seed=8)], dim=-1)
    scratch = pilot_generate(pilot, target, ids, max_new_tokens=12, **DICT)
    second = pilot_generate(pilot, target, ids, max_new_tokens=12, **{name: first.cache}, **DICT)
    assert torch.equal(second.sequences, scratch.sequences)
    assert torch.equal(second.sequences, plain_generate(target, ids, max_new_tokens=12))
    assert second.cache is first.cache
    # The drafter saw the cached tokens too.
    assert [s.draft_ids for s in second.blockpilot.steps] == [s.draft_ids for s in scratch.blockpilot.steps]
    third = torch.cat([second.sequences, make_prompt(2, seed=9)], dim=-1)
    assert torch.equal(
        pilot_generate(pilot, target, third, max_new_tokens=12, **{name: second.cache}),
        plain_generate(target, third, max_new_tokens=12),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_plain_generate_goes_on_from_our_cache(kind):
    target = make_target(kind)
    first = pilot_generate(BlockPilot(make_drafter(target)), target, PROMPT, max_new_tokens=9, **DICT)
    ids = torch.cat([first.sequences, make_prompt(6, seed=8)], dim=-1)
    second = plain_generate(target, ids, max_new_tokens=12, cache=first.cache)
    assert torch.equal(second, plain_generate(target, ids, max_new_tokens=12))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_cache_of_the_user_is_filled_and_returned(kind):
    target = make_target(kind)
    cache = DynamicCache(config=target.config)
    plain = plain_generate(target, PROMPT, max_new_tokens=12, **DICT)
    ours = pilot_generate(
        scripted_pilot(target, plain.sequences), target, PROMPT, max_new_tokens=12, cache=cache, **DICT
    )
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.cache is cache
    assert_same_cache(cache, plain.cache)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


def test_only_the_new_ids_next_to_a_cache_are_refused(target, drafter):
    pilot = BlockPilot(drafter)
    first = pilot_generate(pilot, target, PROMPT, max_new_tokens=6, **DICT)
    length = first.cache.get_seq_length()
    new = make_prompt(3, seed=8)
    mask = torch.ones(1, length + 3, dtype=torch.long)
    with pytest.raises(ValueError, match="pass the full sequence"):
        pilot_generate(pilot, target, new, max_new_tokens=6, cache=first.cache, attention_mask=mask)
    with pytest.raises(ValueError, match=f"The cache holds {length} tokens"):
        pilot_generate(pilot, target, new, max_new_tokens=6, cache=first.cache)
    assert first.cache.get_seq_length() == length, "a refused call leaves the cache as it was"


def test_a_cache_as_long_as_the_ids_is_refused(target, drafter):
    pilot = BlockPilot(drafter)
    first = pilot_generate(pilot, target, PROMPT, max_new_tokens=6, **DICT)
    length = first.cache.get_seq_length()
    for given in (length, length - 2):
        with pytest.raises(ValueError, match=r"at least one token more|full sequence"):
            pilot_generate(pilot, target, first.sequences[:, :given], max_new_tokens=6, cache=first.cache)
    ids = first.sequences[:, : length + 1]
    ours = pilot_generate(pilot, target, ids, max_new_tokens=6, cache=first.cache)
    assert torch.equal(ours, plain_generate(target, ids, max_new_tokens=6))


def test_a_cache_that_quantizes_is_refused_before_any_pass(target, drafter):
    class QuantizedThing(DynamicCache):
        pass

    hook = target.register_forward_pre_hook(lambda *args: pytest.fail("refused too late"))
    try:
        with pytest.raises(ValueError, match="quantized cache cannot take back"):
            pilot_generate(BlockPilot(drafter), target, PROMPT, max_new_tokens=4, cache=QuantizedThing())
    finally:
        hook.remove()


# Static and offloaded caches


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"disable_compile": True}], ids=str)
def test_a_static_cache_decodes_as_plain(target, accuracy, options):
    plain, ours = both_generate(
        target, PROMPT, accuracy=accuracy, cache_implementation="static", max_new_tokens=20, **options, **DICT
    )
    assert torch.equal(ours.sequences, plain.sequences)
    assert isinstance(ours.cache, StaticCache)
    assert int(ours.cache.get_seq_length()) == int(plain.cache.get_seq_length())


def test_a_static_cache_of_the_user_with_attentions_and_padding():
    target = make_target(attn_implementation="eager")
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=-1)
    mask = (ids != 0).long()
    plain, ours = both_generate(
        target,
        ids,
        attention_mask=mask,
        fresh=lambda: {"cache": StaticCache(config=target.config, max_cache_len=48)},
        max_new_tokens=20,
        output_attentions=True,
        **DICT,
    )
    assert torch.equal(ours.sequences, plain.sequences)
    for mine, right in zip(ours.attentions, plain.attentions, strict=True):
        for a, b in zip(mine, right, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_a_static_cache_that_slides_is_refused_after_the_prefill_or_not_needed(kind):
    target = make_target(kind)
    pilot = BlockPilot(make_drafter(target))
    with pytest.raises(ValueError, match="cannot be cropped"):
        pilot_generate(pilot, target, PROMPT, cache_implementation="static", max_new_tokens=12)
    plain, ours = both_generate(
        target, PROMPT, pilot=pilot, cache_implementation="static", max_new_tokens=12, ours={"block_size": 1}
    )
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache_decodes_as_plain_or_is_refused(kind, implementation):
    target = make_target(kind)
    options = {"cache_implementation": implementation, "max_new_tokens": 12}
    try:
        plain = plain_generate(target, PROMPT, **options)
    except Exception as error:
        if torch.cuda.is_available():
            raise
        pytest.skip(f"plain `generate` cannot do it on this machine: {type(error).__name__}")
    pilot = scripted_pilot(target, plain)
    if kind == "mistral" and implementation == "offloaded_static":
        with pytest.raises(ValueError, match="cannot be cropped"):
            pilot_generate(pilot, target, PROMPT, **options)
    else:
        assert torch.equal(pilot_generate(pilot, target, PROMPT, **options), plain)


# Targets with a state


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
HEADS = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def qwen3_next():
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SMALL,
            **HEADS,
            head_dim=8,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    )


def mamba2():
    return Mamba2ForCausalLM(
        Mamba2Config(**SMALL, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8, expand=2)
    )


def lfm2():
    return Lfm2ForCausalLM(
        Lfm2Config(**SMALL, **HEADS, layer_types=["conv", "full_attention", "conv", "full_attention"], conv_L_cache=3)
    )


@pytest.mark.parametrize("make", [qwen3_next, mamba2], ids=lambda make: make.__name__)
def test_a_recurrent_target_is_refused_by_name_before_any_pass(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = make().eval()
    passes = []
    hook = target.register_forward_pre_hook(lambda *args: passes.append(1))
    with pytest.raises(ValueError, match=rf"{type(target).__name__}.*(recurrent state|Cache)"):
        pilot_generate(scripted_pilot(target, PROMPT), target, PROMPT, max_new_tokens=4)
    hook.remove()
    assert passes == []


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_a_target_with_short_convolutions_is_exact_or_refused(accuracy):
    """Its convolution keeps the last inputs, which a rejected draft would have pushed out."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = lfm2().eval()
    plain = plain_generate(target, PROMPT, max_new_tokens=20)
    try:
        ours = pilot_generate(scripted_pilot(target, plain, accuracy), target, PROMPT, max_new_tokens=20)
    except ValueError as error:
        assert "Lfm2ForCausalLM" in str(error) and "cannot be cropped" in str(error)
    else:
        assert torch.equal(ours, plain)
    one = pilot_generate(scripted_pilot(target, plain, accuracy), target, PROMPT, max_new_tokens=20, block_size=1)
    assert torch.equal(one, plain)


@pytest.mark.parametrize("make", [qwen3_next, lfm2], ids=lambda make: make.__name__)
def test_tokens_fed_at_once_to_a_filled_state_give_the_logits_of_one_by_one(make):
    """What every exactness over such a target would rest on, and does today in transformers itself."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = make().eval()
    ids = make_prompt(16, seed=3)
    with torch.no_grad():
        together = target(ids[:, :12], use_cache=True)
        at_once = target(ids[:, 12:], cache=together.cache).logits
        cache = target(ids[:, :12], use_cache=True).cache
        singles = torch.cat([target(ids[:, i : i + 1], cache=cache).logits for i in range(12, 16)], dim=1)
    torch.testing.assert_close(at_once, singles, rtol=1e-3, atol=1e-3)

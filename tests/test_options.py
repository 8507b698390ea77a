"""Every option of `generate` on one row gives what it gives in plain decoding; what cannot be done is refused."""

import math

import pytest
import torch
from conftest import (
    both_generate,
    make_drafter,
    make_prompt,
    make_target,
    pilot_generate,
    plain_generate,
    scripted_pilot,
)
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    WatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput

from blockpilot_hf import BlockPilot, DecodeTrace

PROMPT = make_prompt(10, seed=30)
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def allowed(batch_id, ids):
    """Even ids after an odd token, odd ones after an even one; depends on the prefix and on the row's number."""
    assert batch_id == 0
    return list(range(1 + int(ids[-1]) % 2, 60, 2))


GREEDY = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "max_new_tokens": 22},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(0, 64, 3))},
    "min_length": {"min_length": 21, "eos_token_id": list(range(0, 64, 3))},
    "bad_words_ids": {"bad_words_ids": [[22], [17, 32], [58]]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "sequence_bias": {"sequence_bias": [[[18], -5.0], [[17, 32], -9.0], [[7], 3.0]]},
    "suppress_tokens": {"suppress_tokens": [22, 19], "begin_suppress_tokens": [18]},
    "forced_bos_and_eos": {"forced_bos_token_id": 9, "forced_eos_token_id": 11, "max_new_tokens": 13},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (6, 1.4), "eos_token_id": 40},
    "guidance_scale": {"guidance_scale": 1.5},
    "negative_prompt_ids": {"guidance_scale": 1.5, "negative_prompt_ids": make_prompt(4, seed=9)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "remove_invalid_values": {"remove_invalid_values": True},
    "watermarking": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash", context_width=2)},
    "all_at_once": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[22]],
        "min_new_tokens": 6,
        "eos_token_id": [3, 17, 40],
        "renormalize_logits": True,
    },
}
SAMPLED = {
    "top_k": {"top_k": 5},
    "top_p": {"top_k": 0, "top_p": 0.7},
    "typical_p": {"typical_p": 0.6},
    "min_p": {"min_p": 0.1},
    "top_h": {"top_h": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "renormalize_logits": {"renormalize_logits": True, "temperature": 0.7},
    "synthid": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3, context_history_size=16)
    },
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "temperature": 1.4, "top_p": 0.9},
}


@pytest.mark.parametrize("name", GREEDY)
def test_every_processor_sees_its_own_prefix(target, name):
    kwargs = {"max_new_tokens": 18, **GREEDY[name], **DICT}
    plain, ours = both_generate(target, PROMPT, accuracy=0.7, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(ours.scores, plain.scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-4)
    assert max(step.num_accepted for step in ours.blockpilot.steps) >= 2, "no block was long enough to tell"
    # The settings do something, so that leaving them out would show.
    without = plain_generate(target, PROMPT, max_new_tokens=kwargs["max_new_tokens"])
    assert name == "remove_invalid_values" or not torch.equal(without, plain.sequences)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_sampling_setting_gives_plains_draws(target, name):
    kwargs = {"do_sample": True, "max_new_tokens": 18, **SAMPLED[name]}
    for seed in range(2):
        plain = plain_generate(target, PROMPT, seed=seed, **kwargs)
        state = torch.get_rng_state()
        pilot = scripted_pilot(target, plain, 0.7)
        assert torch.equal(pilot_generate(pilot, target, PROMPT, seed=seed, **kwargs), plain)
        assert torch.equal(torch.get_rng_state(), state)


class Counter(LogitsProcessor):
    """Keeps a state over its calls: bans one token more with each, and remembers what it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, (7 * len(self.seen)) % 64] = -math.inf
        scores[:, int(input_ids[0, -1])] -= len(self.seen)
        return scores


class InPlace(LogitsProcessor):
    """Writes into what it gets."""

    def __call__(self, input_ids, scores):
        scores[:, ::2] = -math.inf if input_ids.shape[1] % 2 else 0.0
        return scores


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_a_stateful_processor_gets_plains_calls(target, accuracy):
    made = []

    def fresh():
        made.append(Counter())
        return {"logits_processor": [made[-1]]}

    plain, ours = both_generate(
        target, PROMPT, accuracy=accuracy, fresh=fresh, max_new_tokens=20, eos_token_id=3, **DICT
    )
    assert torch.equal(ours.sequences, plain.sequences)
    assert made[1].seen == made[0].seen


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_may_write_into_its_scores(target, do_sample):
    plain, ours = both_generate(
        target, PROMPT, accuracy=1.0, logits_processor=[InPlace()], do_sample=do_sample, max_new_tokens=20, **DICT
    )
    assert torch.equal(ours.sequences, plain.sequences)
    # The very tensor that it wrote into is what plain returns as raw logits, too.
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.scores, plain.scores, rtol=1e-4, atol=1e-4)


def test_a_processor_that_draws_numbers_keeps_plains_order_of_draws(target):
    def noisy(input_ids, scores):
        return scores + torch.rand(scores.shape)

    plain, ours = both_generate(
        target, PROMPT, accuracy=0.7, logits_processor=[noisy], do_sample=True, max_new_tokens=20
    )
    assert torch.equal(ours, plain)


def test_min_new_tokens_holds_when_the_drafter_proposes_eos(target):
    free = plain_generate(target, PROMPT, max_new_tokens=20)
    eos = int(free[0, 13])
    plain, ours = both_generate(
        target, PROMPT, script=free, accuracy=1.0, eos_token_id=eos, min_new_tokens=8, max_new_tokens=20
    )
    assert torch.equal(ours, plain) and ours.shape[1] >= 18


# What is returned


def assert_same_nesting(ours, plain):
    assert type(ours) is type(plain) is tuple and len(ours) == len(plain)
    for mine, right in zip(ours, plain, strict=True):
        if isinstance(right, tuple):
            assert_same_nesting(mine, right)
        else:
            assert mine.shape == right.shape and mine.dtype == right.dtype
            torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("eos", [None, [32, 58]])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
def test_all_returned_tensors_are_plains(kind, eos):
    """Prompts longer than the sliding window, so that attention over a window is compared as well."""
    target = make_target(kind, attn_implementation="eager")
    plain, ours = both_generate(
        target,
        PROMPT,
        accuracy=0.7,
        max_new_tokens=14,
        eos_token_id=eos,
        output_hidden_states=True,
        output_attentions=True,
        **DICT,
    )
    assert isinstance(ours, GenerateDecoderOnlyOutput) and isinstance(ours.blockpilot, DecodeTrace)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_same_nesting(getattr(ours, name), getattr(plain, name))
    assert set(plain.keys()) | {"blockpilot"} == set(ours.keys())


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_hidden_states"])
def test_only_what_was_asked_for_is_returned(target, name):
    plain, ours = both_generate(target, PROMPT, max_new_tokens=9, return_dict_in_generate=True, **{name: True})
    assert set(plain.keys()) | {"blockpilot"} == set(ours.keys())
    without = both_generate(target, PROMPT, max_new_tokens=9, **{name: True})[1]
    assert torch.equal(without, plain.sequences)


def test_returned_scores_and_states_do_not_share_memory_with_a_block(target):
    """A slice of a block would keep the whole block's logits alive."""
    _, ours = both_generate(target, PROMPT, accuracy=1.0, max_new_tokens=18, **DICT)
    for tensor in (*ours.scores, *ours.logits):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


# Where settings come from


def test_a_generation_config_object_is_followed_and_left_alone(target):
    config = GenerationConfig(
        max_new_tokens=15, repetition_penalty=1.3, eos_token_id=40, pad_token_id=0, return_dict_in_generate=True
    )
    before = config.to_dict()
    plain, ours = both_generate(target, PROMPT, accuracy=0.7, generation_config=config)
    assert torch.equal(ours.sequences, plain.sequences)
    plain, ours = both_generate(target, PROMPT, accuracy=0.7, generation_config=config, max_new_tokens=7)
    assert ours.sequences.shape == (1, 17) and torch.equal(ours.sequences, plain.sequences)
    assert config.to_dict() == before


def test_the_models_own_generation_config_gives_the_defaults():
    target = make_target()
    target.generation_config.update(max_new_tokens=9, repetition_penalty=1.4, do_sample=True, top_k=4, eos_token_id=40)
    plain, ours = both_generate(target, PROMPT, accuracy=0.7)
    assert torch.equal(ours, plain) and ours.shape[1] <= 19
    state = torch.get_rng_state()
    plain, ours = both_generate(target, PROMPT, accuracy=0.7, do_sample=False)
    assert torch.equal(ours, plain)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state()) and state is not None


def test_a_call_without_any_length_ends_where_plain_ends(target):
    plain, ours = both_generate(target, PROMPT, accuracy=1.0)
    assert torch.equal(ours, plain) and ours.shape[1] == 30


def test_grad_mode_of_the_caller_does_not_matter(target):
    with torch.enable_grad():
        plain, ours = both_generate(target, PROMPT, pilot=BlockPilot(make_drafter(target)), max_new_tokens=9, **DICT)
    assert torch.equal(ours.sequences, plain.sequences)
    assert not any(score.requires_grad for score in ours.scores)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_prompt_of_short_integers_is_continued_in_long_ones(target, do_sample):
    plain, ours = both_generate(target, PROMPT.int(), accuracy=0.7, max_new_tokens=9, do_sample=do_sample)
    assert torch.equal(ours, plain) and ours.dtype == plain.dtype == torch.long


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
def test_a_mask_of_any_type_leaves_padding_out(target, dtype):
    mask = torch.arange(PROMPT.shape[1])[None] > 2
    plain, ours = both_generate(target, PROMPT, attention_mask=mask.to(dtype), accuracy=0.7, max_new_tokens=9)
    assert torch.equal(ours, plain)
    assert not torch.equal(ours, plain_generate(target, PROMPT, max_new_tokens=9))


@pytest.mark.parametrize("name", ["input_ids", "inputs"])
def test_the_prompt_may_be_given_by_either_name(target, drafter, name):
    expected = plain_generate(target, PROMPT, max_new_tokens=6)
    assert torch.equal(BlockPilot(drafter).generate(target, **{name: PROMPT}, max_new_tokens=6), expected)


def test_disable_compile_is_accepted(target):
    plain, ours = both_generate(target, PROMPT, disable_compile=True, max_new_tokens=9)
    assert torch.equal(ours, plain)


# Refused


@pytest.fixture
def untouched(target):
    """A target that fails the test when any pass of it is run."""

    def fail(*args):
        raise AssertionError("refused only after a pass of the target")

    hook = target.register_forward_pre_hook(fail)
    yield target
    hook.remove()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 2}, "num_beams=1"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=1"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"assistant_model": "a drafter"}, "assistant_model"),
        ({"custom_generate": "somewhere"}, "custom_generate"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"block_size": 0}, "`block_size` must be an integer >= 1, got 0"),
        ({"block_size": 2.0}, "`block_size` must be an integer >= 1, got 2.0"),
        ({"block_size": True}, "`block_size` must be an integer >= 1, got True"),
        ({"policy": 3}, "`policy` must be"),
        ({"stop_strings": ["a"]}, "tokenizer"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_before_any_pass(untouched, drafter, kwargs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pilot_generate(BlockPilot(drafter), untouched, PROMPT, max_new_tokens=4, **kwargs)


@pytest.mark.parametrize("with_ids", [False, True])
def test_inputs_embeds_are_refused_before_any_pass(untouched, drafter, with_ids):
    embeds = torch.randn(1, 5, 32)
    with pytest.raises(ValueError, match="inputs_embeds"):
        BlockPilot(drafter).generate(untouched, PROMPT if with_ids else None, inputs_embeds=embeds, max_new_tokens=4)


def test_the_nearest_good_options_pass(target, drafter):
    plain, ours = both_generate(
        target,
        PROMPT,
        pilot=BlockPilot(drafter),
        num_beams=1,
        use_cache=True,
        max_new_tokens=6,
        ours={"block_size": 1, "policy": False, "synced_gpus": False, "assistant_model": None},
    )
    assert torch.equal(ours, plain)


def test_an_encoder_decoder_target_is_refused_as_such(drafter):
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=4, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    target = T5ForConditionalGeneration(config).eval()
    for size in (None, 1):
        with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder model"):
            pilot_generate(BlockPilot(drafter), target, PROMPT, block_size=size, max_new_tokens=4)

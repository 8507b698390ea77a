"""Which pairs and calls are refused or warned about, and that the nearest good ones decode exactly."""

import copy
import logging
import types
import warnings

import pytest
import torch
from conftest import make_drafter, make_prompt, make_target, pilot_generate, plain_generate, scripted_pilot
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from blockpilot_hf import BlockPilot, BlockPilotConfig, BlockPilotPolicy
from blockpilot_hf.checks import (
    check_block_size,
    check_call,
    check_croppable,
    check_drafter,
    check_pair,
    check_policy,
    check_user_cache,
)

GREEDY = {"do_sample": False, "max_new_tokens": 16}


@pytest.fixture
def said():
    """Warnings of the package, each of them counted from nothing."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("blockpilot_hf")
    transformers_logging.warning_once.cache_clear()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def assert_exact(target, drafter, prompt=None, *, block_size=None, **kwargs):
    """Our text is plain `generate`'s; returns the trace."""
    prompt = make_prompt() if prompt is None else prompt
    options = {**GREEDY, "return_dict_in_generate": True, **kwargs}
    plain = plain_generate(target, prompt, **options).sequences
    pilot = BlockPilot(drafter, adapt="prompt")
    ours = pilot_generate(pilot, target, prompt, block_size=block_size, **options)
    assert torch.equal(ours.sequences, plain)
    return ours.blockpilot


# Single values and objects


@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True])
def test_a_block_size_that_is_no_positive_integer_is_an_error(value):
    with pytest.raises(ValueError, match=r"`block_size` must be an integer >= 1, got"):
        check_block_size(value)


def test_block_sizes_from_one_pass():
    for value in (1, 2, 1000):
        check_block_size(value)


def test_what_is_no_drafter_is_an_error(target, drafter):
    with pytest.raises(TypeError, match="got Qwen3ForCausalLM"):
        check_drafter(target)
    with pytest.raises(TypeError, match="got str"):
        check_drafter("a/drafter")
    check_drafter(drafter)


def test_a_drafter_on_the_meta_device_is_an_error(target, drafter):
    with pytest.raises(ValueError, match="meta device"):
        BlockPilot(make_drafter(target).to("meta"))
    check_drafter(drafter)


def generation_config(**fields):
    return GenerationConfig(max_length=20, **fields)


@pytest.mark.parametrize(
    ("fields", "kwargs", "message"),
    [
        ({"num_beams": 2}, {}, "num_beams=1"),
        ({"prompt_lookup_num_tokens": 3}, {}, "prompt_lookup_num_tokens"),
        ({"prefill_chunk_size": 16}, {}, "prefill_chunk_size"),
        ({"use_cache": False}, {}, "use_cache=False"),
        ({"cache_implementation": "quantized"}, {}, "quantized cache"),
        ({}, {"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
        ({}, {"cache": None}, "does not use a transformers `Cache`"),
    ],
)
def test_calls_that_cannot_be_exact_are_errors(target, fields, kwargs, message):
    good = {"cache": DynamicCache()}
    with pytest.raises(ValueError, match=message):
        check_call(target, generation_config(**fields), {**good, **kwargs}, 1)
    check_call(target, generation_config(), good, 1)
    check_call(target, generation_config(do_sample=True, top_k=5), good, 1)


def test_stateful_and_encoder_decoder_targets_are_errors():
    good = {"cache": DynamicCache()}
    model = nn.Linear(1, 1)
    model.config = PreTrainedConfig()
    check_call(model, generation_config(), good, 1)
    model._is_stateful = True
    with pytest.raises(ValueError, match="recurrent state"):
        check_call(model, generation_config(), good, 1)
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="decoder-only"):
        check_call(model, generation_config(), good, 1)


def test_batches_with_state_over_rows_are_errors(target):
    good = {"cache": DynamicCache(), "attention_mask": torch.ones(2, 3)}
    with pytest.raises(ValueError, match="guidance_scale"):
        check_call(target, generation_config(guidance_scale=1.5), good, 2)
    with pytest.raises(ValueError, match="pixel_values"):
        check_call(target, generation_config(), {**good, "pixel_values": torch.zeros(2, 3)}, 2)
    check_call(target, generation_config(), good, 2)
    check_call(target, generation_config(), {**good, "pixel_values": torch.zeros(1, 3)}, 1)


def test_a_cache_that_cannot_be_cropped_is_an_error(target):
    with pytest.raises(ValueError, match="cannot be cropped"):
        check_croppable(target, types.SimpleNamespace(is_croppable=False))
    check_croppable(target, types.SimpleNamespace(is_croppable=True))


def test_a_user_cache_must_come_with_its_tokens_and_one_more():
    cache = types.SimpleNamespace(get_seq_length=lambda: 10)
    with pytest.raises(ValueError, match="not in `input_ids`"):
        check_user_cache(cache, 3, 13)
    with pytest.raises(ValueError, match="one token more"):
        check_user_cache(cache, 10, 10)
    check_user_cache(cache, 11, 11)
    check_user_cache(cache, 11, None)


# Pairs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_target_layers": 6, "target_layer_ids": [0, 5]}, r"target layers \[0, 5\].*only 4"),
        ({"num_target_layers": 6, "target_layer_ids": [0, 2]}, "target of 6 layers.*has 4"),
        ({"hidden_size": 64}, "hidden size is 64, the target's 32"),
        ({"vocab_size": 32000, "mask_token_id": 63}, "vocabulary of 32000 tokens, the target has 64"),
        ({"vocab_size": 68, "mask_token_id": 64}, r"`mask_token_id` 64 is not a row.*64 rows"),
    ],
)
def test_pairs_that_do_not_fit_are_errors_before_any_pass(target, fields, message):
    drafter = make_drafter(target, **fields)
    passes = []
    hook = target.register_forward_pre_hook(lambda *args: passes.append(1))
    try:
        with pytest.raises(ValueError, match=message):
            BlockPilot(drafter).generate(target, make_prompt(), **GREEDY)
    finally:
        hook.remove()
    assert not passes
    check_pair(target, make_drafter(target))


def test_a_target_without_a_head_is_an_error(target, drafter):
    with pytest.raises(ValueError, match="no output embedding"):
        check_pair(target.model, drafter)


def test_a_drafter_for_another_target_is_one_warning_and_still_exact(said):
    target = make_target()
    target.config._name_or_path = "/models/Tiny-A"
    for name, expected in (("org/Tiny-B", 1), ("org/tiny-a", 0), (None, 0)):
        said.clear()
        drafter = make_drafter(target, target_name_or_path=name)
        for _ in range(2):
            assert_exact(target, drafter)
        about = [message for message in said if "was made for" in message]
        assert len(about) == expected
        assert all("org/Tiny-B" in message and "/models/Tiny-A" in message for message in about)


@pytest.mark.parametrize(("target_rows", "drafter_rows"), [(128, 120), (120, 128)])
def test_padded_vocabularies_fit_and_only_shared_ids_are_proposed(said, target_rows, drafter_rows):
    target = make_target(vocab_size=target_rows)
    with torch.no_grad():
        # The head favours an id above the shared ones, in the drafter's states and the target's alike.
        target.lm_head.weight[120:] *= 50
    drafter = make_drafter(target, vocab_size=drafter_rows, mask_token_id=60)
    trace = assert_exact(target, drafter)
    proposed = [i for step in trace.steps for i in step.draft_ids]
    assert proposed and max(proposed) < 120
    assert len([message for message in said if "another" in message and "padding" in message]) == 1


@pytest.mark.parametrize("rows", [70, 62])
def test_a_target_resized_after_loading_the_drafter_is_looked_up_anew(rows):
    target = make_target()
    drafter = make_drafter(target, mask_token_id=61)
    pilot, prompt = BlockPilot(drafter), make_prompt()
    pilot.generate(target, prompt, **GREEDY)
    target.resize_token_embeddings(rows, mean_resizing=False)
    trace = assert_exact(target, drafter)
    proposed = [i for step in trace.steps for i in step.draft_ids]
    assert proposed and max(proposed) < min(rows, 64)
    assert torch.equal(pilot.generate(target, prompt, **GREEDY), plain_generate(target, prompt, **GREEDY))


def test_a_head_replaced_after_a_call_is_the_one_that_drafts():
    target = make_target()
    used, fresh = make_drafter(target), make_drafter(target)
    before = assert_exact(target, used)
    target.set_output_embeddings(make_target(seed=9).get_output_embeddings())
    drafts = [[step.draft_ids for step in assert_exact(target, drafter).steps] for drafter in (used, fresh)]
    assert drafts[0] == drafts[1] != [step.draft_ids for step in before.steps]


def test_a_mask_id_above_the_resized_table_is_an_error():
    target = make_target()
    drafter = make_drafter(target)  # mask id 63
    target.resize_token_embeddings(63, mean_resizing=False)
    with pytest.raises(ValueError, match=r"`mask_token_id` 63 is not a row.*63 rows"):
        BlockPilot(drafter).generate(target, make_prompt(), **GREEDY)
    target.resize_token_embeddings(64, mean_resizing=False)
    assert_exact(target, drafter)


def test_an_untouched_mask_row_is_one_warning_and_still_exact(said):
    target = make_target()
    with torch.no_grad():
        target.get_input_embeddings().weight[63] = 0.0
    drafter = make_drafter(target)
    for _ in range(2):
        assert_exact(target, drafter)
    assert len([message for message in said if "all zeros" in message]) == 1
    said.clear()
    transformers_logging.warning_once.cache_clear()
    assert_exact(target, make_drafter(target, mask_token_id=62))
    assert not [message for message in said if "all zeros" in message]


# Heads and numbers of every kind


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_broken_drafter_costs_speed_only_and_its_acceptance_shows_it(target, bad, sampled):
    drafter = make_drafter(target)
    with torch.no_grad():
        drafter.norm.weight.fill_(bad)
    kwargs = {"do_sample": True, "temperature": 0.8, "top_k": 0} if sampled else {}
    trace = assert_exact(target, drafter, **kwargs)
    assert trace.acceptance_length < 2
    assert all(0 <= i < 64 for step in trace.steps for i in step.draft_ids)


def test_a_broken_drafter_does_not_break_drawn_proposals(target):
    """Drawing from a distribution of NaN would raise. Exact in law only, so there is no text to compare with."""
    drafter = make_drafter(target)
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    pilot = BlockPilot(drafter, draft_sampling=True)
    output = pilot_generate(pilot, target, make_prompt(), do_sample=True, max_new_tokens=16, top_k=0)
    assert output.shape[1] == 10 + 16


class Int8Linear(nn.Module):
    """Weight-only int8 as the quantisation libraries do it: no float `weight` to reach for."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.packed * self.scale).T


def quantised(target, how):
    if how == "own int8":
        for module in list(target.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Int8Linear(child))
        return target
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, and what people's code still uses
        return torch.ao.quantization.quantize_dynamic(target, {nn.Linear}, dtype=torch.float16)


@pytest.mark.parametrize("how", ["own int8", "torch.ao"])
def test_a_target_quantised_head_included_decodes_exactly(how):
    target = quantised(make_target(), how)
    assert not isinstance(getattr(target.lm_head, "weight", None), torch.Tensor)
    drafter = make_drafter(target)
    for block_size in (1, 4, 8):
        trace = assert_exact(target, drafter, block_size=block_size)
    assert trace.steps[0].draft_ids


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_tied_embeddings_decode_exactly(kind):
    target = make_target(kind, tie_word_embeddings=True)
    assert target.lm_head.weight is target.get_input_embeddings().weight
    assert_exact(target, make_drafter(target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_target_and_drafter_may_differ_in_dtype(target, dtype):
    drafter = make_drafter(target).to(dtype)
    assert assert_exact(target, drafter).steps[0].draft_ids
    double = copy.deepcopy(target).double()
    assert assert_exact(double, drafter).steps[0].draft_ids
    assert drafter.dtype == dtype and target.dtype == torch.float32


@pytest.mark.parametrize("split", ["target", "drafter"])
def test_a_model_spread_by_a_device_map_decodes_exactly(target, drafter, tmp_path, split):
    """One device here; the map still puts hooks of `accelerate` around every part."""
    model = target if split == "target" else drafter
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map={"": "cpu"}).eval()
    pair = (loaded, drafter) if split == "target" else (target, loaded)
    assert assert_exact(*pair).steps[0].draft_ids


# Policies


def new_policy(**fields):
    return BlockPilotPolicy(
        BlockPilotConfig(**{"block_sizes": [2, 4], "features": "logits", "vocab_size": 64, "hidden_size": 4, **fields})
    ).eval()


def test_policies_that_cannot_be_asked_are_errors(target, drafter):
    with pytest.raises(TypeError, match=r"must be a BlockPilot policy.*got dict"):
        check_policy({}, target, drafter)
    with pytest.raises(ValueError, match="logits of 65 tokens, the target has 64"):
        check_policy(new_policy(vocab_size=65), target, drafter)
    check_policy(new_policy(), target, drafter)


def test_a_policy_for_another_drafter_is_one_warning(said, target, drafter):
    other = copy.copy(drafter)
    other.config = copy.deepcopy(drafter.config)
    other.config._name_or_path = "here/drafter-b"
    policy = new_policy(drafter_name_or_path="org/drafter-a")
    for _ in range(2):
        check_policy(policy, target, other)
    assert len([message for message in said if "org/drafter-a" in message]) == 1
    said.clear()
    check_policy(new_policy(drafter_name_or_path="org/drafter-b"), target, other)
    assert said == []


def test_a_target_whose_numbers_depend_on_the_width_of_a_pass_is_refused():
    """Dynamic int8 scales activations over all tokens of a pass; the same modules with float16 weights do not."""
    target = make_target("llama")
    drafter = make_drafter(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, dtype=torch.qint8)
        half = torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"dynamically quantised to int8.*weight-only"):
        pilot_generate(BlockPilot(drafter), quantised, make_prompt(), max_new_tokens=5)
    plain = plain_generate(half, make_prompt(), max_new_tokens=20, do_sample=False)
    pilot = scripted_pilot(target, plain, 0.5)
    assert pilot_generate(pilot, half, make_prompt(), max_new_tokens=20, do_sample=False).equal(plain)


@pytest.mark.parametrize(("accuracy", "warns"), [(0.0, True), (0.5, False)])
def test_a_drafter_of_which_nothing_is_accepted_is_said_once(target, said, accuracy, warns):
    plain = plain_generate(target, make_prompt(), max_new_tokens=50, do_sample=False)
    pilot = scripted_pilot(target, plain, accuracy)
    output = pilot_generate(pilot, target, make_prompt(), max_new_tokens=50, do_sample=False)
    assert output.equal(plain)
    assert sum("No drafted token was accepted" in text for text in said) == warns

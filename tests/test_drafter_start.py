import pytest
import torch
from conftest import make_prompt, make_target, plain_generate
from transformers import Gemma2Config, Gemma2ForCausalLM, GemmaConfig, GemmaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from blockpilot_hf import BlockPilot
from blockpilot_hf.checks import check_pair
from blockpilot_hf.configuration_dflash import default_target_layer_ids
from blockpilot_hf.drafter_start import DEFAULT_BLOCK_SIZE, DEFAULT_NUM_LAYERS, drafter_from_target
from blockpilot_hf.embedded import untrained_drafter

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def start(target, **settings):
    return drafter_from_target(target, **{"mask_token_id": 63, "num_layers": 2, **settings})


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_its_layers_and_norm_are_the_targets_last(kind):
    target = make_target(kind)
    drafter, compared = start(target), set()
    for ours, theirs in zip(drafter.layers, target.model.layers[-2:], strict=True):
        theirs = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            if name in theirs:
                assert torch.equal(parameter, theirs[name])
                compared.add(name)
    assert {"self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"} <= compared
    assert ("self_attn.q_norm.weight" in compared) is (kind == "qwen3")
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)


def test_it_is_a_copy_that_leaves_the_target_alone():
    target = make_target("llama")
    before = {name: p.clone() for name, p in target.named_parameters()}
    drafter = start(target)
    assert drafter.training and all(p.requires_grad and p.dtype == torch.float32 for p in drafter.parameters())
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(p, before[name]) for name, p in target.named_parameters())


def test_the_context_starts_as_the_last_tap_with_a_little_noise(target):
    drafter = start(target, target_layer_ids=[0, 1, 3])
    states = torch.randn(5, 3 * 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, last = drafter.fc(states), states[:, -32:]
    assert 0 < (found - last).norm() < 0.3 * last.norm()


def test_the_random_part_is_of_the_seed_and_touches_no_global_state(target):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = start(target, seed=1), start(target, seed=1), start(target, seed=2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.fc.weight, again.fc.weight) and not torch.equal(first.fc.weight, other.fc.weight)


def test_sizes_are_the_targets_and_the_defaults_are_told(target):
    config = drafter_from_target(target, mask_token_id=63).config
    assert config.num_hidden_layers == DEFAULT_NUM_LAYERS == 3 and config.block_size == DEFAULT_BLOCK_SIZE == 8
    assert config.target_layer_ids == [1] and config.mask_token_id == 63
    assert start(make_target(num_hidden_layers=12)).config.target_layer_ids == default_target_layer_ids(12, 5)
    theirs = target.config
    for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_key_value_heads", "hidden_act"):
        assert getattr(config, name) == getattr(theirs, name)
    assert config.rope_parameters["rope_theta"] == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3"])
def test_it_drafts_for_its_target(kind):
    target = make_target(kind)
    drafter = start(target, block_size=4).eval()
    check_pair(target, drafter)
    prompt = make_prompt()
    settings = {"max_new_tokens": 12, "do_sample": False}
    output = BlockPilot(drafter).generate(target, prompt, **settings)
    assert torch.equal(output, plain_generate(target, prompt, **settings))


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(lambda: GemmaForCausalLM(GemmaConfig(**SMALL)), id="norms multiply by one more than the weight"),
        pytest.param(lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL)), id="four norms a layer"),
        pytest.param(
            lambda: Olmo2ForCausalLM(Olmo2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"})),
            id="norms after attention and MLP",
        ),
    ],
)
def test_parameters_that_mean_something_else_are_not_taken_over(target):
    """They were: norms with weights near 0 would have silenced every layer of the drafter."""
    target = target()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "norm" in name:
                parameter.fill_(0.01)
    drafter = start(target)
    assert all((p == 1).all() for name, p in drafter.named_parameters() if "norm" in name)
    assert not torch.equal(drafter.layers[0].mlp.up_proj.weight, target.model.layers[-2].mlp.up_proj.weight)


def test_activation_and_soft_cap_are_the_targets():
    target = Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=20.0))
    assert start(target).config.final_logit_softcapping == 20.0
    target = make_target("llama", hidden_act="gelu")
    assert start(target).config.hidden_act == "gelu"


@pytest.mark.parametrize(
    ("settings", "message", "good"),
    [
        ({"mask_token_id": 64}, r"`mask_token_id` must be a row of the target's embedding, 0 to 63, got 64", 63),
        ({"mask_token_id": -1}, r"`mask_token_id` must be a row of the target's embedding, 0 to 63, got -1", 0),
        ({"num_layers": 5}, r"`num_layers` must be 1 to 4, the layers of the target to start from, got 5", 4),
        ({"num_layers": 0}, r"`num_layers` must be 1 to 4, the layers of the target to start from, got 0", 1),
        ({"block_size": 1}, r"`block_size` of a drafter must be an integer >= 2", 2),
        ({"target_layer_ids": [0, 4]}, r"`target_layer_ids` must be zero-based layers of the target, 0 to 3", [0, 3]),
    ],
)
def test_what_the_target_does_not_have_is_refused(target, settings, message, good):
    with pytest.raises(ValueError, match=message):
        start(target, **settings)
    assert start(target, **dict.fromkeys(settings, good))


def test_an_untrained_drafter_has_the_sizes_of_one_that_is_trained(target):
    ours = start(target, mask_token_id=17, block_size=6).config.to_diff_dict()
    theirs = untrained_drafter(target, num_layers=2, block_size=6).config.to_diff_dict()
    for config in (ours, theirs):
        config.pop("dtype", None)
        config.pop("mask_token_id")
    assert ours == theirs

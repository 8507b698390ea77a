"""Model families with habits of their own: each one decodes as plain `generate` does, or is refused by name."""

from typing import Any

import pytest
import torch
import transformers as hf
from conftest import (
    SIZES,
    WINDOW,
    both_generate,
    make_drafter,
    make_prompt,
    make_target,
    pilot_generate,
    scripted_pilot,
)

from blockpilot_hf import BlockPilot
from blockpilot_hf.checks import check_pair
from blockpilot_hf.parity import ScriptedDrafter

PROMPT = make_prompt(11)
ALTERNATING = ["sliding_attention", "full_attention"] * 2
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED_MOE = {**MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT = {
    **GROUPED_MOE,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# Many index heads and no pad token, whose embedding is zeros: among keys that all score 0, any may be kept.
INDEXED = {**LATENT, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 6, "pad_token_id": None}
OLD_SIZES = {"vocab_size": 64, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": None}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}

# name: class, fields that differ from `SIZES` (`None` drops one) or all fields of a config with names of its own
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("GPT2LMHeadModel", {**OLD_SIZES, "n_embd": 32, "n_positions": 128}),
    "learned positions with an offset": (
        "OPTForCausalLM",
        {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_key_value_heads": None},
    ),
    "alibi without positions": ("BloomForCausalLM", {**OLD_SIZES, "hidden_size": 32}),
    "alibi next to rotary code": ("FalconForCausalLM", {"alibi": True, "num_key_value_heads": None, "head_dim": None}),
    "local layers by mask": (
        "GPTNeoForCausalLM",
        {
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": WINDOW,
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")),
        },
    ),
    "partial rotary, parallel": ("GPTNeoXForCausalLM", {"num_key_value_heads": None, "head_dim": None}),
    "one key head": ("GPTBigCodeForCausalLM", {**OLD_SIZES, "n_embd": 32, "n_positions": 128}),
    "encoder made a decoder": ("BertLMHeadModel", {"is_decoder": True, "num_key_value_heads": None, "head_dim": None}),
    "decoder of an encoder-decoder": (
        "BartForCausalLM",
        {
            "d_model": 32,
            "decoder_layers": 4,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 64,
            **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")),
        },
    ),
    "soft caps": ("Gemma2ForCausalLM", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "shared keys and values": (
        "Gemma4ForCausalLM",
        {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 64,
        },
    ),
    "attention sinks": (
        "GptOssForCausalLM",
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "layers without positions": ("SmolLM3ForCausalLM", {"head_dim": None, "no_rope_layer_interval": 2}),
    "chunked attention": (
        "Llama4ForCausalLM",
        {
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "floor_scale": 8,
        },
    ),
    "norms after, hybrid window": (
        "Exaone4ForCausalLM",
        {"head_dim": None, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    ),
    "scaled logits": ("CohereForCausalLM", {"head_dim": None}),
    "multipliers": ("GraniteForCausalLM", {"head_dim": None, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "experts": ("Qwen3MoeForCausalLM", {**MOE, "num_experts": 4}),
    "latent attention": ("DeepseekV3ForCausalLM", {**LATENT, "head_dim": None, "first_k_dense_replace": 1}),
    "indexed sparse attention": ("DeepseekV32ForCausalLM", {**INDEXED, "head_dim": None, "first_k_dense_replace": 1}),
    "two attentions in a layer": (
        "LongcatFlashForCausalLM",
        {
            **{key: value for key, value in LATENT.items() if key not in MOE},
            "num_layers": 3,
            "num_hidden_layers": None,
            "ffn_hidden_size": 64,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 32,
        },
    ),
    "short convolutions": ("Lfm2ForCausalLM", {"head_dim": None, "layer_types": ["conv", "full_attention"] * 2}),
    "differential attention": ("DiffLlamaForCausalLM", {}),
}


def make(name: str, *, families: dict[str, tuple[str, dict[str, Any]]] = FAMILIES) -> Any:
    class_name, fields = families[name]
    model_class = getattr(hf, class_name)
    if "n_layer" not in fields:
        fields = {**SIZES, **fields}
    given = {key: value for key, value in fields.items() if value is not None or key == "eos_token_id"}
    config = model_class.config_class(**given)
    for spread in ("initializer_range", "init_std"):
        if hasattr(config, spread):
            setattr(config, spread, 0.2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_decodes_as_plain(name):
    target = make(name)
    plain, ours = both_generate(
        target, PROMPT, accuracy=0.8, max_new_tokens=18, do_sample=True, top_k=0, return_dict_in_generate=True
    )
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.blockpilot.acceptance_length > 2
    mask = (torch.arange(PROMPT.shape[1])[None] > 2).long()
    plain, ours = both_generate(target, PROMPT, attention_mask=mask, accuracy=0.5, max_new_tokens=12)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("name", ["soft caps", "two attentions in a layer", "alibi without positions"])
def test_a_drafter_that_borrows_from_the_target_fits_a_family(name):
    target = make(name)
    num_layers = ScriptedDrafter(target).config.num_target_layers
    drafter = make_drafter(target, num_target_layers=num_layers, target_layer_ids=[0, num_layers - 1])
    plain, ours = both_generate(target, PROMPT, pilot=BlockPilot(drafter), max_new_tokens=10)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize(
    "name",
    [
        "attention sinks",
        "shared keys and values",
        "short convolutions",
        "chunked attention",
        "decoder of an encoder-decoder",
    ],
)
def test_states_and_attentions_are_those_of_plain(name):
    target = make(name)
    target.set_attn_implementation("eager")
    plain, ours = both_generate(
        target,
        PROMPT,
        accuracy=0.8,
        max_new_tokens=14,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    assert torch.equal(ours.sequences, plain.sequences) and ours.blockpilot.acceptance_length > 2
    for expected, got in ((plain.hidden_states, ours.hidden_states), (plain.attentions, ours.attentions)):
        assert len(got) == len(expected) == 14 and len(expected[1]) > 0
        for row, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(row, wanted, atol=1e-4, rtol=1e-4)


def test_a_kernel_that_gives_no_attentions_gives_none_here_too():
    target = make_target()
    assert target.config._attn_implementation == "sdpa"
    plain, ours = both_generate(target, PROMPT, max_new_tokens=9, return_dict_in_generate=True, output_attentions=True)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.attentions == plain.attentions


def test_layers_are_counted_as_the_target_has_them():
    longcat = make("two attentions in a layer")
    assert longcat.config.num_hidden_layers == 6 and len(longcat.model.layers) == 3
    check_pair(longcat, make_drafter(longcat, num_target_layers=3, target_layer_ids=[0, 2]))
    with pytest.raises(ValueError, match="has only 3"):
        check_pair(longcat, make_drafter(longcat, target_layer_ids=[0, 3]))


# Images in the prompt


VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "num_heads": 4, "patch_size": 14, "hidden_size": 32, "intermediate_size": 64}
IMAGE, START, END = 61, 60, 62


def positions_in_three_dimensions() -> tuple[Any, dict[str, torch.Tensor]]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = hf.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope, "initializer_range": 0.2},
        vision_config={**QWEN_VISION, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
        image_token_id=IMAGE,
        video_token_id=63,
        vision_start_token_id=START,
    )
    ids = torch.tensor([[5, 8, START, IMAGE, IMAGE, IMAGE, IMAGE, END, 7, 3, 9]])
    pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0))
    return hf.Qwen2_5_VLForConditionalGeneration(config), {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def images_that_see_themselves_whole() -> tuple[Any, dict[str, torch.Tensor]]:
    config = hf.Gemma3Config(
        text_config={
            **SIZES,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 8,
            "initializer_range": 0.2,
        },
        vision_config=VISION,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        mm_tokens_per_image=4,
    )
    ids = torch.tensor([[5, 8, START, IMAGE, IMAGE, IMAGE, IMAGE, END, 7, 3, 9]])
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    return hf.Gemma3ForConditionalGeneration(config), {
        "input_ids": ids,
        "pixel_values": pixels,
        "token_type_ids": (ids == IMAGE).long(),
    }


@pytest.mark.parametrize("build", [positions_in_three_dimensions, images_that_see_themselves_whole])
def test_a_prompt_with_an_image_decodes_as_plain(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target, inputs = build()
        for parameter in target.eval().requires_grad_(False).parameters():
            if parameter.ndim > 1:  # vision parts start from small numbers or zeros, and the image would not matter
                parameter.normal_(std=0.2)
    plain = target.generate(**inputs, max_new_tokens=18, do_sample=False)
    other = target.generate(**{**inputs, "pixel_values": -inputs["pixel_values"]}, max_new_tokens=18, do_sample=False)
    assert not torch.equal(plain, other), "the image plays no part"
    for accuracy in (0.5, 1.0):
        ours = scripted_pilot(target, plain, accuracy).generate(
            target, **inputs, max_new_tokens=18, do_sample=False, return_dict_in_generate=True
        )
        assert torch.equal(ours.sequences, plain)
    assert ours.blockpilot.acceptance_length > 4
    drafter = BlockPilot(make_drafter(target))
    assert torch.equal(drafter.generate(target, **inputs, max_new_tokens=18, do_sample=False), plain)


# Refused


RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": (
        "JambaForCausalLM",
        {
            **dict.fromkeys(("head_dim", "max_position_embeddings")),
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
        },
    ),
    "granite hybrid": (
        "GraniteMoeHybridForCausalLM",
        {**MAMBA, "head_dim": None, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64},
    ),
    "recurrent gemma": (
        "RecurrentGemmaForCausalLM",
        {"lru_width": 32, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]},
    ),
    "lightning attention": (
        "MiniMaxForCausalLM",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": 64}),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_family_is_refused_by_name_before_any_pass(name):
    target = make(name, families=RECURRENT)

    def fail(*args):
        raise AssertionError("refused only after a pass of the target")

    target.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match=type(target).__name__ + ".*plain `generate`"):
        BlockPilot(ScriptedDrafter(target)).generate(target, PROMPT, max_new_tokens=4)


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_family_without_a_cache_is_refused_by_name(block_size):
    config = hf.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    target = hf.OpenAIGPTLMHeadModel(config).eval()
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel does not use a transformers `Cache`"):
        BlockPilot(make_drafter(target, target_layer_ids=[0])).generate(
            target, PROMPT, max_new_tokens=4, block_size=block_size
        )


def test_a_family_with_several_streams_of_states_is_refused_by_name():
    config = hf.Gemma3nTextConfig(
        **SIZES,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        activation_sparsity_pattern=[0.0] * 4,
    )
    target = hf.Gemma3nForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"Gemma3nForCausalLM has hidden states of shape \(2, 1, 11, 32\)"):
        BlockPilot(make_drafter(target)).generate(target, PROMPT, max_new_tokens=4)


def test_an_embedding_narrower_than_the_layers_cannot_be_borrowed():
    fields = {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 16}
    target = hf.OPTForCausalLM(hf.OPTConfig(**fields)).eval()
    with pytest.raises(ValueError, match="OPTForCausalLM is 16 wide, its layers 32"):
        check_pair(target, make_drafter(target))
    fields["word_embed_proj_dim"] = 32
    check_pair(hf.OPTForCausalLM(hf.OPTConfig(**fields)).eval(), make_drafter(target))


def test_a_family_that_switches_its_cache_off_says_how_to_switch_it_on():
    config = hf.MptConfig(vocab_size=64, d_model=32, n_layers=4, n_heads=4, expansion_ratio=2, max_seq_len=64)
    target = hf.MptForCausalLM(config).eval()
    pilot = BlockPilot(make_drafter(target))
    with pytest.raises(ValueError, match="Pass `use_cache=True`"):
        pilot.generate(target, PROMPT, max_new_tokens=4)
    plain = target.generate(PROMPT, max_new_tokens=10)
    assert torch.equal(pilot_generate(pilot, target, PROMPT, max_new_tokens=10, use_cache=True), plain)


def test_a_family_that_keeps_the_best_keys_only_is_refused_beyond_where_it_keeps_all():
    fields = {key: value for key, value in SIZES.items() if key != "head_dim"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = hf.DogeForCausalLM(hf.DogeConfig(**fields, keep_window_size=24, initializer_range=0.2)).eval()
    plain, ours = both_generate(target, PROMPT, accuracy=0.5, max_new_tokens=13, do_sample=False)
    assert torch.equal(ours, plain)
    with pytest.raises(ValueError, match="keep_window_size"):
        both_generate(target, PROMPT, accuracy=0.5, max_new_tokens=14, do_sample=False)

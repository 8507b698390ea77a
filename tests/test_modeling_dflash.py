"""The drafter's forward against a dense computation written out by hand, and what the generator feeds it."""

import math

import pytest
import torch
from conftest import make_drafter, make_prompt, make_target
from transformers.cache_utils import DFlashCache, DynamicCache

from blockpilot_hf import BlockPilot, BlockPilotCandidateGenerator, DFlashDraftModel

KINDS = {
    "full": {},
    "full, causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
    "sliding, window below the block": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3},
    "sliding, window 1": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 1},
    "sliding, both ways": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "is_causal": False},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    "mixed, full first": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
    "mixed, both ways": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "is_causal": False,
    },
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, first: int, theta: float) -> torch.Tensor:
    """Head vectors `(length, dim)` from position `first` on: pairs (i, i + d/2) turn by position * theta^(-2i/d)."""
    length, dim = x.shape
    angles = torch.tensor([[(first + p) * theta ** (-2 * i / dim) for i in range(dim // 2)] for p in range(length)])
    a, b = x[:, : dim // 2], x[:, dim // 2 :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def is_visible(query: int, key: int, *, causal: bool, window: int | None) -> bool:
    if causal and key > query:
        return False
    return window is None or abs(query - key) < window


@torch.no_grad()
def dense_draft(drafter: DFlashDraftModel, context: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """
    States `(width, hidden)` of a block after `context` `(length, taps * hidden)`, from the weights alone: no cache, no
    mask library, one query after the other.
    """
    config, weights = drafter.config, drafter.state_dict()
    theta, eps, dim = config.rope_parameters["rope_theta"], config.rms_norm_eps, config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    length, width = context.shape[0], noise.shape[0]
    context = rms(context @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = noise
    for index in range(config.num_hidden_layers):
        sliding = config.layer_types[index] == "sliding_attention"
        causal = sliding if config.is_causal is None else config.is_causal
        window = config.sliding_window if sliding else None

        def weight(name, prefix=f"layers.{index}."):
            return weights[prefix + name]

        def heads(states, name, weight=weight):
            bias = weights.get(f"layers.{index}.self_attn.{name}.bias", 0.0)  # noqa: B023
            return (states @ weight(f"self_attn.{name}.weight").T + bias).view(states.shape[0], -1, dim)

        normed = rms(x, weight("input_layernorm.weight"), eps)
        both = torch.cat([context, normed])
        q = rms(heads(normed, "q_proj"), weight("self_attn.q_norm.weight"), eps)
        k = rms(heads(both, "k_proj"), weight("self_attn.k_norm.weight"), eps)
        v = heads(both, "v_proj")
        attended = torch.zeros_like(q)
        for head in range(config.num_attention_heads):
            keys, queries = rotate(k[:, head // groups], 0, theta), rotate(q[:, head], length, theta)
            for i in range(width):
                seen = [j for j in range(length + width) if is_visible(length + i, j, causal=causal, window=window)]
                probs = torch.softmax(keys[seen] @ queries[i] / math.sqrt(dim), dim=0)
                attended[i, head] = probs @ v[seen, head // groups]
        bias = weights.get(f"layers.{index}.self_attn.o_proj.bias", 0.0)
        x = x + attended.flatten(1) @ weight("self_attn.o_proj.weight").T + bias
        normed = rms(x, weight("post_attention_layernorm.weight"), eps)
        gate = torch.nn.functional.silu(normed @ weight("mlp.gate_proj.weight").T)
        x = x + (gate * (normed @ weight("mlp.up_proj.weight").T)) @ weight("mlp.down_proj.weight").T
    return rms(x, weights["norm.weight"], eps)


def random_states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_kind", ["DFlashCache", "DynamicCache", "DynamicCache without config"])
def test_cached_steps_equal_the_dense_computation(target, kind, cache_kind):
    """Contexts grow beyond every window, by one token, by more than the window, and by none."""
    drafter = make_drafter(target, **KINDS[kind])
    cache = {
        "DFlashCache": lambda: DFlashCache(config=drafter.config),
        "DynamicCache": lambda: DynamicCache(config=drafter.config),
        "DynamicCache without config": DynamicCache,
    }[cache_kind]()
    cache.activate_past_recording()
    context = random_states(24, 64)
    start = 0
    for step, (num_new, width) in enumerate([(10, 6), (3, 6), (1, 6), (9, 4), (0, 6), (1, 2)]):
        noise = random_states(width, 32, seed=step + 1)
        if cache_kind == "DFlashCache":
            cache.set_previous_accepted_tokens(num_new)
        with torch.no_grad():
            output = drafter(
                noise_embeds=noise[None], context_hidden_states=context[None, start : start + num_new], cache=cache
            )
        cache.crop(-width)
        start += num_new
        expected = dense_draft(drafter, context[:start], noise)
        torch.testing.assert_close(output.last_hidden_state[0], expected, **CLOSE)
        assert output.cache is cache and cache.get_seq_length() == start


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "attention",
    ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)],  # compiles for half a minute on a CPU
)
def test_every_attention_gives_the_dense_computation(target, kind, attention):
    if attention == "flex_attention" and kind not in ("full", "mixed"):
        pytest.skip("two kinds are enough: all go through one mask function")
    drafter = make_drafter(target, **KINDS[kind])
    drafter.set_attn_implementation(attention)
    context, noise = random_states(12, 64), random_states(6, 32, seed=1)
    with torch.no_grad():
        states = drafter(noise_embeds=noise[None], context_hidden_states=context[None]).last_hidden_state
    torch.testing.assert_close(states[0], dense_draft(drafter, context, noise), **CLOSE)


def test_attention_bias_is_used(target):
    drafter = make_drafter(target, attention_bias=True)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(random_states(*parameter.shape))
    context, noise = random_states(9, 64), random_states(4, 32, seed=1)
    with torch.no_grad():
        states = drafter(noise_embeds=noise[None], context_hidden_states=context[None]).last_hidden_state
    torch.testing.assert_close(states[0], dense_draft(drafter, context, noise), **CLOSE)


@pytest.mark.parametrize("kind", ["full", "sliding", "sliding, both ways", "mixed"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padding_of_the_context_is_not_seen(target, kind, attention):
    """Two rows of different context length give what each gives alone, at the first step and from the cache."""
    drafter = make_drafter(target, **KINDS[kind])
    drafter.set_attn_implementation(attention)
    cache = DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    lengths, total, width = (12, 9), 12, 5
    context = random_states(2, total + 2, 64)
    mask = torch.tensor([[0] * (total - length) + [1] * length for length in lengths])
    start = 0
    for step, num_new in enumerate((total, 2)):
        noise = random_states(2, width, 32, seed=step + 1)
        seen = torch.cat([mask, torch.ones(2, start + num_new - total + width, dtype=torch.long)], dim=-1)
        positions = (seen.cumsum(-1) - 1).clamp_min(0)[:, start:]
        cache.set_previous_accepted_tokens(num_new)
        with torch.no_grad():
            states = drafter(
                noise_embeds=noise,
                context_hidden_states=context[:, start : start + num_new],
                position_ids=positions,
                attention_mask=seen,
                cache=cache,
            ).last_hidden_state
        cache.crop(-width)
        start += num_new
        for row, length in enumerate(lengths):
            expected = dense_draft(drafter, context[row, total - length : start], noise[row])
            torch.testing.assert_close(states[row], expected, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "sees_later"), [("full", True), ("full, causal", False), ("sliding", False), ("sliding, both ways", True)]
)
def test_earlier_block_positions_see_later_ones_exactly_in_bidirectional_layers(target, kind, sees_later):
    drafter = make_drafter(target, **KINDS[kind])
    context, noise = random_states(1, 10, 64), random_states(1, 6, 32, seed=1)
    other = noise.clone()
    other[0, 3] += 1.0
    with torch.no_grad():
        before, after = (drafter(n, context).last_hidden_state[0] for n in (noise, other))
    changed = [not torch.equal(before[i], after[i]) for i in range(6)]
    assert changed == ([True] * 6 if sees_later else [False] * 3 + [True] * 3)


def test_a_narrower_bidirectional_block_drafts_other_states(drafter):
    """So the block size must not shrink within a call just because the budget does."""
    context, noise = random_states(1, 10, 64), random_states(1, 6, 32, seed=1)
    with torch.no_grad():
        wide, narrow = (drafter(n, context).last_hidden_state[0, :4] for n in (noise, noise[:, :4]))
    assert not torch.allclose(wide, narrow, atol=1e-3)


@pytest.mark.parametrize("how", ["bfloat16", "to dtype", "to device and dtype"])
def test_rotary_frequencies_stay_float32_when_the_model_is_cast(target, how):
    drafter = make_drafter(target)
    before = drafter.rotary_emb.inv_freq.clone()
    {
        "bfloat16": lambda: drafter.bfloat16(),
        "to dtype": lambda: drafter.to(torch.bfloat16),
        "to device and dtype": lambda: drafter.to("cpu", torch.bfloat16),
    }[how]()
    assert drafter.fc.weight.dtype == torch.bfloat16
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(drafter.rotary_emb.inv_freq, before)


def test_gradients_flow_to_every_parameter_with_and_without_checkpointing(target):
    gradients = []
    for use_checkpointing in (False, True):
        drafter = make_drafter(target).train()
        if use_checkpointing:
            drafter.activation_checkpointing_enable()
        states = drafter(random_states(1, 6, 32), random_states(1, 9, 64)).last_hidden_state
        states.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    assert all(g is not None and g.any() for g in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_draft_logits_scale_first_and_cap_then(target):
    drafter = make_drafter(target, output_multiplier=0.5, final_logit_softcapping=3.0)
    states = random_states(5, 32)
    expected = 3.0 * torch.tanh(target.lm_head(states) * 0.5 / 3.0)
    torch.testing.assert_close(drafter.draft_logits(states, target.lm_head), expected)
    plain = make_drafter(target)
    assert torch.equal(plain.draft_logits(states, target.lm_head), target.lm_head(states))


# What the generator feeds the drafter


def new_generator(target, drafter, *, block_size: int = 6) -> BlockPilotCandidateGenerator:
    config = target.generation_config
    return BlockPilotCandidateGenerator(drafter, target, config, block_size=block_size)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("layer_id", [0, 1, 3])
def test_context_is_the_output_of_the_target_layer_that_the_id_names(kind, layer_id):
    """Row of the last layer: the tensor after the final norm, as transformers reports it and as DFlash was trained."""
    target = make_target(kind)
    drafter = make_drafter(target, target_layer_ids=[layer_id])
    outputs, layer = {}, target.model.layers[layer_id]
    hooks = [
        layer.register_forward_hook(lambda m, a, out: outputs.update(layer=out[0] if isinstance(out, tuple) else out)),
        target.model.norm.register_forward_hook(lambda m, a, out: outputs.update(norm=out)),
    ]
    generator = new_generator(target, drafter)
    input_ids = make_prompt(9)
    with torch.no_grad():
        states = target(input_ids, **generator.model_kwargs_overrides).hidden_states
    for hook in hooks:
        hook.remove()
    generator.observe(states, 9)
    expected = outputs["norm" if layer_id == 3 else "layer"]
    assert torch.equal(torch.cat(generator._pending, dim=1), expected)
    assert [i for i, state in enumerate(states) if state is not None] == [layer_id + 1]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_noise_is_the_anchors_raw_embedding_and_mask_embeddings(kind, scale):
    """Gemma's embedding module multiplies by sqrt(hidden_size); a drafter is trained on the table's rows."""
    target = make_target(kind)
    drafter = make_drafter(target, mask_token_id=61, input_embedding_scale=scale)
    fed = []
    hook = drafter.register_forward_pre_hook(lambda m, a, kw: fed.append(kw), with_kwargs=True)
    BlockPilot(drafter).generate(target, make_prompt(), max_new_tokens=4, do_sample=False, block_size=5)
    hook.remove()
    table = target.get_input_embeddings().weight
    noise = fed[0]["noise_embeds"][0]
    assert noise.shape == (5, 32)
    assert torch.equal(noise[1:], table[61].expand(4, -1) * scale)
    assert (noise[0] == table * scale).all(dim=-1).any()


@pytest.mark.parametrize("target_kind", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("kind", ["full", "sliding", "mixed, both ways"])
def test_every_draft_of_a_call_equals_the_dense_computation_on_its_text(target_kind, kind):
    """Positions, context, anchor, mask id, window and head at every step, as the finished text says they are."""
    target = make_target(target_kind)
    drafter = make_drafter(target, **KINDS[kind])
    prompt = make_prompt(9)
    output = BlockPilot(drafter).generate(
        target, prompt, max_new_tokens=9, do_sample=False, block_size=5, return_dict_in_generate=True
    )
    sequence = output.sequences
    with torch.no_grad():
        states = target(sequence, output_hidden_states=True).hidden_states
    context = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)[0]
    table, head = target.get_input_embeddings().weight, target.get_output_embeddings()
    anchor = prompt.shape[1]
    steps = output.blockpilot.steps
    assert len(steps) >= 2
    for step in steps:
        if step.draft_ids:
            ids = torch.tensor([sequence[0, anchor], *[drafter.config.mask_token_id] * 4])
            expected = head(dense_draft(drafter, context[:anchor], table[ids])[1:]).argmax(-1)
            assert list(step.draft_ids) == expected.tolist()
        anchor += len(step.committed_ids)


def test_left_padded_prompts_draft_what_unpadded_ones_draft(target, drafter):
    prompt = make_prompt(9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=-1)
    mask = (padded != 0).long()
    kwargs = {"max_new_tokens": 12, "do_sample": False, "block_size": 5, "return_dict_in_generate": True}
    alone = BlockPilot(drafter).generate(target, prompt, **kwargs).blockpilot.steps
    with_padding = BlockPilot(drafter).generate(target, padded, attention_mask=mask, **kwargs).blockpilot.steps
    assert [s.draft_ids for s in with_padding] == [s.draft_ids for s in alone]

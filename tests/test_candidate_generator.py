"""The draft side of one call: widths, whole blocks, context, borrowed modules, and which operations drafting costs."""

import logging
from collections import Counter

import pytest
import torch
from conftest import make_drafter, make_prompt, make_target
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.generation import CandidateGenerator
from transformers.utils import logging as hf_logging

from blockpilot_hf import BlockPilotCandidateGenerator
from blockpilot_hf.candidate_generator import raw_embedding


def make_generator(drafter, target, *, max_length=64, **kwargs):
    return BlockPilotCandidateGenerator(drafter, target, GenerationConfig(max_length=max_length), **kwargs)


def prefilled(generator, target, prompt):
    """The generator after a prefill of `prompt` `(1, length)`, and the greedy first token."""
    with torch.no_grad():
        outputs = target(prompt, output_hidden_states=True)
    generator.choose(outputs.logits[:, -1])
    generator.observe(outputs.hidden_states, prompt.shape[1])
    return outputs.logits[:, -1].argmax(-1, keepdim=True)


def drafter_calls(monkeypatch, drafter):
    calls = []
    forward = type(drafter).forward

    def spy(self, **kwargs):
        calls.append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})
        return forward(self, **kwargs)

    monkeypatch.setattr(type(drafter), "forward", spy)
    return calls


@pytest.fixture
def warnings(caplog):
    """Messages of warnings so far, none of them suppressed because another test had them."""
    hf_logging.get_logger("blockpilot_hf").warning_once.cache_clear()
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


# --- what drafting costs ---


class CountOps(TorchDispatchMode):
    """Matrix products as they reach the device, by name and by the shape of the weight side."""

    def __init__(self):
        super().__init__()
        self.products = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")):
            self.products[name.split(".")[1], args[-1].shape[-1]] += 1
        return func(*args, **(kwargs or {}))


VOCAB_ROWS = 131  # occurs as no other size, so products with the head are told by it


@pytest.fixture(scope="module")
def frozen_bf16_pair():
    target = make_target(vocab_size=VOCAB_ROWS).bfloat16().requires_grad_(False)
    return target, make_drafter(target).bfloat16().requires_grad_(False)


def test_the_counter_sees_the_batched_product_that_a_sliced_batch_of_one_falls_into(frozen_bf16_pair):
    """With frozen weights, torch takes a batched product for `hidden[:, 1:]`, which repacks the whole head."""
    target, _ = frozen_bf16_pair
    hidden = torch.randn(1, 8, 32, dtype=torch.bfloat16)
    with CountOps() as trapped:
        target.lm_head(hidden[:, 1:])
    with CountOps() as free:
        target.lm_head(hidden[0, 1:])
    assert trapped.products == {("bmm", VOCAB_ROWS): 1}
    assert free.products == {("mm", VOCAB_ROWS): 1}


@pytest.mark.parametrize("block_size", [2, 8])
def test_a_block_costs_one_plain_product_with_the_head_and_no_batched_one_with_any_weight(frozen_bf16_pair, block_size):
    target, drafter = frozen_bf16_pair
    generator = make_generator(drafter, target, block_size=block_size)
    anchor = prefilled(generator, target, make_prompt())
    for _ in range(2):  # the second block appends to a cache
        with CountOps() as ops:
            draft = generator.draft_block(anchor)
        assert draft.token_ids.shape == (1, block_size - 1)
        assert {key: n for key, n in ops.products.items() if key[1] == VOCAB_ROWS} == {("mm", VOCAB_ROWS): 1}
        weight_sizes = {p.shape[0] for p in drafter.parameters() if p.ndim == 2}
        assert not [key for key in ops.products if key[0] != "mm" and key[1] in weight_sizes]
        with torch.no_grad():
            states = target(anchor, output_hidden_states=True).hidden_states
        generator.observe(states, 1)


# --- verify width and whole blocks ---


@pytest.mark.parametrize(("remaining", "width"), [(100, 8), (8, 8), (7, 7), (2, 2), (1, 1), (0, 1)])
def test_verify_width_is_the_block_or_what_is_left_of_the_budget(target, drafter, remaining, width):
    generator = make_generator(drafter, target, block_size=8)
    prefilled(generator, target, make_prompt())
    assert generator.verify_width(remaining) == (width, "" if width == 8 else "end of the token budget")


def test_block_size_one_verifies_one_position_and_wants_no_hidden_states(target, drafter):
    generator = make_generator(drafter, target, block_size=1)
    assert not generator.needs_context and generator.model_kwargs_overrides == {}
    generator.observe(None, 10)  # the target returned none
    assert generator.verify_width(100) == (1, "")


def test_past_the_drafters_position_limit_nothing_is_drafted(target):
    for limit, width in ((18, 8), (17, 1)):  # the block spans positions 10 to 17
        generator = make_generator(make_drafter(target, max_position_embeddings=limit), target, block_size=8)
        prefilled(generator, target, make_prompt(10))
        assert generator.verify_width(100)[0] == width
    assert generator.verify_width(100)[1] == "past the drafter's position limit"


@pytest.mark.parametrize(("limit", "expected"), [(18, 8), (17, 7), (11, 1), (10, 1), (5, 1)])
def test_a_pass_never_spans_the_targets_position_limit(drafter, limit, expected):
    target = make_target(max_position_embeddings=limit)
    generator = make_generator(drafter, target, block_size=8)
    prefilled(generator, target, make_prompt(10))
    width, reason = generator.verify_width(100)
    assert width == expected and ("position limit" in reason) == (expected < 8)


@pytest.mark.parametrize("block_size", [2, 5, 8, 11])
def test_the_drafter_sees_whole_blocks_at_consecutive_positions_whatever_is_verified(
    monkeypatch, target, drafter, block_size
):
    """In a bidirectional block a narrower draft changes all its tokens, so trimming is left to the verification."""
    calls = drafter_calls(monkeypatch, drafter)
    generator = make_generator(drafter, target, block_size=block_size)
    anchor = prefilled(generator, target, make_prompt(10))
    first = generator.draft_block(anchor)
    with torch.no_grad():
        states = target(make_prompt(block_size, seed=3), output_hidden_states=True).hidden_states
    generator.observe(states, 2)
    assert generator.verify_width(2)[0] == 2
    second = generator.draft_block(anchor)
    assert first.token_ids.shape == second.token_ids.shape == (1, block_size - 1)
    assert [c["noise_embeds"].shape[1] for c in calls] == [block_size] * 2
    assert [c["context_hidden_states"].shape[1] for c in calls] == [10, 2]
    assert calls[0]["position_ids"].tolist() == [list(range(10 + block_size))]
    assert calls[1]["position_ids"].tolist() == [list(range(10, 12 + block_size))]
    mask_row = target.get_input_embeddings().weight[drafter.config.mask_token_id]
    assert all(row.equal(mask_row) for c in calls for row in c["noise_embeds"][0, 1:])


def test_blocks_drafted_from_context_in_pieces_equal_one_drafted_from_all_of_it(target, drafter):
    prompt = make_prompt(14)
    with torch.no_grad():
        states = target(prompt, output_hidden_states=True).hidden_states
    pieces = make_generator(drafter, target, block_size=6)
    anchor = torch.tensor([[5]])
    for start, end in ((0, 9), (9, 11), (11, 12)):
        pieces.observe(tuple(h[:, start:end] for h in states), end - start)
        pieces.draft_block(anchor)
    pieces.observe(tuple(h[:, 12:] for h in states), 1)  # plain steps in between: kept until the next block
    pieces.observe(tuple(h[:, 13:] for h in states), 1)
    whole = make_generator(drafter, target, block_size=6)
    whole.observe(states, 14)
    ours, expected = pieces.draft_block(anchor), whole.draft_block(anchor)
    assert ours.token_ids.equal(expected.token_ids)
    torch.testing.assert_close(ours.confidence, expected.confidence)


def test_a_block_size_above_training_is_said_once_and_one_below_is_not(target, drafter, warnings):
    for _ in range(2):
        make_generator(drafter, target, block_size=8)
        make_generator(drafter, target, block_size=2)
    assert warnings() == []
    for _ in range(3):
        make_generator(drafter, target, block_size=9)
    (message,) = warnings()
    assert "Block size 9 is above the 8" in message


# --- context ---


def test_padding_is_left_out_of_the_context(target, drafter):
    prompt = make_prompt(6)
    mask = torch.tensor([False, False, True, True, True, True])
    with torch.no_grad():
        states = target(prompt, output_hidden_states=True).hidden_states
    padded = make_generator(drafter, target, block_size=4)
    padded.observe(states, mask)
    bare = make_generator(drafter, target, block_size=4)
    bare.observe(tuple(h[:, 2:] for h in states), 4)
    assert torch.cat(padded._pending, 1).equal(torch.cat(bare._pending, 1))
    anchor = torch.tensor([[5]])
    assert padded.draft_block(anchor).token_ids.equal(bare.draft_block(anchor).token_ids)


def test_the_context_is_the_output_of_the_named_layers(target, drafter):
    generator = make_generator(drafter, target, block_size=4)
    outputs_by_layer = {}
    hooks = [
        layer.register_forward_hook(lambda m, a, out, k=k: outputs_by_layer.__setitem__(k, out))
        for k, layer in enumerate(target.model.layers)
    ]
    with torch.no_grad():
        outputs = target(make_prompt(), **generator.model_kwargs_overrides)
    for hook in hooks:
        hook.remove()
    assert sum(h is not None for h in outputs.hidden_states) == len(drafter.config.target_layer_ids)
    generator.observe(outputs.hidden_states, 10)
    expected = torch.cat([outputs_by_layer[k] for k in drafter.config.target_layer_ids], dim=-1)
    assert generator._pending[0].equal(expected)


def test_context_is_a_copy_so_the_targets_states_can_be_freed(target, drafter):
    generator = make_generator(drafter, target, block_size=4)
    with torch.no_grad():
        states = target(make_prompt(), output_hidden_states=True).hidden_states
    generator.observe(states, 10)
    taps = {states[k + 1].untyped_storage().data_ptr() for k in drafter.config.target_layer_ids}
    assert generator._pending[0].untyped_storage().data_ptr() not in taps


# --- borrowed embedding and head ---


def test_the_embedding_scale_of_the_checkpoint_reaches_the_noise(monkeypatch, target):
    drafter = make_drafter(target, input_embedding_scale=2.5)
    calls = drafter_calls(monkeypatch, drafter)
    generator = make_generator(drafter, target, block_size=3)
    anchor = prefilled(generator, target, make_prompt())
    generator.draft_block(anchor)
    ids = [int(anchor), drafter.config.mask_token_id, drafter.config.mask_token_id]
    torch.testing.assert_close(calls[0]["noise_embeds"][0], target.get_input_embeddings().weight[ids] * 2.5)


def test_a_scaling_embedding_lends_its_table_unscaled(monkeypatch):
    target = make_target("gemma3")
    embedding = target.get_input_embeddings()
    ids = torch.tensor([[5, 7]])
    assert not embedding(ids).equal(embedding.weight[ids])  # it does scale
    drafter = make_drafter(target)
    calls = drafter_calls(monkeypatch, drafter)
    generator = make_generator(drafter, target, block_size=2)
    generator.draft_block(prefilled(generator, target, make_prompt()))
    assert calls[0]["noise_embeds"][0, 1].equal(embedding.weight[drafter.config.mask_token_id])


def test_an_embedding_of_another_kind_is_called_not_indexed():
    """A quantized or offloaded embedding has no table to index, or one whose numbers mean nothing by themselves."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.randint(-127, 127, (10, 4), dtype=torch.int8)

        def forward(self, ids):
            return self.weight[ids].float() / 16

    class PackedSubclass(nn.Embedding):
        def forward(self, ids):
            return self.weight[ids].float() / 16

    ids = torch.tensor([[1, 9]])
    packed = Packed()
    assert raw_embedding(packed, ids).equal(packed.weight[ids].float() / 16)
    subclass = PackedSubclass(10, 4)
    subclass.weight = nn.Parameter(packed.weight, requires_grad=False)
    assert raw_embedding(subclass, ids).equal(packed.weight[ids].float() / 16)
    hooked = nn.Embedding(10, 4, device="meta")  # as under an offloading hook
    hooked.forward = lambda ids: torch.ones(*ids.shape, 4)
    assert raw_embedding(hooked, ids).equal(torch.ones(1, 2, 4))


def test_a_head_without_parameters_is_called(target, drafter):
    """As in a dynamically quantized target, whose packed weights are no parameters."""

    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.packed = [weight]

        def forward(self, hidden_states):
            return hidden_states @ self.packed[0].T

    prompt = make_prompt()
    expected_generator = make_generator(drafter, target, block_size=4)
    expected = expected_generator.draft_block(prefilled(expected_generator, target, prompt))
    other = make_target()
    generator = make_generator(drafter, other, block_size=4)
    anchor = prefilled(generator, other, prompt)
    other.set_output_embeddings(Head(other.lm_head.weight.detach()))
    assert generator.draft_block(anchor).token_ids.equal(expected.token_ids)


def test_ids_beyond_the_smaller_vocabulary_are_never_proposed(drafter):
    padded = make_target(vocab_size=80)
    with torch.no_grad():
        padded.lm_head.weight[64:] *= 50  # rows that the drafter does not know would win
    generator = make_generator(drafter, padded, block_size=8)
    draft = generator.draft_block(prefilled(generator, padded, make_prompt()))
    assert int(draft.token_ids.max()) < 64


# --- stock assisted decoding's interface ---


def test_candidates_are_the_sequence_with_the_drafted_tokens_and_end_with_the_budget(target, drafter):
    prompt = make_prompt(10)
    generator = make_generator(drafter, target, block_size=8, max_length=15)
    assert isinstance(generator, CandidateGenerator)
    same, none = generator.get_candidates(prompt, is_first_iteration=True)
    assert same.equal(prompt) and none is None
    with torch.no_grad():
        outputs = target(prompt, output_hidden_states=True)
    ids = torch.cat([prompt, outputs.logits[:, -1].argmax(-1, keepdim=True)], dim=-1)
    candidates, none = generator.get_candidates(ids, model_outputs=outputs)
    assert none is None
    assert candidates.shape == (1, 14)  # four tokens are left: three drafted and the target's own
    assert candidates[:, :11].equal(ids)

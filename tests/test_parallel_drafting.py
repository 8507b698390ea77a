"""Blocks after many anchors in one pass equal the blocks that decoding drafts one after the other."""

import pytest
import torch
from conftest import make_drafter, make_target
from drafter_texts import make_text
from transformers import GenerationConfig

from blockpilot_hf import BlockPilotCandidateGenerator
from blockpilot_hf.parallel_drafting import Blocks, DraftContext, draft_blocks, draft_states, embed_noise, noise_embeds
from blockpilot_hf.target_states import target_states

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
DRAFTERS = {
    "full": {},
    "sliding": SLIDING,
    "sliding, both ways": {**SLIDING, "is_causal": False},
    "full, causal": {"is_causal": True},
    "window smaller than the block": {**SLIDING, "layer_types": ["sliding_attention"] * 2, "sliding_window": 3},
    "scaled and capped": {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 5.0},
    "five taps": {"target_layer_ids": [0, 1, 2, 3, 1]},
}


@pytest.fixture(scope="module")
def text(target):
    return make_text(target, length=9, num_new=30)


def drafted_at_once(target, drafter, text, anchors, block_size):
    """Logits `(num_anchors, block_size - 1, vocab_size)`."""
    context = target_states(target, drafter.config.target_layer_ids, text).context
    ids = torch.tensor(text.ids)[anchors]
    noise = noise_embeds(drafter, target.get_input_embeddings(), ids, block_size)
    with torch.no_grad():
        states = draft_states(drafter, context, anchors, noise)[:, 1:]
        return drafter.draft_logits(states.flatten(0, 1), target.get_output_embeddings()).view(*states.shape[:2], -1)


def drafted_in_rows(target, drafter, texts, rows):
    """States of blocks `rows`, `(anchor, size)` each, by row and block: `(size, hidden_size)`."""
    layers = drafter.config.target_layer_ids
    contexts = [DraftContext.of(drafter, target_states(target, layers, text).context) for text in texts]
    blocks = Blocks.of(rows, drafter.device)
    ids = torch.full(blocks.index.shape, drafter.config.mask_token_id)
    for row, text in enumerate(texts):
        is_anchor = (blocks.offsets[row] == 0) & (blocks.index[row] >= 0)
        ids[row, is_anchor] = torch.tensor(text.ids)[blocks.anchors[row, is_anchor]]
    noise = embed_noise(drafter, target.get_input_embeddings(), ids)
    states = draft_blocks(drafter, DraftContext.of_rows(contexts), blocks, noise)
    return [[states[row, blocks.index[row] == i] for i in range(len(found))] for row, found in enumerate(rows)]


def drafted_one_by_one(target, drafter, text, anchors, block_size):
    """The same by the draft side of decoding, whose cache grows from anchor to anchor."""
    generator = BlockPilotCandidateGenerator(drafter, target, GenerationConfig(max_length=500), block_size=block_size)
    logits, tokens = [], []
    compute = generator._logits
    generator._logits = lambda states: logits.append(compute(states)) or logits[-1]
    states = target(torch.tensor([text.ids]), output_hidden_states=True).hidden_states
    before = 0
    for anchor in anchors.tolist():
        generator.observe(tuple(h[:, before:anchor] for h in states), anchor - before)
        tokens.append(generator.draft_block(torch.tensor([[text.ids[anchor]]])).token_ids[0])
        before = anchor
    return torch.stack(logits), torch.stack(tokens)


@pytest.mark.parametrize("block_size", [2, 5, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_all_blocks_at_once_are_those_of_decoding(target, text, name, block_size):
    drafter = make_drafter(target, **DRAFTERS[name])
    anchors = torch.tensor([1, 2, 9, 10, 14, 27, len(text.ids) - 1])
    logits = drafted_at_once(target, drafter, text, anchors, block_size)
    expected, tokens = drafted_one_by_one(target, drafter, text, anchors, block_size)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), tokens)
    # Blocks that all are one block would say little.
    assert len({tuple(row.tolist()) for row in tokens}) > 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_blocks_of_different_sizes_in_different_texts_are_those_of_decoding(target, text, name):
    drafter = make_drafter(target, **DRAFTERS[name])
    shorter = make_text(target, seed=5, length=6, num_new=11)
    texts = [shorter, text]
    rows = [[(8, 3), (15, 8)], [(1, 2), (9, 6), (9, 4), (27, 8), (38, 5)]]
    drafted = drafted_in_rows(target, drafter, texts, rows)
    for row, blocks in enumerate(rows):
        for found, (anchor, size) in zip(drafted[row], blocks, strict=True):
            logits = drafter.draft_logits(found[1:], target.get_output_embeddings())
            expected, tokens = drafted_one_by_one(target, drafter, texts[row], torch.tensor([anchor]), size)
            torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=1e-4)
            assert torch.equal(logits.argmax(-1), tokens[0])


def test_rows_of_a_context_are_taken_and_cut_without_changing_a_block(target, text):
    drafter, texts = make_drafter(target), [make_text(target, seed=5, length=6, num_new=11), text]
    layers, embedding = drafter.config.target_layer_ids, target.get_input_embeddings()
    contexts = [DraftContext.of(drafter, target_states(target, layers, one).context) for one in texts]
    both = DraftContext.of_rows(contexts)
    assert both.length == len(text.ids)
    last = both.rows([1])
    assert torch.equal(last.layers[1][0], contexts[1].layers[1][0]) and last.length == len(text.ids)
    blocks = Blocks.of([[(9, 4)]], drafter.device)
    noise = noise_embeds(drafter, embedding, torch.tensor([text.ids[9]]), 4)
    whole = draft_blocks(drafter, last, blocks, noise)
    assert torch.equal(draft_blocks(drafter, last.before(9), blocks, noise), whole)
    assert not torch.allclose(draft_blocks(drafter, last.before(8), blocks, noise), whole, atol=1e-4)


def test_blocks_lie_one_after_another_and_are_padded_on_the_right():
    blocks = Blocks.of([[(7, 2), (4, 3)], [(9, 2)]], torch.device("cpu"))
    assert blocks.positions.tolist() == [[7, 8, 4, 5, 6], [9, 10, 0, 0, 0]]
    assert blocks.index.tolist() == [[0, 0, 1, 1, 1], [0, 0, -1, -1, -1]]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_they_are_so_for_other_targets(kind):
    target = make_target(kind)
    drafter, text = make_drafter(target), make_text(target, length=9, num_new=20)
    anchors = torch.tensor([9, 12, 20])
    logits = drafted_at_once(target, drafter, text, anchors, 6)
    expected, tokens = drafted_one_by_one(target, drafter, text, anchors, 6)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), tokens)


def test_eager_attention_gives_the_same(target, text):
    drafter = make_drafter(target, **SLIDING)
    anchors = torch.tensor([9, 15, 30])
    with_sdpa = drafted_at_once(target, drafter, text, anchors, 6)
    drafter.set_attn_implementation("eager")
    torch.testing.assert_close(drafted_at_once(target, drafter, text, anchors, 6), with_sdpa, rtol=1e-4, atol=1e-4)


def test_other_attention_is_refused(target, text):
    drafter = make_drafter(target)
    drafter.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'sdpa' and 'eager' attention take, got 'flash_attention_2'"):
        drafted_at_once(target, drafter, text, torch.tensor([9]), 6)
    with pytest.raises(ValueError, match="got 'flash_attention_2'"):
        drafted_in_rows(target, drafter, [text], [[(9, 6)]])


def test_a_block_sees_neither_later_context_nor_other_blocks(target, text):
    """Changed from the anchor on, the context gives the same block; so do other anchors beside it."""
    drafter = make_drafter(target)
    context = target_states(target, drafter.config.target_layer_ids, text).context
    embedding, ids = target.get_input_embeddings(), torch.tensor(text.ids)

    def block(anchors, context):
        with torch.no_grad():
            return draft_states(drafter, context, anchors, noise_embeds(drafter, embedding, ids[anchors], 6))

    alone = block(torch.tensor([12]), context)[0]
    changed = context.clone()
    changed[12:] += 1.0
    torch.testing.assert_close(block(torch.tensor([12]), changed)[0], alone)
    changed[11] += 1.0
    assert not torch.allclose(block(torch.tensor([12]), changed)[0], alone, atol=1e-3)
    torch.testing.assert_close(block(torch.tensor([10, 12, 13]), context)[1], alone, rtol=1e-4, atol=1e-5)


def test_what_is_denoised_is_the_anchor_and_masks_by_the_raw_table_without_gradient():
    target = make_target("gemma3")  # its embedding scales, for the target
    drafter = make_drafter(target, input_embedding_scale=0.5)
    noise = noise_embeds(drafter, target.get_input_embeddings(), torch.tensor([5, 6]), 4)
    table = target.get_input_embeddings().weight
    assert table.requires_grad and not noise.requires_grad
    mask = drafter.config.mask_token_id
    expected = torch.stack([table[[anchor, mask, mask, mask]] for anchor in (5, 6)]) * 0.5
    torch.testing.assert_close(noise, expected.detach())


def test_gradients_reach_every_weight_of_the_drafter(target, text):
    drafter = make_drafter(target, **SLIDING)
    anchors = torch.tensor([9, 15, 30])
    context = target_states(target, drafter.config.target_layer_ids, text).context
    noise = noise_embeds(drafter, target.get_input_embeddings(), torch.tensor(text.ids)[anchors], 6)
    draft_states(drafter, context, anchors, noise)[:, 1:].square().sum().backward()
    without = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []

"""The drafter in transformers' own assisted decoding, and transformers' own drafter and loop with ours."""

import pytest
import torch
from conftest import fit_drafter, make_drafter, make_prompt, make_target, pilot_generate, plain_generate
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from blockpilot_hf import BlockPilot, BlockPilotCandidateGenerator, BlockPilotConfig, BlockPilotPolicy

GREEDY = {"do_sample": False, "max_new_tokens": 40}
KINDS = {"full": {}, "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}}


@pytest.fixture(scope="module")
def pairs():
    """Per kind of target and of drafter: target, drafter that is right sometimes, prompt."""
    made = {}

    def get(kind, layers="full"):
        if (kind, layers) not in made:
            target, prompt = make_target(kind), make_prompt(11)
            drafter = make_drafter(target, **KINDS[layers])
            fit_drafter(target, drafter, plain_generate(target, prompt, **GREEDY))
            made[kind, layers] = target, drafter, prompt
        return made[kind, layers]

    return get


def stock_generate(target, drafter, prompt, monkeypatch, **kwargs):
    """Stock assisted decoding, and how many drafted tokens it accepted per step."""
    matches, drafted = [], []
    get_candidates = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self, input_ids, *, n_last_matches, is_first_iteration, **more):
        if drafted:
            matches.append(int(n_last_matches))
        candidates = get_candidates(
            self, input_ids, n_last_matches=n_last_matches, is_first_iteration=is_first_iteration, **more
        )
        if not is_first_iteration:
            drafted.append(tuple(candidates[0][0, input_ids.shape[1] :].tolist()))
        return candidates

    with monkeypatch.context() as patch:
        patch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
        text = plain_generate(target, prompt, assistant_model=drafter, speculation_type="dflash", **kwargs)
    return text, drafted, matches


@pytest.mark.parametrize("layers", KINDS)
@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral"])
def test_one_drafter_gives_one_text_and_one_acceptance_in_stock_generate_and_here(pairs, monkeypatch, kind, layers):
    target, drafter, prompt = pairs(kind, layers)
    text, drafted, matches = stock_generate(target, drafter, prompt, monkeypatch, **GREEDY)
    assert torch.equal(text, plain_generate(target, prompt, **GREEDY))
    ours = pilot_generate(BlockPilot(drafter, adapt="prompt"), target, prompt, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(ours.sequences, text)
    # Stock generate drafts whole blocks as we do, but checks them whole also at the end of the budget, and there it
    # stops drafting one token earlier.
    steps = [step for step in ours.blockpilot.steps if step.verify_width == step.block_size]
    assert len(steps) >= 3 and max(step.num_accepted for step in steps) >= 3
    assert [step.draft_ids for step in steps] == drafted[: len(steps)]
    assert len(matches) >= 3
    assert [step.num_accepted for step in steps][: len(matches)] == matches[: len(steps)]


def test_a_left_padded_prompt_works_in_stock_generate(pairs, monkeypatch):
    target, drafter, prompt = pairs("qwen3")
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=-1)
    mask = (padded != 0).long()
    text, _, matches = stock_generate(target, drafter, padded, monkeypatch, attention_mask=mask, **GREEDY)
    assert torch.equal(text, plain_generate(target, padded, attention_mask=mask, **GREEDY))
    unpadded, _, expected = stock_generate(target, drafter, prompt, monkeypatch, **GREEDY)
    assert torch.equal(text[:, 3:], unpadded)
    assert matches == expected and max(matches) >= 3


# Our generator in the stock loop


def stock_loop_with(generator_class, target, monkeypatch, widths, **fields):
    """Put our generator where the stock loop makes its own; `widths` gets its numbers of candidates."""

    class Counting(generator_class):
        def get_candidates(self, input_ids, *args, **kwargs):
            candidates = super().get_candidates(input_ids, *args, **kwargs)
            widths.append(candidates[0].shape[1] - input_ids.shape[1])
            return candidates

    def make(self, generation_config, assistant_model=None, **more):
        return Counting(assistant_model, self, generation_config, **fields)

    monkeypatch.setattr(type(target), "_get_candidate_generator", make)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gemma3"])
@pytest.mark.parametrize("block_size", [1, 2, 5, 8])
def test_our_generator_in_the_stock_loop_gives_plain_greedy_text(pairs, monkeypatch, kind, block_size):
    target, drafter, prompt = pairs(kind)
    plain = plain_generate(target, prompt, **GREEDY)
    widths = []
    stock_loop_with(BlockPilotCandidateGenerator, target, monkeypatch, widths, block_size=block_size)
    text = plain_generate(target, prompt, assistant_model=drafter, speculation_type="dflash", **GREEDY)
    assert torch.equal(text, plain)
    assert widths[0] == 0  # the prefill's round
    assert max(widths) == block_size - 1
    assert len(widths) == 40 if block_size == 1 else len(widths) < 35


def constant_policy(block_size: int, vocab_size: int = 64) -> BlockPilotPolicy:
    """A head whose last bias decides: the same choice for every prompt."""
    config = BlockPilotConfig(block_sizes=[2, 3, 4, 6], features="logits", vocab_size=vocab_size, hidden_size=4)
    policy = BlockPilotPolicy(config).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        last = [p for p in policy.parameters() if p.shape == (4,)][-1]
        last[config.block_sizes.index(block_size)] = 1.0
    return policy


@pytest.mark.parametrize("size", [3, 6])
def test_the_policys_size_is_used_in_the_stock_loop(pairs, monkeypatch, size):
    target, drafter, prompt = pairs("qwen3")
    plain = plain_generate(target, prompt, **GREEDY)
    widths = []
    stock_loop_with(BlockPilotCandidateGenerator, target, monkeypatch, widths, policy=constant_policy(size))
    text = plain_generate(target, prompt, assistant_model=drafter, speculation_type="dflash", **GREEDY)
    assert torch.equal(text, plain)
    assert widths[1] == size - 1
    assert set(widths[1:-3]) == {size - 1}


def test_a_left_padded_prompt_works_in_the_stock_loop_with_our_generator(pairs, monkeypatch):
    target, drafter, prompt = pairs("qwen3")
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=-1)
    mask = (padded != 0).long()
    plain = plain_generate(target, padded, attention_mask=mask, **GREEDY)
    padded_widths, widths = [], []
    for ids, more, seen in ((padded, {"attention_mask": mask}, padded_widths), (prompt, {}, widths)):
        with monkeypatch.context() as patch:
            stock_loop_with(BlockPilotCandidateGenerator, target, patch, seen, block_size=5)
            text = plain_generate(target, ids, assistant_model=drafter, speculation_type="dflash", **more, **GREEDY)
        assert torch.equal(text[:, -40:], plain[:, -40:])
    assert padded_widths == widths


# transformers' own drafter in our loop

MUSE_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MUSE_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
    "max_position_embeddings": 16,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


@pytest.fixture(scope="module")
def muse():
    """A tiny Muse Glimmer target and its native drafter, right sometimes; sliding layers on both sides."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = MuseGlimmerConfig(
            text_config=MUSE_TEXT, vision_config=MUSE_VISION, out_hidden_size=32, projector_hidden_size=16,
            image_token_id=62, video_token_id=61,
        )  # fmt: skip
        target = MuseGlimmerForConditionalGeneration(config).eval()
        drafter = MuseGlimmerAssistantModel(
            MuseGlimmerAssistantConfig(
                **{k: v for k, v in MUSE_TEXT.items() if k not in ("vocab_size", "num_hidden_layers")},
                num_hidden_layers=2,
                block_size=6,
                mask_token_id=63,
                target_layer_ids=[0, 2],
            )
        ).eval()
    prompt = make_prompt(11)
    fit_drafter(target, drafter, plain_generate(target, prompt, **GREEDY))
    return target, drafter, prompt


def test_a_native_muse_glimmer_pair_decodes_here_as_in_stock_generate(muse, monkeypatch):
    target, drafter, prompt = muse
    plain = plain_generate(target, prompt, **GREEDY)
    text, drafted, matches = stock_generate(target, drafter, prompt, monkeypatch, **GREEDY)
    ours = pilot_generate(BlockPilot(drafter, adapt="prompt"), target, prompt, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(ours.sequences, plain) and torch.equal(text, plain)
    steps = [step for step in ours.blockpilot.steps if step.verify_width == step.block_size]
    assert max(step.num_accepted for step in steps) >= 1
    assert [step.draft_ids for step in steps] == drafted[: len(steps)]
    assert len(matches) >= 3
    assert [step.num_accepted for step in steps][: len(matches)] == matches[: len(steps)]


@pytest.mark.parametrize("block_size", [1, 2, 4, 9])
def test_a_native_drafter_takes_any_block_size(muse, block_size):
    target, drafter, prompt = muse
    plain = plain_generate(target, prompt, **GREEDY)
    assert torch.equal(pilot_generate(BlockPilot(drafter), target, prompt, block_size=block_size, **GREEDY), plain)


def test_a_native_pair_samples_plain_generates_text(muse):
    target, drafter, prompt = muse
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 24, "seed": 5}
    assert torch.equal(
        pilot_generate(BlockPilot(drafter), target, prompt, **sampled), plain_generate(target, prompt, **sampled)
    )

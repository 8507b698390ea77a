"""Decoding that copies from the text so far: still plain `generate`'s text, and quick where a text repeats itself."""

import logging
from collections import Counter

import pytest
import torch
from conftest import constant_policy, make_drafter, make_prompt, make_target, pilot_generate, plain_generate
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from blockpilot_hf import BlockPilot, BlockPilotCandidateGenerator
from blockpilot_hf.costs import CostTable
from blockpilot_hf.flight import COPY_WIDTH

# Copies are quick and drafts are dear, so that copies decide.
COSTS = CostTable(
    context_lengths=(64,), verify_s={1: (1.0,), 16: (1.3,)}, draft_s={2: (3.0,), 16: (3.0,)}, source="given"
)
DICT = {"return_dict_in_generate": True}


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def repeating(target):
    """A prompt that holds the target's own answer to its first part, so that the answer to it may go the same way."""
    start = make_prompt(12)
    answer = plain_generate(target, start, max_new_tokens=60, do_sample=False)
    return torch.cat([answer, answer[:, -6:]], dim=1)


def flying(target, **settings):
    return BlockPilot(make_drafter(target), False, adapt="flight", costs=COSTS, **settings)


def copied(trace):
    return [step for step in trace.steps if step.source == "lookup"]


# --- the output ---


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.05},
        {"do_sample": True, "temperature": 1.0, "top_k": 2},
        {"do_sample": False, "repetition_penalty": 1.2},
        {"do_sample": False, "no_repeat_ngram_size": 3},
    ],
    ids=["greedy", "cold", "warm", "penalty", "no-repeats"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_text_is_plain_generates(kind, settings, seed):
    target = make_target(kind)
    period = make_prompt(5, seed=seed)
    prompt = period.repeat(1, 6)  # something to copy from in any case
    settings = {"max_new_tokens": 50, **settings}
    plain = plain_generate(target, prompt, seed=seed, **settings)
    ours = pilot_generate(flying(target), target, prompt, seed=seed, **DICT, **settings)
    assert torch.equal(ours.sequences, plain)
    trace = ours.blockpilot
    assert sum(len(step.committed_ids) for step in trace.steps) == 49
    assert copied(trace), "nothing was copied"
    for step in trace.steps:
        assert bool(step.source) == bool(step.draft_ids)
        if step.source != "drafter":  # which is looked at now and then
            assert step.block_size == step.verify_width == len(step.draft_ids) + 1


def test_repetitions_take_few_steps(target, repeating):
    settings = {"max_new_tokens": 50, "do_sample": False}
    plain = plain_generate(target, repeating, **settings)
    ours = pilot_generate(flying(target), target, repeating, **DICT, **settings)
    without = pilot_generate(flying(target), target, repeating, lookup=False, **DICT, **settings)
    assert torch.equal(ours.sequences, plain) and torch.equal(without.sequences, plain)
    assert len(ours.blockpilot.steps) < 0.7 * len(without.blockpilot.steps)
    assert sum(step.num_accepted for step in copied(ours.blockpilot)) > 10
    assert not copied(without.blockpilot)


def test_what_is_copied_stood_in_the_text(target, repeating):
    output = pilot_generate(flying(target), target, repeating, max_new_tokens=50, do_sample=False, **DICT)
    position = repeating.shape[1] + 1
    for step in output.blockpilot.steps:
        before = output.sequences[0, :position].tolist()
        if step.source == "lookup":
            first = step.draft_ids[0]
            assert any(before[i : i + 2] == [before[-1], first] for i in range(len(before) - 1))
        position += len(step.committed_ids)


def test_one_seed_gives_one_trace(target, repeating):
    settings = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.3}
    first, second = (pilot_generate(flying(target), target, repeating, **DICT, **settings) for _ in range(2))
    told = [
        [(s.source, s.verify_width, s.committed_ids) for s in output.blockpilot.steps] for output in (first, second)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize("num_new", [*range(1, 8), COPY_WIDTH, COPY_WIDTH + 1, COPY_WIDTH + 2])
def test_the_budget_is_kept(target, repeating, num_new):
    settings = {"max_new_tokens": num_new, "do_sample": False}
    ours = pilot_generate(flying(target), target, repeating, **DICT, **settings)
    assert torch.equal(ours.sequences, plain_generate(target, repeating, **settings))


@pytest.mark.parametrize("offset", range(2, 12))
def test_an_end_inside_a_copy_ends_the_answer(target, repeating, offset):
    whole = plain_generate(target, repeating, max_new_tokens=50, do_sample=False)
    end = int(whole[0, repeating.shape[1] + offset])
    settings = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": end}
    ours = pilot_generate(flying(target), target, repeating, **DICT, **settings)
    assert torch.equal(ours.sequences, plain_generate(target, repeating, **settings))


def test_a_criterion_inside_a_copy_ends_the_answer(target, repeating):
    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((1,), input_ids.shape[1] >= repeating.shape[1] + 23)

    for num in range(2):
        settings = {"max_new_tokens": 50, "do_sample": bool(num), "temperature": 0.1} if num else {"max_new_tokens": 50}
        settings["stopping_criteria"] = StoppingCriteriaList([After()])
        ours = pilot_generate(flying(target), target, repeating, **settings)
        assert torch.equal(ours, plain_generate(target, repeating, **settings))
        assert ours.shape[1] == repeating.shape[1] + 23


def test_padding_is_nothing_to_copy_from(target):
    """A padded prompt takes the steps of the unpadded one."""
    prompt = make_prompt(6).repeat(1, 4)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 7).long()[None]
    settings = {"max_new_tokens": 40, "do_sample": False, **DICT}
    bare = pilot_generate(flying(target), target, prompt, **settings)
    ours = pilot_generate(flying(target), target, padded, attention_mask=mask, **settings)
    assert torch.equal(ours.sequences[:, 7:], bare.sequences)
    steps = [[(s.source, s.draft_ids, s.committed_ids) for s in output.blockpilot.steps] for output in (bare, ours)]
    assert steps[0] == steps[1] and copied(ours.blockpilot)


def test_rows_of_a_batch_copy_from_their_own_text(target):
    prompts = torch.cat([make_prompt(5, seed=seed).repeat(1, 5) for seed in (0, 1)])
    settings = {"max_new_tokens": 30, "do_sample": False}
    batch = pilot_generate(flying(target), target, prompts, **DICT, **settings)
    for i, row in enumerate(batch.blockpilot.rows):
        single = pilot_generate(flying(target), target, prompts[i : i + 1], **DICT, **settings).blockpilot
        assert [s.committed_ids for s in row.steps] == [s.committed_ids for s in single.steps]


def test_past_the_drafters_positions_copies_go_on(target):
    drafter = make_drafter(target, max_position_embeddings=40)
    prompt = make_prompt(5).repeat(1, 7)
    pilot = BlockPilot(drafter, False, adapt="flight", costs=COSTS)
    settings = {"max_new_tokens": 60, "do_sample": False}
    ours = pilot_generate(pilot, target, prompt, **DICT, **settings)
    assert torch.equal(ours.sequences, plain_generate(target, prompt, **settings))
    assert any(step.source == "lookup" for step in ours.blockpilot.steps[20:])


def test_a_copy_never_spans_the_targets_last_position():
    target = make_target(max_position_embeddings=64)
    prompt = make_prompt(4).repeat(1, 10)
    settings = {"max_new_tokens": 40, "do_sample": False}
    ours = pilot_generate(flying(target), target, prompt, **DICT, **settings)
    assert torch.equal(ours.sequences, plain_generate(target, prompt, **settings))
    position = prompt.shape[1]
    for step in ours.blockpilot.steps:
        assert position >= 64 or position + step.verify_width <= 64
        position += len(step.committed_ids)


def test_states_of_copied_tokens_are_context_for_later_drafts(target, monkeypatch):
    """Whatever proposed the tokens before it, a draft is the one that its whole context gives."""
    costs = CostTable(
        context_lengths=(64,), verify_s={1: (1.0,), 16: (1.1,)}, draft_s={2: (0.02,), 8: (0.02,)}, source="given"
    )
    drafter = make_drafter(target)
    seen, sources = [], set()
    draft_block = BlockPilotCandidateGenerator.draft_block

    def spy(self, anchor_ids):
        draft = draft_block(self, anchor_ids)
        sources.add(self.source)
        if self.source == "drafter":
            seen.append((self._num_context, self.block_size, draft.token_ids))
        return draft

    monkeypatch.setattr(BlockPilotCandidateGenerator, "draft_block", spy)
    prompt = make_prompt(5).repeat(1, 4)
    pilot = BlockPilot(drafter, False, adapt="flight", costs=costs)
    output = pilot_generate(pilot, target, prompt, max_new_tokens=150, do_sample=True, temperature=0.7, **DICT)
    monkeypatch.undo()
    assert sources == {"drafter", "lookup"}
    with torch.no_grad():
        states = target(output.sequences, output_hidden_states=True).hidden_states
    for length, size, token_ids in seen:
        alone = BlockPilotCandidateGenerator(drafter, target, GenerationConfig(max_length=1000), block_size=size)
        alone.observe(tuple(state[:, :length] for state in states), length)
        assert torch.equal(alone.draft_block(output.sequences[:, length : length + 1]).token_ids, token_ids)


def test_drawn_drafts_and_copies_together_have_the_law_of_the_target():
    """Copies are taken as sure of themselves: the target's own draw decides on them."""
    target = make_target(vocab_size=6, seed=3)
    costs = CostTable(context_lengths=(64,), verify_s={1: (1.0,), 16: (1.0,)}, draft_s={2: (0.3,), 16: (0.3,)})
    pilot = BlockPilot(make_drafter(target), False, adapt="flight", costs=costs, draft_sampling=True)
    prompt = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    settings = {"max_new_tokens": 3, "do_sample": True, "top_k": 0}
    laws = {}
    with torch.no_grad():
        first = target(prompt).logits[0, -1].softmax(-1)
        for a in range(6):
            second = target(torch.cat([prompt, torch.tensor([[a]])], 1)).logits[0, -1].softmax(-1)
            laws |= {(a, b): float(first[a] * second[b]) for b in range(6)}
    torch.manual_seed(0)
    num_draws, sources = 500, set()
    counts = Counter()
    for _ in range(num_draws):
        output = pilot.generate(target, prompt, **DICT, **settings)
        counts[tuple(output.sequences[0, 8:10].tolist())] += 1
        sources |= {step.source for step in output.blockpilot.steps}
    assert "lookup" in sources
    statistic = sum(
        (counts[key] - num_draws * p) ** 2 / (num_draws * p) for key, p in laws.items() if num_draws * p >= 5
    )
    cells = sum(num_draws * p >= 5 for p in laws.values())
    assert statistic < cells + 4 * (2 * cells) ** 0.5


# --- the switch ---


def test_without_a_flight_nothing_is_copied(target, repeating):
    for fixed in ({"adapt": "prompt"}, {"block_size": 4}):
        pilot = BlockPilot(make_drafter(target), False)
        output = pilot_generate(pilot, target, repeating, max_new_tokens=20, **fixed, **DICT)
        assert {step.source for step in output.blockpilot.steps} <= {"drafter", ""}


def test_the_call_goes_before_the_pilot(target, repeating):
    settings = {"max_new_tokens": 40, "do_sample": False, **DICT}
    off = flying(target, lookup=False)
    assert not copied(pilot_generate(off, target, repeating, **settings).blockpilot)
    assert copied(pilot_generate(off, target, repeating, lookup=True, **settings).blockpilot)


def test_a_pilot_that_copies_may_be_called_with_a_fixed_size(target, repeating):
    output = pilot_generate(flying(target, lookup=True), target, repeating, block_size=4, max_new_tokens=9, **DICT)
    assert not copied(output.blockpilot)


def test_what_only_a_flight_does_is_refused_without_one(target, repeating):
    drafter = make_drafter(target)
    said = "`lookup=True` copies .* Leave `lookup` out, or pass `adapt='flight'`"
    with pytest.raises(ValueError, match=said):
        BlockPilot(drafter, adapt="prompt", lookup=True)
    for given in ({"block_size": 4}, {"adapt": "prompt"}, {"policy": constant_policy(4)}):
        with pytest.raises(ValueError, match=said):
            BlockPilot(drafter).generate(target, repeating, lookup=True, max_new_tokens=4, **given)
    with pytest.raises(TypeError, match=r"`lookup` must be `True`, `False` or left out, got 'yes'"):
        BlockPilot(drafter, lookup="yes")


def test_copies_that_are_right_do_not_hide_a_drafter_that_never_is(target, caplog):
    """The warning is about the drafter, whatever was copied."""
    costs = CostTable(context_lengths=(64,), verify_s={1: (1.0,), 16: (1.0,)}, draft_s={2: (1e-6,), 16: (1e-6,)})
    drafter = make_drafter(target)
    with torch.no_grad():
        drafter.norm.weight.zero_()  # always the same token
    pilot = BlockPilot(drafter, False, adapt="flight", costs=costs)
    with caplog.at_level(logging.WARNING):
        output = pilot_generate(pilot, target, make_prompt(30), max_new_tokens=120, do_sample=True, **DICT)
    steps = output.blockpilot.steps
    drafted = [step for step in steps if step.source == "drafter"]
    is_useless = len(drafted) >= 32 and not any(step.num_accepted for step in drafted)
    assert is_useless == any("No drafted token was accepted" in record.message for record in caplog.records)


# --- stock assisted decoding ---


def test_the_generator_copies_in_stock_assisted_decoding_too(target):
    generator = BlockPilotCandidateGenerator(
        make_drafter(target), target, GenerationConfig(max_length=100), adapt="flight", costs=COSTS
    )
    prompt = make_prompt(5).repeat(1, 5)
    with torch.no_grad():
        outputs = target(prompt, output_hidden_states=True)
    generator.get_candidates(prompt, is_first_iteration=True)
    ids = torch.cat([prompt, prompt[:, :1]], dim=1)
    candidates, _ = generator.get_candidates(ids, model_outputs=outputs, n_last_matches=0)
    num = candidates.shape[1] - ids.shape[1]
    assert num > 1 and torch.equal(candidates[0, ids.shape[1] :], prompt.repeat(1, 4)[0, 1 : num + 1])

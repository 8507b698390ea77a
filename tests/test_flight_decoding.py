"""Decoding with decisions in flight: the output stays the target's, and what was plain is no gap for later blocks."""

import itertools
import math
from collections import Counter

import pytest
import torch
from conftest import (
    constant_policy,
    make_drafter,
    make_prompt,
    make_target,
    pilot_generate,
    plain_generate,
    scripted_pilot,
)
from throughput_rows import constant_curve
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from blockpilot_hf import BlockPilot, BlockPilotCandidateGenerator, BlockPilotConfig, BlockPilotPolicy
from blockpilot_hf.costs import CostTable
from blockpilot_hf.features import projected_context
from blockpilot_hf.verification import DraftBlock, DraftSampling, propose, verify_block

NUM_NEW = 60


def table(slope=0.05, draft=0.05):
    widths = (1, 2, 4, 8, 16)
    return CostTable(
        context_lengths=(64,),
        verify_s={width: (1 + slope * (width - 1),) for width in widths},
        draft_s={size: (draft,) for size in widths[1:]},
    )


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target)


# --- the output ---


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.9, "top_p": 0.9}])
def test_the_text_is_plain_generates(kind, accuracy, settings):
    target, prompt = make_target(kind), make_prompt(11)
    settings = {"max_new_tokens": NUM_NEW, **settings}
    plain = plain_generate(target, prompt, seed=5, **settings)
    pilot = scripted_pilot(target, plain, accuracy)
    costs = table(draft=0.3)
    ours = pilot_generate(
        pilot,
        target,
        prompt,
        seed=5,
        adapt="flight",
        lookup=False,
        costs=costs,
        return_dict_in_generate=True,
        **settings,
    )
    assert torch.equal(ours.sequences, plain)
    trace = ours.blockpilot
    assert trace.adapt == "flight" and trace.costs == "given"
    assert sum(len(step.committed_ids) for step in trace.steps) == NUM_NEW - 1
    assert all(step.num_accepted <= max(0, step.verify_width - 1) for step in trace.steps)
    if accuracy == 1.0:
        assert [step.block_size for step in trace.steps[3:-1]] == [8] * (len(trace.steps) - 4)
    if accuracy == 0.0:
        assert sum(step.block_size == 1 for step in trace.steps[10:]) >= 0.85 * len(trace.steps[10:])


def test_a_trained_drafter_gives_the_text_and_one_seed_the_same_trace(target, drafter):
    prompt, settings = make_prompt(9), {"max_new_tokens": NUM_NEW, "do_sample": True}
    pilot = BlockPilot(drafter, adapt="flight", costs=table())
    plain = plain_generate(target, prompt, seed=1, **settings)
    first, second = (
        pilot_generate(pilot, target, prompt, seed=1, return_dict_in_generate=True, **settings) for _ in range(2)
    )
    assert torch.equal(first.sequences, plain) and torch.equal(second.sequences, plain)
    steps = [
        [(s.block_size, s.verify_width, s.committed_ids, s.reason) for s in output.blockpilot.steps]
        for output in (first, second)
    ]
    assert steps[0] == steps[1]


def test_a_fixed_size_stays_what_it_is_and_both_at_once_are_refused(target, drafter):
    prompt = make_prompt(9)
    pilot = BlockPilot(drafter, adapt="flight", costs=table())
    output = pilot_generate(pilot, target, prompt, block_size=4, max_new_tokens=20, return_dict_in_generate=True)
    assert {step.block_size for step in output.blockpilot.steps} == {4} and output.blockpilot.adapt == "prompt"
    with pytest.raises(ValueError, match=r"`adapt='flight'` decides .* `block_size=4` fixes it. Give one of the two"):
        pilot.generate(target, prompt, block_size=4, adapt="flight")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(None, "flight"), (constant_curve(0.5, (1, 2, 4)), "flight"), (constant_policy(4), "prompt")],
    ids=["none", "curve", "choice"],
)
def test_by_default_calls_adapt_in_flight_unless_the_policy_names_one_size(target, drafter, policy, expected):
    for adapt in (None, "flight", "prompt"):
        pilot = BlockPilot(drafter, policy, adapt=adapt)
        output = pilot.generate(target, make_prompt(5), max_new_tokens=9, return_dict_in_generate=True)
        assert output.blockpilot.adapt == (adapt or expected)


@pytest.mark.parametrize("adapt", ["always", 3])
def test_another_way_to_adapt_is_refused(target, drafter, adapt):
    with pytest.raises(ValueError, match=r"`adapt` must be one of 'prompt', 'flight', got"):
        BlockPilot(drafter, adapt=adapt)
    with pytest.raises(ValueError, match=r"`adapt` must be one of 'prompt', 'flight', got"):
        BlockPilot(drafter).generate(target, make_prompt(5), adapt=adapt)


def test_costs_come_as_a_table_or_its_file(target, drafter, tmp_path):
    table().save(tmp_path / "costs.json")
    settings = {"adapt": "flight", "max_new_tokens": 20, "return_dict_in_generate": True}
    by_file = pilot_generate(
        BlockPilot(drafter, costs=tmp_path / "costs.json"), target, make_prompt(9), do_sample=False, **settings
    )
    by_table = pilot_generate(BlockPilot(drafter), target, make_prompt(9), costs=table(), do_sample=False, **settings)
    assert [s.block_size for s in by_file.blockpilot.steps] == [s.block_size for s in by_table.blockpilot.steps]
    with pytest.raises(TypeError, match=r"`costs` must be a `CostTable` or the file of one.*got int"):
        BlockPilot(drafter, costs=3)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is not a cost table"):
        BlockPilot(drafter, costs=str(tmp_path / "other.json"))


def test_without_a_table_the_trace_says_which_default_decided(target, drafter):
    output = pilot_generate(
        BlockPilot(drafter), target, make_prompt(9), adapt="flight", max_new_tokens=9, return_dict_in_generate=True
    )
    assert "default" in output.blockpilot.costs
    fixed = pilot_generate(
        BlockPilot(drafter), target, make_prompt(9), block_size=4, max_new_tokens=9, return_dict_in_generate=True
    )
    assert fixed.blockpilot.costs == ""


def test_rows_of_a_batch_fly_for_themselves(target):
    prompt = make_prompt(9, rows=2)
    settings = {"max_new_tokens": 30, "do_sample": False}
    plain = plain_generate(target, prompt, **settings)
    pilot = scripted_pilot(target, plain[:1], 1.0)
    output = pilot_generate(
        pilot, target, prompt, adapt="flight", costs=table(), return_dict_in_generate=True, **settings
    )
    assert torch.equal(output.sequences, plain)
    easy, hard = (row.acceptance_length for row in output.blockpilot.rows)
    assert easy > 3 > 2 > hard


# --- plain stretches ---


@pytest.mark.parametrize("window", [None, 16])
def test_after_200_plain_steps_a_block_is_drafted_as_without_the_stretch(target, window):
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window} if window else {}
    drafter = make_drafter(target, **sliding)
    ids = torch.cat([make_prompt(20), make_prompt(240, seed=2)], dim=1)
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states

    def generator():
        made = BlockPilotCandidateGenerator(
            drafter, target, GenerationConfig(max_length=1000), adapt="flight", costs=table()
        )
        made.choose(torch.zeros(1, 64), states)
        made.plan(100)
        return made

    def part(first, last):
        return tuple(state[:, first:last] for state in states)

    stretched, whole = generator(), generator()
    stretched.observe(part(0, 20), 20)
    stretched.block_size = 8
    stretched.draft_block(ids[:, 20:21])
    for position in range(20, 220):
        stretched.observe(part(position, position + 1), 1)
        stretched.learn(1, 0, was_drafted=False)
    assert len(stretched._pending) < 200  # what waits is bounded
    whole.observe(part(0, 220), 220)
    drafts = []
    for made in (stretched, whole):
        made.block_size = 8
        drafts.append(made.draft_block(ids[:, 220:221]))
    assert torch.equal(drafts[0].token_ids, drafts[1].token_ids)
    torch.testing.assert_close(drafts[0].confidence, drafts[1].confidence)


def test_plain_steps_of_a_call_leave_no_gap(target, drafter, monkeypatch):
    """Every block that is drafted in a flight with plain stretches is the one that its context alone gives."""
    seen = []
    draft_block = BlockPilotCandidateGenerator.draft_block

    def spy(self, anchor_ids):
        draft = draft_block(self, anchor_ids)
        seen.append((self._num_context, self.block_size, draft.token_ids))
        return draft

    monkeypatch.setattr(BlockPilotCandidateGenerator, "draft_block", spy)
    prompt, settings = make_prompt(9), {"max_new_tokens": 150, "do_sample": False}
    output = pilot_generate(
        BlockPilot(drafter, lookup=False),
        target,
        prompt,
        adapt="flight",
        costs=table(0.01),
        return_dict_in_generate=True,
        **settings,
    )
    steps = output.blockpilot.steps
    assert any(a.block_size == 1 < b.block_size for a, b in itertools.pairwise(steps))
    monkeypatch.undo()
    with torch.no_grad():
        states = target(output.sequences, output_hidden_states=True).hidden_states
    for length, size, token_ids in seen:
        alone = BlockPilotCandidateGenerator(drafter, target, GenerationConfig(max_length=1000), block_size=size)
        alone.observe(tuple(state[:, :length] for state in states), length)
        assert torch.equal(alone.draft_block(output.sequences[:, length : length + 1]).token_ids, token_ids)


# --- drawn proposals: the law stays the target's ---

VOCAB = 5


def chi_square_p(observed, expected):
    """The p-value by the Wilson-Hilferty approximation, of counts over categories with expected counts."""
    statistic = sum((observed.get(key, 0) - mean) ** 2 / mean for key, mean in expected.items())
    k = len(expected) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


def trimmed_law(width_of, num_draws=12000):
    """
    Counts of the first two emitted tokens of a block of three whose drafts are drawn from q and whose verified width
    `width_of(draft)` says, against the target's law p: what is not verified is drawn anew by a plain step.
    """
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(VOCAB, VOCAB, generator=generator).softmax(-1)  # of the next token, by the last one
    q = torch.randn(2, VOCAB, generator=generator) * 1.5
    torch.manual_seed(1)
    counts = Counter()
    anchor = 2
    settings = {
        "logits_processor": LogitsProcessorList(),
        "stopping_criteria": StoppingCriteriaList(),
        "do_sample": True,
    }
    for _ in range(num_draws):
        draft = propose(q[None], DraftSampling())
        sequence, emitted = torch.tensor([[anchor]]), []
        width = width_of(draft)
        block = [anchor, *draft.token_ids[0, : width - 1].tolist()]
        emitted += verify_block(draft, p[block].log()[None], sequence, **settings).token_ids[0].tolist()
        while len(emitted) < 2:
            last = torch.tensor([[anchor, *emitted]])
            emitted += verify_block(None, p[emitted[-1:]].log()[None], last, **settings).token_ids[0].tolist()
        counts[tuple(emitted[:2])] += 1
    expected = {(a, b): num_draws * float(p[anchor, a] * p[a, b]) for a in range(VOCAB) for b in range(VOCAB)}
    return chi_square_p(counts, expected)


def test_trimming_by_what_the_drafter_says_keeps_the_law_of_drawn_tokens():
    # As decided in flight: by the distributions alone. Three verified if the second place is sure, else two.
    assert trimmed_law(lambda draft: 3 if draft.confidence[0, 1] > 0.3 else 2) > 1e-3
    assert trimmed_law(lambda draft: 2) > 1e-3
    # And by draws before the place that is decided on.
    assert trimmed_law(lambda draft: 3 if draft.token_ids[0, 0] < 2 else 2) > 1e-3


def test_a_rule_that_looks_at_the_draw_it_decides_on_changes_the_law():
    def by_the_drawn_token(draft: DraftBlock) -> int:
        ids, q = draft.q
        return 2 if q[0, 0, ids[0, 0] == draft.token_ids[0, 0]] > 0.3 else 1

    assert trimmed_law(by_the_drawn_token) < 1e-6


def test_decoding_in_flight_with_drawn_proposals_has_the_law_of_plain_sampling(target, drafter):
    # The whole loop, trimming included: the second and third token of many short answers.
    small = make_target(vocab_size=VOCAB + 1, seed=3)
    draft = make_drafter(small)
    prompt = torch.tensor([[1, 2, 3]])
    settings = {"max_new_tokens": 3, "do_sample": True, "top_k": 0}
    with torch.no_grad():
        first = small(prompt).logits[0, -1].softmax(-1)
        laws = {}
        for a in range(VOCAB + 1):
            second = small(torch.cat([prompt, torch.tensor([[a]])], 1)).logits[0, -1].softmax(-1)
            for b in range(VOCAB + 1):
                laws[a, b] = float(first[a] * second[b])
    pilot = BlockPilot(draft, adapt="flight", costs=table(0.2, draft=0.01), draft_sampling=True)
    torch.manual_seed(0)
    num_draws, counts, widths = 1500, Counter(), Counter()
    for _ in range(num_draws):
        output = pilot.generate(small, prompt, return_dict_in_generate=True, **settings)
        counts[tuple(output.sequences[0, 3:5].tolist())] += 1
        widths[output.blockpilot.steps[0].block_size, output.blockpilot.steps[0].verify_width] += 1
    common = {key: num_draws * chance for key, chance in laws.items() if num_draws * chance >= 5}
    rest = num_draws - sum(common.values())
    observed = {key: counts[key] for key in common} | {"rest": sum(n for key, n in counts.items() if key not in common)}
    assert chi_square_p(observed, common | ({"rest": rest} if rest > 0 else {})) > 1e-3
    assert any(size > 1 for size, _ in widths)


# --- stock assisted decoding ---


def test_the_generator_flies_in_stock_assisted_decoding_too(target, drafter):
    generator = BlockPilotCandidateGenerator(
        drafter, target, GenerationConfig(max_length=80), adapt="flight", costs=table(), lookup=False
    )
    ids = make_prompt(9)
    with torch.no_grad():
        outputs = target(ids, output_hidden_states=True)
        generator.get_candidates(ids, is_first_iteration=True)
        for _ in range(80):
            ids = torch.cat([ids, outputs.logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            outputs = target(ids, output_hidden_states=True)
            if ids.shape[1] >= 79:
                break
            kept = 0 if ids.shape[1] == 10 else None
            states = outputs.hidden_states if kept == 0 else tuple(s[:, -2:-1] for s in outputs.hidden_states)
            fake = type(outputs)(logits=outputs.logits, hidden_states=states)
            candidates, _ = generator.get_candidates(ids, model_outputs=fake, n_last_matches=0)
            assert torch.equal(candidates[:, : ids.shape[1]], ids)
            generator.update_candidate_strategy(ids, None, 0)
    assert candidates.shape[1] == ids.shape[1] - 1  # nothing was ever right, so it decodes plainly by now


# --- a curve head as prior ---


def curve_policy(drafter, taus):
    """A curve head that predicts these acceptance lengths by block size, whatever it reads."""
    sizes = [1, *taus]
    policy = BlockPilotPolicy(
        BlockPilotConfig(
            block_sizes=sizes,
            head="curve",
            features="compact+context",
            context_size=drafter.config.hidden_size,
            hidden_size=2,
        )
    )
    with torch.no_grad():
        policy.fc_out.weight.zero_()
        shares = torch.tensor([(tau - 1) / (size - 1) for size, tau in taus.items()])
        policy.fc_out.bias.copy_(torch.logit(shares))
    return policy.eval()


def test_a_curve_head_chooses_under_the_calls_costs_and_reads_the_drafters_context(target, drafter):
    prompt, seen = make_prompt(9), []

    class Spy(BlockPilotPolicy):
        def choose(self, logits, *, context=None, **more):
            seen.append((context, more["context_length"]))
            return super().choose(logits, context=context, **more)

    policy = curve_policy(drafter, {2: 1.5, 4: 1.9, 8: 2.2})
    policy.__class__ = Spy
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    chosen = [
        pilot_generate(BlockPilot(drafter, policy), target, prompt, costs=costs, **settings).blockpilot
        for costs in (table(0.0, draft=0.01), table(0.2, draft=0.01), table(2.0))
    ]
    assert [trace.block_size for trace in chosen] == [8, 2, 1]
    assert all(trace.costs == "given" for trace in chosen)
    taps = [i + 1 for i in drafter.config.target_layer_ids]
    with torch.no_grad():
        states = target(prompt, output_hidden_states=True).hidden_states
    expected = projected_context(drafter, torch.cat([states[i][:, -1] for i in taps], dim=-1))
    for context, length in seen:
        torch.testing.assert_close(context, expected)
        assert length == 9


def test_a_curve_head_is_the_prior_of_a_flight(target, drafter):
    prompt = make_prompt(9)
    settings = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "adapt": "flight",
        "costs": table(0.05, draft=0.2),
    }
    plain = plain_generate(target, prompt, max_new_tokens=20, do_sample=False)
    first = {}
    for name, taus in {"hopeful": {2: 1.95, 8: 6.5}, "hopeless": {2: 1.001, 8: 1.002}}.items():
        output = pilot_generate(BlockPilot(drafter, curve_policy(drafter, taus)), target, prompt, **settings)
        assert torch.equal(output.sequences, plain)
        first[name] = output.blockpilot.steps[0].block_size
    assert first == {"hopeful": 8, "hopeless": 1}


def test_a_policy_that_reads_another_drafters_context_is_refused_before_any_pass(target, drafter, monkeypatch):
    policy = curve_policy(make_drafter(target, hidden_size=32), {4: 2.0})
    policy.config.context_size = 48

    def refuse(self, input_ids=None, **kwargs):
        raise AssertionError("a pass was made")

    monkeypatch.setattr(type(target), "forward", refuse)
    with pytest.raises(ValueError, match=r"reads the context of 48 numbers .* `hidden_size` 32"):
        BlockPilot(drafter, policy).generate(target, make_prompt(5), max_new_tokens=3)
    scripted = scripted_pilot(target, make_prompt(9))
    policy.config.context_size = 32
    with pytest.raises(ValueError, match=r"layers `fc` and `hidden_norm`, and the drafter is a ScriptedDrafter"):
        scripted.generate(target, make_prompt(5), max_new_tokens=3, policy=policy)


def test_a_policy_that_names_one_size_is_not_asked_in_flight(target, drafter, monkeypatch):
    policy = BlockPilotPolicy(BlockPilotConfig(block_sizes=[1, 2], hidden_size=2)).eval()
    asked = []
    monkeypatch.setattr(BlockPilotPolicy, "choose", lambda self, logits, **settings: asked.append(1))
    output = pilot_generate(
        BlockPilot(drafter, policy),
        target,
        make_prompt(9),
        max_new_tokens=12,
        adapt="flight",
        costs=table(0.01, draft=0.01),
        return_dict_in_generate=True,
    )
    trace = output.blockpilot
    assert not asked and trace.block_size == 8 and "is not asked" in trace.reason and trace.scores is None
    assert max(step.block_size for step in trace.steps) > 2

"""`propose` and `verify_block` on logits made by hand: laws by chi-square, order of events by recording fakes."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import make_drafter, make_prompt, make_target, pilot_generate, plain_generate
from scipy.stats import chisquare
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from blockpilot_hf import BlockPilot, verification
from blockpilot_hf.verification import DraftBlock, DraftSampling, propose, verify_block

VOCAB = 6
ANCHOR = 2
NO_PROCESSORS, NO_CRITERIA = LogitsProcessorList(), StoppingCriteriaList()


# --- laws: a target whose logits depend on the last token, and a drafter whose logits depend on anchor and position ---


def random_tables(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Target logits `(VOCAB, VOCAB)` by last token and drafter logits `(VOCAB, 2, VOCAB)` by anchor, independent."""
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=generator), 1.5 * torch.randn(VOCAB, 2, VOCAB, generator=generator)


def decode_many(
    target: torch.Tensor,
    drafter: torch.Tensor,
    num_samples: int,
    *,
    num_tokens: int = 2,
    sampling: DraftSampling | None,
    processors: LogitsProcessorList = NO_PROCESSORS,
    redraw=None,
    seed: int = 0,
) -> tuple[torch.Tensor, float]:
    """
    `(num_samples, num_tokens)` tokens decoded by drafting and verifying until they are complete, drafts at once, and
    the share of verified drafted tokens that were kept. `redraw` changes the proposals behind the verifier's back.
    """
    torch.manual_seed(seed)
    sequences = [[ANCHOR] for _ in range(num_samples)]
    num_verified = num_kept = 0
    while active := [i for i, sequence in enumerate(sequences) if len(sequence) <= num_tokens]:
        draft = propose(drafter[torch.tensor([sequences[i][-1] for i in active])], sampling)
        if redraw is not None:
            draft = redraw(draft)
        for row, i in enumerate(active):
            width = min(drafter.shape[1] + 1, num_tokens + 1 - len(sequences[i]))
            one = DraftBlock(
                draft.token_ids[row : row + 1],
                None if draft.q is None else (draft.q[0][row : row + 1], draft.q[1][row : row + 1]),
                draft.confidence[row : row + 1],
            )
            judged_after = [sequences[i][-1], *draft.token_ids[row, : width - 1].tolist()]
            committed = verify_block(
                one,
                target[judged_after][None],
                torch.tensor([sequences[i]]),
                logits_processor=processors,
                stopping_criteria=NO_CRITERIA,
                do_sample=True,
            ).token_ids[0]
            num_verified += width - 1
            num_kept += len(committed) - 1
            sequences[i] += committed.tolist()
    return torch.tensor(sequences)[:, 1:], num_kept / max(1, num_verified)


def exact_law(target: torch.Tensor, num_tokens: int, processors: LogitsProcessorList = NO_PROCESSORS) -> torch.Tensor:
    """The joint law `(VOCAB ** num_tokens,)` of plain sampling, multiplied out in float64."""
    law = torch.zeros(VOCAB**num_tokens, dtype=torch.float64)
    for cell, tokens in enumerate(itertools.product(range(VOCAB), repeat=num_tokens)):
        prefix, mass = [ANCHOR], 1.0
        for token in tokens:
            scores = processors(torch.tensor([prefix]), target[prefix[-1]][None].clone())
            mass *= float(scores.double().softmax(-1)[0, token])
            prefix.append(token)
        law[cell] = mass
    return law


def p_value(tokens: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square of joint frequencies; cells expected fewer than five times count together. An impossible sample: 0."""
    place = VOCAB ** torch.arange(tokens.shape[1] - 1, -1, -1)
    counts = torch.bincount((tokens * place).sum(-1), minlength=len(law)).double()
    if counts[law == 0].any():
        return 0.0
    expected = law * len(tokens)
    rare = expected < 5
    observed, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    kept = expected > 0
    if kept.sum() < 2:
        return 1.0  # one outcome, and it is the one that came
    expected = expected[kept] * (observed.sum() / expected.sum())  # scipy wants the sums equal to more than rounding
    return float(chisquare(observed[kept].numpy(), expected.numpy()).pvalue)


SETTINGS = {
    "neutral": ([], DraftSampling()),
    "temperature": ([TemperatureLogitsWarper(0.7)], DraftSampling(temperature=0.7)),
    "hot": ([TemperatureLogitsWarper(1.8)], DraftSampling(temperature=1.8)),
    "top_k": ([TopKLogitsWarper(3)], DraftSampling(top_k=3)),
    "top_p": ([TopPLogitsWarper(0.7)], DraftSampling(top_p=0.7)),
    "all three": (
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(4), TopPLogitsWarper(0.8)],
        DraftSampling(temperature=0.8, top_k=4, top_p=0.8),
    ),
    "a bias that the drafter does not know": ([SequenceBiasLogitsProcessor({(1,): 3.0, (4,): -2.0})], DraftSampling()),
    "a penalty by prefix": ([RepetitionPenaltyLogitsProcessor(3.0)], DraftSampling()),
    "a filter that the drafter does not know": ([TopKLogitsWarper(2)], DraftSampling()),
    "a filter that the target does not know": ([], DraftSampling(temperature=0.5, top_k=2)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drawn_proposals_leave_the_joint_law_of_the_target(name):
    target, drafter = random_tables()
    processors = LogitsProcessorList(SETTINGS[name][0])
    tokens, kept = decode_many(target, drafter, 1200, sampling=SETTINGS[name][1], processors=processors)
    assert p_value(tokens, exact_law(target, 2, processors)) > 1e-4
    assert 0.05 < kept < 0.95  # both branches were taken


@pytest.mark.slow
def test_twenty_thousand_draws_with_temperature_and_top_k_match_plain_sampling():
    target, drafter = random_tables(seed=1)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)])
    sampling = DraftSampling(temperature=0.7, top_k=3)
    tokens, _ = decode_many(target, drafter, 20_000, sampling=sampling, processors=processors)
    assert p_value(tokens, exact_law(target, 2, processors)) > 1e-4


def test_three_tokens_over_two_blocks_keep_the_joint_law():
    target, drafter = random_tables(seed=2)
    tokens, _ = decode_many(target, drafter, 1200, num_tokens=3, sampling=DraftSampling())
    assert p_value(tokens, exact_law(target, 3)) > 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_the_law_holds_for_every_seed_so_draws_are_independent(seed):
    """A draft draw, acceptance uniform or residual draw that shared its random number would show for every seed."""
    target, drafter = random_tables(seed=3)
    tokens, _ = decode_many(target, drafter, 1000, sampling=DraftSampling(), seed=1000 + seed)
    assert p_value(tokens, exact_law(target, 2)) > 1e-4


def test_argmax_proposals_leave_the_law_of_the_target_when_sampling():
    target, drafter = random_tables(seed=0)
    tokens, kept = decode_many(target, drafter, 1200, sampling=None)
    assert p_value(tokens, exact_law(target, 2)) > 1e-4
    assert 0.05 < kept < 0.95


def test_a_drafter_without_mass_on_the_likely_tokens_leaves_the_law():
    target, _ = random_tables(seed=5)
    drafter = torch.full((VOCAB, 2, VOCAB), -1e4)
    unlikely = target.topk(2, largest=False).indices  # by last token; the second position gets the anchor's, as good
    drafter.scatter_(-1, unlikely[:, None].expand(-1, 2, -1), 0.0)
    tokens, kept = decode_many(target, drafter, 1200, sampling=DraftSampling())
    assert p_value(tokens, exact_law(target, 2)) > 1e-4
    assert kept < 0.5


def test_a_drafter_equal_to_the_target_is_always_accepted():
    target, _ = random_tables(seed=6)
    tokens, kept = decode_many(target, target[:, None].expand(-1, 1, -1), 1200, sampling=DraftSampling())
    assert p_value(tokens, exact_law(target, 2)) > 1e-4
    assert kept == 1.0


def test_skewed_bfloat16_drafter_logits_are_drawn_and_judged_by_one_float32_distribution():
    """Drawing in bfloat16 and judging in float32 is biased just where logits are skewed."""
    logits = torch.tensor([9.0, 8.97, 3.1, 0.0, -4.0, 8.5]).bfloat16().expand(50_000, 1, VOCAB)
    torch.manual_seed(0)
    draft = propose(logits, DraftSampling(temperature=0.9))
    candidate_ids, q = draft.q
    assert q.dtype == torch.float32
    torch.testing.assert_close(q[0, 0], (logits[0, 0].float() / 0.9).softmax(-1))
    assert p_value(draft.token_ids, q[0, 0].double()[candidate_ids[0, 0].argsort()]) > 1e-4

    target = torch.tensor([8.0, 9.0, 3.0, 1.0, 0.0, 8.0]).expand(VOCAB, VOCAB)
    tokens, _ = decode_many(target, logits[:1].expand(VOCAB, 2, VOCAB), 1200, sampling=DraftSampling(temperature=0.9))
    assert p_value(tokens, exact_law(target, 2)) > 1e-4


# --- the tests above can fail ---


def _pick_from_p(p, drafted, candidate_ids, q):
    q_drafted = q[candidate_ids == drafted].sum()
    return drafted if torch.rand(()) * q_drafted < p[drafted] else int(torch.multinomial(p, 1))


def _residual_not_clamped(p, drafted, candidate_ids, q):
    q_drafted = q[candidate_ids == drafted].sum()
    if torch.rand(()) * q_drafted < p[drafted]:
        return drafted
    return int(torch.multinomial(p.index_add(0, candidate_ids, q, alpha=-1.0).abs(), 1))


def _keep_by_p_alone(p, drafted, candidate_ids, q):
    if torch.rand(()) < p[drafted]:
        return drafted
    return int(torch.multinomial(p.index_add(0, candidate_ids, q, alpha=-1.0).clamp_min(0.0), 1))


def _keep_always(p, drafted, candidate_ids, q):
    return drafted


@pytest.mark.parametrize("wrong", [_pick_from_p, _residual_not_clamped, _keep_by_p_alone, _keep_always])
def test_the_chi_square_finds_a_wrong_acceptance_rule(monkeypatch, wrong):
    target, drafter = random_tables()
    monkeypatch.setattr(verification, "_rejection_pick", wrong)
    tokens, _ = decode_many(target, drafter, 1000, sampling=DraftSampling())
    assert p_value(tokens, exact_law(target, 2)) < 1e-8


def _uniform(draft):
    return replace(draft, token_ids=torch.randint_like(draft.token_ids, VOCAB))


def _q_of_another_temperature(draft):
    q = draft.q[1].pow(0.5)
    return replace(draft, q=(draft.q[0], q / q.sum(-1, keepdim=True)))


@pytest.mark.parametrize("redraw", [_uniform, _q_of_another_temperature])
def test_the_chi_square_finds_proposals_from_another_distribution_than_q(redraw):
    target, drafter = random_tables()
    tokens, _ = decode_many(target, drafter, 1000, sampling=DraftSampling(), redraw=redraw)
    assert p_value(tokens, exact_law(target, 2)) < 1e-8


# --- edges of the acceptance rule ---


def test_equal_p_and_q_never_draw_from_an_empty_residual():
    p = torch.tensor([0.1, 0.2, 0.7])
    torch.manual_seed(0)
    assert [verification._rejection_pick(p, d, torch.arange(3), p.clone()) for d in (0, 1, 2) * 30] == [0, 1, 2] * 30


def test_a_residual_of_rounding_zeros_falls_back_to_p(monkeypatch):
    """p a rounding error below q everywhere and a uniform at the very top: rejected, and nothing is left over."""
    p = torch.tensor([0.25, 0.75])
    q = p * (1 + 1e-6)
    monkeypatch.setattr(verification.torch, "rand", lambda *a, **k: torch.tensor(1.0))
    torch.manual_seed(0)
    picks = [verification._rejection_pick(p, 0, torch.arange(2), q) for _ in range(400)]
    assert 0.6 < sum(picks) / 400 < 0.9


def test_a_token_that_the_target_forbids_is_never_kept():
    p = torch.tensor([0.0, 1.0, 0.0])
    q = torch.tensor([1.0, 0.0, 0.0])
    torch.manual_seed(0)
    assert {verification._rejection_pick(p, 0, torch.arange(3), q) for _ in range(200)} == {1}


def test_a_draft_in_a_smaller_vocabulary_leaves_the_rest_to_the_residual():
    p = torch.tensor([0.2, 0.3, 0.5])
    candidate_ids, q = torch.tensor([1, 0]), torch.tensor([0.6, 0.4])
    torch.manual_seed(0)
    counts = torch.zeros(3, dtype=torch.long)
    for _ in range(1000):
        drafted = int(candidate_ids[torch.multinomial(q, 1)])
        counts[verification._rejection_pick(p, drafted, candidate_ids, q)] += 1
    assert chisquare(counts.numpy(), (p * 1000).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [1e-6, 1e-4])
def test_tiny_temperatures_pick_the_argmax_without_nan(temperature):
    target, drafter = random_tables(seed=7)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    draft = propose(drafter, DraftSampling(temperature))
    assert draft.q[1].isfinite().all() and draft.confidence.isfinite().all()
    torch.testing.assert_close(draft.token_ids, drafter.argmax(-1))
    tokens, _ = decode_many(target, drafter, 100, sampling=DraftSampling(temperature), processors=processors)
    first = int(target[ANCHOR].argmax())
    assert set(map(tuple, tokens.tolist())) == {(first, int(target[first].argmax()))}


# --- the whole way: draft_sampling=True through generate ---


@pytest.fixture(scope="module")
def toy_pair():
    small = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 16, "head_dim": 4, "initializer_range": 0.3}
    target = make_target("llama", **small)
    return target, make_drafter(
        target, num_hidden_layers=1, head_dim=4, target_layer_ids=[0], initializer_range=0.5, block_size=3
    )


def test_draft_sampling_through_generate_gives_the_joint_law_of_plain_sampling(toy_pair):
    target, drafter = toy_pair
    prompt = torch.tensor([[1, 3]])
    pilot = BlockPilot(drafter, policy=False, draft_sampling=True)
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 3, "top_p": 1.0, "max_new_tokens": 3}
    output = pilot_generate(
        pilot, target, prompt, num_return_sequences=250, return_dict_in_generate=True, block_size=3, **settings
    )
    steps = output.blockpilot.steps
    assert 0 < sum(step.num_accepted for step in steps) < sum(step.verify_width - 1 for step in steps)
    tokens = output.sequences[:, 2:]
    law = torch.zeros(VOCAB**3, dtype=torch.float64)
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(3)])
    prefixes = torch.tensor(list(itertools.product(range(VOCAB), repeat=3)))
    with torch.no_grad():
        logits = target(torch.cat([prompt.expand(len(prefixes), -1), prefixes], dim=-1)).logits
    for cell, prefix in enumerate(prefixes.tolist()):
        scores = processors(prompt, logits[cell, 1:4].double())
        law[cell] = scores.softmax(-1)[range(3), prefix].prod()
    assert p_value(tokens, law) > 1e-4


@pytest.mark.parametrize("draft_sampling", [False, True])
@pytest.mark.parametrize("temperature", [1e-6, 1e-4])
def test_tiny_temperatures_give_plain_generates_text(target, drafter, temperature, draft_sampling):
    prompt = make_prompt()
    settings = {"do_sample": True, "temperature": temperature, "max_new_tokens": 12}
    pilot = BlockPilot(drafter, policy=False, draft_sampling=draft_sampling)
    plain = plain_generate(target, prompt, **settings)
    assert plain.equal(plain_generate(target, prompt, do_sample=False, max_new_tokens=12))
    assert pilot_generate(pilot, target, prompt, **settings).equal(plain)


@pytest.mark.parametrize("draft_sampling", [False, True])
def test_temperature_zero_is_refused_as_by_plain_generate(target, drafter, draft_sampling):
    settings = {"do_sample": True, "temperature": 0.0, "max_new_tokens": 4}
    with pytest.raises(ValueError) as plain:
        plain_generate(target, make_prompt(), **settings)
    with pytest.raises(ValueError) as ours:
        pilot_generate(BlockPilot(drafter, draft_sampling=draft_sampling), target, make_prompt(), **settings)
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5])
def test_drawn_drafts_longer_than_the_budget_or_past_eos_are_cut(toy_pair, max_new_tokens):
    target, drafter = toy_pair
    pilot = BlockPilot(drafter, policy=False, draft_sampling=True)
    eos = 4
    for seed in range(8):
        new = pilot_generate(
            pilot,
            target,
            torch.tensor([[1, 3]]),
            seed=seed,
            do_sample=True,
            top_k=0,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            block_size=5,
        )[0, 2:].tolist()
        assert eos not in new[:-1]
        assert len(new) == max_new_tokens or new[-1] == eos


# --- emission order ---


class RecordingProcessor(LogitsProcessor):
    def __init__(self, events, name="processor"):
        self.events, self.name = events, name

    def __call__(self, input_ids, scores):
        self.events.append((self.name, input_ids[0].tolist()))
        assert scores.dtype == torch.float32 and scores.shape[0] == 1
        return scores


class RecordingCriterion(StoppingCriteria):
    def __init__(self, events, stop_at=None):
        self.events, self.stop_at, self.num_scores = events, stop_at, []

    def __call__(self, input_ids, scores, **kwargs):
        self.events.append(("criterion", input_ids[0].tolist()))
        self.num_scores.append(None if scores is None else len(scores))
        return torch.tensor([self.stop_at is not None and input_ids[0, -1].item() == self.stop_at])


def logits_for(tokens, *, dtype=torch.float32):
    """Target logits `(1, len(tokens), VOCAB)` whose argmax at each position is the given token."""
    logits = 0.01 * torch.arange(VOCAB).float().repeat(1, len(tokens), 1)
    logits[0, range(len(tokens)), tokens] = 5.0
    return logits.to(dtype)


def argmax_draft(*tokens):
    return DraftBlock(torch.tensor([tokens]), None, torch.ones(1, len(tokens)))


def recorded(draft, logits, *, stop_at=None, with_processor=True, **kwargs):
    events = []
    criterion = RecordingCriterion(events, stop_at)
    verified = verify_block(
        draft,
        logits,
        torch.tensor([[9, 8]]) % VOCAB,
        logits_processor=LogitsProcessorList([RecordingProcessor(events)] if with_processor else []),
        stopping_criteria=StoppingCriteriaList([criterion]),
        **kwargs,
    )
    return verified, events, criterion


START = [3, 2]


def test_each_position_is_processed_on_its_own_prefix_and_then_judged_before_the_next():
    verified, events, _ = recorded(argmax_draft(1, 4), logits_for([1, 4, 5]))
    assert events == [
        ("processor", START),
        ("criterion", [*START, 1]),
        ("processor", [*START, 1]),
        ("criterion", [*START, 1, 4]),
        ("processor", [*START, 1, 4]),
        ("criterion", [*START, 1, 4, 5]),
    ]
    assert verified.token_ids.tolist() == [[1, 4, 5]] and not verified.stopped


def test_nothing_is_asked_after_the_first_mismatch_and_the_targets_own_token_is_the_last():
    verified, events, _ = recorded(argmax_draft(1, 0, 5), logits_for([1, 4, 5, 2]))
    assert verified.token_ids.tolist() == [[1, 4]]
    assert events[-1] == ("criterion", [*START, 1, 4]) and len(events) == 4


@pytest.mark.parametrize("with_processor", [True, False])
@pytest.mark.parametrize(("stop_at", "committed"), [(1, [1]), (4, [1, 4]), (5, [1, 4, 5]), (None, [1, 4, 5])])
def test_nothing_is_committed_after_a_criterion_fires(stop_at, committed, with_processor):
    verified, events, _ = recorded(
        argmax_draft(1, 4), logits_for([1, 4, 5]), stop_at=stop_at, with_processor=with_processor
    )
    assert verified.token_ids.tolist() == [committed]
    assert verified.stopped is (stop_at is not None)
    assert [ids for name, ids in events if name == "criterion"][-1] == START + committed


def test_a_processor_that_sees_the_prefix_decides_position_by_position():
    """No token twice: the processor bans what its own prefix holds, the drafted tokens before the position included."""

    class NoRepeat(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(-1, input_ids[0], -torch.inf)

    logits = logits_for([1, 1, 1])
    verified = verify_block(
        argmax_draft(1, 5),
        logits,
        torch.tensor([START]),
        logits_processor=LogitsProcessorList([NoRepeat()]),
        stopping_criteria=NO_CRITERIA,
    )
    assert verified.token_ids.tolist() == [[1, 5, 4]]  # the rising remainder of the logits, without 1, 3, 2, then 5


def test_the_buffer_of_later_drafted_tokens_is_hidden_from_processors_and_criteria():
    _, events, _ = recorded(argmax_draft(1, 4, 0), logits_for([1, 4, 0, 3]))
    lengths = [len(ids) for _, ids in events]
    assert lengths == [2, 3, 3, 4, 4, 5, 5, 6]


@pytest.mark.parametrize("seed", range(6))
def test_the_quick_greedy_path_commits_what_the_walked_path_commits(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 5, VOCAB, generator=generator).bfloat16()
    right = logits[0].argmax(-1).tolist()
    drafted = right[: seed % 5] + [(token + 1) % VOCAB for token in right[seed % 5 : 4]]
    quick, quick_events, _ = recorded(argmax_draft(*drafted), logits, with_processor=False)
    walked, walked_events, _ = recorded(argmax_draft(*drafted), logits)
    assert quick.token_ids.equal(walked.token_ids)
    assert quick.token_ids.shape[1] == min(seed % 5, 4) + 1
    assert quick_events == [event for event in walked_events if event[0] == "criterion"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_same_token_as_in_plain_greedy(dtype):
    """bfloat16 logits tie often. A wide vocabulary, so that vectorised kernels meet several ties per lane."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (1, 4, 1000), generator=generator).to(dtype)
    plain = [int(logits[:, j].float().argmax(-1)) for j in range(4)]
    for with_processor in (True, False):
        verified, _, _ = recorded(argmax_draft(*plain[:3]), logits, with_processor=with_processor)
        assert verified.token_ids.tolist() == [plain]


def test_scores_and_logits_are_float32_copies_of_the_committed_positions_only():
    logits = logits_for([1, 4, 5], dtype=torch.bfloat16)
    earlier = (torch.zeros(1, VOCAB),)

    class Doubling(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores * 2

    verified = verify_block(
        argmax_draft(1, 0),
        logits,
        torch.tensor([START]),
        logits_processor=LogitsProcessorList([Doubling()]),
        stopping_criteria=NO_CRITERIA,
        past_scores=earlier,
        keep_logits=True,
    )
    assert len(verified.scores) == 3 and verified.scores[0] is earlier[0] and len(verified.logits) == 2
    for j in range(2):
        assert verified.logits[j].dtype == torch.float32
        assert verified.logits[j].equal(logits[:, j].float())
        assert verified.scores[1 + j].equal(logits[:, j].float() * 2)


def test_logits_handed_to_an_in_place_processor_are_copies():
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores.fill_(0.0)
            return scores

    logits = logits_for([1, 4])
    before = logits.clone()
    verify_block(
        argmax_draft(1),
        logits,
        torch.tensor([START]),
        logits_processor=LogitsProcessorList([InPlace()]),
        stopping_criteria=NO_CRITERIA,
    )
    assert logits.equal(before)


def test_criteria_see_the_scores_so_far_when_they_are_recorded():
    _, _, criterion = recorded(argmax_draft(1, 4), logits_for([1, 4, 5]), past_scores=())
    assert criterion.num_scores == [1, 2, 3]
    _, _, criterion = recorded(argmax_draft(1, 4), logits_for([1, 4, 5]))
    assert criterion.num_scores == [None] * 3


@pytest.mark.parametrize("width", [1, 2, 3])
def test_only_the_first_width_minus_one_drafted_tokens_are_looked_at(width):
    verified, _, _ = recorded(argmax_draft(1, 4, 5), logits_for([1, 4, 5])[:, :width])
    assert verified.token_ids.tolist() == [[1, 4, 5][:width]]


def test_without_a_draft_one_token_is_committed():
    for do_sample in (False, True):
        verified, events, _ = recorded(None, logits_for([4]), do_sample=do_sample)
        assert verified.token_ids.shape == (1, 1) and len(events) == 2


def test_sampled_picks_use_the_random_numbers_of_one_draw_per_token():
    """The random state after a block is that of as many plain draws, whatever was drafted, so the text goes on."""
    logits = 0.3 * torch.randn(1, 4, VOCAB, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    plain = [int(torch.multinomial(logits[:, j].softmax(-1), 1)) for j in range(4)]
    for num_right in range(4):
        drafted = plain[:num_right] + [(token + 1) % VOCAB for token in plain[num_right:3]]
        torch.manual_seed(5)
        verified, _, _ = recorded(argmax_draft(*drafted), logits, do_sample=True)
        assert verified.token_ids.tolist() == [plain[: num_right + 1]]
        state = torch.get_rng_state()
        torch.manual_seed(5)
        for j in range(num_right + 1):
            torch.multinomial(logits[:, j].softmax(-1), 1)
        assert state.equal(torch.get_rng_state())


# --- propose ---


@pytest.mark.parametrize("sampling", [None, DraftSampling(), DraftSampling(0.5, top_k=3), DraftSampling(top_p=0.6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_proposals_carry_the_probability_of_their_own_tokens(sampling, dtype):
    # Random orders of well-spaced values: transformers' top-k keeps ties, ours exactly k candidates.
    order = torch.rand(3, 4, VOCAB, generator=torch.Generator().manual_seed(0)).argsort(-1)
    logits = (0.9 * order).to(dtype)
    draft = propose(logits, sampling)
    assert draft.token_ids.shape == draft.confidence.shape == (3, 4)
    assert draft.token_ids.dtype == torch.long and draft.confidence.dtype == torch.float32
    assert ((draft.confidence > 0) & (draft.confidence <= 1)).all()
    if sampling is None:
        assert draft.q is None
        assert draft.token_ids.equal(logits.argmax(-1))
        expected = logits.float().softmax(-1).gather(-1, draft.token_ids[..., None])[..., 0]
        torch.testing.assert_close(draft.confidence, expected)
        return
    candidate_ids, q = draft.q
    assert candidate_ids.shape == q.shape and candidate_ids.shape[:2] == (3, 4)
    torch.testing.assert_close(q.sum(-1), torch.ones(3, 4))
    # The law itself, from transformers' own filters on the whole vocabulary.
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    expected = processors(None, logits.float().flatten(0, 1)).softmax(-1).view(3, 4, VOCAB)
    torch.testing.assert_close(torch.zeros(3, 4, VOCAB).scatter_add(-1, candidate_ids, q), expected)
    # Not the drawn token's: what is decided by it must not depend on the draw.
    torch.testing.assert_close(draft.confidence, expected.amax(-1))


@pytest.mark.parametrize("sampling", [None, DraftSampling(), DraftSampling(1e-6), DraftSampling(top_k=2, top_p=0.5)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_broken_drafter_logits_still_give_tokens_and_probabilities(sampling, bad):
    one = torch.zeros(1, 2, VOCAB)
    one[0, 0, 3] = bad
    for logits in (one, torch.full((1, 2, VOCAB), bad)):
        draft = propose(logits, sampling)
        assert ((draft.token_ids >= 0) & (draft.token_ids < VOCAB)).all()
        assert draft.confidence.isfinite().all() and ((draft.confidence >= 0) & (draft.confidence <= 1)).all()
        assert draft.q is None or draft.q[1].isfinite().all()


def test_top_k_beyond_the_vocabulary_filters_nothing():
    logits = torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(0))
    _, q = propose(logits, DraftSampling(top_k=1000)).q
    torch.testing.assert_close(q[0, 0], logits[0, 0].softmax(-1))

"""Replaying a text says what decoding would do on it, step by step."""

import weakref

import pytest
import torch
from conftest import fit_drafter, make_drafter, make_prompt, make_target, plain_generate
from drafter_texts import make_text

import blockpilot_hf.replay as replay_module
from blockpilot_hf import BlockPilot
from blockpilot_hf.parity import ScriptedDrafter
from blockpilot_hf.replay import Replay, acceptance_by_group, check_replayable, replay, walk
from blockpilot_hf.target_states import target_states
from blockpilot_hf.texts import Text

SIZES = (2, 3, 4, 6, 8)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
PAIRS = {
    "qwen3": ("qwen3", {}),
    "llama, sliding drafter": ("llama", SLIDING),
    "qwen3, causal": ("qwen3", {"is_causal": True}),
    "qwen3, sliding both ways": ("qwen3", {**SLIDING, "is_causal": False}),
    "mistral, all slides": ("mistral", {**SLIDING, "layer_types": ["sliding_attention"] * 2}),
    "gemma3, scaled and capped": (
        "gemma3",
        {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 5.0},
    ),
}
NUM_NEW = 32


@pytest.fixture(scope="module")
def pairs():
    """Per name a target and a drafter that knows one of its texts a little."""
    made = {}

    def get(name):
        if name not in made:
            kind, fields = PAIRS[name]
            target = make_target(kind)
            drafter = make_drafter(target, **fields)
            fit_drafter(
                target, drafter, plain_generate(target, make_prompt(11), max_new_tokens=NUM_NEW, do_sample=False)
            )
            made[name] = target, drafter
        return made[name]

    return get


def decoded_steps(target, drafter, text, block_size, **settings):
    """Accepted counts of decoding, which must give the answer of `text`."""
    prompt = torch.tensor([text.prompt_ids])
    settings = {"max_new_tokens": len(text.answer_ids), "do_sample": False, "block_size": block_size, **settings}
    output = BlockPilot(drafter).generate(
        target, prompt, attention_mask=torch.ones_like(prompt), return_dict_in_generate=True, **settings
    )
    assert tuple(output.sequences[0, prompt.shape[1] :].tolist()) == text.answer_ids
    return [step.num_accepted for step in output.blockpilot.steps]


def replayed(target, drafter, text, sizes=SIZES):
    return replay(target, drafter, text, target_states(target, drafter.config.target_layer_ids, text).context, sizes)


def walked(target, drafter, texts, sizes=(1, *SIZES)):
    contexts = (target_states(target, drafter.config.target_layer_ids, text).context for text in texts)
    return walk(target, drafter, texts, contexts, sizes)


@pytest.mark.parametrize("name", PAIRS)
def test_replayed_steps_are_those_of_decoding(pairs, name):
    target, drafter = pairs(name)
    seen = []
    for seed, length in ((0, 11), (1, 7)):
        text = make_text(target, seed=seed, length=length, num_new=NUM_NEW)
        walk = replayed(target, drafter, text)
        for size in SIZES:
            steps = walk.steps(size)
            assert steps == decoded_steps(target, drafter, text, size)
            assert sum(steps) + len(steps) == NUM_NEW - 1
            seen += steps
    # Neither a drafter that is never right nor one that always is would tell much.
    assert seen.count(0) >= 10 and max(seen) >= 3


def test_an_end_of_text_inside_a_block_ends_the_replay_where_decoding_ends(pairs):
    target, drafter = pairs("qwen3")
    whole = make_text(target, length=11, num_new=NUM_NEW)
    longer = replayed(target, drafter, whole)
    inside = 0
    for eos in list(dict.fromkeys(whole.answer_ids[1:]))[:6]:
        text = make_text(target, length=11, num_new=NUM_NEW, eos_token_id=eos)
        walk = replayed(target, drafter, text)
        for size in SIZES:
            assert walk.steps(size) == decoded_steps(target, drafter, text, size, eos_token_id=eos)
            # The drafter would have gone on.
            inside += walk.steps(size) != longer.steps(size)[: len(walk.steps(size))]
    assert inside


@pytest.mark.parametrize("num_new", [2, 3, 5, 9, 17])
def test_the_end_of_the_budget_cuts_the_last_step(pairs, num_new):
    target, drafter = pairs("qwen3")
    text = make_text(target, length=11, num_new=num_new)
    walk = replayed(target, drafter, text)
    for size in SIZES:
        assert walk.steps(size) == decoded_steps(target, drafter, text, size)


def test_past_its_position_limit_a_drafter_accepts_nothing(pairs):
    target, fitted = pairs("qwen3")
    drafter = make_drafter(target, max_position_embeddings=30)
    drafter.load_state_dict(fitted.state_dict())
    text = make_text(target, length=11, num_new=NUM_NEW)
    walk, free = replayed(target, drafter, text), replayed(target, fitted, text)
    for size in SIZES:
        assert walk.steps(size) == decoded_steps(target, drafter, text, size)
    assert any(walk.steps(size) != free.steps(size) for size in SIZES)


def test_more_anchors_than_fit_into_one_pass_give_the_same(pairs, monkeypatch):
    target, drafter = pairs("qwen3")
    text = make_text(target, length=11, num_new=NUM_NEW)
    whole = replayed(target, drafter, text)
    for at_once in (1, 7, NUM_NEW - 1):
        monkeypatch.setattr("blockpilot_hf.replay._ANCHORS_AT_ONCE", at_once)
        assert replayed(target, drafter, text) == whole


def test_size_one_is_plain_decoding_and_needs_no_drafter(pairs):
    target, drafter = pairs("qwen3")
    text = make_text(target, length=11, num_new=9)
    walk = replay(target, drafter, text, torch.empty(0, 0), [1])
    assert walk.steps(1) == [0] * 8 == decoded_steps(target, drafter, text, 1)
    assert walk.acceptance_length(1) == 1.0 and walk.num_accepted == {}
    with pytest.raises(ValueError, match=r"Block size 4 was not replayed, only \[1\]"):
        walk.steps(4)


def test_an_answer_of_one_token_has_no_steps(pairs):
    target, drafter = pairs("qwen3")
    text = make_text(target, length=11, num_new=1)
    walk = replayed(target, drafter, text)
    for size in (1, *SIZES):
        assert walk.steps(size) == [] == decoded_steps(target, drafter, text, size)
        assert walk.acceptance_length(size) == 0.0


def test_bfloat16_is_replayed_in_the_dtypes_of_decoding():
    """The target's passes differ with their width, so the steps may; what a drafter sees and says has its dtypes."""
    target = make_target().to(torch.bfloat16)
    drafter = make_drafter(target).to(torch.bfloat16)
    text = make_text(target, num_new=12)
    walk = replayed(target, drafter, text)
    assert all(len(counts) == 11 for counts in walk.num_accepted.values())
    in_float32 = replayed(target, make_drafter(target), text)  # a drafter in another dtype than the target
    assert in_float32.num_accepted.keys() == walk.num_accepted.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_walking_texts_of_different_lengths_together_takes_the_steps_of_decoding(pairs, name):
    target, drafter = pairs(name)
    # The first is the text that the drafter knows: its walkers are done long before those of the others.
    texts = [make_text(target, seed=s, length=n, num_new=m) for s, n, m in ((0, 10, 24), (0, 11, 32), (1, 7, 9))]
    steps = walked(target, drafter, texts, [8, 1, 12, 4, 2])
    for text, found in zip(texts, steps, strict=True):
        assert list(found) == [1, 2, 4, 8, 12]
        for size, counts in found.items():
            assert list(counts) == decoded_steps(target, drafter, text, size)


def test_walking_sampled_texts_takes_the_steps_of_sampling(pairs):
    target, drafter = pairs("qwen3")
    prompt = torch.tensor([make_text(target, length=11, num_new=1).prompt_ids])
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 1.0}
    for seed in range(2):
        answer = plain_generate(target, prompt, seed=seed, max_new_tokens=NUM_NEW, **sampling)[0, 11:]
        text = Text("", "all", tuple(prompt[0].tolist()), tuple(answer.tolist()))
        for size, counts in walked(target, drafter, [text])[0].items():
            torch.manual_seed(seed)
            assert list(counts) == decoded_steps(target, drafter, text, size, **sampling)


def test_walking_stops_where_text_budget_and_drafter_end(pairs):
    target, fitted = pairs("qwen3")
    drafter = make_drafter(target, max_position_embeddings=30)
    drafter.load_state_dict(fitted.state_dict())
    whole = make_text(target, length=11, num_new=NUM_NEW)
    eos = whole.answer_ids[9]
    ended = make_text(target, length=11, num_new=NUM_NEW, eos_token_id=eos)
    texts = [whole, ended, *(make_text(target, length=11, num_new=n) for n in (1, 2, 3))]
    for kind in (fitted, drafter):
        for text, found in zip(texts, walked(target, kind, texts), strict=True):
            settings = {"eos_token_id": eos} if text is ended else {}
            for size, counts in found.items():
                assert list(counts) == decoded_steps(target, kind, text, size, **settings)
    assert walked(target, drafter, [whole]) != walked(target, fitted, [whole])


def test_walking_and_all_positions_tell_the_same(pairs):
    target, drafter = pairs("llama, sliding drafter")
    texts = [make_text(target, seed=seed, length=5 + seed, num_new=20 + seed) for seed in range(5)]
    for text, found in zip(texts, walked(target, drafter, texts), strict=True):
        everywhere = replayed(target, drafter, text)
        assert {size: tuple(everywhere.steps(size)) for size in (1, *SIZES)} == found


def test_batches_of_any_size_walk_alike(pairs, monkeypatch):
    target, drafter = pairs("qwen3")
    texts = [make_text(target, seed=seed, length=5 + seed, num_new=20) for seed in range(5)]
    together = walked(target, drafter, texts)
    alone = [walked(target, drafter, [text])[0] for text in texts]
    assert together == alone
    rows = []
    draft = replay_module.draft_blocks
    monkeypatch.setattr(
        replay_module, "draft_blocks", lambda *args: rows.append(args[2].index.shape[0]) or draft(*args)
    )
    for name, limit, most in (("_POSITIONS_AT_ONCE", 48, 2), ("_CONTEXT_AT_ONCE", 70, 2), ("_CONTEXT_AT_ONCE", 1, 1)):
        rows.clear()
        with monkeypatch.context() as patch:
            patch.setattr(replay_module, name, limit)
            assert walked(target, drafter, texts) == together
        assert max(rows) == most


def test_walking_holds_the_states_of_one_text_at_a_time(pairs):
    target, drafter = pairs("qwen3")
    texts = [make_text(target, seed=seed, num_new=8) for seed in range(3)]
    alive = []

    def contexts():
        for text in texts:
            context = target_states(target, drafter.config.target_layer_ids, text).context
            alive.append(weakref.ref(context))
            assert sum(ref() is not None for ref in alive) <= 2  # this one, and the last one that is being let go
            yield context
            del context

    assert walk(target, drafter, texts, contexts(), SIZES) == walked(target, drafter, texts, SIZES)


def test_a_drafter_that_drafts_in_a_way_of_its_own_is_refused(pairs):
    target, drafter = pairs("qwen3")
    with pytest.raises(ValueError, match=r"Replay needs a DFlash drafter.*got a ScriptedDrafter. Name one that was"):
        check_replayable(ScriptedDrafter(target))
    check_replayable(drafter)


def test_steps_walk_from_anchor_to_anchor():
    walk = Replay(Text("", "", (1,), tuple(range(10))), {4: [2, 9, 9, 0, 3, 9, 9, 9, 3]})
    # 0 accepts two and goes to 3, which accepts none, 4 accepts three and goes to 8, where the budget ends.
    assert walk.steps(4) == [2, 0, 3, 0]
    assert walk.acceptance_length(4) == 9 / 4


def test_groups_average_over_texts_and_tell_how_many_prompts_they_are_of():
    def walk(category, counts, prompt=1):
        return Replay(Text("", category, (prompt,), tuple(range(len(counts) + 1))), {4: counts})

    walks = [walk("b", [0] * 6), walk("a", [3, 0, 0, 0], prompt=2), walk("b", [1, 0, 1, 0])]
    assert acceptance_by_group(walks, 4) == {
        "a": {"acceptance_length": 4.0, "num_prompts": 1, "num_texts": 1},
        "all": {"acceptance_length": (1 + 4 + 2) / 3, "num_prompts": 2, "num_texts": 3},
        "b": {"acceptance_length": 1.5, "num_prompts": 1, "num_texts": 2},
    }
    assert acceptance_by_group([], 4) == {}
    # Texts without a category used to be counted twice.
    assert acceptance_by_group([walk("all", [0, 0])], 4) == {
        "all": {"acceptance_length": 1.0, "num_prompts": 1, "num_texts": 1}
    }

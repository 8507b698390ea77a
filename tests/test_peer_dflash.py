"""Step by step against `dflash_generate` of the package `dflash`, the authors' own code, on identical weights."""

import pytest
import torch
from conftest import fit_drafter, make_drafter, make_prompt, make_target, plain_generate, save_zlab
from dflash import model as peer

from blockpilot_hf import BlockPilot
from blockpilot_hf.embedded import load_embedded_target, untrained_drafter
from blockpilot_hf.loading import load_drafter

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
PAIRS = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "qwen3, sliding drafter": ("qwen3", SLIDING),
    "llama, sliding drafter": ("llama", {**SLIDING, "layer_types": ["sliding_attention"] * 2}),
    "qwen3, sliding both ways": ("qwen3", {**SLIDING, "is_causal": False}),
    "qwen3, scaled and capped": (
        "qwen3",
        {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 5.0},
    ),
    "llama, five taps and bias": ("llama", {"target_layer_ids": [0, 1, 2, 3, 1], "attention_bias": True}),
}
NUM_NEW = 40


@pytest.fixture(scope="module", autouse=True)
def _peers_clock_without_a_gpu():
    """The peer synchronises a GPU whenever it counts, also where there is none."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "synchronize", lambda *args: None)
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Per pair: target, prompt, our drafter and the peer's, both loaded from one published-style folder."""
    made = {}

    def get(name):
        if name not in made:
            kind, fields = PAIRS[name]
            target = make_target(kind)
            drafter, prompt = make_drafter(target, **fields), make_prompt(11)
            fit_drafter(target, drafter, plain_generate(target, prompt, max_new_tokens=NUM_NEW, do_sample=False))
            scales = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
            section = {key: fields[key] for key in scales if key in fields}
            section |= {"mask_token_id": 63, "target_layer_ids": drafter.config.target_layer_ids}
            folder = save_zlab(drafter, tmp_path_factory.mktemp("pair"), dflash_config=section)
            theirs = peer.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
            made[name] = target, prompt, load_drafter(str(folder)), theirs
        return made[name]

    return get


def both(target, ours, theirs, prompt, *, block_size, num_new, eos=None):
    """Our output and the peer's, greedy."""
    config = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": eos, "return_dict_in_generate": True}
    config["attention_mask"] = torch.ones_like(prompt)  # else `generate` may take ids of the prompt for padding
    output = BlockPilot(ours).generate(target, prompt, block_size=block_size, **config)
    expected = peer.dflash_generate(theirs, target, prompt, num_new, eos, block_size=block_size, return_stats=True)
    return output, expected


def assert_equal_steps(output, expected, *, block_size, num_new):
    """
    The text wholly; the steps as long as both loops draft whole blocks. At the end of the budget the peer narrows the
    draft itself, which changes all its tokens, where we narrow only what is verified.
    """
    assert torch.equal(output.sequences, expected.output_ids)
    ours = [step.num_accepted + 1 for step in output.blockpilot.steps]
    done, comparable = 1, 0  # the prefill has emitted one token
    for count in expected.acceptance_lengths:
        if num_new - done + 1 < block_size:
            break
        done, comparable = done + count, comparable + 1
    assert ours[:comparable] == expected.acceptance_lengths[:comparable]
    return ours[:comparable]


@pytest.mark.parametrize("name", PAIRS)
def test_text_and_accepted_lengths_equal_the_authors_code(pairs, name):
    target, prompt, ours, theirs = pairs(name)
    plain = plain_generate(target, prompt, max_new_tokens=NUM_NEW, do_sample=False)
    compared = []
    for block_size in (2, 5, 8, 11):
        output, expected = both(target, ours, theirs, prompt, block_size=block_size, num_new=NUM_NEW)
        compared += assert_equal_steps(output, expected, block_size=block_size, num_new=NUM_NEW)
        assert torch.equal(output.sequences, plain)
    # Neither a loop that accepts nothing nor one that accepts all would be told apart from a wrong one.
    assert len(compared) >= 15
    assert max(compared) >= 4 and min(compared) == 1


@pytest.mark.parametrize("name", ["qwen3", "qwen3, sliding drafter"])
def test_a_prompt_that_the_drafter_does_not_know_equals_the_authors_code(pairs, name):
    target, _, ours, theirs = pairs(name)
    for seed in (3, 4):
        prompt = make_prompt(17, seed=seed)
        output, expected = both(target, ours, theirs, prompt, block_size=8, num_new=24)
        assert len(assert_equal_steps(output, expected, block_size=8, num_new=24)) >= 3


def test_an_end_inside_an_accepted_run_equals_the_authors_code(pairs):
    target, prompt, ours, theirs = pairs("qwen3")
    new = plain_generate(target, prompt, max_new_tokens=NUM_NEW, do_sample=False)[0, prompt.shape[1] :].tolist()
    inside = 0
    for eos in dict.fromkeys(new):
        output, expected = both(target, ours, theirs, prompt, block_size=8, num_new=NUM_NEW, eos=[eos])
        assert torch.equal(output.sequences, expected.output_ids)
        assert int(output.sequences[0, -1]) == eos
        steps = [step.num_accepted + 1 for step in output.blockpilot.steps]
        assert sum(steps) == sum(expected.acceptance_lengths)
        inside += any(
            s.draft_ids[s.num_accepted : s.num_accepted + 1] == s.committed_ids[-1:] for s in output.blockpilot.steps
        )
    assert inside


def test_every_draft_equals_the_authors_draft(pairs):
    """Not only the accepted part of it: the whole block, at every step."""
    target, prompt, ours, theirs = pairs("qwen3, sliding drafter")
    drafts = []
    compute = theirs.compute_logits

    def record(hidden, head):
        logits = compute(hidden, head)
        drafts.append(tuple(logits.argmax(-1)[0].tolist()))
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "compute_logits", record, raising=True)
        output, _ = both(target, ours, theirs, prompt, block_size=7, num_new=NUM_NEW)
    whole = [draft for draft in drafts if len(draft) == 6]
    assert len(whole) >= 4
    assert [step.draft_ids for step in output.blockpilot.steps][: len(whole)] == whole


def test_the_embedded_target_with_an_untrained_drafter_equals_the_authors_code(tmp_path):
    """The embedded target's weights are dequantised Q4_1 ones; the drafter is noise, so hardly anything is accepted."""
    target, tokenizer = load_embedded_target(dtype=torch.float32)
    folder = save_zlab(untrained_drafter(target, block_size=8), tmp_path)
    ours, theirs = load_drafter(str(folder)), peer.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = prompt["input_ids"]
    output, expected = both(target, ours, theirs, prompt, block_size=8, num_new=24)
    assert len(assert_equal_steps(output, expected, block_size=8, num_new=24)) >= 5

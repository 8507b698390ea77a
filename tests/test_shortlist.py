"""A drafter with a shortlist drafts some tokens only, which changes its speed and never the output."""

import copy

import pytest
import torch
from conftest import make_prompt, pilot_generate, plain_generate

from blockpilot_hf import BlockPilot, DFlashConfig, DFlashDraftModel


@pytest.fixture
def shortlisted(target, drafter):
    short = copy.deepcopy(drafter)
    short.set_shortlist(torch.tensor([3, 7, 20, 41]))
    return short


def test_a_shortlist_gives_the_heads_own_logits_and_nothing_else(target, drafter, shortlisted):
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    head = target.get_output_embeddings()
    full, short = drafter.draft_logits(states, head), shortlisted.draft_logits(states, head)
    ids = shortlisted.shortlist_ids
    assert short.shape == full.shape
    torch.testing.assert_close(short[:, ids], full[:, ids])
    assert short.isneginf().sum() == 5 * (64 - 4)


def test_a_shortlist_follows_the_head_that_it_is_given(target, shortlisted):
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    head = copy.deepcopy(target.get_output_embeddings())
    ids, other = shortlisted.shortlist_ids, torch.nn.Parameter(torch.randn(64, 32))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(shortlisted.draft_logits(states, head)[:, ids], head(states)[:, ids])
            head.weight.mul_(2)
        head.weight = other
        torch.testing.assert_close(shortlisted.draft_logits(states, head)[:, ids], head(states)[:, ids])


def test_a_shortlist_survives_saving_and_changes_no_output(target, shortlisted, tmp_path):
    shortlisted.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path).eval()
    assert loaded.shortlist_ids.tolist() == [3, 7, 20, 41]
    assert copy.deepcopy(loaded)._shortlist_head is None
    ids = make_prompt()
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 1.0}):
        plain = plain_generate(target, ids, max_new_tokens=12, **sampling)
        output = pilot_generate(
            BlockPilot(loaded, False, lookup=False),
            target,
            ids,
            max_new_tokens=12,
            return_dict_in_generate=True,
            **sampling,
        )
        assert output.sequences.tolist() == plain.tolist()
        assert {i for step in output.blockpilot.steps for i in step.draft_ids} <= {3, 7, 20, 41}


def test_a_shortlist_larger_than_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="`shortlist_size` must be an integer from 1 to"):
        DFlashConfig(vocab_size=64, mask_token_id=63, shortlist_size=65)

"""Examples by decoding and by replay tell the same, and a file of them survives being cut off."""

import json

import pytest
import torch
from conftest import fit_drafter, make_drafter, make_prompt, make_target, plain_generate

from blockpilot_hf import BlockPilot
from blockpilot_hf.features import policy_features
from blockpilot_hf.policy_labels import append_example, decoded_example, read_examples, replayed_example
from blockpilot_hf.policy_training import PolicyExample
from blockpilot_hf.texts import Text

SIZES = [1, 2, 3, 4, 8]


@pytest.fixture(scope="module")
def fitted():
    target = make_target()
    drafter = make_drafter(target)
    prompt = make_prompt(10)
    sequence = plain_generate(target, prompt, max_new_tokens=40, do_sample=False)
    fit_drafter(target, drafter, sequence)
    text = Text("a", "maths", tuple(prompt[0].tolist()), tuple(sequence[0, 10:].tolist()))
    return target, drafter, text


def test_decoding_gives_the_traces_acceptance_lengths_and_the_prefills_features(fitted):
    target, drafter, text = fitted
    example = decoded_example(target, BlockPilot(drafter, False), text, SIZES, max_new_tokens=24)
    prompt = torch.tensor([text.prompt_ids])
    for size in SIZES[1:]:
        output = BlockPilot(drafter, False).generate(
            target, prompt, block_size=size, max_new_tokens=24, do_sample=False, return_dict_in_generate=True
        )
        assert example.acceptance_length[size] == output.blockpilot.acceptance_length
    assert example.acceptance_length[1] == 1.0
    assert max(example.acceptance_length.values()) > 1.5  # the drafter was fitted to this text
    with torch.no_grad():
        expected = policy_features(target(prompt).logits[:, -1], kind="compact")[0].tolist()
    assert example.features == pytest.approx(tuple(expected), abs=1e-5)
    assert (example.id, example.category, example.prompt_hash) == ("a", "maths", text.prompt_hash)


def test_replay_gives_the_same_example(fitted):
    target, drafter, text = fitted
    decoded = decoded_example(target, BlockPilot(drafter, False), text, SIZES, max_new_tokens=24)
    replayed = replayed_example(target, drafter, text, SIZES, max_new_tokens=24)
    assert replayed.acceptance_length == pytest.approx(decoded.acceptance_length)
    assert replayed.features == pytest.approx(decoded.features, abs=1e-5)


def test_examples_survive_their_file_and_a_line_that_was_cut_off(tmp_path):
    path, settings = tmp_path / "deep" / "labels.jsonl", {"max_new_tokens": 8}
    one = PolicyExample("a", "maths", "h1", (0.5, -1.0), {1: 1.0, 4: 2.5})
    two = PolicyExample("b", "code", "h2", (0.25, 3.0), {1: 1.0, 4: 1.5})
    assert read_examples(path, settings) == []
    append_example(path, one, settings)
    with path.open("a") as file:
        file.write('{"settings": {"max_new')
    append_example(path, two, settings)
    assert read_examples(path, settings) == [one, two]
    assert all(line.startswith("{") for line in path.read_text().splitlines())
    with pytest.raises(ValueError, match="other settings"):
        read_examples(path, {"max_new_tokens": 9})
    assert json.loads(path.read_text().splitlines()[0])["id"] == "a"

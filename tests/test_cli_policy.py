"""`blockpilot train-policy` on a tiny saved pair: labels that go on, a policy that decodes, a record of it all."""

import json

import pytest
from cli_models import folders, run  # noqa: F401  (fixtures)
from conftest import make_prompt, plain_generate
from drafter_texts import make_text, write_texts
from transformers import AutoModelForCausalLM

from blockpilot_hf import BlockPilot
from blockpilot_hf.loading import load_drafter, load_policy
from blockpilot_hf.policy_labels import read_examples

SIZES = "1,2,4"


@pytest.fixture
def train(run, folders, tmp_path):  # noqa: F811
    """`train(source, *arguments)` to `(status, stdout, stderr, output folder)`."""

    def train(source, *arguments, drafter=True, sizes=SIZES):
        named = ["--drafter", folders / "drafter"] if drafter else []
        output = tmp_path / "out"
        status, out, err = run(
            "train-policy", source, "--output", output, "--block-sizes", sizes, "--max-new-tokens", 8,
            "--hidden-size", 4, *named, *arguments,
        )  # fmt: skip
        return status, out, err, output

    return train


def prompt_file(path, count, word="text"):
    path.write_text("".join(json.dumps({"id": f"{word}{i}", "prompt": f"{word} {i}"}) + "\n" for i in range(count)))
    return path


def test_prompts_become_a_policy_that_decodes_exactly(train, folders, tmp_path):  # noqa: F811
    source, other = prompt_file(tmp_path / "p.jsonl", 12), prompt_file(tmp_path / "t.jsonl", 3, "other")
    status, out, err, output = train(source, "--test", other)
    assert status == 0, err
    assert "best constant" in out
    assert "best per prompt" in out
    record = json.loads((output / "evaluation.json").read_text())
    assert record["num_prompts"] == {"train": 10, "validation": 2, "test": 3}
    assert set(record["results"]) == {"validation", "test"}
    assert record["results"]["test"]["all"]["constant 1"]["speedup"] == pytest.approx(1.0)
    assert record["costs"]["verify_s"].keys() == {"1", "2", "4"}
    policy = load_policy(output / "policy")
    assert policy.config.block_sizes == [1, 2, 4]
    assert policy.config.target_fingerprint == record["meta_info"]["target"]
    target = AutoModelForCausalLM.from_pretrained(folders / "target")
    pilot = BlockPilot(load_drafter(folders / "drafter"), policy)
    ids = make_prompt(6)
    plain = plain_generate(target, ids, max_new_tokens=8, do_sample=False)
    assert pilot.generate(target, ids, max_new_tokens=8, do_sample=False).tolist() == plain.tolist()


def test_labels_that_are_there_are_not_made_again(train, tmp_path):
    source = prompt_file(tmp_path / "p.jsonl", 12)
    assert train(source)[0] == 0
    labels = tmp_path / "out" / "labels.jsonl"
    lines = labels.read_text().splitlines()
    labels.write_text("\n".join(lines[:7]) + "\n" + lines[7][:40])
    status, _, err, _ = train(source)
    assert status == 0
    assert "7 prompts are there, 5 to go" in err
    assert labels.read_text().splitlines()[:7] == lines[:7]
    assert len({example.prompt_hash for example in read_examples(labels)}) == 12
    status, _, err, _ = train(source, sizes="1,4")
    assert status == 2
    assert "other settings" in err


def test_replay_takes_the_targets_texts_and_gives_the_labels_of_decoding(train, folders, tmp_path):  # noqa: F811
    target = AutoModelForCausalLM.from_pretrained(folders / "target")
    texts = write_texts(tmp_path / "t.jsonl", [make_text(target, seed=i, num_new=8) for i in range(11)])
    assert train(texts, "--labels", "replay")[0] == 0
    replayed = read_examples(tmp_path / "out" / "labels.jsonl")
    (tmp_path / "out").rename(tmp_path / "replayed")
    assert train(texts, "--labels", "decoding")[0] == 0
    decoded = read_examples(tmp_path / "out" / "labels.jsonl")
    assert [e.acceptance_length for e in replayed] == [e.acceptance_length for e in decoded]
    assert [e.prompt_hash for e in replayed] == [e.prompt_hash for e in decoded]


def test_what_cannot_work_is_said_before_anything_is_decoded(train, tmp_path):
    source = prompt_file(tmp_path / "p.jsonl", 12)
    for arguments, message in (
        (["--labels", "guess"], "must be one of decoding, replay"),
        (["--labels", "replay"], "needs the target's answers"),
        (["--test", source], "12 prompts of"),
        (["--objective", "tau"], "`objective` must be one of"),
    ):
        status, _, err, output = train(source, *arguments)
        assert status == 2
        assert message in err
        assert not (output / "labels.jsonl").exists()
    for sizes in ("4", "1,x", "0,2"):
        assert train(source, sizes=sizes)[0] == 2

"""A sweep holds what decoding does at every block size, and is the same however it came about."""

import json
from dataclasses import replace

import datasets
import pytest
import torch
from conftest import fit_drafter, make_drafter, make_prompt, make_target, plain_generate
from drafter_texts import make_text

from blockpilot_hf import BlockPilot, BlockPilotConfig, BlockPilotPolicy
from blockpilot_hf import sweep as sweep_module
from blockpilot_hf.features import policy_features
from blockpilot_hf.parity import ScriptedDrafter
from blockpilot_hf.sweep import Sweep, SweepRow, prefill_and_context, read_sweep, write_sweep
from blockpilot_hf.target_states import target_states, weights_fingerprint
from blockpilot_hf.texts import Text

SIZES = [1, 2, 4, 8]
NUM_NEW = 20
WARM = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}


@pytest.fixture(scope="module")
def pair():
    target = make_target()
    drafter = make_drafter(target)
    # It knows the text `t4`.
    fit_drafter(target, drafter, plain_generate(target, make_prompt(10, seed=4), max_new_tokens=40, do_sample=False))
    return target, drafter


@pytest.fixture(scope="module")
def texts(pair):
    """Ten of two categories, the last of them sampled: two units."""
    target, _ = pair
    made = [make_text(target, seed=i, length=6 + i % 5, num_new=NUM_NEW, category="ab"[i % 2]) for i in range(9)]
    made = [replace(text, id=f"t{i}", prompt_id=f"p{i}") for i, text in enumerate(made)]
    prompt = torch.tensor([made[0].prompt_ids])
    answer = plain_generate(target, prompt, seed=3, max_new_tokens=NUM_NEW, **WARM)[0, prompt.shape[1] :]
    warm = Text("t0-warm", "a", made[0].prompt_ids, tuple(answer.tolist()), prompt_id="p0", temperature=0.7, seed=3)
    return [*made, warm]


@pytest.fixture(scope="module")
def swept(pair, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return folder, write_sweep(*pair, texts, SIZES, folder)


def decoding(pair, text, size, **settings):
    target, drafter = pair
    prompt = torch.tensor([text.prompt_ids])
    torch.manual_seed(text.seed)
    sampling = WARM if text.temperature else {"do_sample": False}
    return BlockPilot(drafter).generate(
        target,
        prompt,
        attention_mask=torch.ones_like(prompt),
        return_dict_in_generate=True,
        block_size=size,
        **{"max_new_tokens": NUM_NEW, **sampling, **settings},
    )


def test_rows_hold_the_steps_of_decoding_at_every_size(pair, texts, swept):
    _, sweep = swept
    by_id = {row.id: row for row in sweep.rows}
    assert set(by_id) == {text.id for text in texts} and sweep.block_sizes == tuple(SIZES)
    for text in (texts[4], texts[7], texts[-1]):
        row = by_id[text.id]
        for size in SIZES:
            trace = decoding(pair, text, size).blockpilot
            assert list(row.num_accepted[size]) == [step.num_accepted for step in trace.steps]
            assert row.num_steps(size) == len(trace.steps)
            assert row.acceptance_length(size) == pytest.approx(trace.acceptance_length)
        assert (row.num_prompt_tokens, row.num_new_tokens) == (len(text.prompt_ids), NUM_NEW)
        assert (row.prompt_id, row.category, row.prompt_hash) == (text.prompt_id, text.category, text.prompt_hash)
        assert (row.temperature, row.seed, row.logits) == (text.temperature, text.seed, None)
    assert max(row.acceptance_length(8) for row in sweep.rows) > 1.5


def test_features_are_those_that_a_policy_gets_in_decoding(pair, texts, swept):
    """Of greedy and of sampled texts, which differ in the sampling settings alone."""
    target, drafter = pair
    seen = []

    class Spy(BlockPilotPolicy):
        def choose(self, logits, *, context=None, costs=None, context_length=None, **settings):
            seen.append(policy_features(logits, kind="compact", **settings)[0])
            return super().choose(logits, **settings)

    policy = Spy(BlockPilotConfig(block_sizes=[2, 4], hidden_size=1)).eval()
    for text in (texts[0], texts[-1]):
        prompt = torch.tensor([text.prompt_ids])
        sampling = WARM if text.temperature else {"do_sample": False}
        BlockPilot(drafter, policy).generate(target, prompt, max_new_tokens=1, **sampling)
        row = next(row for row in swept[1].rows if row.id == text.id)
        assert row.features == pytest.approx(seen[-1].tolist(), abs=1e-5)
    assert len(seen) == 2 and not torch.equal(seen[0], seen[1])


def test_context_is_what_the_drafter_makes_of_the_prompts_last_position(pair, texts, swept):
    target, drafter = pair
    by_id = {row.id: row for row in swept[1].rows}
    for text in (texts[0], texts[4]):
        prompt = torch.tensor([text.prompt_ids])
        taps = [i + 1 for i in drafter.config.target_layer_ids]
        with torch.no_grad():
            states = target(prompt, output_hidden_states=taps).hidden_states
            expected = drafter.hidden_norm(drafter.fc(torch.cat([states[i][:, -1] for i in taps], dim=-1)))[0]
        assert by_id[text.id].context == pytest.approx(expected.tolist(), abs=1e-5)
    # That of one prompt, whatever the answer and its temperature.
    assert by_id["t0-warm"].context == pytest.approx(by_id["t0"].context, abs=1e-5)
    assert by_id["t0"].context != pytest.approx(by_id["t4"].context, abs=1e-2)


def test_a_folder_of_before_the_context_was_kept_still_reads(swept, tmp_path):
    folder, sweep = swept
    datasets.load_from_disk(str(folder)).remove_columns("context").save_to_disk(tmp_path)
    settings = {name: value for name, value in sweep.settings.items() if name != "keep_context"}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    old = read_sweep(tmp_path)
    assert old.rows == [replace(row, context=None) for row in sweep.rows]
    assert len(sweep.rows[0].context) == 32 == make_drafter(make_target()).config.hidden_size


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
def test_one_pass_gives_the_prefills_logits_and_the_states_of_the_whole_text(kind):
    target = make_target(kind, **({"final_logit_softcapping": 3.0} if kind == "gemma3" else {}))
    drafter = make_drafter(target)
    text = make_text(target, length=12, num_new=15)
    logits, context = prefill_and_context(target, drafter, text)
    with torch.no_grad():
        expected = target(torch.tensor([text.prompt_ids])).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    states = target_states(target, drafter.config.target_layer_ids, text).context
    torch.testing.assert_close(context, states, rtol=1e-4, atol=1e-5)


def test_the_folder_is_a_dataset_and_says_what_it_depends_on(pair, texts, swept):
    target, drafter = pair
    folder, sweep = swept
    rows = datasets.load_from_disk(str(folder))
    assert len(rows) == len(texts) and {"id", "num_accepted", "features"} <= set(rows.column_names)
    assert read_sweep(folder) == sweep
    assert isinstance(sweep, Sweep) and isinstance(sweep.rows[0], SweepRow)
    lengths = [row.num_prompt_tokens + row.num_new_tokens for row in sweep.rows]
    assert lengths == sorted(lengths)
    settings = dict(sweep.settings)
    assert len(settings.pop("texts_fingerprint")) == 16
    assert settings == {
        "target": "",
        "target_fingerprint": weights_fingerprint(target),
        "drafter": "",
        "drafter_fingerprint": weights_fingerprint(drafter),
        "training_block_size": 8,
        "block_sizes": SIZES,
        "dtype": "float32",
        "is_packed": False,
        "max_new_tokens": None,
        "temperatures": [0.0, 0.7],
        "keep_context": True,
        "keep_logits": False,
        "position_sizes": [],
    }


def test_a_finished_folder_is_read_and_others_settings_are_refused(pair, texts, swept, monkeypatch):
    folder, sweep = swept

    def never(*args, **kwargs):
        raise AssertionError("nothing is left to compute")

    monkeypatch.setattr(sweep_module, "walk", never)
    assert write_sweep(*pair, texts, reversed(SIZES), folder) == sweep
    for changed, name in (
        ({"block_sizes": [1, 2]}, "block_sizes"),
        ({"texts": texts[:-1]}, "texts_fingerprint"),
        ({"max_new_tokens": 9}, "max_new_tokens"),
    ):
        arguments = {"texts": texts, "block_sizes": SIZES, **changed}
        with pytest.raises(ValueError, match=rf"{folder} holds results of other settings: .*`{name}` was"):
            write_sweep(*pair, output=folder, **arguments)


def test_an_interrupted_sweep_goes_on_and_ends_equal(pair, texts, swept, tmp_path, monkeypatch):
    walk, calls = sweep_module.walk, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return walk(*args)

    monkeypatch.setattr(sweep_module, "walk", interrupted)
    output = tmp_path / "sweep"
    with pytest.raises(KeyboardInterrupt):
        write_sweep(*pair, texts, SIZES, output)
    with pytest.raises(ValueError, match=r"is not finished. Run the command that writes it once more"):
        read_sweep(output)
    assert write_sweep(*pair, texts, SIZES, output) == swept[1]
    assert len(calls) == 3  # the first unit was kept


def test_only_so_much_of_every_answer_counts(pair, texts, tmp_path):
    sweep = write_sweep(*pair, texts[:2], SIZES, tmp_path / "sweep", max_new_tokens=7)
    row = next(row for row in sweep.rows if row.id == "t0")
    assert row.num_new_tokens == 7
    for size in SIZES:
        trace = decoding(pair, texts[0], size, max_new_tokens=7).blockpilot
        assert list(row.num_accepted[size]) == [step.num_accepted for step in trace.steps]


def test_logits_and_all_positions_are_kept_on_request(pair, texts, swept, tmp_path):
    folder = tmp_path / "sweep"
    sweep = write_sweep(*pair, texts, SIZES, folder, keep_logits=True, position_sizes=SIZES)
    assert [row.num_accepted for row in sweep.rows] == [row.num_accepted for row in swept[1].rows]
    text = texts[0]
    row = next(row for row in sweep.rows if row.id == text.id)
    with torch.no_grad():
        expected = pair[0](torch.tensor([text.prompt_ids])).logits[0, -1]
    assert row.logits == pytest.approx(expected.tolist(), abs=1e-5)
    assert row.accepted_at.keys() == row.confidence_at.keys() == set(SIZES)
    for size in SIZES:
        assert len(row.confidence_at[size]) == (NUM_NEW - 1 if size > 1 else 0)
        assert all(len(of_anchor) == size - 1 for of_anchor in row.confidence_at[size])
        assert all(0 <= value <= 1 for of_anchor in row.confidence_at[size] for value in of_anchor)
    for entry in datasets.load_from_disk(str(folder)):
        for size, walked, at in zip(SIZES, entry["num_accepted"], entry["accepted_at"], strict=True):
            assert len(at) == NUM_NEW - 1 and max(at) < size
            position = 0
            for count in walked[:-1]:
                assert at[position] == count
                position += count + 1


def test_positions_at_some_sizes_are_those_of_all_sizes_and_the_others_are_walked(pair, texts, tmp_path):
    full = write_sweep(*pair, texts, SIZES, tmp_path / "full", position_sizes=SIZES)
    part = write_sweep(*pair, texts, SIZES, tmp_path / "part", position_sizes=SIZES[1:2])
    assert part.settings["position_sizes"] == [SIZES[1]]
    for row, expected in zip(part.rows, full.rows, strict=True):
        assert row.num_accepted == expected.num_accepted
        assert row.accepted_at == {SIZES[1]: expected.accepted_at[SIZES[1]]}
        assert row.confidence_at.keys() == {SIZES[1]}
        for of_anchor, wanted in zip(row.confidence_at[SIZES[1]], expected.confidence_at[SIZES[1]], strict=True):
            assert of_anchor == pytest.approx(wanted, abs=1e-5)


def test_texts_and_sizes_that_make_no_sense_are_refused(pair, texts, tmp_path):
    target, drafter = pair
    for arguments, message in (
        ((target, drafter, [texts[0], texts[1], texts[0]], SIZES), "Several texts have the id 't0'"),
        ((target, drafter, texts, [0, 2]), r"`block_sizes` must be integers >= 1, got \[0, 2\]"),
        ((target, drafter, texts, []), r"`block_sizes` must be integers >= 1, got \[\]"),
        ((target, drafter, [replace(texts[0], prompt_ids=(99,))], SIZES), "holds the token id 99"),
        ((target, drafter, [replace(texts[0], prompt_ids=(1,) * 500)], SIZES), "has 520 tokens, the target takes 512"),
        ((target, ScriptedDrafter(target), texts, SIZES), "Replay needs a DFlash drafter"),
    ):
        with pytest.raises(ValueError, match=message):
            write_sweep(*arguments, tmp_path / "sweep")
        assert not (tmp_path / "sweep").exists()
    long = replace(texts[0], prompt_ids=(1,) * 492)
    assert write_sweep(target, drafter, [long], [1], tmp_path / "sweep").rows[0].num_steps(1) == NUM_NEW - 1


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no settings.json"):
        read_sweep(tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps({"target": "x"}))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no sweep. Name a folder that `blockpilot sweep` wrote"):
        read_sweep(tmp_path)


def test_a_size_that_was_not_swept_is_named_and_an_answer_of_one_token_counts_as_plain():
    row = SweepRow("a", "a", "all", 0.0, 0, "h", 3, 6, {1: (0,) * 5, 4: (2, 1)}, ())
    assert row.num_steps(4) == 2 and row.acceptance_length(4) == 2.5 and row.acceptance_length(1) == 1.0
    with pytest.raises(ValueError, match=r"Block size 2 was not swept, only \[1, 4\]"):
        row.acceptance_length(2)
    assert replace(row, num_new_tokens=1, num_accepted={4: ()}).acceptance_length(4) == 1.0

"""The record of a call: its counts, its order, its units, and what the loop holds in memory while it makes it."""

import json
import weakref

import pytest
import torch
from conftest import (
    both_generate,
    constant_policy,
    make_drafter,
    make_prompt,
    make_target,
    pilot_generate,
    plain_generate,
    scripted_pilot,
)
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

from blockpilot_hf import BlockPilot, DecodeTrace, StepRecord
from blockpilot_hf.verification import DraftBlock

PROMPT = make_prompt(10, seed=30)
DICT = {"return_dict_in_generate": True}


class RunsDrafter:
    """Drafts 3 right tokens and a wrong one, then 2, then 1, then none: accepted runs known by hand."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, target, sequence, runs, block_size):
        self.config = make_drafter(target, block_size=block_size).config
        self.script, self.runs, self.asked = sequence[0], list(runs), []

    def draft_block(self, anchor_ids, context, *, position, block_size):
        self.asked.append((int(anchor_ids), context.shape[1], position, block_size))
        tokens = torch.zeros(1, block_size - 1, dtype=torch.long)
        known = self.script[position + 1 : position + block_size]
        tokens[0, : len(known)] = known
        run = self.runs.pop(0)
        tokens[0, run:] = (tokens[0, run:] + 1) % 64
        return DraftBlock(tokens, None, torch.ones(1, block_size - 1))


def assert_counts_add_up(trace):
    assert trace.num_new_tokens == 1 + sum(len(step.committed_ids) for step in trace.steps)
    for step in trace.steps:
        assert step.num_accepted == len(step.committed_ids) - 1
        assert 1 <= step.verify_width <= step.block_size == trace.block_size
        assert len(step.draft_ids) in (0, step.block_size - 1)
        assert (len(step.draft_ids) == 0) == (step.verify_width == 1)
        assert step.draft_ids[: step.num_accepted] == step.committed_ids[:-1]
    if trace.steps:
        tau = sum(len(step.committed_ids) for step in trace.steps) / len(trace.steps)
        assert trace.acceptance_length == pytest.approx(tau)


def test_tau_is_the_mean_of_accepted_plus_bonus_over_steps(target):
    """Runs of 3, 2, 1 and 0 accepted tokens: 4 + 3 + 2 + 1 committed ones over four steps."""
    plain = plain_generate(target, PROMPT, max_new_tokens=1 + 4 + 3 + 2 + 1)
    drafter = RunsDrafter(target, plain, [3, 2, 1, 0], block_size=5)
    # The budget is wider than what is looked at, so that no step is cut short.
    records = []

    class Enough(Exception):
        pass

    def on_step(record):
        records.append(record)
        if len(records) == 4:
            raise Enough

    with pytest.raises(Enough):
        pilot_generate(BlockPilot(drafter, adapt="prompt"), target, PROMPT, max_new_tokens=20, on_step=on_step)
    assert [r.num_accepted for r in records] == [3, 2, 1, 0]
    assert [i for r in records for i in r.committed_ids] == plain[0, 11:].tolist()
    assert DecodeTrace(block_size=5, steps=records).acceptance_length == 2.5
    # Anchor, new context, anchor's position: the prompt first, then each step's anchor and accepted tokens.
    assert [a[1:] for a in drafter.asked] == [(10, 10, 5), (4, 14, 5), (3, 17, 5), (2, 19, 5)]
    assert [a[0] for a in drafter.asked] == [int(plain[0, i]) for i in (10, 14, 17, 19)]


def test_tau_over_rows_is_the_mean_of_the_rows_taus_and_zero_without_steps():
    def step(n):
        return StepRecord(8, 8, (1,) * 7, (1,) * n, n - 1)

    rows = [
        DecodeTrace(8, steps=[step(4), step(2)], num_new_tokens=7),
        DecodeTrace(8, steps=[step(1)], num_new_tokens=2),
    ]
    both = DecodeTrace.of_rows(rows)
    assert both.acceptance_length == (3.0 + 1.0) / 2
    assert both.num_new_tokens == 9 and both.block_size == 8 and len(both.steps) == 3
    assert DecodeTrace.of_rows([DecodeTrace(4), DecodeTrace(8)]).block_size is None
    assert DecodeTrace.of_rows(rows[:1]) is rows[0]
    assert DecodeTrace().acceptance_length == 0.0


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("eos", [None, [32, 58]])
def test_counts_add_up(target, accuracy, block_size, eos):
    plain, ours = both_generate(
        target,
        PROMPT,
        accuracy=accuracy,
        eos_token_id=eos,
        max_new_tokens=15,
        ours={"block_size": block_size},
        **DICT,
    )
    assert torch.equal(ours.sequences, plain.sequences)
    assert_counts_add_up(ours.blockpilot)
    assert ours.blockpilot.num_new_tokens == ours.sequences.shape[1] - 10
    if accuracy == 0.0 or block_size == 1:
        assert ours.blockpilot.acceptance_length == 1.0


def test_at_the_end_of_the_budget_a_whole_block_is_drafted_and_less_is_verified(target):
    widths = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        plain = plain_generate(target, PROMPT, max_new_tokens=24)
        for num_new in range(2, 20):
            pilot = scripted_pilot(target, plain, 0.5, block_size=8)
            widths.clear()
            trace = pilot_generate(pilot, target, PROMPT, max_new_tokens=num_new, **DICT).blockpilot
            done = 1
            for step in trace.steps:
                remaining = num_new - done
                assert step.verify_width == min(8, remaining)
                assert len(step.draft_ids) == (7 if remaining > 1 else 0)
                assert step.reason == ("end of the token budget" if remaining < 8 else "")
                done += len(step.committed_ids)
            assert done == num_new
            assert widths == [10] + [step.verify_width for step in trace.steps], "what is recorded is what was run"
    finally:
        hook.remove()


def test_the_drafter_always_sees_whole_blocks_of_the_calls_size(target):
    drafter = make_drafter(target, block_size=8)
    seen = []
    forward = drafter.forward
    drafter.forward = lambda *args, **kwargs: seen.append(kwargs["noise_embeds"].shape[1]) or forward(*args, **kwargs)
    for size in (2, 3, 8, 12):
        seen.clear()
        pilot_generate(BlockPilot(drafter), target, PROMPT, max_new_tokens=15, block_size=size)
        assert seen and set(seen) == {size}
    seen.clear()
    pilot_generate(BlockPilot(drafter), target, PROMPT, max_new_tokens=15, block_size=1)
    assert seen == []
    assert drafter.config.block_size == 8


def test_on_step_gets_every_record_as_it_happens(target, drafter):
    events = []

    class Streamer:
        def put(self, value):
            events.append(("put", value.flatten().tolist()))

        def end(self):
            events.append(("end",))

    output = pilot_generate(
        BlockPilot(drafter), target, PROMPT, max_new_tokens=12, on_step=events.append, streamer=Streamer(), **DICT
    )
    steps = output.blockpilot.steps
    assert [e for e in events if isinstance(e, StepRecord)] == steps
    expected = [("put", PROMPT[0].tolist()), ("put", output.sequences[0, 10:11].tolist())]
    for step in steps:
        expected += [("put", [i]) for i in step.committed_ids] + [step]
    assert events == [*expected, ("end",)]


def test_on_choice_gets_each_rows_trace_before_its_first_token(target, drafter):
    """Rows are decoded one after the other, so a row's choice comes after the steps of the row before."""
    events, policy = [], constant_policy(3)

    class Streamer:
        def put(self, value):
            events.append("put")

        def end(self):
            pass

    def on_choice(trace):
        events.append((trace.block_size, trace.scores, trace.num_new_tokens, len(trace.steps), trace.prefill_s > 0))
        traces.append(trace)

    traces: list[DecodeTrace] = []
    pilot = BlockPilot(drafter, policy, adapt="prompt")
    output = pilot_generate(pilot, target, PROMPT, max_new_tokens=12, on_choice=on_choice, streamer=Streamer(), **DICT)
    chosen = output.blockpilot
    assert events == ["put", (3, chosen.scores, 1, 0, True)] + ["put"] * 12
    assert traces == [chosen] and traces[0] is chosen  # the same one, grown

    traces.clear()
    for settings in ({"block_size": 5}, {"block_size": 1}):
        pilot_generate(pilot, target, PROMPT, max_new_tokens=4, on_choice=on_choice, **settings)
        assert traces.pop().block_size == settings["block_size"]
    rows, order = make_prompt(6, rows=2), []
    batch = pilot_generate(
        pilot,
        target,
        rows,
        max_new_tokens=5,
        on_choice=lambda trace: (traces.append(trace), order.append("choice")),
        on_step=lambda step: order.append(step.row),
        **DICT,
    ).blockpilot
    assert traces == batch.rows and len(traces) == 2
    split = order.index("choice", 1)
    assert order[0] == "choice" and set(order[1:split]) == {0} and set(order[split + 1 :]) == {1}


def test_the_record_is_plain_data(target, drafter):
    output = pilot_generate(BlockPilot(drafter), target, PROMPT, max_new_tokens=12, **DICT)
    assert isinstance(output, GenerateDecoderOnlyOutput) and output["blockpilot"] is output.blockpilot
    trace = output.blockpilot
    read = json.loads(json.dumps(trace.to_dict()))
    assert read["acceptance_length"] == trace.acceptance_length
    assert read["block_size"] == 8 and read["num_new_tokens"] == 12 and read["scores"] is None and read["rows"] == []
    assert [tuple(s["committed_ids"]) for s in read["steps"]] == [s.committed_ids for s in trace.steps]
    assert set(read["steps"][0]) == {
        "block_size", "verify_width", "draft_ids", "committed_ids", "num_accepted", "row", "draft_s", "verify_s",
        "reason", "source",
    }  # fmt: skip
    with pytest.raises(AttributeError):
        trace.steps[0].num_accepted = 5
    batch = pilot_generate(BlockPilot(drafter), target, make_prompt(6, rows=2), max_new_tokens=5, **DICT).blockpilot
    read = json.loads(json.dumps(batch.to_dict()))
    assert len(read["rows"]) == 2 and read["num_new_tokens"] == 10


def test_without_return_dict_only_ids_come_back(target, drafter):
    assert isinstance(pilot_generate(BlockPilot(drafter), target, PROMPT, max_new_tokens=3), torch.Tensor)


def test_reasons_say_who_chose_the_block_size(target, drafter):
    pilot = BlockPilot(drafter)
    free = pilot_generate(pilot, target, PROMPT, max_new_tokens=5, **DICT).blockpilot
    fixed = pilot_generate(pilot, target, PROMPT, max_new_tokens=5, block_size=3, **DICT).blockpilot
    assert (free.block_size, fixed.block_size) == (8, 3)
    assert "no policy" in free.reason and "caller" in fixed.reason


def test_seconds_of_parts_and_of_single_steps(target, drafter):
    """On a CPU nothing has to be synchronised, so steps are measured unless that is turned off."""
    pilot = BlockPilot(drafter)
    trace = pilot_generate(pilot, target, PROMPT, max_new_tokens=8, **DICT).blockpilot
    assert trace.prefill_s > 0 and trace.policy_s >= 0 and trace.decode_s > 0
    assert all(step.draft_s >= 0 and step.verify_s > 0 for step in trace.steps)
    assert sum(step.draft_s + step.verify_s for step in trace.steps) <= trace.decode_s
    trace = pilot_generate(pilot, target, PROMPT, max_new_tokens=8, time_steps=False, **DICT).blockpilot
    assert all(step.draft_s is None and step.verify_s is None for step in trace.steps) and trace.decode_s > 0


# Memory


def test_only_the_layers_that_the_drafter_reads_are_captured(target, drafter):
    asked, returned = [], []
    before = target.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs.get("output_hidden_states")), with_kwargs=True
    )
    after = target.register_forward_hook(lambda module, args, output: returned.append(output.hidden_states))
    try:
        pilot_generate(BlockPilot(drafter), target, PROMPT, max_new_tokens=8)
        assert len(asked) > 2 and all(list(value) == [1, 3] for value in asked)
        for states in returned:
            assert [i for i, state in enumerate(states) if state is not None] == [1, 3]
        asked.clear(), returned.clear()
        pilot_generate(BlockPilot(drafter), target, PROMPT, max_new_tokens=8, block_size=1)
        assert not any(asked) and all(states is None for states in returned), "plain decoding captures nothing"
    finally:
        before.remove(), after.remove()


def test_the_prompts_states_are_freed_after_the_first_draft(target):
    drafter = make_drafter(target)
    alive = []
    first = []

    def watch(module, args, output):
        if not first:
            first.extend(weakref.ref(state) for state in output.hidden_states if state is not None)

    contexts = []
    forward = drafter.forward

    def draft(*args, **kwargs):
        contexts.append(weakref.ref(kwargs["context_hidden_states"]))
        return forward(*args, **kwargs)

    drafter.forward = draft

    def on_step(record):
        alive.append((sum(ref() is not None for ref in first), sum(ref() is not None for ref in contexts)))

    hook = target.register_forward_hook(watch)
    try:
        pilot = BlockPilot(drafter, adapt="prompt")
        pilot_generate(pilot, target, make_prompt(40, seed=3), max_new_tokens=8, on_step=on_step)
    finally:
        hook.remove()
    assert len(first) == 2 and len(contexts) >= 1
    assert set(alive) == {(0, 0)}


def test_a_sliding_target_never_keeps_a_long_prompt():
    """Recording what leaves the window starts after the prefill, so no more than the window is kept."""
    target = make_target("mistral")
    cache = DynamicCache(config=target.config)
    lengths = []

    def measure(*args):
        lengths.append(max((layer.keys.shape[2] for layer in cache.layers if layer.is_initialized), default=0))

    hook = target.register_forward_pre_hook(measure)
    pilot_generate(BlockPilot(make_drafter(target)), target, make_prompt(60, seed=3), max_new_tokens=10, cache=cache)
    hook.remove()
    assert lengths[0] == 0 and len(lengths) > 2
    assert max(lengths) < target.config.sliding_window

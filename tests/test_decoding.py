"""The loop against plain `generate`: ends of answers, draws, positions, and what a call leaves behind."""

import copy
import threading

import pytest
import torch
from conftest import (
    both_generate,
    make_drafter,
    make_prompt,
    make_target,
    pilot_generate,
    plain_generate,
    scripted_pilot,
)
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from blockpilot_hf import BlockPilot

PROMPT = make_prompt(10, seed=30)
DICT = {"return_dict_in_generate": True, "output_scores": True}


class Recorder(BaseStreamer):
    """Keeps every put, and can fail at one of them."""

    def __init__(self, fail_at=None, error=RuntimeError):
        self.puts, self.ended, self.fail_at, self.error = [], 0, fail_at, error

    def put(self, value):
        if self.fail_at == len(self.puts):
            raise self.error("stopped by the streamer")
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


class StopAt(StoppingCriteria):
    """Fires on the `count`-th call; remembers every sequence it saw."""

    def __init__(self, count):
        self.count, self.seen = count, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[0].tolist())
        return torch.full((input_ids.shape[0],), len(self.seen) >= self.count)


@pytest.fixture(scope="module")
def answer(target):
    """Prompt and plain greedy continuation `(1, 34)` whose first tokens differ from each other."""
    sequence = plain_generate(target, PROMPT, max_new_tokens=24)
    new = sequence[0, 10:].tolist()
    assert len(set(new[:12])) == 12, "the tests of single offsets need distinct tokens"
    return sequence


def assert_counts_agree(output, prompt_length):
    trace = output.blockpilot
    num_new = output.sequences.shape[1] - prompt_length
    assert trace.num_new_tokens == num_new == 1 + sum(len(step.committed_ids) for step in trace.steps)
    assert all(step.num_accepted == len(step.committed_ids) - 1 <= step.verify_width - 1 for step in trace.steps)
    assert [i for step in trace.steps for i in step.committed_ids] == output.sequences[0, prompt_length + 1 :].tolist()
    # The last token was never fed to the target.
    assert output.cache.get_seq_length() == output.sequences.shape[1] - 1


# Ends of answers


@pytest.mark.parametrize("offset", range(12))
@pytest.mark.parametrize("num_ids", [1, 2])
def test_ends_at_the_first_eos_wherever_it_stands_in_an_accepted_block(target, answer, offset, num_ids):
    """Offset 0 is the prefill's token, 1 to 7 are accepted ones of the first block, 8 is its bonus token."""
    new = answer[0, 10:].tolist()
    eos = [new[offset]] if num_ids == 1 else [new[min(offset + 3, 11)], new[offset]]
    streamer = Recorder()
    plain, ours = both_generate(
        target,
        PROMPT,
        script=answer,
        accuracy=1.0,
        eos_token_id=eos,
        max_new_tokens=24,
        ours={"streamer": streamer},
        **DICT,
    )
    assert plain.sequences.shape[1] == 10 + offset + 1
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.scores) == len(plain.scores)
    assert_counts_agree(ours, 10)
    assert ours.cache.get_seq_length() == plain.cache.get_seq_length()
    assert streamer.puts == [PROMPT[0].tolist()] + [[i] for i in new[: offset + 1]]
    assert streamer.ended == 1
    if 1 <= offset <= 7:
        assert len(ours.blockpilot.steps) == 1 and ours.blockpilot.steps[0].num_accepted == offset - 1


def test_eos_and_mask_ids_in_the_prompt_and_in_the_filler_never_stop_a_run(target, answer):
    prompt = PROMPT.clone()
    new = answer[0, 10:].tolist()
    for eos in ([new[9], 63], [new[9], int(prompt[0, 4])], [63]):
        plain, ours = both_generate(
            target, prompt, script=answer, accuracy=1.0, eos_token_id=eos, max_new_tokens=20, **DICT
        )
        assert torch.equal(ours.sequences, plain.sequences)
        assert_counts_agree(ours, 10)
    real = BlockPilot(make_drafter(target))
    prompt[0, -1] = 63  # the anchor's neighbour is the eos, and so are all mask tokens
    plain, ours = both_generate(target, prompt, pilot=real, eos_token_id=[63, 62], max_new_tokens=20)
    assert torch.equal(ours, plain)


def test_without_eos_and_pad_a_run_goes_to_its_length():
    target = make_target(eos_token_id=None, pad_token_id=None)
    plain, ours = both_generate(target, PROMPT, max_new_tokens=17)
    assert ours.shape == (1, 27) and torch.equal(ours, plain)


@pytest.mark.parametrize(
    ("num_new", "block_size"), [*((n, 16) for n in range(1, 21)), *((n, 5) for n in (2, 5, 6, 9, 10, 11))]
)
def test_the_budget_is_met_exactly(target, answer, num_new, block_size):
    streamer = Recorder()
    plain, ours = both_generate(
        target,
        PROMPT,
        script=answer,
        accuracy=1.0,
        block_size=block_size,
        max_new_tokens=num_new,
        ours={"streamer": streamer},
        **DICT,
    )
    assert ours.sequences.shape[1] == 10 + num_new
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(streamer.puts) == 1 + num_new and len(ours.scores) == num_new
    assert_counts_agree(ours, 10)


def test_max_length_one_above_the_prompt_takes_no_step(target, answer):
    plain, ours = both_generate(target, PROMPT, script=answer, max_length=11, **DICT)
    assert torch.equal(ours.sequences, plain.sequences) and ours.blockpilot.steps == []


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 5, 9, 10, 14])
def test_criteria_are_called_once_per_token_with_plains_sequences(target, answer, count, accuracy):
    calls = []

    def fresh():
        calls.append(StopAt(count))
        return {"stopping_criteria": [calls[-1]]}

    plain, ours = both_generate(
        target, PROMPT, script=answer, accuracy=accuracy, fresh=fresh, max_new_tokens=24, **DICT
    )
    assert torch.equal(ours.sequences, plain.sequences) and ours.sequences.shape[1] == 10 + count
    assert calls[1].seen == calls[0].seen
    assert_counts_agree(ours, 10)


def test_a_criterion_may_read_the_scores(target, answer):
    class StopOnSum(StoppingCriteria):
        """Fires once the scores so far add up to more than plain's first eleven do."""

        def __init__(self, bound=float("inf")):
            self.bound, self.sums = bound, []

        def __call__(self, input_ids, scores, **kwargs):
            self.sums.append(float(sum(s.max() for s in scores)))
            return torch.full((input_ids.shape[0],), self.sums[-1] > self.bound)

    probe = StopOnSum()
    plain_generate(target, PROMPT, stopping_criteria=[probe], max_new_tokens=20, **DICT)
    bound = probe.sums[10] - 1e-3
    plain, ours = both_generate(
        target,
        PROMPT,
        script=answer,
        accuracy=1.0,
        fresh=lambda: {"stopping_criteria": [StopOnSum(bound)]},
        max_new_tokens=20,
        **DICT,
    )
    assert plain.sequences.shape[1] == 21 and torch.equal(ours.sequences, plain.sequences)


def test_max_time_zero_ends_after_the_first_token_as_in_plain(target, answer):
    plain, ours = both_generate(target, PROMPT, script=answer, accuracy=1.0, max_time=0.0, max_new_tokens=24, **DICT)
    assert plain.sequences.shape[1] == 11 and torch.equal(ours.sequences, plain.sequences)
    assert_counts_agree(ours, 10)


def test_max_time_is_asked_at_every_token_of_a_block(target, answer, monkeypatch):
    """With a clock that moves one second per look, time runs out inside the accepted block."""

    class Clock:
        def __init__(self):
            self.now = 0.0

        def time(self):
            self.now += 1.0
            return self.now

    import transformers.generation.stopping_criteria as module

    def fresh():
        monkeypatch.setattr(module, "time", Clock())
        return {"max_time": 6.5}

    plain, ours = both_generate(target, PROMPT, script=answer, accuracy=1.0, fresh=fresh, max_new_tokens=24, **DICT)
    assert 12 < plain.sequences.shape[1] < 18
    assert torch.equal(ours.sequences, plain.sequences)
    assert_counts_agree(ours, 10)


# Sampling


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 8},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1e-4},
        {"temperature": 1e-6},
    ],
    ids=str,
)
def test_one_seed_gives_plains_sample_and_leaves_plains_random_state(target, options):
    for seed, accuracy in enumerate((0.0, 0.5, 0.5, 1.0)):
        kwargs = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, **options}
        plain = plain_generate(target, PROMPT, seed=seed, **kwargs)
        state = torch.get_rng_state()
        ours = pilot_generate(scripted_pilot(target, plain, accuracy), target, PROMPT, seed=seed, **kwargs)
        assert torch.equal(ours, plain)
        assert torch.equal(torch.get_rng_state(), state)


def test_one_seed_gives_plains_sample_with_a_real_drafter_and_an_eos(target, drafter):
    pilot = BlockPilot(drafter)
    lengths = set()
    for seed in range(6):
        kwargs = {"do_sample": True, "temperature": 0.9, "eos_token_id": [5, 17, 33], "max_new_tokens": 20}
        plain = plain_generate(target, PROMPT, seed=seed, **kwargs)
        assert torch.equal(pilot_generate(pilot, target, PROMPT, seed=seed, **kwargs), plain)
        lengths.add(plain.shape[1])
    assert len(lengths) > 1


def test_tiny_temperatures_give_the_greedy_text(target, answer):
    for temperature in (1e-6, 1e-4):
        ours = pilot_generate(
            scripted_pilot(target, answer), target, PROMPT, do_sample=True, temperature=temperature, max_new_tokens=24
        )
        assert torch.equal(ours, answer)


def test_temperature_zero_gets_transformers_own_error(target, drafter):
    with pytest.raises(ValueError) as plain:
        plain_generate(target, PROMPT, do_sample=True, temperature=0.0, max_new_tokens=4)
    with pytest.raises(ValueError) as ours:
        pilot_generate(BlockPilot(drafter), target, PROMPT, do_sample=True, temperature=0.0, max_new_tokens=4)
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("options", [{}, {"temperature": 1e-6}, {"top_k": 1}, {"top_p": 0.3}], ids=str)
def test_drawn_drafts_never_pass_the_eos_or_the_budget(target, drafter, options):
    pilot = BlockPilot(drafter, draft_sampling=True)
    for seed in range(6):
        new = pilot_generate(
            pilot, target, PROMPT, seed=seed, do_sample=True, eos_token_id=[5, 17, 33, 40], max_new_tokens=11, **options
        )[0, 10:].tolist()
        assert 1 <= len(new) <= 11
        assert not set(new[:-1]) & {5, 17, 33, 40}
        assert len(new) == 11 or new[-1] in {5, 17, 33, 40}


# Prompts, padding and positions


def left_padded(prompt, num_pads):
    pads = torch.zeros(1, num_pads, dtype=torch.long)
    mask = torch.cat([pads, torch.ones_like(prompt)], dim=-1)
    return torch.cat([pads, prompt], dim=-1), mask


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gemma3"])
@pytest.mark.parametrize("num_pads", [1, 7])
def test_a_left_padded_prompt_gives_the_unpadded_answer_and_the_same_drafts(kind, num_pads):
    target = make_target(kind)
    pilot = BlockPilot(make_drafter(target))
    ids, mask = left_padded(PROMPT, num_pads)
    plain, ours = both_generate(target, ids, pilot=pilot, attention_mask=mask, max_new_tokens=20, **DICT)
    unpadded = pilot_generate(pilot, target, PROMPT, max_new_tokens=20, **DICT)
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(ours.sequences[:, num_pads:], unpadded.sequences)
    # Not only the text: states of padding would change what is drafted.
    assert [s.draft_ids for s in ours.blockpilot.steps] == [s.draft_ids for s in unpadded.blockpilot.steps]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_mask_with_holes_is_followed_as_in_plain(kind):
    target = make_target(kind)
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1, 1]])
    plain, ours = both_generate(target, PROMPT, attention_mask=mask, max_new_tokens=20, **DICT)
    assert torch.equal(ours.sequences, plain.sequences)
    assert max(step.num_accepted for step in ours.blockpilot.steps) > 1


def test_position_ids_of_the_user_go_on_where_they_ended(target):
    positions = torch.arange(10)[None] + 37
    plain, ours = both_generate(target, PROMPT, position_ids=positions, max_new_tokens=20)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
def test_a_prompt_of_one_token_decodes_as_plain(kind):
    target = make_target(kind)
    plain, ours = both_generate(target, make_prompt(1), max_new_tokens=20)
    assert torch.equal(ours, plain)
    # No prompt at all: `generate` starts from the bos token.
    assert torch.equal(
        pilot_generate(scripted_pilot(target, plain), target, None, max_new_tokens=20),
        plain_generate(target, None, max_new_tokens=20),
    )


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gemma3"])
def test_greedy_text_equals_plain_at_every_block_size_with_a_real_drafter(kind, block_size):
    target = make_target(kind)
    pilot = BlockPilot(make_drafter(target))
    plain, ours = both_generate(target, PROMPT, pilot=pilot, max_new_tokens=24, ours={"block_size": block_size})
    assert torch.equal(ours, plain)


def rope_target(rope, **overrides):
    return make_target("llama", rope_parameters={"rope_theta": 10_000.0, **rope}, **overrides)


@pytest.mark.parametrize("prompt_length", [5, 12, 15, 16, 17, 20])
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "yarn", "linear"])
def test_rope_that_changes_with_the_length_is_crossed_as_in_plain(rope_type, prompt_length):
    """The frequencies depend on the last position of a pass, so a wide pass must not reach over the boundary at 16."""
    rope = {"rope_type": rope_type, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    if rope_type == "yarn":
        rope |= {"original_max_position_embeddings": 16}
    # A dynamic rope keeps the longest length it saw, so both runs get their own target.
    size = 16 if rope_type == "dynamic" else 512
    prompt = make_prompt(prompt_length)
    plain = plain_generate(rope_target(rope, max_position_embeddings=size), prompt, max_new_tokens=20, **DICT)
    target = rope_target(rope, max_position_embeddings=size)
    ours = pilot_generate(scripted_pilot(target, plain.sequences, 0.8), target, prompt, max_new_tokens=20, **DICT)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(ours.scores, plain.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("start", [0, 5, 11])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_boundary_is_found_by_the_targets_own_positions(kind, start):
    """Positions given by the user, and frequencies of one layer type only."""
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    if kind == "gemma3":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    target = make_target(kind, rope_parameters=rope)
    kwargs = {"position_ids": torch.arange(start, start + 5)[None], "max_new_tokens": 20, **DICT}
    plain, ours = both_generate(target, make_prompt(5), accuracy=0.8, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(ours.scores, plain.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt_length", [12, 15, 16, 17, 20])
def test_phi3_drops_its_cache_at_the_longrope_boundary_as_in_plain(prompt_length):
    def make():
        rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = Phi3Config(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=512, original_max_position_embeddings=16,
                rope_parameters=rope, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.2,
            )  # fmt: skip
            return Phi3ForCausalLM(config).eval()

    prompt = make_prompt(prompt_length)
    plain = plain_generate(make(), prompt, max_new_tokens=20, **DICT)
    for accuracy in (0.0, 0.5, 1.0):
        target = make()
        pilot = scripted_pilot(target, plain.sequences, accuracy)
        ours = pilot_generate(pilot, target, prompt, max_new_tokens=20, **DICT)
        assert torch.equal(ours.sequences, plain.sequences)
        torch.testing.assert_close(ours.scores, plain.scores, rtol=1e-4, atol=1e-4)


def gpt2(num_positions=24):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=64, n_positions=num_positions, n_embd=32, n_layer=4, n_head=4, initializer_range=0.2,
            bos_token_id=1, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("prompt_length", [8, 17, 23, 24])
def test_a_wide_pass_never_looks_past_learned_positions(prompt_length):
    """Plain decoding may end just before the last position; a wide pass there would index out of the table."""
    target = gpt2()
    prompt = make_prompt(prompt_length)
    free = plain_generate(target, prompt, max_length=25)
    seen = []

    def watch(module, args, kwargs):
        positions = kwargs.get("position_ids")
        seen.append(int(positions.max()))

    with_eos = int(free[0, -1])
    hook = target.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        for accuracy in (0.0, 0.5, 1.0):
            plain, ours = both_generate(
                target, prompt, script=free, accuracy=accuracy, block_size=16, eos_token_id=with_eos, max_length=40
            )
            assert torch.equal(ours, plain) and ours.shape[1] <= 25
    finally:
        hook.remove()
    assert max(seen) <= 23


def test_a_wide_pass_never_looks_past_learned_positions_when_the_user_gives_them():
    target = gpt2()
    kwargs = {"position_ids": torch.arange(10, 18)[None], "max_new_tokens": 7}
    plain, ours = both_generate(target, make_prompt(8), accuracy=1.0, block_size=16, **kwargs)
    assert torch.equal(ours, plain)
    free = plain_generate(target, make_prompt(8), **kwargs)
    kwargs["max_new_tokens"] = 20  # ends by its eos just before the table does
    eos = int(free[0, 14])
    plain, ours = both_generate(target, make_prompt(8), script=free, accuracy=1.0, eos_token_id=eos, **kwargs)
    assert torch.equal(ours, plain)


def test_past_the_targets_limit_decoding_goes_token_by_token():
    target = make_target(max_position_embeddings=20)
    plain, ours = both_generate(target, PROMPT, accuracy=1.0, max_new_tokens=20, **DICT)
    assert torch.equal(ours.sequences, plain.sequences)
    widths = [step.verify_width for step in ours.blockpilot.steps]
    assert widths[0] == 8 and widths[-5:] == [1] * 5
    assert ours.blockpilot.steps[-1].reason == "past the target's position limit"


@pytest.mark.parametrize("limit", [4, 10, 18, 19, 24])
def test_past_the_drafters_limit_nothing_is_drafted(target, limit):
    pilot = BlockPilot(make_drafter(target, max_position_embeddings=limit), adapt="prompt")
    plain, ours = both_generate(target, PROMPT, pilot=pilot, max_new_tokens=24, **DICT)
    assert torch.equal(ours.sequences, plain.sequences)
    anchor = 10
    for step in ours.blockpilot.steps:
        assert bool(step.draft_ids) == (anchor + 8 <= limit)
        anchor += len(step.committed_ids)
    assert ours.blockpilot.steps[-1].reason == "past the drafter's position limit"


# What a call leaves behind


def snapshot(*models):
    return [
        (
            m.config.to_dict(),
            copy.deepcopy(m.generation_config.to_dict()) if getattr(m, "generation_config", None) else None,
            sorted(m.__dict__),
            [
                (name, module.training, sorted(module.__dict__), dict(module._forward_hooks))
                for name, module in m.named_modules()
            ],
            {name: value.clone() for name, value in m.state_dict().items()},
        )
        for m in models
    ]


def assert_untouched(before, after):
    for old, new in zip(before, after, strict=True):
        assert old[:4] == new[:4]
        assert all(torch.equal(value, new[4][name]) for name, value in old[4].items())


def test_a_call_changes_no_config_attribute_flag_or_weight(target):
    target, drafter = make_target(), make_drafter(target)
    target.model.layers[1].train()  # flags are left as they are, not all set to one value
    target.config._attn_implementation = "eager"
    # transformers' own hooks stay on a model from its first call with `output_hidden_states` on; ours adds nothing.
    plain_generate(target, PROMPT, max_new_tokens=2, output_hidden_states=True, **DICT)
    before = snapshot(target, drafter)
    pilot = BlockPilot(drafter)
    attributes = dict(vars(pilot))
    for size in (None, 4, 20):
        pilot_generate(pilot, target, PROMPT, block_size=size, max_new_tokens=12, output_hidden_states=True, **DICT)
    assert_untouched(before, snapshot(target, drafter))
    assert vars(pilot) == attributes


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_calls_do_not_remember_each_other(kind):
    target = make_target(kind)
    drafter = make_drafter(target)
    pilot = BlockPilot(drafter)

    def run(prompt, pilot):
        output = pilot_generate(pilot, target, prompt, max_new_tokens=15, **DICT)
        return output.sequences.tolist(), [s.draft_ids for s in output.blockpilot.steps]

    long, short = make_prompt(40, seed=3), make_prompt(5, seed=4)
    alone = [run(long, BlockPilot(drafter)), run(short, BlockPilot(drafter))]
    assert [run(long, pilot), run(short, pilot), run(long, pilot)] == [alone[0], alone[1], alone[0]]
    assert alone[0][0] == plain_generate(target, long, max_new_tokens=15).tolist()


class Broken(Exception):
    pass


def fail_after(calls, error):
    count = 0

    def call(*args, **kwargs):
        nonlocal count
        count += 1
        if count > calls:
            raise error("stopped by the caller")

    return call


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["streamer", "on_choice", "on_step", "criterion", "processor", "target"])
def test_after_an_exception_the_next_call_is_as_the_first(where, error):
    target = make_target("gemma3")
    drafter = make_drafter(target)
    pilot = BlockPilot(drafter)
    first = pilot_generate(pilot, target, PROMPT, max_new_tokens=16, **DICT)
    before = snapshot(target, drafter)
    fail = fail_after(2, error)
    arguments = {
        "streamer": {"streamer": Recorder(fail_at=3, error=error)},
        "on_choice": {"on_choice": fail_after(0, error)},
        "on_step": {"on_step": fail},
        "criterion": {"stopping_criteria": [lambda ids, scores, **kwargs: fail() or torch.zeros(1, dtype=torch.bool)]},
        "processor": {"logits_processor": [lambda ids, scores: fail() or scores]},
        "target": {},
    }[where]
    hook = target.register_forward_pre_hook(fail) if where == "target" else None
    with pytest.raises(error):
        pilot_generate(pilot, target, PROMPT, max_new_tokens=16, **arguments)
    if hook is not None:
        hook.remove()
    assert_untouched(before, snapshot(target, drafter))
    again = pilot_generate(pilot, target, PROMPT, max_new_tokens=16, **DICT)
    assert torch.equal(again.sequences, first.sequences)
    assert [s.draft_ids for s in again.blockpilot.steps] == [s.draft_ids for s in first.blockpilot.steps]


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_two_threads_on_one_pair_get_what_they_would_get_alone(kind):
    target = make_target(kind)
    pilot = BlockPilot(make_drafter(target))
    jobs = [(make_prompt(6 + i, seed=i), 2 + 5 * (i % 2) + i % 3) for i in range(10)]

    def run(job):
        output = pilot.generate(target, job[0], block_size=job[1], max_new_tokens=8, **DICT)
        return output.sequences.tolist(), [
            (s.block_size, s.draft_ids, s.committed_ids) for s in output.blockpilot.steps
        ]

    alone = [run(job) for job in jobs]
    results = [[None] * len(jobs), [None] * len(jobs)]
    start = threading.Barrier(2)

    def work(thread):
        start.wait()
        order = range(len(jobs)) if thread == 0 else reversed(range(len(jobs)))
        for i in order:
            results[thread][i] = run(jobs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone, alone]
    assert alone[0][0] == plain_generate(target, jobs[0][0], max_new_tokens=8).tolist()

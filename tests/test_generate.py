"""The bridge to `model.generate`: whose block size it is, streaming, stop strings, wrapped targets, side effects."""

import threading

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
    sorting_policy,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation import BaseStreamer

from blockpilot_hf import BlockPilot, DFlashDraftModel

SMALL, LARGE = make_prompt(10, seed=1), make_prompt(12, seed=2)
DICT = {"return_dict_in_generate": True}


def ascii_tokenizer():
    """One printable character per id of the tiny targets, after `<pad>` and `<s>`."""
    letters = [chr(ord("0") + i) for i in range(62)]
    return _byte_level(["<pad>", "<s>", *letters])


def byte_tokenizer():
    """One id per byte after `<pad>` and `<s>`: a character outside ASCII takes two to four tokens."""
    return _byte_level(["<pad>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])


def _byte_level(tokens):
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")


class Recorder(BaseStreamer):
    """Keeps every call as it came."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.clone())

    def end(self):
        self.calls.append("end")

    def as_lists(self):
        return [call if isinstance(call, str) else (tuple(call.shape), call.flatten().tolist()) for call in self.calls]


# Who chooses the block size


@pytest.fixture(scope="module")
def policy(target):
    return sorting_policy(target, SMALL, LARGE)


@pytest.fixture(scope="module")
def plain_of(target):
    return {ids: plain_generate(target, ids, max_new_tokens=9) for ids in (SMALL, LARGE)}


@pytest.fixture(scope="module")
def saved(policy, target, tmp_path_factory):
    """A policy folder, and drafters whose configs name it: by its absolute path, inside their folder, and beside it."""
    root = tmp_path_factory.mktemp("saved")
    policy.save_pretrained(root / "policy")
    policy.save_pretrained(root / "holds" / "inner")
    drafters = {}
    for folder, name in (("names", str(root / "policy")), ("holds", "inner"), ("beside", "../policy")):
        make_drafter(target, policy=name).save_pretrained(root / folder)
        drafters[folder] = DFlashDraftModel.from_pretrained(root / folder).eval()
    return {"policy": str(root / "policy"), **drafters}


def _folder_form(target, recipe, drafter, ids, **kwargs):
    return target.generate(ids, assistant_model=drafter, custom_generate=recipe, trust_remote_code=True, **kwargs)


FORMS = {
    "callable": lambda t, d, p, s, r, ids, **kw: t.generate(ids, custom_generate=BlockPilot(d, p), **kw),
    "callable, policy by keyword": lambda t, d, p, s, r, ids, **kw: t.generate(
        ids, custom_generate=BlockPilot(d), policy=p, **kw
    ),
    "pilot": lambda t, d, p, s, r, ids, **kw: BlockPilot(d, p).generate(t, ids, **kw),
    "pilot, policy folder": lambda t, d, p, s, r, ids, **kw: BlockPilot(d, s["policy"]).generate(t, ids, **kw),
    "pilot, policy by keyword": lambda t, d, p, s, r, ids, **kw: BlockPilot(d).generate(t, ids, policy=p, **kw),
    "pilot, named by the drafter": lambda t, d, p, s, r, ids, **kw: BlockPilot(s["names"]).generate(t, ids, **kw),
    "folder": lambda t, d, p, s, r, ids, **kw: _folder_form(t, r, d, ids, policy=p, **kw),
    "folder, policy folder": lambda t, d, p, s, r, ids, **kw: _folder_form(t, r, d, ids, policy=s["policy"], **kw),
    "folder, named by the drafter": lambda t, d, p, s, r, ids, **kw: _folder_form(t, r, s["names"], ids, **kw),
    "folder, inside the drafter's": lambda t, d, p, s, r, ids, **kw: _folder_form(t, r, s["holds"], ids, **kw),
    "folder, beside the drafter's": lambda t, d, p, s, r, ids, **kw: _folder_form(t, r, s["beside"], ids, **kw),
}


@pytest.mark.parametrize("form", FORMS)
def test_policy_is_obeyed_in_every_call_form(form, target, drafter, policy, saved, recipe, plain_of):
    for ids, block_size in ((SMALL, 4), (LARGE, 8), (SMALL, 4)):
        result = FORMS[form](target, drafter, policy, saved, recipe, ids, max_new_tokens=9, **DICT)
        trace = result.blockpilot
        assert trace.block_size == block_size
        assert {step.block_size for step in trace.steps} == {block_size}
        assert all(len(step.draft_ids) == block_size - 1 for step in trace.steps if step.verify_width > 1)
        assert list(trace.scores) == [4, 8]
        assert max(trace.scores, key=trace.scores.get) == block_size
        assert "policy" in trace.reason
        assert torch.equal(result.sequences, plain_of[ids])


def test_policy_may_read_the_whole_vocabulary(target, drafter, recipe, plain_of):
    policy = sorting_policy(target, SMALL, LARGE, features="logits")
    for ids, block_size in ((SMALL, 4), (LARGE, 8)):
        for form in ("pilot", "folder"):
            result = FORMS[form](target, drafter, policy, None, recipe, ids, max_new_tokens=9, **DICT)
            assert result.blockpilot.block_size == block_size
            assert torch.equal(result.sequences, plain_of[ids])


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 1.5}], ids=["greedy", "sampled"])
def test_policy_chooses_for_every_row_of_a_batch(target, drafter, settings):
    rows = [SMALL, make_prompt(10, seed=2)]
    policy = sorting_policy(target, *rows)
    result = pilot_generate(BlockPilot(drafter, policy), target, torch.cat(rows), max_new_tokens=8, **settings, **DICT)
    assert [row.block_size for row in result.blockpilot.rows] == [4, 8]
    assert result.blockpilot.block_size is None


def _used(pilot, target, **kwargs):
    trace = pilot.generate(target, SMALL, max_new_tokens=3, **DICT, **kwargs).blockpilot
    return trace.block_size, trace.reason, trace.scores


def test_block_size_of_a_call_comes_from_the_nearest_source(target, tmp_path):
    constant_policy(2).save_pretrained(tmp_path / "two")
    naming = make_drafter(target, block_size=7, policy=str(tmp_path / "two"))
    own, given = constant_policy(3), constant_policy(5)
    assert _used(BlockPilot(naming, own), target, policy=given, block_size=6)[0] == 6
    assert _used(BlockPilot(naming, own), target, policy=given)[0] == 5
    assert _used(BlockPilot(naming, own), target, policy=str(tmp_path / "two"))[0] == 2
    assert _used(BlockPilot(naming, own), target, policy=tmp_path / "two")[0] == 2
    assert _used(BlockPilot(naming, own), target)[0] == 3
    assert _used(BlockPilot(naming, tmp_path / "two"), target)[0] == 2
    assert _used(BlockPilot(naming), target)[0] == 2
    # `False` is an answer, not the absence of one.
    assert _used(BlockPilot(naming, own), target, policy=False)[0] == 7
    assert _used(BlockPilot(naming, False), target)[0] == 7
    assert _used(BlockPilot(naming, False), target, policy=given)[0] == 5
    assert _used(BlockPilot(make_drafter(target, block_size=7)), target)[0] == 7


def test_trace_tells_who_chose(target, drafter):
    assert _used(BlockPilot(drafter, constant_policy(3)), target, block_size=6)[1:] == ("fixed by the caller", None)
    size, reason, scores = _used(BlockPilot(drafter, constant_policy(3)), target)
    assert size == 3 and reason.startswith("policy") and list(scores) == [3]
    size, reason, scores = _used(BlockPilot(drafter, False), target)
    assert size == drafter.config.block_size and reason.startswith("no policy") and scores is None


def test_block_size_by_keyword_needs_no_loadable_policy(target):
    """A policy that is not asked is not loaded either."""
    naming = make_drafter(target, policy="/nowhere/policy")
    assert _used(BlockPilot(naming), target, block_size=4)[0] == 4
    assert _used(BlockPilot(naming), target, policy=False)[0] == naming.config.block_size
    with pytest.raises(OSError, match=r"'/nowhere/policy'.*policy=False"):
        _used(BlockPilot(naming), target)


def test_drafters_block_size_without_policy_is_said_once(target, caplog):
    pilot = BlockPilot(
        make_drafter(target, block_size=11), adapt="prompt"
    )  # a size of its own, so a message of its own
    for _ in range(2):
        pilot.generate(target, SMALL, max_new_tokens=3)
        BlockPilot(pilot.drafter, constant_policy(3)).generate(target, SMALL, max_new_tokens=3)
    said = [record.getMessage() for record in caplog.records if "block size 11" in record.getMessage()]
    assert said == ["No policy given or named by the drafter: every prompt uses its block size 11."]


@pytest.mark.parametrize("bad", [0, -1, True, "4", 2.0])
def test_bad_block_size_is_refused_before_any_pass(target, drafter, bad, recipe):
    passes = []
    hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        for call in (
            lambda **kw: BlockPilot(drafter).generate(target, SMALL, **kw),
            lambda **kw: target.generate(SMALL, custom_generate=BlockPilot(drafter), **kw),
            lambda **kw: _folder_form(target, recipe, drafter, SMALL, **kw),
        ):
            with pytest.raises(ValueError, match="`block_size` must be an integer >= 1, got"):
                call(block_size=bad, max_new_tokens=3)
            assert not passes
    finally:
        hook.remove()
    assert _used(BlockPilot(drafter), target, block_size=1)[0] == 1


def test_what_is_no_policy_is_refused(target, drafter):
    for bad in (True, object(), drafter):
        with pytest.raises(TypeError, match=r"`policy` must be a BlockPilot policy.*got "):
            BlockPilot(drafter).generate(target, SMALL, policy=bad, max_new_tokens=3)


def test_what_is_no_drafter_is_refused(target, tmp_path):
    for bad in (target, None, str(tmp_path), torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"A drafter needs `config.target_layer_ids`.*got "):
            BlockPilot(bad)


@pytest.mark.parametrize("name", ["assistant_model", "custom_generate"])
def test_pilot_generate_refuses_what_is_its_own_part(target, drafter, name):
    with pytest.raises(ValueError, match=f"`{name}` is this pilot's own part"):
        BlockPilot(drafter).generate(target, SMALL, max_new_tokens=3, **{name: drafter})
    assert torch.equal(
        BlockPilot(drafter).generate(target, SMALL, max_new_tokens=3, **{name: None}),
        plain_generate(target, SMALL, max_new_tokens=3),
    )


# Streaming


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_new_tokens", [1, 2, 21])
def test_streamer_sees_the_calls_of_plain_generate(target, accuracy, num_new_tokens):
    """The prompt first, then every token alone, then the end, once."""
    expected, seen = Recorder(), Recorder()
    plain = plain_generate(target, SMALL, max_new_tokens=num_new_tokens, streamer=expected)
    scripted_pilot(target, plain, accuracy).generate(target, SMALL, max_new_tokens=num_new_tokens, streamer=seen)
    assert seen.as_lists() == expected.as_lists()
    assert seen.calls[-1] == "end" and len(seen.calls) == num_new_tokens + 2


def test_streamer_sees_nothing_after_the_end_of_text(target):
    """An accepted run may go on after it."""
    answer = plain_generate(target, SMALL, max_new_tokens=20)
    eos = answer[0, SMALL.shape[1] + 4].item()
    expected, seen = Recorder(), Recorder()
    plain = plain_generate(target, SMALL, max_new_tokens=20, eos_token_id=eos, streamer=expected)
    assert plain.shape[1] < answer.shape[1]
    scripted_pilot(target, answer).generate(target, SMALL, max_new_tokens=20, eos_token_id=eos, streamer=seen)
    assert seen.as_lists() == expected.as_lists()


def test_streamer_reaches_the_folder_form(target, drafter, recipe):
    expected, seen = Recorder(), Recorder()
    plain_generate(target, SMALL, max_new_tokens=9, streamer=expected)
    _folder_form(target, recipe, drafter, SMALL, max_new_tokens=9, streamer=seen)
    assert seen.as_lists() == expected.as_lists()


def test_tokens_are_streamed_as_the_steps_commit_them(target):
    """Not at the end: when a step is reported, its tokens have been handed on."""
    seen, lengths = Recorder(), []
    plain = plain_generate(target, SMALL, max_new_tokens=20)
    scripted_pilot(target, plain, 0.5).generate(
        target,
        SMALL,
        max_new_tokens=20,
        streamer=seen,
        on_step=lambda step: lengths.append((len(seen.calls) - 2, len(step.committed_ids))),
    )
    streamed = 0
    for length, committed in lengths:
        streamed += committed
        assert length == streamed
    assert len(lengths) > 2


def test_streamer_takes_one_row(target, drafter):
    seen = Recorder()
    for kwargs in ({"inputs": make_prompt(5, rows=2)}, {"inputs": SMALL, "num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(ValueError, match="A streamer takes one row at a time, got 2 rows"):
            BlockPilot(drafter).generate(target, streamer=seen, max_new_tokens=3, **kwargs)
    assert not seen.calls


class Force(LogitsProcessor):
    """Makes any target write a given text."""

    def __init__(self, prompt_length, token_ids):
        self.prompt_length, self.token_ids = prompt_length, token_ids

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token_ids[input_ids.shape[1] - self.prompt_length]] = 0
        return forced


TEXT = "día 🙂 你好 世界。👩‍🚀 naïve."


class Chunks(TextStreamer):
    def __init__(self, tokenizer, **kwargs):
        super().__init__(tokenizer, **kwargs)
        self.chunks = []

    def on_finalized_text(self, text, stream_end=False):
        self.chunks.append(text)


@pytest.mark.parametrize("skip_prompt", [False, True])
@pytest.mark.parametrize("block_size", [2, 3, 5, 8])
def test_streamed_text_is_whole_where_blocks_split_a_character(block_size, skip_prompt):
    tokenizer = byte_tokenizer()
    target = make_target(vocab_size=len(tokenizer))
    prompt = tokenizer("Schöne Grüße 🙂! ", return_tensors="pt").input_ids
    answer = tokenizer(TEXT).input_ids
    settings = {"max_new_tokens": len(answer), "logits_processor": [Force(prompt.shape[1], answer)]}
    expected, seen = (Chunks(tokenizer, skip_prompt=skip_prompt) for _ in range(2))
    plain = plain_generate(target, prompt, streamer=expected, **settings)
    steps = []
    result = scripted_pilot(target, plain, 1.0, block_size).generate(
        target, prompt, streamer=seen, on_step=steps.append, **settings
    )
    assert torch.equal(result, plain)
    assert seen.chunks == expected.chunks
    assert "".join(seen.chunks) == tokenizer.decode(plain[0, prompt.shape[1] if skip_prompt else 0 :])
    assert TEXT in "".join(seen.chunks) and "\ufffd" not in "".join(seen.chunks)
    ends = [tokenizer.decode(step.committed_ids) for step in steps]
    assert any("\ufffd" in text for text in ends), "no block boundary inside a character: the test says nothing"


def test_iterator_streamer_works_from_a_thread(target):
    tokenizer = ascii_tokenizer()
    plain = plain_generate(target, SMALL, max_new_tokens=30)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    pilot = scripted_pilot(target, plain, 0.5)
    worker = threading.Thread(
        target=pilot.generate, args=(target, SMALL), kwargs={"streamer": streamer, "max_new_tokens": 30}
    )
    worker.start()
    text = "".join(streamer)
    worker.join()
    assert text == tokenizer.decode(plain[0, SMALL.shape[1] :])


def test_exception_of_the_caller_ends_the_call_within_the_step_and_leaves_nothing(target):
    """How a stop button works: after it no pass of the target, and the next call is as if nothing had been."""
    plain = plain_generate(target, SMALL, max_new_tokens=40)
    pilot = scripted_pilot(target, plain, 0.5)
    passes, steps = [], []

    def stop(step):
        steps.append(step)
        if len(steps) == 2:
            raise KeyboardInterrupt

    hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(KeyboardInterrupt):
            pilot.generate(target, SMALL, max_new_tokens=40, on_step=stop)
    finally:
        hook.remove()
    assert len(passes) == 3  # the prefill and two steps
    assert torch.equal(pilot.generate(target, SMALL, max_new_tokens=40), plain)


# Stop strings


def _stop_string(target, tokenizer, ids, position):
    """Two characters of the plain answer, ending at a new-token position inside a block of 8."""
    answer = plain_generate(target, ids, max_new_tokens=24)[0, ids.shape[1] :]
    return tokenizer.decode(answer[position - 1 : position + 1])


def _by_keyword(target, stop):
    return {"stop_strings": stop}


def _in_config(target, stop):
    return {"generation_config": GenerationConfig(stop_strings=stop, max_new_tokens=24, pad_token_id=0)}


def _in_models_config(target, stop):
    target.generation_config.stop_strings = stop
    return {}


@pytest.mark.parametrize("given", [_by_keyword, _in_config, _in_models_config])
@pytest.mark.parametrize("position", [1, 5, 8])
def test_stop_strings_end_where_plain_generate_ends(given, position):
    target, tokenizer = make_target(), ascii_tokenizer()
    stop = _stop_string(target, tokenizer, SMALL, position)
    uncut = plain_generate(target, SMALL, max_new_tokens=24)
    expected, seen = Recorder(), Recorder()
    for stops, accuracy in ((stop, 1.0), (["no such text", stop], 0.5)):
        settings = {"tokenizer": tokenizer, **given(target, stops)}
        settings.update({} if "generation_config" in settings else {"max_new_tokens": 24})
        plain = plain_generate(target, SMALL, streamer=expected, **settings)
        assert plain.shape[1] < uncut.shape[1]
        result = scripted_pilot(target, uncut, accuracy).generate(target, SMALL, streamer=seen, **settings)
        assert torch.equal(result, plain)
        assert seen.as_lists() == expected.as_lists()


def test_stop_strings_work_in_the_folder_form_and_with_criteria_of_the_user(target, drafter, recipe):
    tokenizer = ascii_tokenizer()
    stop = _stop_string(target, tokenizer, SMALL, 6)
    settings = {"stop_strings": stop, "tokenizer": tokenizer, "max_new_tokens": 24}
    plain = plain_generate(target, SMALL, **settings)
    assert plain.shape[1] == SMALL.shape[1] + 7
    assert torch.equal(_folder_form(target, recipe, drafter, SMALL, **settings), plain)

    def at_length_four(input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= SMALL.shape[1] + 4)

    criteria = [at_length_four]
    settings["stopping_criteria"] = criteria
    plain = plain_generate(target, SMALL, **settings)
    assert plain.shape[1] == SMALL.shape[1] + 4
    assert torch.equal(BlockPilot(drafter).generate(target, SMALL, **settings), plain)
    assert criteria == [at_length_four]


def test_stop_strings_without_tokenizer_are_refused_with_the_remedy(target, drafter):
    for kwargs in ({"stop_strings": "a"}, {"generation_config": GenerationConfig(stop_strings=["a"])}):
        with pytest.raises(ValueError, match=r"`stop_strings` needs the tokenizer of the target\. Pass `tokenizer=`"):
            BlockPilot(drafter).generate(target, SMALL, **kwargs)
    BlockPilot(drafter).generate(target, SMALL, tokenizer=ascii_tokenizer(), max_new_tokens=2)


def test_stop_strings_end_each_row_of_a_batch_alone(target, drafter):
    tokenizer = ascii_tokenizer()
    rows = torch.cat([make_prompt(10, seed=1), make_prompt(10, seed=3)])
    stops = [_stop_string(target, tokenizer, rows[i : i + 1], position) for i, position in enumerate((4, 9))]
    # Plain `generate` pads finished rows only where there is an end-of-text id: one that does not occur here.
    occurring = plain_generate(target, rows, max_new_tokens=16).flatten().tolist()
    eos = next(token_id for token_id in range(2, 60) if token_id not in occurring)
    settings = {"max_new_tokens": 16, "tokenizer": tokenizer, "stop_strings": stops, "eos_token_id": eos}
    plain = plain_generate(target, rows, **settings)
    assert (plain[:, -1] == 0).any()
    assert torch.equal(BlockPilot(drafter).generate(target, rows, **settings), plain)


# Wrapped targets


@pytest.mark.parametrize(
    "wrap",
    [
        lambda target: torch.compile(target, backend="eager"),
        nn.DataParallel,
        lambda target: torch.compile(nn.DataParallel(target), backend="eager"),
    ],
    ids=["torch.compile", "data parallel", "both"],
)
def test_wrapped_target_gives_the_text_of_the_target(target, wrap):
    plain = plain_generate(target, SMALL, max_new_tokens=20)
    result = scripted_pilot(target, plain, 0.5).generate(wrap(target), SMALL, max_new_tokens=20, **DICT)
    assert torch.equal(result.sequences, plain)
    assert result.blockpilot.acceptance_length > 1


def test_peft_target_gives_the_adapters_text_merged_or_not(recipe):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = make_target()
    without = plain_generate(base, SMALL, max_new_tokens=20)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    ).eval()
    plain = adapted.generate(input_ids=SMALL, max_new_tokens=20)
    assert not torch.equal(plain, without)
    pilot = scripted_pilot(base, plain, 0.5)
    drafter = make_drafter(base)
    assert torch.equal(pilot.generate(adapted, SMALL, max_new_tokens=20), plain)
    assert torch.equal(adapted.generate(input_ids=SMALL, custom_generate=pilot, max_new_tokens=20), plain)
    by_folder = {"assistant_model": drafter, "custom_generate": recipe, "trust_remote_code": True}
    assert torch.equal(adapted.generate(input_ids=SMALL, **by_folder, max_new_tokens=20), plain)
    merged = adapted.merge_and_unload()
    assert torch.equal(
        pilot.generate(merged, SMALL, max_new_tokens=20), plain_generate(merged, SMALL, max_new_tokens=20)
    )


def test_generation_settings_of_a_wrapped_target_are_the_targets(drafter):
    target, tokenizer = make_target(), ascii_tokenizer()
    target.generation_config.stop_strings = _stop_string(target, tokenizer, SMALL, 5)
    plain = plain_generate(target, SMALL, max_new_tokens=20, tokenizer=tokenizer)
    result = BlockPilot(drafter).generate(nn.DataParallel(target), SMALL, max_new_tokens=20, tokenizer=tokenizer)
    assert torch.equal(result, plain)


def test_nothing_that_is_returned_carries_a_gradient(target, drafter):
    result = BlockPilot(drafter).generate(
        target, SMALL, max_new_tokens=6, output_scores=True, output_logits=True, output_hidden_states=True, **DICT
    )
    assert torch.is_grad_enabled()
    tensors = [*result.scores, *result.logits, *(state for step in result.hidden_states for state in step)]
    assert tensors and not any(tensor.requires_grad for tensor in tensors)


# Side effects


def _snapshot(*models):
    def hooks(module):
        names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        return [len(getattr(m, name)) for m in module.modules() for name in names]

    return [
        (
            model.config.to_dict(),
            sorted(vars(model.config)),
            model.generation_config.to_dict() if getattr(model, "generation_config", None) is not None else None,
            sorted(vars(model)),
            sorted(name for name, _ in model.named_buffers()),
            hooks(model),
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
        )
        for model in models
    ]


@pytest.mark.parametrize("fails", [False, True], ids=["success", "exception"])
def test_call_leaves_models_and_their_configs_as_they_were(target, drafter, recipe, tmp_path, fails):
    policy = sorting_policy(target, SMALL, LARGE)
    before = _snapshot(target, drafter, policy)
    pilot_before = dict(vars(pilot := BlockPilot(drafter, policy)))

    def on_step(step):
        if fails:
            raise RuntimeError("stop")

    settings = {"max_new_tokens": 12, "output_hidden_states": True, "on_step": on_step, "do_sample": True, **DICT}
    for call in (
        lambda: pilot.generate(target, SMALL, **settings),
        lambda: target.generate(SMALL, custom_generate=pilot, **settings),
        lambda: _folder_form(target, recipe, drafter, SMALL, policy=policy, **settings),
    ):
        if fails:
            with pytest.raises(RuntimeError, match="stop"):
                call()
        else:
            call()
        assert _snapshot(target, drafter, policy) == before
        assert vars(pilot) == pilot_before
    for model in (target, drafter, policy):
        model.save_pretrained(tmp_path / type(model).__name__)


def test_arguments_of_a_call_are_not_changed(target, drafter):
    config = GenerationConfig(max_new_tokens=8, stop_strings=["ab"], pad_token_id=0)
    before, criteria = config.to_dict(), []
    BlockPilot(drafter).generate(
        target, SMALL, generation_config=config, stopping_criteria=criteria, tokenizer=ascii_tokenizer()
    )
    assert config.to_dict() == before and criteria == []


# Where else `generate` is called from


def test_prompt_may_come_first_or_by_either_name(target, drafter):
    plain = plain_generate(target, SMALL, max_new_tokens=6)
    pilot = BlockPilot(drafter)
    for args, kwargs in (((SMALL,), {}), ((), {"inputs": SMALL}), ((), {"input_ids": SMALL})):
        assert torch.equal(pilot.generate(target, *args, max_new_tokens=6, **kwargs), plain)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_empty_cache_of_the_user_is_filled_and_returned(target, name):
    plain = plain_generate(target, SMALL, max_new_tokens=12, **DICT)
    cache = DynamicCache(config=target.config)
    result = scripted_pilot(target, plain.sequences, 0.5).generate(
        target, SMALL, max_new_tokens=12, **{name: cache}, **DICT
    )
    assert result.cache is cache
    assert cache.get_seq_length() == plain.cache.get_seq_length()
    assert torch.equal(result.sequences, plain.sequences)


def test_pipeline_takes_the_pilot_and_the_recipe(target, drafter, recipe):
    writer = pipeline("text-generation", model=target, tokenizer=ascii_tokenizer())
    settings = {"max_new_tokens": 15, "do_sample": False}
    plain = writer("0123ABCabc", **settings)
    steps = []
    by_pilot = writer("0123ABCabc", custom_generate=BlockPilot(drafter), on_step=steps.append, **settings)
    assert by_pilot == plain and steps
    by_folder = {"assistant_model": drafter, "custom_generate": recipe, "trust_remote_code": True}
    assert writer("0123ABCabc", **by_folder, **settings) == plain

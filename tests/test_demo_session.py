"""The Space without its page: requests, answers that grow, stopping, and one at a time."""

import gc
import itertools
import json
import threading
import time
import weakref

import pytest
import torch
from conftest import plain_generate
from demo_pair import TEXT, ready, tiny_pair, writing_pair

from answer import Answer
from blockpilot_hf.display import are_accepted
from blockpilot_hf.prompts import encode_prompt
from models import Models
from request import BY_SECONDS, FIXED, IN_FLIGHT, PAPER, RULES, Limits, Request
from session import Session

LIMITS = Limits(max_new_tokens=500, max_prompt_tokens=200)


@pytest.fixture(scope="module")
def tiny():
    return Session(ready(tiny_pair()), LIMITS)


def last(answers):
    return list(answers)[-1]


def run(session, prompt="abc", visitor="", **settings):
    return last(session.run(Request(prompt, **settings), visitor))


def eventually(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


# Requests


@pytest.mark.parametrize(
    ("bad", "message", "good"),
    [
        ({"prompt": " \n"}, "The prompt is empty", {"prompt": " a"}),
        ({"prompt": None}, "The prompt is empty", {"prompt": "None"}),
        ({"prompt": "a\ud83d"}, "half a character", {"prompt": "a\U0001f642"}),
        ({"prompt": "a" * 12_801}, "12,801 characters, and 200 tokens", {"prompt": "a" * 12_800}),
        ({"max_new_tokens": 0}, "from 1 to 500, got 0", {"max_new_tokens": 1}),
        ({"max_new_tokens": 501}, "from 1 to 500, got 501", {"max_new_tokens": 500.0}),
        ({"max_new_tokens": 3.5}, "whole number from 1 to 500, got 3.5", {"max_new_tokens": 3}),
        ({"max_new_tokens": True}, "got True", {"max_new_tokens": 1}),
        ({"temperature": -0.1}, "from 0 .greedy. to 5, got -0.1", {"temperature": 0}),
        ({"temperature": float("nan")}, "got nan", {"temperature": 5}),
        ({"temperature": "1"}, "got '1'", {"temperature": 1}),
        ({"seed": -1}, "`seed` must be a whole number from 0", {"seed": 2**32 - 1}),
        ({"seed": None}, "got None", {"seed": 0}),
        ({"rule": "fast"}, "`rule` must be one of 'in flight', 'by seconds', 'paper', 'fixed size'", {"rule": PAPER}),
        ({"rule": FIXED, "block_size": 17}, "from 1 to 16, got 17", {"rule": FIXED, "block_size": 16}),
        ({"compare": "yes"}, "`compare` must be true or false", {"compare": True}),
    ],
)
def test_what_is_not_allowed_is_refused_with_a_message(bad, message, good):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": "a", **bad}).checked(LIMITS)
    checked = Request(**{"prompt": "a", **good}).checked(LIMITS)
    assert all(getattr(checked, name) == value for name, value in good.items())
    assert isinstance(checked.max_new_tokens, int) and isinstance(checked.temperature, float)


def test_limits_come_from_the_environment():
    assert Limits.from_environment({}) == Limits()
    assert Limits.from_environment({"MAX_NEW_TOKENS": "7", "MAX_PROMPT_TOKENS": ""}) == Limits(max_new_tokens=7)
    for text in ("0", "-1", "many", "1.5"):
        with pytest.raises(ValueError, match="`MAX_PROMPT_TOKENS` must be a whole number from 1"):
            Limits.from_environment({"MAX_PROMPT_TOKENS": text})


def test_a_long_prompt_is_counted_in_tokens(tiny):
    """The template adds two tokens, and every ASCII character is one."""
    assert run(tiny, "a" * 198, max_new_tokens=1).state == "done"
    with pytest.raises(ValueError, match="has 201 tokens, and 200 are allowed with 1 new"):
        run(tiny, "a" * 199, max_new_tokens=1)
    with pytest.raises(ValueError, match="has 13 tokens, and 12 are allowed with 500 new"):  # of the target's 512
        run(tiny, "a" * 11, max_new_tokens=500)


# Answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_the_answer_is_plain_generates_by_every_rule(tiny, rule, temperature):
    answer = run(tiny, rule=rule, block_size=3, temperature=temperature, seed=7, max_new_tokens=30, compare=True)
    loaded = tiny.models.get()
    ids = encode_prompt(loaded.tokenizer, "abc")
    settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    plain = plain_generate(loaded.target, ids, seed=7, max_new_tokens=30, **(settings or {"do_sample": False}))
    new = plain[0, ids.shape[1] :].tolist()
    assert answer.token_ids == new and answer.text == loaded.tokenizer.decode(new, skip_special_tokens=True)
    assert (answer.state, answer.finish) == ("done", "length")
    assert answer.plain["is_identical"] and answer.plain["first_difference"] is None
    ours, theirs = 30 / answer.total_s, 30 / answer.plain["total_s"]
    assert answer.plain["ratio"] == pytest.approx(ours / theirs) and answer.plain["tokens_per_second"] == theirs


def test_rules_decide_as_they_say(tiny):
    traces = {rule: run(tiny, rule=rule, block_size=3, max_new_tokens=20).trace for rule in RULES}
    assert [traces[rule].adapt for rule in RULES] == ["flight", "prompt", "prompt", "prompt"]
    assert list(traces[IN_FLIGHT].scores) == list(traces[BY_SECONDS].scores) == [1, 2, 4, 8]
    assert list(traces[PAPER].scores) == [2, 4, 8] and traces[FIXED].scores is None
    assert traces[PAPER].block_size == max(traces[PAPER].scores, key=traces[PAPER].scores.get)
    assert traces[FIXED].block_size == 3 and "fixed" in traces[FIXED].reason


@pytest.mark.parametrize("rule", [BY_SECONDS, PAPER])
def test_a_rule_without_its_policy_is_refused(rule):
    session = Session(ready(writing_pair()), LIMITS)
    with pytest.raises(ValueError, match=f"{rule}' needs a policy that .* Available: in flight, fixed size"):
        run(session, rule=rule)
    assert session.info()["rules"] == [IN_FLIGHT, FIXED]
    assert run(session, rule=FIXED).state == "done"


def test_an_answer_grows_step_by_step_and_the_decision_comes_before_the_first(monkeypatch):
    session = Session(ready(writing_pair(seconds_per_pass=0.15)), LIMITS)
    states, texts, steps = [], [], []
    for answer in session.run(Request("abc", rule=FIXED, block_size=4, max_new_tokens=40)):
        states.append(answer.state)
        texts.append(answer.text)
        steps.append(len(answer.trace.steps) if answer.trace else None)
        assert steps[-1] is None or answer.prefill["top_tokens"][0]["text"] == "d"
    assert list(dict.fromkeys(states)) == ["prefill", "decoding", "done"]
    assert (
        0 in steps
        and max(b - a for a, b in zip(steps[steps.index(0) :], steps[steps.index(0) + 1 :], strict=False)) == 1
    )
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert answer.record()["token_ids"] == answer.token_ids and len(answer.token_ids) == 40


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8])
def test_tokens_are_whole_characters_of_the_right_kind(block_size):
    """One token is one byte here, so that every block may end inside a character."""
    loaded = writing_pair()
    answers = Session(ready(loaded), LIMITS).run(Request("é", rule=FIXED, block_size=block_size, max_new_tokens=500))
    for answer in answers:
        assert "\ufffd" not in answer.text and TEXT.startswith(answer.text)
    assert answer.text == TEXT and answer.finish == "end"
    flags = [False, *(flag for step in answer.trace.steps for flag in are_accepted(step))]
    steps = [0, *(n for n, step in enumerate(answer.trace.steps, start=1) for _ in step.committed_ids)]
    end = 0
    for token in answer.tokens:
        start, end = end, end + len(token.text.encode())
        assert token.is_accepted == all(flags[start:end])
        assert token.step == steps[end - 1]
    assert any(len(token.text.encode()) > 1 for token in answer.tokens)
    for step, discarded in zip(answer.trace.steps, answer.discarded, strict=True):
        assert discarded == loaded.tokenizer.decode(step.draft_ids[sum(are_accepted(step)) :])


def test_a_character_that_the_limit_cuts_is_shown_as_such():
    cut = len(TEXT[: TEXT.index("🙂")].encode()) + 2
    answer = run(Session(ready(writing_pair()), LIMITS), rule=FIXED, max_new_tokens=cut)
    assert answer.text == TEXT[: TEXT.index("🙂")] + "\ufffd" and answer.finish == "length"


def test_a_difference_is_told():
    loaded = writing_pair("same here")
    generate, other = type(loaded.target).generate, writing_pair("same there")

    class Target(type(loaded.target)):
        def generate(self, *args, **kwargs):
            return generate(self if "custom_generate" in kwargs else other.target, *args, **kwargs)

    loaded.target.__class__ = Target
    answer = run(Session(ready(loaded), LIMITS), compare=True)
    assert (answer.text, answer.plain["is_identical"], answer.plain["first_difference"]) == ("same here", False, 5)
    assert answer.plain["tokens_there"] == ["h", "t"]
    # The score of what a target is to write is raised by 50: far from what rounding changes.
    assert answer.plain["gap"] < -10 and answer.plain["is_near_tie"] is False
    drawn = run(Session(ready(loaded), LIMITS), compare=True, temperature=0.01)
    assert (drawn.plain["first_difference"], drawn.plain["gap"], drawn.plain["is_near_tie"]) == (5, None, None)


# Stopping, leaving, failing


def slow():
    return Session(ready(writing_pair(ends=False, seconds_per_pass=0.05)), LIMITS)


def started(session, visitor="a", **settings):
    answers = session.run(Request("abc", rule=FIXED, block_size=4, max_new_tokens=500, **settings), visitor)
    for answer in answers:
        if answer.trace is not None and len(answer.token_ids) >= 5:
            return answers, answer


def test_stop_ends_within_a_step_and_keeps_what_was_decoded():
    session = slow()
    answers, answer = started(session)
    steps = len(answer.trace.steps)
    assert session.stop("b") is None and not answer.is_over
    assert session.stop("a") is answer
    assert (answer.state, answer.finish) == ("stopped", "stopped")
    assert len(answer.trace.steps) <= steps + 2 and answer.trace.num_new_tokens == len(answer.token_ids) < 60
    assert last(answers) is answer and session.stop("a") is None
    assert not session.info()["is_busy"]
    assert run(session, max_new_tokens=3, visitor="b").state == "done"


def test_who_gives_up_frees_the_models():
    """A closed tab or a cancelled call closes the generator."""
    session = slow()
    loaded = session.models.get()
    hooks = len(loaded.target._forward_hooks)
    caches = []
    original = loaded.target.forward

    def forward(*args, **kwargs):
        caches.append(weakref.ref(kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]))
        return original(*args, **kwargs)

    loaded.target.forward = forward
    answers, answer = started(session)
    answers.close()
    eventually(lambda: not session.info()["is_busy"])
    eventually(lambda: not any(thread.name == "decode" for thread in threading.enumerate()))
    passes = len(caches)
    time.sleep(0.2)
    assert len(caches) == passes < 60
    del answers, answer
    session._flight = None
    gc.collect()
    assert caches and all(cache() is None for cache in caches)
    assert len(loaded.target._forward_hooks) == hooks


def test_the_next_visitor_waits_for_a_step_only():
    session = slow()
    answers, _ = started(session)
    answers.close()
    start = time.monotonic()
    assert run(session, visitor="b", max_new_tokens=2, rule=FIXED).state == "done"
    assert time.monotonic() - start < 5


def test_a_comparison_can_be_stopped():
    session = slow()
    answers = session.run(Request("abc", rule=FIXED, max_new_tokens=40, compare=True), "a")
    answer = next(a for a in answers if a.state == "comparing" and a.num_plain_tokens > 1)
    assert session.stop("a") is answer and answer.state == "stopped" and answer.finish == "length"
    assert answer.plain["state"] == "stopped" and "ratio" not in answer.plain


def test_two_at_once_take_turns_and_get_their_own_answers(tiny):
    prompts = [f"prompt {i}" for i in range(4)]
    alone = [
        run(tiny, prompt, max_new_tokens=20, temperature=1.0, seed=i).token_ids for i, prompt in enumerate(prompts)
    ]
    assert len({tuple(ids) for ids in alone}) == 4
    together = {}

    def ask(i):
        together[i] = run(tiny, prompts[i], visitor=str(i), max_new_tokens=20, temperature=1.0, seed=i).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(4)] == alone


def test_a_failure_is_an_answer_and_the_next_one_works():
    loaded = writing_pair()
    session = Session(ready(loaded), LIMITS)

    def fail(*args):
        hook.remove()
        raise RuntimeError("out of memory")

    hook = loaded.target.register_forward_pre_hook(fail)
    answer = run(session)
    assert (answer.state, answer.message) == ("failed", "out of memory")
    assert run(session, rule=FIXED, max_new_tokens=500).text == TEXT


def test_models_load_once_and_again_after_a_failure():
    calls = []

    def load():
        calls.append(None)
        if len(calls) == 1:
            raise OSError("no network")
        time.sleep(0.1)
        return pair

    pair = writing_pair()
    session = Session(Models(load), LIMITS)
    assert session.info()["state"] == "not loaded" and not calls
    with pytest.raises(ValueError, match="empty"):
        run(session, "")
    assert not calls  # a request that is refused loads nothing
    answer = run(session)
    assert answer.state == "failed" and "no network" in answer.message and session.info()["state"] == "failed"
    loading = [session.models.load_in_background() for _ in range(3)]
    states = [answer.state for answer in session.run(Request("abc", max_new_tokens=2))]
    assert states[0] == "loading" and states[-1] == "done"
    for thread in loading:
        thread.join()
    assert len(calls) == 2 and session.info()["state"] == "ready"


def test_a_record_is_json_and_holds_the_trace(tiny):
    answer = run(tiny, max_new_tokens=12, compare=True)
    read = json.loads(json.dumps(answer.record(), allow_nan=False))
    assert read["scores"] == answer.record()["scores"]  # keys as JSON has them, before it is JSON too
    trace = json.loads(json.dumps(answer.trace.to_dict()))
    assert {key: read[key] for key in trace} == trace
    assert read["plain"] == answer.plain and read["request"]["prompt"] == "abc" and read["models"]["target"] == "tiny"
    assert json.loads(json.dumps(Answer(Request("a")).record()))["state"] == "loading"


def test_prefill_facts_are_the_targets_distribution(tiny):
    answer = run(tiny, max_new_tokens=1, temperature=2.0)
    loaded = tiny.models.get()
    with torch.no_grad():
        p = loaded.target(encode_prompt(loaded.tokenizer, "abc")).logits[0, -1].softmax(-1)
    top = p.topk(5)
    assert [t["text"] for t in answer.prefill["top_tokens"]] == [loaded.tokenizer.decode([i]) for i in top.indices]
    assert [t["probability"] for t in answer.prefill["top_tokens"]] == pytest.approx(top.values.tolist(), rel=1e-4)
    assert answer.prefill["entropy"] == pytest.approx(float(-(p * p.log()).sum()), rel=1e-3)

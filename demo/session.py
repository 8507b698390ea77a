"""What the Space does, without its page: requests and their limits, models loaded once, answers that grow.

A [`Session`] answers one request at a time. [`Session.run`] is a generator: decoding runs in a thread of its own, and
whoever iterates sees an [`Answer`] that has grown; whoever stops iterating ends the decoding within a step. This module
knows nothing of Gradio and HTML.
"""

import math
import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from models import Loaded, Models
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from blockpilot_hf.display import PieceStream, are_accepted
from blockpilot_hf.prompts import encode_prompt
from blockpilot_hf.trace import DecodeTrace, StepRecord

IN_FLIGHT, BY_SECONDS, PAPER, FIXED = RULES = ("in flight", "by seconds", "paper", "fixed size")
MAX_BLOCK_SIZE = 16
MAX_TEMPERATURE = 5.0
MAX_SEED = 2**32 - 1
_TOP_TOKENS = 5
# No tokenizer in use makes so few tokens of so many characters: longer prompts are not even encoded.
_CHARACTERS_PER_TOKEN = 64
# Steps of a fast model come quicker than pages can be drawn.
_SECONDS_BETWEEN_VIEWS = 0.05


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    max_new_tokens: int = 256
    max_prompt_tokens: int = 512

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Limits":
        """`MAX_NEW_TOKENS` and `MAX_PROMPT_TOKENS`, whole numbers from 1."""
        given = {}
        for name in ("max_new_tokens", "max_prompt_tokens"):
            text = environment.get(name.upper(), "").strip()
            if text:
                if not text.isdecimal() or int(text) < 1:
                    raise ValueError(f"`{name.upper()}` must be a whole number from 1, got {text!r}.")
                given[name] = int(text)
        return cls(**given)


@dataclass(frozen=True)
class Request:
    """One prompt and its settings. `block_size` counts for the rule `"fixed size"` only."""

    prompt: str
    max_new_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0
    rule: str = IN_FLIGHT
    block_size: int = 8
    compare: bool = False

    def checked(self, limits: Limits) -> "Request":
        """
        The same with whole numbers as such: from JSON and from sliders they may come as floats.

        Raises:
            `ValueError`: for the first value that is not allowed, with what is.
        """
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise ValueError("The prompt is empty. Type a question or a task.")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"The prompt holds half a character (position {error.start}). Remove it.") from error
        most = limits.max_prompt_tokens * _CHARACTERS_PER_TOKEN
        if len(self.prompt) > most:
            raise ValueError(
                f"The prompt has {len(self.prompt):,} characters, and {limits.max_prompt_tokens:,} tokens are allowed. "
                "Shorten it."
            )
        if self.rule not in RULES:
            raise ValueError(f"`rule` must be one of {', '.join(map(repr, RULES))}, got {self.rule!r}.")
        if not isinstance(self.compare, bool):
            raise ValueError(f"`compare` must be true or false, got {self.compare!r}.")
        temperature = self.temperature
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not is_number or not 0.0 <= temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"`temperature` must be a number from 0 (greedy) to {MAX_TEMPERATURE:g}, got {temperature!r}."
            )
        return replace(
            self,
            temperature=float(temperature),
            max_new_tokens=_whole("max_new_tokens", self.max_new_tokens, 1, limits.max_new_tokens),
            seed=_whole("seed", self.seed, 0, MAX_SEED),
            block_size=_whole("block_size", self.block_size, 1, MAX_BLOCK_SIZE),
        )


def _whole(name: str, value: Any, least: int, most: int) -> int:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_whole or value != int(value) or not least <= value <= most:
        raise ValueError(f"`{name}` must be a whole number from {least:,} to {most:,}, got {value!r}.")
    return int(value)


@dataclass(frozen=True)
class Token:
    """
    Text that one token made whole. Where a character takes several tokens, it is all of theirs.

    Args:
        text (`str`): Whole characters.
        is_accepted (`bool`): Drafted and accepted; else the target's own pick is in it.
        step (`int`): Verification step from 1; 0 is the prefill.
    """

    text: str
    is_accepted: bool
    step: int


@dataclass
class Answer:
    """
    What is known of an answer so far.

    Args:
        state (`str`):
            `"loading"`, `"prefill"`, `"decoding"`, `"comparing"`, then `"done"`, `"stopped"` or `"failed"`.
        message (`str`): Of a failure.
        prefill (`dict`, *optional*): `top_tokens` (text and probability) and `entropy` in nats, as the policy sees them.
        trace (`DecodeTrace`, *optional*): Since the block size is chosen; grows.
        tokens (`list[Token]`): Their texts are `text`.
        discarded (`list[str]`): By step, the drafted text that was not kept.
        total_s (`float`, *optional*): Seconds of the whole call, once it is over.
        finish (`str`): `"end"`: the target ended it. `"length"`: all tokens asked for. `"stopped"`: by the visitor.
        plain (`dict`, *optional*): Plain decoding of the same prompt and seed, and how the two compare.
    """

    request: Request
    state: str = "loading"
    message: str = ""
    num_prompt_tokens: int = 0
    prefill: dict[str, Any] | None = None
    trace: DecodeTrace | None = None
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    total_s: float | None = None
    finish: str = ""
    plain: dict[str, Any] | None = None
    num_plain_tokens: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All of it so far; held back is what ends inside a character."""
        return "".join(token.text for token in self.tokens)

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "stopped", "failed")

    def record(self) -> dict[str, Any]:
        """The trace as JSON-ready values, and with it the request, the prefill, the comparison and the models."""
        return {
            **(DecodeTrace() if self.trace is None else self.trace).to_dict(),
            "state": self.state,
            "finish": self.finish,
            "total_s": self.total_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "token_ids": list(self.token_ids),
            "prefill": self.prefill,
            "plain": self.plain,
            "request": asdict(self.request),
            "models": dict(self.facts),
        }


class Session:
    """
    The one place where answers are made, one at a time.

    Args:
        models ([`Models`]): Loaded at the first request, or before.
        limits ([`Limits`]): Of requests.
    """

    def __init__(self, models: Models, limits: Limits | None = None):
        self.models = models
        self.limits = limits or Limits()
        self._turn = threading.Lock()  # held by the thread that decodes
        # Of the process kind: a GPU may be lent to a forked process, which has to see it too.
        self._stop = multiprocessing.Event()
        self._visitor: str | None = None
        self._last: dict[str, Answer] = {}

    def info(self) -> dict[str, Any]:
        """State, models and limits; looks only, so it answers while others decode."""
        loaded = self.models.loaded
        return {
            "state": self.models.state,
            "is_busy": self._turn.locked(),
            "limits": asdict(self.limits),
            "rules": list(RULES if loaded is None else loaded_rules(loaded)),
            "models": {} if loaded is None else dict(loaded.facts),
        }

    def run(self, request: Request, visitor: str = "") -> Iterator[Answer]:
        """
        Answer a request; yields the same [`Answer`] again whenever it has grown, the last time when it is over.

        Args:
            request ([`Request`]): Checked before anything is loaded.
            visitor (`str`): Who asks, for [`stop`].

        Raises:
            `ValueError`: for a request that is not allowed.
        """
        answer = Answer(request.checked(self.limits))
        yield answer
        try:
            loaded = self.models.get()
            input_ids = self._encoded(loaded, answer.request)
            settings = _rule_settings(loaded, answer.request)
        except ValueError:
            raise
        except Exception as error:  # whatever loading raises is the visitor's to read, and the next one tries again
            answer.state, answer.message = "failed", f"The models cannot be loaded: {error}"
            yield answer
            return
        answer.facts, answer.num_prompt_tokens, answer.state = dict(loaded.facts), input_ids.shape[1], "prefill"
        yield answer

        events: queue.SimpleQueue = queue.SimpleQueue()
        self._turn.acquire()  # an abandoned answer ends within a step
        self._stop.clear()
        self._visitor = visitor
        self._last[visitor] = answer
        work = _Work(loaded, answer.request, input_ids, settings, self._stop, events)
        pieces = PieceStream(loaded.tokenizer)

        def decode() -> None:
            try:
                work.run()
            except BaseException as error:
                events.put(("failed", error))
            finally:
                self._visitor = None
                self._turn.release()
                events.put(("over",))

        threading.Thread(target=decode, name="decode", daemon=True).start()
        try:
            is_over = False
            while not is_over:
                waiting = [events.get()]
                while not events.empty():
                    waiting.append(events.get())
                for name, *values in waiting:
                    is_over = is_over or name == "over"
                    if name != "over":
                        _grow(answer, pieces, loaded, name, *values)
                if is_over and not answer.is_over:
                    answer.state = "stopped" if "stopped" in (answer.finish, (answer.plain or {}).get("state")) else "done"
                yield answer
                if not is_over:
                    time.sleep(_SECONDS_BETWEEN_VIEWS)
        finally:
            # Also where the iterating was given up: a closed tab, a cancelled call.
            if self._last.get(visitor) is answer:
                del self._last[visitor]
            if not is_over:
                self._stop.set()

    def stop(self, visitor: str) -> bool:
        """End the visitor's answer within a step; whether one was being made."""
        if self._visitor != visitor:
            return False
        self._stop.set()
        return True

    def _encoded(self, loaded: Loaded, request: Request) -> torch.LongTensor:
        input_ids = encode_prompt(loaded.tokenizer, request.prompt)
        length, most = input_ids.shape[1], self.limits.max_prompt_tokens
        positions = getattr(loaded.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if positions:
            most = min(most, positions - request.max_new_tokens)
        if length > most:
            raise ValueError(
                f"The prompt has {length:,} tokens, and {max(most, 0):,} are allowed for {request.max_new_tokens:,} new "
                "ones. Shorten it."
            )
        return input_ids.to(loaded.target.device)


def loaded_rules(loaded: Loaded) -> list[str]:
    """The rules that these models have what it takes for."""
    has = {IN_FLIGHT: True, FIXED: True, BY_SECONDS: loaded.curve_policy is not None, PAPER: loaded.paper_policy is not None}
    return [rule for rule in RULES if has[rule]]


def _rule_settings(loaded: Loaded, request: Request) -> dict[str, Any]:
    """Keywords of `BlockPilot.generate`."""
    rule = request.rule
    if rule not in loaded_rules(loaded):
        head = "predicts acceptance lengths" if rule == BY_SECONDS else "names one size, as in the paper"
        raise ValueError(
            f"The rule {rule!r} needs a policy that {head}, and there is none for these models. Available: "
            f"{', '.join(loaded_rules(loaded))}."
        )
    if rule == FIXED:
        return {"block_size": request.block_size}
    if rule == PAPER:
        return {"adapt": "prompt", "policy": loaded.paper_policy}
    return {"adapt": "flight" if rule == IN_FLIGHT else "prompt", "policy": loaded.curve_policy or False}


def _grow(answer: Answer, pieces: PieceStream, loaded: Loaded, name: str, *values: Any) -> None:
    """Take one event of the decoding thread into the answer."""
    if name == "prefilled":
        answer.prefill = values[0]
    elif name == "chosen":
        answer.trace, answer.state = values[0], "decoding"
    elif name == "first":
        _add_tokens(answer, pieces, [values[0]], [False])
    elif name == "step":
        record: StepRecord = values[0]
        assert answer.trace is not None
        answer.trace.steps.append(record)
        answer.trace.num_new_tokens += len(record.committed_ids)
        _add_tokens(answer, pieces, record.committed_ids, are_accepted(record))
        left = record.draft_ids[sum(are_accepted(record)) :]
        answer.discarded.append(loaded.tokenizer.decode(left) if left else "")
    elif name == "answered":
        answer.trace, answer.total_s, answer.finish = values
        answer.tokens += [Token(piece.text, piece.is_accepted, len(answer.trace.steps)) for piece in pieces.end()]
        answer.state = "comparing"
    elif name == "plain token":
        answer.num_plain_tokens += 1
    elif name == "compared":
        answer.plain = values[0]
    elif name == "failed":
        answer.state, answer.message = "failed", str(values[0]) or type(values[0]).__name__


def _add_tokens(answer: Answer, pieces: PieceStream, token_ids: Any, flags: list[bool]) -> None:
    step = len(answer.trace.steps) if answer.trace is not None else 0
    for token_id, is_accepted in zip(token_ids, flags, strict=True):
        answer.token_ids.append(int(token_id))
        answer.tokens += [Token(p.text, p.is_accepted, step) for p in pieces.put([token_id], [is_accepted])]


class _Work:
    """Decodes in a thread and tells about it in events."""

    def __init__(
        self,
        loaded: Loaded,
        request: Request,
        input_ids: torch.LongTensor,
        rule_settings: dict[str, Any],
        stop: Any,
        events: queue.SimpleQueue,
    ):
        self.loaded, self.request, self.input_ids, self.events = loaded, request, input_ids, events
        self.rule_settings, self.stop = rule_settings, stop

    def run(self) -> None:
        ids, output, seconds = self._timed(self._ours)
        finish = self._finish(ids)
        self.events.put(("answered", output.blockpilot, seconds, finish))
        if self.request.compare and finish != "stopped":
            plain_ids, _, plain_s = self._timed(self._plain)
            self.events.put(("compared", self._compared(ids, seconds, plain_ids, plain_s)))

    def _timed(self, call: Any) -> tuple[list[int], Any, float]:
        request, target = self.request, self.loaded.target
        settings: dict[str, Any] = {"do_sample": False}
        if request.temperature:
            # The neutral top-k and top-p: a model's own defaults would hide most of the distribution.
            settings = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(request.seed)
        start = time.perf_counter()
        output = call(
            max_new_tokens=request.max_new_tokens,
            stopping_criteria=StoppingCriteriaList([_StopOn(self.stop)]),
            return_dict_in_generate=True,
            **settings,
        )
        if target.device.type != "cpu":
            torch.accelerator.synchronize(target.device)
        seconds = time.perf_counter() - start
        return output.sequences[0, self.input_ids.shape[1] :].tolist(), output, seconds

    def _ours(self, **settings: Any) -> Any:
        def on_choice(trace: DecodeTrace) -> None:
            self.events.put(("chosen", replace(trace, steps=[])))

        def look(module: Any, args: Any, output: Any) -> None:
            """At the prefill's logits, once: they are what the policy reads too."""
            hook.remove()
            self.events.put(("prefilled", self._prefill_facts(output.logits[0, -1])))

        hook = self.loaded.target.register_forward_hook(look)
        try:
            return self.loaded.pilot.generate(
                self.loaded.target,
                self.input_ids,
                streamer=_Tokens(lambda token_id, number: number or self.events.put(("first", token_id))),
                on_choice=on_choice,
                on_step=lambda record: self.events.put(("step", record)),
                **self.rule_settings,
                **settings,
            )
        finally:
            hook.remove()

    def _plain(self, **settings: Any) -> Any:
        target = self.loaded.target
        streamer = _Tokens(lambda token_id, number: self.events.put(("plain token",)))
        return type(target).generate(target, self.input_ids, streamer=streamer, **settings)

    def _prefill_facts(self, logits: torch.Tensor) -> dict[str, Any]:
        probabilities = logits.detach().float().softmax(-1)
        top = probabilities.topk(min(_TOP_TOKENS, len(probabilities)))
        return {
            "top_tokens": [
                {"text": self.loaded.tokenizer.decode([token_id]), "probability": value}
                for token_id, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ],
            "entropy": float(torch.special.entr(probabilities).sum()),
        }

    def _finish(self, ids: list[int]) -> str:
        eos = self.loaded.target.generation_config.eos_token_id
        if ids and ids[-1] in (eos if isinstance(eos, list) else [eos]):
            return "end"
        return "length" if len(ids) >= self.request.max_new_tokens else "stopped"

    def _compared(self, ids: list[int], seconds: float, plain_ids: list[int], plain_s: float) -> dict[str, Any]:
        if self._finish(plain_ids) == "stopped":
            return {"state": "stopped", "num_new_tokens": len(plain_ids), "total_s": plain_s}
        shared = min(len(ids), len(plain_ids))
        unequal = (i for i in range(shared) if ids[i] != plain_ids[i])
        difference = next(unequal, None if len(ids) == len(plain_ids) else shared)
        decode = self.loaded.tokenizer.decode
        return {
            "state": "done",
            "num_new_tokens": len(plain_ids),
            "total_s": plain_s,
            "tokens_per_second": len(plain_ids) / plain_s,
            "ratio": len(ids) / seconds / (len(plain_ids) / plain_s),
            "is_identical": difference is None,
            "first_difference": difference,
            "tokens_there": None
            if difference is None
            else [decode(each[difference : difference + 1]) for each in (ids, plain_ids)],
        }


class _StopOn(StoppingCriteria):
    """Ends an answer at the next token once an event is set."""

    def __init__(self, event: Any):
        self.event = event

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return torch.full((input_ids.shape[0],), self.event.is_set(), dtype=torch.bool, device=input_ids.device)


class _Tokens(BaseStreamer):
    """Hands on every new token with its number from 0. The prompt comes before them."""

    def __init__(self, show: Any):
        self.show, self.num_puts = show, 0

    def put(self, value: torch.Tensor) -> None:
        if self.num_puts:
            self.show(int(value), self.num_puts - 1)
        self.num_puts += 1

    def end(self) -> None:
        pass

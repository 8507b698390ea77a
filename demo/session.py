"""What the Space does, without its page: answers made one at a time, by models that are loaded once.

[`Session.run`] is a generator: decoding runs in a thread of its own, and whoever iterates sees an [`Answer`] that has
grown; whoever gives up iterating ends the decoding within a step. This module knows nothing of Gradio and HTML.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from answer import Answer, Token
from blockpilot_hf.benchmark import near_tie
from blockpilot_hf.display import Piece, PieceStream, are_accepted
from blockpilot_hf.parity import first_difference
from blockpilot_hf.prompts import encode_prompt
from blockpilot_hf.trace import StepRecord
from models import Loaded, Models
from request import BY_SECONDS, FIXED, IN_FLIGHT, PAPER, RULES, Limits, Request

_TOP_TOKENS = 5
# Steps of a fast model come quicker than pages can be drawn.
_SECONDS_BETWEEN_VIEWS = 0.05
_SECONDS_BETWEEN_LOOKS = 0.25


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
        self._flight: _Flight | None = None

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
        if self.models.loaded is None:
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

        self._turn.acquire()  # one that was abandoned ends within a step
        flight = self._flight = _Flight(answer, visitor, loaded, input_ids, settings)

        def decode() -> None:
            try:
                flight.decode()
            finally:
                self._turn.release()

        threading.Thread(target=decode, name="decode", daemon=True).start()
        try:
            while True:
                flight.take(wait_s=_SECONDS_BETWEEN_LOOKS)
                if answer.is_over:
                    break
                yield answer
                time.sleep(_SECONDS_BETWEEN_VIEWS)
            self._flight = None  # seen to its end: nothing is left to stop
            yield answer
        finally:
            if not answer.is_over:  # the iterating was given up: a closed tab, a cancelled call
                flight.stop.set()

    def stop(self, visitor: str, *, wait_s: float = 30.0) -> Answer | None:
        """
        End the visitor's answer within a step.

        Args:
            wait_s (`float`): Seconds to wait until it has ended.

        Returns:
            [`Answer`] with what was decoded, `None` where none of the visitor's was being made.
        """
        flight = self._flight
        if flight is None or flight.visitor != visitor:
            return None
        flight.stop.set()
        if flight.is_over.wait(wait_s):
            flight.take()
        return flight.answer

    def _encoded(self, loaded: Loaded, request: Request) -> torch.LongTensor:
        input_ids = encode_prompt(loaded.tokenizer, request.prompt)
        length, most = input_ids.shape[1], self.limits.max_prompt_tokens
        positions = getattr(loaded.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if positions:
            most = min(most, positions - request.max_new_tokens)
        if length > most:
            raise ValueError(
                f"The prompt has {length:,} tokens, and {max(most, 0):,} are allowed with {request.max_new_tokens:,} "
                "new ones. Shorten it."
            )
        return input_ids.to(loaded.target.device)


def loaded_rules(loaded: Loaded) -> list[str]:
    """The rules that these models have what it takes for."""
    has = {
        IN_FLIGHT: True,
        FIXED: True,
        BY_SECONDS: loaded.curve_policy is not None,
        PAPER: loaded.paper_policy is not None,
    }
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


class _Flight:
    """
    One answer being made: a thread decodes and tells about it in events, another takes them into the answer.

    Args:
        answer ([`Answer`]): Grows by [`take`] only.
        rule_settings (`dict`): Keywords of `BlockPilot.generate`.

    Attributes:
        stop (`Event`): Read at every token.
        is_over (`Event`): Set when the thread has nothing more to tell.
    """

    def __init__(
        self,
        answer: Answer,
        visitor: str,
        loaded: Loaded,
        input_ids: torch.LongTensor,
        rule_settings: dict[str, Any],
    ):
        self.answer, self.visitor = answer, visitor
        self.stop, self.is_over = threading.Event(), threading.Event()
        self._loaded, self._input_ids, self._rule_settings = loaded, input_ids, rule_settings
        self._request = answer.request
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._pieces = PieceStream(loaded.tokenizer)
        self._taking = threading.Lock()

    # What the decoding thread does

    def decode(self) -> None:
        """Answer, then compare where that is asked for. Errors become events."""
        try:
            ids, output, seconds = self._timed(self._ours)
            finish = self._finish(ids)
            self._events.put(("answered", output.blockpilot, seconds, finish))
            state = "stopped" if finish == "stopped" else "done"
            if self._request.compare and finish != "stopped":
                plain_ids, _, plain_s = self._timed(self._plain)
                plain = self._compared(ids, seconds, plain_ids, plain_s)
                state = plain["state"]
                self._events.put(("compared", plain))
            self._events.put(("over", state, ""))
        except BaseException as error:
            self._events.put(("over", "failed", str(error) or type(error).__name__))
        finally:
            self.is_over.set()

    def _timed(self, call: Any) -> tuple[list[int], Any, float]:
        request, target = self._request, self._loaded.target
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
        return output.sequences[0, self._input_ids.shape[1] :].tolist(), output, seconds

    def _ours(self, **settings: Any) -> Any:
        put = self._events.put
        prefill: dict[str, Any] = {}

        def look(module: Any, args: Any, output: Any) -> None:
            """At the prefill's logits, once: they are what the policy reads too."""
            hook.remove()
            prefill.update(self._prefill_facts(output.logits[0, -1]))

        hook = self._loaded.target.register_forward_hook(look)
        try:
            return self._loaded.pilot.generate(
                self._loaded.target,
                self._input_ids,
                streamer=_Tokens(lambda token_id, number: number or put(("first", token_id))),
                # With what the prefill said: a view of its own would only come before the decision.
                on_choice=lambda trace: put(("chosen", replace(trace, steps=[]), prefill)),
                on_step=lambda record: put(("step", record)),
                **self._rule_settings,
                **settings,
            )
        finally:
            hook.remove()

    def _plain(self, **settings: Any) -> Any:
        target = self._loaded.target
        streamer = _Tokens(lambda token_id, number: self._events.put(("plain token",)))
        return type(target).generate(target, self._input_ids, streamer=streamer, **settings)

    def _prefill_facts(self, logits: torch.Tensor) -> dict[str, Any]:
        probabilities = logits.detach().float().softmax(-1)
        top = probabilities.topk(min(_TOP_TOKENS, len(probabilities)))
        return {
            "top_tokens": [
                {"text": self._loaded.tokenizer.decode([token_id]), "probability": value}
                for token_id, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ],
            "entropy": float(torch.special.entr(probabilities).sum()),
        }

    def _finish(self, ids: list[int]) -> str:
        eos = self._loaded.target.generation_config.eos_token_id
        if ids and ids[-1] in (eos if isinstance(eos, list) else [eos]):
            return "end"
        return "length" if len(ids) >= self._request.max_new_tokens else "stopped"

    def _compared(self, ids: list[int], seconds: float, plain_ids: list[int], plain_s: float) -> dict[str, Any]:
        if self._finish(plain_ids) == "stopped":
            return {"state": "stopped", "num_new_tokens": len(plain_ids), "total_s": plain_s}
        difference = first_difference(plain_ids, ids)
        there = gap = is_near_tie = None
        if difference is not None:
            decode = self._loaded.tokenizer.decode
            there = [decode(each[difference : difference + 1]) for each in (ids, plain_ids)]
            if not self._request.temperature:  # of drawn tokens, scores alone do not tell
                gap, is_near_tie = near_tie(self._loaded.target, self._input_ids, plain_ids, ids, difference)
        return {
            "state": "done",
            "num_new_tokens": len(plain_ids),
            "total_s": plain_s,
            "tokens_per_second": len(plain_ids) / plain_s,
            "ratio": len(ids) / seconds / (len(plain_ids) / plain_s),
            "is_identical": difference is None,
            "first_difference": difference,
            "tokens_there": there,
            "gap": gap,
            "is_near_tie": is_near_tie,
        }

    # What others do

    def take(self, *, wait_s: float = 0.0) -> None:
        """Take all the news there is into the answer, after waiting for some."""
        with self._taking, contextlib.suppress(queue.Empty):
            self._grow(*self._events.get(timeout=max(wait_s, 1e-3)))
            while True:
                self._grow(*self._events.get_nowait())

    def _grow(self, name: str, *values: Any) -> None:
        answer = self.answer
        if name == "chosen":
            answer.trace, answer.prefill = values
            answer.state = "decoding"
        elif name == "first":
            self._add_tokens([values[0]], [False])
        elif name == "step":
            record: StepRecord = values[0]
            assert answer.trace is not None
            answer.trace.steps.append(record)
            answer.trace.num_new_tokens += len(record.committed_ids)
            flags = are_accepted(record)
            left = record.draft_ids[sum(flags) :]
            answer.discarded.append(self._loaded.tokenizer.decode(left) if left else "")
            self._add_tokens(record.committed_ids, flags)
        elif name == "answered":
            answer.trace, answer.total_s, answer.finish = values
            self._add(self._pieces.end())
            answer.state = "comparing" if self._request.compare and answer.finish != "stopped" else answer.state
        elif name == "plain token":
            answer.num_plain_tokens += 1
        elif name == "compared":
            answer.plain = values[0]
        elif name == "over":
            answer.state, answer.message = values

    def _add_tokens(self, token_ids: Sequence[int], flags: Sequence[bool]) -> None:
        for token_id, is_accepted in zip(token_ids, flags, strict=True):
            self.answer.token_ids.append(int(token_id))
            self._add(self._pieces.put([token_id], [is_accepted]))

    def _add(self, pieces: Sequence[Piece]) -> None:
        step = len(self.answer.trace.steps) if self.answer.trace is not None else 0
        self.answer.tokens += [Token(piece.text, piece.is_accepted, step) for piece in pieces]


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

"""What a benchmark times: plain `generate`, peers and our own rules, each as a call from prompt ids to a timed answer.

Seconds of the passes come from our own traces, and for the others from hooks on the target: when the first pass ended
and how long all of them took. So every call is timed the same way from outside, whatever it is.
"""

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .generate import BlockPilot
from .peer_dflash import peer_drafter, peer_generate
from .trace import DecodeTrace

PLAIN, STOCK_DFLASH, PROMPT_LOOKUP, DFLASH = "plain", "stock_dflash", "prompt_lookup", "dflash"
PAPER, SECONDS = "paper", "seconds"
FLIGHT, FLIGHT_DRAFTS, FLIGHT_DRAWN = "flight", "flight_drafts", "flight_drawn"
# What the documentation of transformers uses.
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Answer:
    """
    One timed call.

    Args:
        new_ids (`tuple[int, ...]`): The answer.
        total_s, prefill_s, policy_s, decode_s (`float`): Seconds of the whole call and of its parts.
        draft_s, verify_s (`float`, *optional*): Of all drafting and of all verifying passes, where they are known.
        num_steps (`int`): Passes of the target after the prefill.
        block_size (`int`, *optional*): That the answer began with.
        steps (`list`, *optional*): [`StepRecord.cost_counts`] of every step.
    """

    new_ids: tuple[int, ...]
    total_s: float
    prefill_s: float
    policy_s: float
    decode_s: float
    draft_s: float | None
    verify_s: float | None
    num_steps: int
    block_size: int | None = None
    steps: list[list[int]] | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step; `None` without steps."""
        return (len(self.new_ids) - 1) / self.num_steps if self.num_steps else None

    def facts(self) -> dict[str, Any]:
        """Seconds and counts, for records; `other_s` is decoding outside the passes, where both are known."""
        passes = None if self.draft_s is None or self.verify_s is None else self.draft_s + self.verify_s
        return {
            "total_s": self.total_s,
            "prefill_s": self.prefill_s,
            "policy_s": self.policy_s,
            "decode_s": self.decode_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "other_s": None if passes is None else self.decode_s - passes,
            "num_new_tokens": len(self.new_ids),
            "num_steps": self.num_steps,
            "acceptance_length": self.acceptance_length,
        }


@dataclass(frozen=True)
class Method:
    """
    Args:
        title (`str`): For tables.
        kind (`str`): `"plain"`, `"peer"`, `"fixed"` or `"ours"`.
        call (`Callable`, *optional*):
            From ids of shape `(1, length)` and keywords of `generate` to ids, or to an output of ours.
        reason (`str`): Why it cannot run here, empty if it can.
        is_default (`bool`): Whether it is what users of this package get.
        for_sampling (`bool`): Whether it is something else than another method only above temperature 0.
    """

    title: str
    kind: str
    call: Callable[..., Any] | None = None
    reason: str = ""
    is_default: bool = False
    for_sampling: bool = False

    def facts(self) -> dict[str, Any]:
        """For records."""
        return {"title": self.title, "kind": self.kind, "is_default": self.is_default, "reason": self.reason}


@dataclass
class PassClock:
    """Passes of a model while it is [`watched`]."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


@contextmanager
def watched(model: Any) -> Iterator[PassClock]:
    """Note when passes of `model` begin and end. On other devices than the CPU that waits for each."""
    clock = PassClock()

    def note(times: list[float]) -> Callable[..., None]:
        def hook(*_: Any, **__: Any) -> None:
            synchronize(model)
            times.append(time.perf_counter())

        return hook

    handles = [
        model.register_forward_pre_hook(note(clock.starts)),
        model.register_forward_hook(note(clock.ends)),
    ]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


def synchronize(model: Any) -> None:
    """Wait until the device has done what it was asked."""
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)


def timed_answer(
    method: Method, target: Any, input_ids: torch.LongTensor, *, seed: int, **generate_kwargs: Any
) -> Answer:
    """
    Run a method once.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): On the target's device.
        generate_kwargs: Of `generate`: `max_new_tokens`, `do_sample`, ...
    """
    assert method.call is not None, method.reason
    torch.manual_seed(seed)
    if method.kind in ("fixed", "ours"):
        synchronize(target)
        start = time.perf_counter()
        output = method.call(input_ids, **generate_kwargs)
        synchronize(target)
        total_s = time.perf_counter() - start
        return _of_trace(_new_ids(output.sequences, input_ids), total_s, output.blockpilot)
    with watched(target) as clock:
        synchronize(target)
        start = time.perf_counter()
        sequences = method.call(input_ids, **generate_kwargs)
        synchronize(target)
        total_s = time.perf_counter() - start
    prefill_s = clock.ends[0] - start
    passes_s = sum(end - begin for begin, end in zip(clock.starts[1:], clock.ends[1:], strict=True))
    is_plain = method.kind == "plain"
    return Answer(
        new_ids=_new_ids(sequences, input_ids),
        total_s=total_s,
        prefill_s=prefill_s,
        policy_s=0.0,
        decode_s=total_s - prefill_s,
        draft_s=0.0 if is_plain else None,
        verify_s=passes_s,
        num_steps=len(clock.ends) - 1,
    )


def _new_ids(sequences: torch.LongTensor, input_ids: torch.LongTensor) -> tuple[int, ...]:
    return tuple(sequences[0, input_ids.shape[1] :].tolist())


def _of_trace(new_ids: tuple[int, ...], total_s: float, trace: DecodeTrace) -> Answer:
    timed = [(step.draft_s, step.verify_s) for step in trace.steps]
    is_known = all(part is not None for step in timed for part in step)
    return Answer(
        new_ids=new_ids,
        total_s=total_s,
        prefill_s=trace.prefill_s,
        policy_s=trace.policy_s,
        decode_s=trace.decode_s,
        draft_s=sum(draft or 0.0 for draft, _ in timed) if is_known else None,
        verify_s=sum(verify or 0.0 for _, verify in timed) if is_known else None,
        num_steps=len(trace.steps),
        block_size=trace.block_size,
        steps=[step.cost_counts for step in trace.steps],
    )


def make_methods(
    target: Any,
    pilot: BlockPilot,
    *,
    policy: Any = None,
    paper_policy: Any = None,
    block_sizes: Sequence[int] = (),
    costs: Any = None,
) -> dict[str, Method]:
    """
    All methods for a pair, in the order of tables; those that cannot run here with the reason.

    Args:
        policy (`BlockPilotPolicy`, *optional*): For the rules by seconds and in flight.
        paper_policy (`BlockPilotPolicy`, *optional*): By the paper's rule.
        block_sizes (`Sequence[int]`, *optional*): Fixed sizes besides the one that the drafter was trained for.
        costs (`CostTable`, *optional*): To decide by; by default the one for the pair and machine.
    """
    drafter = pilot.drafter
    # A scripted drafter has no passes of its own that others could make.
    is_model = isinstance(drafter, torch.nn.Module)
    plain = type(target).generate.__get__(target)
    watches: dict[str, Any] = {"time_steps": True} if target.device.type != "cpu" else {}

    drawing = BlockPilot(drafter, False, draft_sampling=True)

    def ours(by: BlockPilot = pilot, **given: Any) -> Callable[..., Any]:
        def call(input_ids: torch.LongTensor, **kwargs: Any) -> Any:
            return by.generate(target, input_ids, return_dict_in_generate=True, **given, **watches, **kwargs)

        return call

    def stock(**given: Any) -> Callable[..., Any]:
        return lambda input_ids, **kwargs: plain(input_ids, **given, **kwargs)

    by_table: dict[str, Any] = {} if costs is None else {"costs": costs}
    methods = {
        PLAIN: Method("plain generate", "plain", stock()),
        STOCK_DFLASH: (
            Method("transformers DFlash", "peer", stock(assistant_model=drafter, speculation_type="dflash"))
            if is_model
            else Method("transformers DFlash", "peer", reason="the drafter is no model")
        ),
        PROMPT_LOOKUP: Method("prompt lookup", "peer", stock(prompt_lookup_num_tokens=LOOKUP_TOKENS)),
        DFLASH: _dflash_method(target, drafter if is_model else None),
    }
    training = drafter.config.block_size
    for size in sorted({training, *block_sizes}):
        methods[f"size {size}"] = Method(f"block size {size}", "fixed", ours(block_size=size))
    methods[PAPER] = (
        Method("paper's rule", "ours", ours(policy=paper_policy, adapt="prompt"))
        if paper_policy is not None
        else Method("paper's rule", "ours", reason="no policy by the paper's rule was named (`--paper-policy`)")
    )
    methods[SECONDS] = (
        Method("by seconds, per prompt", "ours", ours(policy=policy, adapt="prompt", **by_table))
        if policy is not None
        else Method("by seconds, per prompt", "ours", reason="no policy was named (`--policy`)")
    )
    given = False if policy is None else policy
    methods[FLIGHT_DRAFTS] = Method(
        "in flight, drafts alone", "ours", ours(policy=given, adapt="flight", lookup=False, **by_table)
    )
    methods[FLIGHT] = Method("in flight", "ours", ours(policy=given, adapt="flight", **by_table), is_default=True)
    methods[FLIGHT_DRAWN] = Method(
        "in flight, drafts drawn",
        "ours",
        ours(drawing, policy=given, adapt="flight", **by_table),
        for_sampling=True,
    )
    return methods


def _dflash_method(target: Any, drafter: Any) -> Method:
    if importlib.util.find_spec("dflash") is None:
        return Method("dflash", "peer", reason="the package dflash is not installed (`pip install --no-deps dflash`)")
    title = f"dflash {importlib.metadata.version('dflash')}"
    if drafter is None:
        return Method(title, "peer", reason="the drafter is no model")
    try:
        peer = peer_drafter(drafter)
    except (ImportError, ValueError, RuntimeError) as error:
        return Method(title, "peer", reason=str(error).splitlines()[0])

    def call(input_ids: torch.LongTensor, **kwargs: Any) -> torch.LongTensor:
        temperature = kwargs["temperature"] if kwargs.get("do_sample") else 0.0
        return peer_generate(peer, target, input_ids, max_new_tokens=kwargs["max_new_tokens"], temperature=temperature)

    return Method(title, "peer", call)


__all__ = [
    "DFLASH",
    "FLIGHT",
    "FLIGHT_DRAFTS",
    "FLIGHT_DRAWN",
    "PAPER",
    "PLAIN",
    "PROMPT_LOOKUP",
    "SECONDS",
    "STOCK_DFLASH",
    "Answer",
    "Method",
    "make_methods",
    "synchronize",
    "timed_answer",
]

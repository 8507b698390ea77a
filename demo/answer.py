"""What is known of an answer while it grows. Plain data, the trace of the package included."""

from dataclasses import asdict, dataclass, field
from typing import Any

from blockpilot_hf.trace import DecodeTrace
from request import Request


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
        prefill (`dict`, *optional*): `top_tokens` with text and probability, `entropy` in nats.
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
        trace = (DecodeTrace() if self.trace is None else self.trace).to_dict()
        scores = trace["scores"] and {str(size): score for size, score in trace["scores"].items()}  # as JSON has keys
        return {
            **trace,
            "scores": scores,
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

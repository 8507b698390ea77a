"""What happened in a call: one `StepRecord` per verification step, one `DecodeTrace` per answer. Plain data only."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """
    One verification step.

    Args:
        block_size (`int`): Positions of the block, the anchor included: `block_size - 1` tokens are drafted.
        verify_width (`int`): Positions that the target checked, at most `block_size`.
        draft_ids (`tuple[int, ...]`): The drafted or copied tokens; empty when the step proposed none.
        committed_ids (`tuple[int, ...]`):
            Tokens added to the answer. The last one is the bonus token, the target's own pick and the next anchor; when
            a stopping criterion ends the answer inside the accepted run, it is the token that the criterion fired on.
        num_accepted (`int`): Proposed tokens kept before the last committed one, `len(committed_ids) - 1`.
        row (`int`): Row of the batch.
        draft_s, verify_s (`float`, *optional*):
            Seconds of the drafting and of the verifying pass; `None` where measuring would need a synchronisation that
            was not asked for.
        reason (`str`): Why the step was not a full block, empty if it was. In flight `block_size` is 1 where the step
            did not draft.
        source (`str`): Who proposed the tokens: `"drafter"`, `"lookup"` where they were copied from the text so far, or
            empty where nobody did.
    """

    block_size: int
    verify_width: int
    draft_ids: tuple[int, ...]
    committed_ids: tuple[int, ...]
    num_accepted: int
    row: int = 0
    draft_s: float | None = None
    verify_s: float | None = None
    reason: str = ""
    source: str = ""

    @property
    def cost_counts(self) -> list[int]:
        """What its seconds depend on, for records: drafted block size, 1 without a draft, verified width, accepted."""
        return [len(self.draft_ids) + 1 if self.source == "drafter" else 1, self.verify_width, self.num_accepted]


@dataclass
class DecodeTrace:
    """
    How one answer was decoded; for several rows, the sum over them with each row's own trace in `rows`.

    Args:
        block_size (`int`, *optional*): The chosen block size; `None` over rows that differ.
        scores (`dict[int, float]`, *optional*): The policy's score of every candidate block size.
        reason (`str`): Who chose the block size, and why.
        adapt (`str`): `"prompt"`: it stayed; `"flight"`: steps decided anew, see their own `block_size`.
        costs (`str`): Where the seconds that decided came from; empty where none were needed.
        steps (`list[StepRecord]`): The verification steps in order.
        num_new_tokens (`int`): Tokens added after the prompt, the prefill's own first token included.
        prefill_s, policy_s, decode_s (`float`): Seconds of the prefill, of the choice, and of everything after both.
        rows (`list[DecodeTrace]`): One trace per row when the call had several, else empty.
    """

    block_size: int | None = None
    scores: dict[int, float] | None = None
    reason: str = ""
    adapt: str = "prompt"
    costs: str = ""
    steps: list[StepRecord] = field(default_factory=list)
    num_new_tokens: int = 0
    prefill_s: float = 0.0
    policy_s: float = 0.0
    decode_s: float = 0.0
    rows: list["DecodeTrace"] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tau: tokens committed per verification step, mean over a row's steps, then over rows. 0 without steps."""
        if self.rows:
            return sum(row.acceptance_length for row in self.rows) / len(self.rows)
        return sum(step.num_accepted + 1 for step in self.steps) / len(self.steps) if self.steps else 0.0

    @classmethod
    def of_rows(cls, rows: Sequence["DecodeTrace"]) -> "DecodeTrace":
        """The trace of a call; a single row's trace is the call's own."""
        if len(rows) == 1:
            return rows[0]
        sizes = {row.block_size for row in rows}
        return cls(
            block_size=sizes.pop() if len(sizes) == 1 else None,
            reason="each row chose for itself, see `rows`",
            adapt=rows[0].adapt,
            costs=rows[0].costs,
            steps=[step for row in rows for step in row.steps],
            num_new_tokens=sum(row.num_new_tokens for row in rows),
            prefill_s=sum(row.prefill_s for row in rows),
            policy_s=sum(row.policy_s for row in rows),
            decode_s=sum(row.decode_s for row in rows),
            rows=list(rows),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values, `acceptance_length` included."""
        return {**asdict(self), "acceptance_length": self.acceptance_length}

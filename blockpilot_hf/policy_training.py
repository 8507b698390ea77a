"""Training the policy from a sweep: which block size is best for a prompt, told from its prefill alone.

An example is a text with the features of its prefill and the acceptance length that decoding has at every block size.
What is best is a matter of the rule: the largest acceptance length in a window around the size that the drafter was
trained for, as in the paper (https://huggingface.co/papers/2606.31315), or the most tokens per second under a cost
table. The label is the best size, the smallest among equals; the head is trained either to name it (cross-entropy, the
paper's objective) or to put its weight on sizes in proportion to what they bring, which forgives a near miss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .configuration_blockpilot import FEATURES, BlockPilotConfig
from .costs import CostTable
from .features import policy_features
from .modeling_blockpilot import BlockPilotPolicy
from .sweep import SweepRow
from .texts import prompt_numbers

RULES = ("tau", "seconds")
OBJECTIVES = ("label", "speed")
# On each side of the size that the drafter was trained for.
_WINDOW_REACH = 2


@dataclass(frozen=True, kw_only=True)
class PolicyTrainingConfig:
    """
    Args:
        rule (`str`): `"tau"` or `"seconds"`: what makes a block size the best one.
        features (`str`): `"compact"`, or `"logits"` for a head over the whole vocabulary, as in the paper.
        objective (`str`): `"label"` or `"speed"`, see the module.
        class_weights (`bool`): Whether a label weighs in the loss as much as it is rare. Only with `"label"`.
        hidden_size (`int`): Width of the head.
        epochs (`int`): At most; training stops when the validation has not got better for `patience` epochs.
        learning_rate, weight_decay (`float`): Of AdamW.
        seed (`int`): Of the start and of the order.
    """

    rule: str = "seconds"
    features: str = "compact"
    objective: str = "label"
    class_weights: bool = False
    hidden_size: int = 128
    dropout: float = 0.2
    epochs: int = 200
    patience: int = 30
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    seed: int = 0

    def __post_init__(self):
        for name, allowed in (("rule", RULES), ("features", FEATURES), ("objective", OBJECTIVES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        for name in ("hidden_size", "epochs", "patience", "batch_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {getattr(self, name)!r}.")
        if self.class_weights and self.objective != "label":
            raise ValueError(
                f"`class_weights` weigh the labels, and objective {self.objective!r} has none. Leave them out, or use "
                "objective 'label'."
            )


def window(training_block_size: int) -> list[int]:
    """The paper's candidates: the size that the drafter was trained for, and two on each side of it."""
    low = max(1, training_block_size - _WINDOW_REACH)
    return list(range(low, training_block_size + _WINDOW_REACH + 1))


def with_steps(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Without answers of one token: the prefill gives that, no block size is better than another."""
    return [row for row in rows if row.num_new_tokens > 1]


def split_rows(rows: Sequence[SweepRow], share: float) -> tuple[list[SweepRow], list[SweepRow]]:
    """
    Rows to train on and rows to validate on. All texts of a prompt are on one side, and which one depends on the
    prompts alone, not on their order.

    Args:
        share (`float`): Of the prompts that go to the second side, at least one.

    Returns:
        `tuple(list[SweepRow], list[SweepRow])`

    Raises:
        `ValueError`: if that leaves no prompt to train on.
    """
    numbers = prompt_numbers(rows)
    first_hash: dict[int, str] = {}
    for number, row in zip(numbers, rows, strict=True):
        first_hash[number] = min(row.prompt_hash, first_hash.get(number, row.prompt_hash))
    ordered = sorted(first_hash, key=first_hash.__getitem__)
    held_out = set(ordered[: max(1, round(len(ordered) * share))])
    if len(held_out) == len(ordered):
        raise ValueError(
            f"A policy needs prompts to train on and others to validate on, got {len(ordered)} in all. Sweep more."
        )
    return (
        [row for number, row in zip(numbers, rows, strict=True) if number not in held_out],
        [row for number, row in zip(numbers, rows, strict=True) if number in held_out],
    )


def values(
    rows: Sequence[SweepRow], block_sizes: Sequence[int], rule: str, costs: CostTable | None = None
) -> torch.Tensor:
    """
    What each size is worth to each row, `(num_rows, num_block_sizes)`: the acceptance length, or for the rule
    `"seconds"` the speedup over plain decoding under the cost table.
    """
    taus = [[row.acceptance_length(size) for size in block_sizes] for row in rows]
    if rule == "tau":
        return torch.tensor(taus)
    assert costs is not None, "the rule by seconds has its cost table"
    gain = [costs.speedup(size, 1.0) for size in block_sizes]
    return torch.tensor(taus) * torch.tensor(gain)


def policy_inputs(rows: Sequence[SweepRow], features: str) -> torch.Tensor:
    """
    What a head of that kind reads, `(num_rows, num_features)`, float32.

    Raises:
        `ValueError`: for `"logits"` where the sweep did not keep them.
    """
    if features == "compact":
        return torch.tensor([row.features for row in rows])
    missing = next((row.id for row in rows if row.logits is None), None)
    if missing is not None:
        raise ValueError(
            f"`features='logits'` needs the target's logits, and the sweep has none (text {missing!r}). Sweep again "
            "with `--keep-logits`, or use features 'compact'."
        )
    return policy_features(torch.stack([torch.as_tensor(row.logits) for row in rows]).float(), kind="logits")


@torch.no_grad()
def policy_choices(policy: BlockPilotPolicy, rows: Sequence[SweepRow]) -> list[int]:
    """The block size that the policy picks for each row, the smallest among equal scores, as in decoding."""
    scores = policy(policy_inputs(rows, policy.config.features)).scores.float()
    return [policy.config.block_sizes[i] for i in best_choice(scores).tolist()]


def train_policy(
    train: Sequence[SweepRow],
    validation: Sequence[SweepRow],
    block_sizes: Sequence[int],
    config: PolicyTrainingConfig,
    costs: CostTable | None = None,
) -> tuple[BlockPilotPolicy, list[dict[str, float]]]:
    """
    Train a head of kind `"choice"`.

    Args:
        train (`Sequence[SweepRow]`): Texts to learn from.
        validation (`Sequence[SweepRow]`): Texts of other prompts, to know when to stop.
        block_sizes (`Sequence[int]`): Candidates, increasing.
        costs ([`CostTable`], *optional*): Needed for the rule `"seconds"`.

    Returns:
        `tuple(BlockPilotPolicy, list[dict])`: the policy of the best epoch in eval mode, and the log by epoch: the mean
        worth of its choices on either side, in the unit of the rule.

    Raises:
        `ValueError`: if a side is empty, a prompt is on both, or logits are needed and not there.
    """
    if not train or not validation:
        raise ValueError(f"Both sides need texts, got {len(train)} to train on and {len(validation)} to validate on.")
    shared = {row.prompt_hash for row in train} & {row.prompt_hash for row in validation}
    if shared:
        raise ValueError(
            f"{len(shared)} prompts are on both sides. A prompt may be trained on or validated on, not both."
        )
    raw = policy_inputs(train, config.features)
    mean, std = raw.mean(0), raw.std(0, unbiased=False)
    scale = torch.where(std > 1e-6, 1 / std.clamp_min(1e-6), 0.0)
    inputs, held_out = (raw - mean) * scale, (policy_inputs(validation, config.features) - mean) * scale
    worth, held_out_worth = (values(side, block_sizes, config.rule, costs) for side in (train, validation))
    weights = label_weights(worth) if config.class_weights else None

    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(config.seed)
        policy = BlockPilotPolicy(
            BlockPilotConfig(
                block_sizes=list(block_sizes),
                features=config.features,
                vocab_size=raw.shape[1] if config.features == "logits" else None,
                hidden_size=config.hidden_size,
                dropout=config.dropout,
            )
        ).float()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        best, best_epoch, best_state, log = -math.inf, 0, {}, []
        for epoch in range(config.epochs):
            policy.train()
            for batch in torch.randperm(len(inputs)).split(config.batch_size):
                loss = _loss(policy(inputs[batch]).scores, worth[batch], config.objective, weights)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            policy.eval()
            with torch.no_grad():
                found = _worth_of_choice(policy(held_out).scores, held_out_worth)
                on_train = _worth_of_choice(policy(inputs).scores, worth)
            log.append({"epoch": epoch + 1, "train": on_train, "validation": found})
            if found > best:
                best, best_epoch = found, epoch
                best_state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
            elif epoch - best_epoch >= config.patience:
                break
    policy.load_state_dict(best_state)
    _fold_scaling(policy, mean, scale)
    return policy.eval(), log


def best_epoch(log: Sequence[dict[str, float]]) -> dict[str, float]:
    """The entry that the policy is of: the first of the best ones."""
    return max(log, key=lambda entry: entry["validation"])


def label_weights(worth: torch.Tensor) -> torch.Tensor:
    """Weight of every label, `(num_block_sizes,)`: inverse to how often it is the best, 1 on average over the rows."""
    counts = best_choice(worth).bincount(minlength=worth.shape[1]).float()
    present = (counts > 0).sum()
    return torch.where(counts > 0, counts.sum() / (present * counts.clamp_min(1)), 0.0)


def best_choice(worth: torch.Tensor) -> torch.Tensor:
    """Index of the best size per row, the smallest of equals; `worth` is `(num_rows, num_block_sizes)`."""
    return (worth >= worth.max(-1, keepdim=True).values).long().argmax(-1)


def _loss(scores: torch.Tensor, worth: torch.Tensor, objective: str, weights: torch.Tensor | None) -> torch.Tensor:
    if objective == "label":
        return F.cross_entropy(scores, best_choice(worth), weight=weights)
    # What is lost against the best size, in expectation over the head's distribution.
    return ((1 - worth / worth.max(-1, keepdim=True).values) * scores.softmax(-1)).sum(-1).mean()


def _worth_of_choice(scores: torch.Tensor, worth: torch.Tensor) -> float:
    return worth.gather(-1, best_choice(scores)[:, None]).mean().item()


@torch.no_grad()
def _fold_scaling(policy: BlockPilotPolicy, mean: torch.Tensor, scale: torch.Tensor) -> None:
    """The policy reads raw features. One that never varied in training has no say: nothing was learned about it."""
    first = policy.layers[0]
    weight = first.weight * scale
    first.bias -= weight @ mean
    first.weight.copy_(weight)


__all__ = [
    "OBJECTIVES",
    "RULES",
    "PolicyTrainingConfig",
    "best_choice",
    "best_epoch",
    "label_weights",
    "policy_choices",
    "policy_inputs",
    "split_rows",
    "train_policy",
    "values",
    "window",
    "with_steps",
]

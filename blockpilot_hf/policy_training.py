"""Training the policy from a sweep: which block size is best for a prompt, told from its prefill alone.

An example is a text with the features of its prefill and the acceptance length that decoding has at every block size.
What is best is a matter of the rule: the largest acceptance length in a window around the size that the drafter was
trained for, as in the paper (https://huggingface.co/papers/2606.31315), or the most tokens per second under a cost
table. The label is the best size, the smallest among equals; the head is trained either to name it (cross-entropy, the
paper's objective) or to put its weight on sizes in proportion to what they bring, which forgives a near miss.

A head of kind `"curve"` knows of no rule. It learns the acceptance length at every size, and a cost table, which may be
another one in every call, makes a choice of that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .configuration_blockpilot import FEATURES, HEADS, NUM_COMPACT_FEATURES, BlockPilotConfig
from .costs import CostTable
from .features import policy_features
from .modeling_blockpilot import BlockPilotPolicy, choose_by_seconds
from .sweep import SweepRow
from .texts import prompt_numbers

RULES = ("tau", "seconds")
OBJECTIVES = ("label", "speed")
# On each side of the size that the drafter was trained for.
_WINDOW_REACH = 2
# Of the weights of a curve's last layer, as a share of the usual ones.
_START = 0.1


@dataclass(frozen=True, kw_only=True)
class PolicyTrainingConfig:
    """
    Args:
        head (`str`): `"choice"` or `"curve"`. Rule, objective and class weights are a choice head's.
        rule (`str`): `"tau"` or `"seconds"`: what makes a block size the best one.
        features (`str`):
            `"compact"`, `"compact+context"` with what the drafter reads of the prompt's end, or `"logits"` for a head
            over the whole vocabulary, as in the paper.
        objective (`str`): `"label"` or `"speed"`, see the module.
        class_weights (`bool`): Whether a label weighs in the loss as much as it is rare. Only with `"label"`.
        hidden_size (`int`): Width of the head.
        dropout (`float`): After each hidden layer.
        input_dropout (`float`, *optional*):
            Of the inputs, in training; by default 0.5 for a curve that reads context, which is many numbers where texts
            are few, and 0 for others.
        epochs (`int`): At most; training stops when the validation has not got better for `patience` epochs.
        learning_rate, weight_decay (`float`): Of AdamW.
        seed (`int`): Of the start and of the order.
    """

    head: str = "choice"
    rule: str = "seconds"
    features: str = "compact"
    objective: str = "label"
    class_weights: bool = False
    hidden_size: int = 128
    dropout: float = 0.2
    input_dropout: float | None = None
    epochs: int = 200
    patience: int = 30
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    seed: int = 0

    def __post_init__(self):
        for name, allowed in (
            ("head", HEADS),
            ("rule", RULES),
            ("features", FEATURES),
            ("objective", OBJECTIVES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        for name in ("hidden_size", "epochs", "patience", "batch_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {getattr(self, name)!r}.")
        if self.input_dropout is None:
            reads_much = self.head == "curve" and self.features == "compact+context"
            object.__setattr__(self, "input_dropout", 0.5 if reads_much else 0.0)
        for name in ("dropout", "input_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be a number from 0 to below 1, got {getattr(self, name)!r}.")
        if self.head == "curve" and (self.class_weights or self.objective != "label"):
            raise ValueError(
                "`class_weights` and `objective` are for head 'choice': a curve has no labels, it learns acceptance "
                "lengths. Leave them out, or use head 'choice'."
            )
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
        `ValueError`: for `"logits"` or `"compact+context"` where the sweep did not keep them.
    """
    if features == "compact":
        return torch.tensor([row.features for row in rows])
    if features == "compact+context":
        missing = next((row.id for row in rows if row.context is None), None)
        if missing is not None:
            raise ValueError(
                f"`features='compact+context'` needs the drafter's context, and the sweep has none (text {missing!r}): "
                "it is of an earlier version. Sweep again, or use features 'compact'."
            )
        context = torch.tensor([row.context for row in rows])
        return torch.cat([torch.tensor([row.features for row in rows]), context], dim=-1)
    missing = next((row.id for row in rows if row.logits is None), None)
    if missing is not None:
        raise ValueError(
            f"`features='logits'` needs the target's logits, and the sweep has none (text {missing!r}). Sweep again "
            "with `--keep-logits`, or use features 'compact'."
        )
    return policy_features(torch.stack([torch.as_tensor(row.logits) for row in rows]).float(), kind="logits")


@torch.no_grad()
def policy_choices(policy: BlockPilotPolicy, rows: Sequence[SweepRow], costs: CostTable | None = None) -> list[int]:
    """
    The block size that the policy picks for each row, the smallest among equals, as in decoding.

    Args:
        costs ([`CostTable`], *optional*): What a head of kind `"curve"` chooses by. Others do not look at it.

    Raises:
        `ValueError`: for a curve without a cost table.
    """
    sizes = policy.config.block_sizes
    scores = policy(policy_inputs(rows, policy.config.features)).scores.float()
    if policy.config.head != "curve":
        return [sizes[i] for i in best_choice(scores).tolist()]
    if costs is None:
        raise ValueError(
            f"Policy {policy.name_or_path or type(policy).__name__!r} predicts acceptance lengths and chooses by "
            '`costs` (`head="curve"`), got None. Pass a cost table, such as one that `blockpilot calibrate` wrote.'
        )
    return [
        choose_by_seconds(dict(zip(sizes, curve, strict=True)), costs, row.num_prompt_tokens)[0]
        for curve, row in zip(scores.tolist(), rows, strict=True)
    ]


@torch.no_grad()
def curve_accuracy(
    policy: BlockPilotPolicy, rows: Sequence[SweepRow], trained_on: Sequence[SweepRow]
) -> list[dict[str, float]]:
    """
    How well a head of kind `"curve"` predicts acceptance lengths, next to the mean of the training texts, which needs
    no prediction.

    Returns:
        `list[dict]`: by block size above 1: `block_size`, `mean` acceptance length and `mean_predicted`, the
        `mean_absolute_error` and that `of_the_mean`, and `r2`: the share of the squared error of that mean that the
        prediction takes away.
    """
    sizes = policy.config.block_sizes
    found = values(rows, sizes, "tau")
    predicted = policy(policy_inputs(rows, policy.config.features)).scores.float()
    mean = values(trained_on, sizes, "tau").mean(0)
    return [
        {
            "block_size": size,
            "mean": found[:, i].mean().item(),
            "mean_predicted": predicted[:, i].mean().item(),
            "mean_absolute_error": (predicted[:, i] - found[:, i]).abs().mean().item(),
            "mean_absolute_error_of_the_mean": (mean[i] - found[:, i]).abs().mean().item(),
            "r2": _explained(predicted[:, i], found[:, i], mean[i]),
        }
        for i, size in enumerate(sizes)
        if size > 1
    ]


def train_policy(
    train: Sequence[SweepRow],
    validation: Sequence[SweepRow],
    block_sizes: Sequence[int],
    config: PolicyTrainingConfig,
    costs: CostTable | None = None,
) -> tuple[BlockPilotPolicy, list[dict[str, float]]]:
    """
    Train a policy.

    Args:
        train (`Sequence[SweepRow]`): Texts to learn from.
        validation (`Sequence[SweepRow]`): Texts of other prompts, to know when to stop.
        block_sizes (`Sequence[int]`): Candidates, increasing; for head `"curve"` from 1 on.
        costs ([`CostTable`], *optional*): Needed for head `"choice"` and the rule `"seconds"`.

    Returns:
        `tuple(BlockPilotPolicy, list[dict])`: the policy of the best epoch in eval mode, and the log by epoch, for
        either side: the mean worth of its choices in the unit of the rule, or for head `"curve"` the share of the
        squared error in the logarithm of acceptance lengths that it takes away from the mean of the training texts.

    Raises:
        `ValueError`: if a side is empty, a prompt is on both, or logits or context are needed and not there.
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
    if config.features == "compact+context":
        # All context together varies as much as all other features together, not as much more as it is wider.
        scale[NUM_COMPACT_FEATURES:] *= min(1.0, NUM_COMPACT_FEATURES / (len(scale) - NUM_COMPACT_FEATURES)) ** 0.5
    inputs, held_out = (raw - mean) * scale, (policy_inputs(validation, config.features) - mean) * scale
    is_curve = config.head == "curve"
    rule = "tau" if is_curve else config.rule
    worth, held_out_worth = (values(side, block_sizes, rule, costs) for side in (train, validation))
    weights = label_weights(worth) if config.class_weights else None

    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(config.seed)
        policy = BlockPilotPolicy(
            BlockPilotConfig(
                block_sizes=list(block_sizes),
                head=config.head,
                features=config.features,
                vocab_size=raw.shape[1] if config.features == "logits" else None,
                context_size=raw.shape[1] - NUM_COMPACT_FEATURES if config.features == "compact+context" else None,
                hidden_size=config.hidden_size,
                dropout=config.dropout,
            )
        ).float()
        if is_curve:
            _start_from_mean(policy, worth.log().mean(0).exp())
        optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        best, best_epoch, best_state, log = -math.inf, 0, {}, []
        for epoch in range(config.epochs):
            policy.train()
            for batch in torch.randperm(len(inputs)).split(config.batch_size):
                scores = policy(F.dropout(inputs[batch], config.input_dropout or 0.0)).scores
                if is_curve:
                    loss = _curve_loss(scores, worth[batch])
                else:
                    loss = _loss(scores, worth[batch], config.objective, weights)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            policy.eval()
            with torch.no_grad():
                sides = (policy(held_out).scores, held_out_worth), (policy(inputs).scores, worth)
                if is_curve:
                    mean_curve = worth.log().mean(0)
                    found, on_train = (_explained(own.log(), taus.log(), mean_curve) for own, taus in sides)
                else:
                    found, on_train = (_worth_of_choice(*side) for side in sides)
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


def _curve_loss(curves: torch.Tensor, taus: torch.Tensor) -> torch.Tensor:
    # Relative errors are what makes a choice wrong, whatever the seconds that they are divided by. Where a prompt
    # leaves it open, this learns the geometric mean: between what the mean speed of answers and their total time want.
    return F.mse_loss(curves.log(), taus.log())


def _explained(predicted: torch.Tensor, found: torch.Tensor, mean: torch.Tensor) -> float:
    """Share of the squared error of `mean` that the prediction takes away: at most 1, below 0 if it is worse."""
    left, before = (predicted - found).square().sum(), (mean - found).square().sum()
    return (1 - left / before.clamp_min(1e-12)).item()


@torch.no_grad()
def _start_from_mean(policy: BlockPilotPolicy, mean: torch.Tensor) -> None:
    """Every prompt is predicted about the mean curve, and what the inputs say has to be learned against that."""
    sizes = torch.tensor(policy.config.block_sizes[1:])
    policy.fc_out.bias.copy_(((mean[1:] - 1) / (sizes - 1)).clamp(0.001, 0.999).logit())
    policy.fc_out.weight.mul_(_START)


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
    "curve_accuracy",
    "label_weights",
    "policy_choices",
    "policy_inputs",
    "split_rows",
    "train_policy",
    "values",
    "window",
    "with_steps",
]

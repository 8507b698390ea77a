"""Training the policy by measured seconds: which block size gives the most tokens per second, from the prefill alone.

An example is a prompt with its features and the acceptance length that decoding had at every block size. A cost table
turns those into speeds. The label is the fastest size, the smallest among equals; the head is trained either to name it
(cross-entropy, the paper's objective) or to put its weight on sizes in proportion to the speed that they bring, which
forgives a near miss and punishes a slow choice.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .configuration_blockpilot import BlockPilotConfig
from .costs import CostTable
from .modeling_blockpilot import BlockPilotPolicy

OBJECTIVES = ("label", "speed")


@dataclass(frozen=True)
class PolicyExample:
    """
    Args:
        id, category (`str`): Of the prompt.
        prompt_hash (`str`): Hash of the prompt's ids; splits go by it.
        features (`tuple[float, ...]`): What [`policy_features`] gives for the prefill.
        acceptance_length (`dict[int, float]`): Tau by block size; 1 at block size 1.
    """

    id: str
    category: str
    prompt_hash: str
    features: tuple[float, ...]
    acceptance_length: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class PolicyTrainingConfig:
    """
    Args:
        objective (`str`): `"label"` or `"speed"`, see the module.
        hidden_size (`int`): Width of the head.
        epochs (`int`): At most; training stops when the validation speed has not risen for `patience` epochs.
        learning_rate, weight_decay (`float`): Of AdamW.
        seed (`int`): Of the start and of the order.
    """

    objective: str = "label"
    hidden_size: int = 128
    dropout: float = 0.2
    epochs: int = 200
    patience: int = 30
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    seed: int = 0

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise ValueError(f"`objective` must be one of {list(OBJECTIVES)}, got {self.objective!r}.")
        for name in ("hidden_size", "epochs", "patience", "batch_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {getattr(self, name)!r}.")


def speeds(examples: Sequence[PolicyExample], block_sizes: Sequence[int], costs: CostTable) -> torch.Tensor:
    """Speedup over plain decoding `(num_examples, num_block_sizes)` under a cost table."""
    return torch.tensor([[costs.speedup(b, e.acceptance_length[b]) for b in block_sizes] for e in examples])


def train_policy(
    train: Sequence[PolicyExample],
    validation: Sequence[PolicyExample],
    costs: CostTable,
    block_sizes: Sequence[int],
    config: PolicyTrainingConfig,
) -> tuple[BlockPilotPolicy, list[dict[str, float]]]:
    """
    Train a head of kind `"choice"` on `compact` features.

    Args:
        train (`Sequence[PolicyExample]`): Prompts to learn from.
        validation (`Sequence[PolicyExample]`): Other prompts, to know when to stop.

    Returns:
        `tuple(BlockPilotPolicy, list[dict])`: the policy of the best epoch in eval mode, and the log by epoch.

    Raises:
        `ValueError`: if a side is empty, or a prompt is on both.
    """
    if not train or not validation:
        raise ValueError(f"Both sides need prompts, got {len(train)} to train on and {len(validation)} to validate on.")
    shared = {e.prompt_hash for e in train} & {e.prompt_hash for e in validation}
    if shared:
        raise ValueError(
            f"{len(shared)} prompts are on both sides. A prompt may be trained on or validated on, not both."
        )
    features = torch.tensor([e.features for e in train])
    mean, std = features.mean(0), features.std(0, unbiased=False)
    varies = std > 1e-6
    scale = torch.where(varies, 1 / std.clamp_min(1e-6), 0.0)
    inputs = (features - mean) * scale
    value, held_out_value = speeds(train, block_sizes, costs), speeds(validation, block_sizes, costs)
    held_out = (torch.tensor([e.features for e in validation]) - mean) * scale

    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(config.seed)
        policy = BlockPilotPolicy(
            BlockPilotConfig(
                block_sizes=list(block_sizes),
                features="compact",
                hidden_size=config.hidden_size,
                dropout=config.dropout,
            )
        ).float()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        best, best_state, log = -math.inf, {}, []
        for epoch in range(config.epochs):
            policy.train()
            for batch in torch.randperm(len(inputs)).split(config.batch_size):
                loss = _loss(policy(inputs[batch]).scores, value[batch], config.objective)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            policy.eval()
            with torch.no_grad():
                speed = _speed_of_choice(policy(held_out).scores, held_out_value)
                log.append(
                    {
                        "epoch": epoch + 1,
                        "train_speedup": _speed_of_choice(policy(inputs).scores, value),
                        "validation_speedup": speed,
                    }
                )
            if speed > best + 1e-6:
                best, best_epoch = speed, epoch
                best_state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
            elif epoch - best_epoch >= config.patience:
                break
    policy.load_state_dict(best_state)
    _fold_scaling(policy, mean, scale)
    return policy.eval(), log


def _loss(scores: torch.Tensor, value: torch.Tensor, objective: str) -> torch.Tensor:
    if objective == "label":
        return F.cross_entropy(scores, best_choice(value))
    # What is lost against the best size, in expectation over the head's distribution.
    return ((1 - value / value.max(-1, keepdim=True).values) * scores.softmax(-1)).sum(-1).mean()


def best_choice(value: torch.Tensor) -> torch.Tensor:
    """Index of the fastest size per prompt, the smallest of equals; `value` is `(num_examples, num_sizes)`."""
    return (value >= value.max(-1, keepdim=True).values).long().argmax(-1)


def _speed_of_choice(scores: torch.Tensor, value: torch.Tensor) -> float:
    return value.gather(-1, scores.argmax(-1, keepdim=True)).mean().item()


@torch.no_grad()
def _fold_scaling(policy: BlockPilotPolicy, mean: torch.Tensor, scale: torch.Tensor) -> None:
    """The policy reads raw features. One that never varied in training has no say: nothing was learned about it."""
    first = policy.layers[0]
    weight = first.weight * scale
    first.bias -= weight @ mean
    first.weight.copy_(weight)


@torch.no_grad()
def compare_rules(
    policy: BlockPilotPolicy,
    train: Sequence[PolicyExample],
    examples: Sequence[PolicyExample],
    costs: CostTable,
) -> dict[str, dict[str, dict[str, float]]]:
    """
    Mean speedup over plain decoding on `examples` under the cost table, by category: every constant size, the constant
    that was best on `train`, the policy, and the best size per prompt.

    Returns:
        `dict`: category (and `"all"`) to rule to `speedup`, with `num_prompts` under the rule `"prompts"`.
    """
    sizes = policy.config.block_sizes
    value = speeds(examples, sizes, costs)
    best_constant = int(speeds(train, sizes, costs).mean(0).argmax())
    chosen = policy(torch.tensor([e.features for e in examples])).scores.argmax(-1)
    rules = {f"constant {size}": value[:, i] for i, size in enumerate(sizes)}
    rules[f"best constant ({sizes[best_constant]})"] = value[:, best_constant]
    rules["policy"] = value.gather(-1, chosen[:, None])[:, 0]
    rules["best per prompt"] = value.max(-1).values
    groups: dict[str, list[int]] = defaultdict(list)
    for i, example in enumerate(examples):
        groups[example.category].append(i)
        groups["all"].append(i)
    return {
        name: {
            "prompts": {"num_prompts": len(members)},
            **{rule: {"speedup": values[members].mean().item()} for rule, values in rules.items()},
            "policy's choices": {str(size): int((chosen[members] == i).sum()) for i, size in enumerate(sizes)},
        }
        for name, members in sorted(groups.items())
    }


__all__ = [
    "OBJECTIVES",
    "PolicyExample",
    "PolicyTrainingConfig",
    "best_choice",
    "compare_rules",
    "speeds",
    "train_policy",
]

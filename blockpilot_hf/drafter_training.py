"""Training a DFlash drafter on the target's own texts: the order of the texts, the optimiser and the steps.

Everything random comes from the seed and the step, nothing from a generator that lives on: a run that was killed and
resumed is the unbroken run. Several processes share the texts of a step and sum their gradients, so that each of them
holds the same weights at any time; with two texts a step, two processes do what one does, bit by bit.
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .candidate_generator import position_limits
from .checks import check_pair, vocab_rows
from .drafter_checkpoint import TrainingLog, TrainingState, load_checkpoint, save_checkpoint
from .drafter_loss import DrafterLoss
from .drafter_recipe import DrafterTrainingConfig
from .modeling_dflash import DFlashDraftModel
from .processes import Processes
from .replay import Replay, acceptance_by_group, replay
from .target_states import TargetStatesReader, weights_fingerprint
from .texts import Text, check_texts

CHECKPOINT_EVERY = 250  # steps
VALIDATE_EVERY = 1000


class DrafterTrainer:
    """
    Args:
        target (`PreTrainedModel`): Left as it is; its states come through `read_states`.
        drafter ([`DFlashDraftModel`]): Trained in place, in float32.
        texts (`list[Text]`): To train on.
        validation (`list[Text]`): Texts of other prompts, for the acceptance length while training goes on.
        config ([`DrafterTrainingConfig`]): The recipe.
        output_dir (`Path`): Checkpoints and `log.jsonl` are written here while training goes on.
        states_dir (`Path`, *optional*): Where target states are kept; recomputed at every visit without it.
        processes ([`Processes`], *optional*):
            Those that train together, each with a trainer of the same arguments; by default this one alone.

    Raises:
        `ValueError`:
            if there is no text to train on, a text or the drafter does not fit the target, or the drafter's block size
            is not among those of the recipe.
    """

    def __init__(
        self,
        target: Any,
        drafter: DFlashDraftModel,
        texts: list[Text],
        validation: list[Text],
        config: DrafterTrainingConfig,
        output_dir: Path,
        states_dir: Path | None = None,
        *,
        processes: Processes | None = None,
    ):
        if not texts:
            raise ValueError("There is no text to train on. Give more texts, or hold fewer out for validation.")
        check_pair(target, drafter)
        sizes = config.block_sizes
        if sizes is not None and drafter.config.block_size not in sizes:
            raise ValueError(
                f"The drafter's block size is {drafter.config.block_size}, the recipe trains {sizes}. Give the drafter "
                "one of them, or train its size too."
            )
        head = target.get_output_embeddings()
        limits = [limit for limit, _ in position_limits(target)] + [drafter.config.max_position_embeddings]
        num_ids = min(vocab_rows(target), head.weight.shape[0])
        check_texts([*texts, *validation], vocab_size=num_ids, max_length=min(limits))
        self.target, self.drafter, self.config, self.output_dir = target, drafter, config, Path(output_dir)
        self.processes = processes or Processes()
        self.texts, self.validation, self.log = texts, validation, TrainingLog(self.output_dir / "log.jsonl")
        self.fingerprint = weights_fingerprint(target)
        self.read_states = TargetStatesReader(
            target, drafter.config.target_layer_ids, folder=states_dir, fingerprint=self.fingerprint
        )
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(),
            lr=config.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.occurring = torch.tensor(_occurring(texts, config.min_token_count))
        self.compute_loss = DrafterLoss(target, drafter, config, self.occurring, self.read_states)
        self._order: tuple[int, list[int]] = (-1, [])
        self._validated: set[int] = set()
        self.state = TrainingState(settings=self._settings())

    def train(
        self,
        *,
        checkpoint_every: int = CHECKPOINT_EVERY,
        validate_every: int = VALIDATE_EVERY,
        on_step: Callable[[int, float], None] | None = None,
        on_validation: Callable[[int, dict[str, Any]], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """
        Train to `config.steps`, from the last checkpoint in `output_dir` where there is one.

        Args:
            checkpoint_every, validate_every (`int`): In steps. After the last step nothing is validated here.
            on_step (`Callable`, *optional*): Called with the number of steps done and the loss.
            on_validation (`Callable`, *optional*): Called with the step and the acceptance length by category.
            should_stop (`Callable`, *optional*):
                Asked after every step and before every validated text. `True` ends the run with a checkpoint, and so it
                does in one of several processes.

        Returns:
            `bool`: whether the run came to its last step.

        Raises:
            `FloatingPointError`: if the loss or its gradient is not finite. The last checkpoint is still there.
            `OSError`: if a checkpoint, states or the log cannot be written.
        """
        if self.state.step == 0:
            self.resume()
        while True:
            step, num_steps = self.state.step, self.config.steps
            if self.validation and 0 < step < num_steps and step % validate_every == 0 and step not in self._validated:
                found = self.validate(should_stop)
                if found is None:
                    return False
                self._log({"step": step, "acceptance_length": found})
                self._validated.add(step)
                if on_validation is not None:
                    on_validation(step, found)
            if step >= num_steps:
                return True
            started = time.perf_counter()
            loss, num_tokens = self.train_step(step)
            self.state.step = step = step + 1
            self.state.num_tokens += num_tokens
            self.state.seconds += time.perf_counter() - started
            self._log({"step": step, "loss": loss, "learning_rate": self.optimizer.param_groups[0]["lr"]})
            if on_step is not None:
                on_step(step, loss)
            stopping = bool(self.processes.largest(should_stop()))
            # Before a validation too: it takes long, and may be interrupted.
            if stopping or step % checkpoint_every == 0 or step % validate_every == 0 or step == num_steps:
                if self.processes.is_main:
                    save_checkpoint(self.output_dir, self.drafter, self.optimizer, self.state)
                self.processes.wait()  # a process that ended earlier would take the one that saves with it
            if stopping:
                return step >= num_steps

    def resume(self) -> int:
        """
        Go back to the last checkpoint in `output_dir`; without one the run is at its start.

        Returns:
            `int`: the steps done.

        Raises:
            `ValueError`: if the checkpoint is of another recipe, target or set of texts.
        """
        # What a checkpoint does not name was as it is by default: its version knew nothing else.
        defaults = {field.name: field.default for field in fields(DrafterTrainingConfig)}
        state = load_checkpoint(self.output_dir, self.drafter, self.optimizer, self.state.settings, defaults=defaults)
        if state is not None:
            state.settings = self.state.settings
            self.state = state
        # Steps after the checkpoint are taken again, so their lines go.
        kept = self.log.cut_after(self.state.step) if self.processes.is_main else []
        kept = self.processes.gather(kept)[0]
        self._validated = {entry["step"] for entry in kept if "acceptance_length" in entry}
        return self.state.step

    def train_step(self, step: int) -> tuple[float, int]:
        """
        One optimiser step.

        Returns:
            `tuple(float, int)`: the loss, and the number of drafted positions that it was taken over.

        Raises:
            `FloatingPointError`: if the loss or its gradient is not finite; weights and moments are then as before.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(step)
        self.drafter.train()
        self.optimizer.zero_grad(set_to_none=True)
        count = self.config.texts_per_step
        visits = range(step * count, (step + 1) * count)
        losses, positions = [0.0] * count, [0] * count
        for index in range(self.processes.index, count, self.processes.count):
            visit = visits[index]
            loss, positions[index] = self.loss(self._text_of(visit), _generator(self.config.seed, 1, visit))
            (loss / count).backward()
            losses[index] = loss.item() / count
        self.processes.sum_gradients(self.drafter.parameters())
        # Each process fills in its own texts, so the sum over the texts is in their order whoever had which.
        summed = self.processes.sum([*losses, *positions])
        total, num_positions = sum(summed[:count]), round(sum(summed[count:]))
        norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.max_grad_norm).item()
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise FloatingPointError(
                f"Step {step + 1} has the loss {total} and a gradient of norm {norm}. Start anew in another output "
                f"folder with a learning rate below {self.config.learning_rate}, and check that the target's states "
                "are finite."
            )
        self.optimizer.step()
        return total, num_positions

    def _text_of(self, visit: int) -> Text:
        """Every epoch sees every text once, in an order of its own."""
        epoch, index = divmod(visit, len(self.texts))
        if self._order[0] != epoch:
            generator = _generator(self.config.seed, 0, epoch)
            self._order = epoch, torch.randperm(len(self.texts), generator=generator).tolist()
        return self.texts[self._order[1][index]]

    def loss(self, text: Text, generator: torch.Generator) -> tuple[torch.Tensor, int]:
        """As [`DrafterLoss`] computes it."""
        return self.compute_loss(text, generator)

    def validate(self, should_stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """
        Acceptance length along the validation texts at the drafter's block size, as [`acceptance_groups`] gives it;
        `None` if it was stopped.
        """
        self.drafter.eval()
        block_size = self.drafter.config.block_size

        def accepted(text: Text) -> dict[int, list[int]]:
            return replay(self.target, self.drafter, text, self.read_states(text).context, [block_size]).num_accepted

        found = self.processes.deal(self.validation, accepted, should_stop)
        if found is None:
            return None
        return acceptance_groups([Replay(*pair) for pair in zip(self.validation, found, strict=True)], block_size)

    def _settings(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        recipe = {name: value for name, value in asdict(self.config).items() if name != "steps"}
        texts = [text.prompt_hash + str(text.answer_ids) for text in self.texts]
        settings = {
            **recipe,
            "target": self.fingerprint,
            "texts": _short_hash("\n".join(sorted(texts))),
            "order of the texts": _short_hash("\n".join(texts)),
            "drafter": _short_hash(json.dumps(self.drafter.config.to_diff_dict(), sort_keys=True, default=str)),
            "start": weights_fingerprint(self.drafter),
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }
        return json.loads(json.dumps(settings))  # as it will be read again, without tuples

    def _log(self, entry: dict[str, Any]) -> None:
        if self.processes.is_main:
            self.log.append({**entry, "seconds": round(self.state.seconds, 3)})


def acceptance_groups(replays: Sequence[Replay], block_size: int) -> dict[str, dict[str, float | int]]:
    """
    As [`acceptance_by_group`], and where texts of several temperatures are there, all of each: `all, temperature 1`.
    """
    groups = acceptance_by_group(replays, block_size)
    temperatures = sorted({one.text.temperature for one in replays})
    for temperature in temperatures if len(temperatures) > 1 else ():
        same = [one for one in replays if one.text.temperature == temperature]
        groups[f"all, temperature {temperature:g}"] = acceptance_by_group(same, block_size)["all"]
    return groups


def _occurring(texts: Sequence[Text], min_count: int) -> list[int]:
    counts = Counter(i for text in texts for i in text.answer_ids)
    tokens = sorted(i for i, count in counts.items() if count >= min_count)
    if not tokens:
        raise ValueError(
            f"No token occurs {min_count} times in the training answers; the commonest occurs "
            f"{max(counts.values())} times. Lower `min_token_count`, or give more texts."
        )
    return tokens


def _generator(seed: int, stream: int, index: int) -> torch.Generator:
    digest = _short_hash(f"{seed} {stream} {index}")
    return torch.Generator().manual_seed(int(digest[:15], 16))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


__all__ = ["CHECKPOINT_EVERY", "VALIDATE_EVERY", "DrafterTrainer", "DrafterTrainingConfig", "acceptance_groups"]

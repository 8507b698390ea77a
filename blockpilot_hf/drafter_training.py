"""Training a DFlash drafter on the target's own texts (arXiv 2602.06036, section 4.2, and what worked at small size).

The loss is the cross-entropy of the drafted positions, weighted exp(-(k - 1) / gamma) by position k, after random
anchors in the answers; a share of it is taken against the target's whole distribution instead of its one token, which
says more per text. Embedding and head are the target's, frozen, and the loss runs over the tokens that occur in the
training answers, since the others cost time and teach nothing.

Everything random comes from the seed and the step, nothing from a generator that lives on: a run that was killed and
resumed is the unbroken run.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .candidate_generator import position_limits
from .checks import check_pair, vocab_rows
from .drafter_checkpoint import TrainingLog, TrainingState, load_checkpoint, save_checkpoint
from .drafter_recipe import DrafterTrainingConfig
from .modeling_dflash import DFlashDraftModel
from .parallel_drafting import draft_states, noise_embeds
from .replay import acceptance_by_group, replay
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

    Raises:
        `ValueError`: if there is no text to train on, or a text or the drafter does not fit the target.
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
    ):
        if not texts:
            raise ValueError("There is no text to train on. Give more texts, or hold fewer out for validation.")
        check_pair(target, drafter)
        head = target.get_output_embeddings()
        limits = [limit for limit, _ in position_limits(target)] + [drafter.config.max_position_embeddings]
        num_ids = min(vocab_rows(target), head.weight.shape[0])
        check_texts([*texts, *validation], vocab_size=num_ids, max_length=min(limits))
        self.target, self.drafter, self.config, self.output_dir = target, drafter, config, Path(output_dir)
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
        occurring = self.occurring = torch.tensor(sorted({i for text in texts for i in text.answer_ids}))
        self._head = _rows_of_head(head, occurring)
        self._class_of = torch.full((head.weight.shape[0],), -1)
        self._class_of[occurring] = torch.arange(len(occurring))
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
                Asked after every step and every validated text. `True` ends the run with a checkpoint.

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
            stopping = should_stop()
            # Before a validation too: it takes long, and may be interrupted.
            if stopping or step % checkpoint_every == 0 or step % validate_every == 0 or step == num_steps:
                save_checkpoint(self.output_dir, self.drafter, self.optimizer, self.state)
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
        state = load_checkpoint(self.output_dir, self.drafter, self.optimizer, self.state.settings)
        if state is not None:
            state.settings = self.state.settings
            self.state = state
        # Steps after the checkpoint are taken again, so their lines go.
        kept = self.log.cut_after(self.state.step)
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
        total, positions = 0.0, 0
        for visit in range(step * self.config.sequences_per_step, (step + 1) * self.config.sequences_per_step):
            loss, count = self.loss(self._text_of(visit), _generator(self.config.seed, 1, visit))
            (loss / self.config.sequences_per_step).backward()
            total += loss.item() / self.config.sequences_per_step
            positions += count
        norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.max_grad_norm).item()
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise FloatingPointError(
                f"Step {step + 1} has the loss {total} and a gradient of norm {norm}. Start anew in another output "
                f"folder with a learning rate below {self.config.learning_rate}, and check that the target's states "
                "are finite."
            )
        self.optimizer.step()
        return total, positions

    def _text_of(self, visit: int) -> Text:
        """Every epoch sees every text once, in an order of its own."""
        epoch, index = divmod(visit, len(self.texts))
        if self._order[0] != epoch:
            generator = _generator(self.config.seed, 0, epoch)
            self._order = epoch, torch.randperm(len(self.texts), generator=generator).tolist()
        return self.texts[self._order[1][index]]

    def loss(self, text: Text, generator: torch.Generator) -> tuple[torch.Tensor, int]:
        """
        The weighted loss of random anchors of one text.

        Returns:
            `tuple(torch.Tensor, int)`: a scalar, and the number of drafted positions.
        """
        block_size, device = self.drafter.config.block_size, self.drafter.device
        states = self.read_states(text)
        ids = torch.tensor(text.ids, device=device)
        first, last = len(text.prompt_ids), len(ids) - 2  # an anchor needs a token after it
        choices = torch.randperm(last - first + 1, generator=generator)[: self.config.anchors_per_sequence]
        anchors = (choices + first).sort().values.to(device)
        noise = noise_embeds(self.drafter, self.target.get_input_embeddings(), ids[anchors], block_size)
        drafted = draft_states(self.drafter, states.context.to(self.drafter.dtype), anchors, noise)[:, 1:]
        offsets = torch.arange(1, block_size, device=device)
        positions = anchors[:, None] + offsets
        inside = positions < len(ids)
        labels = self._class_of.to(device)[ids[positions.clamp_max(len(ids) - 1)]]
        used = inside & (labels >= 0)
        weights = torch.exp(-(offsets - 1) / self.config.gamma).expand_as(used)[used]
        logits = self.drafter.draft_logits(drafted[used], self._head).float()
        hard = F.cross_entropy(logits, labels[used], reduction="none")
        loss = hard
        if self.config.distillation > 0:
            with torch.no_grad():
                # The state that predicts a token is that of the token before it.
                before = states.last[(positions - 1)[used]].to(self._head.weight.dtype)
                teacher = self.drafter.draft_logits(before, self._head).float().softmax(-1)
            soft = F.cross_entropy(logits, teacher, reduction="none")
            loss = self.config.distillation * soft + (1 - self.config.distillation) * hard
        return (loss * weights).sum() / weights.sum(), int(used.sum())

    def validate(self, should_stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """
        Acceptance length along the validation texts at the training block size, by category, as
        [`acceptance_by_group`] gives it; `None` if it was stopped.
        """
        self.drafter.eval()
        block_size, walks = self.drafter.config.block_size, []
        for text in self.validation:
            if should_stop():
                return None
            walks.append(replay(self.target, self.drafter, text, self.read_states(text).context, [block_size]))
        return acceptance_by_group(walks, block_size)

    def _settings(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        recipe = {name: value for name, value in asdict(self.config).items() if name != "steps"}
        texts = [text.prompt_hash + str(text.answer_ids) for text in self.texts]
        return {
            **recipe,
            "target": self.fingerprint,
            "texts": _short_hash("\n".join(sorted(texts))),
            "order of the texts": _short_hash("\n".join(texts)),
            "drafter": _short_hash(json.dumps(self.drafter.config.to_diff_dict(), sort_keys=True, default=str)),
            "start": weights_fingerprint(self.drafter),
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }

    def _log(self, entry: dict[str, Any]) -> None:
        self.log.append({**entry, "seconds": round(self.state.seconds, 3)})


def _rows_of_head(head: nn.Module, rows: torch.Tensor) -> nn.Linear:
    """The frozen head restricted to some tokens."""
    part = nn.Linear(head.weight.shape[1], len(rows), bias=head.bias is not None, device="meta")
    part.weight = nn.Parameter(head.weight.detach()[rows.to(head.weight.device)].float().clone(), requires_grad=False)
    if head.bias is not None:
        part.bias = nn.Parameter(head.bias.detach()[rows.to(head.bias.device)].float().clone(), requires_grad=False)
    return part


def _generator(seed: int, stream: int, index: int) -> torch.Generator:
    digest = _short_hash(f"{seed} {stream} {index}")
    return torch.Generator().manual_seed(int(digest[:15], 16))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


__all__ = ["CHECKPOINT_EVERY", "VALIDATE_EVERY", "DrafterTrainer", "DrafterTrainingConfig"]

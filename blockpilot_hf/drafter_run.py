"""One training run as a command: what it says, how it is stopped, and what it leaves when it is done."""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .drafter_record import acceptance_record, package_versions, replay_texts, save_drafter, write_json
from .drafter_training import DrafterTrainer
from .loading import load_drafter
from .target_states import weights_fingerprint
from .texts import Text
from .training_display import TrainingDisplay


class DrafterRun:
    """
    Args:
        trainer ([`DrafterTrainer`]): Ready to train; its `validation` is a part of `held_out`.
        held_out (`Sequence[Text]`): The result is judged on all of them.
        texts_file (`Path`): Where the texts came from, for the record.
        command (`Sequence[str]`): What starts this run again.
        console (`rich.console.Console`): Where to say things.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        held_out: Sequence[Text],
        *,
        texts_file: Path,
        command: Sequence[str],
        console: Any,
    ):
        self.trainer, self.held_out, self.texts_file = trainer, held_out, texts_file
        self.command, self.console = shlex.join(command), console
        self.output_dir = trainer.output_dir
        self.drafter_dir, self.record_path = self.output_dir / "drafter", self.output_dir / "validation.json"

    def __call__(self, *, validate_every: int, checkpoint_every: int) -> int:
        """
        Train, write the drafter, judge it.

        Returns:
            `int`: status of the process: 0 when all is done, 128 and the signal's number when it was stopped.
        """
        trainer = self.trainer
        self._announce()
        step, num_steps = trainer.resume(), trainer.config.steps
        display = TrainingDisplay(self.console, step, num_steps)
        record = self._record_of(step)
        if step >= num_steps and record is not None:
            display.line(f"finished before, at step {step}: nothing to do")
            self._show_result(display, record)
            return 0
        if step:
            display.line(f"resuming at step {step} of {num_steps}" if step < num_steps else f"at step {step} already")
        with stop_signals() as stopped:
            with display:
                done = trainer.train(
                    checkpoint_every=checkpoint_every,
                    validate_every=validate_every,
                    on_step=lambda n, loss: display.step(n, loss, trainer.config.learning_rate_at(n - 1)),
                    on_validation=lambda n, groups: display.acceptance(self._title(f"at step {n}"), groups),
                    should_stop=lambda: bool(stopped),
                )
            record = self._finish(display, lambda: bool(stopped)) if done else None
            if record is None:
                state = f"the checkpoint of step {trainer.state.step} is in {self.output_dir / 'checkpoint'}"
                display.line(f"stopped: {state}. To go on, the same command again:\n  {self.command}")
                return 128 + stopped[0]
        self._show_result(display, record)
        return 0

    def _announce(self) -> None:
        trainer, config = self.trainer, self.trainer.drafter.config
        tokens = sum(len(text.ids) for text in trainer.texts)
        answers = sum(len(text.answer_ids) for text in trainer.texts)
        categories = len({text.category for text in self.held_out})
        lines = [
            f"texts: {len(trainer.texts):,}, {tokens:,} tokens, {answers:,} of them in answers",
            f"held out: {len({t.prompt_hash for t in self.held_out}):,} prompts of {categories} categories"
            if self.held_out
            else "held out: no prompt, so nothing will be said about acceptance (see `--validation-prompts`)",
            f"target: {trainer.target.config._name_or_path}, {trainer.target.dtype}".replace("torch.", ""),
            f"drafter: {trainer.drafter.num_parameters():,} parameters, layers {config.num_hidden_layers}, block size "
            f"{config.block_size}, reads target layers {', '.join(map(str, config.target_layer_ids))}",
        ]
        masked = sum(config.mask_token_id in text.ids for text in trainer.texts)
        if masked:
            lines.append(
                f"note: {masked} texts contain the mask token {config.mask_token_id}; better take one that none has"
            )
        lines.append(self._disk_for_states())
        self.console.print("\n".join(lines), soft_wrap=not self.console.is_terminal)

    def _disk_for_states(self) -> str:
        reader, texts = self.trainer.read_states, self.trainer.texts
        if reader.folder is None:
            return "target's states: computed at every visit"
        missing = [text for text in texts if not reader.has(text)]
        visits = self.trainer.config.steps * self.trainer.config.sequences_per_step
        share = min(1.0, visits / len(texts))
        needed = round(share * sum(len(text.ids) for text in missing)) * reader.bytes_per_token
        existing = next(folder for folder in (reader.folder, *reader.folder.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise ValueError(
                f"The target's states need about {needed / 1e9:.1f} GB in {reader.folder}, {free / 1e9:.1f} GB are "
                "free. Name a folder on another disk with `--states`, or pass `--recompute`."
            )
        return f"target's states: kept in {reader.folder}, {needed / 1e9:.2f} GB more ({free / 1e9:.1f} GB are free)"

    def _finish(self, display: TrainingDisplay, should_stop: Any) -> dict[str, Any] | None:
        """The drafter as others will load it, judged on what was held out; `None` if stopped before the end."""
        trainer = self.trainer
        # What it was not trained on it does not get right, and a small head is a quick one.
        save_drafter(
            trainer.drafter,
            self.drafter_dir,
            target_fingerprint=trainer.fingerprint,
            shortlist_ids=trainer.occurring,
        )
        drafter = load_drafter(self.drafter_dir, dtype=trainer.target.dtype).to(trainer.target.device)
        if self.held_out:
            display.line(f"trained to step {trainer.state.step}; judging the drafter on {len(self.held_out)} texts")
        walks = replay_texts(trainer.target, drafter, self.held_out, should_stop)
        if walks is None:
            return None
        record = {
            "run_info": {
                "command": self.command,
                "finished_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "num_steps": trainer.state.step,
                "training_s": round(trainer.state.seconds, 1),
                "num_drafted_positions": trainer.state.num_tokens,
            },
            "meta_info": {
                "versions": package_versions(),
                "target_name_or_path": drafter.config.target_name_or_path,
                "target_fingerprint": trainer.fingerprint,
                "target_dtype": str(trainer.target.dtype).removeprefix("torch."),
                "drafter_fingerprint": weights_fingerprint(drafter),
                "num_parameters": drafter.num_parameters(),
                "texts_file": self.texts_file.name,
                "texts_sha256": hashlib.sha256(self.texts_file.read_bytes()).hexdigest(),
                "num_texts": len(trainer.texts),
                "num_held_out": len(self.held_out),
            },
            "settings": asdict(trainer.config) | {"target_layer_ids": drafter.config.target_layer_ids},
            **acceptance_record(walks, drafter.config.block_size),
        }
        write_json(self.record_path, record)
        return record

    def _record_of(self, step: int) -> dict[str, Any] | None:
        """The record of a finished run that ended at `step`, if the drafter is there too."""
        if not self.drafter_dir.is_dir() or not self.record_path.is_file():
            return None
        record = json.loads(self.record_path.read_text(encoding="utf-8"))
        return record if record["run_info"]["num_steps"] == step else None

    def _show_result(self, display: TrainingDisplay, record: dict[str, Any]) -> None:
        if record["acceptance_length"]:
            display.acceptance(self._title("on all that is held out"), record["acceptance_length"])
        display.line(f"drafter: {self.drafter_dir}")
        display.line(f"record: {self.record_path}")

    def _title(self, when: str) -> str:
        return f"acceptance length (tau) {when}, block size {self.trainer.drafter.config.block_size}"


@contextlib.contextmanager
def only_run_in(output_dir: Path) -> Iterator[None]:
    """
    Raises:
        `ValueError`: if another process trains in the folder.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"Another process trains in {output_dir}. Wait for it, or name another folder with `--output`."
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM is only noted, in the list; a second one is what it always is."""
    stopped: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        stopped.append(number)
        for name, handler in before.items():
            signal.signal(name, handler)
        # Straight to the terminal: the signal may have come in the middle of a print.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this step, with a checkpoint (once more: at once, without one)\n")

    if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be taken
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # a run that is told to ignore them goes on
                before[number] = signal.signal(number, note)
    try:
        yield stopped
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


__all__ = ["DrafterRun", "only_run_in", "stop_signals"]

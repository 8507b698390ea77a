"""One training run as a command: what it says, how it is stopped, and what it leaves when it is done."""

import contextlib
import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .display import counted
from .drafter_estimate import estimate_disk, estimate_run
from .drafter_record import VALIDATION, TrainingPrompts, replay_texts, run_record, save_drafter, write_json
from .drafter_training import DrafterTrainer
from .loading import load_drafter
from .texts import Text
from .training_display import TrainingDisplay, disk_line, estimate_lines
from .training_plot import draw_log

# So soon after the first, a signal comes from who started the processes, not from the user.
_LAUNCHER_REPEATS_S = 3.0


class DrafterRun:
    """
    With several processes each makes the same calls; the main one writes and prints.

    Args:
        trainer ([`DrafterTrainer`]): Ready to train; its `validation` is a part of `held_out`.
        held_out (`Sequence[Text]`): The result is judged on all of them.
        made_of (`dict[str, Any]`): Where texts and start came from, for the record.
        earlier_prompts ([`TrainingPrompts`], *optional*): Those of the drafter that the run started from.
        earlier_progress (`Sequence[dict]`, *optional*): How the start came to what it is, see [`progress_of`].
        command (`Sequence[str]`): What starts this run again.
        console (`rich.console.Console`): Where to say things; quiet in all processes but the main one.
        plot (`Path`, *optional*): A picture of the log, drawn at every validation and at the end.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        held_out: Sequence[Text],
        *,
        made_of: dict[str, Any],
        earlier_prompts: TrainingPrompts | None = None,
        earlier_progress: Sequence[dict[str, Any]] = (),
        command: Sequence[str],
        console: Any,
        plot: Path | None = None,
    ):
        self.trainer, self.held_out, self.made_of, self.plot = trainer, held_out, made_of, plot
        self.command, self.console = shlex.join(command), console
        self.earlier_prompts, self.earlier_progress = earlier_prompts or TrainingPrompts(), earlier_progress
        self.output_dir, self.processes = trainer.output_dir, trainer.processes
        self.drafter_dir, self.record_path = self.output_dir / "drafter", self.output_dir / VALIDATION

    def __call__(self, *, validate_every: int, checkpoint_every: int) -> int:
        """
        Train, write the drafter, judge it.

        Returns:
            `int`: status of the process: 0 when all is done, 128 and the signal's number when it was stopped.
        """
        trainer = self.trainer
        if self.plot is not None and self.processes.is_main:
            self.plot.parent.mkdir(parents=True, exist_ok=True)  # now, as at the end it would be too late to say no
        self._announce()
        step, num_steps = trainer.resume(), trainer.config.steps
        display = TrainingDisplay(self.console, step, num_steps)
        record = self._record_of(step)
        if step >= num_steps and record is not None:
            display.line(f"finished before, at step {step}: nothing to do")
            self._show_result(display, record)
            return 0
        if step < num_steps:
            self._announce_cost(num_steps - step)
        if step:
            display.line(f"resuming at step {step} of {num_steps}" if step < num_steps else f"at step {step} already")

        def show_validation(at: int, groups: dict[str, Any]) -> None:
            display.acceptance(self._title(f"at step {at}"), groups)
            self._draw()

        alone = self.processes.count == 1
        with stop_signals(repeats_s=0.0 if alone else _LAUNCHER_REPEATS_S, speaks=self.processes.is_main) as stopped:
            with display:
                done = trainer.train(
                    checkpoint_every=checkpoint_every,
                    validate_every=validate_every,
                    on_step=lambda n, loss: display.step(n, loss, trainer.config.learning_rate_at(n - 1)),
                    on_validation=show_validation,
                    should_stop=lambda: bool(stopped),
                )
            record = self._finish(display, lambda: bool(stopped)) if done else None
            if record is None:
                state = f"the checkpoint of step {trainer.state.step} is in {self.output_dir / 'checkpoint'}"
                display.line(f"stopped: {state}. To go on, the same command again:\n  {self.command}")
                return 128 + self.processes.largest(stopped[0] if stopped else 0)
        self._show_result(display, record)
        return 0

    def _announce(self) -> None:
        trainer, config = self.trainer, self.trainer.drafter.config
        tokens = sum(len(text.ids) for text in trainer.texts)
        answers = sum(len(text.answer_ids) for text in trainer.texts)
        categories = len({text.category for text in self.held_out})
        lines = [
            f"texts: {len(trainer.texts):,}, {tokens:,} tokens, {answers:,} of them in answers",
            f"held out: {counted(len({t.prompt_hash for t in self.held_out}), 'prompt')} of "
            f"{counted(categories, 'category', 'categories')}"
            if self.held_out
            else "held out: no prompt, so nothing will be said about acceptance (see `--validation-prompts`)",
            f"target: {trainer.target.config._name_or_path}, {trainer.target.dtype}".replace("torch.", ""),
            f"drafter: {trainer.drafter.num_parameters():,} parameters, layers {config.num_hidden_layers}, block size "
            f"{config.block_size}, reads target layers {', '.join(map(str, config.target_layer_ids))}",
        ]
        masked = sum(config.mask_token_id in text.ids for text in trainer.texts)
        if masked:
            lines.append(
                f"note: {counted(masked, 'text')} with the mask token {config.mask_token_id} in it; better take one "
                "that none has"
            )
        if trainer.config.block_sizes is not None:
            lines.append(f"block sizes in training: {', '.join(map(str, trainer.config.block_sizes))}")
        if self.processes.count > 1:
            lines.append(f"processes: {self.processes.count}, which share the texts of a step")
        visits = trainer.config.steps * trainer.config.texts_per_step
        lines.append(disk_line(estimate_disk(trainer.read_states, trainer.texts, visits)))
        self.console.print("\n".join(lines), soft_wrap=not self.console.is_terminal)

    def _announce_cost(self, num_steps: int) -> None:
        trainer = self.trainer
        estimate = estimate_run(
            trainer.compute_loss,
            trainer.optimizer,
            trainer.texts,
            num_steps=num_steps,
            num_processes=self.processes.count,
        )
        self.console.print("\n".join(estimate_lines(estimate)), soft_wrap=not self.console.is_terminal)

    def _finish(self, display: TrainingDisplay, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """The drafter as others will load it, judged on what was held out; `None` if stopped before the end."""
        trainer = self.trainer
        known: list[Text | str] = [*trainer.texts, *self.earlier_prompts.hashes]
        if self.processes.is_main:
            # What it was not trained on it does not get right, and a small head is a quick one.
            save_drafter(
                trainer.drafter,
                self.drafter_dir,
                target_fingerprint=trainer.fingerprint,
                shortlist_ids=trainer.occurring,
                training_prompts=known,
                is_complete=self.earlier_prompts.is_complete,
            )
        self.processes.wait()
        drafter = load_drafter(self.drafter_dir, dtype=trainer.target.dtype).to(trainer.target.device)
        if self.held_out:
            display.line(
                f"trained to step {trainer.state.step}; judging the drafter on {counted(len(self.held_out), 'text')}"
            )
        walks = replay_texts(trainer.target, drafter, self.held_out, should_stop, self.processes)
        if walks is None:
            return None
        record = run_record(
            trainer,
            drafter,
            walks,
            command=self.command,
            made_of=self.made_of,
            training_prompts=known,
            earlier_progress=self.earlier_progress,
        )
        if self.processes.is_main:
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
        if self._draw(record):
            display.line(f"plot: {self.plot}")

    def _draw(self, record: dict[str, Any] | None = None) -> bool:
        """With the record of a finished run also what its drafter is worth."""
        if self.plot is None or not self.processes.is_main:
            return False
        final = None
        if record is not None:
            final = {"step": record["run_info"]["num_steps"], "acceptance_length": record["acceptance_length"]}
        config = self.trainer.drafter.config
        target = Path(config.target_name_or_path or self.trainer.target.config._name_or_path).name
        draw_log(
            self.trainer.log.path,
            self.plot,
            title=f"drafter for {target or 'a target'}, block size {config.block_size}",
            final=final,
        )
        return True

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
def stop_signals(*, repeats_s: float = 0.0, speaks: bool = True) -> Iterator[list[int]]:
    """
    The first Ctrl-C or SIGTERM is only noted, in the list; a second one is what it always is.

    Args:
        repeats_s (`float`, *optional*, defaults to 0.0):
            For so long after the first one, others mean the same: who starts several processes passes a Ctrl-C on that
            the terminal has sent to all of them already.
        speaks (`bool`, *optional*, defaults to `True`): Say on stderr what will happen.
    """
    stopped: list[int] = []
    before: dict[int, Any] = {}
    first = [0.0]

    def note(number: int, frame: Any) -> None:
        if stopped and time.monotonic() - first[0] >= repeats_s:
            restore()
            os.kill(os.getpid(), number)
            return
        if not stopped:
            first[0] = time.monotonic()
            if repeats_s == 0:
                restore()
            # Straight to the terminal: the signal may have come in the middle of a print.
            with contextlib.suppress(OSError):
                if speaks:
                    os.write(2, b"\nstopping after this step, with a checkpoint (once more: at once, without one)\n")
        stopped.append(number)

    def restore() -> None:
        for name, handler in before.items():
            signal.signal(name, handler)

    if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be taken
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # a run that is told to ignore them goes on
                before[number] = signal.signal(number, note)
    try:
        yield stopped
    finally:
        restore()


__all__ = ["DrafterRun", "only_run_in", "stop_signals"]

"""`blockpilot generate`: answers as they are decoded, what each step contributed, and how plain decoding compares."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.generation.streamers import BaseStreamer

from .checks import check_adapt, check_lookup
from .cli_answers import Answer, answer_name, record_of, summary_of
from .cli_common import (
    EMBEDDED,
    Adapt,
    Costs,
    Drafter,
    Dtype,
    Limit,
    NewTokens,
    Packing,
    Policy,
    Seed,
    Target,
    Temperature,
    UseLookup,
    check_names,
    load_pilot,
    load_target,
    machine_facts,
    policy_name,
    sampling_settings,
)
from .cli_console import Marks, Screen, held_notes, working
from .cli_measure import Measurement, measure
from .display import (
    PLAIN_SYMBOLS,
    SYMBOLS,
    PieceStream,
    acceptance_line,
    are_accepted,
    block_size_line,
    counted,
    flight_line,
    identity_words,
    shortened,
    speed_line,
    step_strip,
)
from .generate import BlockPilot
from .prompts import Prompt, encode_prompt, read_prompts, sample_prompts
from .trace import DecodeTrace, StepRecord


def generate(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="The user's message, or several; '-' reads one from standard input.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File with prompts: .jsonl with `prompt` or `turns`, or one per line."
        ),
    ] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Answer three built-in prompts.")] = False,
    limit: Limit = None,
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Fix the block size; 1 is plain decoding.")] = None,
    adapt: Adapt = None,
    lookup: UseLookup = None,
    costs: Costs = None,
    system: Annotated[
        str | None, typer.Option(help="System message.", show_default="that of the target's chat template")
    ] = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    pack: Packing = True,
    compare: Annotated[
        bool, typer.Option("--compare", help="Time plain generate too, and compare speed and text.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds timed by --compare; medians are shown.")] = 1,
    marks: Annotated[
        Marks,
        typer.Option(
            help="How accepted tokens are told from the target's own: 'inline' (underlined; in brackets where text "
            "cannot be styled), 'strip' (a symbol per token, after the text), 'none'; 'auto': inline on a terminal, "
            "else strip."
        ),
    ] = Marks.AUTO,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show the answers and nothing else.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with text and figures as the last line.")
    ] = False,
) -> None:
    """Answer each PROMPT, streamed, and say which block size was used and how many drafted tokens were accepted."""
    check_names(target, drafter, policy, dtype)
    check_adapt(adapt, block_size)
    check_lookup(lookup, "prompt" if block_size is not None else adapt)
    chosen = _chosen_prompts(prompt or [], prompts, limit, samples)
    model, tokenizer = load_target(target, dtype, pack=pack)
    pilot = load_pilot(drafter, policy, model, pack=pack, adapt=adapt, lookup=lookup, costs=costs)
    screen = Screen(Marks.NONE if quiet and marks == Marks.AUTO else marks, is_quiet=quiet)
    settings = {**sampling_settings(temperature), "max_new_tokens": max_new_tokens}
    answering = _Answering(model, tokenizer, pilot, screen, system, block_size, seed, settings)

    num_turns = sum(len(each.turns) for each in chosen)
    answers: list[Answer] = []
    for each in chosen:
        history: list[tuple[str, str]] = []
        for turn, text in enumerate(each.turns, start=1):
            if num_turns > 1:
                screen.heading(f"[{len(answers) + 1}/{num_turns}] {answer_name(each, turn)}", shortened(text, 300))
            answer = answering.answer(each, turn, history, repeats=repeats if compare else 0)
            history.append((text, answer.text))
            answers.append(answer)
    if num_turns > 1:
        screen.line()
        screen.table("all prompts", *summary_of(answers))
    if drafter == "untrained":
        screen.line("The drafter is untrained: its tokens are almost never accepted, and drafting only costs time.")
    if as_json:
        facts = {
            "target": target or model.name_or_path,
            "drafter": drafter or EMBEDDED,
            "policy": "none" if block_size is not None else policy_name(pilot, policy),
            **machine_facts(model),
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        screen.json_line(json.dumps({**record_of(answers), **facts}, allow_nan=False))


@dataclass
class _Answering:
    """What stays the same from prompt to prompt."""

    model: Any
    tokenizer: Any
    pilot: BlockPilot
    screen: Screen
    system: str | None
    block_size: int | None
    seed: int
    settings: dict[str, Any]
    explains_marks: bool = True

    def answer(self, prompt: Prompt, turn: int, history: list[tuple[str, str]], *, repeats: int) -> Answer:
        """Decode one turn onto the screen, then time it against plain `generate` as many times as `repeats` says."""
        text = prompt.turns[turn - 1]
        input_ids = encode_prompt(self.tokenizer, text, self.system, history).to(self.model.device)
        follow = getattr(self.pilot.drafter, "follow", None)  # a scripted drafter knows the answer beforehand
        if follow is not None:
            torch.manual_seed(self.seed)
            follow(type(self.model).generate(self.model, input_ids, **self.settings))
        with held_notes():
            text, trace = self._stream(input_ids)
        self._show_marks(trace)
        self.screen.line(block_size_line(trace))
        if trace.adapt == "flight":
            self.screen.line(flight_line(trace))
        self.screen.line(acceptance_line(trace))
        measured = None
        if repeats:
            with working("timing plain generate and this one"), held_notes():
                measured = measure(
                    self.model,
                    self.pilot,
                    input_ids,
                    block_size=self.block_size,
                    seed=self.seed,
                    repeats=repeats,
                    **self.settings,
                )
        self._show_speed(trace, measured)
        return Answer(prompt, turn, input_ids.shape[1], text, trace, measured)

    def _stream(self, input_ids: torch.LongTensor) -> tuple[str, DecodeTrace]:
        pieces = PieceStream(self.tokenizer)

        def show_step(record: StepRecord) -> None:
            self.screen.write(pieces.put(record.committed_ids, are_accepted(record)))

        def show_first(token_id: int) -> None:
            self.screen.write(pieces.put([token_id], [False]))

        fixed: dict[str, Any] = {} if self.block_size is None else {"block_size": self.block_size}
        torch.manual_seed(self.seed)
        try:
            output = self.pilot.generate(
                self.model,
                input_ids,
                streamer=_FirstToken(show_first),
                on_step=show_step,
                return_dict_in_generate=True,
                **fixed,
                **self.settings,
            )
        finally:
            # Also when interrupted: what was decoded stays.
            self.screen.write(pieces.end())
            self.screen.end_answer()
        return pieces.text, output.blockpilot

    def _show_marks(self, trace: DecodeTrace) -> None:
        screen = self.screen
        screen.line()
        if screen.marks == Marks.INLINE:
            if self.explains_marks:
                screen.line(screen.legend)
        elif screen.marks == Marks.STRIP and any(step.draft_ids for step in trace.steps):
            symbols = SYMBOLS if screen.can_print_symbols else PLAIN_SYMBOLS
            copied = f"{symbols[1]} copied, " if any(step.source == "lookup" for step in trace.steps) else ""
            legend = f": {symbols[0]} drafted and accepted, {copied}{symbols[2]} the target's own"
            screen.line(f"tokens by step{legend if self.explains_marks else ''}")
            for line in step_strip(trace, width=screen.width - 2, symbols=symbols):
                screen.line(f"  {line}")
        else:
            return
        self.explains_marks = False

    def _show_speed(self, trace: DecodeTrace, measured: Measurement | None) -> None:
        screen = self.screen
        facts = machine_facts(self.model)
        where = [facts["dtype"], "packed weights" if facts["is_packed"] else "", facts["device"]]
        if facts["device"] == "cpu":
            where[-1] = counted(facts["num_threads"], "thread")
        speed = speed_line(measured.trace, measured.total_s) if measured else speed_line(trace)
        screen.line(f"{speed}; {', '.join(filter(None, where))}")
        if measured is None:
            return
        calls = f"{'medians of ' if measured.repeats > 1 else ''}{counted(measured.repeats, 'call')} each"
        screen.line(
            f"plain generate {measured.plain_tokens_per_second:.1f} tokens per second, ratio {measured.speedup:.2f} "
            f"({calls} in turns, after a warm-up, not streamed)"
        )
        verdict = identity_words(measured.first_difference, measured.gap)
        if measured.first_difference is not None:
            verdict += " (a near-tie within rounding)" if measured.is_explained else " (rounding does not explain it)"
        screen.line(f"compared: {verdict}")


class _FirstToken(BaseStreamer):
    """Hands the prefill's token on. The prompt comes before it; later tokens come with the record of their step."""

    def __init__(self, show: Callable[[int], None]):
        self.show = show
        self.num_puts = 0

    def put(self, value: torch.Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.show(int(value))

    def end(self) -> None:
        pass


def _chosen_prompts(given: list[str], file: Path | None, limit: int | None, samples: bool) -> list[Prompt]:
    """The prompts of the one source that was named, or a pipe's content if none was."""
    if (bool(given), file is not None, samples).count(True) > 1:
        raise ValueError("PROMPT, `--prompts` and `--samples` exclude each other. Leave all but one out.")
    if limit is not None and file is None:
        raise ValueError("`--limit` picks from a file. Name one with `--prompts`, or leave it out.")
    if file is not None:
        return read_prompts(file, limit)
    if samples:
        return sample_prompts()
    if not given:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("There is nothing to answer. Pass a PROMPT, `--prompts FILE` or `--samples`.")
        given = ["-"]
    if given.count("-") > 1:
        raise ValueError("Standard input can be read once. Pass '-' once.")
    chosen = [Prompt(f"prompt-{i}", (_piped() if text == "-" else text,)) for i, text in enumerate(given, start=1)]
    if any(not prompt.turns[0].strip() for prompt in chosen):
        raise ValueError(
            "The prompt is empty. Pass some text as PROMPT, through a pipe, or in a file with `--prompts`."
        )
    return chosen


def _piped() -> str:
    """Standard input without the line end that `echo` adds."""
    source = getattr(sys.stdin, "buffer", None)
    try:
        # As bytes: under some locales Python would let anything pass as text.
        text = sys.stdin.read() if source is None else source.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"Standard input is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    return text.rstrip("\r\n")

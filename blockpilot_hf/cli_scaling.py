"""`blockpilot scaling`: what calls cost by the length of prompt and answer, next to plain `generate`."""

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from .benchmark_methods import FLIGHT, PLAIN, make_methods
from .cli_benchmark import checkout_commit, chosen_policy, pair_facts, parse_numbers
from .cli_common import (
    EMBEDDED,
    Costs,
    Drafter,
    Dtype,
    Packing,
    Policy,
    Seed,
    Target,
    check_names,
    load_pilot,
    load_target,
)
from .cli_console import Screen, progress_bar
from .cli_policy import run_info
from .cli_report import show_record
from .costs import CostTable
from .default_costs import costs_for
from .json_lines import read_lines, write_json
from .peak_memory import memory_source
from .scaling import ANSWER_LENGTHS, PROMPT_LENGTHS, cell_of, fitting_lengths, run_cells
from .scaling_plot import draw_scaling
from .scaling_summary import summarize_scaling
from .units import require_extra

RECORD, _CELLS = "scaling.json", "cells.jsonl"


def _listed(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, lengths))


def scaling_command(
    prompt_lengths: Annotated[
        str, typer.Option(help="Tokens of prompts, each with the shortest answer.", metavar="LIST")
    ] = _listed(PROMPT_LENGTHS),
    answer_lengths: Annotated[
        str, typer.Option(help="Tokens of answers, each to the shortest prompt.", metavar="LIST")
    ] = _listed(ANSWER_LENGTHS),
    repeats: Annotated[
        int, typer.Option(min=1, help="Times that all lengths are done, each time with another text; medians count.")
    ] = 3,
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    costs: Costs = None,
    dtype: Dtype = "auto",
    pack: Packing = True,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for cells, record and picture.")] = Path(
        "scaling"
    ),
    plots: Annotated[bool, typer.Option(" /--no-plots", help="Draw no picture.", show_default=False)] = True,
) -> None:
    """
    Measure seconds and memory of plain generate, of ours by default and of the drafter's training size, over prompts
    and answers of rising length, and say whether ours grow faster than plain's. Lengths that target or drafter have no
    positions for are left out. A call that was stopped goes on where it was.
    """
    check_names(target, drafter, policy, dtype)
    if plots:
        require_extra("matplotlib")
    prompts = parse_numbers(prompt_lengths, int, "--prompt-lengths")
    answers = parse_numbers(answer_lengths, int, "--answer-lengths")
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    model, tokenizer = load_target(target, dtype, pack=pack)
    pilot = load_pilot(drafter, "none", model, pack=pack)
    lengths = fitting_lengths(model, pilot.drafter, prompts, answers)
    chosen = chosen_policy(pilot.drafter, policy)
    table = CostTable.load(costs) if costs else costs_for(model, pilot.drafter)
    trained = f"size {pilot.drafter.config.block_size}"
    known = make_methods(model, pilot, policy=chosen, costs=table)
    methods = {name: known[name] for name in (PLAIN, trained, FLIGHT)}
    settings = {"seed": seed, "memory": memory_source(model.device), "answers": "min_new_tokens = max_new_tokens"}
    meta = pair_facts(model, pilot, {} if chosen is None else {"policy": chosen}, target, drafter)
    run = {
        **settings,
        **{name: meta[name] for name in ("target", "drafter", "policies", "machine")},
        "costs": table.to_dict(),
    }
    path = output / _CELLS
    cells = lengths.cells(repeats)
    done = {cell_of(line).key for line in read_lines(path, run)}
    pending = [(place, cell) for place, cell in enumerate(cells) if cell.key not in done]
    status = "whole"
    try:
        run_cells(model, pilot.drafter, tokenizer, methods, progress_bar(pending, "cells"), path, run=run, seed=seed)
    except KeyboardInterrupt:
        status = "stopped"
    wanted = {cell.key: place for place, cell in enumerate(cells)}
    lines = [line for line in read_lines(path, run) if cell_of(line).key in wanted]
    lines.sort(key=lambda line: wanted[cell_of(line).key])
    if not lines:
        raise KeyboardInterrupt
    record = {
        "run_info": {**run_info(), "started_utc": started, "commit": checkout_commit(), "status": status},
        "meta_info": {**meta, "prompts": EMBEDDED},
        "settings": {
            "prompt_lengths": lengths.prompt_lengths,
            "answer_lengths": lengths.answer_lengths,
            "left_out": lengths.left_out,
            "repeats": repeats,
            **settings,
        },
        "methods": {name: method.facts() for name, method in methods.items()},
        "costs": table.to_dict(),
        "cells": [{name: value for name, value in line.items() if name != "run"} for line in lines],
        "summary": summarize_scaling(lines, list(methods)),
    }
    write_json(output / RECORD, record)
    screen = Screen()
    show_record(screen, record)
    if plots:
        for picture in draw_scaling(record, output):
            screen.line(f"{picture}")
    screen.line(f"record: {output / RECORD}")
    if status == "stopped":
        screen.line(f"stopped with {len(lines)} of {len(cells)} cells; the same command goes on")
        raise KeyboardInterrupt


__all__ = ["RECORD", "scaling_command"]

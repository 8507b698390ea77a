"""`blockpilot benchmark`: plain `generate`, peers and our rules on the same prompts, in turns, with a record."""

import subprocess
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .benchmark import WARM_UP_TOKENS, make_rounds, read_rounds, round_of, run_rounds
from .benchmark_methods import PLAIN, Method, make_methods
from .benchmark_plots import draw_benchmark
from .benchmark_prompts import PROMPT_SETS, load_prompt_set, prompt_set_facts
from .benchmark_summary import summarize
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
    machine_facts,
    sampling_settings,
)
from .cli_console import Screen, progress_bar
from .cli_policy import Resamples, run_info
from .cli_report import show_record
from .costs import CostTable, device_name
from .default_costs import costs_for
from .drafter_record import package_versions
from .embedded import EMBEDDED_PAPER_POLICY_NAME
from .json_lines import write_json
from .loading import embedded_drafter_dir, load_policy, policy_of_drafter
from .processes import Processes
from .target_states import weights_fingerprint
from .units import require_extra

RECORD = "benchmark.json"
_ROUNDS = "rounds"


class Preset(str, Enum):
    """How much of the embedded prompts; the times are of the embedded pair on two slow cores."""

    QUICK = "quick"
    FULL = "full"


# Prompts, new tokens and temperatures.
_PRESETS: dict[Preset, dict[str, Any]] = {
    Preset.QUICK: {"limit": 6, "max_new_tokens": 32, "temperatures": "0"},
    Preset.FULL: {"limit": 24, "max_new_tokens": 48, "temperatures": "0,1"},
}
_DEFAULTS: dict[str, Any] = {"limit": None, "max_new_tokens": 128, "temperatures": "0"}


def benchmark_command(
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts: a file (.jsonl with `prompt` or `turns`, or one per line) or a name: "
            f"{', '.join(PROMPT_SETS)}. May be given several times.",
            metavar="NAME",
            show_default=EMBEDDED,
        ),
    ] = None,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="quick: 6 prompts, about 5 minutes on two cores. full: 24, greedy and sampled, within an hour."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="That many prompts of each set.", show_default="all")] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="0 is greedy. Several, separated by commas.", show_default="0", metavar="LIST")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="New tokens at most.", show_default="128")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every prompt is done; medians count.")] = 1,
    methods: Annotated[
        str | None,
        typer.Option(help="Only these methods, separated by commas; plain is always there.", metavar="LIST"),
    ] = None,
    block_sizes: Annotated[
        str, typer.Option(help="Fixed sizes besides the one that the drafter was trained for.", metavar="LIST")
    ] = "4",
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    paper_policy: Annotated[
        str | None,
        typer.Option(
            help="Policy by the paper's rule: folder or Hub id.",
            show_default="that of the embedded pair",
            metavar="NAME",
        ),
    ] = None,
    costs: Costs = None,
    dtype: Dtype = "auto",
    pack: Packing = True,
    seed: Seed = 0,
    bootstrap: Resamples = 10_000,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for rounds, record, table and plots.")] = Path(
        "benchmark"
    ),
    plots: Annotated[bool, typer.Option(" /--no-plots", help="Draw no pictures.", show_default=False)] = True,
) -> None:
    """
    Time plain generate, the peers that can run here and our own rules on the same prompts, in turns, and keep a record
    that `blockpilot report` renders. A call that was stopped goes on where it was. With `accelerate launch` the prompts
    are dealt out over the processes.
    """
    check_names(target, drafter, policy, dtype)
    check_names(None, None, paper_policy, "auto")
    if plots:
        require_extra("matplotlib")
    require_extra("scipy.stats")
    given = {"limit": limit, "max_new_tokens": max_new_tokens, "temperatures": temperatures}
    chosen = {**_DEFAULTS, **(_PRESETS[preset] if preset else {}), **{k: v for k, v in given.items() if v is not None}}
    heats = parse_numbers(chosen["temperatures"], float, "--temperatures")
    sizes = parse_numbers(block_sizes, int, "--block-sizes")
    if any(heat < 0 for heat in heats) or any(size < 1 for size in sizes):
        raise ValueError("`--temperatures` takes numbers from 0, `--block-sizes` whole numbers from 1.")
    sets = {name: load_prompt_set(name, chosen["limit"]) for name in dict.fromkeys(prompts or [EMBEDDED])}

    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with Processes.current() as processes:
        model, tokenizer = load_target(target, dtype, pack=pack)
        pilot = load_pilot(drafter, "none", model, pack=pack)
        policies = _policies(pilot, policy, paper_policy, is_embedded=target is None and drafter in (None, EMBEDDED))
        table = CostTable.load(costs) if costs else costs_for(model, pilot.drafter)
        known = make_methods(
            model,
            pilot,
            policy=policies.get("policy"),
            paper_policy=policies.get("paper"),
            block_sizes=sizes,
            costs=table,
        )
        known = _chosen_methods(known, methods)
        settings = {"max_new_tokens": chosen["max_new_tokens"], "seed": seed, "warm_up_tokens": WARM_UP_TOKENS}
        meta = pair_facts(model, pilot, policies, target, drafter)
        run = {
            **settings,
            "target": meta["target"],
            "drafter": meta["drafter"],
            "policies": meta["policies"],
            "machine": meta["machine"],
            "costs": table.to_dict(),
            "methods": [name for name, method in known.items() if not method.reason],
        }
        folder = output / _ROUNDS
        rounds = make_rounds(sets, heats, repeats)
        done = {round_of(line) for line in read_rounds(folder, run)}
        pending = [one for one in rounds if one.key not in done]
        mine = pending[processes.index :: processes.count]
        status = "whole"
        try:
            run_rounds(
                model,
                tokenizer,
                known,
                progress_bar(mine, "rounds") if processes.is_main else mine,
                folder / f"{processes.index}.jsonl",
                run=run,
                settings=sampling_settings,
                max_new_tokens=chosen["max_new_tokens"],
                seed=seed,
            )
        except KeyboardInterrupt:
            if processes.count > 1:
                raise
            status = "stopped"
        processes.wait()
        if not processes.is_main:
            return
    wanted = {one.key: one.place for one in rounds}
    lines = [line for line in read_rounds(folder, run) if round_of(line) in wanted]
    lines.sort(key=lambda line: (wanted[round_of(line)], line["turn"]))
    if status == "stopped" and not lines:
        raise KeyboardInterrupt
    meta["prompts"] = [prompt_set_facts(name, of_set) for name, of_set in sets.items()]
    record = {
        "run_info": {
            **run_info(),
            "started_utc": started,
            "commit": checkout_commit(),
            "status": status,
            "num_processes": processes.count,
        },
        "meta_info": meta,
        "settings": {
            "temperatures": heats,
            "limit": chosen["limit"],
            **settings,
            "repeats": repeats,
            "num_resamples": bootstrap,
        },
        "methods": {name: method.facts() for name, method in known.items()},
        "costs": table.to_dict(),
        "results": summarize(lines, num_resamples=bootstrap),
        "per_prompt": [{name: value for name, value in line.items() if name not in ("run", "place")} for line in lines],
    }
    write_json(output / RECORD, record)
    screen = Screen()
    show_record(screen, record)
    if plots:
        for path in draw_benchmark(record, output):
            screen.line(f"{path}")
    screen.line(f"record: {output / RECORD}")
    if status == "stopped":
        screen.line(f"stopped with {len(lines)} of the rounds; the same command goes on")
        raise KeyboardInterrupt


def parse_numbers(text: str, kind: type, option: str) -> list[Any]:
    """Numbers separated by commas, without repetition, in the order given."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"`{option}` takes numbers separated by commas, got {text!r}.") from None


def chosen_policy(drafter: Any, policy: str | None) -> Any:
    """What `--policy` names, `none` included; by default the drafter's own, if it names one."""
    if policy == "none":
        return None
    return policy_of_drafter(drafter) if policy is None else load_policy(policy)


def _policies(pilot: Any, policy: str | None, paper_policy: str | None, *, is_embedded: bool) -> dict[str, Any]:
    """By what they are used for. A policy that names one size is one by the paper's rule."""
    found = {"policy": chosen_policy(pilot.drafter, policy)}
    if paper_policy is not None:
        found["paper"] = load_policy(paper_policy)
    elif is_embedded:
        found["paper"] = load_policy(embedded_drafter_dir().parent / EMBEDDED_PAPER_POLICY_NAME)
    return {name: one for name, one in found.items() if one is not None}


def _chosen_methods(known: dict[str, Method], methods: str | None) -> dict[str, Method]:
    if methods is None:
        return known
    names = [name.strip() for name in methods.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"`--methods` takes names of {', '.join(known)}, got {unknown[0]!r}.")
    return {name: method for name, method in known.items() if name in (PLAIN, *names)}


def pair_facts(
    model: Any, pilot: Any, policies: dict[str, Any], target: str | None, drafter: str | None
) -> dict[str, Any]:
    """What was measured, and on what, for records."""
    own = pilot.drafter
    is_model = isinstance(own, torch.nn.Module)
    return {
        "versions": package_versions(),
        "machine": {**machine_facts(model), "device_name": device_name(str(model.device))},
        "target": {
            "name": target or Path(str(model.config._name_or_path)).name,
            "fingerprint": weights_fingerprint(model),
        },
        "drafter": {
            "name": Path(str(own.config._name_or_path)).name if drafter in (None, EMBEDDED) else drafter,
            "fingerprint": weights_fingerprint(own) if is_model else None,
            "training_block_size": own.config.block_size,
        },
        "policies": {
            name: {
                "name": Path(str(one.config._name_or_path)).name,
                "fingerprint": weights_fingerprint(one),
                "block_sizes": list(one.config.block_sizes),
            }
            for name, one in policies.items()
        },
    }


def checkout_commit() -> str | None:
    """Of the checkout that this package runs from, if it is one."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


__all__ = ["RECORD", "Preset", "benchmark_command", "checkout_commit", "chosen_policy", "pair_facts", "parse_numbers"]

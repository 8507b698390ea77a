"""`blockpilot verify`: is the output plain `generate`'s own? Prompt by prompt, for several block sizes."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .checks import check_adapt, check_lookup
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
    progress_bar,
    sampling_settings,
)
from .cli_console import Screen
from .display import counted, identity_words
from .json_lines import append_line, read_lines
from .parity import Comparison, compare_prompt
from .prompts import Prompt, encode_prompt, read_prompts

_SIZES = "1,2,3,4,6,8,policy"

Results = dict[tuple[str, int | None], Comparison]


def verify(
    prompts: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Prompts: .jsonl with `prompt` or `turns`, of which the first is taken, or one per line.",
        ),
    ],
    block_sizes: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated sizes; 'policy' lets the policy choose, and each step with --adapt flight.",
            show_default=f"{_SIZES}; with --adapt flight: policy",
        ),
    ] = None,
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    adapt: Adapt = None,
    lookup: UseLookup = None,
    costs: Costs = None,
    limit: Limit = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    pack: Packing = True,
    output: Annotated[
        Path | None,
        typer.Option(help="Write results as JSON lines as they come; a second call with the same settings goes on."),
    ] = None,
) -> None:
    """Compare with plain generate, prompt by prompt. Ends with status 1 if rounding does not explain a difference."""
    check_names(target, drafter, policy, dtype)
    check_adapt(adapt)
    check_lookup(lookup, adapt)
    named = ("policy" if adapt == "flight" else _SIZES) if block_sizes is None else block_sizes
    sizes = list(dict.fromkeys(_block_size(size.strip()) for size in named.split(",")))
    chosen = read_prompts(prompts, limit)
    settings = {**sampling_settings(temperature), "max_new_tokens": max_new_tokens}
    run = {
        "prompts": prompts.name,
        "target": target,
        "drafter": drafter or EMBEDDED,
        "policy": policy,
        **({} if adapt is None else {"adapt": adapt, "costs": costs and costs.name}),
        **({} if lookup is None else {"lookup": lookup}),
        "dtype": dtype,
        "pack": pack,
        "seed": seed,
        **settings,
    }
    known = _read_results(output, run) if output else {}
    pending = [prompt for prompt in chosen if any((prompt.id, size) not in known for size in sizes)]
    if pending:
        model, tokenizer = load_target(target, dtype, pack=pack)
        pilot = load_pilot(drafter, policy, model, pack=pack, adapt=adapt, lookup=lookup, costs=costs)
        for prompt in progress_bar(pending, "prompts"):
            ids = encode_prompt(tokenizer, prompt.turns[0]).to(model.device)
            for result in compare_prompt(
                model, pilot, ids, sizes, seed=seed, on_plain=getattr(pilot.drafter, "follow", None), **settings
            ):
                known[prompt.id, result.block_size] = result
                if output:
                    append_line(
                        output, {"run": run, "prompt": prompt.id, "category": prompt.category, **asdict(result)}
                    )
    _show_results(Screen(), chosen, sizes, known, free=adapt or "policy")
    raise typer.Exit(0 if all(known[prompt.id, size].explained for prompt in chosen for size in sizes) else 1)


def _show_results(screen: Screen, prompts: list[Prompt], sizes: list[int | None], known: Results, *, free: str) -> None:
    """`free` names what decided where no size was fixed."""
    rows = []
    for size in sizes:
        results = [known[prompt.id, size] for prompt in prompts]
        different = [r for r in results if r.first_difference is not None]
        gaps = [r.gap for r in different if r.gap is not None]
        rows.append(
            [
                free if size is None else str(size),
                f"{len(results) - len(different)} / {len(results)}",
                str(sum(r.explained for r in different)),
                str(sum(not r.explained for r in different)),
                f"{max(gaps):.4f}" if gaps else "-",
                f"{sum(r.acceptance_length for r in results) / len(results):.2f}",
            ]
        )
    header = ["block size", "identical", "explained", "unexplained", "largest gap", "tau"]
    screen.table("against plain generate", header, rows)
    screen.line("tau: tokens committed per verification step, mean over a prompt's steps, then over prompts")
    if None in sizes and free != "flight":
        used = Counter(known[prompt.id, None].used_block_size for prompt in prompts)
        chosen = ", ".join(f"{size} for {counted(used[size], 'prompt')}" for size in sorted(used))
        screen.line(f"chosen at the prefill: block size {chosen}")
    if any(len(prompt.turns) > 1 for prompt in prompts):
        screen.line("prompts of several turns: the first turn was compared")
    for prompt in prompts:
        for size in sizes:
            result = known[prompt.id, size]
            if result.first_difference is not None:
                named = free if size is None else size
                screen.line(f"{prompt.id}, block size {named}: {_verdict(result)}")
    results = [known[prompt.id, size] for prompt in prompts for size in sizes]
    identical = sum(r.first_difference is None for r in results)
    unexplained = sum(not r.explained for r in results)
    screen.line(f"identical {identical} / {len(results)}, unexplained {unexplained}")


def _verdict(result: Comparison) -> str:
    words = identity_words(result.first_difference, result.gap)
    if result.gap is None or result.change is None:
        return f"{words}: not explained"
    kind = "a near-tie" if result.explained else "not explained"
    return f"{words}: {kind} (largest change of a score by width {result.change:.4f})"


def _block_size(text: str) -> int | None:
    """`None` lets the policy choose."""
    if text == "policy":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"`--block-sizes` takes integers >= 1 and 'policy', separated by commas, got {text!r}.")
    return int(text)


def _read_results(path: Path, run: dict[str, Any]) -> Results:
    """Results of an earlier call with the same settings."""
    known: Results = {}
    names = set(Comparison.__dataclass_fields__)
    for entry in read_lines(path, run):
        known[entry["prompt"], entry["block_size"]] = Comparison(**{k: v for k, v in entry.items() if k in names})
    return known

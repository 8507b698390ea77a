"""`blockpilot <verb>`: thin commands over the package. Errors of the user's own making end in one line and status 1."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from .embedded import load_embedded_target, native_dtype, untrained_drafter
from .generate import BlockPilot
from .loading import load_drafter
from .parity import Comparison, ScriptedDrafter, compare_prompt
from .prompts import Prompt, encode_prompt, read_prompts

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Target = Annotated[
    str | None, typer.Option(help="Target: folder or Hub id. Default: the embedded SmolLM2-135M-Instruct.")
]
Drafter = Annotated[
    str,
    typer.Option(
        help="Drafter: folder, Hub id, 'untrained' (random weights) or 'scripted[:SHARE]': decodes plainly first and "
        "proposes that text, right in this share of the tokens."
    ),
]
Policy = Annotated[str | None, typer.Option(help="Policy: folder or Hub id. Default: the one that the drafter names.")]
Dtype = Annotated[
    str,
    typer.Option(
        help=f"Dtype of the target: {', '.join(_DTYPES)}, or 'auto': bfloat16 where the processor has instructions for "
        "it, else float32."
    ),
]
NewTokens = Annotated[int, typer.Option(min=1, help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: greedy; above: sampling.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.")]


@app.callback()
def _app() -> None:
    """Adaptive block-diffusion speculative decoding."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; '-' reads it from standard input.")],
    target: Target = None,
    drafter: Drafter = "untrained",
    policy: Policy = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Fix the block size; 1 is plain decoding.")] = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    compare: Annotated[bool, typer.Option("--compare", help="Also decode plainly and compare.")] = False,
) -> None:
    """Answer PROMPT, streamed, and say which block size was used and how many drafted tokens were accepted."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ValueError("The prompt is empty. Pass some text, or '-' with text on standard input.")
    model, tokenizer = _load_target(target, dtype)
    pilot = BlockPilot(_load_drafter(drafter, model), policy)
    input_ids = encode_prompt(tokenizer, text).to(model.device)
    settings = {**_sampling(temperature), "max_new_tokens": max_new_tokens}
    ours: dict[str, Any] = {**settings, "return_dict_in_generate": True}
    if block_size is not None:
        ours["block_size"] = block_size

    follow = getattr(pilot.drafter, "follow", None)  # a scripted drafter knows the answer beforehand
    if follow is not None:
        torch.manual_seed(seed)
        follow(type(model).generate(model, input_ids=input_ids, **settings))
    torch.manual_seed(seed)
    output = pilot.generate(
        model,
        input_ids=input_ids,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **ours,
    )
    trace = output.blockpilot
    seconds = trace.prefill_s + trace.policy_s + trace.decode_s
    print(f"\n{str(model.dtype).removeprefix('torch.')}, block size {trace.block_size} ({trace.reason})")
    print(
        f"{trace.num_new_tokens} tokens: 1 from the prefill, {trace.num_new_tokens - 1} in {len(trace.steps)} steps "
        f"({trace.acceptance_length:.2f} per step), {trace.num_new_tokens / seconds:.1f} tokens/s"
    )
    if compare:
        result = compare_prompt(model, pilot, input_ids, [block_size], seed=seed, on_plain=follow, **settings)[0]
        plain_speed = result.num_new_tokens / result.plain_s
        print(
            f"plain generate: {plain_speed:.1f} tokens/s, this took {result.ours_s / result.plain_s:.2f} times as long"
        )
        print(f"compared: {_verdict(result)}")
    if drafter == "untrained":
        print("The drafter is untrained: its tokens are almost never accepted, and drafting only costs time.")


@app.command()
def verify(
    prompts: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Prompts: .jsonl or one per line.")],
    block_sizes: Annotated[
        str, typer.Option(help="Comma-separated sizes; 'policy' lets the policy choose.")
    ] = "1,2,5,8,16",
    target: Target = None,
    drafter: Drafter = "untrained",
    policy: Policy = None,
    limit: Annotated[int | None, typer.Option(min=1, help="That many prompts, spread evenly over the file.")] = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    output: Annotated[
        Path | None,
        typer.Option(help="Write results as JSON lines as they come; a second call with the same settings goes on."),
    ] = None,
) -> None:
    """Compare with plain generate, prompt by prompt. Ends with status 1 if rounding does not explain a difference."""
    sizes = list(dict.fromkeys(_block_size(size.strip()) for size in block_sizes.split(",")))
    chosen = read_prompts(prompts, limit)
    settings = {**_sampling(temperature), "max_new_tokens": max_new_tokens}
    run = {
        "prompts": prompts.name,
        "target": target,
        "drafter": drafter,
        "policy": policy,
        "dtype": dtype,
        "seed": seed,
        **settings,
    }
    known = _read_results(output, run) if output else {}
    pending = [prompt for prompt in chosen if any((prompt.id, size) not in known for size in sizes)]
    if pending:
        model, tokenizer = _load_target(target, dtype)
        pilot = BlockPilot(_load_drafter(drafter, model), policy)
        for prompt in _progress(pending):
            ids = encode_prompt(tokenizer, prompt.turns[0]).to(model.device)
            for result in compare_prompt(
                model, pilot, ids, sizes, seed=seed, on_plain=getattr(pilot.drafter, "follow", None), **settings
            ):
                known[prompt.id, result.block_size] = result
                if output:
                    _append_line(
                        output, {"run": run, "prompt": prompt.id, "category": prompt.category, **asdict(result)}
                    )
    results = [known[prompt.id, size] for prompt in chosen for size in sizes]
    _print_results(chosen, sizes, known)
    raise typer.Exit(0 if all(result.explained for result in results) else 1)


def _print_results(
    prompts: list[Prompt], sizes: list[int | None], known: dict[tuple[str, int | None], Comparison]
) -> None:
    console = Console(highlight=False, markup=False)
    table = Table("block size", title="against plain generate")
    for name in ("identical", "explained", "unexplained", "largest gap", "tau"):
        table.add_column(name, justify="right")
    for size in sizes:
        results = [known[prompt.id, size] for prompt in prompts]
        different = [r for r in results if r.first_difference is not None]
        gaps = [r.gap for r in different if r.gap is not None]
        table.add_row(
            "policy" if size is None else str(size),
            f"{len(results) - len(different)} / {len(results)}",
            str(sum(r.explained for r in different)),
            str(sum(not r.explained for r in different)),
            f"{max(gaps):.4f}" if gaps else "-",
            f"{sum(r.acceptance_length for r in results) / len(results):.2f}",
        )
    console.print(table)
    for prompt in prompts:
        for size in sizes:
            result = known[prompt.id, size]
            if result.first_difference is not None:
                named = "policy" if size is None else size
                console.print(f"{prompt.id}, block size {named}: {_verdict(result)}", soft_wrap=True)
    results = [known[prompt.id, size] for prompt in prompts for size in sizes]
    identical = sum(r.first_difference is None for r in results)
    unexplained = sum(not r.explained for r in results)
    console.print(f"identical {identical} / {len(results)}, unexplained {unexplained}", soft_wrap=True)


def _verdict(result: Comparison) -> str:
    if result.first_difference is None:
        return "identical to plain generate"
    where = f"first difference at new token {result.first_difference}"
    if result.gap is None or result.change is None:
        return f"{where}: not explained"
    measured = f"gap {result.gap:.4f}, largest change of a score by width {result.change:.4f}"
    return f"{where}: {'a near-tie' if result.explained else 'not explained'} ({measured})"


def _load_target(target: str | None, dtype: str) -> tuple[Any, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype not in (*_DTYPES, "auto"):
        raise ValueError(f"`--dtype` must be one of {', '.join((*_DTYPES, 'auto'))}, got {dtype!r}.")
    torch_dtype = native_dtype(device) if dtype == "auto" else _DTYPES[dtype]
    if target is None:
        try:
            return load_embedded_target(dtype=torch_dtype, device=device)
        except RuntimeError as error:  # says what to do, so it is the user's to read
            raise OSError(str(error)) from error
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch_dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(target)


def _load_drafter(name: str, target: Any) -> Any:
    if name == "untrained":
        return untrained_drafter(target)
    if name.partition(":")[0] == "scripted":
        share = name.partition(":")[2]
        try:
            return ScriptedDrafter(target, accuracy=float(share) if share else 2 / 3)
        except ValueError:
            raise ValueError(f"'scripted:SHARE' takes a share between 0 and 1, got {share!r}.") from None
    return load_drafter(name, dtype=target.dtype).to(target.device)


def _sampling(temperature: float) -> dict[str, Any]:
    # The neutral top-k and top-p: the model's own defaults would hide most of the distribution.
    return (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )


def _block_size(text: str) -> int | None:
    """`None` lets the policy choose."""
    if text == "policy":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"`--block-sizes` takes integers >= 1 and 'policy', separated by commas, got {text!r}.")
    return int(text)


def _progress(prompts: list[Prompt]) -> Any:
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield from progress.track(prompts)


def _append_line(path: Path, entry: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # a line cut off by a kill stays a line of its own
                file.write(b"\n")
        file.write((json.dumps(entry) + "\n").encode())


def _read_results(path: Path, run: dict[str, Any]) -> dict[tuple[str, int | None], Comparison]:
    """Results of an earlier call with the same settings; a line cut off by a kill is left out."""
    known = {}
    names = set(Comparison.__dataclass_fields__)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found = entry.get("run") if isinstance(entry, dict) else None
        if found != run:
            other = {k: found.get(k) for k in run if found.get(k) != run[k]} if isinstance(found, dict) else found
            raise ValueError(f"{path} holds results of other settings ({other}). Name another file with `--output`.")
        known[entry["prompt"], entry["block_size"]] = Comparison(**{k: v for k, v in entry.items() if k in names})
    return known


def main() -> None:
    """Entry point of the `blockpilot` command."""
    logging.disable_progress_bar()
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        message = Text.assemble(("error:", "bold red"), " ", " ".join(str(error).split()))
        Console(stderr=True, highlight=False).print(message, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

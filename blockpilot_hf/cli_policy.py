"""`blockpilot train-policy`: from prompts or texts to a policy, with what it is worth on prompts that it never saw."""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .cli_common import Drafter, Dtype, Target, check_names, load_pilot, load_target, package_version
from .cli_console import progress_bar
from .costs import CostTable, measure_costs
from .drafter_checkpoint import written_whole
from .drafter_record import package_versions, write_json
from .generate import BlockPilot
from .policy_labels import append_example, decoded_example, read_examples, replayed_example
from .policy_training import PolicyExample, PolicyTrainingConfig, compare_rules, train_policy
from .prompts import encode_prompt, read_prompts
from .target_states import weights_fingerprint
from .texts import Text, read_texts, spread

_DEFAULTS = PolicyTrainingConfig()
LABELS = ("decoding", "replay")


def train_policy_command(
    source: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="Prompts (.jsonl or one per line), or texts with `prompt_ids` and `answer_ids` (.jsonl, .jsonl.gz).",
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for labels, costs, results and the policy; a rerun goes on.")],
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = "auto",
    labels: Annotated[
        str,
        typer.Option(
            help="'decoding': decode every prompt at every size. 'replay': the same counts from the target's own "
            "answers in the source, many times faster."
        ),
    ] = "decoding",
    block_sizes: Annotated[str, typer.Option(help="Candidate sizes, comma-separated.")] = "1,2,3,4,6,8",
    costs: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Cost table; measured here without it.")
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Other prompts or texts, labelled likewise, to say what the policy is worth.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=10, help="That many prompts of the source, spread evenly.")] = None,
    test_limit: Annotated[int | None, typer.Option(min=1, help="That many prompts of the test file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of an answer at most.")] = 96,
    validation: Annotated[
        float, typer.Option(min=0.05, max=0.5, help="Share of the prompts that decide when training stops.")
    ] = 0.2,
    objective: Annotated[
        str,
        typer.Option(help="'label': name the fastest size, as in the paper; 'speed': expected speed of the choice."),
    ] = _DEFAULTS.objective,
    hidden_size: Annotated[int, typer.Option(min=1, help="Width of the head.")] = _DEFAULTS.hidden_size,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = _DEFAULTS.learning_rate,
    seed: Annotated[int, typer.Option(help="Of start, order and split.")] = _DEFAULTS.seed,
) -> None:
    """Train a policy that picks the block size with the most tokens per second, and compare it with constant sizes."""
    if labels not in LABELS:
        raise ValueError(f"`--labels` must be one of {', '.join(LABELS)}, got {labels!r}.")
    sizes = _sizes(block_sizes)
    config = PolicyTrainingConfig(objective=objective, hidden_size=hidden_size, learning_rate=learning_rate, seed=seed)
    check_names(target, drafter, None, dtype)
    console = Console(stderr=True, highlight=False)
    model, tokenizer = load_target(target, dtype)
    pilot = load_pilot(drafter, "none", model)
    known = _read_source(source, tokenizer, limit, need_answers=labels == "replay")
    tested = _read_source(test, tokenizer, test_limit, need_answers=labels == "replay") if test else []
    shared = {text.prompt_hash for text in known} & {text.prompt_hash for text in tested}
    if shared:
        raise ValueError(f"{len(shared)} prompts of {test} are also in {source}. Take them out of one of the two.")

    table = _cost_table(costs, output / "costs.json", model, pilot.drafter, sizes)
    made_with: dict[str, Any] = {
        "target": weights_fingerprint(model),
        "drafter": weights_fingerprint(pilot.drafter),
        "block_sizes": sizes,
        "max_new_tokens": max_new_tokens,
    }
    made_with["labels"] = labels
    label = _labeller(labels, model, pilot, sizes, max_new_tokens)
    examples = _label(known, output / "labels.jsonl", made_with, console, label)
    tests = _label(tested, output / "test_labels.jsonl", made_with, console, label)
    ordered = sorted(examples, key=lambda example: example.prompt_hash)
    cut = max(1, round(len(ordered) * validation))
    policy, log = train_policy(ordered[cut:], ordered[:cut], table, sizes, config)
    best = max(log, key=lambda entry: entry["validation_speedup"])
    console.print(
        f"trained on {len(ordered) - cut} prompts, stopped by {cut}; best epoch {best['epoch']} of {len(log)}"
    )
    results = {"validation": compare_rules(policy, ordered[cut:], ordered[:cut], table)}
    if tests:
        results["test"] = compare_rules(policy, ordered[cut:], tests, table)
    for name, result in results.items():
        _print_rules(f"{name}: speedup over plain decoding under the cost table, prefill aside", result)

    described = policy.config
    described.sampling = {"temperature": 0.0}
    described.target_name_or_path, described.target_fingerprint = model.config._name_or_path, made_with["target"]
    described.drafter_name_or_path = os.path.basename(str(pilot.drafter.config._name_or_path).rstrip("/")) or None
    described.drafter_fingerprint, described.blockpilot_version = made_with["drafter"], package_version()
    with written_whole(output / "policy") as beside:
        policy.save_pretrained(beside)
    write_json(
        output / "evaluation.json",
        {
            "run_info": {
                "command": shlex.join(["blockpilot", *sys.argv[1:]]),
                "finished_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            },
            "meta_info": {
                "versions": package_versions(),
                **made_with,
                "policy": weights_fingerprint(policy),
                "target_name": model.config._name_or_path,
            },
            "settings": {**asdict(config), "validation_share": validation},
            "costs": asdict(table),
            "num_prompts": {"train": len(ordered) - cut, "validation": cut, "test": len(tests)},
            "results": results,
        },
    )
    console.print(f"policy written to {output / 'policy'}, record to {output / 'evaluation.json'}")


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"`--block-sizes` takes integers >= 1, separated by commas, got {text!r}.")
    sizes = sorted({int(part) for part in parts})
    if len(sizes) < 2:
        raise ValueError(f"`--block-sizes` needs at least two sizes to choose from, got {text!r}.")
    return sizes


def _read_source(path: Path, tokenizer: Any, limit: int | None, *, need_answers: bool) -> list[Text]:
    """Texts as they are, or prompts in the chat template with empty answers; one per prompt, spread over categories."""
    if path.name.endswith(".gz") or '"prompt_ids"' in path.read_text(encoding="utf-8")[:100_000]:
        texts = read_texts(path)
    elif need_answers:
        raise ValueError(
            f"`--labels replay` needs the target's answers, {path} holds prompts. Use `--labels decoding`."
        )
    else:
        texts = [
            Text(prompt.id, prompt.category or "all", tuple(encode_prompt(tokenizer, prompt.turns[0])[0].tolist()), ())
            for prompt in read_prompts(path)
        ]
    texts = list({text.prompt_hash: text for text in texts}.values())
    return spread(texts, limit or len(texts))


def _cost_table(given: Path | None, kept: Path, target: Any, drafter: Any, sizes: list[int]) -> CostTable:
    path = given or (kept if kept.is_file() else None)
    table = CostTable.load(path) if path else measure_costs(target, drafter, sizes)
    missing = [size for size in sizes if size not in table.block_sizes]
    if missing:
        raise ValueError(
            f"The cost table {path} has no seconds for block sizes {missing}. Leave it out to measure one."
        )
    if path != kept:
        table.save(kept)
    return table


def _labeller(
    labels: str, target: Any, pilot: BlockPilot, sizes: list[int], max_new_tokens: int
) -> Callable[[Text], PolicyExample]:
    if labels == "decoding":
        return lambda text: decoded_example(target, pilot, text, sizes, max_new_tokens=max_new_tokens)
    return lambda text: replayed_example(target, pilot.drafter, text, sizes, max_new_tokens=max_new_tokens)


def _label(
    texts: list[Text], path: Path, settings: dict[str, Any], console: Console, label: Any
) -> list[PolicyExample]:
    known = {example.prompt_hash: example for example in read_examples(path, settings)}
    pending = [text for text in texts if text.prompt_hash not in known]
    if pending and known:
        console.print(f"{path}: {len(texts) - len(pending)} prompts are there, {len(pending)} to go")
    for text in progress_bar(pending, "labels"):
        known[text.prompt_hash] = label(text)
        append_example(path, known[text.prompt_hash], settings)
    return [known[text.prompt_hash] for text in texts]


def _print_rules(title: str, result: dict[str, Any]) -> None:
    names = [name for name in result["all"] if name not in ("prompts", "policy's choices")]
    table = Table("rule", title=title)
    for group, rules in result.items():
        table.add_column(f"{group} ({rules['prompts']['num_prompts']})", justify="right")
    for name in names:
        table.add_row(name, *(f"{rules[name]['speedup']:.3f}" for rules in result.values()))
    console = Console(highlight=False)
    console.print(table)
    for group, rules in result.items():
        chosen = ", ".join(f"{size}: {count}" for size, count in rules["policy's choices"].items() if count)
        console.print(f"policy's choices in {group}: {chosen}")


__all__ = ["train_policy_command"]

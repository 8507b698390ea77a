"""`blockpilot prepare`: from prompts to the target's own answers, which drafters and policies are made from."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .batch_answers import set_generation_values
from .cli_common import Dtype, Limit, Seed, Target, check_names, load_target
from .cli_console import Screen, units_bar
from .display import counted
from .prompts import Prompt, prompts_of_rows, read_prompts, spread_indices
from .target_states import weights_fingerprint
from .target_texts import (
    COLUMNS,
    EncodedPrompts,
    TargetAnswers,
    TextsRecipe,
    cut_units,
    encode_prompts,
    max_prompt_tokens,
    prompts_fingerprint,
)
from .units import check_output, is_finished, num_done_units, processes, require_extra, run_units

_DEFAULTS = TextsRecipe()
# What a name with one of these endings is, if no file of that name is there: not a dataset on the Hub.
_TABLES = {".parquet": "parquet", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
_FILES = (".jsonl", ".txt", *_TABLES)


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="Prompts: .jsonl with `turns` or `prompt`, a text file with one per line, or a dataset: a Hub id, a "
            "folder, a .parquet, .json or .csv file.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder of the dataset. The same command goes on there after it was stopped.")
    ],
    target: Target = None,
    dtype: Dtype = "auto",
    temperatures: Annotated[
        str, typer.Option(help="Comma-separated; 0 is greedy. Every prompt is answered at each.")
    ] = "0",
    samples: Annotated[int, typer.Option(min=1, help="Answers per temperature above 0.")] = _DEFAULTS.samples,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = _DEFAULTS.max_new_tokens,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = _DEFAULTS.batch_size,
    turns: Annotated[
        int, typer.Option(min=1, help="Turns of a prompt that are answered at most.")
    ] = _DEFAULTS.num_turns,
    system: Annotated[str | None, typer.Option(help="System message.", show_default="the chat template's own")] = None,
    template_options: Annotated[
        str | None,
        typer.Option(help="What else the chat template takes, as JSON, such as '{\"enable_thinking\": false}'."),
    ] = None,
    seed: Seed = _DEFAULTS.seed,
    limit: Limit = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of the dataset.")] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    prompt_column: Annotated[
        str | None,
        typer.Option(
            help="Column with the prompt: a string, a list of strings (turns), or chat messages.",
            show_default="turns, prompt or messages",
        ),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="Column with ids of the prompts.", show_default="row numbers")
    ] = None,
    category_column: Annotated[str | None, typer.Option(help="Column with categories.")] = None,
    category: Annotated[
        str | None, typer.Option(help="Category of all prompts that the source gives none.", show_default="none")
    ] = None,
) -> None:
    """
    Have a target answer prompts, greedily or sampled, and keep prompts and answers as a dataset.

    Several processes share the work under `accelerate launch -m blockpilot_hf.cli prepare ...` or `torchrun`; the
    dataset is the same. Its texts, sorted by the length of their prompts, are what train-drafter and sweep read.
    """
    recipe = TextsRecipe(
        temperatures=_numbers(temperatures),
        samples=samples,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        num_turns=turns,
        system=system,
        template_options=_template_options(template_options),
    )
    check_names(target, "untrained", None, dtype)
    check_output(output)
    index, num_processes = processes()
    require_extra("datasets")
    screen = Screen(is_quiet=index > 0)
    options = {"config": dataset_config, "split": split, "prompt_column": prompt_column, "id_column": id_column}
    options |= {"category_column": category_column}
    prompts, num_empty = _read_source(source, limit, category or "", options)
    model, tokenizer = load_target(target, dtype)

    room = max_prompt_tokens(model, max_new_tokens)
    encoded = encode_prompts(
        tokenizer, prompts, max_prompt_tokens=room, system=system, template_options=recipe.template_options
    )
    units = cut_units(encoded.prompts, recipe)
    facts = {
        "target": str(model.config._name_or_path),
        "target_revision": getattr(model.config, "_commit_hash", None),
        "target_fingerprint": weights_fingerprint(model),
    }
    settings = {
        **facts,
        "dtype": str(model.dtype).removeprefix("torch."),
        "temperatures": list(recipe.temperatures),
        "samples": samples,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "turns": turns,
        "system": system,
        "template_options": recipe.template_options,
        "num_prompts": len(encoded.prompts),
        "prompts_fingerprint": prompts_fingerprint(encoded.prompts),
    }
    _tell_what_is_left_out(screen, encoded, num_empty, room)
    ignored = set_generation_values(model)
    if ignored:
        values = ", ".join(f"{name} {value}" for name, value in ignored.items())
        screen.line(f"note: answers follow the target's own distribution, without its generation config's {values}")
    most = sum(min(turns, len(e.prompt.turns)) for e in encoded.prompts) * len(recipe.passes)
    shown = ", ".join(f"{t:g}" for t in recipe.temperatures)
    screen.line(
        f"{counted(len(encoded.prompts), 'prompt')}, {counted(most, 'answer')} (one per turn and temperature) in "
        f"{counted(len(units), 'batch', 'batches')} at temperature {shown}, at most {max_new_tokens} tokens each and "
        f"{most * max_new_tokens:,} together"
    )
    if num_processes > 1:
        screen.line(f"{num_processes} processes")

    answers, started = TargetAnswers(model, tokenizer, recipe, facts), time.perf_counter()
    made = {"tokens": 0}

    def compute(unit: Any) -> list[dict[str, Any]]:
        rows = answers(unit)
        made["tokens"] += sum(len(row["answer_ids"]) for row in rows)
        return rows

    was_finished, num_done = is_finished(output), num_done_units(output)
    if num_done:
        screen.line(f"{num_done} of {counted(len(units), 'batch', 'batches')} done before")
    bar = units_bar if index == 0 else None
    rows = run_units(units, compute, output, settings=settings, columns=COLUMNS, description="batches", progress=bar)
    if was_finished:
        screen.line("finished before: nothing to do")
    _show_result(screen, rows, most, output)
    if made["tokens"]:
        seconds = time.perf_counter() - started
        here = " in this process" if num_processes > 1 else ""
        screen.line(f"{made['tokens']:,} tokens in {seconds:.0f} s{here}: {made['tokens'] / seconds:.0f} per second")


def _tell_what_is_left_out(screen: Screen, encoded: EncodedPrompts, num_empty: int, room: int | None) -> None:
    if num_empty:
        screen.line(f"note: {counted(num_empty, 'row')} without a prompt left out")
    if encoded.too_long:
        screen.line(
            f"note: {counted(len(encoded.too_long), 'prompt')} left out for want of room for an answer (more than "
            f"{room} tokens), {encoded.too_long[0]!r} the first of them"
        )
    if encoded.repeated:
        screen.line(
            f"note: {counted(len(encoded.repeated), 'prompt')} left out as repeated, "
            f"{encoded.repeated[0]!r} the first of them"
        )


def _show_result(screen: Screen, rows: Any, most: int, output: Path) -> None:
    lengths = [len(ids) for ids in rows["answer_ids"]]
    stopped = sum(finish == "stop" for finish in rows["finish"])
    screen.line(
        f"{counted(len(rows), 'answer')}, {sum(lengths):,} tokens, {sum(lengths) / len(rows):.1f} on average; "
        f"{100 * stopped / len(rows):.1f} % end by themselves, the others at the limit"
    )
    if len(rows) < most:
        screen.line(f"note: {counted(most - len(rows), 'later turn')} left out for want of room for an answer")
    screen.line(f"dataset: {output}")
    screen.line(f'load it with datasets.load_from_disk("{output}")')


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"`--temperatures` takes numbers separated by commas, such as 0,1, got {text!r}.") from None


def _template_options(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        options = json.loads(text)
    except json.JSONDecodeError:
        options = None
    reserved = {"add_generation_prompt", "return_dict", "return_tensors", "tokenize"}
    if not isinstance(options, dict) or reserved & set(options):
        raise ValueError(
            f"`--template-options` takes a JSON object of what the chat template knows, without {sorted(reserved)}, "
            f"got {text!r}. For example '{{\"enable_thinking\": false}}'."
        )
    return options


def _read_source(source: str, limit: int | None, category: str, options: dict[str, Any]) -> tuple[list[Prompt], int]:
    """Prompts, and the number of rows without one."""
    path = Path(source).expanduser()
    columns = [options[f"{kind}_column"] for kind in ("prompt", "id", "category")]
    if path.is_file() and path.suffix not in _TABLES and not any(columns):
        prompts = read_prompts(path, limit)
        return [Prompt(p.id, p.turns, p.category or category, p.source or path.name) for p in prompts], 0
    if not path.exists() and (source.startswith(("/", "./", "../", "~")) or path.suffix in _FILES):
        raise ValueError(f"{source} does not exist. Name a file of prompts, a folder, or a dataset on the Hub.")
    rows = _load_rows(source, path, options)
    if {"prompt_ids", "answer_ids"} <= set(rows.column_names) and not options["prompt_column"]:
        raise ValueError(
            f"{source} holds texts, which are answered already. Name the prompts; to answer those of the texts "
            "anew, add `--prompt-column prompt`."
        )
    column = options["prompt_column"] or next(
        (n for n in ("turns", "prompt", "messages") if n in rows.column_names), None
    )
    for option, name in (
        ("--prompt-column", column),
        ("--id-column", options["id_column"]),
        ("--category-column", options["category_column"]),
    ):
        if name not in rows.column_names and (name is not None or option == "--prompt-column"):
            found = "has no column `turns`, `prompt` or `messages`" if name is None else f"has no column `{name}`"
            raise ValueError(f"{source} {found}. Name one with `{option}`: {', '.join(rows.column_names)}.")
    prompts, num_empty = prompts_of_rows(
        rows,
        prompt_column=str(column),
        id_column=options["id_column"],
        category_column=options["category_column"],
        category=category,
        source=path.name if path.exists() else source,
    )
    if not prompts:
        raise ValueError(f"{source} holds no prompt in the column `{column}`. Name another with `--prompt-column`.")
    return [prompts[i] for i in spread_indices(len(prompts), limit)], num_empty


def _load_rows(source: str, path: Path, options: dict[str, Any]) -> Any:
    """
    Raises:
        `OSError`: for a dataset that cannot be found or reached.
        `ValueError`: for a configuration or split that it does not have.
    """
    datasets = require_extra("datasets")
    try:
        if path.is_file():
            if path.suffix not in (*_TABLES, ".jsonl"):
                raise ValueError("it is a text file, which has no columns.")
            kind = _TABLES.get(path.suffix, "json")
            return datasets.load_dataset(kind, data_files=str(path), split="train")
        if (path / "state.json").is_file():  # as `save_to_disk` writes it, which `load_dataset` refuses
            return datasets.load_from_disk(str(path))
        name = str(path) if path.is_dir() else source
        return datasets.load_dataset(name, options["config"], split=options["split"])
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise OSError(
            f"The dataset {source} cannot be loaded: {error} For a dataset on the Hub check its name and the network; "
            "offline, name a folder or file that you have."
        ) from error
    except ValueError as error:
        todo = "Leave the column options out." if path.is_file() else "Choose with `--dataset-config` and `--split`."
        raise ValueError(f"The dataset {source} cannot be loaded: {error} {todo}") from error


__all__ = ["prepare"]

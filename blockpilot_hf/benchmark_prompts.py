"""The prompts of a benchmark: our own, a file's, or those of a set known by name. Knows neither models nor results."""

import difflib
import hashlib
import json
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, is_offline_mode, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

from .benchmark_sets import COLUMNS, EMBEDDED, HUB_SETS, PROMPT_SETS, PromptSet
from .prompts import Prompt, read_prompts, spread_indices, turns_of
from .units import require_extra

HUB_FORM = "owner/name:config:split:column"
_HUB_NAME = re.compile(
    r"(?:hf://)?(?:datasets/)?(?P<repo_id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:]+))?"
    r"(?::(?P<config>[^:]*))?(?::(?P<split>[^:]*))?(?::(?P<column>[^:]*))?"
)
_FILE_ENDINGS = (".jsonl", ".json", ".txt", ".md", ".csv", ".parquet")
_OTHERWISE = f"give a .jsonl file of the prompts, or choose `--prompts {EMBEDDED}`"


def load_prompt_set(name_or_path: str | Path, limit: int | None = None) -> list[Prompt]:
    """
    Args:
        name_or_path (`str` or `Path`):
            A name of `PROMPT_SETS`; or a file as `read_prompts` takes it; or a dataset on the Hub as
            `owner/name:config:split:column`, of which the end may be left out and any part be empty: the dataset's own
            configuration, the split `test` and the first column of `COLUMNS` are taken then. `gsm8k=owner/name:...`
            reads that dataset as if it were gsm8k, and what is empty stays as for gsm8k, but for the configuration.
            `gsm8k@revision` and `owner/name@revision:...` name a commit, branch or tag.
        limit (`int`, *optional*):
            That many prompts: the first of the embedded ones, which are ordered so that every six hold one of each
            group, and else spread evenly over the set.

    Returns:
        `list[Prompt]`: with ids that are the same for every limit.

    Raises:
        `ValueError`: for a name that is none, a limit below 1, a configuration, split or column that is not there, and
            prompts that are none.
        `ImportError`: if `datasets` is needed and not installed.
        `OSError`: if the prompts are neither on this machine nor to be reached.
    """
    name = str(name_or_path)
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be an integer >= 1, got {limit}. Leave it out for all prompts.")
    if name == EMBEDDED:
        return read_prompts(Path(__file__).with_suffix(".jsonl"))[:limit]
    place = _known_place(name)
    if place is None:
        path = Path(name).expanduser()
        if path.is_file():
            return [replace(p, source=p.source or path.name) for p in read_prompts(path, limit)]
        place = _hub_place(name)
    if place is None:
        raise ValueError(_unknown(name, path))
    return _prompts_of(place, _load_rows(place), limit)


def prompt_set_facts(name: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """
    What a record says of its prompts: the name (of a file, without its folder), their number, the SHA-256 of their ids
    and turns in order, and where they are from, if from one place.
    """
    content = json.dumps([[prompt.id, list(prompt.turns)] for prompt in prompts])
    sources = {prompt.source for prompt in prompts}
    return {
        "name": Path(name).name if Path(name).expanduser().is_file() else name,
        "num_prompts": len(prompts),
        "sha256": hashlib.sha256(content.encode()).hexdigest(),
        "source": sources.pop() if len(sources) == 1 else None,
    }


@dataclass(frozen=True)
class _Place:
    """A prompt set at a revision, under the name that its prompts' ids begin with."""

    name: str
    known: PromptSet
    revision: str | None

    @property
    def source(self) -> str:
        """Where it is, in the form that can be asked for again where there is one."""
        known = self.known
        if known.url:
            return known.url.format(revision=self.revision or "main")
        where = known.repo_id + (f"@{self.revision}" if self.revision else "")
        return where if known.files else f"{where}:{known.config or ''}:{known.split}:{known.column or ''}".rstrip(":")

    def override(self) -> str:
        """How to name another place for the same set."""
        return f"{self.name}={HUB_FORM}" if self.known.about else HUB_FORM


def _known_place(name: str) -> _Place | None:
    base, at, revision = name.partition("@")
    if base in HUB_SETS and (revision or not at):
        return _Place(base, HUB_SETS[base], revision or None)
    base, _, rest = name.partition("=")
    found = _HUB_NAME.fullmatch(rest) if base in HUB_SETS else None
    if found is None:
        return None
    known = HUB_SETS[base]
    other = replace(
        known,
        repo_id=found["repo_id"],
        config=found["config"] or None,
        split=found["split"] or known.split,
        column=found["column"] or known.column,
        files=(),
        url=None,
    )
    return _Place(base, other, found["revision"])


def _hub_place(name: str) -> _Place | None:
    found = _HUB_NAME.fullmatch(name)
    if found is None or name.startswith(".") or found["repo_id"].endswith(_FILE_ENDINGS) or Path(name).exists():
        return None
    known = PromptSet("", found["repo_id"], found["config"] or None, found["split"] or "test", found["column"] or None)
    return _Place(found["repo_id"].split("/")[1], known, found["revision"])


def _unknown(name: str, path: Path) -> str:
    others = f"Name a .jsonl or text file, a dataset on the Hub as {HUB_FORM}, or one of {', '.join(PROMPT_SETS)}."
    if name and path.is_dir():
        return f"{name} is a folder, not a file of prompts. {others}"
    if path.suffix in _FILE_ENDINGS:
        return f"The file {name} does not exist. {others}"
    base = re.split("[@=]", name)[0].lower().replace("_", "-")
    nearest = difflib.get_close_matches(base, PROMPT_SETS, n=1)
    if base in PROMPT_SETS and name.lower().replace("_", "-") != base:
        extra = "has no revisions" if base == EMBEDDED else f"takes @revision or ={HUB_FORM} after it"
        return f"{name!r} is no prompt set: {base} {extra}. {others}"
    return f"{name!r} is no prompt set.{f' Did you mean {nearest[0]}?' if nearest else ''} {others}"


def _load_rows(place: _Place) -> Any:
    """A table: a dataset, or a list of rows."""
    known = place.known
    if known.url:
        return _rows_of_url(place)
    datasets = require_extra("datasets")
    try:
        if known.files:
            files = [
                hf_hub_download(known.repo_id, file, repo_type="dataset", revision=place.revision)
                for file in known.files
            ]
            return datasets.load_dataset("json", data_files={known.split: files}, split=known.split)
        try:
            return datasets.load_dataset(known.repo_id, known.config, split=known.split, revision=place.revision)
        except ConnectionError as error:
            return _rows_of_downloaded(place, datasets.load_dataset, error)
    except (ConnectionError, LocalEntryNotFoundError) as error:
        raise OSError(
            f"The prompts of {place.name} are not on this machine, and {known.repo_id} on the Hub cannot be reached. "
            f"Run `{_download_command(place)}` where it can and bring its cache here, or {_OTHERWISE}."
        ) from error
    except (OSError, HTTPError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise OSError(
            f"The prompts of {place.name} ({place.source}) cannot be loaded: {_sentence(error)} Check the id and the "
            f"revision; name another place as `{place.override()}`, {_OTHERWISE}."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"The prompts of {place.name} ({place.source}) cannot be loaded: {_sentence(error)} Choose configuration "
            f"and split as in `{place.override()}`."
        ) from error


def _rows_of_downloaded(place: _Place, load: Callable[..., Any], unreachable: ConnectionError) -> Any:
    """What `hf download` has brought to the cache, where `load_dataset` does not look when it is offline."""
    import datasets

    known = place.known
    try:
        folder = snapshot_download(known.repo_id, repo_type="dataset", revision=place.revision, local_files_only=True)
        return load(folder, known.config, split=known.split)
    except (OSError, datasets.exceptions.DatasetsError):
        raise unreachable from None  # nothing is there, or a part only


def _rows_of_url(place: _Place) -> list[dict[str, Any]]:
    # By the standard library, since `datasets` reads such addresses only with packages that it does not bring along.
    address = place.source
    try:
        if is_offline_mode():
            raise OSError("HF_HUB_OFFLINE is set.")
        with urllib.request.urlopen(address, timeout=30) as response:
            lines = response.read().decode("utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        if not rows:
            raise ValueError("It is empty.")
        return rows
    except (OSError, ValueError) as error:
        raise OSError(
            f"The prompts of {place.name} cannot be read from {address}: {_sentence(error)} Save that file where there "
            f"is a network and give its path, or choose `--prompts {EMBEDDED}`."
        ) from error


def _download_command(place: _Place) -> str:
    parts = ["hf download", place.known.repo_id, *place.known.files, "--repo-type dataset"]
    return " ".join([*parts, f"--revision {place.revision}"] if place.revision else parts)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _prompts_of(place: _Place, rows: Any, limit: int | None) -> list[Prompt]:
    known, names = place.known, list(rows[0]) if isinstance(rows, list) else rows.column_names
    column = known.column or next((name for name in COLUMNS if name in names), None)
    if column is None:
        raise ValueError(
            f"{place.source} has no column {', '.join(COLUMNS)}. Name one as in `{place.override()}`: "
            f"{', '.join(names)}."
        )
    category_column = known.category_column
    if category_column is None and not known.category and "category" in names:
        category_column = "category"
    columns = [name for name in (column, known.more_column, category_column) if name]
    missing = [name for name in columns if name not in names]
    if missing:
        raise ValueError(
            f"{place.source} has no column {missing[0]!r}, which the prompts of {place.name} need. It has "
            f"{', '.join(names)}. Name another place or column as `{place.override()}`."
        )
    if not isinstance(rows, list):
        rows = rows.select_columns(columns)  # the others may be large
    prompts = []
    for index in spread_indices(len(rows), limit):
        row: Mapping[str, Any] = rows[index]
        value = row[column]
        if isinstance(value, str) and value.strip():
            value = known.format(value, str(row[known.more_column] or "") if known.more_column else "")
        turns = turns_of(
            value, f"row {index} of {place.source}, column `{column}`", f"Name another column as `{place.override()}`."
        )
        category = str(row[category_column] or "") if category_column else known.category
        if turns:
            prompts.append(Prompt(f"{place.name}-{index}", turns, category, place.source))
    if not prompts:
        raise ValueError(
            f"{place.source} holds no prompt in the column {column!r}. Name another as `{place.override()}`."
        )
    return prompts


__all__ = ["HUB_FORM", "PROMPT_SETS", "load_prompt_set", "prompt_set_facts"]

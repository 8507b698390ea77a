"""Hub repositories, put together file for file: weights, records and cards from `hub_cards/`, code from this package.

`hub_cards/` itself is such a mirror. It names no namespace: cards write `NAMESPACE/...`, and configs name their
neighbours by folder. `fill_in` makes of it what is pushed. Knows nothing of the network.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .configuration_blockpilot import BlockPilotConfig
from .configuration_dflash import DFlashConfig
from .embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME
from .hub import code_files, recipe_files
from .loading import embedded_drafter_dir
from .modeling_blockpilot import BlockPilotPolicy
from .modeling_dflash import DFlashDraftModel

RECIPE_NAME = "blockpilot"
NAMESPACE = "NAMESPACE"
# In the order in which they are pushed: a drafter names a commit of its policy.
_MODELS = {
    EMBEDDED_POLICY_NAME: (BlockPilotConfig, BlockPilotPolicy),
    EMBEDDED_PAPER_POLICY_NAME: (BlockPilotConfig, BlockPilotPolicy),
    EMBEDDED_DRAFTER_NAME: (DFlashConfig, DFlashDraftModel),
}
REPOSITORIES = (*_MODELS, RECIPE_NAME)
# What a repository may hold besides code. Anything else in a folder of `hub_cards/` is there by mistake.
_DATA = (".json", ".md", ".png", ".safetensors", ".svg", ".yaml")


@dataclass(frozen=True)
class FileChange:
    """
    What becomes of one file of a repository.

    Args:
        path (`str`): Within the repository, with `/`.
        size (`int`): In bytes; 0 for a file that goes.
        status (`str`): `"new"`, `"changed"`, `"unchanged"`, `"removed"`, or `"not compared"`.
    """

    path: str
    size: int
    status: str


def chosen_repositories(names: Iterable[str] | None = None) -> list[str]:
    """
    Names of repositories in the order of pushing, all by default.

    Raises:
        `ValueError`: for a name that is none.
    """
    chosen = set(REPOSITORIES if names is None else names)
    unknown = sorted(chosen - set(REPOSITORIES))
    if unknown or not chosen:
        raise ValueError(
            f"There is no repository {', '.join(map(repr, unknown)) or 'without a name'}. Those of this package are "
            f"{', '.join(REPOSITORIES)}."
        )
    return [name for name in REPOSITORIES if name in chosen]


def assemble(name: str, folder: Path) -> None:
    """
    Write a repository to a folder that is not there yet, as the mirror has it.

    Raises:
        `FileNotFoundError`: if this copy of the package came without the mirror.
        `ValueError`: if the mirror holds what is not part of a repository.
    """
    source = embedded_drafter_dir().parent / name
    if not (source / "README.md").is_file():
        raise FileNotFoundError(f"{source} has no README.md. Install blockpilot-hf from its wheel or a whole checkout.")
    for path in sorted(files_of(source)):
        if Path(path).suffix not in _DATA and not is_code(path):
            raise ValueError(f"{source / path} is not part of a repository. Take it out of that folder.")
        if not is_code(path):
            _write(folder / path, (source / path).read_bytes())
    for path, content in code_of(name).items():
        _write(folder / path, content)
    if name in _MODELS:
        _write_config(folder, {**read_config(folder), "auto_map": _auto_map(name)})


def code_of(name: str) -> dict[str, bytes]:
    """The files of a repository that are copies of this package's, by path."""
    if name == RECIPE_NAME:
        return {f"custom_generate/{file}": content for file, content in recipe_files().items()}
    config, model = _MODELS[name]
    return {**code_files(config), **code_files(model)}


def export(folder: Path, names: Sequence[str] | None = None) -> dict[str, list[FileChange]]:
    """
    Write repositories below a folder, one folder each. What is there already is brought up to date, and copies of code
    that are no longer part of a repository go.

    Args:
        folder (`Path`): Made if it is not there.
        names (`Sequence[str]`, *optional*): Of the repositories, all by default.

    Returns:
        `dict[str, list[FileChange]]`: what was written, by repository.

    Raises:
        `ValueError`: if the folder is a file, or holds anything else; then nothing is written.
    """
    chosen = chosen_repositories(names)
    _check_destination(folder)
    with tempfile.TemporaryDirectory(prefix="blockpilot-export-") as work:
        changes = {}
        for name in chosen:
            assemble(name, Path(work, name))
            there = {path: _hashes((folder / name / path).read_bytes())[0] for path in files_of(folder / name)}
            changes[name] = compare_files(Path(work, name), there)
            foreign = [c.path for c in changes[name] if c.status == "removed" and not is_code(c.path)]
            if foreign:
                raise ValueError(
                    f"{folder / name} holds {_listed(foreign)}, which no export wrote. Move that, or name another "
                    "folder."
                )
        for name in chosen:
            for change in changes[name]:
                if change.status == "removed":
                    (folder / name / change.path).unlink()
                else:
                    _write(folder / name / change.path, Path(work, name, change.path).read_bytes())
    return changes


def fill_in(folder: Path, namespace: str, policy_revision: str | None = None) -> None:
    """
    Make an assembled repository the one of a namespace: ids instead of neighbouring folders in card and config.

    Args:
        policy_revision (`str`, *optional*): Commit of the policy that a drafter names.
    """
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8").replace(f"{NAMESPACE}/", f"{namespace}/")
    text = re.sub(
        r"\]\(\.\./([\w.-]+)/?\)", lambda link: f"](https://huggingface.co/{namespace}/{link[1]})", text, flags=re.ASCII
    )
    card.write_text(text, encoding="utf-8", newline="\n")
    if not (folder / "config.json").is_file():
        return
    config = read_config(folder)
    if (config.get("policy") or "").startswith("../"):
        config["policy"] = f"{namespace}/{config['policy'].removeprefix('../')}"
    if config.get("policy"):
        config["policy_revision"] = policy_revision
    if config.get("drafter_name_or_path") in REPOSITORIES:
        config["drafter_name_or_path"] = f"{namespace}/{config['drafter_name_or_path']}"
    _write_config(folder, config)


def compare_files(new: Path, old: Mapping[str, str]) -> list[FileChange]:
    """
    What replacing the files of a repository by others changes.

    Args:
        new (`Path`): The assembled repository.
        old (`Mapping[str, str]`): What is there: SHA-256, or SHA-1 as git counts it, by path.
    """
    changes = []
    for path in sorted(files_of(new)):
        content = (new / path).read_bytes()
        status = "new" if path not in old else "unchanged" if old[path] in _hashes(content) else "changed"
        changes.append(FileChange(path, len(content), status))
    return changes + [FileChange(path, 0, "removed") for path in sorted(set(old) - {change.path for change in changes})]


def files_of(folder: Path) -> list[str]:
    """Paths of the files below a folder, with `/`; none that are hidden or that Python keeps for itself."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [p.as_posix() for p in found if not any(part.startswith((".", "__pycache__")) for part in p.parts)]


def is_code(path: str) -> bool:
    """Whether the file of a repository is written by `export` and not kept."""
    return path.endswith(".py") or path == "custom_generate/requirements.txt"


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of an assembled repository."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    """In the form that transformers writes."""
    _write(folder / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _auto_map(name: str) -> dict[str, str]:
    classes = zip(("AutoConfig", "AutoModel"), _MODELS[name], strict=True)
    return {auto: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for auto, cls in classes}


def _check_destination(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Name a folder, which may be new.")
    there = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    foreign = sorted(set(there) - set(REPOSITORIES))
    if foreign:
        raise ValueError(
            f"{folder} holds {_listed(foreign)}, which is no repository of this package. Name an empty folder, a new "
            "one or an earlier export."
        )


def _write(path: Path, content: bytes) -> None:
    """The file appears whole, and only if it is another one."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    os.replace(beside, path)


def _hashes(content: bytes) -> tuple[str, str]:
    as_git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return hashlib.sha256(content).hexdigest(), as_git.hexdigest()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


__all__ = [
    "NAMESPACE",
    "RECIPE_NAME",
    "REPOSITORIES",
    "FileChange",
    "assemble",
    "chosen_repositories",
    "code_of",
    "compare_files",
    "export",
    "files_of",
    "fill_in",
    "is_code",
    "read_config",
]

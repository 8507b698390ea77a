"""Whether an assembled repository is one that strangers can load: files, config, weights, code, card and links.

Looks at the folder alone, as one who downloads it, and asks nothing of the network.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load
from safetensors import safe_open
from transformers.dynamic_module_utils import get_relative_import_files

from .configuration_blockpilot import BlockPilotConfig
from .configuration_dflash import DFlashConfig
from .export import NAMESPACE, files_of, read_config
from .modeling_blockpilot import BlockPilotPolicy
from .modeling_dflash import DFlashDraftModel

_ALLOWED_IMPORTS = {"torch", "transformers"} | set(sys.stdlib_module_names)
# What `pickle.dump` and `torch.save` write begins with these.
_PICKLES = (*(bytes([0x80, protocol]) for protocol in range(2, 6)), b"PK\x03\x04")
_PICKLE_NAMES = (".bin", ".ckpt", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth")
_LOCAL_PATH = re.compile(r"""(?:^|[\s"'`(=:,])((?:~?/|[A-Za-z]:[/\\])(?:[\w.+-]+[/\\])+[\w.+-]*)""", flags=re.ASCII)
# What the Hub takes as `license` (huggingface.co/docs/hub/repositories-licenses).
_LICENSES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
lgpl lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense
zlib pddl lgpl-lr deepfloyd-if-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma unknown other
"""
LICENSES = frozenset(_LICENSES.split())
_LINK = re.compile(r"\]\(([^()\s]+)\)")


def check_repository(folder: Path) -> None:
    """
    Check a repository whose namespace is filled in.

    Raises:
        `ValueError`: with all that is wrong with it.
    """
    kinds = (_file_problems, _code_problems, _config_problems, _weight_problems, _card_problems, _link_problems)
    problems = [problem for kind in kinds for problem in kind(folder)]
    if problems:
        raise ValueError(f"{folder.name} cannot be pushed: {'; '.join(problems)}.")


def _file_problems(folder: Path) -> Iterator[str]:
    for path in files_of(folder):
        with (folder / path).open("rb") as file:
            start = file.read(4)
        if path.endswith(_PICKLE_NAMES) or start.startswith(_PICKLES):
            yield f"{path} is a pickle, which runs code when it is loaded; weights have to be safetensors"
        texts: list[Any] = []
        if path.endswith(".md"):
            texts = [(folder / path).read_text(encoding="utf-8")]
        elif path.endswith(".json"):
            try:
                record = json.loads((folder / path).read_text(encoding="utf-8"))
            except ValueError as error:
                yield f"{path} is no JSON: {error}"
                continue
            texts = [text for leaf in _leaves(record) for text in leaf if isinstance(text, str)]
        for found in filter(None, map(_LOCAL_PATH.search, texts)):
            yield f"{path} names {found[1]!r}, a path of this machine"
            break


def _code_problems(folder: Path) -> Iterator[str]:
    """Imports that a machine with torch and transformers cannot follow, else files that nothing imports."""
    modules, is_whole = [Path(path) for path in files_of(folder) if path.endswith(".py")], True
    for module in modules:
        for node in ast.walk(ast.parse((folder / module).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                tops = [(0, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                tops = [(node.level, node.module or "")]
            else:
                continue
            for level, name in tops:
                if level == 0 and name.split(".")[0] not in _ALLOWED_IMPORTS:
                    yield f"{module} imports {name}, and only torch and transformers are there"
                elif level and (level > 1 or not (folder / module.with_name(f"{name}.py")).is_file()):
                    is_whole = False
                    yield f"{module} imports {'.' * level}{name}, which is not beside it"
    entries = _entry_modules(folder)
    for entry in sorted(entries - {module.as_posix() for module in modules}):
        is_whole = False
        yield f"{entry} is missing"
    if is_whole:
        files = [file for entry in entries for file in get_relative_import_files(folder / entry)]
        needed = {Path(file).relative_to(folder) for file in files}
        for module in sorted(set(modules) - needed - {Path(entry) for entry in entries}):
            yield f"{module} is imported by nothing"


def _entry_modules(folder: Path) -> set[str]:
    """Files with which loading begins."""
    if not (folder / "config.json").is_file():
        return {"custom_generate/generate.py"}
    references = read_config(folder).get("auto_map") or {}
    return {f"{str(reference).partition('.')[0]}.py" for reference in references.values()}


def _config_problems(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        return
    config = read_config(folder)
    references = config.get("auto_map") or {}
    if sorted(references) != ["AutoConfig", "AutoModel"]:
        yield f"config.json has the `auto_map` {references}, not one for AutoConfig and AutoModel"
    for field, value in config.items():
        if isinstance(value, str) and field.endswith("name_or_path") and _is_path(value):
            yield f"config.json names the folder {value!r} in `{field}`"
    policy = config.get("policy")
    if policy is not None and (_is_path(policy) or policy.count("/") != 1):
        yield f"config.json names the policy {policy!r}, which is no Hub id"


def _weight_problems(folder: Path) -> Iterator[str]:
    """They load exactly, by the class of this package: the copies beside them are not run."""
    if not (folder / "config.json").is_file():
        return
    kind, weights = read_config(folder).get("model_type"), folder / "model.safetensors"
    cls = {DFlashConfig.model_type: DFlashDraftModel, BlockPilotConfig.model_type: BlockPilotPolicy}.get(str(kind))
    if cls is None:
        yield f"config.json has the `model_type` {kind!r}, which is none of this package"
        return
    if not weights.is_file():
        yield "model.safetensors is missing"
        return
    try:
        with safe_open(weights, framework="pt") as opened:
            opened.keys()
        cls.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever it is, it would stop others too
        yield f"config.json and model.safetensors do not load: {error}"


def _card_problems(folder: Path) -> Iterator[str]:
    if not (folder / "README.md").is_file():
        yield "README.md is missing"
        return
    text = (folder / "README.md").read_text(encoding="utf-8")
    try:
        data = metadata_load(folder / "README.md") or {}
        ModelCard(text)  # with `model-index` it has to be complete
    except Exception as error:  # of whatever kind the YAML reader has
        yield f"the front matter of README.md cannot be read: {error}"
        return
    if not data.get("license") or not data.get("tags"):
        yield "README.md begins without front matter that has a license and tags"
        return
    if data["license"] not in LICENSES:
        yield f"README.md has the license {data['license']!r}, which is none of the Hub's"
    card = ModelCard(text).data
    if ModelCardData(**card.__dict__).to_dict() != data:
        yield "the front matter of README.md is not what `ModelCardData` makes of it"
    for name, value in _leaves(data):
        if value is None:
            yield f"{name} in the front matter of README.md is empty"
        elif isinstance(value, str) and _is_path(value):
            yield f"{name} in the front matter of README.md is {value!r}, a path of this machine"
    if NAMESPACE in text:
        yield f"README.md still says {NAMESPACE}"


def _is_path(name: str) -> bool:
    """Whether a name is written as a path. What lies in the working folder has no say: an export may have its name."""
    return name.startswith(("/", "~", "./", "../")) or "\\" in name


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name or "it", value


def _link_problems(folder: Path) -> Iterator[str]:
    """Links to files of the repository; those to the web are not followed."""
    if not (folder / "README.md").is_file():
        return
    for link in _LINK.findall((folder / "README.md").read_text(encoding="utf-8")):
        if not re.match(r"https?://|#|mailto:", link) and not (folder / link.partition("#")[0]).is_file():
            yield f"README.md links to {link}, which is not in the repository"


__all__ = ["LICENSES", "check_repository"]

"""Folders in the shape of Hub repositories, assembled from this package's own files, and where they are kept."""

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from .costs import blockpilot_cache_dir

# The modules that travel: they import only torch, transformers and each other, one relative level deep.
RECIPE_MODULES = (
    "packing",
    "sharing",
    "exact_loading",
    "configuration_dflash",
    "modeling_dflash",
    "configuration_blockpilot",
    "features",
    "costs",
    "default_costs",
    "modeling_blockpilot",
    "trace",
    "verification",
    "checks",
    "lookup",
    "flight",
    "candidate_generator",
    "decoding",
    "batching",
    "loading",
    "generate",
)

# What the recipe runs with, in the form that transformers checks before it runs one: one comparison a line.
REQUIREMENTS = ("torch>=2.9", "transformers>=5.24")


def recipe_files() -> dict[str, bytes]:
    """What lies in the folder `custom_generate` of the recipe's repository, by name."""
    package = Path(__file__).parent
    files = {f"{name}.py": (package / f"{name}.py").read_bytes() for name in RECIPE_MODULES}
    return {**files, "requirements.txt": "".join(f"{line}\n" for line in REQUIREMENTS).encode()}


def code_files(cls: type) -> dict[str, bytes]:
    """The files that a config or model class needs, by name: as `save_pretrained` writes them beside the weights."""
    own = sys.modules[cls.__module__].__file__
    assert own is not None
    return {Path(file).name: Path(file).read_bytes() for file in (own, *sorted(get_relative_import_files(own)))}


def custom_generate_dir() -> str:
    """
    A folder to pass as `custom_generate=` with `trust_remote_code=True`, holding the recipe as its Hub repository does.

    It lies in the Hugging Face cache (`HF_HOME`) under the fingerprint of its files, assembled at the first call.
    """
    files = recipe_files()
    fingerprint = hashlib.sha256(b"\0".join(name.encode() + b"\0" + text for name, text in files.items())).hexdigest()
    folder = blockpilot_cache_dir() / f"custom_generate-{fingerprint[:16]}"
    if folder.is_dir():
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".custom_generate-"))
    try:
        (unfinished / "custom_generate").mkdir()
        for name, text in files.items():
            (unfinished / "custom_generate" / name).write_bytes(text)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return str(folder)

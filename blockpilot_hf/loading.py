"""Drafters and policies from a folder or the Hub, by the classes of this package where they are responsible."""

import functools
import json
import os
from pathlib import Path
from typing import Any

from transformers import AutoModel, PreTrainedConfig
from transformers.utils import logging

from .checks import check_drafter
from .configuration_dflash import is_dflash_config_dict
from .modeling_blockpilot import BlockPilotPolicy
from .modeling_dflash import DFlashDraftModel

logger = logging.get_logger(__name__)


def load_drafter(name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
    """
    A drafter from a folder or Hub id. Published DFlash checkpoints and this package's own form load without running
    remote code; any other type goes through `AutoModel`, which asks for `trust_remote_code` where it is needed.

    Args:
        name_or_path (`str`): Folder or Hub id.
        kwargs: As `from_pretrained` takes them: `revision`, `token`, `cache_dir`, `subfolder`, `dtype`, ...
    """
    hub = {
        key: kwargs[key] for key in ("revision", "token", "cache_dir", "local_files_only", "subfolder") if key in kwargs
    }
    config_dict, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub)
    is_ours = is_dflash_config_dict(config_dict) or any(key.startswith("speculators") for key in config_dict)
    drafter = (DFlashDraftModel if is_ours else AutoModel).from_pretrained(name_or_path, **kwargs)
    check_drafter(drafter)
    return drafter.eval()


def load_policy(name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
    """A policy from a folder or Hub id; loaded once per process as long as the folder's files stay the same."""
    folder = Path(name_or_path, kwargs.get("subfolder") or "")
    stamp = tuple(sorted((f.name, f.stat().st_mtime_ns) for f in folder.iterdir())) if folder.is_dir() else None
    # As text, because `proxies` is a dict, which cannot be part of a key.
    return _load_policy(str(name_or_path), stamp, json.dumps(kwargs, sort_keys=True, default=str))


@functools.lru_cache(maxsize=8)
def _load_policy(name_or_path: str, stamp: Any, kwargs: str) -> Any:
    return BlockPilotPolicy.from_pretrained(name_or_path, **json.loads(kwargs)).eval()


def policy_of_drafter(drafter: Any, **kwargs: Any) -> Any:
    """
    The policy that the drafter's config names, or `None`. A relative folder counts from the drafter's own folder.

    Raises:
        `OSError`: if the config names a policy that cannot be found.
    """
    name = getattr(drafter.config, "policy", None)
    if not name:
        return None
    beside = Path(getattr(drafter.config, "_name_or_path", None) or "") / name
    if beside.is_dir():  # before a folder of that name in the working directory
        name = str(beside)
    revision = getattr(drafter.config, "policy_revision", None)
    if revision is not None and not Path(name).is_dir():
        kwargs["revision"] = revision
    try:
        return load_policy(name, **kwargs)
    except OSError as error:
        raise OSError(
            f"The drafter's config names the policy '{name}', which cannot be loaded: {error}. Pass `policy=` with a "
            "policy of your own, or `policy=False` to use the drafter's block size."
        ) from error

"""Drafters and policies from a folder or the Hub, by the classes of this package where they are responsible."""

import functools
import json
import os
import posixpath
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig
from transformers.utils import logging

from .checks import check_drafter
from .configuration_blockpilot import BlockPilotConfig
from .configuration_dflash import is_dflash_config_dict
from .costs import has_native_bfloat16
from .modeling_blockpilot import BlockPilotPolicy
from .modeling_dflash import DFlashDraftModel
from .packing import pack_linear_weights, packing_pays
from .sharing import is_hub_id

logger = logging.get_logger(__name__)

EMBEDDED_DRAFTER_NAME = "SmolLM2-135M-Instruct-DFlash-b8"


def load_drafter(name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
    """
    A drafter from a folder or Hub id. Published DFlash checkpoints and this package's own form load without running
    remote code; any other type goes through `AutoModel`, which asks for `trust_remote_code` where it is needed.

    Args:
        name_or_path (`str`): Folder or Hub id.
        kwargs: As `from_pretrained` takes them: `revision`, `token`, `cache_dir`, `subfolder`, `dtype`, ...
    """
    config_dict, _ = PreTrainedConfig.get_config_dict(name_or_path, **_hub_kwargs(kwargs))
    is_ours = is_dflash_config_dict(config_dict) or any(key.startswith("speculators") for key in config_dict)
    drafter = (DFlashDraftModel if is_ours else AutoModel).from_pretrained(name_or_path, **kwargs)
    check_drafter(drafter)
    return drafter.eval()


def load_embedded_drafter(*, dtype: Any = "auto", pack: bool | None = None, **kwargs: Any) -> Any:
    """
    The drafter that comes with this package, for its embedded target. Its config names the policy that belongs to it.

    Args:
        dtype (`torch.dtype` or `str`, *optional*, defaults to `"auto"`):
            The file holds bfloat16; by default the drafter runs in the dtype that suits its device
            ([`native_dtype`]), which is also that of the embedded target.
        pack (`bool`, *optional*):
            Whether to prepack its linear layers ([`pack_linear_weights`]); by default where it pays.
        kwargs: As `from_pretrained` takes them: `device_map`, `attn_implementation`, ...

    Raises:
        `FileNotFoundError`: if this copy of the package came without it.
    """
    drafter = load_drafter(embedded_drafter_dir(), dtype=dtype, **kwargs)
    drafter = drafter.to(native_dtype(drafter.device)) if dtype == "auto" else drafter
    if packing_pays(drafter) if pack is None else pack:
        pack_linear_weights(drafter)
    return drafter


def embedded_drafter_dir() -> Path:
    """
    The folder of the drafter that comes with this package: within it when it is installed, beside it in a checkout.

    Raises:
        `FileNotFoundError`: if there is none, as where the code alone was copied.
    """
    package = Path(__file__).parent
    places = [folder / "hub_cards" / EMBEDDED_DRAFTER_NAME for folder in (package, package.parent)]
    for place in places:
        if all((place / name).is_file() for name in ("config.json", "model.safetensors")):
            return place
    raise FileNotFoundError(
        f"The embedded drafter is not there: no `config.json` and `model.safetensors` in {places[0]} or {places[1]}. "
        "Install blockpilot-hf from its wheel or a whole checkout, or pass a drafter of your own."
    )


def native_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """
    The dtype to run in: bfloat16, except on processors without instructions for it. There a wide pass in bfloat16 takes
    several times as long as in float32, so a block would cost more than the tokens that it saves.
    """
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if has_native_bfloat16() else torch.float32


def load_policy(name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
    """
    A policy from a folder or Hub id; loaded once per process as long as the folder's files stay the same.

    Raises:
        `OSError`: if there is none, or none that may be seen.
        `ValueError`: for a model of another kind.
    """
    try:
        return _cached_policy(name_or_path, **kwargs)
    except OSError as error:
        raise OSError(f"The policy '{name_or_path}' cannot be loaded: {error}") from error


def _cached_policy(name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
    folder = Path(name_or_path, kwargs.get("subfolder") or "")
    stamp = tuple(sorted((f.name, f.stat().st_mtime_ns) for f in folder.iterdir())) if folder.is_dir() else None
    # As text, because `proxies` is a dict, which cannot be part of a key.
    return _load_policy(str(name_or_path), stamp, json.dumps(kwargs, sort_keys=True, default=str))


@functools.lru_cache(maxsize=8)
def _load_policy(name_or_path: str, stamp: Any, kwargs: str) -> Any:
    given = json.loads(kwargs)
    config_dict, _ = PreTrainedConfig.get_config_dict(name_or_path, **_hub_kwargs(given))
    kind = config_dict.get("model_type")
    if kind != BlockPilotConfig.model_type:
        raise ValueError(
            f"'{name_or_path}' is no BlockPilot policy: the `model_type` of its config is {kind!r}, not "
            f"{BlockPilotConfig.model_type!r}. Pass `policy=` with the folder or Hub id of one, or `policy=False`."
        )
    return BlockPilotPolicy.from_pretrained(name_or_path, **given).eval()


def _hub_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those that say where a config is found."""
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}


def policy_of_drafter(drafter: Any, **kwargs: Any) -> Any:
    """
    The policy that the drafter's config names, or `None`. A relative folder counts from the drafter's own folder, or
    from its repository.

    Raises:
        `OSError`: if the config names a policy that cannot be found.
    """
    name = getattr(drafter.config, "policy", None)
    if not name:
        return None
    own = getattr(drafter.config, "_name_or_path", None) or ""
    beside = Path(own) / name
    if beside.is_dir():  # before a folder of that name in the working directory
        name = str(beside)
    elif name.startswith("../") and is_hub_id(own):  # a folder pushed as it is: its neighbours are repositories
        name = posixpath.normpath(f"{own}/{name}")
    revision = getattr(drafter.config, "policy_revision", None)
    if revision is not None and not Path(name).is_dir():
        kwargs["revision"] = revision
    try:
        return _cached_policy(name, **kwargs)
    except OSError as error:
        raise OSError(
            f"The drafter's config names the policy '{name}', which cannot be loaded: {error}. Pass `policy=` with a "
            "policy of your own, or `policy=False` to use the drafter's block size."
        ) from error

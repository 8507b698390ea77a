"""What the commands share: options, and loading of target, drafter and policy by their names."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from .checks import ADAPT
from .cli_console import progress_bar
from .embedded import load_embedded_target, native_dtype, untrained_drafter
from .generate import BlockPilot
from .loading import load_drafter, load_policy
from .packing import PackedLinear
from .parity import ScriptedDrafter

EMBEDDED = "embedded"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Target = Annotated[
    str | None,
    typer.Option(help="Target: folder or Hub id.", show_default="the embedded SmolLM2-135M-Instruct", metavar="NAME"),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Drafter: 'embedded', folder, Hub id, 'untrained' (random weights) or 'scripted[:SHARE]' (decodes plainly "
        "first and proposes that text, right in this share of the tokens).",
        show_default=EMBEDDED,
        metavar="NAME",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="Policy: folder, Hub id, or 'none' for the drafter's block size.",
        show_default="the one that the drafter names",
        metavar="NAME",
    ),
]
Adapt = Annotated[
    str | None,
    typer.Option(
        help="flight: each step decides what to draft, copy and verify. prompt: one block size for the whole answer.",
        metavar="|".join(ADAPT),
        show_default="flight; prompt with a policy that names one size",
    ),
]
UseLookup = Annotated[
    bool | None,
    typer.Option(
        "--lookup/--no-lookup",
        help="In flight, whether a step may copy what followed the same tokens earlier in prompt and answer.",
        show_default="it may",
    ),
]
Costs = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="What passes cost: a file that `blockpilot calibrate --output` wrote.",
        show_default="what it keeps for this pair and machine, else a default for the kind of device",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help=f"Dtype of the target: {', '.join(_DTYPES)}, or 'auto' (bfloat16 where the processor has instructions for "
        "it, else float32).",
        metavar="DTYPE",
    ),
]
Packing = Annotated[
    bool,
    typer.Option(
        " /--no-pack",
        help="Keep the embedded pair's linear layers as torch has them. By default their weights are laid out anew in "
        "memory where wide passes gain from it; plain generate then uses that too.",
        show_default=False,
    ),
]
NewTokens = Annotated[int, typer.Option(min=1, help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: greedy; above: sampling.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.")]
Limit = Annotated[int | None, typer.Option(min=1, help="That many prompts of the file, spread evenly over it.")]


def check_names(target: str | None, drafter: str | None, policy: str | None, dtype: str) -> None:
    """
    What can be told from the names alone, before anything is loaded.

    Raises:
        `ValueError`: for a folder that is not there, a share or dtype that is none, and a target without a drafter.
    """
    _torch_dtype(dtype)
    for option, name in (("--target", target), ("--drafter", drafter), ("--policy", policy)):
        # What is written as a path has to be there. Anything else may be a Hub id.
        if name and name.startswith(("/", "./", "../", "~")) and not Path(name).is_dir():
            raise ValueError(f"`{option}` names the folder {name}, which does not exist.")
        kind = option.removeprefix("--")
        if name and not Path(name, "config.json").is_file() and Path(name, kind, "config.json").is_file():
            raise ValueError(f"`{option} {name}` is what the training command wrote; the {kind} is {name}/{kind}.")
    if drafter and _is_scripted(drafter):
        _share(drafter)
    if target is not None and drafter is None:
        raise ValueError(
            f"`--target {target}` needs a drafter that was trained for it, and the default one is for the embedded "
            "target. Name one with `--drafter`, or try `--drafter scripted`."
        )


def load_target(target: str | None, dtype: str = "auto", *, pack: bool = True) -> tuple[Any, Any]:
    """
    A target and its tokenizer, on a GPU where there is one; of several processes each takes one of its own.

    Args:
        target (`str`, *optional*): Folder or Hub id; the embedded one by default.
        dtype (`str`): A name that `--dtype` takes.
        pack (`bool`): `False` keeps the embedded target's linear layers as torch has them.

    Raises:
        `ValueError`: for another dtype.
        `OSError`: if the target cannot be fetched or read.
    """
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)  # what is made there without naming a device goes there too
    torch_dtype = _torch_dtype(dtype) or native_dtype(device)
    if target is None:
        try:
            return load_embedded_target(dtype=torch_dtype, device=device, pack=None if pack else False)
        except RuntimeError as error:  # says what to do, so it is the user's to read
            raise OSError(str(error)) from error
    with _naming("--target", target):
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch_dtype).to(device).eval()
        return model, AutoTokenizer.from_pretrained(target)


def load_pilot(
    drafter: str | None,
    policy: str | None,
    target: Any,
    *,
    pack: bool = True,
    adapt: str | None = None,
    lookup: bool | None = None,
    costs: Path | None = None,
) -> BlockPilot:
    """
    A pilot for a loaded target.

    Args:
        drafter (`str`, *optional*): What `--drafter` takes; the embedded one by default.
        policy (`str`, *optional*): Folder, Hub id, or `none`; by default the one that the drafter names.
        pack (`bool`): `False` keeps the embedded drafter's linear layers as torch has them.
        adapt, lookup, costs: As in [`BlockPilot`].

    Raises:
        `ValueError`: for a share out of range, and for a policy or drafter that is none.
        `OSError`: if drafter or policy cannot be fetched or read.
    """
    chosen: Any = policy
    if policy == "none":
        chosen = False
    elif policy is not None:
        with _naming("--policy", policy):
            chosen = load_policy(policy)
    how: dict[str, Any] = {"adapt": adapt, "lookup": lookup, "costs": costs}
    if drafter in (None, EMBEDDED):
        pilot = BlockPilot.from_pretrained(policy=chosen, dtype=target.dtype, pack=None if pack else False, **how)
        pilot.drafter.to(target.device)
        return pilot
    if _is_scripted(drafter):
        return BlockPilot(ScriptedDrafter(target, accuracy=_share(drafter)), chosen, **how)
    if drafter == "untrained":
        return BlockPilot(untrained_drafter(target), chosen, **how)
    with _naming("--drafter", drafter):
        return BlockPilot(load_drafter(drafter, dtype=target.dtype).to(target.device), chosen, **how)


def sampling_settings(temperature: float) -> dict[str, Any]:
    """Keywords of `generate`."""
    if not temperature:
        return {"do_sample": False}
    # The neutral top-k and top-p: a model's own defaults would hide most of the distribution.
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def policy_name(pilot: BlockPilot, policy: str | None) -> str:
    """The policy in use, for records: as given, as the drafter names it, or `none`."""
    named = policy or getattr(pilot.drafter.config, "policy", None) or "none"
    return os.path.basename(str(named).rstrip("/")) if policy is None else named


def machine_facts(model: Any) -> dict[str, Any]:
    """What speed and rounding depend on besides the models, for records."""
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "is_packed": any(isinstance(module, PackedLinear) for module in model.modules()),
        "device": model.device.type,
        "num_threads": torch.get_num_threads(),
        "blockpilot_version": package_version(),
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
    }


def package_version() -> str:
    """Of this package, installed or not."""
    return importlib.import_module(__package__).__version__


def _torch_dtype(name: str) -> torch.dtype | None:
    """`None` for `auto`."""
    if name not in (*_DTYPES, "auto"):
        raise ValueError(f"`--dtype` must be one of {', '.join((*_DTYPES, 'auto'))}, got {name!r}.")
    return _DTYPES.get(name)


def _is_scripted(drafter: str) -> bool:
    return drafter.partition(":")[0] == "scripted"


def _share(drafter: str) -> float:
    """Of `scripted:SHARE`, two thirds without one."""
    share = drafter.partition(":")[2]
    try:
        number = float(share) if share else 2 / 3
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"'scripted:SHARE' takes a share between 0 and 1, got {share!r}.")
    return number


@contextmanager
def _naming(option: str, name: str) -> Iterator[None]:
    """Errors of loading say which of the models it was."""
    try:
        yield
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"`{option} {name}` cannot be loaded: {error}") from error


__all__ = [
    "EMBEDDED",
    "Drafter",
    "Dtype",
    "Limit",
    "NewTokens",
    "Packing",
    "Policy",
    "Seed",
    "Target",
    "Temperature",
    "check_names",
    "load_pilot",
    "load_target",
    "machine_facts",
    "package_version",
    "policy_name",
    "progress_bar",
    "sampling_settings",
]

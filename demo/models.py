"""The models of the Space: which ones, by environment variables, and loading them once."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockpilot_hf import BlockPilot
from blockpilot_hf.embedded import (
    EMBEDDED_PAPER_POLICY_NAME,
    EMBEDDED_TARGET_NAME,
    load_embedded_target,
    native_dtype,
)
from blockpilot_hf.loading import (
    EMBEDDED_DRAFTER_NAME,
    embedded_drafter_dir,
    load_drafter,
    load_embedded_drafter,
    load_policy,
    policy_of_drafter,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Loaded:
    """
    A target with its pilot.

    Args:
        target, tokenizer: Of transformers.
        pilot (`BlockPilot`): With the drafter; policies come with each call.
        curve_policy (`BlockPilotPolicy`, *optional*): Predicts acceptance lengths: for flights and the rule by seconds.
        paper_policy (`BlockPilotPolicy`, *optional*): Names one size, as in the paper.
        facts (`dict`): Names, dtype and device, as the page shows them.
    """

    target: Any
    tokenizer: Any
    pilot: BlockPilot
    curve_policy: Any = None
    paper_policy: Any = None
    facts: dict[str, Any] = field(default_factory=dict)


class Models:
    """
    Loads once, for all who ask; after a failure the next who asks tries again.

    Args:
        load (`Callable[[], Loaded]`): Takes its time.
    """

    def __init__(self, load: Callable[[], Loaded]):
        self.state = "not loaded"
        self.loaded: Loaded | None = None
        self._load = load
        self._lock = threading.Lock()

    def get(self) -> Loaded:
        """The models, loaded by now."""
        with self._lock:
            if self.loaded is None:
                self.state = "loading"
                try:
                    self.loaded = self._load()
                except BaseException:
                    self.state = "failed"
                    raise
                self.state = "ready"
            return self.loaded

    def load_in_background(self) -> threading.Thread:
        """Start loading, so that the first visitor does not wait for all of it. The next run tells of a failure."""

        def load() -> None:
            try:
                self.get()
            except Exception as error:
                print(f"The models could not be loaded: {error}", flush=True)

        thread = threading.Thread(target=load, name="load", daemon=True)
        thread.start()
        return thread


def load_from_environment(environment: Mapping[str, str]) -> Loaded:
    """
    The models that `TARGET`, `DRAFTER`, `POLICY` (folders or Hub ids; `POLICY=none` for none) and `DTYPE` name; without
    them the embedded pair with both of its policies.

    Raises:
        `ValueError`: for names that do not go together.
        `OSError`, `RuntimeError`: for models that cannot be found or fetched.
    """
    target_name, drafter_name, policy_name, dtype_name = (
        environment.get(name, "").strip() or None for name in ("TARGET", "DRAFTER", "POLICY", "DTYPE")
    )
    if target_name and not drafter_name:
        raise ValueError(f"`TARGET={target_name}` needs a drafter that was trained for it. Set `DRAFTER`.")
    if dtype_name not in (None, "auto", *_DTYPES):
        raise ValueError(f"`DTYPE` must be one of auto, {', '.join(_DTYPES)}, got {dtype_name!r}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = _DTYPES.get(dtype_name or "auto", native_dtype(device))
    if target_name:
        target = AutoModelForCausalLM.from_pretrained(target_name, dtype=dtype).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(target_name)
    else:
        target, tokenizer = load_embedded_target(dtype=dtype, device=device)
    is_embedded = not target_name and not drafter_name
    drafter = load_drafter(drafter_name, dtype=dtype) if drafter_name else load_embedded_drafter(dtype=dtype)
    drafter = drafter.to(device)

    policy = None
    if policy_name != "none":
        policy = load_policy(policy_name) if policy_name else policy_of_drafter(drafter)
    predicts_curve = getattr(getattr(policy, "config", None), "head", "") == "curve"
    paper = None if predicts_curve else policy
    if is_embedded and not policy_name:
        paper = load_policy(embedded_drafter_dir().parent / EMBEDDED_PAPER_POLICY_NAME)
    loaded = Loaded(target, tokenizer, BlockPilot(drafter, False), policy if predicts_curve else None, paper)
    loaded.facts = {
        "target": target_name or EMBEDDED_TARGET_NAME,
        "drafter": drafter_name or EMBEDDED_DRAFTER_NAME,
        "policy": Path(policy_name or getattr(drafter.config, "policy", None) or "none").name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "num_threads": torch.get_num_threads(),
    }
    _warm_up(loaded)
    return loaded


def _warm_up(loaded: Loaded) -> None:
    """A short answer of each kind: first passes are slow, and comparisons should not count that."""
    ids = torch.tensor(
        [[loaded.target.config.get_text_config(decoder=True).bos_token_id or 0]], device=loaded.target.device
    )
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    type(loaded.target).generate(loaded.target, ids, **settings)
    loaded.pilot.generate(loaded.target, ids, block_size=loaded.pilot.drafter.config.block_size, **settings)

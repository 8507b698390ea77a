"""Tiny random targets and drafters for all tests, and the two ways of running them that every test compares."""

import os

# Before the first import of a Hugging Face library: tests never reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from blockpilot_hf import BlockPilot, DFlashConfig, DFlashDraftModel
from blockpilot_hf.parity import ScriptedDrafter

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW = 8

_TARGETS: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **kw: Qwen3ForCausalLM(Qwen3Config(**kw)),
    "llama": lambda **kw: LlamaForCausalLM(LlamaConfig(**kw)),
    "mistral": lambda **kw: MistralForCausalLM(MistralConfig(sliding_window=WINDOW, **kw)),  # every layer slides
    "gemma3": lambda **kw: Gemma3ForCausalLM(  # some layers slide; the embedding scales
        Gemma3TextConfig(
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * (kw["num_hidden_layers"] // 2),
            query_pre_attn_scalar=8,
            **kw,
        )
    ),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny matrices are quickest on one thread, and the same sums in the same order make failures repeatable."""
    torch.set_num_threads(1)


def make_target(kind: str = "qwen3", *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random target in float32. Weights are drawn wide, so that no two logits come near a tie."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _TARGETS[kind](**{**SIZES, "initializer_range": 0.2, **overrides}).eval()


def make_drafter(target: Any, *, seed: int = 1, **overrides: Any) -> DFlashDraftModel:
    """A tiny random drafter that fits `target`."""
    text = target.config.get_text_config()
    fields = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "num_target_layers": text.num_hidden_layers,
        "target_layer_ids": [0, text.num_hidden_layers - 2],
        "mask_token_id": text.vocab_size - 1,
        "block_size": 8,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DFlashDraftModel(DFlashConfig(**{**fields, **overrides})).eval()


def make_prompt(length: int = 10, *, seed: int = 0, rows: int = 1) -> torch.LongTensor:
    """Random ids `(rows, length)`, none of them the pad token 0 or the mask token 63."""
    return torch.randint(1, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def plain_generate(target: Any, input_ids: torch.LongTensor, *, seed: int = 0, **kwargs: Any) -> Any:
    """transformers' own decoding: the right value of nearly every test."""
    torch.manual_seed(seed)
    return type(target).generate(target, input_ids, **kwargs)


def pilot_generate(pilot: BlockPilot, target: Any, input_ids: torch.LongTensor, *, seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return pilot.generate(target, input_ids, **kwargs)


def scripted_pilot(target: Any, sequence: torch.LongTensor, accuracy: float = 1.0, block_size: int = 8) -> BlockPilot:
    """A pilot whose drafter proposes the tokens of `sequence` `(1, length)`, each right with probability `accuracy`."""
    drafter = ScriptedDrafter(target, accuracy=accuracy, block_size=block_size)
    drafter.follow(sequence)
    return BlockPilot(drafter)


@pytest.fixture(scope="session")
def target():
    return make_target()


@pytest.fixture(scope="session")
def drafter(target):
    return make_drafter(target)

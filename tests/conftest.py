"""Tiny random targets and drafters for all tests, and the two ways of running them that every test compares."""

import atexit
import json
import os
import shutil
import signal
import tempfile

# Before the first import of a Hugging Face library: tests never reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes side by side: each with a core of its own, also in what it starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Copies of remote code: fresh ones, for this process alone, and nothing of them stays in the user's cache.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="blockpilot-modules-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

# A shell starts background jobs with Ctrl-C ignored, and every process below inherits that: tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_fixtures import hub_client, hub_process, local_hub, shared_hub  # noqa: F401
from safetensors.torch import save_file
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

from blockpilot_hf import (
    BlockPilot,
    BlockPilotConfig,
    BlockPilotPolicy,
    DFlashConfig,
    DFlashDraftModel,
    custom_generate_dir,
)
from blockpilot_hf.embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME
from blockpilot_hf.features import policy_features
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
    """
    A pilot whose drafter proposes the tokens of `sequence` `(1, length)`, each right with probability `accuracy`, in
    blocks of one size: in flight, tiny pairs would seldom draft, since their drafters cost as much as their targets.
    """
    drafter = ScriptedDrafter(target, accuracy=accuracy, block_size=block_size)
    drafter.follow(sequence)
    return BlockPilot(drafter, adapt="prompt")


def zlab_config(drafter: DFlashDraftModel, **overrides: Any) -> dict[str, Any]:
    """The `config.json` of `drafter` as z-lab publishes one: qwen3 with a `dflash_config`. `None` drops a key."""
    config = drafter.config
    kept = ("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "is_causal", "layer_types")
    kept += ("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    kept += (
        "num_target_layers",
        "block_size",
        "rms_norm_eps",
        "sliding_window",
        "vocab_size",
        "final_logit_softcapping",
    )
    fields = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids},
        "rope_parameters": dict(config.rope_parameters),
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "max_window_layers": config.num_hidden_layers,
        **{key: getattr(config, key) for key in kept},
        **overrides,
    }
    return {key: value for key, value in fields.items() if value is not None}


def save_zlab(drafter: DFlashDraftModel, folder: Path, *, num_shards: int = 1, **overrides: Any) -> Path:
    """Write `drafter` the way z-lab publishes one; `overrides` are those of [`zlab_config`]."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(zlab_config(drafter, **overrides)))
    tensors = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::num_shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fit_drafter(target: Any, drafter: DFlashDraftModel, sequence: torch.LongTensor, *, steps: int = 60) -> None:
    """
    Train a tiny drafter on one text `(1, length)`, badly enough to be right sometimes. A random one hardly ever is, and
    two loops that both accept nothing agree about little.
    """
    size, num_anchors = drafter.config.block_size, 12
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        states = target(sequence, output_hidden_states=True).hidden_states
        context = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
        table, head = target.get_input_embeddings().weight, target.get_output_embeddings()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    longest = sequence.shape[1] - size
    for _ in range(steps):
        anchors = torch.randint(1, longest + 1, (num_anchors,), generator=generator)
        # Rows of different context length, padded on the left; row r ends where its anchor stands.
        positions = anchors[:, None] + torch.arange(-longest, size)
        is_real = (positions >= 0).long()
        tokens = sequence[0][positions[:, longest:]]
        noise = torch.cat([tokens[:, :1], torch.full_like(tokens[:, 1:], drafter.config.mask_token_id)], dim=-1)
        states = drafter(
            noise_embeds=table[noise],
            context_hidden_states=context[0][positions[:, :longest].clamp_min(0)],
            position_ids=positions.clamp_min(0),
            attention_mask=is_real,
        ).last_hidden_state[:, 1:]
        loss = torch.nn.functional.cross_entropy(head(states).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.zero_grad()


@pytest.fixture(scope="session")
def target():
    return make_target()


@pytest.fixture(scope="session")
def drafter(target):
    return make_drafter(target)


def constant_policy(block_size: int) -> BlockPilotPolicy:
    """A policy with one candidate."""
    return BlockPilotPolicy(BlockPilotConfig(block_sizes=[block_size], hidden_size=1)).eval()


def sorting_policy(
    target: Any, small: torch.LongTensor, large: torch.LongTensor, *, features: str = "compact"
) -> BlockPilotPolicy:
    """A policy by hand that answers 4 for the prompt `small` and 8 for `large`: a threshold on one feature."""
    with torch.no_grad():
        values = [policy_features(target(ids).logits[:, -1], kind=features)[0] for ids in (small, large)]
    index = int((values[0] - values[1]).abs().argmax())
    middle, sign = (values[0] + values[1])[index] / 2, (values[0] - values[1])[index].sign()
    policy = BlockPilotPolicy(
        BlockPilotConfig(
            block_sizes=[4, 8], hidden_size=2, features=features, vocab_size=target.get_output_embeddings().out_features
        )
    ).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        for unit, direction in enumerate((sign, -sign)):
            policy.layers[0].weight[unit, index], policy.layers[0].bias[unit] = direction, -direction * middle
        policy.fc_out.weight.copy_(torch.eye(2))
    return policy


def save_embedded_pair(hub_cards: Path, *, block_size: int = 3) -> tuple[Path, Path]:
    """A tiny drafter in bfloat16 and its policies, in the folders and under the names of the embedded ones."""
    folders = hub_cards / EMBEDDED_DRAFTER_NAME, hub_cards / EMBEDDED_POLICY_NAME
    drafter = make_drafter(make_target(), policy=f"../{EMBEDDED_POLICY_NAME}")
    drafter.to(torch.bfloat16).save_pretrained(folders[0])
    for folder in (folders[1], hub_cards / EMBEDDED_PAPER_POLICY_NAME):
        constant_policy(block_size).save_pretrained(folder)
    return folders


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """The folder to pass as `custom_generate=`, outside the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        return custom_generate_dir()


def both_generate(
    target: Any,
    input_ids: torch.LongTensor,
    *,
    pilot: BlockPilot | None = None,
    accuracy: float = 0.5,
    block_size: int = 8,
    script: torch.LongTensor | None = None,
    fresh: Callable[[], dict[str, Any]] = dict,
    ours: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """
    The same call plain and with a pilot. By default the drafter follows plain's own answer, or `script`, which is
    without padding. `fresh` builds arguments that keep a state, one set per call; `ours` is for the second call only.
    """
    plain = plain_generate(target, input_ids, **fresh(), **kwargs)
    if pilot is None:
        followed = plain if isinstance(plain, torch.Tensor) else plain.sequences
        if script is None and kwargs.get("attention_mask") is not None:
            answer = followed[0, input_ids.shape[1] :]
            followed = torch.cat([input_ids[0][kwargs["attention_mask"][0].bool()], answer])[None]
        pilot = scripted_pilot(target, followed[:1] if script is None else script, accuracy, block_size)
    return plain, pilot_generate(pilot, target, input_ids, **fresh(), **kwargs, **(ours or {}))

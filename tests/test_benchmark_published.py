"""The whole benchmark on a pair as published: Qwen3-4B and its DFlash drafter, all but the sizes as they are there."""

import json

import pytest
import torch
from conftest import make_drafter, save_zlab
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockpilot_hf.benchmark_reading import read_record

pytest_plugins = ["cli_models"]

# https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json, layers and positions as they are.
PUBLISHED = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}
SHRUNK = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
TAPS = [1, 9, 17, 25, 33]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of the target and of its drafter, whose `config.json` are in the published forms."""
    from cli_models import byte_tokenizer  # a plugin: imported by pytest first

    root = tmp_path_factory.mktemp("published")
    tokenizer = byte_tokenizer()
    ids = {"bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer) + 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = Qwen3ForCausalLM(Qwen3Config(**{**PUBLISHED, **SHRUNK, **ids})).eval()
    target.save_pretrained(root / "Qwen3-4B")
    tokenizer.save_pretrained(root / "Qwen3-4B")
    (root / "Qwen3-4B" / "config.json").write_text(json.dumps({**PUBLISHED, **SHRUNK, **ids}))
    drafter = make_drafter(target, num_hidden_layers=5, target_layer_ids=TAPS, block_size=16, **SHRUNK)
    save_zlab(drafter, root / "Qwen3-4B-DFlash-b16")
    return root


def test_the_drafters_checkpoint_is_in_the_published_form(pair):
    folder = pair / "Qwen3-4B-DFlash-b16"
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["dflash_config"]["target_layer_ids"] == TAPS
    assert config["block_size"] == 16 and config["num_target_layers"] == 36 and "auto_map" in config
    tensors = load_file(folder / "model.safetensors")
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.4.self_attn.q_norm.weight"} <= set(tensors)
    assert tensors["fc.weight"].shape == (32, 5 * 32) and "lm_head.weight" not in tensors


def test_the_whole_benchmark_runs(pair, run, tmp_path):
    status, out, err = run(
        "benchmark",
        *("--target", pair / "Qwen3-4B", "--drafter", pair / "Qwen3-4B-DFlash-b16", "--dtype", "float32"),
        *("--limit", 2, "--temperatures", "0,1", "--max-new-tokens", 20, "--bootstrap", 50),
        *("--output", tmp_path / "out"),
        target=False,
    )
    assert status == 0, out + err
    record = read_record(tmp_path / "out" / "benchmark.json")
    assert record["meta_info"]["drafter"]["training_block_size"] == 16
    by_name = record["methods"]
    assert not by_name["size 16"]["reason"] and not by_name["stock_dflash"]["reason"]
    expected = {name for name, method in by_name.items() if not method["reason"]}
    assert {"plain", "stock_dflash", "prompt_lookup", "size 4", "size 16", "flight_drafts", "flight"} <= expected
    lines = record["per_prompt"]
    assert len(lines) == 4 and {line["set"] for line in lines} == {"embedded"}
    for line in lines:
        calls = line["calls"]
        exact = [name for name in calls if name.startswith("size") or name in ("flight", "flight_drafts")]
        assert all(calls[name]["text_hash"] == calls["plain"]["text_hash"] for name in exact)
        assert (line["temperature"] > 0) == ("flight_drawn" in calls)
    assert {file.name for file in (tmp_path / "out").glob("*.png")} == {
        "speed_by_context.png", "speed_by_group.png", "speed_by_tau.png", "time_per_token.png"
    }  # fmt: skip
    assert "in flight" in out and "paper's rule" in out  # the latter as not run, with the reason
    assert run("report", tmp_path / "out" / "benchmark.json", "--format", "latex", target=False)[0] == 0

"""Drafter configs and checkpoints as people have them: what is read, what is refused, what survives saving."""

import json
import logging
import math
import os

import pytest
import torch
from conftest import make_drafter, make_prompt, save_zlab
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from blockpilot_hf import BlockPilot, DFlashConfig, DFlashDraftModel
from blockpilot_hf.configuration_dflash import default_target_layer_ids
from blockpilot_hf.loading import load_drafter

HEAD_DIM = 8
BASE_EXPONENTS = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM


def frequencies(theta: float) -> torch.Tensor:
    """Rotary frequencies by the formula (arXiv 2104.09864, section 3.2.2): theta^(-2i/d)."""
    return (theta**-BASE_EXPONENTS).float()


def yarn_frequencies(theta: float, factor: float, original: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2) with alpha 1 and beta 32: slow dimensions interpolate, quick ones stay."""
    scaled = []
    low, high = (HEAD_DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), HEAD_DIM - 1)
    for i, plain in enumerate(frequencies(theta).tolist()):
        share = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)  # of interpolation
        scaled.append(plain / factor * share + plain * (1 - share))
    return torch.tensor(scaled)


def load_with(drafter, tmp_path, **overrides) -> DFlashDraftModel:
    return load_drafter(str(save_zlab(drafter, tmp_path / "drafter", **overrides)))


# Rotary settings


@pytest.mark.parametrize(
    ("settings", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": None, "rope_theta": 2e4}, 2e4),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e4}, 2e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 2e4}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 5e5}, 5e5),
    ],
    ids=["nested", "nested without type", "flat", "type nested, theta flat", "nested wins over flat", "both agree"],
)
def test_rope_theta_is_read_from_where_it_is_and_survives_saving(drafter, tmp_path, settings, theta):
    loaded = load_with(drafter, tmp_path, **settings)
    torch.testing.assert_close(loaded.rotary_emb.inv_freq, frequencies(theta), rtol=1e-6, atol=0)
    loaded.save_pretrained(tmp_path / "own")
    again = DFlashDraftModel.from_pretrained(tmp_path / "own")
    assert again.config.rope_parameters["rope_theta"] == theta
    assert torch.equal(again.rotary_emb.inv_freq, loaded.rotary_emb.inv_freq)


def test_rope_scaling_null_of_old_files_means_no_scaling(drafter, tmp_path):
    folder = save_zlab(drafter, tmp_path / "old", rope_parameters=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1e6, "rope_scaling": None}))
    loaded = load_drafter(str(folder))
    assert loaded.config.rope_parameters == {"rope_theta": 1e6, "rope_type": "default"}
    torch.testing.assert_close(loaded.rotary_emb.inv_freq, frequencies(1e6), rtol=1e-6, atol=0)


def test_missing_rope_theta_is_an_error_and_giving_it_is_enough(drafter, tmp_path):
    with pytest.raises(ValueError, match="lacks `rope_theta`"):
        load_with(drafter, tmp_path, rope_parameters=None)
    with pytest.raises(ValueError, match="lacks `rope_theta`"):
        load_with(drafter, tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0})
    load_with(drafter, tmp_path, rope_parameters=None, rope_theta=1e6)


def test_own_form_without_rope_theta_is_an_error(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="lacks `rope_theta`"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("style", ["rope_scaling", "rope_scaling with type", "rope_parameters"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_followed_in_old_and_new_style(drafter, tmp_path, kind, style):
    rope = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 256
    if style == "rope_parameters":
        settings = {"rope_parameters": {**rope, "rope_theta": 1e4}}
    else:
        if style == "rope_scaling with type":
            rope["type"] = rope.pop("rope_type")
        settings = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": rope}
    loaded = load_with(drafter, tmp_path, **settings)
    expected = frequencies(1e4) / 4 if kind == "linear" else yarn_frequencies(1e4, 4.0, 256)
    torch.testing.assert_close(loaded.rotary_emb.inv_freq, expected, rtol=1e-5, atol=0)
    scale = 1.0 if kind == "linear" else 0.1 * math.log(4.0) + 1.0
    assert loaded.rotary_emb.attention_scaling == pytest.approx(scale)
    loaded.save_pretrained(tmp_path / "own")
    again = DFlashDraftModel.from_pretrained(tmp_path / "own")
    assert torch.equal(again.rotary_emb.inv_freq, loaded.rotary_emb.inv_freq)
    assert again.rotary_emb.attention_scaling == loaded.rotary_emb.attention_scaling


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "spiral", "factor": 2.0}},
    ],
    ids=["new", "old"],
)
def test_unknown_rope_type_is_an_error_that_names_it(drafter, tmp_path, settings):
    with pytest.raises(ValueError, match=r"rope_type.*'spiral'"):
        load_with(drafter, tmp_path, **settings)


def test_rope_settings_per_layer_type_are_refused(drafter, tmp_path):
    one = {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="per layer type"):
        load_with(drafter, tmp_path, rope_parameters={"full_attention": one, "sliding_attention": one})


# Layer kinds


@pytest.mark.parametrize(
    ("settings", "layer_types", "window"),
    [
        ({"layer_types": None}, ["full_attention"] * 2, None),
        ({"layer_types": None, "sliding_window": 4}, ["full_attention"] * 2, None),  # `use_sliding_window` is false
        (
            {"layer_types": None, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
            ["full_attention", "sliding_attention"],
            4,
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True},
            ["sliding_attention", "full_attention"],
            6,
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": None},
            ["sliding_attention", "full_attention"],
            6,
        ),
    ],
    ids=["nothing given", "window unused", "max_window_layers", "layer_types", "layer_types alone"],
)
def test_sliding_layers_are_read_from_what_the_file_says(drafter, tmp_path, settings, layer_types, window):
    config = load_with(drafter, tmp_path, **settings).config
    assert config.layer_types == layer_types
    assert config.sliding_window == window


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layer_types": None, "sliding_window": 4, "use_sliding_window": None},
            "Which layers slide cannot be guessed",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": False},
            "Make the two agree",
        ),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, "`sliding_window` must be a positive"),
        ({"layer_types": ["full_attention"]}, "must name 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_layer_kinds_that_would_have_to_be_guessed_are_errors(drafter, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        load_with(drafter, tmp_path, **settings)


@pytest.mark.parametrize(
    ("is_causal", "expected"), [(None, [True, False]), (True, [True, True]), (False, [False, False])]
)
def test_is_causal_overrides_what_the_layer_kind_says(drafter, tmp_path, is_causal, expected):
    settings = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
    loaded = load_with(drafter, tmp_path, is_causal=is_causal, **settings)
    assert [layer.self_attn.is_causal for layer in loaded.layers] == expected
    loaded.save_pretrained(tmp_path / "own")
    again = DFlashDraftModel.from_pretrained(tmp_path / "own")
    assert [layer.self_attn.is_causal for layer in again.layers] == expected


# The drafter's own keys


def section(drafter, **more):
    return {"mask_token_id": 63, "target_layer_ids": drafter.config.target_layer_ids, **more}


def test_block_size_of_the_section_wins_over_the_top_level(drafter, tmp_path):
    assert load_with(drafter, tmp_path, block_size=8).config.block_size == 8
    assert (
        load_with(drafter, tmp_path, block_size=8, dflash_config=section(drafter, block_size=5)).config.block_size == 5
    )
    nested_only = load_with(drafter, tmp_path, block_size=None, dflash_config=section(drafter, block_size=5))
    assert nested_only.config.block_size == 5


def test_keys_that_change_the_output_are_read_from_both_places(drafter, tmp_path):
    values = {"input_embedding_scale": 2.5, "output_multiplier": 0.25, "final_logit_softcapping": 30.0}
    for placed in (values, {"dflash_config": section(drafter, **values)}):
        config = load_with(drafter, tmp_path, **placed).config
        assert {key: getattr(config, key) for key in values} == values


def test_a_soft_cap_of_zero_or_less_means_none(drafter, tmp_path):
    for cap in (0, 0.0, -1):
        assert load_with(drafter, tmp_path, final_logit_softcapping=cap).config.final_logit_softcapping is None


def test_attention_bias_tensors_are_loaded(target, tmp_path):
    biased = make_drafter(target, attention_bias=True)
    with torch.no_grad():
        for name, parameter in biased.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    loaded = load_with(biased, tmp_path)
    names = [name for name, _ in loaded.named_parameters() if name.endswith("bias")]
    assert len(names) == 2 * 4
    assert all(torch.equal(loaded.get_parameter(name), biased.get_parameter(name)) for name in names)


def test_target_layers_not_given_follow_the_papers_rule(drafter, tmp_path):
    assert default_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(4, 1) == [2]
    loaded = load_with(drafter, tmp_path, dflash_config={"mask_token_id": 63}, num_target_layers=4)
    assert loaded.config.target_layer_ids == [1, 1]


@pytest.mark.parametrize("key", ["head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_size"])
def test_a_missing_size_is_an_error_that_names_it(drafter, tmp_path, key):
    with pytest.raises(ValueError, match=rf"lacks \['{key}'\]"):
        load_with(drafter, tmp_path, **{key: None})
    load_with(drafter, tmp_path)


@pytest.mark.parametrize("key", ["mask_token_id", "block_size", "num_target_layers"])
def test_a_missing_drafting_value_is_an_error_that_names_it(drafter, tmp_path, key):
    kept = {k: v for k, v in section(drafter).items() if k != key}
    with pytest.raises(ValueError, match=rf"`dflash_config\.{key}`"):
        load_with(
            drafter,
            tmp_path,
            **{"block_size": 8, "dflash_config": kept, **({key: None} if key != "mask_token_id" else {})},
        )


def test_own_form_without_sizes_is_an_error_rather_than_the_defaults(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("head_dim", "mask_token_id", "target_layer_ids"):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != key}))
        with pytest.raises(ValueError, match=key):
            DFlashDraftModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 1}, "`block_size` of a drafter must be an integer >= 2.*got 1"),
        ({"block_size": True}, "`block_size` of a drafter.*got True"),
        ({"mask_token_id": 64, "vocab_size": 64}, "`mask_token_id`.*0 to 63, got 64"),
        ({"mask_token_id": -1}, "`mask_token_id`.*got -1"),
        ({"target_layer_ids": [0, 36]}, r"`target_layer_ids`.*0 to 35, got \[0, 36\]"),
        ({"target_layer_ids": []}, r"`target_layer_ids`.*got \[\]"),
        ({"layer_types": ["sliding_attention"] * 5}, "`sliding_window` must be a positive integer.*got None"),
    ],
)
def test_values_that_cannot_work_are_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**fields)


def test_the_nearest_good_values_pass():
    DFlashConfig(block_size=2)
    DFlashConfig(mask_token_id=63, vocab_size=64)
    DFlashConfig(target_layer_ids=[0, 35])
    DFlashConfig(layer_types=["sliding_attention"] * 5, sliding_window=1)


def test_defaults_print_and_come_back_from_json():
    config = DFlashConfig()
    assert "block_size" in repr(config)
    again = DFlashConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert again.to_dict() == config.to_dict()


# What is not supported says so


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 2], "tree_width": 4}}, "tree_width"),
        (
            {"dflash_config": {"mask_token_id": 63, "selector_rank": 4, "conv_kernel_size": 3}},
            "DFlash 2.*selector_rank",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2.*DFlash2DraftModel"),
        ({"speculators_config": {"algorithm": "dflash"}}, "speculators format.*speculators_config"),
        ({"speculators_version": "0.3", "dflash_config": None}, "speculators format.*speculators_version"),
        ({"draft_vocab_size": 32}, "`draft_vocab_size` 32"),
    ],
)
def test_unsupported_formats_are_errors_that_name_what_was_found(drafter, tmp_path, overrides, found):
    with pytest.raises(ValueError, match=found):
        load_with(drafter, tmp_path, **overrides)


def test_a_draft_vocabulary_equal_to_the_targets_is_no_other_vocabulary(drafter, tmp_path):
    assert load_with(drafter, tmp_path, draft_vocab_size=64).config.vocab_size == 64


def test_an_ordinary_model_is_not_taken_for_a_drafter(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not a DFlash drafter: model_type 'qwen3'"):
        DFlashDraftModel.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="target_layer_ids"):
        load_drafter(str(tmp_path))


# Weights


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_published_folder_loads_bit_equal(drafter, tmp_path, num_shards):
    loaded = load_drafter(str(save_zlab(drafter, tmp_path, num_shards=num_shards)))
    state = drafter.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert not loaded.training


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"missing: fc\.weight"),
        (lambda t: t.pop("layers.1.self_attn.q_norm.weight"), r"missing: layers\.1\.self_attn\.q_norm\.weight"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(64, 32)}), r"not expected: lm_head\.weight"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(64, 32)}), r"not expected: embed_tokens\.weight"),
        (lambda t: t.update({"norm.weight": torch.zeros(16)}), r"norm\.weight \(16,\) instead of \(32,\)"),
    ],
    ids=["no fc", "no q_norm", "a head", "an embedding", "another shape"],
)
def test_tensors_that_do_not_fit_are_refused(drafter, tmp_path, damage, message):
    folder = save_zlab(drafter, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_drafter(str(folder))


def draft(model: DFlashDraftModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 8, 32, generator=generator).to(model.dtype)
    context = torch.randn(1, 5, 64, generator=generator).to(model.dtype)
    with torch.no_grad():
        return model(noise_embeds=noise, context_hidden_states=context).last_hidden_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["class", "AutoModel", "device_map", "remote code"])
def test_own_form_comes_back_bit_equal_buffers_and_outputs_included(target, tmp_path, dtype, how):
    original = make_drafter(target, rope_parameters={"rope_type": "default", "rope_theta": 123456.0}).to(dtype)
    original.save_pretrained(tmp_path)
    if how == "AutoModel":
        again = AutoModel.from_pretrained(tmp_path, dtype=dtype)
        assert type(again) is DFlashDraftModel
    elif how == "remote code":
        # The class may be this package's or the copy's; what it computes must be the same.
        again = AutoModel.from_pretrained(tmp_path, dtype=dtype, trust_remote_code=True)
    else:
        again = DFlashDraftModel.from_pretrained(
            tmp_path, dtype=dtype, **({"device_map": "cpu"} if how == "device_map" else {})
        )
    for kind in ("named_parameters", "named_buffers"):
        expected, found = dict(getattr(original, kind)()), dict(getattr(again, kind)())
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == found[name].dtype, name
            assert torch.equal(tensor, found[name]), name
    assert torch.equal(draft(original), draft(again.eval()))


def test_auto_config_knows_the_type(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is DFlashConfig
    assert config.block_size == drafter.config.block_size


def test_a_drafter_that_generated_saves_no_weights_of_its_target(target, tmp_path):
    used = make_drafter(target)
    before = set(used.state_dict())
    BlockPilot(used).generate(target, make_prompt(), max_new_tokens=8, do_sample=False)
    used.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == before
    assert sum(t.numel() for t in saved.values()) == sum(p.numel() for p in used.parameters())
    assert "dflash_config" not in json.loads((tmp_path / "config.json").read_text())


# Names and paths


@pytest.mark.parametrize("form", ["published", "own"])
def test_dots_in_names_trailing_slashes_and_the_current_folder_load(drafter, tmp_path, monkeypatch, form):
    folder = tmp_path / "drafter-v0.1.b16"
    save_zlab(drafter, folder) if form == "published" else drafter.save_pretrained(folder)
    monkeypatch.chdir(folder)
    for name in (str(folder), f"{folder}{os.sep}", ".", f"..{os.sep}{folder.name}"):
        assert torch.equal(load_drafter(name).fc.weight, drafter.fc.weight)
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    assert torch.equal(load_drafter("..").fc.weight, drafter.fc.weight)


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": True}])
def test_remote_code_of_a_published_folder_is_never_run(drafter, tmp_path, trust):
    folder, marker = save_zlab(drafter, tmp_path / "drafter"), tmp_path / "ran"
    poison = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nraise SystemExit('remote code ran')\n"
    for name in ("dflash.py", "modeling_dflash.py", "configuration_dflash.py"):
        (folder / name).write_text(poison)
    pilot = BlockPilot.from_pretrained(str(folder), **trust)
    assert torch.equal(pilot.drafter.fc.weight, drafter.fc.weight)
    assert torch.equal(DFlashDraftModel.from_pretrained(folder, **trust).fc.weight, drafter.fc.weight)
    assert not marker.exists()


def test_a_published_folder_loads_without_a_warning(drafter, tmp_path):
    """transformers would warn of a model of type 'qwen3' instantiated as another type, and every user would ask."""
    folder, said = save_zlab(drafter, tmp_path), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        DFlashDraftModel.from_pretrained(folder)
        DFlashConfig.from_pretrained(folder)
    finally:
        logger.removeHandler(handler)
    assert said == []


def test_saving_a_published_drafter_gives_our_own_form(drafter, tmp_path):
    loaded = load_drafter(str(save_zlab(drafter, tmp_path / "published")))
    loaded.save_pretrained(tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["model_type"] == "blockpilot_dflash"
    assert config["mask_token_id"] == 63
    assert torch.equal(draft(DFlashDraftModel.from_pretrained(tmp_path / "own")), draft(drafter))

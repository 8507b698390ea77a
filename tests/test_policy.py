"""The policy: configuration, features, head, and everything that saving and loading it must keep."""

import json
import math
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from blockpilot_hf.configuration_blockpilot import BlockPilotConfig
from blockpilot_hf.configuration_dflash import DFlashConfig
from blockpilot_hf.costs import CostTable
from blockpilot_hf.features import (
    LOG_PROB_FLOOR,
    MAX_CONTEXT,
    MAX_TEMPERATURE,
    NUM_COMPACT_FEATURES,
    policy_features,
    projected_context,
)
from blockpilot_hf.modeling_blockpilot import BlockPilotPolicy, choose_by_seconds
from blockpilot_hf.modeling_dflash import DFlashDraftModel

VOCAB_SIZE = 100
CONTEXT_SIZE = 8
# A step costs the same at every size but for a little drafting, or as much as its width.
FLAT = CostTable(
    context_lengths=(64,), verify_s={1: (1.0,), 8: (1.0,)}, draft_s={2: (0.05,), 8: (0.05,)}, source="made up"
)
STEEP = CostTable(context_lengths=(64,), verify_s={1: (1.0,), 8: (5.0,)}, draft_s={2: (0.3,), 8: (1.0,)})


@pytest.fixture(autouse=True, scope="module")
def auto_classes():
    """What importing the package does, so that this file also runs on the three policy modules alone."""
    BlockPilotConfig.register_for_auto_class()
    BlockPilotPolicy.register_for_auto_class("AutoModel")
    AutoConfig.register(BlockPilotConfig.model_type, BlockPilotConfig, exist_ok=True)
    AutoModel.register(BlockPilotConfig, BlockPilotPolicy, exist_ok=True)


def make_policy(seed: int = 0, **settings) -> BlockPilotPolicy:
    torch.manual_seed(seed)
    return BlockPilotPolicy(BlockPilotConfig(**{"block_sizes": [1, 4, 8], "hidden_size": 16, **settings})).eval()


def make_logits(rows: int = 1, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


def make_biased(*scores: float, **settings) -> BlockPilotPolicy:
    """A head that gives these scores to every prompt."""
    policy = make_policy(block_sizes=[4, 8, 16][: len(scores)], **settings)
    with torch.no_grad():
        policy.fc_out.weight.zero_()
        policy.fc_out.bias.copy_(torch.tensor(scores))
    return policy


def make_curve(seed: int = 0, **settings) -> BlockPilotPolicy:
    return make_policy(seed, head="curve", features="compact+context", context_size=CONTEXT_SIZE, **settings)


def make_fixed_curve(*taus: float, **settings) -> BlockPilotPolicy:
    """A head that predicts these acceptance lengths at sizes 2, 4 and 8 for every prompt."""
    policy = make_curve(block_sizes=[1, 2, 4, 8], **settings)
    with torch.no_grad():
        policy.fc_out.weight.zero_()
        policy.fc_out.bias.copy_(((torch.tensor(taus) - 1) / torch.tensor([1.0, 3.0, 7.0])).logit())
    return policy


def make_context(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, CONTEXT_SIZE, generator=torch.Generator().manual_seed(seed))


# Configuration


@pytest.mark.parametrize(
    ("bad", "message", "good"),
    [
        ({"block_sizes": []}, "non-empty list of integers", {"block_sizes": [16]}),
        ({"block_sizes": 16}, "non-empty list of integers", {"block_sizes": (16,)}),
        ({"block_sizes": None}, "non-empty list of integers", {}),
        ({"block_sizes": [0, 4]}, "integers >= 1", {"block_sizes": [1, 4]}),
        ({"block_sizes": [True, 4]}, "integers >= 1", {"block_sizes": [1, 4]}),
        ({"block_sizes": [4.0, 8]}, "integers >= 1", {"block_sizes": [4, 8]}),
        ({"block_sizes": [8, 4]}, "strictly increasing", {"block_sizes": [4, 8]}),
        ({"block_sizes": [4, 4]}, "strictly increasing", {"block_sizes": [4, 5]}),
        ({"head": "rank"}, r"`head` must be one of \['choice', 'curve'\], got 'rank'", {"head": "choice"}),
        (
            {"head": "curve", "block_sizes": [2, 4]},
            r"must be 1, plain decoding, and larger ones for `head=\"curve\"`, got \[2, 4\]",
            {"head": "curve", "block_sizes": [1, 4]},
        ),
        ({"head": "curve", "block_sizes": [1]}, "larger ones", {"head": "choice", "block_sizes": [1]}),
        (
            {"features": "compact+context"},
            "`context_size` must be set",
            {"features": "compact+context", "context_size": 3},
        ),
        ({"context_size": 0}, "`context_size` must be an integer >= 1", {"context_size": 1}),
        ({"features": "hidden"}, "`features` must be one of", {"features": "compact"}),
        ({"features": "logits"}, "`vocab_size` must be set", {"features": "logits", "vocab_size": 7}),
        ({"vocab_size": 0}, "`vocab_size` must be an integer >= 1", {"vocab_size": 1}),
        (
            {"feature_version": 2},
            "`feature_version` 2 is unknown, .* version 1",
            {"feature_version": 1},
        ),
        ({"feature_version": True}, "is unknown", {"feature_version": 1}),
        ({"hidden_size": 0}, "`hidden_size` must be an integer >= 1", {"hidden_size": 1}),
        ({"dropout": 1.0}, "`dropout` must be a number", {"dropout": 0.99}),
        ({"dropout": -0.1}, "`dropout` must be a number", {"dropout": 0}),
        ({"sampling": {"min_p": 0.1}}, "keys from", {"sampling": {"top_p": 0.1}}),
        ({"sampling": 1.0}, "must be a dict", {"sampling": {}}),
        ({"sampling": {"temperature": -1.0}}, "`temperature` must be", {"sampling": {"temperature": 0.0}}),
        ({"sampling": {"temperature": math.nan}}, "`temperature` must be", {"sampling": {"temperature": None}}),
        ({"sampling": {"top_k": 2.5}}, "`top_k` must be", {"sampling": {"top_k": 2}}),
        ({"sampling": {"top_p": 1.5}}, "`top_p` must be", {"sampling": {"top_p": 1.0}}),
        ({"target_revision": 3}, "`target_revision` must be a string", {"target_revision": "3"}),
        ({"blockpilot_version": 0.1}, "`blockpilot_version` must be a string", {"blockpilot_version": "0.1"}),
    ],
)
def test_config_refuses_a_bad_value_and_takes_the_nearest_good_one(bad, message, good):
    with pytest.raises(ValueError, match=message):
        BlockPilotConfig(**bad)
    BlockPilotConfig(**good)


def test_config_has_defaults_for_everything_and_passes_the_rest_on():
    config = BlockPilotConfig(my_note="kept", num_labels=7)
    assert config.my_note == "kept"
    assert config.num_labels == 7
    assert config.block_sizes == [14, 15, 16, 17, 18]
    assert "blockpilot_policy" in repr(config)
    default = json.loads(BlockPilotConfig().to_json_string())
    assert default["block_sizes"] == [14, 15, 16, 17, 18]
    assert default["feature_version"] == 1
    assert "id2label" not in default


def test_config_lists_are_not_shared():
    sizes = [2, 4]
    config, other = BlockPilotConfig(block_sizes=sizes), BlockPilotConfig()
    config.block_sizes.append(8)
    other.block_sizes.append(99)
    assert sizes == [2, 4]
    assert BlockPilotConfig().block_sizes == [14, 15, 16, 17, 18]


def test_config_keeps_every_field_when_saved(tmp_path):
    fields = {
        "block_sizes": [1, 4],
        "features": "logits",
        "vocab_size": 11,
        "hidden_size": 3,
        "dropout": 0.0,
        "sampling": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        "target_name_or_path": "org/target",
        "target_revision": "main",
        "target_fingerprint": "aa",
        "drafter_name_or_path": "org/drafter",
        "drafter_revision": "v1",
        "drafter_fingerprint": "bb",
        "blockpilot_version": "0.1.0",
    }
    BlockPilotConfig(**fields).save_pretrained(tmp_path)
    for loaded in (BlockPilotConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is BlockPilotConfig
        assert {name: getattr(loaded, name) for name in fields} == fields
        assert loaded.num_features == 11


def test_width_of_the_head_is_by_default_its_kinds_and_is_kept(tmp_path):
    assert BlockPilotConfig().hidden_size == 2048
    assert BlockPilotConfig(head="curve", block_sizes=[1, 4]).hidden_size < 512
    BlockPilotConfig(head="curve", block_sizes=[1, 4], hidden_size=2048).save_pretrained(tmp_path)
    assert BlockPilotConfig.from_pretrained(tmp_path).hidden_size == 2048


def test_a_config_of_before_there_were_curves_loads_as_it_was(tmp_path):
    BlockPilotConfig(block_sizes=[2, 4], hidden_size=5).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["context_size"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = BlockPilotConfig.from_pretrained(tmp_path)
    assert (config.head, config.features, config.hidden_size) == ("choice", "compact", 5)
    assert config.num_features == NUM_COMPACT_FEATURES


def test_config_changed_after_creation_is_checked_on_saving_and_in_the_model(tmp_path):
    make_policy().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="strictly increasing"):
        BlockPilotPolicy.from_pretrained(tmp_path, block_sizes=[8, 4, 1])
    assert BlockPilotPolicy.from_pretrained(tmp_path, block_sizes=[2, 4, 8]).config.block_sizes == [2, 4, 8]
    config = BlockPilotConfig()
    config.block_sizes = [3, 2]
    with pytest.raises(ValueError, match="strictly increasing"):
        config.save_pretrained(tmp_path / "changed")


def test_model_type_is_no_native_one_and_registering_twice_is_fine():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert BlockPilotConfig.model_type not in CONFIG_MAPPING_NAMES
    for _ in range(2):
        AutoConfig.register(BlockPilotConfig.model_type, BlockPilotConfig, exist_ok=True)
        AutoModel.register(BlockPilotConfig, BlockPilotPolicy, exist_ok=True)
    assert type(AutoModel.from_config(BlockPilotConfig(hidden_size=2))) is BlockPilotPolicy


# Features


def compact_by_hand(row: list[float], settings: list[float]) -> list[float]:
    """The same features in Python floats, straight from their definition."""
    finite = [value for value in row if not math.isnan(value) and value > -math.inf]
    total = math.fsum(math.exp(value - max(finite)) for value in finite)
    log_probs = sorted((value - max(finite) - math.log(total) for value in finite), reverse=True)
    entropy = -math.fsum(math.exp(value) * value for value in log_probs)
    top = [max(value, LOG_PROB_FLOOR) for value in log_probs[:64]]
    top += [LOG_PROB_FLOOR] * (64 - len(top))
    return [*top, entropy, top[0] - top[1], *settings]


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1000])
def test_compact_features_equal_an_independent_computation(vocab_size):
    logits = make_logits(rows=3, vocab_size=vocab_size)
    logits[1] *= 10
    features = policy_features(logits, kind="compact", temperature=0.7, top_k=16, top_p=0.9)
    assert features.shape == (3, NUM_COMPACT_FEATURES) and features.dtype == torch.float32
    top_k = 64 / 80 if vocab_size > 16 else 0.0
    expected = [compact_by_hand(row, [0.7, top_k, 0.9]) for row in logits.double().tolist()]
    torch.testing.assert_close(features, torch.tensor(expected), atol=2e-5, rtol=2e-6)


def test_logits_features_are_the_logits():
    logits = make_logits(rows=2)
    assert torch.equal(policy_features(logits, kind="logits", temperature=1.0), logits)
    assert torch.equal(policy_features(logits.bfloat16(), kind="logits"), logits.bfloat16().float())


def test_tokens_that_cannot_occur_leave_the_features_finite():
    logits = make_logits()
    nan, inf = math.nan, math.inf
    padded = torch.cat([logits, torch.tensor([[-inf, nan]])], dim=-1)
    torch.testing.assert_close(policy_features(padded, kind="compact"), policy_features(logits, kind="compact"))
    expected = torch.cat([logits, logits.min().expand(1, 2)], dim=-1)
    assert torch.equal(policy_features(padded, kind="logits"), expected)
    assert policy_features(torch.tensor([[1.0, inf, 3.0]]), kind="logits").tolist() == [[1.0, 3.0, 3.0]]
    for row in (
        [-inf] * 3,
        [nan] * 3,
        [inf] * 3,
        [inf, 0.0, -inf],
        [nan, inf, 1.0],
        [3e38, -3e38, 0.0],
        [nan, 2.0, nan],
    ):
        for kind in ("compact", "logits"):
            assert policy_features(torch.tensor([row]), kind=kind).isfinite().all(), (row, kind)


@pytest.mark.parametrize("kind", ["compact", "logits"])
def test_features_of_a_row_depend_on_that_row_alone_and_the_input_stays(kind):
    logits = make_logits(rows=5)
    logits[2, 3] = -math.inf
    before = logits.clone()
    together = policy_features(logits, kind=kind)
    for row in range(5):
        assert torch.equal(together[row : row + 1], policy_features(logits[row : row + 1], kind=kind))
    assert torch.equal(logits, before)


def test_features_never_share_memory_with_the_input():
    logits = make_logits()
    before = logits.clone()
    policy_features(logits, kind="logits").fill_(7.0)
    assert torch.equal(logits, before)


def test_features_of_any_floating_dtype():
    logits = make_logits()
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        cast = logits.to(dtype)
        for kind in ("compact", "logits"):
            assert torch.equal(policy_features(cast, kind=kind), policy_features(cast.float(), kind=kind))


def settings_of(**settings) -> list[float]:
    return policy_features(make_logits(), kind="compact", **settings)[0, -3:].tolist()


def test_sampling_settings_that_change_nothing_look_unused():
    assert settings_of() == settings_of(temperature=0.0, top_k=5, top_p=0.5) == [0.0, 0.0, 1.0]
    unused = settings_of(temperature=1.0)
    assert unused == [1.0, 0.0, 1.0]
    assert unused == settings_of(temperature=1, top_k=0, top_p=1)
    assert unused == settings_of(temperature=1.0, top_k=VOCAB_SIZE) == settings_of(temperature=1.0, top_k=10**6)
    assert settings_of(temperature=1.0, top_k=VOCAB_SIZE - 1) != unused
    tighter, looser = settings_of(temperature=1.0, top_k=10)[1], settings_of(temperature=1.0, top_k=50)[1]
    assert 1 > tighter > looser > 0
    assert settings_of(temperature=1e30)[0] == MAX_TEMPERATURE


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"logits": torch.zeros(VOCAB_SIZE)}, r"shape \(rows, vocab_size\)"),
        ({"logits": torch.zeros(1, 0)}, r"shape \(rows, vocab_size\)"),
        ({"logits": torch.zeros(1, 4, dtype=torch.long)}, "must be floating-point"),
        ({"kind": "paper"}, "`kind` must be one of"),
        ({"temperature": -0.1}, "`temperature` must be a number >= 0, got -0.1"),
        ({"temperature": math.inf}, "`temperature`"),
        ({"temperature": None}, "`temperature` must be a number >= 0, got None"),
        ({"top_k": -1}, "`top_k` must be an integer >= 0, got -1"),
        ({"top_k": True}, "`top_k`"),
        ({"top_p": 1.01}, "`top_p` must be a number from 0 to 1, got 1.01"),
    ],
)
def test_features_refuse_bad_input(bad, message):
    good = {"logits": make_logits(), "kind": "compact", "temperature": 0.1, "top_k": 1, "top_p": 1.0}
    policy_features(good.pop("logits"), **good)
    arguments = {"logits": make_logits(), **good, **bad}
    with pytest.raises(ValueError, match=message):
        policy_features(arguments.pop("logits"), **arguments)


def test_context_features_are_the_compact_ones_and_the_context():
    logits, context = make_logits(rows=2), make_context(rows=2)
    settings = {"temperature": 0.7, "top_k": 16, "top_p": 0.9}
    features = policy_features(logits, kind="compact+context", context=context, **settings)
    expected = torch.cat([policy_features(logits, kind="compact", **settings), context], dim=-1)
    assert features.dtype == torch.float32 and torch.equal(features, expected)
    half = policy_features(logits, kind="compact+context", context=context.bfloat16(), **settings)
    assert torch.equal(half[:, NUM_COMPACT_FEATURES:], context.bfloat16().float())
    for kind in ("compact", "logits"):
        assert torch.equal(policy_features(logits, kind=kind, context=context), policy_features(logits, kind=kind))


def test_context_that_is_not_finite_leaves_the_features_finite():
    bad = torch.tensor([[math.nan, math.inf, -math.inf, 1e30, 2.0]])
    features = policy_features(make_logits(), kind="compact+context", context=bad)
    assert features[0, NUM_COMPACT_FEATURES:].tolist() == [0.0, MAX_CONTEXT, -MAX_CONTEXT, MAX_CONTEXT, 2.0]
    assert features.half().isfinite().all() and bad.isnan().any()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "`context` must be given for .*, got None"),
        (torch.zeros(CONTEXT_SIZE), r"shape \(2, context_size\)"),
        (torch.zeros(1, CONTEXT_SIZE), r"shape \(2, context_size\).* got .*\(1, 8\)"),
        (torch.zeros(2, CONTEXT_SIZE, dtype=torch.long), "must be floating-point"),
    ],
)
def test_context_features_refuse_what_is_no_context(bad, message):
    with pytest.raises(ValueError, match=message):
        policy_features(make_logits(rows=2), kind="compact+context", context=bad)
    policy_features(make_logits(rows=2), kind="compact+context", context=torch.zeros(2, CONTEXT_SIZE))


def make_small_drafter() -> DFlashDraftModel:
    torch.manual_seed(0)
    config = DFlashConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=CONTEXT_SIZE,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        target_layer_ids=[0, 2],
        mask_token_id=3,
        block_size=4,
    )
    return DFlashDraftModel(config).eval()


def test_projected_context_is_what_the_drafters_layers_read():
    drafter = make_small_drafter()
    read = []
    drafter.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["context"]), with_kwargs=True
    )
    states = torch.randn(1, 5, 2 * CONTEXT_SIZE)
    with torch.no_grad():
        drafter(torch.randn(1, 4, CONTEXT_SIZE), states)
    projected = projected_context(drafter, states[0])
    assert projected.shape == (5, CONTEXT_SIZE) and not projected.requires_grad
    torch.testing.assert_close(projected, read[0][0])
    half = projected_context(drafter.bfloat16(), states[0])
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, projected, atol=0.1, rtol=0.1)


def test_projected_context_refuses_drafters_and_states_that_do_not_fit():
    with pytest.raises(ValueError, match=r"needs a DFlash drafter, with layers `fc` and `hidden_norm`, got Linear"):
        projected_context(torch.nn.Linear(2, 2), torch.zeros(1, 16))
    for states in (torch.zeros(1, 15), torch.zeros(1, 1, 16)):
        with pytest.raises(ValueError, match=r"must have shape \(rows, 16\), got"):
            projected_context(make_small_drafter(), states)
    projected_context(make_small_drafter(), torch.zeros(1, 16))


# Head


def test_paper_head_at_qwen3_vocabulary_has_the_papers_parameter_count():
    with torch.device("meta"):
        policy = BlockPilotPolicy(BlockPilotConfig(features="logits", vocab_size=151_936))
    assert sum(parameter.numel() for parameter in policy.parameters()) == 315_373_573
    assert {parameter.device.type for parameter in policy.parameters()} == {"meta"}


def test_forward_is_the_papers_formula():
    policy = make_policy(features="logits", vocab_size=VOCAB_SIZE).double()
    features = make_logits(rows=4).double()
    (w1, b1), (w2, b2) = ((layer.weight, layer.bias) for layer in policy.layers)
    with torch.no_grad():
        b1.normal_(), b2.normal_(), policy.fc_out.bias.normal_()
        first = torch.clamp(features @ w1.T + b1, min=0)
        second = torch.clamp(first @ w2.T + b2, min=0) + first
        expected = second @ policy.fc_out.weight.T + policy.fc_out.bias
        torch.testing.assert_close(policy(features).scores, expected)


def test_new_head_starts_from_the_papers_distribution():
    policy = make_policy(hidden_size=256)
    for layer, bound in [
        (policy.layers[0], math.sqrt(6 / NUM_COMPACT_FEATURES)),
        (policy.layers[1], math.sqrt(6 / 256)),
        (policy.fc_out, math.sqrt(6 / (256 + 3))),
    ]:
        assert 0.95 * bound < layer.weight.abs().max() <= bound
        assert not layer.bias.any()


def test_forward_drops_out_in_training_only():
    policy = make_policy(dropout=0.5)
    features = policy_features(make_logits(), kind="compact")
    torch.manual_seed(0)
    evaluated = policy(features).scores
    assert torch.equal(policy(features).scores, evaluated)
    policy.train()
    drawn = torch.stack([policy(features).scores for _ in range(20)])
    assert not torch.equal(drawn[0], drawn[1])
    policy.config.dropout = 0.0
    assert torch.equal(policy(features).scores, evaluated)


def test_forward_trains_every_parameter():
    policy = make_policy().train()
    torch.nn.functional.cross_entropy(
        policy(policy_features(make_logits(8), kind="compact")).scores, torch.arange(8) % 3
    ).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in policy.parameters())


def test_forward_refuses_features_of_another_width():
    policy = make_policy()
    with pytest.raises(ValueError, match=rf"shape \(rows, {NUM_COMPACT_FEATURES}\), got \(1, 70\)"):
        policy(torch.zeros(1, 70))
    assert policy(torch.zeros(1, NUM_COMPACT_FEATURES)).scores.shape == (1, 3)


@pytest.mark.parametrize("context_size", [576, 4096])
def test_default_curve_head_has_at_most_a_million_parameters(context_size):
    config = BlockPilotConfig(
        head="curve", features="compact+context", context_size=context_size, block_sizes=list(range(1, 17))
    )
    policy = BlockPilotPolicy(config)
    assert sum(parameter.numel() for parameter in policy.parameters()) <= 1_000_000
    assert policy(torch.zeros(1, NUM_COMPACT_FEATURES + context_size)).scores.shape == (1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_curve_lies_between_plain_decoding_and_the_whole_block(dtype):
    policy = make_curve(block_sizes=[1, 2, 4, 8]).to(dtype)
    with torch.no_grad():
        policy.fc_out.weight.mul_(30)
    features = policy_features(make_logits(50) * 10, kind="compact+context", context=make_context(50) * 10)
    curves = policy(features).scores
    assert curves.dtype == torch.float32 and curves.shape == (50, 4)
    assert (curves[:, 0] == 1).all()
    assert (curves >= 1).all() and (curves <= torch.tensor([1, 2, 4, 8])).all()
    assert (curves[:, 3] > 4).any() and (curves[:, 3] < 2).any()


def test_curve_trains_every_parameter():
    policy = make_curve().train()
    policy(
        policy_features(make_logits(8), kind="compact+context", context=make_context(8))
    ).scores.log().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in policy.parameters())


# Choice


def test_largest_score_wins_and_the_smallest_size_among_equals():
    assert make_biased(0.0, 2.0, 1.0).choose(make_logits()).block_size == 8
    assert make_biased(2.0, 1.0, 2.0).choose(make_logits()).block_size == 4
    assert make_biased(-3.0, -1.0, -1.0).choose(make_logits()).block_size == 8
    choice = make_biased(0.5, 2.0, 1.0).choose(make_logits())
    assert choice.scores == {4: 0.5, 8: 2.0, 16: 1.0}
    assert list(choice.scores) == [4, 8, 16]
    assert "3 scores" in choice.reason


def test_one_curve_chooses_large_blocks_where_steps_are_flat_and_small_ones_where_they_are_steep():
    logits, context = make_logits(), make_context()
    policy = make_fixed_curve(1.7, 2.6, 3.1)
    flat, steep = (policy.choose(logits, context=context, costs=costs) for costs in (FLAT, STEEP))
    assert (flat.block_size, steep.block_size) == (8, 1)
    assert make_fixed_curve(1.9, 2.6, 3.1).choose(logits, context=context, costs=STEEP).block_size == 2
    assert make_fixed_curve(1.99, 3.9, 3.95).choose(logits, context=context, costs=STEEP).block_size == 4
    # A larger block that brings nothing is not drafted, however flat.
    assert make_fixed_curve(1.7, 3.0, 3.0).choose(logits, context=context, costs=FLAT).block_size == 4
    assert make_fixed_curve(1.001, 1.001, 1.001).choose(logits, context=context, costs=FLAT).block_size == 1


def test_choice_of_a_curve_tells_speedups_and_acceptance_lengths():
    policy = make_fixed_curve(1.7, 2.6, 3.1)
    choice = policy.choose(make_logits(), context=make_context(), costs=FLAT)
    assert choice.acceptance_lengths == pytest.approx({1: 1.0, 2: 1.7, 4: 2.6, 8: 3.1})
    assert choice.scores == pytest.approx({1: 1.0, 2: 1.7 / 1.05, 4: 2.6 / 1.05, 8: 3.1 / 1.05})
    assert list(choice.scores) == [1, 2, 4, 8]
    assert "3.10 tokens per step expected, 2.95 times plain decoding" in choice.reason
    assert make_policy().choose(make_logits()).acceptance_lengths is None


def test_a_curve_is_read_at_the_prompts_length():
    growing = CostTable(
        context_lengths=(64, 4096), verify_s={1: (1.0, 1.0), 8: (1.0, 4.0)}, draft_s={2: (0.1, 0.1), 8: (0.1, 0.1)}
    )
    policy = make_fixed_curve(1.9, 2.6, 3.1)
    sizes = [
        policy.choose(make_logits(), context=make_context(), costs=growing, context_length=length).block_size
        for length in (64, 4096)
    ]
    assert sizes == [8, 2]


def test_smallest_size_wins_among_equal_speedups():
    table = CostTable(context_lengths=(64,), verify_s={1: (1.0,), 4: (1.0,)}, draft_s={2: (1.0,), 4: (1.0,)})
    assert choose_by_seconds({1: 1.0, 2: 2.0, 4: 2.0}, table) == (1, {1: 1.0, 2: 1.0, 4: 1.0})
    assert choose_by_seconds({1: 1.0, 2: 2.5, 4: 2.5}, table)[0] == 2


def test_curve_follows_the_context():
    policy = make_fixed_curve(1.05, 1.1, 1.1)
    with torch.no_grad():
        policy.layers[0].weight.zero_()
        policy.layers[0].weight[0, NUM_COMPACT_FEATURES + 2] = 1.0
        policy.layers[1].weight.zero_()
        policy.fc_out.weight[:, 0] = 1.0
    known, unknown = torch.zeros(2, CONTEXT_SIZE)
    known[2] = 50.0
    assert policy.choose(make_logits(), context=known, costs=FLAT).block_size == 8
    assert policy.choose(make_logits(), context=unknown, costs=STEEP).block_size == 1


def test_choice_head_does_not_look_at_context_and_costs():
    policy, logits = make_policy(), make_logits()
    assert policy.choose(logits, context=torch.zeros(3, 3), costs="none", context_length=7) == policy.choose(logits)


def test_choice_head_may_read_context_too():
    policy = make_policy(features="compact+context", context_size=CONTEXT_SIZE)
    one, other = (policy.choose(make_logits(), context=make_context(seed=seed)) for seed in (0, 1))
    assert one.scores != other.scores and one.acceptance_lengths is None


def test_a_curve_says_what_it_needs():
    policy, logits = make_curve(), make_logits()
    with pytest.raises(ValueError, match=r"`costs` must be given to policy .* Pass a cost table, such as `costs_for"):
        policy.choose(logits, context=make_context())
    with pytest.raises(ValueError, match=r"`context` must be given to policy .* Pass `projected_context\(drafter"):
        policy.choose(logits, costs=FLAT)
    with pytest.raises(ValueError, match=r"`context` must have shape \(1, 8\), .* got \(1, 9\)"):
        policy.choose(logits, context=torch.zeros(9), costs=FLAT)
    choice = policy.choose(logits, context=make_context()[0], costs=FLAT)
    assert choice == policy.choose(logits, context=make_context(), costs=FLAT)
    # Without context it has to be of features that need none.
    compact = make_policy(head="curve")
    assert compact.choose(logits, costs=FLAT).acceptance_lengths.keys() == {1, 4, 8}


@pytest.mark.parametrize("kind", ["compact", "logits"])
def test_choice_follows_the_prompt(kind):
    """A head made by hand on one feature: the top log-probability, or the logit of token 0."""
    policy = make_policy(block_sizes=[4, 8], features=kind, vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        # Hidden unit 0 is relu(feature 0 + 1): large for a sure target, 0 for an unsure one.
        policy.layers[0].weight[0, 0] = 1.0
        policy.layers[0].bias[0] = 1.0
        policy.fc_out.weight[1, 0] = 1.0
        policy.fc_out.bias[0] = 0.5
    sure, unsure = torch.full((2, 1, VOCAB_SIZE), -1.0)
    sure[0, 0] = 20.0
    assert policy.choose(sure).block_size == 8
    assert policy.choose(unsure).block_size == 4


def test_choice_equals_the_forward_pass_on_the_calls_features():
    policy = make_policy()
    settings = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    logits = make_logits()
    expected = policy(policy_features(logits, kind="compact", **settings)).scores[0].tolist()
    assert list(policy.choose(logits, **settings).scores.values()) == expected
    assert policy.choose(logits[0], **settings) == policy.choose(logits, **settings)
    assert list(policy.choose(logits).scores.values()) != expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["compact", "logits"])
def test_choice_in_half_precision(kind, dtype):
    policy = make_policy(features=kind, vocab_size=VOCAB_SIZE).to(dtype)
    logits = make_logits()
    logits[0, 5] = -math.inf
    logits[0, 6] = math.nan
    choice = policy.choose(logits, temperature=1e5)
    expected = policy(policy_features(logits, kind=kind, temperature=1e5)).scores
    assert expected.dtype == dtype
    assert list(choice.scores.values()) == expected.float()[0].tolist()


def test_choice_is_without_dropout_and_leaves_mode_and_random_numbers_alone():
    policy = make_policy(dropout=0.5)
    logits = make_logits().requires_grad_()
    expected = policy.choose(logits)
    policy.train()
    state = torch.get_rng_state()
    assert all(policy.choose(logits) == expected for _ in range(5))
    assert policy.training and all(layer.training for layer in policy.layers)
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_choose_as_one_alone_while_others_train():
    """Switching `training` off and on around a choice would let dropout into a neighbour's, or out of the training."""
    policy = make_policy(dropout=0.5).train()
    prompts = [make_logits(seed=seed) for seed in range(8)]
    alone = [policy.choose(prompt) for prompt in prompts]
    evaluated = policy.eval()(policy_features(prompts[0], kind="compact")).scores.detach()
    policy.train()

    def choose(index: int):
        return policy.choose(prompts[index % 8]) == alone[index % 8]

    def train(_: int):
        with torch.no_grad():
            return not torch.equal(policy(policy_features(prompts[0], kind="compact")).scores, evaluated)

    with ThreadPoolExecutor(6) as pool:
        chosen = [pool.submit(choose, index) for index in range(400)]
        trained = [pool.submit(train, index) for index in range(200)]
        assert all(future.result() for future in chosen)
        assert all(future.result() for future in trained)


def test_choice_refuses_several_rows():
    policy = make_policy()
    with pytest.raises(ValueError, match=r"got \(2, 100\)"):
        policy.choose(make_logits(rows=2))
    policy.choose(make_logits(rows=1))


def test_choice_refuses_another_vocabulary_only_where_it_matters():
    policy = make_policy(features="logits", vocab_size=VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"100 columns that policy .* was made for, got 101"):
        policy.choose(make_logits(vocab_size=101))
    policy.choose(make_logits(vocab_size=VOCAB_SIZE))
    compact = make_policy(vocab_size=VOCAB_SIZE)
    assert compact.choose(make_logits(vocab_size=101)).block_size in compact.config.block_sizes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_choice_refuses_scores_that_are_not_finite_and_names_the_policy(tmp_path, value):
    make_biased(1.0, 0.0).save_pretrained(tmp_path / "broken-policy")
    policy = BlockPilotPolicy.from_pretrained(tmp_path / "broken-policy")
    assert policy.choose(make_logits()).block_size == 4
    with torch.no_grad():
        policy.fc_out.bias[1] = value
    with pytest.raises(ValueError, match=r"scores of policy '.*broken-policy' must be finite"):
        policy.choose(make_logits())


# Saving and loading


def assert_same_policy(loaded, policy) -> None:
    expected, got = policy.state_dict(), loaded.state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    assert [name for name, _ in loaded.named_buffers()] == [name for name, _ in policy.named_buffers()]
    assert loaded.choose(make_logits()) == policy.choose(make_logits())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["compact", "logits"])
def test_saved_policy_loads_bit_equal(tmp_path, kind, dtype):
    policy = make_policy(features=kind, vocab_size=VOCAB_SIZE).to(dtype)
    policy.save_pretrained(tmp_path)
    assert_same_policy(BlockPilotPolicy.from_pretrained(tmp_path), policy)
    assert_same_policy(BlockPilotPolicy.from_pretrained(tmp_path, device_map="cpu"), policy)
    assert_same_policy(AutoModel.from_pretrained(tmp_path), policy)
    again = tmp_path / "again"
    AutoModel.from_pretrained(tmp_path).save_pretrained(again)
    assert_same_policy(AutoModel.from_pretrained(again), policy)
    assert not BlockPilotPolicy.from_pretrained(tmp_path).training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_curve_loads_bit_equal_and_chooses_alike(tmp_path, dtype):
    policy = make_curve().to(dtype)
    policy.save_pretrained(tmp_path)
    for loaded in (BlockPilotPolicy.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert (loaded.config.head, loaded.config.context_size) == ("curve", CONTEXT_SIZE)
        state = policy.state_dict()
        assert loaded.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
        asked = {"context": make_context(), "costs": FLAT}
        assert loaded.choose(make_logits(), **asked) == policy.choose(make_logits(), **asked)


def test_policy_loads_in_another_dtype_on_request(tmp_path):
    policy = make_policy()
    policy.save_pretrained(tmp_path)
    assert_same_policy(BlockPilotPolicy.from_pretrained(tmp_path, dtype=torch.bfloat16), policy.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["policy-v0.1", "policy.safetensors", "a b", "."])
def test_policy_loads_from_any_folder_name(tmp_path, monkeypatch, name):
    folder = tmp_path / name
    policy = make_policy()
    policy.save_pretrained(folder)
    (folder / "below").mkdir()
    for load in (BlockPilotPolicy.from_pretrained, AutoModel.from_pretrained):
        assert_same_policy(load(folder), policy)
        assert_same_policy(load(f"{folder}/"), policy)
        monkeypatch.chdir(folder)
        assert_same_policy(load("."), policy)
        assert_same_policy(load("./"), policy)
        monkeypatch.chdir(folder / "below")
        assert_same_policy(load(".."), policy)
        assert_same_policy(load("../"), policy)


def test_two_policies_load_side_by_side(tmp_path):
    first, second = make_policy(seed=1), make_policy(seed=2, block_sizes=[2, 3], hidden_size=5)
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    loaded = [AutoModel.from_pretrained(tmp_path / name) for name in ("first", "second", "first")]
    for got, policy in zip(loaded, (first, second, first), strict=True):
        assert type(got) is BlockPilotPolicy
        assert_same_policy(got, policy)


def test_nothing_is_tied_and_the_file_holds_exactly_the_weights(tmp_path):
    policy = make_policy()
    policy.save_pretrained(tmp_path)
    assert policy.all_tied_weights_keys == {}
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == policy.state_dict().keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "configuration_blockpilot.py",
        "exact_loading.py",
        "features.py",
        "model.safetensors",
        "modeling_blockpilot.py",
        "sharing.py",
    ]
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_blockpilot.BlockPilotConfig",
        "AutoModel": "modeling_blockpilot.BlockPilotPolicy",
    }


def test_only_safetensors_are_read(tmp_path):
    policy = make_policy()
    policy.save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    torch.save(policy.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        BlockPilotPolicy.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="safetensors"):
        BlockPilotPolicy.from_pretrained(tmp_path, use_safetensors=False)
    weights.rename(tmp_path / "model.safetensors")
    assert_same_policy(BlockPilotPolicy.from_pretrained(tmp_path), policy)


@pytest.mark.parametrize("load", [BlockPilotPolicy.from_pretrained, AutoModel.from_pretrained])
def test_checkpoint_that_does_not_fit_is_refused(tmp_path, load):
    policy = make_policy()
    policy.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)

    def write(tensors):
        save_file(tensors, file, metadata={"format": "pt"})

    write({name: tensor for name, tensor in whole.items() if name != "layers.1.bias"})
    with pytest.raises(ValueError, match=r"missing: layers\.1\.bias\. "):
        load(tmp_path)
    write({**whole, "layers.2.bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"not expected: layers\.2\.bias\. "):
        load(tmp_path)
    write({**whole, "fc_out.bias": torch.zeros(4)})
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError, match=r"of another shape: fc_out\.bias \(4,\) instead of \(3,\)\. "):
            load(tmp_path, **options)
    write({"fc_out.bias": torch.zeros(4), "extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"missing: .*not expected: extra; of another shape: fc_out"):
        load(tmp_path)
    write(whole)
    assert_same_policy(load(tmp_path), policy)
    loaded, info = load(tmp_path, output_loading_info=True)
    assert_same_policy(loaded, policy)
    assert not any(info.values())


REMOTE = """
    import json, os, socket, sys

    sys.modules["blockpilot_hf"] = None  # importing it now fails, wherever it is installed

    def refuse(*args, **kwargs):
        raise AssertionError("a network connection was tried")

    socket.socket.connect = refuse
    socket.getaddrinfo = refuse

    import torch
    from transformers import AutoConfig, AutoModel

    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0)) * 4

    def scores(path):
        policy = AutoModel.from_pretrained(path, trust_remote_code=True)
        assert type(policy).__module__.startswith("transformers_modules."), type(policy)
        config = AutoConfig.from_pretrained(path, trust_remote_code=True)
        assert config.block_sizes == policy.config.block_sizes and "LABEL" not in repr(config)
        try:
            type(config)(head="rank")
        except ValueError as error:
            assert "`head` must be one of" in str(error)
        else:
            raise AssertionError("a bad head was taken")
        return list(policy.choose(logits, temperature=0.7, top_k=20).scores.items())

    result = {}
    for path in sys.argv[1:]:
        result[path] = scores(path)
    os.chdir(sys.argv[1])
    for path in (".", "./", "below/..", "below/../"):
        result[path] = scores(path)
    os.chdir("below")
    for path in ("..", "../"):
        result[path] = scores(path)
    print(json.dumps(result))
"""


def test_saved_folder_loads_by_remote_code_without_the_package_or_a_network(tmp_path):
    """Two folders of one name and one code with different weights, and a third with another revision of the code."""
    policies = {
        tmp_path / "a" / "policy-v0.1": make_policy(seed=1),
        tmp_path / "b" / "policy-v0.1": make_policy(seed=2, block_sizes=[3, 5]).to(torch.bfloat16),
        tmp_path / "c" / "policy-v0.1": make_policy(seed=3, features="logits", vocab_size=VOCAB_SIZE),
    }
    for folder, policy in policies.items():
        policy.save_pretrained(folder)
        (folder / "below").mkdir()
    with open(tmp_path / "c" / "policy-v0.1" / "features.py", "a") as file:
        file.write("\n# Another revision.\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_MODULES_CACHE")}
    environment.update(HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REMOTE), *map(str, policies)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])

    def expected(policy):
        return [[*item] for item in policy.choose(make_logits(), temperature=0.7, top_k=20).scores.items()]

    for folder, policy in policies.items():
        assert result.pop(str(folder)) == expected(policy)
    first = expected(next(iter(policies.values())))
    assert result == {path: first for path in (".", "./", "below/..", "below/../", "..", "../")}


def test_files_that_travel_import_only_torch_transformers_and_each_other(tmp_path):
    make_policy().save_pretrained(tmp_path)
    travelling = {path.stem for path in tmp_path.glob("*.py")}
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    for path in tmp_path.glob("*.py"):
        third_party = set(get_imports(path)) - set(sys.stdlib_module_names)
        assert third_party <= {"torch", "transformers"}, path
        assert set(get_relative_imports(path)) <= travelling, path

"""Which table a call decides by: the kept one, the default of the device class, or the cautious one."""

import logging

import pytest
import torch
from conftest import make_drafter, make_target
from torch import nn

from blockpilot_hf import default_costs as module
from blockpilot_hf.costs import CostTable, costs_key, kept_costs_path
from blockpilot_hf.default_costs import costs_for, default_costs, device_class_of, drafter_share
from blockpilot_hf.packing import pack_linear_weights, packing_pays
from blockpilot_hf.parity import ScriptedDrafter

CLASSES = [
    module.CPU_FLOAT32,
    module.CPU_FLOAT32_PACKED,
    module.CPU_BFLOAT16,
    module.ACCELERATOR_HALF,
    module.ACCELERATOR_FLOAT32,
    module.MPS,
    module.CAUTIOUS,
]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def keep(target, drafter, cost=2.0, **key):
    """A kept table of this pair whose plain pass takes that long."""
    own = costs_key(target, drafter)
    table = CostTable((64,), {1: (cost,), 16: (3.0,)}, {2: (0.5,), 16: (1.0,)}, {**own, **key}, "measured here")
    table.save(kept_costs_path(own))
    return table


def test_a_kept_table_of_this_pair_goes_before_the_default(target, drafter):
    before = costs_for(target, drafter)
    assert before.source.startswith("default") and before.verify_at(1) == 1.0
    kept = keep(target, drafter)
    assert costs_for(target, drafter) == kept
    assert costs_for(target, make_drafter(target, num_hidden_layers=3)).source.startswith("default")


def test_a_table_that_is_calibrated_anew_counts_from_then_on(target, drafter):
    keep(target, drafter)
    assert costs_for(target, drafter).verify_at(1) == 2.0
    keep(target, drafter, cost=1.25)
    assert costs_for(target, drafter).verify_at(1) == 1.25


def test_a_second_look_reads_no_file_again(target, drafter, monkeypatch):
    keep(target, drafter)
    loads, load = [], CostTable.load
    monkeypatch.setattr(CostTable, "load", lambda path: loads.append(path) or load(path))
    tables = [costs_for(target, drafter) for _ in range(3)]
    assert len(loads) <= 1 and tables[0] is tables[1] is tables[2]


@pytest.mark.parametrize("content", ["", "{", '{"verify_s": {}}', "[1]"])
def test_a_damaged_file_is_left_aside_with_a_warning(target, drafter, content, caplog):
    logging.getLogger("blockpilot_hf.default_costs").propagate = True
    path = kept_costs_path(costs_key(target, drafter))
    path.parent.mkdir(parents=True)
    path.write_text(content)
    module.logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="blockpilot_hf.default_costs"):
        assert costs_for(target, drafter).source.startswith("default")
    assert "left aside" in caplog.text and path.name in caplog.text and "blockpilot calibrate" in caplog.text
    assert path.read_text() == content
    kept = keep(target, drafter)
    assert costs_for(target, drafter) == kept


def test_a_table_of_another_key_under_this_name_does_not_count(target, drafter):
    keep(target, drafter, device="elsewhere")
    assert costs_for(target, drafter).source.startswith("default")


def test_no_pass_is_run_to_find_costs(target, drafter, monkeypatch):
    def forward(*arguments, **kwargs):
        raise AssertionError("a pass")

    for model in (target, drafter):
        monkeypatch.setattr(model, "forward", forward)
    state = torch.get_rng_state()
    costs_for(target, drafter)
    keep(target, drafter)
    costs_for(target, drafter)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("device_class", CLASSES, ids=lambda one: one.source)
def test_defaults_rise_with_the_width_from_one_plain_pass(device_class):
    table = module._table(device_class, 0.2, 32)
    verify = [table.verify_at(width) for width in range(1, 65)]
    draft = [table.draft_at(size) for size in range(2, 65)]
    assert verify[0] == 1.0 and verify == sorted(verify) and draft == sorted(draft)
    assert table.block_sizes == list(range(1, 33))
    assert table.step_s(8, context_length=10_000) == table.step_s(8)


def test_an_accelerator_is_flatter_than_a_cpu_and_the_unknown_steeper_than_all():
    tables = [module._table(one, 0.15, 16) for one in CLASSES]
    ours = dict(zip([one.source for one in CLASSES], tables, strict=True))
    flat, steep = ours[module.ACCELERATOR_HALF.source], ours[module.CPU_FLOAT32.source]
    cautious = ours[module.CAUTIOUS.source]
    for size in (2, 4, 8, 16):
        assert flat.step_s(size) < steep.step_s(size)
        assert all(cautious.step_s(size) > table.step_s(size) for table in tables if table is not cautious)
    # With runs of a middling length, a flat device drafts the whole block and a steep one does not.
    best = {
        name: max(table.block_sizes, key=lambda size, table=table: table.speedup(size, 3.5 * (1 - 0.72**size)))
        for name, table in ours.items()
    }
    assert best[module.CAUTIOUS.source] < best[module.CPU_FLOAT32.source] < best[module.ACCELERATOR_HALF.source]


@pytest.mark.parametrize(
    ("device", "dtype", "native", "expected"),
    [
        ("cpu", "float32", False, module.CPU_FLOAT32),
        ("cpu", "bfloat16", True, module.CPU_BFLOAT16),
        ("cpu", "bfloat16", False, "no instructions for bfloat16"),
        ("cpu", "float16", True, "no instructions for float16"),
        ("cuda", "bfloat16", False, module.ACCELERATOR_HALF),
        ("cuda", "float16", False, module.ACCELERATOR_HALF),
        ("xpu", "float32", False, module.ACCELERATOR_FLOAT32),
        ("mps", "float16", False, module.MPS),
        ("hpu", "bfloat16", False, "'hpu' are unknown"),
    ],
)
def test_device_and_dtype_name_the_class(target, drafter, monkeypatch, device, dtype, native, expected):
    class There:
        """The target as it would be on that device."""

        config = target.config

    There.device = torch.device(device)
    monkeypatch.setattr(module, "has_native_bfloat16", lambda: native)
    found = device_class_of(There(), {**costs_key(target, drafter), "dtype": dtype})
    if isinstance(expected, str):
        assert found.source.startswith("cautious default") and expected in found.source
    else:
        assert found is expected


def test_packed_layers_have_a_class_of_their_own():
    target = make_target()
    if not packing_pays(target):
        pytest.skip("packing does not pay here")
    pack_linear_weights(target)
    assert device_class_of(target, costs_key(target, make_drafter(target))) is module.CPU_FLOAT32_PACKED


def test_quantised_targets_experts_and_several_devices_get_the_cautious_class(drafter):
    target = make_target()
    key = costs_key(target, drafter)
    assert device_class_of(target, key) is module.CPU_FLOAT32
    assert "several devices" in device_class_of(target, {**key, "num_devices": 2}).source
    target.config.num_experts = 8
    assert "mixture of experts" in device_class_of(target, key).source
    target.config.num_experts = 0
    target.model.layers[0].self_attn.q_proj.__class__ = type("Linear4bit", (nn.Linear,), {})
    assert "quantised" in default_costs(target, drafter).source


def test_the_drafters_share_counts_what_a_pass_reads(target):
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    head = target.lm_head.weight.numel()
    drafter = make_drafter(target)
    read = count(target) - head  # the embedding is as large as the head, and no part of a pass
    assert drafter_share(target, drafter, is_launch_bound=False) == pytest.approx((count(drafter) + head) / read)
    drafter.set_shortlist(torch.arange(16))
    few = head * 16 // 64
    assert drafter_share(target, drafter, is_launch_bound=False) == pytest.approx((count(drafter) + few) / read)
    tied = make_target(tie_word_embeddings=True)
    assert drafter_share(tied, make_drafter(tied), is_launch_bound=False) == pytest.approx(
        (count(drafter) + head) / count(tied)
    )


def test_layers_count_where_starting_kernels_takes_the_time(target):
    slim = make_drafter(target, intermediate_size=8, num_hidden_layers=4)
    slim.set_shortlist(torch.arange(1))
    assert drafter_share(target, slim, is_launch_bound=False) < 1.0
    assert drafter_share(target, slim, is_launch_bound=True) == 1.0


def test_larger_drafters_are_dearer_and_reach_as_far_as_they_were_trained(target):
    small, large = (
        default_costs(target, make_drafter(target, num_hidden_layers=n, block_size=32, target_layer_ids=[0]))
        for n in (1, 4)
    )
    assert all(large.draft_at(size) > small.draft_at(size) for size in (2, 8, 32))
    assert small.block_sizes[-1] == 32
    assert default_costs(target, make_drafter(target, block_size=4)).block_sizes[-1] == 16


def test_a_drafter_without_weights_has_a_price(target):
    assert costs_for(target, ScriptedDrafter(target)).step_s(8) > 1.0

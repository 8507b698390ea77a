"""A table of costs says what was measured, prices what lies between, survives its file, and knows what it is of."""

import json

import pytest
import torch
from conftest import make_drafter, make_target

from blockpilot_hf.costs import CostTable, costs_key, kept_costs_path, key_name
from blockpilot_hf.packing import pack_linear_weights, unpack_linear_weights

TABLE = CostTable(
    context_lengths=(100, 500),
    verify_s={1: (0.05, 0.06), 2: (0.06, 0.08), 4: (0.08, 0.12)},
    draft_s={2: (0.01, 0.01), 4: (0.02, 0.03)},
    key={"device": "here"},
    source="measured",
    measured={"num_samples": 4},
)
FLAT = {
    "verify_s": {"1": 0.1, "2": 0.12, "4": 0.16},
    "draft_s": {"2": 0.02, "4": 0.03},
    "context_length": 256,
    "measured_on": {"device": "cpu", "num_threads": 2},
}


def test_a_step_costs_drafting_and_verifying_and_plain_decoding_only_verifies():
    at = {"context_length": 100}
    assert TABLE.step_s(1, **at) == 0.05
    assert TABLE.step_s(4, **at) == pytest.approx(0.10)
    assert TABLE.step_s(4, verify_width=2, **at) == pytest.approx(0.08)
    assert TABLE.step_s(4, verify_width=1, **at) == pytest.approx(0.07)
    assert TABLE.speedup(1, 1.0, 100) == 1.0
    assert TABLE.speedup(4, 3.0, 100) == pytest.approx(1.5)


def test_every_size_up_to_the_largest_drafted_one_has_a_price():
    assert TABLE.block_sizes == [1, 2, 3, 4]
    assert TABLE.draft_at(3, 100) == pytest.approx(0.015)
    assert TABLE.verify_at(3, 500) == pytest.approx(0.10)
    assert CostTable((0,), {1: (1.0,)}, {}).block_sizes == [1]


def test_seconds_between_context_lengths_lie_on_a_line_and_so_do_those_beyond():
    assert TABLE.verify_at(4, 300) == pytest.approx(0.10)
    assert TABLE.verify_at(4, 900) == pytest.approx(0.16)
    assert TABLE.verify_at(4, 0) == TABLE.verify_at(4, 100) == 0.08
    assert TABLE.verify_at(8, 100) == pytest.approx(0.12)
    assert TABLE.verify_at(8, 900) == pytest.approx(0.16 + 4 * 0.03)
    assert TABLE.draft_at(8, 100) == pytest.approx(0.04)


def test_seconds_never_fall_beyond_what_was_measured():
    falling = CostTable((10, 20), {1: (2.0, 1.0), 2: (1.5, 1.5)}, {2: (1.0, 0.5), 4: (0.8, 0.4)})
    assert falling.verify_at(1, 1000) == 1.0
    assert falling.verify_at(64, 10) == 1.5
    assert falling.draft_at(64, 20) == 0.4


def test_without_a_context_length_the_reference_or_the_nearest_one_counts():
    assert TABLE.reference_length == 256
    assert TABLE.verify_at(2) == pytest.approx(TABLE.verify_at(2, 256))
    short, long = (CostTable(lengths, {1: (1.0, 2.0)}, {}) for lengths in ((8, 16), (1000, 2000)))
    assert (short.verify_at(1), long.verify_at(1)) == (2.0, 1.0)


def test_a_table_survives_its_file(tmp_path):
    TABLE.save(tmp_path / "deep" / "costs.json")
    again = CostTable.load(tmp_path / "deep" / "costs.json")
    assert again == TABLE and again.measured == TABLE.measured
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["costs.json"]


def test_a_file_of_one_context_length_is_read(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps(FLAT))
    table = CostTable.load(tmp_path / "costs.json")
    assert (table.context_lengths, table.key) == ((256,), FLAT["measured_on"])
    assert table.step_s(4) == table.step_s(4, context_length=5000) == pytest.approx(0.19)
    assert table.draft_at(3) == pytest.approx(0.025)


def test_tables_that_come_with_the_policies_are_read():
    from blockpilot_hf.loading import embedded_drafter_dir

    paths = list(embedded_drafter_dir().parent.glob("*/costs.json"))
    assert paths
    for path in paths:
        table = CostTable.load(path)
        assert table.speedup(4, 3.0) > table.speedup(4, 1.0) and table.speedup(1, 1.0) == 1.0


@pytest.mark.parametrize(
    "content",
    ["[]", "{", "{}", json.dumps({**FLAT, "verify_s": {"a": 1}}), json.dumps({**FLAT, "verify_s": {"2": 0.1}})],
)
def test_a_file_that_is_no_table_is_named(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"costs\.json is not a cost table \(.+blockpilot calibrate"):
        CostTable.load(path)


@pytest.mark.parametrize(
    ("lengths", "verify_s", "draft_s", "message"),
    [
        ((8,), {2: (0.1,)}, {2: (0.1,)}, "width 1"),
        ((8,), {1: (0.1,)}, {1: (0.1,)}, "above 1"),
        ((8,), {1: (0.0,)}, {}, "above 0"),
        ((8,), {1: (float("nan"),)}, {}, "above 0"),
        ((8, 16), {1: (0.1,)}, {}, "each of its 2 context lengths"),
        ((16, 8), {1: (0.1, 0.1)}, {}, "must rise"),
        ((), {1: ()}, {}, "must rise"),
    ],
)
def test_what_cannot_be_priced_is_refused(lengths, verify_s, draft_s, message):
    with pytest.raises(ValueError, match=message):
        CostTable(lengths, verify_s, draft_s)


def test_drafting_is_not_priced_by_a_table_of_plain_decoding():
    table = CostTable((8,), {1: (0.1,), 4: (0.2,)}, {})
    with pytest.raises(ValueError, match="plain decoding only"):
        table.step_s(4)
    assert table.step_s(1) == 0.1


# --- keys ---


def test_a_key_is_readable_json_and_its_name_depends_on_nothing_else(target, drafter):
    key = costs_key(target, drafter)
    assert json.loads(json.dumps(key)) == key
    assert (key["target"]["class"], key["dtype"], key["num_threads"]) == ("Qwen3ForCausalLM", "float32", 1)
    assert key["target"]["shape"]["hidden_size"] == target.config.hidden_size
    assert key_name(key) == key_name(dict(reversed(key.items())))


def test_weights_and_names_are_no_part_of_a_key(target, drafter):
    other, another = make_target(seed=7), make_drafter(target, seed=8, mask_token_id=5)
    other.config._name_or_path = "elsewhere"
    assert costs_key(other, another) == costs_key(target, drafter)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's own quantisation
@pytest.mark.parametrize(
    "change",
    [
        lambda target, drafter: torch.set_num_threads(2),
        lambda target, drafter: target.to(torch.bfloat16),
        lambda target, drafter: drafter.to(torch.bfloat16),
        lambda target, drafter: target.set_attn_implementation("eager"),
        lambda target, drafter: drafter.set_attn_implementation("eager"),
        lambda target, drafter: drafter.set_shortlist(torch.arange(9)),
        lambda target, drafter: setattr(torch, "__version__", "0"),
        lambda target, drafter: torch.ao.quantization.quantize_dynamic(
            target, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
        ),
    ],
    ids=["threads", "dtype", "drafter dtype", "attention", "drafter attention", "shortlist", "torch", "quantised"],
)
def test_what_changes_the_seconds_changes_the_key(change, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.__version__)  # put back afterwards
    target = make_target()
    drafter = make_drafter(target)
    before = kept_costs_path(costs_key(target, drafter))
    change(target, drafter)
    assert kept_costs_path(costs_key(target, drafter)) != before


def test_other_shapes_have_other_keys(target, drafter):
    keys = [
        costs_key(target, drafter),
        costs_key(make_target("llama"), drafter),
        costs_key(make_target(intermediate_size=128), drafter),
        costs_key(target, make_drafter(target, num_hidden_layers=3)),
        costs_key(target, make_drafter(target, target_layer_ids=[0, 1, 2])),
    ]
    assert len({key_name(key) for key in keys}) == len(keys)


def test_packing_is_part_of_a_key_and_asking_for_one_does_not_disturb_it():
    target = make_target()
    drafter, ids = make_drafter(target), torch.arange(1, 5)[None]
    plain = costs_key(target, drafter)
    if not pack_linear_weights(target):
        pytest.skip("this build of torch cannot pack")
    with torch.no_grad():
        target(ids), target(ids)  # two passes that find the weights alike: now they are packed
        assert costs_key(target, drafter) != plain
        target(ids)
    layer = target.model.layers[0].self_attn.q_proj
    assert layer._packing is not None and layer._packing.tensor is not None
    unpack_linear_weights(target)
    assert costs_key(target, drafter) == plain


def test_kept_tables_lie_in_this_package_s_part_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    key = {"device": "here"}
    assert kept_costs_path(key) == tmp_path / "blockpilot" / "costs" / f"{key_name(key)}.json"

"""A table of costs says what was measured, survives its file, and refuses what could not be priced."""

import json

import pytest
from conftest import make_drafter, make_prompt, make_target, plain_generate

from blockpilot_hf.costs import CostTable, measure_costs

TABLE = CostTable(verify_s={1: 0.05, 2: 0.06, 4: 0.08}, draft_s={2: 0.01, 4: 0.02}, context_length=256)


def test_a_step_costs_drafting_and_verifying_and_plain_decoding_only_verifies():
    assert TABLE.step_s(1) == 0.05
    assert TABLE.step_s(4) == pytest.approx(0.10)
    assert TABLE.speedup(1, 1.0) == 1.0
    assert TABLE.speedup(4, 3.0) == pytest.approx(1.5)
    assert TABLE.block_sizes == [1, 2, 4]


def test_a_table_survives_its_file(tmp_path):
    TABLE.save(tmp_path / "deep" / "costs.json")
    assert CostTable.load(tmp_path / "deep" / "costs.json") == TABLE
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["costs.json"]


@pytest.mark.parametrize("content", ["[]", "{", "{}", json.dumps({"verify_s": {"a": 1}, "draft_s": {}})])
def test_a_file_that_is_no_table_is_named(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"costs\.json|invalid literal"):
        CostTable.load(path)


def test_sizes_without_a_price_and_times_of_zero_are_refused():
    with pytest.raises(ValueError, match="width 1"):
        CostTable(verify_s={2: 0.1}, draft_s={2: 0.1}, context_length=8)
    with pytest.raises(ValueError, match="above 0"):
        CostTable(verify_s={1: 0.0}, draft_s={}, context_length=8)


def test_measuring_covers_every_size_and_leaves_models_and_random_numbers_alone():
    target = make_target()
    drafter = make_drafter(target)
    before = plain_generate(target, make_prompt(), max_new_tokens=8, do_sample=False)
    table = measure_costs(target, drafter, [2, 8, 4], context_length=16, repeats=2)
    assert sorted(table.verify_s) == [1, 2, 4, 8]
    assert sorted(table.draft_s) == [2, 4, 8]
    assert table.measured_on["dtype"] == "float32"
    assert plain_generate(target, make_prompt(), max_new_tokens=8, do_sample=False).tolist() == before.tolist()

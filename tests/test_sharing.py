"""What `save_pretrained` writes, for those who have the folder alone; and that code in folders is not run here."""

import copy
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import constant_policy, make_drafter, make_target
from huggingface_hub import ModelCard, metadata_load
from python_process import bare_python
from transformers import AutoConfig, AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

import blockpilot_hf
from blockpilot_hf import BlockPilot, BlockPilotPolicy, DFlashDraftModel
from blockpilot_hf.loading import load_drafter, load_policy, policy_of_drafter

PACKAGE = Path(blockpilot_hf.__file__).parent
CODE = {
    "drafter": {"configuration_dflash", "modeling_dflash", "exact_loading", "packing", "sharing"},
    "policy": {"configuration_blockpilot", "modeling_blockpilot", "exact_loading", "features", "sharing"},
}
KINDS = ("drafter", "policy")


def make(kind, **overrides):
    if kind == "drafter":
        return make_drafter(make_target(), **overrides)
    policy = constant_policy(3)
    for name, value in overrides.items():
        setattr(policy.config, name, value)
    return policy


def read(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.fixture
def warnings(monkeypatch):
    """What the package warned of."""
    said = []
    monkeypatch.setattr(logging.get_logger("blockpilot_hf.sharing"), "warning", said.append)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_holds_config_weights_code_and_card_and_nothing_else(kind, tmp_path):
    make(kind).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("README.md", "config.json", "model.safetensors"),
        *(f"{name}.py" for name in CODE[kind]),
    }
    for name in CODE[kind]:
        assert (tmp_path / f"{name}.py").read_bytes() == (PACKAGE / f"{name}.py").read_bytes()
    for reference in read(tmp_path)["auto_map"].values():
        module, name = reference.split(".")
        assert f"\nclass {name}(" in (tmp_path / f"{module}.py").read_text(encoding="utf-8")
    assert sorted(read(tmp_path)["auto_map"]) == ["AutoConfig", "AutoModel"]


@pytest.mark.parametrize("kind", KINDS)
def test_saving_leaves_what_the_config_says_as_it_was(kind, tmp_path):
    model = make(kind, target_name_or_path=str(tmp_path / "target"))
    before = copy.deepcopy(model.config.to_dict())
    model.save_pretrained(tmp_path / "saved")
    after = model.config.to_dict()
    assert after["target_name_or_path"] == before["target_name_or_path"]
    # What transformers itself notes when it saves.
    assert {key for key in after if after[key] != before.get(key)} <= {"architectures", "auto_map", "dtype"}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("/home/someone/models/Qwen3-4B", "Qwen3-4B"),
        ("/home/someone/models/Qwen3-4B/", "Qwen3-4B"),
        ("~/Qwen3-4B", "Qwen3-4B"),
        ("./Qwen3-4B", "Qwen3-4B"),
        ("../models/Qwen3-4B", "Qwen3-4B"),
        ("C:\\models\\Qwen3-4B", "Qwen3-4B"),
        ("models/there", "there"),
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("Qwen3-4B", "Qwen3-4B"),
        (None, None),
    ],
)
def test_of_a_model_on_this_machine_only_its_own_name_is_written(given, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models/there").mkdir(parents=True)
    for kind, field in (("drafter", "target_name_or_path"), ("policy", "target_name_or_path")):
        make(kind, **{field: given}).save_pretrained(tmp_path / kind)
        assert read(tmp_path / kind)[field] == written
    make("policy", drafter_name_or_path=given).config.save_pretrained(tmp_path / "alone")
    assert read(tmp_path / "alone")["drafter_name_or_path"] == written


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_a_saved_folder_names_the_place_where_it_was_made_or_loaded(kind, tmp_path, monkeypatch):
    first, second = tmp_path / "a-place" / "first", tmp_path / "a-place" / "second"
    make(kind, target_name_or_path=str(tmp_path / "a-place" / "target")).save_pretrained(first)
    (load_drafter if kind == "drafter" else load_policy)(first).save_pretrained(second)
    for folder in (first, second):
        for path in folder.iterdir():
            assert b"a-place" not in path.read_bytes(), path
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


# The policy that a drafter names


def test_absolute_policy_folder_is_written_relative_to_the_drafters_own(tmp_path):
    constant_policy(3).save_pretrained(tmp_path / "policies" / "mine")
    make("drafter", policy=str(tmp_path / "policies" / "mine")).save_pretrained(tmp_path / "drafters" / "mine")
    assert read(tmp_path / "drafters" / "mine")["policy"] == os.path.join("..", "..", "policies", "mine")
    tmp_path.joinpath("elsewhere").mkdir()
    for name in ("policies", "drafters"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    moved = load_drafter(tmp_path / "elsewhere" / "drafters" / "mine")
    assert policy_of_drafter(moved).config.block_sizes == [3]


@pytest.mark.parametrize("lost", ["/nowhere/policy", "~/policy"])
def test_a_policy_that_no_other_folder_could_find_is_left_out_and_that_is_said(lost, tmp_path, warnings):
    make("drafter", policy=lost, policy_revision="abc").save_pretrained(tmp_path)
    assert (read(tmp_path)["policy"], read(tmp_path)["policy_revision"]) == (None, None)
    assert len(warnings) == 1 and lost in warnings[0] and "Push the policy, set `drafter.config.policy`" in warnings[0]


@pytest.mark.parametrize("kept", ["../policy", "policy", "org/policy"])
def test_relative_policies_and_hub_ids_are_written_as_they_are(kept, tmp_path, warnings):
    make("drafter", policy=kept, policy_revision="abc").save_pretrained(tmp_path)
    assert (read(tmp_path)["policy"], read(tmp_path)["policy_revision"]) == (kept, "abc")
    assert warnings == []


@pytest.mark.parametrize("local", ["../policy", "policy", "beside/policy", "/nowhere/policy"])
def test_what_is_pushed_names_no_local_policy(local, tmp_path, warnings):
    constant_policy(3).save_pretrained(tmp_path / "drafter" / "beside" / "policy")
    make("drafter", policy=local, policy_revision="abc").save_pretrained(tmp_path / "drafter")
    warnings.clear()
    drafter = load_drafter(tmp_path / "drafter")
    drafter.config.policy, drafter.config.policy_revision = local, "abc"
    pushed = drafter.config.for_others()
    assert (pushed.policy, pushed.policy_revision) == (None, None)
    assert len(warnings) == 1 and "pushed names none" in warnings[0]
    assert drafter.config.policy == local
    drafter.config.policy = "org/policy"
    assert (drafter.config.for_others().policy, drafter.config.for_others().policy_revision) == ("org/policy", "abc")


# Cards


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["Qwen/Qwen3-4B", "/home/someone/Qwen3-4B", None])
def test_a_folder_gets_a_card_that_is_true_and_parses(kind, target, tmp_path):
    make(kind, target_name_or_path=target).save_pretrained(tmp_path)
    data = metadata_load(tmp_path / "README.md")
    assert data.get("base_model") == (target if target == "Qwen/Qwen3-4B" else None)
    assert data["library_name"] == "transformers" and "speculative-decoding" in data["tags"]
    assert None not in data.values()
    card = ModelCard.load(tmp_path / "README.md")
    assert ("Qwen3-4B" in card.text.strip().splitlines()[0]) is (target is not None)
    assert "/home" not in card.text
    assert f'{kind} = AutoModel.from_pretrained("path/to/this/folder", trust_remote_code=True)' in card.text


def test_a_card_that_is_there_stays(tmp_path):
    (tmp_path / "README.md").write_text("Mine.")
    make("policy").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "Mine."


def test_a_process_that_is_not_the_main_one_writes_no_card(tmp_path):
    make("policy").save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "README.md").exists()


# Code in folders


@pytest.fixture
def mined(tmp_path):
    """Folders of a drafter and a policy whose code raises when it is run."""
    for kind in KINDS:
        make(kind).save_pretrained(tmp_path / kind)
        for path in (tmp_path / kind).glob("*.py"):
            path.write_text("raise RuntimeError('remote code was run')\n")
        with pytest.raises(RuntimeError, match="remote code was run"):
            get_class_from_dynamic_module(read(tmp_path / kind)["auto_map"]["AutoModel"], str(tmp_path / kind))
    return tmp_path


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": False}, {"trust_remote_code": True}])
def test_code_beside_the_weights_is_not_run_where_the_package_is(mined, trust):
    before = set(sys.modules)
    for kind, own, load in (
        ("drafter", DFlashDraftModel, load_drafter),
        ("policy", BlockPilotPolicy, load_policy),
    ):
        config = AutoConfig.from_pretrained(mined / kind, **trust)
        assert type(config) is own.config_class
        assert type(AutoModel.from_pretrained(mined / kind, **trust)) is own
        assert type(AutoModel.from_pretrained(mined / kind, config=config, **trust)) is own
        assert type(AutoModel.from_config(config, **trust)) is own
        assert type(load(mined / kind)) is own
    assert type(BlockPilot.from_pretrained(mined / "drafter", mined / "policy").policy) is BlockPilotPolicy
    assert not [name for name in set(sys.modules) - before if name.startswith("transformers_modules")]


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_whose_class_came_with_a_folder_saves_that_code_again(kind, tmp_path):
    """Whether its class was found by an auto class or, as the recipe does, by its own module."""
    make(kind).save_pretrained(tmp_path / "first")
    reference = read(tmp_path / "first")["auto_map"]["AutoModel"]
    with open(tmp_path / "first" / "exact_loading.py", "a") as file:
        file.write("\n# Of this folder.\n")
    cls = get_class_from_dynamic_module(reference, str(tmp_path / "first"))
    assert cls.__module__.startswith("transformers_modules.")
    cls.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()
    }


def test_without_the_package_folders_ask_for_the_trust_flag_and_load_with_it(tmp_path):
    for kind in KINDS:
        make(kind).save_pretrained(tmp_path / kind)
    code = """
import json, sys
from transformers import AutoModel
result = []
for folder in sys.argv[1:]:
    for trust in ({}, {"trust_remote_code": False}):
        try:
            AutoModel.from_pretrained(folder, **trust)
        except ValueError as error:
            result.append(str(error))
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    result.append(type(model).__module__)
    model.save_pretrained(folder + "-again")
print()  # the question whether to run the code has no line of its own
print(json.dumps(result))
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = bare_python(code, environment, *(str(tmp_path / kind) for kind in KINDS), input="")
    result = json.loads(done.stdout.splitlines()[-1])
    for kind, answers in zip(KINDS, (result[:3], result[3:]), strict=True):
        for message in answers[:2]:
            assert "contains custom code" in message and "`trust_remote_code=True`" in message
        assert answers[2].startswith("transformers_modules.")
        again = {path.name: path.read_bytes() for path in (tmp_path / f"{kind}-again").iterdir()}
        assert again == {path.name: path.read_bytes() for path in (tmp_path / kind).iterdir()}
    assert torch.equal(load_drafter(tmp_path / "drafter-again").fc.weight, make("drafter").fc.weight)

"""Drafters and policies from folders: which class loads them, what is passed on, and when a policy is read again."""

import json
import shutil

import pytest
import torch
from conftest import constant_policy, make_drafter, make_prompt, plain_generate, save_embedded_pair, save_zlab
from torch import nn
from transformers import AutoModel

from blockpilot_hf import BlockPilot, BlockPilotConfig, BlockPilotPolicy, DFlashDraftModel, loading
from blockpilot_hf.generate import generate
from blockpilot_hf.loading import load_drafter, load_policy, policy_of_drafter
from blockpilot_hf.packing import PackedLinear

PROMPT = make_prompt(10)


def same_weights(one, other):
    """Parameters and buffers, the non-persistent ones too, bit for bit."""
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# Drafters


@pytest.mark.parametrize("name", ["drafter", "drafter-v0.1", "with space"])
def test_own_and_published_forms_load_from_any_folder_name(target, drafter, tmp_path, name):
    drafter.save_pretrained(tmp_path / "own" / name)
    save_zlab(drafter, tmp_path / "published" / name)
    for folder in (tmp_path / "own" / name, tmp_path / "published" / name):
        for given in (folder, str(folder), f"{folder}/"):
            loaded = load_drafter(given)
            assert type(loaded) is DFlashDraftModel and not loaded.training
            assert same_weights(loaded, drafter)
    plain = plain_generate(target, PROMPT, max_new_tokens=8)
    assert torch.equal(BlockPilot.from_pretrained(folder).generate(target, PROMPT, max_new_tokens=8), plain)


def test_folder_loads_from_inside_and_from_below(drafter, tmp_path, monkeypatch):
    drafter.save_pretrained(tmp_path / "drafter-v0.1")
    constant_policy(3).save_pretrained(tmp_path / "drafter-v0.1" / "policy-v0.1")
    monkeypatch.chdir(tmp_path / "drafter-v0.1")
    assert all(same_weights(load_drafter(given), drafter) for given in (".", "./"))
    monkeypatch.chdir("policy-v0.1")
    assert all(same_weights(load_drafter(given), drafter) for given in ("..", "../"))
    assert all(load_policy(given).config.block_sizes == [3] for given in (".", "./", "../policy-v0.1/"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafter_keeps_its_dtype_unless_another_is_asked_for(target, tmp_path, dtype):
    make_drafter(target).to(dtype).save_pretrained(tmp_path)
    assert load_drafter(str(tmp_path), dtype="auto").dtype == dtype
    assert BlockPilot.from_pretrained(str(tmp_path)).drafter.dtype == dtype
    assert BlockPilot.from_pretrained(str(tmp_path), dtype=torch.float64).drafter.dtype == torch.float64


def test_two_drafters_load_side_by_side(target, tmp_path):
    one, other = make_drafter(target, seed=1), make_drafter(target, seed=2, num_hidden_layers=1)
    for name, drafter in (("one", one), ("other", other)):
        drafter.save_pretrained(tmp_path / name / "drafter")
    loaded = [load_drafter(tmp_path / name / "drafter") for name in ("one", "other", "one")]
    assert [same_weights(a, b) for a, b in zip(loaded, (one, other, one), strict=True)] == [True] * 3
    assert len({type(drafter) for drafter in loaded}) == 1


def test_native_drafter_loads_by_its_own_class(tmp_path):
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        target_layer_ids=[0, 2],
        block_size=8,
        mask_token_id=63,
    )
    torch.manual_seed(0)
    MuseGlimmerAssistantModel(config).save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    assert type(loaded) is MuseGlimmerAssistantModel and not loaded.training


def test_speculators_format_is_refused_by_name(drafter, tmp_path):
    save_zlab(drafter, tmp_path, speculators_version="0.3.0", dflash_config=None)
    with pytest.raises(ValueError, match=r"speculators format \(found \['speculators_version'\]\)"):
        load_drafter(tmp_path)


def test_folder_of_another_model_is_refused(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"A drafter needs `config.target_layer_ids`.*got Qwen3Model"):
        load_drafter(tmp_path)


@pytest.fixture
def spies(monkeypatch, drafter):
    """What the loaders of drafter and policy are called with; nothing is read."""
    seen = {"config": [], "drafter": [], "policy": []}

    def spy(what, result):
        return lambda *args, **kwargs: seen[what].append((args, kwargs)) or result

    def config_of(name, **kwargs):
        seen["config"].append(((name,), kwargs))
        return {"model_type": drafter.config.model_type if "drafter" in name else BlockPilotConfig.model_type}, {}

    monkeypatch.setattr(loading.PreTrainedConfig, "get_config_dict", config_of)
    monkeypatch.setattr(loading.DFlashDraftModel, "from_pretrained", spy("drafter", drafter))
    monkeypatch.setattr(loading.BlockPilotPolicy, "from_pretrained", spy("policy", constant_policy(3)))
    loading._load_policy.cache_clear()
    yield seen
    loading._load_policy.cache_clear()


SHARED = {
    "token": "a-token",
    "cache_dir": "/somewhere",
    "local_files_only": True,
    "force_download": False,
    "proxies": {"https": "proxy:1"},
}


def test_where_to_load_from_reaches_every_load(spies):
    BlockPilot.from_pretrained(
        "org/drafter",
        "org/policy",
        revision="r1",
        subfolder="d",
        policy_revision="r2",
        policy_subfolder="p",
        dtype=torch.float32,
        device_map="cpu",
        **SHARED,
    )
    found = {k: v for k, v in SHARED.items() if k in ("token", "cache_dir", "local_files_only")}
    assert spies["config"] == [
        (("org/drafter",), {**found, "revision": "r1", "subfolder": "d"}),
        (("org/policy",), {**found, "revision": "r2", "subfolder": "p"}),
    ]
    of_drafter = {**SHARED, "revision": "r1", "subfolder": "d", "dtype": torch.float32, "device_map": "cpu"}
    assert spies["drafter"] == [(("org/drafter",), of_drafter)]
    assert spies["policy"] == [(("org/policy",), {**SHARED, "revision": "r2", "subfolder": "p"})]


def test_what_is_not_given_is_not_passed_on(spies):
    BlockPilot.from_pretrained("org/drafter", "org/policy")
    assert spies["config"] == [(("org/drafter",), {}), (("org/policy",), {})]
    assert spies["drafter"] == [(("org/drafter",), {"dtype": "auto"})]
    assert spies["policy"] == [(("org/policy",), {})]


def test_policy_named_by_the_drafter_is_loaded_with_its_revision_and_the_pilots_access(spies, target):
    named = make_drafter(target, policy="org/policy", policy_revision="r3")
    BlockPilot.from_pretrained(named, token="a-token").generate(target, PROMPT, max_new_tokens=2)
    assert spies["policy"] == [(("org/policy",), {"token": "a-token", "revision": "r3"})]


def test_relative_policy_of_a_drafter_from_the_hub_is_the_repository_beside_it(spies, target):
    """A folder that was uploaded as it is."""
    named = make_drafter(target, policy="../policy", policy_revision="r3")
    named.config._name_or_path = "org/drafter"
    BlockPilot.from_pretrained(named).generate(target, PROMPT, max_new_tokens=2)
    assert spies["policy"] == [(("org/policy",), {"revision": "r3"})]


def test_policy_of_a_call_is_loaded_with_the_pilots_access(spies, target, drafter):
    pilot = BlockPilot.from_pretrained(drafter, **SHARED)
    for _ in range(2):
        pilot.generate(target, PROMPT, policy="org/policy", max_new_tokens=2)
    assert spies["policy"] == [(("org/policy",), SHARED)]


def test_recipe_loads_the_policy_with_its_own_access_but_not_from_its_own_revision(spies, target, drafter):
    where = {**SHARED, "revision": "r1", "subfolder": "s", "repo_type": "model"}
    generate(model=target, inputs=PROMPT, assistant_model=drafter, policy="org/policy", max_new_tokens=2, **where)
    assert spies["policy"] == [(("org/policy",), SHARED)]


def test_what_is_no_policy_is_told_apart_from_what_is_not_there(target, drafter, tmp_path):
    """A drafter in its place would be a list of weights that do not fit."""
    drafter.save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"drafter' is no BlockPilot policy: .*'blockpilot_dflash'.*policy=False"):
        BlockPilot(drafter).generate(target, PROMPT, policy=str(tmp_path / "drafter"), max_new_tokens=2)
    with pytest.raises(OSError, match=r"The policy '.*nowhere' cannot be loaded: "):
        BlockPilot(drafter).generate(target, PROMPT, policy=str(tmp_path / "nowhere"), max_new_tokens=2)


def test_objects_are_taken_as_they_are(drafter):
    policy = constant_policy(3)
    pilot = BlockPilot.from_pretrained(drafter, policy)
    assert pilot.drafter is drafter and pilot.policy is policy
    assert BlockPilot.from_pretrained(drafter, False).policy is False


# The embedded drafter


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An empty folder in place of this package's, for what lies in it and beside it."""
    monkeypatch.setattr(loading, "__file__", str(tmp_path / "site" / "blockpilot_hf" / "loading.py"))
    return tmp_path / "site" / "blockpilot_hf"


@pytest.mark.parametrize("place", ["within", "beside"])
def test_pilot_without_a_drafter_is_the_embedded_one_with_its_policy(package, target, place):
    save_embedded_pair((package if place == "within" else package.parent) / "hub_cards", block_size=3)
    pilot = BlockPilot.from_pretrained()
    output = pilot.generate(target, PROMPT, max_new_tokens=8, return_dict_in_generate=True)
    assert type(pilot.drafter) is DFlashDraftModel and not pilot.drafter.training
    assert output.blockpilot.block_size == 3 and output.blockpilot.scores is not None
    assert torch.equal(output.sequences, plain_generate(target, PROMPT, max_new_tokens=8))
    without = BlockPilot.from_pretrained(policy=False)
    output = without.generate(target, PROMPT, max_new_tokens=8, return_dict_in_generate=True)
    assert output.blockpilot.block_size == without.drafter.config.block_size == 8


def test_embedded_drafter_within_the_package_goes_before_the_one_beside_it(package):
    beside, _ = save_embedded_pair(package.parent / "hub_cards")
    assert loading.embedded_drafter_dir() == beside
    within, _ = save_embedded_pair(package / "hub_cards")
    assert loading.embedded_drafter_dir() == within
    (within / "model.safetensors").unlink()  # a card alone is no drafter
    assert loading.embedded_drafter_dir() == beside


def test_without_the_embedded_drafter_the_error_tells_where_it_was_looked_for(package, target, drafter):
    with pytest.raises(FileNotFoundError, match=r"The embedded drafter is not there.*or pass a drafter") as info:
        BlockPilot.from_pretrained()
    for place in (package, package.parent):
        assert str(place / "hub_cards" / loading.EMBEDDED_DRAFTER_NAME) in str(info.value)
    assert BlockPilot.from_pretrained(drafter).drafter is drafter


def test_without_the_embedded_policy_the_error_tells_the_way_out(package, target):
    _, policy = save_embedded_pair(package / "hub_cards")
    shutil.rmtree(policy)
    with pytest.raises(OSError, match=r"(?s)names the policy '../SmolLM2.*cannot be loaded.*policy=False"):
        BlockPilot.from_pretrained().generate(target, PROMPT, max_new_tokens=2)
    BlockPilot.from_pretrained(policy=False).generate(target, PROMPT, max_new_tokens=2)


@pytest.mark.parametrize(
    ("capabilities", "given", "dtype", "is_packed"),
    [
        ({"avx2": True}, {}, torch.float32, True),
        ({"avx2": True}, {"pack": False}, torch.float32, False),
        ({"avx512_bf16": True}, {}, torch.bfloat16, False),
        ({"avx512_bf16": True}, {"dtype": torch.float32}, torch.float32, True),
        ({"avx2": True}, {"dtype": torch.bfloat16}, torch.bfloat16, False),
    ],
)
def test_embedded_drafter_runs_in_what_suits_the_processor(package, monkeypatch, capabilities, given, dtype, is_packed):
    folder, _ = save_embedded_pair(package / "hub_cards")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    drafter = BlockPilot.from_pretrained(**given).drafter
    assert drafter.dtype == dtype
    assert isinstance(drafter.fc, PackedLinear) is (is_packed and torch.backends.mkldnn.is_available())
    expected = DFlashDraftModel.from_pretrained(folder, dtype=dtype)
    assert same_weights(drafter, expected) and same_weights(drafter.to(torch.float32), expected.to(torch.float32))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch cannot pack weights")
def test_other_drafters_are_packed_when_it_is_asked_for(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    for drafter in (tmp_path, make_drafter(target)):
        assert type(BlockPilot.from_pretrained(drafter).drafter.fc) is nn.Linear
        assert type(BlockPilot.from_pretrained(drafter, pack=True).drafter.fc) is PackedLinear


# Policies


def test_policy_is_read_once_while_its_files_are_the_same(tmp_path):
    constant_policy(3).save_pretrained(tmp_path / "policy")
    first = load_policy(str(tmp_path / "policy"))
    assert type(first) is BlockPilotPolicy and not first.training
    assert load_policy(tmp_path / "policy") is first
    constant_policy(5).save_pretrained(tmp_path / "policy")
    second = load_policy(str(tmp_path / "policy"))
    assert second is not first and second.config.block_sizes == [5]
    assert load_policy(str(tmp_path / "policy")) is second


def test_policy_in_a_subfolder_is_read_again_when_its_weights_change(tmp_path):
    """The folder above does not change when a file below is written over."""
    folder = tmp_path / "repo" / "policy"
    constant_policy(3).save_pretrained(folder)
    first = load_policy(tmp_path / "repo", subfolder="policy")
    assert load_policy(tmp_path / "repo", subfolder="policy") is first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "block_sizes": [6]}))
    assert load_policy(tmp_path / "repo", subfolder="policy").config.block_sizes == [6]


def test_saved_policy_decides_as_the_original(target, drafter, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = constant_policy(3).config
        config.block_sizes = [2, 4, 8]
        policy = BlockPilotPolicy(config).eval()
    policy.save_pretrained(tmp_path)
    traces = [
        BlockPilot.from_pretrained(drafter, given)
        .generate(target, PROMPT, max_new_tokens=3, return_dict_in_generate=True)
        .blockpilot
        for given in (policy, tmp_path)
    ]
    assert traces[0].scores == traces[1].scores
    assert same_weights(load_policy(tmp_path), policy)


# The policy that a drafter names


def _named(target, folder, name):
    make_drafter(target, policy=name).save_pretrained(folder)
    return load_drafter(folder)


def test_relative_policy_folder_counts_from_the_drafters_own(target, tmp_path, monkeypatch):
    """A folder of that name in the working directory is another one."""
    constant_policy(3).save_pretrained(tmp_path / "drafter" / "policy")
    constant_policy(5).save_pretrained(tmp_path / "elsewhere" / "policy")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert policy_of_drafter(_named(target, tmp_path / "drafter", "policy")).config.block_sizes == [3]
    assert policy_of_drafter(_named(target, tmp_path / "drafter", "../elsewhere/policy")).config.block_sizes == [5]
    assert policy_of_drafter(_named(target, tmp_path / "other", "policy")).config.block_sizes == [5]


def test_drafter_and_its_policy_move_together(target, tmp_path):
    constant_policy(3).save_pretrained(tmp_path / "a" / "drafter" / "policy")
    _named(target, tmp_path / "a" / "drafter", "policy")
    (tmp_path / "a").rename(tmp_path / "b")
    moved = load_drafter(tmp_path / "b" / "drafter")
    assert moved.config.policy == "policy"
    assert policy_of_drafter(moved).config.block_sizes == [3]
    moved.save_pretrained(tmp_path / "c")
    assert load_drafter(tmp_path / "c").config.policy == "policy"


def test_policy_revision_is_for_the_hub_only(target, tmp_path):
    constant_policy(3).save_pretrained(tmp_path / "policy")
    named = make_drafter(target, policy=str(tmp_path / "policy"), policy_revision="abc")
    assert policy_of_drafter(named).config.block_sizes == [3]


def test_drafter_without_a_policy_has_none(drafter):
    assert policy_of_drafter(drafter) is None


def test_policy_that_cannot_be_found_is_told_with_the_way_out(target):
    named = make_drafter(target, policy="nobody/nothing")
    with pytest.raises(OSError, match=r"(?s)names the policy 'nobody/nothing', which cannot be loaded.*policy=False"):
        policy_of_drafter(named, local_files_only=True)


def test_auto_model_knows_both_types(drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "drafter")
    constant_policy(3).save_pretrained(tmp_path / "policy")
    assert type(AutoModel.from_pretrained(tmp_path / "drafter")) is DFlashDraftModel
    assert type(AutoModel.from_pretrained(tmp_path / "policy")) is BlockPilotPolicy

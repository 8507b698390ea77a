"""The recipe as remote code: the folder form, targets that hold the recipe, and everything without this package."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import (
    constant_policy,
    make_drafter,
    make_prompt,
    make_target,
    plain_generate,
    scripted_pilot,
    sorting_policy,
)
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from blockpilot_hf import BlockPilot, BlockPilotPolicy, DFlashDraftModel

SMALL, LARGE = make_prompt(10, seed=1), make_prompt(12, seed=2)
DICT = {"return_dict_in_generate": True}


def drafted(result):
    return [step.draft_ids for step in result.blockpilot.steps]


# The folder form


@pytest.mark.parametrize(
    "given", [{"inputs": SMALL}, {"input_ids": SMALL}, (SMALL,)], ids=["inputs", "input_ids", "first"]
)
def test_folder_asks_for_the_trust_flag_and_runs_with_it(target, drafter, recipe, given):
    args, kwargs = (given, {}) if isinstance(given, tuple) else ((), given)
    kwargs = {"assistant_model": drafter, "custom_generate": recipe, "max_new_tokens": 6, **kwargs}
    for flag in ({}, {"trust_remote_code": False}):
        with pytest.raises(ValueError, match=r"trust_remote_code=True"):
            target.generate(*args, **kwargs, **flag)
    result = target.generate(*args, **kwargs, trust_remote_code=True)
    assert torch.equal(result, plain_generate(target, SMALL, max_new_tokens=6))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_folder_form_uses_the_cache_it_is_given(target, drafter, recipe, name):
    cache = DynamicCache(config=target.config)
    result = target.generate(
        SMALL,
        assistant_model=drafter,
        custom_generate=recipe,
        trust_remote_code=True,
        max_new_tokens=8,
        **{name: cache},
        **DICT,
    )
    plain = plain_generate(target, SMALL, max_new_tokens=8, **DICT)
    assert result.cache is cache and cache.get_seq_length() == plain.cache.get_seq_length()
    assert torch.equal(result.sequences, plain.sequences)


def test_keywords_for_finding_the_recipe_stay_with_it(target, drafter, recipe, tmp_path):
    constant_policy(3).save_pretrained(tmp_path / "policy")
    where = {
        "revision": "main",
        "token": "a-token",
        "cache_dir": str(tmp_path),
        "local_files_only": True,
        "force_download": False,
        "proxies": {"https": "nowhere:1"},
        "repo_type": "model",
    }
    plain = plain_generate(target, SMALL, max_new_tokens=6)
    by_folder = {"assistant_model": drafter, "custom_generate": recipe, "trust_remote_code": True, **DICT}
    for policy in (None, str(tmp_path / "policy"), tmp_path / "policy"):
        result = target.generate(SMALL, policy=policy, max_new_tokens=6, **by_folder, **where)
        assert torch.equal(result.sequences, plain)
        assert result.blockpilot.block_size == (drafter.config.block_size if policy is None else 3)


def test_unknown_keyword_is_refused_as_by_plain_generate(target, drafter, recipe):
    by_folder = {"assistant_model": drafter, "custom_generate": recipe, "trust_remote_code": True}
    for extra in ({}, by_folder, {"custom_generate": BlockPilot(drafter)}):
        with pytest.raises(ValueError, match=r"`model_kwargs` are not used by the model: \['blok_size'\]"):
            target.generate(SMALL, blok_size=4, max_new_tokens=3, **extra)


def test_folder_form_without_a_fitting_drafter_says_what_is_missing(target, drafter, recipe):
    def call(**kwargs):
        return target.generate(SMALL, custom_generate=recipe, trust_remote_code=True, max_new_tokens=3, **kwargs)

    with pytest.raises(ValueError, match=r"`assistant_model` is missing. Pass a DFlash drafter"):
        call()
    for wrong in (make_target("llama"), "org/drafter"):
        with pytest.raises(TypeError, match=r"A drafter needs `config.target_layer_ids`.*got (LlamaForCausalLM|str)"):
            call(assistant_model=wrong)
    with pytest.raises(ValueError, match=r"hidden size is 16, the target's 32"):
        call(assistant_model=make_drafter(target, hidden_size=16))
    call(assistant_model=drafter)


@pytest.mark.parametrize("given", ["absolute", "trailing slash", "relative", "from inside"])
def test_recipe_folder_may_be_given_in_any_way(target, drafter, recipe, tmp_path, monkeypatch, given):
    shutil.copytree(recipe, tmp_path / "recipe-v0.1")
    monkeypatch.chdir(tmp_path / "recipe-v0.1" if given == "from inside" else tmp_path)
    folder = {
        "absolute": str(tmp_path / "recipe-v0.1"),
        "trailing slash": f"{tmp_path / 'recipe-v0.1'}/",
        "relative": "recipe-v0.1",
        "from inside": ".",
    }[given]
    result = target.generate(
        SMALL, assistant_model=drafter, custom_generate=folder, trust_remote_code=True, max_new_tokens=6
    )
    assert torch.equal(result, plain_generate(target, SMALL, max_new_tokens=6))


def test_folder_form_passes_settings_of_the_call_on(target, drafter, recipe):
    seen = []
    settings = {"max_new_tokens": 10, "do_sample": True, "temperature": 1.3, **DICT}
    by_folder = {"assistant_model": drafter, "custom_generate": recipe, "trust_remote_code": True}
    plain = plain_generate(target, SMALL, seed=3, **settings)
    torch.manual_seed(3)
    result = target.generate(SMALL, **by_folder, block_size=5, on_step=seen.append, time_steps=False, **settings)
    assert torch.equal(result.sequences, plain.sequences)
    assert [step.block_size for step in seen] == [5] * len(seen) and len(seen) == len(result.blockpilot.steps)
    assert all(step.draft_s is None for step in seen)
    # The choice of the option is visible in the random numbers that it uses.
    settings["adapt"] = "prompt"
    torch.manual_seed(3)
    target.generate(SMALL, **by_folder, draft_sampling=True, **settings)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    target.generate(SMALL, **by_folder, **settings)
    assert drawn != torch.rand(1)


# Classes that are not this package's


@pytest.fixture(scope="module")
def remote_pair(target, drafter, tmp_path_factory):
    """Drafter and policy of classes that remote code brought, and the local ones they were saved from."""
    root, policy = tmp_path_factory.mktemp("remote"), sorting_policy(target, SMALL, LARGE)
    drafter.save_pretrained(root / "drafter")
    policy.save_pretrained(root / "policy")
    loaded = []
    for name, own in (("drafter", DFlashDraftModel), ("policy", BlockPilotPolicy)):
        config = json.loads((root / name / "config.json").read_text())
        cls = get_class_from_dynamic_module(config["auto_map"]["AutoModel"], str(root / name))
        assert cls.__module__.startswith("transformers_modules.") and not issubclass(cls, own)
        loaded.append(cls.from_pretrained(root / name).eval())
    return (*loaded, policy)


def test_remote_drafter_and_policy_work_with_the_installed_pilot(target, drafter, remote_pair):
    remote_drafter, remote_policy, policy = remote_pair
    for ids, block_size in ((SMALL, 4), (LARGE, 8)):
        local = BlockPilot(drafter, policy).generate(target, ids, max_new_tokens=16, **DICT)
        for pilot in (BlockPilot(remote_drafter, remote_policy), BlockPilot.from_pretrained(remote_drafter, policy)):
            remote = target.generate(ids, custom_generate=pilot, max_new_tokens=16, **DICT)
            assert remote.blockpilot.block_size == block_size
            assert torch.equal(remote.sequences, plain_generate(target, ids, max_new_tokens=16))
            assert drafted(remote) == drafted(local)
            assert remote.blockpilot.scores == local.blockpilot.scores


def test_installed_drafter_and_policy_work_with_the_remote_recipe(target, drafter, remote_pair, recipe):
    """The recipe's own classes are others again."""
    remote_drafter, remote_policy, policy = remote_pair
    local = BlockPilot(drafter, policy).generate(target, SMALL, max_new_tokens=16, **DICT)
    for pair in ((drafter, policy), (remote_drafter, remote_policy), (drafter, remote_policy)):
        result = target.generate(
            SMALL,
            assistant_model=pair[0],
            policy=pair[1],
            custom_generate=recipe,
            trust_remote_code=True,
            max_new_tokens=16,
            **DICT,
        )
        assert torch.equal(result.sequences, local.sequences)
        assert drafted(result) == drafted(local)
        assert type(result.blockpilot).__module__.startswith("transformers_modules.")


# A target whose own folder holds the recipe


@pytest.fixture(scope="module")
def carrier(target, recipe, tmp_path_factory):
    """The target from a folder with the recipe: transformers replaces its `generate` on the object."""
    folder = tmp_path_factory.mktemp("target") / "with-recipe"
    target.save_pretrained(folder)
    shutil.copytree(Path(recipe) / "custom_generate", folder / "custom_generate")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert "generate" in vars(model), "transformers no longer replaces it, and these tests say nothing"
    return model


@pytest.mark.parametrize("first", [True, False], ids=["prompt first", "prompt by name"])
def test_target_with_the_recipe_decodes_with_a_drafter_and_plainly_without(target, drafter, carrier, first):
    """The replaced method took no positional prompt: it came where the recipe's `model` was expected."""
    args, kwargs = ((SMALL,), {}) if first else ((), {"input_ids": SMALL})
    plain = plain_generate(target, SMALL, max_new_tokens=12)
    steps = []
    result = carrier.generate(*args, assistant_model=drafter, on_step=steps.append, max_new_tokens=12, **kwargs)
    assert torch.equal(result, plain) and steps
    assert torch.equal(carrier.generate(*args, max_new_tokens=12, **kwargs), plain)


def test_target_with_the_recipe_takes_a_pilot_without_recursion(target, drafter, carrier):
    policy = constant_policy(3)
    plain = plain_generate(target, SMALL, max_new_tokens=12)
    for call in (
        lambda **kw: BlockPilot(drafter).generate(carrier, SMALL, **kw),
        lambda **kw: carrier.generate(SMALL, custom_generate=BlockPilot(drafter), **kw),
        lambda **kw: carrier.generate(SMALL, assistant_model=drafter, **kw),
    ):
        for ours, block_size in (({"policy": policy}, 3), ({"block_size": 5}, 5), ({}, drafter.config.block_size)):
            steps = []
            result = call(max_new_tokens=12, on_step=steps.append, **ours, **DICT)
            assert torch.equal(result.sequences, plain)
            assert result.blockpilot.block_size == block_size
            assert steps == result.blockpilot.steps


def test_target_with_the_recipe_takes_another_recipe_folder(target, drafter, carrier, recipe):
    """The trust flag, and what belongs to the recipe, reach the second look-up."""
    by_folder = {
        "assistant_model": drafter,
        "custom_generate": recipe,
        "block_size": 3,
        "local_files_only": True,
        **DICT,
    }
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        carrier.generate(SMALL, max_new_tokens=8, **by_folder)
    result = carrier.generate(SMALL, max_new_tokens=8, trust_remote_code=True, **by_folder)
    assert result.blockpilot.block_size == 3
    assert torch.equal(result.sequences, plain_generate(target, SMALL, max_new_tokens=8))


def test_target_with_the_recipe_records_no_gradients(drafter, carrier):
    kwargs = {"max_new_tokens": 6, "output_scores": True, "output_logits": True, **DICT}
    for extra in ({}, {"assistant_model": drafter}, {"custom_generate": BlockPilot(drafter)}):
        result = carrier.generate(SMALL, **kwargs, **extra)
        assert not any(tensor.requires_grad for tensor in (*result.scores, *result.logits))


def test_target_with_the_recipe_refuses_our_keywords_without_a_drafter(carrier):
    """They would do nothing."""
    with pytest.raises(ValueError, match=r"not used by the model: \['block_size'\]"):
        carrier.generate(SMALL, block_size=4, max_new_tokens=3)
    with pytest.raises(ValueError, match="`assistant_model` is missing"):
        carrier.generate(SMALL, assistant_model=None, max_new_tokens=3)


def test_target_with_the_recipe_wrapped_by_peft(drafter, recipe, target, tmp_path):
    peft = pytest.importorskip("peft")
    target.save_pretrained(tmp_path)
    shutil.copytree(Path(recipe) / "custom_generate", tmp_path / "custom_generate")
    base = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    torch.manual_seed(0)
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, lora).eval()
    plain = adapted.generate(input_ids=SMALL, max_new_tokens=12)
    assert not torch.equal(plain, plain_generate(target, SMALL, max_new_tokens=12))
    result = scripted_pilot(base, plain, 0.5).generate(adapted, SMALL, max_new_tokens=12, **DICT)
    assert torch.equal(result.sequences, plain) and result.blockpilot.acceptance_length > 1
    assert torch.equal(adapted.generate(input_ids=SMALL, assistant_model=drafter, max_new_tokens=12), plain)


# Without the package and without a network

ABROAD = """
    import json, socket, sys

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "blockpilot_hf":
                raise ModuleNotFoundError(f"{name} is not installed here")

    sys.meta_path.insert(0, Refuse())
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(repr(args))
        raise OSError("no network")

    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse

    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    torch.set_num_threads(1)
    target_folder, carrier_folder, drafter_folder, policy_folder, recipe = sys.argv[1:]
    trusted = {"trust_remote_code": True}
    target = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    carrier = AutoModelForCausalLM.from_pretrained(carrier_folder, **trusted).eval()
    drafter = AutoModel.from_pretrained(drafter_folder, **trusted).eval()
    policy = AutoModel.from_pretrained(policy_folder, **trusted).eval()
    folder = {"custom_generate": recipe, **trusted}
    result = {"classes": [type(model).__module__ for model in (drafter, policy)]}
    prompts = json.loads(sys.stdin.read())

    def record(name, call, **kwargs):
        result[name] = []
        for ids in prompts:
            output = call(torch.tensor([ids]), assistant_model=drafter, max_new_tokens=16,
                          return_dict_in_generate=True, **kwargs)
            trace = output.blockpilot
            result[name].append([output.sequences[0].tolist(), trace.block_size,
                                 [list(step.draft_ids) for step in trace.steps]])

    record("policy object", target.generate, policy=policy, **folder)
    record("policy folder", target.generate, policy=policy_folder, **folder)
    record("policy named by the drafter", target.generate, **folder)
    record("only local files", target.generate, local_files_only=True, **folder)
    record("target with the recipe", carrier.generate)
    result["attempts"] = attempts
    result["foreign"] = [name for name in sys.modules if name.split(".")[0] == "blockpilot_hf"]
    print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def abroad(target, drafter, recipe, tmp_path_factory):
    """What another machine gives that has the folders, transformers and torch."""
    root = tmp_path_factory.mktemp("abroad")
    policy = sorting_policy(target, SMALL, LARGE)
    target.save_pretrained(root / "target")
    target.save_pretrained(root / "carrier")
    shutil.copytree(Path(recipe) / "custom_generate", root / "carrier" / "custom_generate")
    make_drafter(target, policy="policy-v0.1").save_pretrained(root / "drafter")
    policy.save_pretrained(root / "drafter" / "policy-v0.1")
    dropped = ("PYTHONPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_MODULES_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment.update(HF_HOME=str(root / "home"), OMP_NUM_THREADS="1")
    folders = [root / "target", root / "carrier", root / "drafter", root / "drafter" / "policy-v0.1", recipe]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ABROAD), *map(str, folders)],
        input=json.dumps([SMALL[0].tolist(), LARGE[0].tolist()]),
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    expected = []
    for ids in (SMALL, LARGE):
        local = BlockPilot(drafter, policy).generate(target, ids, max_new_tokens=16, **DICT)
        plain = plain_generate(target, ids, max_new_tokens=16)[0].tolist()
        expected.append([plain, local.blockpilot.block_size, [list(draft) for draft in drafted(local)]])
    assert [size for _, size, _ in expected] == [4, 8]
    return json.loads(run.stdout.splitlines()[-1]), expected


@pytest.mark.parametrize(
    "form",
    [
        "policy object",
        "policy folder",
        "policy named by the drafter",
        "only local files",
        "target with the recipe",
    ],
)
def test_without_the_package_text_block_sizes_and_drafts_are_the_same(abroad, form):
    result, expected = abroad
    assert result[form] == expected


def test_without_the_package_no_part_of_it_is_loaded(abroad):
    result, _ = abroad
    assert result["foreign"] == []
    assert all(module.startswith("transformers_modules.") for module in result["classes"])


def test_no_call_reaches_for_the_network(abroad):
    """Nor does loading, although nothing told the process to stay offline."""
    result, _ = abroad
    assert result["attempts"] == []

"""The real repositories on a local Hub: pushed by the command, used by machines with and without this package."""

import copy
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index
from local_hub import LocalHub
from python_process import PythonSession, bare_python, is_error
from test_docs import python_blocks

from blockpilot_hf import loading
from blockpilot_hf.card_parts import BASE_MODEL
from blockpilot_hf.embedded import (
    EMBEDDED_DRAFTER_NAME,
    EMBEDDED_PAPER_POLICY_NAME,
    EMBEDDED_POLICY_NAME,
    embedded_target_dir,
)
from blockpilot_hf.export import RECIPE_NAME, REPOSITORIES
from blockpilot_hf.export_checks import LICENSES

OWNER = "ada"
DRAFTER, POLICY, PAPER, RECIPE = (
    f"{OWNER}/{name}" for name in (EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME, RECIPE_NAME)
)
CARDS = Path(loading.__file__).resolve().parent.parent / "hub_cards"

# What all machines run. `load` gives drafter and policies; without the package by code of the Hub.
DECODE = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(target_name, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(target_name)
drafter = AutoModel.from_pretrained(drafter_name, dtype="float32", trust_remote_code=True)
policy, paper = (AutoModel.from_pretrained(name, trust_remote_code=True) for name in policy_names)
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "A box holds 12 eggs. How many eggs are in 7 boxes?"}],
    add_generation_prompt=True, return_dict=True, return_tensors="pt",
)
result = {"classes": [type(model).__module__ for model in (drafter, policy, paper)]}
forms = {"its own": {}, "object": {"policy": policy}, "paper": {"policy": paper}, "none": {"policy": False}}
for name, given in forms.items():
    output = target.generate(
        **inputs, assistant_model=drafter, custom_generate=recipe_name, trust_remote_code=True, max_new_tokens=16,
        do_sample=False, return_dict_in_generate=True, **given,
    )
    trace = {key: value for key, value in output.blockpilot.to_dict().items() if not key.endswith("_s")}
    trace["steps"] = [{key: value for key, value in step.items() if not key.endswith("_s")} for step in trace["steps"]]
    result[name] = [output.sequences[0].tolist(), trace]
result["plain"] = target.generate(**inputs, max_new_tokens=16, do_sample=False)[0].tolist()
if longer:  # as long as in the snippets of the cards
    plain = target.generate(**inputs, max_new_tokens=64, do_sample=False)
    result["answer"] = tokenizer.decode(plain[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
result["project"] = sorted(name for name in sys.modules if name.split(".")[0] == "blockpilot_hf")
result["remote"] = sorted(name for name in sys.modules if name.startswith("transformers_modules."))
if copies is not None:
    drafter.save_pretrained(copies + "/drafter")
    policy.save_pretrained(copies + "/policy")
    paper.save_pretrained(copies + "/paper")
    target.save_pretrained(copies + "/target")
    tokenizer.save_pretrained(copies + "/target")
"""
NAMES = {"drafter_name": DRAFTER, "policy_names": [POLICY, PAPER], "recipe_name": RECIPE, "target_name": BASE_MODEL}
FORMS = ("its own", "object", "paper", "none")

PUSH = """
import contextlib, io
from blockpilot_hf import cli
out = io.StringIO()
with contextlib.redirect_stdout(out):
    assert cli._run(["push", "--namespace", owner]) == 0
result = out.getvalue()
"""


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def installed(hub, root):
    """A machine with this package, which may write to the Hub."""
    environment = hub.environment(root / "installed", token=hub.ada)
    with PythonSession(environment, is_bare=False) as session:
        yield session


@pytest.fixture(scope="module")
def hub():
    """The Hub with the target under the name of the original, whose place it takes in the cards' snippets."""
    pytest.importorskip("gguf")
    with LocalHub() as hub:
        hub.ada = hub.add_user(OWNER)
        hub.put(BASE_MODEL, {p: c for p, c in tree(embedded_target_dir()).items() if not p.startswith(".")})
        yield hub


@pytest.fixture(scope="module")
def pushed(hub, installed):
    """What `blockpilot push` printed, after a first and a second time."""
    first = installed.run(PUSH, owner=OWNER)
    return first, installed.run(PUSH, owner=OWNER)


@pytest.fixture(scope="module")
def machines(hub, pushed, installed, root):
    """What each machine got, and what it asked the Hub for."""
    copies = root / "copies"
    found, asked = {}, {}
    for name, offline in (("online", False), ("offline", True)):
        with PythonSession(hub.environment(root / "stranger", offline=offline)) as session, hub.watch() as requests:
            found[name] = session.run(DECODE, longer=False, copies=None if offline else str(copies), **NAMES)
        asked[name] = list(requests)
    found["installed"] = installed.run(DECODE, longer=True, copies=None, **NAMES)
    for path, content in hub.files(RECIPE).items():
        (copies / "recipe" / path).parent.mkdir(parents=True, exist_ok=True)
        (copies / "recipe" / path).write_bytes(content)
    local = {
        "drafter_name": str(copies / "drafter"),
        "policy_names": [str(copies / "policy"), str(copies / "paper")],
        "recipe_name": str(copies / "recipe"),
        "target_name": str(copies / "target"),
    }
    # The copied drafter goes on naming the Hub's policy; a folder beside it is named as a user would name it.
    config = json.loads((copies / "drafter" / "config.json").read_text())
    assert config["policy"] == POLICY and config["policy_revision"] == hub.repository(POLICY).at("main").oid
    config.update(policy="../policy", policy_revision=None)
    (copies / "drafter" / "config.json").write_text(json.dumps(config))
    with PythonSession(hub.environment(root / "empty")) as session, hub.watch() as requests:
        found["copies"] = session.run(DECODE, longer=False, copies=None, **local)
    asked["copies"] = list(requests)
    return found, asked


def test_a_push_sends_all_and_a_second_one_nothing(hub, pushed):
    first, second = pushed
    for name in REPOSITORIES:
        assert f"{OWNER}/{name}" in first
        assert len(hub.commits(f"{OWNER}/{name}")) == 2, "not the first commit and one more"
    assert second.count("unchanged") >= len(REPOSITORIES) and " new" not in second
    assert sum(len(hub.files(name)["model.safetensors"]) for name in (DRAFTER, POLICY, PAPER)) <= 30e6


@pytest.mark.parametrize("machine", ["online", "offline", "copies"])
@pytest.mark.parametrize("form", FORMS)
def test_a_machine_without_the_package_gives_the_text_and_the_trace_of_one_with_it(machines, machine, form):
    found, _ = copy.deepcopy(machines)
    sequence, trace = found[machine][form]
    expected, other = found["installed"][form]
    # Where weights lie in memory, which is another place for copies, has a say in the last digits of a product.
    assert (trace.pop("scores") or {}) == pytest.approx(other["scores"] or {}, rel=1e-3)
    assert trace == {name: value for name, value in other.items() if name != "scores"}
    assert sequence == expected == found[machine]["plain"]
    assert (other["scores"] is None) == (form == "none")


def test_the_forms_are_different_ways_to_choose(machines):
    found, _ = machines
    traces = {form: found["online"][form][1] for form in FORMS}
    assert traces["its own"] == traces["object"]
    assert traces["paper"]["acceptance_length"] > 1
    assert traces["paper"]["adapt"] == "prompt" and traces["its own"]["adapt"] == "flight"
    assert set(traces["paper"]["scores"]) != set(traces["its own"]["scores"])


def test_no_part_of_the_package_runs_where_it_is_not_and_nothing_remote_where_it_is(machines):
    found, _ = machines
    for machine in ("online", "offline", "copies"):
        assert found[machine]["project"] == []
        assert all(module.startswith("transformers_modules.") for module in found[machine]["classes"])
    assert all(module.startswith("blockpilot_hf.") for module in found["installed"]["classes"])
    # The recipe was asked for by its id and trusted; the models' own code was not run.
    assert any(name.endswith(".custom_generate.generate") for name in found["installed"]["remote"])
    assert not [name for name in found["installed"]["remote"] if "DFlash" in name or "BlockPilot" in name]


def test_offline_and_from_copies_nothing_is_asked_for(machines):
    _, asked = machines
    assert asked["online"] and asked["offline"] == asked["copies"] == []


# Cards


@pytest.mark.parametrize("name", REPOSITORIES)
def test_front_matter_is_that_of_the_libraries_and_whole(name):
    text = (CARDS / name / "README.md").read_text(encoding="utf-8")
    data, written = ModelCard(text).data, metadata_load(CARDS / name / "README.md")
    assert ModelCardData(**data.__dict__).to_yaml() == text.split("---\n")[1].rstrip("\n")
    assert data.license in LICENSES and data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    assert "custom_generate" in data.tags and len(data.tags) == len(set(data.tags))
    assert "null" not in text.split("---\n")[1] and not re.search(r"[\s\"'(](/|~/|[A-Z]:\\)\w", text.split("---\n")[1])
    if name == RECIPE_NAME:
        assert data.eval_results is None
        return
    assert data.base_model == BASE_MODEL and data.base_model_relation == "adapter" and data.datasets
    assert eval_results_to_model_index(data.model_name, data.eval_results) == written["model-index"]
    assert len(written["model-index"][0]["results"]) == len({result.dataset_config for result in data.eval_results})
    for result in data.eval_results:
        low, high = result.metric_args["interval_95"]
        assert low <= result.metric_value <= high and result.metric_args["num_prompts"] >= 19
        assert result.source_url.endswith(f"/{name}/blob/main/{result.source_name}")
        assert (CARDS / name / result.source_name).is_file()


@pytest.mark.parametrize("name", REPOSITORIES)
def test_links_of_a_pushed_card_lead_to_the_namespace(hub, pushed, name):
    card = hub.files(f"{OWNER}/{name}")["README.md"].decode()
    assert "NAMESPACE" not in card and "](../" not in card
    for other in set(re.findall(rf"huggingface\.co/{OWNER}/([\w.-]+)", card)):
        assert other in REPOSITORIES


def snippets(hub, name):
    return python_blocks(hub.files(f"{OWNER}/{name}")["README.md"].decode())


@pytest.mark.parametrize("name", REPOSITORIES)
def test_the_first_snippet_of_a_card_runs_as_pasted_without_the_package(hub, machines, root, name):
    """In one cache for all of them, where the models lie already."""
    block = snippets(hub, name)[0]
    assert "blockpilot_hf" not in block
    printed = bare_python(block, hub.environment(root / "stranger")).stdout
    answer, _, figures = printed.rstrip().rpartition("\n")
    assert re.fullmatch(r"(10|[1-9]) \d\.\d+", figures)
    assert answer.strip() == machines[0]["installed"]["answer"].strip()


@pytest.mark.parametrize("name", [name for name in REPOSITORIES if name != RECIPE_NAME])
def test_the_other_snippets_of_a_card_run_as_pasted_with_the_package(hub, pushed, name, capsys):
    blocks = snippets(hub, name)[1:]
    assert blocks and all("from blockpilot_hf import" in block for block in blocks)
    for block in blocks:
        exec(compile(block, "<block>", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()


# What goes wrong

ERRORS = """
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
import torch

target = AutoModelForCausalLM.from_pretrained(target_name, dtype="float32")
drafter = AutoModel.from_pretrained(drafter_name, dtype="float32", trust_remote_code=True)
ids = torch.tensor([[1, 2, 3]])

def decode(**kwargs):
    kwargs = {"custom_generate": recipe_name, "trust_remote_code": True, "assistant_model": drafter, **kwargs}
    return target.generate(ids, max_new_tokens=2, do_sample=False, **kwargs)

result = {
    "untrusted recipe": raised(decode, trust_remote_code=False),
    "untrusted policy": raised(AutoModel.from_pretrained, policy_names[0], trust_remote_code=False),
    "missing recipe": raised(decode, custom_generate="ada/none"),
    "repository without the folder": raised(decode, custom_generate=drafter_name),
    "missing policy": raised(decode, policy="ada/none"),
    "policy that is a drafter": raised(decode, policy=drafter_name),
    "missing drafter": raised(AutoModel.from_pretrained, "ada/none", trust_remote_code=True),
    "missing revision": raised(AutoModel.from_pretrained, policy_names[0], revision="none", trust_remote_code=True),
    "wrong token": raised(
        AutoModel.from_pretrained, drafter_name, token="hf_wrong", cache_dir="wrong", trust_remote_code=True
    ),
    "private": raised(AutoModel.from_pretrained, "ada/private", trust_remote_code=True),
    "private policy": raised(decode, policy="ada/private"),
    "works": raised(decode),
}
"""


def test_every_mistake_is_one_clear_error(hub, machines, root):
    hub.put("ada/private", {"config.json": b"{}"}, private=True)
    with PythonSession(hub.environment(root / "stranger"), cwd=root) as session:
        found = session.run(ERRORS, **NAMES)
    assert found.pop("works") is None
    for name in ("untrusted recipe", "untrusted policy"):
        assert is_error(found.pop(name), "ValueError", None, "trust_remote_code=True")
    assert is_error(found.pop("repository without the folder"), "OSError", None, "custom_generate", DRAFTER)
    assert is_error(found.pop("missing revision"), "OSError", None, "not a valid git identifier", POLICY)
    assert is_error(found.pop("missing policy"), "OSError", None, "The policy 'ada/none' cannot be loaded")
    assert is_error(found.pop("private policy"), "OSError", None, "The policy 'ada/private'", "private repository")
    assert is_error(found.pop("policy that is a drafter"), "ValueError", None, f"'{DRAFTER}' is no BlockPilot policy")
    assert is_error(found.pop("wrong token"), "OSError", None, "Invalid credentials in Authorization header")
    for name, repository in (("missing recipe", "none"), ("missing drafter", "none"), ("private", "private")):
        assert is_error(found.pop(name), "OSError", None, f"ada/{repository}")
    assert not found

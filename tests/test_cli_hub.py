"""`blockpilot push` and `push_to_hub` against a local Hub, and what a machine without this package makes of it."""

import itertools
import json
import shutil

import pytest
import torch
from conftest import constant_policy, make_prompt, make_target, plain_generate
from hub_mirror import save_mirror, use_mirror
from huggingface_hub import ModelCard
from python_process import PythonSession, bare_python

from blockpilot_hf import BlockPilot
from blockpilot_hf.embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME
from blockpilot_hf.export import REPOSITORIES, files_of, fill_in
from blockpilot_hf.loading import load_drafter, load_policy

DRAFTER, POLICY, PAPER, RECIPE = EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME, "blockpilot"

# `broken` is code that goes first, to have something go wrong.
COMMAND = """
import contextlib, io, os
from huggingface_hub import HfApi, constants
from blockpilot_hf import cli, loading

loading.__file__ = place
os.environ.pop("HF_TOKEN", None)
if token:
    os.environ["HF_TOKEN"] = token
out, err = io.StringIO(), io.StringIO()
undo = contextlib.ExitStack()
with undo, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    exec(broken)
    status = cli._run(arguments)
result = [status, out.getvalue(), err.getvalue()]
"""


@pytest.fixture(scope="module")
def session(shared_hub, tmp_path_factory):
    """One process with this package for all pushes."""
    with PythonSession(shared_hub.environment(tmp_path_factory.mktemp("push") / "home"), is_bare=False) as session:
        yield session


@pytest.fixture(scope="module")
def made_mirror(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return use_mirror(patch, tmp_path_factory.mktemp("made"))


@pytest.fixture
def mirror(made_mirror, tmp_path):
    shutil.copytree(made_mirror, tmp_path / "hub_cards")
    return tmp_path / "hub_cards"


_numbers = itertools.count()


@pytest.fixture
def user(shared_hub):
    """Name and token of a user of this test alone."""
    name = f"user{next(_numbers)}"
    return name, shared_hub.add_user(name)


@pytest.fixture
def push(session, mirror, user):
    """`push(*arguments)` to `(status, stdout, stderr)`, to the user's namespace with their token by default."""

    def run(*arguments, token=user[1], namespace=user[0], broken=""):
        place = str(mirror.parent / "package" / "loading.py")
        arguments = ["push", "--namespace", namespace, *arguments]
        return tuple(session.run(COMMAND, place=place, token=token, arguments=arguments, broken=broken))

    return run


def heads(hub, namespace, revision="main"):
    """Newest commit of every repository that is there."""
    found = {}
    for name in REPOSITORIES:
        try:
            found[name] = hub.repository(f"{namespace}/{name}").at(revision).oid
        except KeyError:
            continue
    return found


def visible(hub, repo_id, revision="main"):
    return {path: content for path, content in hub.files(repo_id, revision).items() if not path.startswith(".")}


def expected(mirror, name, namespace, tmp_path, policy_revision=None):
    """The mirror with the namespace filled in."""
    folder = tmp_path / "expected" / name
    shutil.copytree(mirror / name, folder)
    fill_in(folder, namespace, policy_revision)
    return {path: (folder / path).read_bytes() for path in files_of(folder)}


def error_of(printed):
    status, _, err = printed
    assert status in (1, 2) and err.startswith("error: ") and err.count("\n") == 1, printed
    return err


# What is uploaded


def test_first_push_makes_each_repository_in_one_commit_and_the_next_push_none(
    shared_hub, push, user, mirror, tmp_path
):
    status, out, err = push()
    assert (status, err) == (0, "")
    before = heads(shared_hub, user[0])
    assert set(before) == set(REPOSITORIES)
    for name in REPOSITORIES:
        repo_id = f"{user[0]}/{name}"
        pinned = before[POLICY] if name == DRAFTER else None
        assert visible(shared_hub, repo_id) == expected(mirror, name, user[0], tmp_path, pinned)
        assert len(shared_hub.commits(repo_id)) == 2  # the first one made the repository
        # Long addresses are wrapped.
        assert f"{repo_id}:{shared_hub.endpoint}/{repo_id}/commit/{before[name]}" in "".join(out.split())
        assert not shared_hub.repository(repo_id).private
        for path, content in visible(shared_hub, repo_id).items():
            assert str(mirror.parent).encode() not in content and b"NAMESPACE/" not in content, (name, path)
    assert "model.safetensors" in out and "new" in out and "unchanged" not in out
    config = json.loads(shared_hub.files(f"{user[0]}/{POLICY}")["config.json"])
    assert config["drafter_name_or_path"] == f"{user[0]}/{DRAFTER}"

    with shared_hub.watch() as requests:
        status, out, err = push()
    assert (status, err) == (0, "") and heads(shared_hub, user[0]) == before
    assert {request.method for request in requests} <= {"GET", "HEAD"}
    for name in REPOSITORIES:
        assert f"{user[0]}/{name}: unchanged" in out


def test_a_changed_card_is_one_commit_of_its_repository_and_of_no_other(shared_hub, push, user, mirror):
    """The drafter goes on naming the commit that holds the same policy."""
    push()
    before = heads(shared_hub, user[0])
    for name in (POLICY, RECIPE):
        with open(mirror / name / "README.md", "a") as file:
            file.write("\nOne more sentence.\n")
    status, out, _ = push()
    after = heads(shared_hub, user[0])
    assert status == 0 and out.count("1 changed") == 2
    assert {one for one in REPOSITORIES if after[one] != before[one]} == {POLICY, RECIPE}
    for name in (POLICY, RECIPE):
        assert shared_hub.commits(f"{user[0]}/{name}")[1].oid == before[name]


def test_a_changed_policy_is_named_by_the_drafter_by_its_new_commit(shared_hub, push, user, mirror):
    pair = ["--repos", f"{POLICY},{DRAFTER}"]
    push(*pair)
    before = heads(shared_hub, user[0])
    config = json.loads((mirror / POLICY / "config.json").read_text())
    (mirror / POLICY / "config.json").write_text(json.dumps({**config, "blockpilot_version": "9.9"}))
    status, out, _ = push(*pair)
    after = heads(shared_hub, user[0])
    assert status == 0 and "names the coming commit of its policy" in out
    assert all(after[name] != before[name] for name in (POLICY, DRAFTER))
    drafter = json.loads(shared_hub.files(f"{user[0]}/{DRAFTER}")["config.json"])
    assert (drafter["policy"], drafter["policy_revision"]) == (f"{user[0]}/{POLICY}", after[POLICY])
    assert push(*pair)[1].count(": unchanged") == 2 and heads(shared_hub, user[0]) == after


def test_files_that_are_gone_here_go_there_in_the_same_commit_and_hidden_ones_stay(shared_hub, push, user, mirror):
    repo_id = f"{user[0]}/{POLICY}"
    push("--repos", POLICY)
    shared_hub.put(repo_id, {"old.py": b"", ".eval_results/x.yaml": b"", "custom/older.json": b"{}"})
    (mirror / POLICY / "record.json").unlink()
    before = shared_hub.commits(repo_id)
    status, out, _ = push("--repos", POLICY)
    assert status == 0 and "3 removed" in out
    assert len(shared_hub.commits(repo_id)) == len(before) + 1
    files = shared_hub.files(repo_id)
    assert ".eval_results/x.yaml" in files and not {"old.py", "custom/older.json", "record.json"} & files.keys()
    assert heads(shared_hub, user[0]).keys() == {POLICY}


def test_a_branch_is_made_and_pushed_to_and_main_stays_as_it_is(shared_hub, push, user, mirror):
    push("--repos", f"{POLICY},{DRAFTER},{PAPER}")
    main = heads(shared_hub, user[0])
    (mirror / POLICY / "record.json").write_text("{}")
    for _ in range(2):
        assert push("--revision", "v1.0/next", "--repos", f"{POLICY},{DRAFTER}")[0] == 0
    assert heads(shared_hub, user[0]) == main
    assert shared_hub.files(f"{user[0]}/{POLICY}", "v1.0/next")["record.json"] == b"{}"
    assert len(shared_hub.commits(f"{user[0]}/{POLICY}", "v1.0/next")) == 3
    assert len(shared_hub.commits(f"{user[0]}/{DRAFTER}", "v1.0/next")) == 2  # as on main: the same policy is named
    assert "v1.0/next" not in shared_hub.repository(f"{user[0]}/{PAPER}").branches


def test_private_repositories_are_private_and_stay_so(shared_hub, push, user):
    assert push("--private", "--repos", POLICY)[0] == 0
    assert shared_hub.repository(f"{user[0]}/{POLICY}").private
    for arguments in (["--private"], []):
        assert f"{user[0]}/{POLICY}: unchanged" in push(*arguments, "--repos", POLICY)[1]
    assert shared_hub.repository(f"{user[0]}/{POLICY}").private


def test_nothing_that_should_be_private_goes_to_a_public_repository(shared_hub, push, user, mirror):
    push("--repos", POLICY)
    before = heads(shared_hub, user[0])
    (mirror / POLICY / "record.json").write_text('{"secret": 1}')
    message = error_of(push("--private", "--repos", POLICY))
    assert f"{user[0]}/{POLICY} is there and public" in message and "leave `--private` out" in message
    assert heads(shared_hub, user[0]) == before


# Some repositories


def test_a_drafter_alone_needs_its_policy_on_the_hub(shared_hub, push, user):
    message = error_of(push("--repos", DRAFTER))
    assert f"names its policy {user[0]}/{POLICY}, which is not on the Hub" in message
    assert f"`--repos {POLICY},{DRAFTER}`" in message and heads(shared_hub, user[0]) == {}
    assert push("--repos", POLICY)[0] == 0 and push("--repos", DRAFTER)[0] == 0
    config = json.loads(shared_hub.files(f"{user[0]}/{DRAFTER}")["config.json"])
    assert config["policy_revision"] == heads(shared_hub, user[0])[POLICY]
    assert f"{user[0]}/{DRAFTER}: unchanged" in push("--repos", DRAFTER)[1]


def test_a_repository_of_that_name_that_holds_something_else_is_left_alone(shared_hub, push, user):
    shared_hub.put(f"{user[0]}/{RECIPE}", {"flight.csv": b"1", "README.md": b"My flights."})
    before = shared_hub.files(f"{user[0]}/{RECIPE}")
    message = error_of(push("--repos", f"{RECIPE},{PAPER}"))
    assert (
        f"{user[0]}/{RECIPE} is there and holds something else (flight.csv, no custom_generate/generate.py)" in message
    )
    assert shared_hub.files(f"{user[0]}/{RECIPE}") == before and list(heads(shared_hub, user[0])) == [RECIPE]
    shared_hub.put(f"{user[0]}/{RECIPE}", {}, delete=("flight.csv",))  # a new one with a card that was begun
    assert push("--repos", RECIPE)[0] == 0


# Without uploading


def test_a_dry_run_shows_what_would_change_and_needs_no_token(shared_hub, push, user, mirror):
    pair = ["--repos", f"{POLICY},{DRAFTER}"]
    with shared_hub.watch() as requests:
        status, out, err = push("--dry-run", *pair, token=None)
    assert (status, err) == (0, "") and "nothing was uploaded" in out and "9 new" in out
    assert {request.method for request in requests} == {"GET"} and not any(r.has_token for r in requests)
    assert heads(shared_hub, user[0]) == {}
    push(*pair)
    before = heads(shared_hub, user[0])
    (mirror / POLICY / "record.json").write_text("{}")
    with open(mirror / DRAFTER / "README.md", "a") as file:
        file.write("More.\n")
    status, out, err = push("--dry-run", *pair, token=None)
    assert (status, err) == (0, "") and out.count("1 changed") == 2
    assert heads(shared_hub, user[0]) == before


def test_a_dry_run_without_a_network_says_that_nothing_was_compared(push, user):
    offline = "from unittest import mock; undo.enter_context(mock.patch.object(constants, 'HF_HUB_OFFLINE', True))"
    status, out, err = push("--dry-run", "--repos", POLICY, token=None, broken=offline)
    assert (status, err) == (0, "") and "not compared with the Hub: HF_HUB_OFFLINE is set" in out
    assert "9 not compared" in out
    message = error_of(push(broken=offline))
    assert "HF_HUB_OFFLINE is set" in message and "Unset it to push" in message


def test_what_is_unfit_is_told_before_anything_is_made(shared_hub, push, user, mirror):
    (mirror / DRAFTER / "record.json").write_text('{"command": "blockpilot sweep /home/me/texts"}')
    for arguments in (["--dry-run"], []):
        message = error_of(push(*arguments, "--repos", f"{POLICY},{DRAFTER}"))
        assert f"{DRAFTER} cannot be pushed: record.json names '/home/me/texts'" in message
    assert heads(shared_hub, user[0]) == {}


# What goes wrong


def test_tokens_that_do_not_do_are_told_apart(shared_hub, push, user):
    reader = shared_hub.add_user(user[0], "read")
    for token, arguments, parts in (
        (None, [], ("needs a token that may write", "hf auth login", "HF_TOKEN", "--token")),
        ("hf_wrong", [], ("The Hub does not know the token", "Invalid user token")),
        (None, ["--token", "hf_wrong"], ("The Hub does not know the token", "Invalid user token")),
        (reader, [], (f"The token of {user[0]} may only read", "/settings/tokens")),
        (shared_hub.bob, [], (f"The token of bob may not write to {user[0]}", "namespaces are bob")),
    ):
        message = error_of(push(*arguments, token=token))
        assert all(part in message for part in parts), message
    assert heads(shared_hub, user[0]) == {}
    assert push("--token", user[1], "--repos", PAPER, token=None)[0] == 0


def test_members_push_to_their_organization(shared_hub, push):
    assert push("--repos", POLICY, namespace="team", token=shared_hub.member)[0] == 0
    assert list(heads(shared_hub, "team")) == [POLICY]


@pytest.mark.parametrize("namespace", ["", "a/b", "a b", "-x", "https://huggingface.co/ada"])
def test_an_impossible_namespace_is_refused_before_the_hub_is_asked(shared_hub, push, namespace):
    with shared_hub.watch() as requests:
        assert "takes the name of a user or an organization" in error_of(push(namespace=namespace))
    assert requests == []


def test_unknown_repositories_are_refused_before_the_hub_is_asked(shared_hub, push):
    with shared_hub.watch() as requests:
        assert "There is no repository 'drafter'. Those of this package are " in error_of(push("--repos", "drafter"))
    assert requests == []


@pytest.mark.parametrize(
    ("failure", "parts"),
    [
        (("POST", "/api/repos/create", 403), ("The token may not write there",)),
        (("POST", "/commit/", 412), ("Someone else changed the repository in the meantime. Push again",)),
        (("GET", "/api/whoami-v2", None), ("cannot be reached", "Check the network and HF_ENDPOINT")),
        (("POST", "/preupload/", 400), ("The Hub refused", "a failure made for a test")),
    ],
)
def test_what_the_hub_refuses_is_one_sentence_with_what_to_do(shared_hub, push, user, failure, parts):
    method, pattern, status = failure
    shared_hub.fail(method, pattern, status=status)
    _, _, err = push("--repos", POLICY)
    message = err.splitlines()[-1]
    assert message.startswith("error: ") and all(part in message for part in parts), err
    assert push("--repos", POLICY)[0] == 0


INTERRUPTED = """
calls, commit = [], HfApi.create_commit
def interrupted(*arguments, **kwargs):
    calls.append(1)
    if len(calls) == 2:
        raise KeyboardInterrupt
    return commit(*arguments, **kwargs)
from unittest import mock
undo.enter_context(mock.patch.object(HfApi, "create_commit", interrupted))
"""


@pytest.mark.parametrize("how", ["upload", "commit", "ctrl-c"])
def test_a_push_that_is_stopped_leaves_whole_repositories_and_the_next_one_does_the_rest(
    shared_hub, push, user, mirror, how
):
    models = [POLICY, PAPER, DRAFTER]
    chosen = ["--repos", ",".join(models)]
    push(*chosen)
    before = {name: shared_hub.files(f"{user[0]}/{name}") for name in models}
    for name in models:
        (mirror / name / "record.json").write_text("{}")
    if how == "commit":
        shared_hub.fail_commit(2)
    elif how == "upload":  # of a file that is large enough to be sent by itself
        (mirror / PAPER / "figure.png").write_bytes(bytes(11_000_000))
        shared_hub.fail_upload(1)
    status, _, err = push(*chosen, broken=INTERRUPTED if how == "ctrl-c" else "")
    assert status == (130 if how == "ctrl-c" else 1)
    waiting = ", ".join(f"{user[0]}/{name}" for name in (PAPER, DRAFTER))
    assert f"done: {user[0]}/{POLICY}; not done: {waiting}. The same command does the rest." in err
    assert ("interrupted" if how == "ctrl-c" else "error: ") in err
    after = {name: shared_hub.files(f"{user[0]}/{name}") for name in models}
    assert [after[name] == before[name] for name in models] == [False, True, True]
    with shared_hub.watch() as requests:
        assert push(*chosen)[0] == 0
    commits = [request.path for request in requests if "/commit/" in request.path]
    assert [path.split("/")[4] for path in commits] == [PAPER, DRAFTER]


# Drafters and policies of one's own

OBJECT = """
import io, contextlib, os
from blockpilot_hf.loading import load_drafter, load_policy
os.environ["HF_TOKEN"] = token
err = io.StringIO()
with contextlib.redirect_stderr(err):
    model = (load_drafter if kind == "drafter" else load_policy)(folder)
    before = model.config.to_dict().get("policy")
    url = eval(call)
    assert model.config.to_dict().get("policy") == before
result = str(url)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    save_mirror(root)
    return root / "hub_cards"


def push_object(session, user, folder, kind, call):
    return session.run(OBJECT, token=user[1], folder=str(folder), kind=kind, call=call)


@pytest.mark.parametrize("kind", ["drafter", "policy"])
def test_push_to_hub_uploads_what_save_pretrained_writes_in_one_commit(shared_hub, session, user, own, kind, tmp_path):
    folder, repo_id = own / (DRAFTER if kind == "drafter" else POLICY), f"{user[0]}/mine"
    call = f"model.push_to_hub({repo_id!r}, private=True, tags=['mine'])"
    assert "/commit/" in push_object(session, user, folder, kind, call)
    (load_drafter if kind == "drafter" else load_policy)(folder).save_pretrained(tmp_path / "saved")
    saved = {path: (tmp_path / "saved" / path).read_bytes() for path in files_of(tmp_path / "saved")}
    pushed = visible(shared_hub, repo_id)
    assert pushed.keys() == saved.keys() and len(shared_hub.commits(repo_id)) == 2
    assert {path for path in saved if pushed[path] != saved[path]} == {"README.md"} | (
        {"config.json"} if kind == "drafter" else set()
    )
    assert shared_hub.repository(repo_id).private
    card = ModelCard(pushed["README.md"].decode())
    assert f'AutoModel.from_pretrained("{repo_id}", trust_remote_code=True)' in card.text
    assert "mine" in card.data.tags and "More Information" not in card.text
    if kind == "drafter":
        configs = [json.loads(files["config.json"]) for files in (pushed, saved)]
        assert configs[0] == {**configs[1], "policy": None}  # it was a folder
    push_object(session, user, folder, kind, call)
    assert len(shared_hub.commits(repo_id)) == 2


def test_a_card_on_the_hub_stays_when_the_object_is_pushed(shared_hub, session, user, own):
    card = b"---\nlicense: mit\n---\n\nMine.\n"
    shared_hub.put(f"{user[0]}/mine", {"README.md": card})
    push_object(session, user, own / POLICY, "policy", f"model.push_to_hub('{user[0]}/mine')")
    assert shared_hub.files(f"{user[0]}/mine")["README.md"] == card


def test_save_pretrained_pushes_the_folder_it_wrote(shared_hub, session, user, own, tmp_path):
    call = (
        f"model.save_pretrained({str(tmp_path / 'mine')!r}, push_to_hub=True, repo_id='{user[0]}/other', private=True)"
    )
    push_object(session, user, own / POLICY, "policy", call)
    saved = {path: (tmp_path / "mine" / path).read_bytes() for path in files_of(tmp_path / "mine")}
    pushed = visible(shared_hub, f"{user[0]}/other")
    assert pushed.keys() == saved.keys()
    assert {path for path in saved if pushed[path] != saved[path]} == {"README.md"}
    assert shared_hub.repository(f"{user[0]}/other").private


# A machine without this package

STRANGER = """
import json, sys
import torch
from transformers import AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
target_folder, drafter_id, recipe_id = sys.argv[1:4]
target = AutoModelForCausalLM.from_pretrained(target_folder).eval()
drafter = AutoModel.from_pretrained(drafter_id, trust_remote_code=True).eval()
output = target.generate(
    torch.tensor([json.loads(sys.argv[4])]), assistant_model=drafter, custom_generate=recipe_id,
    trust_remote_code=True, max_new_tokens=12, return_dict_in_generate=True,
)
trace = output.blockpilot
drafts = [list(step.draft_ids) for step in trace.steps]
modules = sorted(name for name in sys.modules if name.startswith("transformers_modules."))
print(json.dumps([output.sequences[0].tolist(), trace.block_size, drafts, modules]))
"""


def test_a_stranger_decodes_with_recipe_drafter_and_the_policy_that_it_names(shared_hub, push, user, mirror, tmp_path):
    """Online with an empty cache, then offline with what that left there; the same as with the installed package."""
    assert push("--private")[0] == 0
    target, prompt = make_target(), make_prompt(10)
    target.save_pretrained(tmp_path / "target")
    local = BlockPilot(load_drafter(mirror / DRAFTER)).generate(
        target, prompt, max_new_tokens=12, return_dict_in_generate=True
    )
    assert torch.equal(local.sequences, plain_generate(target, prompt, max_new_tokens=12))
    arguments = [
        str(tmp_path / "target"),
        f"{user[0]}/{DRAFTER}",
        f"{user[0]}/{RECIPE}",
        json.dumps(prompt[0].tolist()),
    ]
    for offline in (False, True):
        environment = shared_hub.environment(tmp_path / "home", token=user[1], offline=offline)
        with shared_hub.watch() as requests:
            done = bare_python(STRANGER, environment, *arguments)
        sequence, block_size, drafts, modules = json.loads(done.stdout.splitlines()[-1])
        assert sequence == local.sequences[0].tolist()
        assert block_size == local.blockpilot.block_size == 3
        assert drafts == [list(step.draft_ids) for step in local.blockpilot.steps]
        policies = [name for name in modules if name.endswith(".modeling_blockpilot")]
        assert len(policies) == 1 and ".custom_generate." in policies[0], "not the recipe's own"
        assert bool(requests) is not offline
        if not offline:
            pinned = heads(shared_hub, user[0])[POLICY]
            of_policy = [request.path for request in requests if f"/{POLICY}/" in request.path]
            assert f"/{user[0]}/{POLICY}/resolve/{pinned}/model.safetensors" in of_policy
            assert not [path for path in of_policy if path.endswith(".py")]


PINNED = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(target_folder).eval()
drafter = AutoModel.from_pretrained(drafter_id, trust_remote_code=True).eval()
ids = torch.tensor([prompt])

def decode(**kwargs):
    output = target.generate(
        ids, assistant_model=drafter, custom_generate=recipe_id, trust_remote_code=True, max_new_tokens=8,
        return_dict_in_generate=True, **kwargs,
    )
    return output if isinstance(output, str) else output.blockpilot.block_size

def load(**kwargs):
    policy = AutoModel.from_pretrained(policy_id, trust_remote_code=True, **kwargs)
    return [policy.config.block_sizes, getattr(sys.modules[type(policy).__module__], "REVISION", "first")]

result = {
    "pinned": decode(revision=recipe_revision), "newest": decode(),
    "policies": [load(revision=policy_revision), load(), load(revision="side")],
}
"""


def test_a_pinned_revision_gives_the_code_and_the_weights_of_that_revision(shared_hub, push, user, tmp_path):
    """Also those of the policy that the drafter names, which was pinned when they were pushed."""
    assert push()[0] == 0
    pinned = heads(shared_hub, user[0])
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    constant_policy(5).save_pretrained(tmp_path / "newer")
    newer = {name: (tmp_path / "newer" / name).read_bytes() for name in ("config.json", "model.safetensors")}
    code = shared_hub.files(f"{user[0]}/{POLICY}")["modeling_blockpilot.py"] + b'\nREVISION = "newest"\n'
    shared_hub.put(f"{user[0]}/{POLICY}", {**newer, "modeling_blockpilot.py": code})
    shared_hub.put(f"{user[0]}/{POLICY}", {"modeling_blockpilot.py": code.replace(b"newest", b"side")}, revision="side")
    recipe = b'def generate(model, *args, **kwargs):\n    return "newest"\n'
    shared_hub.put(f"{user[0]}/{RECIPE}", {"custom_generate/generate.py": recipe})
    with PythonSession(shared_hub.environment(tmp_path / "home")) as session:
        found = session.run(
            PINNED,
            target_folder=str(tmp_path / "target"),
            drafter_id=f"{user[0]}/{DRAFTER}",
            policy_id=f"{user[0]}/{POLICY}",
            recipe_id=f"{user[0]}/{RECIPE}",
            recipe_revision=pinned[RECIPE],
            policy_revision=pinned[POLICY],
            prompt=make_prompt(10)[0].tolist(),
        )
    assert found["pinned"] == 3 and found["newest"] == "newest"
    assert found["policies"] == [[[3], "first"], [[5], "newest"], [[5], "side"]]

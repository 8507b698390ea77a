"""Pushing to the local Hub with the real client: what arrives, what is sent, and what a push that fails leaves."""

import http.client
import json

import pytest
from hub_fixtures import write_folder
from local_hub_store import GITATTRIBUTES, LARGEST_REGULAR_FILE
from python_process import is_error

LARGE = bytes(LARGEST_REGULAR_FILE + 1)  # by size
WEIGHTS = bytes(range(256)) * 5  # large by name
FOLDER = {
    "README.md": b"---\nlicense: apache-2.0\n---\n# A card\n",
    "config.json": b'{"a": 1}',
    "custom_generate/generate.py": "# Grüße\n".encode(),
    "a folder/deep/er/with # and 100%.txt": b"quoted\r\n",
    "empty.safetensors": b"",
    "model.safetensors": WEIGHTS,
    "records.txt": LARGE,
}

PUSH = """
push = lambda: api(token).upload_folder(repo_id=repo_id, folder_path=folder, commit_message='Push')
result = raised(push) if fails else push().oid
"""


@pytest.fixture
def push(shared_hub, hub_client):
    """Push a folder as `ada`: the id of the newest commit, or what was raised."""

    def push(repo_id, folder, *, fails=False):
        return hub_client(PUSH, token=shared_hub.ada, repo_id=repo_id, folder=str(folder), fails=fails)

    return push


@pytest.fixture(scope="module")
def pushed(shared_hub, hub_process, tmp_path_factory):
    """`ada/pushed` with [`FOLDER`] in it: the folder, the commit and the requests."""
    folder = write_folder(tmp_path_factory.mktemp("pushed") / "folder", FOLDER)
    code = """
from huggingface_hub import HfApi
HfApi(token=token).create_repo('ada/pushed')
result = HfApi(token=token).upload_folder(repo_id='ada/pushed', folder_path=folder, commit_message='Push').oid
"""
    with shared_hub.watch() as seen:
        oid = hub_process.run(code, token=shared_hub.ada, folder=folder)
    return {"folder": folder, "oid": oid, "requests": seen}


def test_folder_arrives_as_it_is_in_one_commit(shared_hub, pushed):
    newest, first = shared_hub.commits("ada/pushed")
    assert newest.oid == pushed["oid"] and (newest.title, newest.author, newest.parent) == ("Push", "ada", first.oid)
    assert shared_hub.files("ada/pushed") == {**FOLDER, ".gitattributes": GITATTRIBUTES}


def test_large_files_are_those_of_the_rules_and_sent_without_a_token(shared_hub, pushed):
    blobs = shared_hub.repository("ada/pushed").at("main").files
    assert {path for path, blob in blobs.items() if blob.is_lfs} == {"model.safetensors", "records.txt"}
    uploads = [request for request in pushed["requests"] if request.method == "PUT"]
    assert len(uploads) == 2 and all(request.path.startswith("/lfs-upload/") for request in uploads)
    assert {request.has_token for request in pushed["requests"]} == {True, False}
    assert {request.method for request in pushed["requests"] if not request.has_token} == {"PUT"}


def test_every_request_of_a_push_is_logged_in_order_and_none_failed(pushed):
    assert all(request.status == 200 for request in pushed["requests"])
    paths = [request.path for request in pushed["requests"]]
    steps = ["repos/create", "validate-yaml", "preupload/main", "objects/batch", "/lfs-upload/", "/verify", "/commit/"]
    places = [next(i for i, path in enumerate(paths) if step in path) for step in steps]
    assert places == sorted(places) and places[-1] == len(paths) - 1


def test_listing_tells_sizes_and_what_is_large(shared_hub, pushed, hub_client):
    code = """
tree = api().list_repo_tree(repo_id, recursive=True)
result = [[type(e).__name__, e.path, getattr(e, 'size', None), bool(getattr(e, 'lfs', None))] for e in tree]
inner = [e.path for e in api().list_repo_tree(repo_id, 'a folder/deep')]
some = [e.path for e in api().get_paths_info(repo_id, ['config.json', 'a folder', 'none'])]
result = [result, inner, some, raised(lambda: list(api().list_repo_tree(repo_id, 'none')))]
"""
    tree, inner, some, missing = hub_client(code, repo_id="ada/pushed")
    files = shared_hub.files("ada/pushed")
    large = ("model.safetensors", "records.txt")
    assert {path: (size, lfs) for kind, path, size, lfs in tree if kind == "RepoFile"} == {
        path: (len(content), path in large) for path, content in files.items()
    }
    folders = {path for kind, path, *_ in tree if kind == "RepoFolder"}
    assert folders == {"a folder", "a folder/deep", "a folder/deep/er", "custom_generate"}
    assert inner == ["a folder/deep/er"] and some == ["config.json", "a folder"]
    assert is_error(missing, "EntryNotFoundError", 404)


def test_unchanged_push_uploads_nothing_and_makes_no_commit(shared_hub, pushed, push):
    with shared_hub.watch() as seen:
        assert push("ada/pushed", pushed["folder"]) == pushed["oid"]
    assert any("/preupload/" in request.path for request in seen)
    # Clients still ask whether large files are there, and are told so.
    assert not any(request.method == "PUT" or "/commit/" in request.path for request in seen)
    assert len(shared_hub.commits("ada/pushed")) == 2


def test_changed_file_alone_is_sent(shared_hub, push, tmp_path):
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS, "other.bin": b"12"}
    shared_hub.put("ada/edited", files)
    folder = write_folder(tmp_path / "folder", {**files, "model.safetensors": WEIGHTS[::-1]})
    with shared_hub.watch() as seen:
        oid = push("ada/edited", folder)
    assert [request.method for request in seen].count("PUT") == 1
    assert shared_hub.commits("ada/edited")[0].oid == oid and len(shared_hub.commits("ada/edited")) == 3
    assert shared_hub.files("ada/edited")["model.safetensors"] == WEIGHTS[::-1]


def test_commit_adds_deletes_and_copies_at_once_or_not_at_all(shared_hub, hub_client):
    start = shared_hub.put("ada/atomic", {"a": b"1", "b": b"2", "dir/c": b"3", "dir/d": b"4", "w.bin": b"56"})
    code = """
hub, add, delete = api(token), CommitOperationAdd, CommitOperationDelete
commit = lambda *ops, **kw: hub.create_commit('ada/atomic', list(ops), commit_message='Several', **kw)
result = [
    raised(commit, add('new', b'new'), delete('none')),
    raised(commit, add('new', b'new'), delete('none/')),
    raised(commit, add('a/b', b'new')),
    raised(commit, add('new', b'new'), parent_commit='0' * 40),
]
copied = CommitOperationCopy('w.bin', 'copy.bin')
result.append(commit(add('a', b'7'), delete('b'), delete('dir/'), copied, parent_commit=start).oid)
result.append(raised(commit, add('late', b''), parent_commit=start))
"""
    missing, no_folder, below_file, stale, oid, late = hub_client(code, token=shared_hub.ada, start=start)
    assert is_error(missing, "EntryNotFoundError", 404, "A file with this name doesn't exist")
    assert is_error(no_folder, "EntryNotFoundError", 404)
    assert is_error(below_file, "BadRequestError", 400)
    assert is_error(stale, "HfHubHTTPError", 412) and is_error(late, "HfHubHTTPError", 412)
    assert [commit.oid for commit in shared_hub.commits("ada/atomic")][:2] == [oid, start]
    kept = {".gitattributes": GITATTRIBUTES, "w.bin": b"56"}
    assert shared_hub.files("ada/atomic") == {**kept, "a": b"7", "copy.bin": b"56"}


def test_branches_tags_and_commits_name_the_revision_they_stand_for(shared_hub, hub_client):
    first = shared_hub.put("ada/versions", {"v": b"1"})
    code = """
hub, read = api(token), lambda rev: Path(hf_hub_download(repo_id, 'v', revision=rev, cache_dir=cache_dir)).read_text()
repo_id = 'ada/versions'
hub.create_tag(repo_id, tag='v1', tag_message='The first')
hub.create_branch(repo_id, branch='feat/x')
hub.create_branch(repo_id, branch='feat/x', exist_ok=True)
twice = raised(hub.create_branch, repo_id, branch='feat/x'), raised(hub.create_tag, repo_id, tag='v1')
side = hub.upload_file(path_or_fileobj=b'2', path_in_repo='v', repo_id=repo_id, revision='feat/x').oid
main = hub.upload_file(path_or_fileobj=b'3', path_in_repo='v', repo_id=repo_id).oid
refs = hub.list_repo_refs(repo_id)
result = {
    'twice': twice, 'side': side, 'main': main,
    'read': [read(name) for name in ('v1', 'feat/x', 'main', first, side)],
    'refs': {ref.ref: ref.target_commit for ref in refs.branches + refs.tags},
    'log': [[c.commit_id, c.title, c.authors] for c in hub.list_repo_commits(repo_id, revision='feat/x')],
    'listed': hub.list_repo_files(repo_id, revision='feat/x'),
}
hub.delete_tag(repo_id, tag='v1')
hub.delete_branch(repo_id, branch='feat/x')
gone = [raised(hub.list_repo_files, repo_id, revision=name) for name in ('v1', 'feat/x', 'no', '0' * 40)]
result['gone'] = gone + [raised(hub.delete_branch, repo_id, branch='main')]
"""
    seen = hub_client(code, token=shared_hub.ada, first=first)
    assert all(is_error(answer, "HfHubHTTPError", 409) for answer in seen["twice"])
    assert seen["read"] == ["1", "2", "3", "1", "2"]
    heads = {"refs/heads/main": seen["main"], "refs/heads/feat/x": seen["side"]}
    assert seen["refs"] == {**heads, "refs/tags/v1": first}
    assert [oid for oid, *_ in seen["log"]][:2] == [seen["side"], first] and seen["log"][0][2] == ["ada"]
    assert seen["listed"] == [".gitattributes", "v"]
    *missing, kept = seen["gone"]
    assert all(is_error(answer, "RevisionNotFoundError", 404) for answer in missing)
    assert is_error(kept, "BadRequestError", 400)


def test_pull_request_leaves_the_branch_alone_and_is_a_revision(shared_hub, hub_client):
    before = shared_hub.put("ada/asked", {"v": b"1"})
    code = """
files = [CommitOperationAdd('v', b'2'), CommitOperationAdd('w.safetensors', b'34')]
done = api(token).create_commit('ada/asked', files, commit_message='Please', create_pr=True)
path = hf_hub_download('ada/asked', 'v', revision=done.pr_revision, cache_dir=cache_dir)
pulls = api().list_repo_refs('ada/asked', include_pull_requests=True).pull_requests
result = [done.oid, done.pr_num, Path(path).read_text(), [pull.target_commit for pull in pulls]]
"""
    oid, number, text, pulls = hub_client(code, token=shared_hub.bob)
    assert (number, text, pulls) == (1, "2", [oid])
    assert shared_hub.commits("ada/asked")[0].oid == before


def test_card_that_is_not_yaml_is_refused_before_anything_is_sent(shared_hub, hub_client):
    shared_hub.put("ada/card", {"README.md": b"---\nlicense: mit\n---\n"})
    code = """
push = lambda text: api(token).upload_file(path_or_fileobj=text, path_in_repo='README.md', repo_id='ada/card')
result = [raised(push, b'---\\nlicense: [\\n---\\n'), raised(push, b'---\\n- a list\\n---\\n')]
card = ModelCard('---\\nlicense: apache-2.0\\n---\\n# Pushed\\n')
card.push_to_hub('ada/card', token=token)
result.append(ModelCard.load('ada/card').data.license)
"""
    with shared_hub.watch() as seen:
        no_yaml, no_mapping, license_name = hub_client(code, token=shared_hub.ada)
    for answer in (no_yaml, no_mapping):
        assert is_error(answer, "ValueError", None, "Invalid metadata in README.md")
    assert license_name == "apache-2.0"
    assert len([request for request in seen if "/commit/" in request.path]) == 1


# Pushes that fail


@pytest.mark.parametrize("status", [400, 403, None], ids=["refused", "forbidden", "connection closed"])
def test_commit_that_fails_leaves_the_old_revision_and_the_next_one_completes(shared_hub, push, tmp_path, status):
    repo_id = f"ada/interrupted-{status}"
    old = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    before = shared_hub.put(repo_id, old)
    new = {"config.json": b'{"new": 1}', "model.safetensors": b"new" * 9}
    folder = write_folder(tmp_path / "folder", new)
    shared_hub.fail_commit(status=status)
    with shared_hub.watch() as failed:
        answer = push(repo_id, folder, fails=True)
    assert answer is not None and (status is None or answer["status"] == status)
    assert failed[-1] == ("POST", f"/api/models/{repo_id}/commit/main", status or 0, True)
    assert shared_hub.commits(repo_id)[0].oid == before and shared_hub.files(repo_id).items() >= old.items()
    with shared_hub.watch() as seen:
        push(repo_id, folder)
    assert shared_hub.files(repo_id).items() >= new.items() and shared_hub.commits(repo_id)[0].parent == before
    assert "PUT" not in [request.method for request in seen], "what was uploaded is not sent again"


def test_upload_that_fails_leaves_the_old_revision_and_only_the_rest_is_sent_again(shared_hub, push, tmp_path):
    new = {f"part-{i}.safetensors": bytes([i]) * 9 for i in range(3)}
    before = shared_hub.put("ada/half", {"part-0.safetensors": b"old"})
    folder = write_folder(tmp_path / "folder", new)
    shared_hub.fail_upload(nth=2)
    with shared_hub.watch() as failed:
        assert is_error(push("ada/half", folder, fails=True), "RuntimeError", None, "Error while uploading")
    sent = [request.status for request in failed if request.method == "PUT"]
    assert sent.count(400) == 1 and not any("/commit/" in request.path for request in failed)
    assert shared_hub.commits("ada/half")[0].oid == before
    with shared_hub.watch() as seen:
        push("ada/half", folder)
    assert [request.method for request in seen].count("PUT") == 3 - sent.count(200)
    assert shared_hub.files("ada/half").items() >= new.items() and len(shared_hub.commits("ada/half")) == 3


def test_upload_of_other_bytes_than_announced_is_refused(shared_hub):
    shared_hub.put("ada/checked", {})

    def ask(method, path, body, **headers):
        connection = http.client.HTTPConnection(shared_hub.endpoint.removeprefix("http://"))
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()

    oid = "ab" * 32
    asked = {"operation": "upload", "transfers": ["basic"], "objects": [{"oid": oid, "size": 3}]}
    token = {"Authorization": f"Bearer {shared_hub.ada}"}
    status, body = ask("POST", "/ada/checked.git/info/lfs/objects/batch", json.dumps(asked), **token)
    upload = json.loads(body)["objects"][0]["actions"]["upload"]["href"].removeprefix(shared_hub.endpoint)
    assert status == 200
    assert ask("PUT", upload, b"abc")[0] == 400
    assert ask("PUT", "/lfs-upload/made-up", b"abc")[0] == 403
    pointer = {"key": "lfsFile", "value": {"path": "w.bin", "algo": "sha256", "oid": oid, "size": 3}}
    lines = [{"key": "header", "value": {"summary": "x"}}, pointer]
    body = "\n".join(map(json.dumps, lines))
    status, answer = ask("POST", "/api/models/ada/checked/commit/main", body, **token)
    assert status == 400 and b"not uploaded" in answer
    assert "w.bin" not in shared_hub.files("ada/checked")

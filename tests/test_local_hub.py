"""
The local Hub itself: its repositories, as the real client sees them, and what it answers to anybody. What other tests
rest on is held here and in `test_local_hub_push.py` and `test_local_hub_download.py`.
"""

import http.client
import json
import os

import pytest
from local_hub import LocalHub
from local_hub_store import LARGEST_REGULAR_FILE, is_large
from python_process import is_error

CARD = b"---\nlicense: apache-2.0\nlibrary_name: transformers\ntags:\n- custom_generate\n---\n# A card\n"


def test_repository_is_created_once_with_a_first_commit(shared_hub, hub_client):
    made, again, twice, names = hub_client(
        """
hub = api(token)
made, again = hub.create_repo('ada/once'), hub.create_repo('once', exist_ok=True)
result = [made.repo_id, again.repo_id, raised(hub.create_repo, 'once'), hub.list_repo_files('ada/once')]
""",
        token=shared_hub.ada,
    )
    assert (made, again, names) == ("ada/once", "ada/once", [".gitattributes"])
    assert is_error(twice, "HfHubHTTPError", 409, "already created")
    assert len(shared_hub.commits("ada/once")) == 1 and not shared_hub.repository("ada/once").private


def test_deleted_repository_is_gone(shared_hub, hub_client):
    shared_hub.put("ada/short-lived", {"a": b"1"})
    code = """
refused = raised(api(other).delete_repo, 'ada/short-lived')
there = api().repo_exists('ada/short-lived')
api(token).delete_repo('ada/short-lived')
result = [refused, there, api().repo_exists('ada/short-lived'), raised(api(token).delete_repo, 'ada/short-lived')]
api(token).delete_repo('ada/short-lived', missing_ok=True)
"""
    refused, before, after, twice = hub_client(code, token=shared_hub.ada, other=shared_hub.bob)
    assert is_error(refused, "HfHubHTTPError", 403)
    assert before and not after
    assert is_error(twice, "RepositoryNotFoundError", 404)


def test_info_reads_the_card_and_lists_files_with_sizes(shared_hub, hub_client):
    oid = shared_hub.put("ada/carded", {"README.md": CARD, "model.safetensors": b"123"})
    code = """
info = api().model_info('ada/carded', files_metadata=True)
files = {f.rfilename: [f.size, f.lfs and f.lfs.sha256] for f in info.siblings}
result = [info.sha, info.library_name, info.tags, info.card_data.license, info.private, files]
"""
    sha, *card, is_private, files = hub_client(code)
    blob = shared_hub.repository("ada/carded").at("main").files["model.safetensors"]
    assert sha == oid and not is_private
    assert card == ["transformers", ["custom_generate"], "apache-2.0"]
    assert files["model.safetensors"] == [3, blob.sha256]
    assert files["README.md"] == [len(CARD), None]


def test_spaces_and_datasets_are_kept_apart_from_models(shared_hub, hub_client):
    shared_hub.put("ada/same", {"kind": b"model"})
    code = """
result = []
for kind, more in (('space', {'space_sdk': 'gradio'}), ('dataset', {})):
    url = api(token).create_repo('ada/same', repo_type=kind, **more)
    files = [CommitOperationAdd('kind', kind.encode()), CommitOperationAdd('w.parquet', b'12')]
    done = api(token).create_commit('ada/same', files, repo_type=kind, commit_message='x')
    local = snapshot_download('ada/same', repo_type=kind, cache_dir=cache_dir)
    read = {path.name: path.read_text() for path in Path(local).iterdir() if path.name[0] != '.'}
    result.append([str(url), url.repo_type, done.commit_url, read, api().repo_info('ada/same', repo_type=kind).sha])
result.append([api().get_space_runtime('ada/same').stage, api().space_info('ada/same').sdk])
"""
    *answers, space = hub_client(code, token=shared_hub.ada)
    for kind, (url, its_kind, commit_url, read, sha) in zip(("space", "dataset"), answers, strict=True):
        (newest, _) = shared_hub.commits("ada/same", repo_type=kind)
        assert url == f"{shared_hub.endpoint}/{kind}s/ada/same" and its_kind == kind
        assert commit_url == f"{url}/commit/{sha}" and sha == newest.oid
        assert read == {"kind": kind, "w.parquet": "12"}
        assert newest.files["w.parquet"].is_lfs
    assert space == ["RUNNING", "gradio"]
    assert shared_hub.files("ada/same")["kind"] == b"model"


# The server


def test_fixture_gives_an_empty_hub(local_hub, shared_hub):
    assert local_hub.requests == [] and local_hub.endpoint != shared_hub.endpoint
    shared_hub.put("ada/elsewhere", {})
    with pytest.raises(KeyError):
        local_hub.files("ada/elsewhere")


def test_unknown_paths_are_answered_with_json_and_404(local_hub):
    local_hub.put("ada/one", {"a": b"1"})
    connection = http.client.HTTPConnection(local_hub.endpoint.removeprefix("http://"))
    paths = ("/", "/api", "/api/agent-harnesses", "/ada/one", "/ada/one/blob/main/a", "/ada/one.git/info/refs")
    paths += ("/api/models", "/api/models/ada/one/discussions", "/api/models/ada/one/xet-write-token/main")
    for path in paths:
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD"):
            connection.request(method, path, b"{}" if method == "POST" else None)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 404, (method, path)
            assert method == "HEAD" or "nothing is served" in json.loads(body)["error"]
    assert [request.status for request in local_hub.requests] == [404] * len(paths) * 5


def test_mistake_of_the_hub_itself_fails_the_test_that_met_it():
    with pytest.raises(AssertionError, match=r"(?s)the local Hub itself failed.*KeyError: 'files'"), LocalHub() as hub:
        token = hub.add_user("ada")
        hub.put("ada/one", {})
        connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"))
        connection.request("POST", "/api/models/ada/one/preupload/main", "{}", {"Authorization": f"Bearer {token}"})
        assert connection.getresponse().status == 400


def test_gitattributes_decide_by_name_folder_and_size():
    rules = b"# comment\n\n*.bin filter=lfs\n/top.txt filter=lfs\ndata/**/*.csv filter=lfs -text\n*.md text\n"
    large = ("a.bin", "x/y/a.bin", "top.txt", "data/a.csv", "data/x/y/a.csv")
    regular = ("a.bin.txt", "x/top.txt", "a.csv", "x/data.csv", "README.md")
    assert [is_large(path, 1, rules) for path in large] == [True] * len(large)
    assert [is_large(path, 1, rules) for path in regular] == [False] * len(regular)
    assert is_large("a.txt", LARGEST_REGULAR_FILE + 1, b"") and not is_large("a.txt", LARGEST_REGULAR_FILE, b"")


def test_environment_leads_clients_nowhere_else(local_hub, tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_MODULES_CACHE", "HUGGING_FACE_HUB_TOKEN", "HTTPS_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "elsewhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_CACHE", "elsewhere")
    env = local_hub.environment(tmp_path)
    assert "elsewhere" not in env.values() and not any("OFFLINE" in name or name == "HF_TOKEN" for name in env)
    assert (env["HF_HOME"], env["HF_ENDPOINT"]) == (str(tmp_path), local_hub.endpoint)
    assert env["PATH"] == os.environ["PATH"]
    assert local_hub.environment(tmp_path, token="t", offline=True)["HF_TOKEN"] == "t"

"""Downloading from the local Hub with the real clients, and who may do what."""

from conftest import make_prompt, make_target
from python_process import PythonSession, bare_python, is_error


def test_snapshot_is_the_revision_byte_for_byte(shared_hub, hub_client):
    """Many files, so that several connections are open at once."""
    many = {f"folder {i}/{i}.txt": b"%d" % i for i in range(20)}
    oid = shared_hub.put("ada/whole", {"empty": b"", "w.safetensors": bytes(range(256)), "#ü%20?.txt": b"\r\n", **many})
    code = """
folder = Path(snapshot_download('ada/whole', cache_dir=cache_dir))
files = {p.relative_to(folder).as_posix(): p.read_bytes().hex() for p in folder.rglob('*') if p.is_file()}
result = [folder.name, files]
"""
    commit, files = hub_client(code)
    assert commit == oid
    assert {path: bytes.fromhex(content) for path, content in files.items()} == shared_hub.files("ada/whole")


def test_second_download_transfers_nothing_and_a_new_commit_only_what_changed(shared_hub, hub_client):
    shared_hub.put("ada/fresh", {"a": b"1", "w.bin": b"23"})
    code = """
read = lambda name: Path(hf_hub_download('ada/fresh', name, cache_dir=cache_dir)).read_text()
result = [read('a'), read('w.bin')]
"""
    with shared_hub.watch() as seen:
        assert hub_client(code) == hub_client(code) == ["1", "23"]
    assert [request.method for request in seen] == ["HEAD", "GET"] * 2 + ["HEAD"] * 2
    shared_hub.put("ada/fresh", {"a": b"4"})
    with shared_hub.watch() as seen:
        assert hub_client(code) == ["4", "23"]
    assert [request.method for request in seen] == ["HEAD", "GET", "HEAD"]


def test_missing_things_are_told_apart(shared_hub, hub_client):
    shared_hub.put("ada/here", {"a": b"1"})
    code = """
get = lambda repo_id, name='a', **kw: raised(hf_hub_download, repo_id, name, cache_dir=cache_dir, token=token, **kw)
result = [get('ada/here', 'none'), get('ada/here', revision='none'), get('ada/none'), get('none')]
"""
    for token, status in ((False, 401), (shared_hub.bob, 404)):
        entry, revision, repository, canonical = hub_client(code, token=token)
        assert is_error(entry, "EntryNotFoundError", 404)
        assert is_error(revision, "RevisionNotFoundError", 404)
        assert is_error(repository, "RepositoryNotFoundError", status)
        assert is_error(canonical, "RepositoryNotFoundError", status)


def test_part_of_a_file_can_be_asked_for(shared_hub, hub_client):
    shared_hub.put("ada/ranged", {"w.bin": b"0123456789"})
    code = """
import httpx2 as http
url, ranges = hf_hub_url('ada/ranged', 'w.bin'), ('bytes=7-', 'bytes=2-4', 'bytes=10-')
answers = [http.get(url, headers={'Range': part}) for part in ranges]
result = [[a.status_code, a.text, a.headers['Content-Range']] for a in answers]
"""
    tail, middle, beyond = hub_client(code)
    assert tail == [206, "789", "bytes 7-9/10"] and middle == [206, "234", "bytes 2-4/10"] and beyond[0] == 416


def test_offline_after_online_asks_for_nothing(shared_hub, tmp_path):
    oid = shared_hub.put("ada/offline", {"a": b"1", "w.bin": b"23"})
    code = """
from huggingface_hub import hf_hub_download, snapshot_download
folder = snapshot_download('ada/offline')
print(folder, open(hf_hub_download('ada/offline', 'w.bin')).read())
"""
    online = bare_python(code, shared_hub.environment(tmp_path / "home")).stdout
    count = len(shared_hub.requests)
    assert count and online.split()[1] == "23" and oid in online
    assert bare_python(code, shared_hub.environment(tmp_path / "home", offline=True)).stdout == online
    empty = bare_python(code, shared_hub.environment(tmp_path / "empty", offline=True), check=False)
    assert empty.returncode and "LocalEntryNotFoundError" in empty.stderr
    assert len(shared_hub.requests) == count


# Users


def test_private_repository_is_there_for_its_owners_only(shared_hub, hub_client):
    code = """
api(token).create_repo('team/secret', private=True)
files = [CommitOperationAdd('a', b'1'), CommitOperationAdd('w.bin', b'2')]
api(token).create_commit('team/secret', files, commit_message='x')
result = [api(token).repo_info('team/secret').private]
for who in (token, other, False):
    get = lambda: Path(hf_hub_download('team/secret', 'a', token=who, cache_dir=f'{cache_dir}/{who}')).read_text()
    answer = raised(get)
    result.append([answer or get(), raised(api(who).model_info, 'team/secret')])
api(token).update_repo_settings('team/secret', private=False)
result.append(api().model_info('team/secret').private)
"""
    was, owner, stranger, nobody, is_now = hub_client(code, token=shared_hub.member, other=shared_hub.bob)
    assert was and not is_now and owner == ["1", None]
    for answers, status in ((stranger, 404), (nobody, 401)):
        assert all(is_error(answer, "RepositoryNotFoundError", status) for answer in answers)


def test_gated_repository_shows_its_page_and_keeps_its_files(shared_hub, hub_client):
    shared_hub.put("ada/gated", {"a": b"1"}, gated="manual")
    code = """
get = lambda who: raised(hf_hub_download, 'ada/gated', 'a', token=who, cache_dir=f'{cache_dir}/{who}')
result = [api().model_info('ada/gated').gated, get(False), get(other), get(token)]
"""
    gated, nobody, stranger, owner = hub_client(code, token=shared_hub.ada, other=shared_hub.bob)
    assert gated == "manual" and owner is None
    assert is_error(nobody, "GatedRepoError", 401) and is_error(stranger, "GatedRepoError", 403)


def test_wrong_token_is_refused_everywhere(shared_hub, hub_client):
    shared_hub.put("ada/public", {"a": b"1"})
    code = """
get = lambda who: raised(hf_hub_download, 'ada/public', 'a', token=who, cache_dir=f'{cache_dir}/{who}')
push = lambda who: raised(api(who).upload_file, path_or_fileobj=b'', path_in_repo='a', repo_id='ada/public')
result = [raised(whoami, 'hf_wrong'), raised(api('hf_wrong').model_info, 'ada/public'), push('hf_wrong')]
result += [get('hf_wrong'), get(False), whoami(token)['name'], whoami(token)['auth']['accessToken']['role']]
"""
    user, info, push, wrong, none, name, role = hub_client(code, token=shared_hub.reader)
    assert is_error(user, "HfHubHTTPError", 401, "Invalid user token")
    for answer in (info, push, wrong):
        assert is_error(answer, "HfHubHTTPError", 401, "Invalid credentials")
        assert "RepositoryNotFoundError" not in answer["types"]
    assert none is None and (name, role) == ("ada", "read")


def test_pushing_needs_a_token_that_writes_in_that_namespace(shared_hub, hub_client):
    before = shared_hub.put("ada/own", {"a": b"1"})
    code = """
result = []
for who in (reader, other, False):
    hub = api(who)
    result.append([
        raised(hub.upload_file, path_or_fileobj=b'2', path_in_repo='a', repo_id='ada/own'),
        raised(hub.create_branch, 'ada/own', branch='side'),
        raised(hub.create_tag, 'ada/own', tag='v1'),
        raised(hub.update_repo_settings, 'ada/own', private=True),
        raised(hub.delete_repo, 'ada/own'),
        raised(hub.create_repo, 'ada/another'),
        raised(hub.auth_check, 'ada/own', write=True),
    ])
    result[-1].append(raised(hub.create_repo, 'ada/own', exist_ok=True) if who else None)
"""
    reader, other, nobody = hub_client(code, reader=shared_hub.reader, other=shared_hub.bob)
    for *refused, exists in (reader, other):
        assert all(is_error(answer, "HfHubHTTPError", 403, "Forbidden") for answer in refused)
        assert exists is None, "a repository that is there already is no error"
    assert all(is_error(answer, "HfHubHTTPError", 401) for answer in nobody[:-1])
    assert shared_hub.repository("ada/own").branches == {"main": before}
    assert not shared_hub.repository("ada/own").tags and not shared_hub.repository("ada/own").private


# transformers


def test_transformers_pushes_and_loads_a_model_by_revision(shared_hub, tmp_path):
    target = make_target("llama")
    target.save_pretrained(tmp_path / "model")
    expected = target(make_prompt()).logits[0, -1].tolist()
    code = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from huggingface_hub import HfApi

load = AutoModelForCausalLM.from_pretrained
first = load(folder)
first.push_to_hub('ada/llama', private=True, commit_message='First')
sha = HfApi().model_info('ada/llama').sha
with torch.no_grad():
    first.lm_head.weight.zero_()
first.push_to_hub('ada/llama', commit_message='Second')

def last(**kwargs):
    with torch.no_grad():
        return load('ada/llama', **kwargs).eval()(torch.tensor(prompt)).logits[0, -1].tolist()

result = {
    'first': last(revision=sha), 'second': last(), 'config': AutoConfig.from_pretrained('ada/llama').model_type,
    'missing revision': raised(last, revision='none'), 'missing': raised(load, 'ada/none'), 'sha': sha,
    'another': raised(load, 'ada/llama', token=other, cache_dir='empty'),
}
"""
    with PythonSession(shared_hub.environment(tmp_path / "home", token=shared_hub.ada), cwd=tmp_path) as session:
        prompt = make_prompt().tolist()
        seen = session.run(code, folder=str(tmp_path / "model"), prompt=prompt, other=shared_hub.bob)
        with shared_hub.watch() as asked:
            local = session.run(
                """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained('ada/llama', revision=sha, local_files_only=True).eval()
with torch.no_grad():
    result = model(torch.tensor(prompt)).logits[0, -1].tolist()
""",
                prompt=prompt,
                sha=seen["sha"],
            )
    assert seen["first"] == local == expected and asked == []
    assert set(seen["second"]) == {0.0} and seen["config"] == "llama"
    assert [commit.title for commit in shared_hub.commits("ada/llama")] == ["Second", "First", "initial commit"]
    assert shared_hub.repository("ada/llama").private
    assert shared_hub.repository("ada/llama").at("main").files["model.safetensors"].is_lfs
    assert is_error(seen["missing revision"], "OSError", None, "is not a valid git identifier")
    for name in ("missing", "another"):
        assert is_error(seen[name], "OSError", None, "is not a local folder and is not a valid model identifier")

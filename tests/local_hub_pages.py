"""What the local Hub answers about repositories, users and cards. `api` is the [`local_hub_api.HubApi`] that asks."""

import json
import re
from typing import Any
from urllib.parse import parse_qs

import local_hub_store as store
import yaml
from local_hub_messages import Reply, Request, User, error_reply, json_reply, unauthorized
from local_hub_store import KINDS, HubError, Repository

_RUNTIME = {"stage": "RUNNING", "hardware": {"current": "cpu-basic", "requested": "cpu-basic"}, "gcTimeout": None}


def _asked_repository(asked: dict[str, Any], user: User | None) -> tuple[str, str, str]:
    """Kind, namespace and name that creating and deleting are about; without an organization it is the user's."""
    if user is None:
        raise unauthorized()
    return f"{asked.get('type') or 'model'}s", asked.get("organization") or user.name, str(asked.get("name"))


def create(api: Any, request: Request, user: User | None) -> Reply:
    asked = request.json()
    kind, namespace, name = _asked_repository(asked, user)
    user, sdk = api.check_write(user, namespace), asked.get("sdk")
    if kind not in KINDS or not re.fullmatch(r"\w[\w.-]{0,95}", name) or name.endswith(".git"):
        raise HubError(400, "", f"invalid type or name of a repository: {asked}")
    if kind == "spaces" and sdk not in ("gradio", "docker", "static"):
        raise HubError(400, "", f"a Space needs an sdk: gradio, docker or static, got {sdk!r}")
    key = (kind, f"{namespace}/{name}")
    is_new = key not in api.repositories
    if is_new:
        private = asked.get("visibility") == "private"
        api.repositories[key] = Repository(*key, creator=user.name, private=private, sdk=sdk)
    # Clients read the URL from both answers.
    answer = {"url": f"{api.endpoint}/{api.repositories[key].page}", "name": key[1]}
    if not is_new:
        return json_reply({"error": f"You already created this {kind[:-1]} repo", **answer}, 409)
    return json_reply(answer)


def delete(api: Any, request: Request, user: User | None) -> Reply:
    kind, namespace, name = _asked_repository(request.json(), user)
    repository = api.repository(user, kind, f"{namespace}/{name}")
    api.check_write(user, repository.owner)
    del api.repositories[kind, repository.id]
    return Reply(b"OK")


def whoami(api: Any, request: Request, user: User | None) -> Reply:
    if user is None:
        raise unauthorized()
    organizations = [{"name": name, "type": "org", "roleInOrg": "write"} for name in user.organizations]
    auth = {"type": "access_token", "accessToken": {"displayName": "local", "role": user.role}}
    return json_reply({"type": "user", "name": user.name, "orgs": organizations, "auth": auth})


def validate_yaml(api: Any, request: Request, user: User | None) -> Reply:
    """Says only what a YAML reader can say. The rules for single fields are known to the Hub's own server alone."""
    try:
        card = front_matter(str(request.json().get("content")))
    except ValueError as error:
        return json_reply({"errors": [{"message": str(error)}], "warnings": []}, 400)
    warnings = [] if card else [{"message": "empty or missing yaml metadata in repo card"}]
    return json_reply({"errors": [], "warnings": warnings})


def front_matter(readme: str) -> dict[str, Any]:
    """The YAML at the head of a README, `{}` if there is none."""
    found = re.match(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", readme, re.DOTALL | re.MULTILINE)
    try:
        card = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError as error:
        raise ValueError(f"the metadata is not YAML: {error}") from error
    if card is not None and not isinstance(card, dict):
        raise ValueError(f"the metadata must be a mapping, got {type(card).__name__}")
    return json.loads(json.dumps(card or {}, default=str))  # dates become text


def info(api: Any, request: Request, user: User | None, repository: Repository, revision: str = "main") -> Reply:
    commit, first = repository.at(revision), repository.log(revision)[-1]
    try:
        card = front_matter(commit.files["README.md"].content.decode()) if "README.md" in commit.files else {}
    except ValueError:
        card = {}
    siblings = []
    for path, blob in sorted(commit.files.items()):
        siblings.append({"rfilename": path})
        if request.flag("blobs"):
            siblings[-1].update(size=len(blob.content), blobId=blob.git_oid)
            if blob.is_lfs:
                siblings[-1]["lfs"] = {**blob.lfs, "sha256": blob.sha256}
    answer = {
        **{"id": repository.id, "author": repository.owner, "sha": commit.oid, "siblings": siblings},
        **{"private": repository.private, "gated": repository.gated, "disabled": False, "downloads": 0, "likes": 0},
        **{"createdAt": first.date, "lastModified": commit.date, "cardData": card, "tags": card.get("tags") or []},
        **{name: card[name] for name in ("pipeline_tag", "library_name") if name in card},
    }
    if repository.kind == "spaces":
        answer.update(sdk=repository.sdk, runtime=_RUNTIME)
    return json_reply(answer)


def tree(api: Any, request: Request, user: User | None, repository: Repository, revision: str, path: str = "") -> Reply:
    commit = repository.at(revision)
    told = {"X-Repo-Commit": commit.oid}
    try:
        return json_reply(store.tree(commit, path.strip("/"), recursive=request.flag("recursive")), headers=told)
    except HubError as error:
        return error_reply(error, told)


def paths_info(api: Any, request: Request, user: User | None, repository: Repository, revision: str) -> Reply:
    paths = parse_qs(request.body.decode()).get("paths", [])  # a form, not JSON
    return json_reply(store.paths_info(repository.at(revision), paths))


def refs(api: Any, request: Request, user: User | None, repository: Repository) -> Reply:
    def listed(references: dict[str, str], prefix: str) -> list[dict[str, str]]:
        named = sorted(references.items())
        return [{"name": name, "ref": prefix + name, "targetCommit": oid} for name, oid in named]

    answer = {"branches": listed(repository.branches, "refs/heads/"), "converts": []}
    answer["tags"] = listed(repository.tags, "refs/tags/")
    if request.flag("include_prs"):
        answer["pullRequests"] = listed(repository.pull_requests, "")
    return json_reply(answer)


def commits(api: Any, request: Request, user: User | None, repository: Repository, revision: str) -> Reply:
    described = []
    for commit in repository.log(revision):
        texts = {"id": commit.oid, "title": commit.title, "message": commit.message, "date": commit.date}
        described.append({**texts, "authors": [{"user": commit.author}]})
    return json_reply(described)


def add_branch(api: Any, request: Request, user: User | None, repository: Repository, name: str) -> Reply:
    api.check_write(user, repository.owner)
    repository.add_reference(repository.branches, name, request.json().get("startingPoint") or "main")
    return json_reply({})


def remove_branch(api: Any, request: Request, user: User | None, repository: Repository, name: str) -> Reply:
    api.check_write(user, repository.owner)
    repository.remove_reference(repository.branches, name)
    return json_reply({})


def add_tag(api: Any, request: Request, user: User | None, repository: Repository, revision: str) -> Reply:
    api.check_write(user, repository.owner)
    repository.add_reference(repository.tags, str(request.json().get("tag")), revision)
    return json_reply({})


def remove_tag(api: Any, request: Request, user: User | None, repository: Repository, name: str) -> Reply:
    api.check_write(user, repository.owner)
    repository.remove_reference(repository.tags, name)
    return json_reply({})


def settings(api: Any, request: Request, user: User | None, repository: Repository) -> Reply:
    api.check_write(user, repository.owner)
    asked = request.json()
    if "visibility" in asked:
        repository.private = asked["visibility"] == "private"
    repository.gated = asked.get("gated", repository.gated)
    return json_reply({})


def auth_check(api: Any, request: Request, user: User | None, repository: Repository, right: str = "read") -> Reply:
    check_gate(user, repository)
    if right == "write":
        api.check_write(user, repository.owner)
    return json_reply({})


def check_gate(user: User | None, repository: Repository) -> None:
    """A gate stands before the files only: everybody reads the page and the list of files."""
    if repository.gated and not (user and user.owns(repository.owner)):
        message = f"Access to {repository.kind[:-1]} {repository.id} is restricted. Ask for access on its page."
        raise HubError(403 if user else 401, "GatedRepo", message)


def runtime(api: Any, request: Request, user: User | None, repository: Repository) -> Reply:
    if repository.kind != "spaces":
        raise HubError(404, "", f"{repository.id} is no Space")
    return json_reply(_RUNTIME)

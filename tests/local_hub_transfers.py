"""How files come to the local Hub and go from it. `api` is the [`local_hub_api.HubApi`] that asks."""

import base64
import json
import re
import secrets
from typing import Any
from urllib.parse import quote

from local_hub_messages import Reply, Request, User, error_reply, json_reply
from local_hub_pages import check_gate
from local_hub_store import Blob, Changes, HubError, Repository


def preupload(api: Any, request: Request, user: User | None, repository: Repository, revision: str) -> Reply:
    """Which way each file goes, and which content is already there: clients leave out what has not changed."""
    api.check_push(user, repository, pull_request=request.flag("create_pr"))
    present, answers = repository.at(revision).files, []
    for file in request.json()["files"]:
        mode = "lfs" if repository.goes_to_lfs(file["path"], file["size"], revision) else "regular"
        answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
        if file["path"] in present:
            answers[-1]["oid"] = present[file["path"]].oid
    return json_reply({"files": answers})


def lfs_batch(api: Any, request: Request, user: User | None, repository: Repository) -> Reply:
    asked = request.json()
    if asked.get("operation") != "upload" or "basic" not in asked.get("transfers", []):
        raise HubError(400, "", "only uploads by the transfer basic are served")
    api.check_push(user, repository, pull_request=True)  # what they are for is not said yet
    objects = []
    for wanted in asked["objects"]:
        objects.append({"oid": wanted["oid"], "size": wanted["size"]})
        if wanted["oid"] not in repository.large_files:
            # Like a signed URL: whoever has the ticket may upload these bytes and no others.
            ticket = secrets.token_hex(16)
            api.uploads[ticket] = (repository, wanted["oid"], wanted["size"])
            verify = f"{api.endpoint}/{repository.page}.git/info/lfs/objects/verify"
            upload = f"{api.endpoint}/lfs-upload/{ticket}"
            objects[-1]["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
    return json_reply({"transfer": "basic", "objects": objects})


def put_large_file(api: Any, request: Request, user: User | None, ticket: str) -> Reply:
    if ticket not in api.uploads:
        raise HubError(403, "", "this upload was not asked for")
    repository, oid, size = api.uploads[ticket]
    blob = Blob(request.body, True)
    if (blob.sha256, len(blob.content)) != (oid, size):
        raise HubError(400, "", f"expected {size} bytes of sha256 {oid}, got {len(blob.content)} of {blob.sha256}")
    repository.store(blob)
    return Reply(b"")


def lfs_verify(api: Any, request: Request, user: User | None, repository: Repository) -> Reply:
    api.check_push(user, repository, pull_request=True)
    asked = request.json()
    if len(repository.large_files.get(asked.get("oid"), b"")) != asked.get("size"):
        raise HubError(404, "", f"no such large file was uploaded: {asked}")
    return json_reply({})


def commit(api: Any, request: Request, user: User | None, repository: Repository, revision: str) -> Reply:
    pull_request = request.flag("create_pr")
    user = api.check_push(user, repository, pull_request=pull_request)
    header, changes = read_commit(request.body, repository)
    done = repository.commit(
        changes,
        revision=revision,
        title=str(header["summary"]),
        message=str(header.get("description") or ""),
        author=user.name,
        parent=header.get("parentCommit"),
        pull_request=pull_request,
    )
    page = f"{api.endpoint}/{repository.page}"
    answer = {"success": True, "commitOid": done.oid, "commitUrl": f"{page}/commit/{done.oid}"}
    if pull_request:
        answer["pullRequestUrl"] = f"{page}/discussions/{len(repository.pull_requests)}"
    return json_reply(answer)


def read_commit(body: bytes, repository: Repository) -> tuple[dict[str, Any], Changes]:
    """The header and the changes of a commit that was sent as lines of JSON."""
    header, changes = {}, Changes()
    for line in body.splitlines():
        item = json.loads(line)
        key, value = item["key"], item["value"]
        if key == "header":
            header = value
        elif key == "file":
            changes.files[value["path"]] = Blob(base64.b64decode(value["content"], validate=True), False)
        elif key == "lfsFile":
            if value["oid"] not in repository.large_files:
                raise HubError(400, "", f"{value['path']!r} points to a large file that was not uploaded")
            changes.files[value["path"]] = Blob(repository.large_files[value["oid"]], True)
        elif key == "deletedFile":
            changes.deleted_files.append(value["path"])
        elif key == "deletedFolder":
            changes.deleted_folders.append(value["path"])
        else:
            raise HubError(400, "", f"unknown operation in a commit: {key!r}")
    if not header.get("summary"):
        raise HubError(400, "", "a commit needs a header with a summary")
    return header, changes


def resolve(api: Any, request: Request, user: User | None, repository: Repository, revision: str, path: str) -> Reply:
    """A file. The commit is told with a missing one too: clients then remember that this commit has none."""
    check_gate(user, repository)
    at = repository.at(revision)
    told = {"X-Repo-Commit": at.oid}
    if path not in at.files:
        return error_reply(HubError(404, "EntryNotFound", "Entry not found"), told)
    blob = at.files[path]
    told.update({"ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"})
    told["Content-Disposition"] = f"inline; filename*=UTF-8''{quote(path.rpartition('/')[2])}"
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if not asked or request.method == "HEAD":
        return Reply(blob.content, 200, told)
    size, start = len(blob.content), int(asked[1])
    if start >= size:
        return Reply(b"", 416, {"Content-Range": f"bytes */{size}"})
    part = blob.content[start : int(asked[2]) + 1 if asked[2] else size]
    return Reply(part, 206, {**told, "Content-Range": f"bytes {start}-{start + len(part) - 1}/{size}"})

"""
What a Hub keeps: repositories, their commits, branches and tags, and the large files uploaded for them, all in memory.
This module knows nothing of HTTP; what cannot be done is a [`HubError`] with the status and code that the Hub answers.
Left out, because our repositories do not need it: `.gitignore`, Xet, copies between repositories, discussions.
"""

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property

KINDS = ("models", "datasets", "spaces")
LARGEST_REGULAR_FILE = 10 * 1024 * 1024  # bytes; above it a file goes the LFS way whatever its name

# What a new repository holds. The Hub's own list is longer; these are the formats that weights and records come in.
GITATTRIBUTES = "".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n"
    for pattern in ("*.bin", "*.gguf", "*.npz", "*.onnx", "*.parquet", "*.pt", "*.safetensors", "*.zip", "*tfevents*")
).encode()


class HubError(Exception):
    """An answer other than success: HTTP `status`, the Hub's `code` (`X-Error-Code`, may be empty), and `message`."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class Blob:
    """The bytes of one file, and whether git holds them itself or only a pointer to them."""

    content: bytes
    is_lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        size = len(self.content)
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {size}\n".encode()

    @cached_property
    def git_oid(self) -> str:
        stored = self.pointer if self.is_lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def lfs(self) -> dict[str, int | str]:
        return {"oid": self.sha256, "size": len(self.content), "pointerSize": len(self.pointer)}

    @property
    def oid(self) -> str:
        """What clients compare their own file with, and name it by in the cache: it depends on nothing but content."""
        return self.sha256 if self.is_lfs else self.git_oid


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    message: str
    author: str
    date: str  # ISO 8601, milliseconds, UTC
    files: dict[str, Blob]


@dataclass
class Changes:
    """What one commit does to the files of its parent. Deletions come first: a path may be deleted and added."""

    files: dict[str, Blob] = field(default_factory=dict)
    deleted_files: list[str] = field(default_factory=list)
    deleted_folders: list[str] = field(default_factory=list)


def is_large(path: str, size: int, gitattributes: bytes) -> bool:
    """Whether a file belongs to LFS: by its size in bytes, or by a pattern of `.gitattributes`."""
    if size > LARGEST_REGULAR_FILE:
        return True
    for line in gitattributes.decode(errors="replace").splitlines():
        pattern, *attributes = line.split() or ["#"]
        if pattern.startswith("#") or "filter=lfs" not in attributes:
            continue
        # A pattern without a slash holds in every folder, another one from the root; `*` of fnmatch crosses slashes.
        name = path if "/" in pattern else path.rpartition("/")[2]
        if fnmatch.fnmatchcase(name, pattern.lstrip("/").replace("**/", "*")):
            return True
    return False


def check_path(path: str) -> None:
    parts = path.split("/")
    if not all(parts) or {".", "..", ".git"} & set(parts):
        raise HubError(400, "", f"invalid path in a commit: {path!r}")


def changed(files: dict[str, Blob], changes: Changes) -> dict[str, Blob]:
    """The files after `changes`, or a [`HubError`]; `files` itself stays as it is, so a commit is done or it is not."""
    result = dict(files)
    for path in changes.deleted_files:
        if result.pop(path, None) is None:
            raise HubError(404, "EntryNotFound", f"A file with this name doesn't exist: {path}")
    for folder in changes.deleted_folders:
        inside = [path for path in result if path.startswith(folder.rstrip("/") + "/")]
        if not inside:
            raise HubError(404, "EntryNotFound", f"A folder with this name doesn't exist: {folder}")
        for path in inside:
            del result[path]
    for path in changes.files:
        check_path(path)
    result.update(changes.files)
    for path in result:
        parts = path.split("/")
        if any("/".join(parts[:i]) in result for i in range(1, len(parts))):
            raise HubError(400, "", f"{path!r} needs a folder where there is a file")
    return result


@dataclass
class Repository:
    """
    One repository; `kind` is `"models"`, `"datasets"` or `"spaces"`, `id` is `"owner/name"`. Made with a first commit
    on `main` that holds `.gitattributes`.
    """

    kind: str
    id: str
    creator: str
    private: bool = False
    gated: str | bool = False
    sdk: str | None = None
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: dict[str, str] = field(default_factory=dict)
    history: dict[str, Commit] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)  # by sha256: what was uploaded, committed or not

    def __post_init__(self):
        self._add_commit({".gitattributes": Blob(GITATTRIBUTES, False)}, None, "initial commit", "", self.creator)
        self.branches["main"] = next(iter(self.history))

    @property
    def owner(self) -> str:
        return self.id.partition("/")[0]

    @property
    def page(self) -> str:
        """The path of its page, which is its id with a prefix if it is not a model."""
        return self.id if self.kind == "models" else f"{self.kind}/{self.id}"

    def oid(self, revision: str) -> str:
        """The commit that a branch, tag, pull request, full reference or full commit id stands for."""
        for prefix, references in (
            ("refs/heads/", self.branches),
            ("refs/tags/", self.tags),
            ("", self.branches | self.tags | self.pull_requests | {oid: oid for oid in self.history}),
        ):
            if revision.startswith(prefix) and revision.removeprefix(prefix) in references:
                return references[revision.removeprefix(prefix)]
        raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def at(self, revision: str) -> Commit:
        return self.history[self.oid(revision)]

    def log(self, revision: str) -> list[Commit]:
        """Commits of a revision, newest first."""
        commits = [self.at(revision)]
        while commits[-1].parent:
            commits.append(self.history[commits[-1].parent])
        return commits

    def goes_to_lfs(self, path: str, size: int, revision: str) -> bool:
        attributes = self.at(revision).files.get(".gitattributes")
        return size > 0 and is_large(path, size, attributes.content if attributes else b"")

    def commit(
        self,
        changes: Changes,
        *,
        revision: str,
        title: str,
        message: str = "",
        author: str,
        parent: str | None = None,
        pull_request: bool = False,
    ) -> Commit:
        """One commit on a branch, or as a new pull request for it. `parent`, if given, is what the head must be."""
        head = self.oid(revision)
        references = next((refs for refs in (self.branches, self.pull_requests) if revision in refs), None)
        if references is None:
            raise HubError(400, "", f"only a branch can be committed to, got {revision!r}")
        if parent not in (None, head):
            raise HubError(412, "", "A commit has happened since. Please refresh and try again.")
        for path, blob in changes.files.items():
            if not blob.is_lfs and len(blob.content) > LARGEST_REGULAR_FILE:
                raise HubError(400, "", f"{path!r} is too large for a regular file; it belongs to LFS")
        commit = self._add_commit(changed(self.history[head].files, changes), head, title, message, author)
        if pull_request:
            references, revision = self.pull_requests, f"refs/pr/{len(self.pull_requests) + 1}"
        references[revision] = commit.oid
        return commit

    def _add_commit(self, files: dict[str, Blob], parent: str | None, title: str, message: str, author: str) -> Commit:
        # A clock that ticks with commits: nothing here depends on when tests run.
        moment = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(minutes=len(self.history))
        date = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        content = {path: blob.oid for path, blob in sorted(files.items())}
        described = [self.kind, self.id, parent, title, message, author, date, content]
        oid = hashlib.sha1(json.dumps(described).encode()).hexdigest()
        self.history[oid] = Commit(oid, parent, title, message, author, date, files)
        return self.history[oid]

    def add_reference(self, references: dict[str, str], name: str, revision: str) -> None:
        """A new branch or tag; `references` is `self.branches` or `self.tags`."""
        if name in references:
            raise HubError(409, "", f"Reference already exists: {name}")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name) or re.fullmatch(r"[0-9a-f]{40}", name):
            raise HubError(400, "", f"invalid reference name: {name!r}")
        references[name] = self.oid(revision)

    def remove_reference(self, references: dict[str, str], name: str) -> None:
        if name == "main" and references is self.branches:
            raise HubError(400, "", "the branch main cannot be deleted")
        if references.pop(name, None) is None:
            raise HubError(404, "RevisionNotFound", f"Reference doesn't exist: {name}")

    def store(self, blob: Blob) -> None:
        """Keep a large file, so that commits may point to it."""
        self.large_files[blob.sha256] = blob.content


def tree(commit: Commit, folder: str, *, recursive: bool) -> list[dict]:
    """Files and folders below `folder` (`""` is the root), as the Hub lists them; a [`HubError`] if it is no folder."""
    prefix = f"{folder}/" if folder else ""
    inside = {path: blob for path, blob in commit.files.items() if path.startswith(prefix)}
    if folder and not inside:
        raise HubError(404, "EntryNotFound", f"{folder} does not exist on {commit.oid}")
    entries = {}
    for path, blob in inside.items():
        parts = path.removeprefix(prefix).split("/")
        for i in range(1, len(parts)):
            name = prefix + "/".join(parts[:i])
            entries[name] = folder_entry(commit, name)
        entries[path] = file_entry(path, blob)
    shown = (path for path in entries if recursive or "/" not in path.removeprefix(prefix))
    return [entries[path] for path in sorted(shown)]


def paths_info(commit: Commit, paths: Iterable[str]) -> list[dict]:
    """Entries of the given files and folders; those that are not there are left out."""
    entries = []
    for path in paths:
        if path in commit.files:
            entries.append(file_entry(path, commit.files[path]))
        elif any(name.startswith(f"{path}/") for name in commit.files):
            entries.append(folder_entry(commit, path))
    return entries


def file_entry(path: str, blob: Blob) -> dict:
    entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.git_oid}
    if blob.is_lfs:
        entry["lfs"] = blob.lfs
    return entry


def folder_entry(commit: Commit, path: str) -> dict:
    inside = {name: blob.git_oid for name, blob in sorted(commit.files.items()) if name.startswith(f"{path}/")}
    return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(json.dumps(inside).encode()).hexdigest()}

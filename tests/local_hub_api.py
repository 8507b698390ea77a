"""
The API of the local Hub: which request goes where, who asks, and what they may do. The answers themselves are in
[`local_hub_pages`] and [`local_hub_transfers`], sockets in [`local_hub`].
"""

from collections.abc import Callable
from urllib.parse import unquote

import local_hub_pages as pages
import local_hub_transfers as transfers
from local_hub_messages import Reply, Request, User, error_reply, unauthorized
from local_hub_store import KINDS, HubError, Repository

Route = Callable[..., Reply]

# Paths after /api/. They are called with the API, the request and the user.
_ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "repos/create"): pages.create,
    ("DELETE", "repos/delete"): pages.delete,
    ("GET", "whoami-v2"): pages.whoami,
    ("POST", "validate-yaml"): pages.validate_yaml,
}
# Paths after /api/models/owner/name: the word, and how many segments follow it. The repository and those segments,
# unquoted, are passed too.
_REPOSITORY_ROUTES: dict[tuple[str, str, int], Route] = {
    ("GET", "", 0): pages.info,
    ("GET", "revision", 1): pages.info,
    ("GET", "tree", 1): pages.tree,
    ("GET", "tree", 2): pages.tree,
    ("POST", "paths-info", 1): pages.paths_info,
    ("GET", "refs", 0): pages.refs,
    ("GET", "commits", 1): pages.commits,
    ("POST", "branch", 1): pages.add_branch,
    ("DELETE", "branch", 1): pages.remove_branch,
    ("POST", "tag", 1): pages.add_tag,
    ("DELETE", "tag", 1): pages.remove_tag,
    ("PUT", "settings", 0): pages.settings,
    ("GET", "auth-check", 0): pages.auth_check,
    ("GET", "auth-check", 1): pages.auth_check,
    ("GET", "runtime", 0): pages.runtime,
    ("POST", "preupload", 1): transfers.preupload,
    ("POST", "commit", 1): transfers.commit,
}
# Paths after /owner/name.git/ and, again with the number of segments, after /owner/name/.
_GIT_ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "info/lfs/objects/batch"): transfers.lfs_batch,
    ("POST", "info/lfs/objects/verify"): transfers.lfs_verify,
}
_FILE_ROUTES: dict[tuple[str, str, int], Route] = {
    (method, word, 2): transfers.resolve for method in ("GET", "HEAD") for word in ("resolve", "raw")
}
_WORDS = {word for _, word, _ in [*_REPOSITORY_ROUTES, *_FILE_ROUTES] if word}


class HubApi:
    """The state of one Hub, and [`~HubApi.answer`]. Not safe for threads: [`local_hub`] asks one at a time."""

    def __init__(self, endpoint: str):
        self.endpoint = endpoint
        self.users: dict[str, User] = {}  # by token
        self.repositories: dict[tuple[str, str], Repository] = {}  # by kind and id
        self.uploads: dict[str, tuple[Repository, str, int]] = {}  # by ticket: for which repository, sha256, bytes

    def answer(self, request: Request) -> Reply:
        try:
            user = self._user(request)
            route, arguments = self._route(request, user)
            return route(self, request, user, *arguments)
        except HubError as error:
            return error_reply(error)

    def _user(self, request: Request) -> User | None:
        if request.token is None:
            return None
        if request.token not in self.users:
            raise HubError(401, "", "Invalid credentials in Authorization header")
        return self.users[request.token]

    def _route(self, request: Request, user: User | None) -> tuple[Route, tuple]:
        method, parts = request.method, request.parts
        route, kind, name, rest = None, "models", None, []
        if parts[0] == "lfs-upload" and len(parts) == 2 and method == "PUT":
            return transfers.put_large_file, (parts[1],)
        if parts[0] == "api" and len(parts) > 2 and parts[1] in KINDS:
            kind, (name, word, rest) = parts[1], _split(parts[2:])
            route = _REPOSITORY_ROUTES.get((method, word, len(rest)))
        elif parts[0] == "api":
            route = _ROUTES.get((method, "/".join(parts[1:])))
        else:
            kind, parts = (parts[0], parts[1:]) if parts[0] in KINDS and len(parts) > 1 else (kind, parts)
            name, word, rest = _split(parts)
            if name.endswith(".git"):
                name, route, rest = name[: -len(".git")], _GIT_ROUTES.get((method, "/".join([word, *rest]))), []
            else:
                route = _FILE_ROUTES.get((method, word, len(rest)))
        if route is None:
            raise HubError(404, "", f"nothing is served at {method} {request.target}")
        return route, () if name is None else (self.repository(user, kind, name), *map(unquote, rest))

    def repository(self, user: User | None, kind: str, name: str) -> Repository:
        """A repository that `user` may see. One that may not be seen is answered like one that is not there."""
        repository = self.repositories.get((kind, name))
        if repository is None or (repository.private and not (user and user.owns(repository.owner))):
            raise HubError(404, "RepoNotFound", "Repository not found") if user else unauthorized("RepoNotFound")
        return repository

    def check_write(self, user: User | None, namespace: str) -> User:
        if user is None:
            raise unauthorized("RepoNotFound")
        if user.role != "write":
            raise HubError(403, "", f"the token of {user.name!r} may read and not write")
        if not user.owns(namespace):
            raise HubError(403, "", f"{user.name!r} has not the rights to write under the namespace {namespace!r}")
        return user

    def check_push(self, user: User | None, repository: Repository, *, pull_request: bool) -> User:
        """Whoever may write at all may open a pull request for what they see."""
        return self.check_write(user, user.name if user and pull_request else repository.owner)


def _split(parts: list[str]) -> tuple[str, str, list[str]]:
    """
    `owner/name`, the word after it (`""` if there is none) and the segments after that: a revision, and a path that may
    be quoted as one segment or not. A name without an owner is split too; nothing of that kind is kept here.
    """
    length = 1 if len(parts) < 2 or parts[1] in _WORDS else 2
    word, rest = (parts[length], parts[length + 1 :]) if len(parts) > length else ("", [])
    if word in ("tree", "resolve", "raw") and len(rest) > 1:
        rest = [rest[0], "/".join(rest[1:])]
    return "/".join(parts[:length]), word, rest

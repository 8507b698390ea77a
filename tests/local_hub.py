"""
A Hugging Face Hub on this machine, for the real clients: `huggingface_hub`, transformers and whatever is built on them
reach it by `HF_ENDPOINT`, so nothing of theirs or ours is replaced in a test.

Endpoint, caches and offline mode are read when `huggingface_hub` is imported. Clients therefore run in other processes,
with [`LocalHub.environment`]; `python_process.py` starts them. Their caches hide what the Hub would say: give
each case a home of its own.

What it does not know: Xet (switched off in the environment), git itself, `.gitignore`, and the rules for cards that
only the Hub's own server checks.
"""

import os
import re
import secrets
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import NamedTuple

from local_hub_api import HubApi
from local_hub_messages import Reply, Request, User, error_reply
from local_hub_store import KINDS, Blob, Changes, Commit, HubError, Repository

# Variables of a user's own set-up that would lead a client elsewhere.
_INHERITED = re.compile(r"(HF|HUGGING_?FACE|TRANSFORMERS|GRADIO)_.*|(https?|all|no)_proxy", re.IGNORECASE)


class LoggedRequest(NamedTuple):
    method: str
    path: str  # as it was sent, with quotes and query
    status: int  # 0 if the connection was closed instead of an answer
    has_token: bool


@dataclass
class _Failure:
    method: str
    pattern: str
    countdown: int
    status: int | None


class LocalHub:
    """
    A Hub at `endpoint`, from entering it as a context to leaving it. Repositories live in memory. `requests` logs every
    request in the order of the answers.

    ```python
    with LocalHub() as hub:
        token = hub.add_user("ada")
        hub.put("ada/tiny", {"config.json": b"{}"})
        subprocess.run([...], env=hub.environment(tmp_path / "home", token=token))
        assert hub.files("ada/tiny")["config.json"] == b"{}"
    ```
    """

    def __init__(self) -> None:
        self.requests: list[LoggedRequest] = []
        self._failures: list[_Failure] = []
        self._own_errors: list[str] = []
        self._lock = threading.RLock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._api = HubApi(self.endpoint)

    def __enter__(self) -> "LocalHub":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        # A client may have swallowed an answer that was our own mistake.
        if self._own_errors and kind is None:
            raise AssertionError("the local Hub itself failed:\n" + "\n".join(self._own_errors))

    # Users and their environment

    def add_user(self, name: str, role: str = "write", *, organizations: tuple[str, ...] = ()) -> str:
        """A new token of the user `name`, to `"read"` or to `"write"`, also in the namespaces of `organizations`."""
        if role not in ("read", "write"):
            raise ValueError(f"`role` must be 'read' or 'write', got {role!r}.")
        token = f"hf_{secrets.token_hex(17)}"
        self._api.users[token] = User(name, role, organizations)
        return token

    def environment(self, home: Path, *, token: str | None = None, offline: bool = False) -> dict[str, str]:
        """Environment variables of a client process: this Hub, everything kept in the folder `home`, nothing else."""
        kept = {name: value for name, value in os.environ.items() if not _INHERITED.fullmatch(name)}
        kept.update(
            HF_ENDPOINT=self.endpoint,
            HF_HOME=str(home),
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            DISABLE_SAFETENSORS_CONVERSION="1",
            GRADIO_ANALYTICS_ENABLED="False",
            TOKENIZERS_PARALLELISM="false",
            OMP_NUM_THREADS="1",
            NO_PROXY="127.0.0.1",
            no_proxy="127.0.0.1",
        )
        if token is not None:
            kept["HF_TOKEN"] = token
        if offline:
            kept.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        return kept

    # Repositories, without a client

    def repository(self, repo_id: str, *, repo_type: str = "model") -> Repository:
        """The repository itself, or `KeyError`."""
        return self._api.repositories[_kind(repo_type), repo_id]

    def put(
        self,
        repo_id: str,
        files: dict[str, bytes],
        *,
        repo_type: str = "model",
        revision: str = "main",
        message: str = "Add files",
        delete: tuple[str, ...] = (),
        private: bool | None = None,
        gated: str | bool | None = None,
    ) -> str:
        """
        One commit that adds or replaces `files` and removes `delete`. The repository and the branch are made if they
        are missing; `private` and `gated` (`"auto"`, `"manual"` or `False`) are set if they are given.

        Returns:
            `str`: The id of the commit.
        """
        with self._lock:
            key, owner = (_kind(repo_type), repo_id), repo_id.partition("/")[0]
            if key not in self._api.repositories:
                sdk = "gradio" if repo_type == "space" else None
                self._api.repositories[key] = Repository(*key, creator=owner, sdk=sdk)
            repository = self._api.repositories[key]
            repository.private = repository.private if private is None else private
            repository.gated = repository.gated if gated is None else gated
            if revision not in repository.branches:
                repository.add_reference(repository.branches, revision, "main")
            changes = Changes(deleted_files=list(delete))
            for path, content in files.items():
                changes.files[path] = Blob(content, repository.goes_to_lfs(path, len(content), revision))
                if changes.files[path].is_lfs:
                    repository.store(changes.files[path])
            return repository.commit(changes, revision=revision, title=message, author=owner).oid

    def files(self, repo_id: str, revision: str = "main", *, repo_type: str = "model") -> dict[str, bytes]:
        """The content of every file by its path, large files as they are and not as pointers."""
        commit = self.repository(repo_id, repo_type=repo_type).at(revision)
        return {path: blob.content for path, blob in commit.files.items()}

    def commits(self, repo_id: str, revision: str = "main", *, repo_type: str = "model") -> list[Commit]:
        """Commits, newest first; the last one made the repository."""
        return self.repository(repo_id, repo_type=repo_type).log(revision)

    @contextmanager
    def watch(self) -> Iterator[list[LoggedRequest]]:
        """A list that holds, when the context is left, the requests answered since it was entered."""
        start, seen = len(self.requests), []
        yield seen
        seen.extend(self.requests[start:])

    # Failures

    def fail(self, method: str, pattern: str, *, nth: int = 1, status: int | None = 400) -> None:
        """
        The `nth` request from now on with this method and a path in which the regular expression `pattern` is found is
        not carried out but answered with `status`; `None` closes the connection without an answer. Once only.

        Clients ask again, for up to half a minute, after 408, 429, 500, 502, 503, 504 and after a closed connection;
        not so when they send the commit itself.
        """
        self._failures.append(_Failure(method, pattern, nth, status))

    def fail_upload(self, nth: int = 1, *, status: int | None = 400) -> None:
        """[`~LocalHub.fail`] at the `nth` large file that is sent."""
        self.fail("PUT", "^/lfs-upload/", nth=nth, status=status)

    def fail_commit(self, nth: int = 1, *, status: int | None = 400) -> None:
        """[`~LocalHub.fail`] at the `nth` commit, when everything is uploaded."""
        self.fail("POST", "/commit/", nth=nth, status=status)

    @property
    def pending_failures(self) -> int:
        """How many of the failures asked for have not happened."""
        return len(self._failures)

    # Answers

    def answer(self, request: Request) -> Reply | None:
        """The answer to one request, one at a time; `None` closes the connection. It is logged before it is sent."""
        with self._lock:
            failure = self._failure(request)
            if failure is None:
                try:
                    reply = self._api.answer(request)
                except Exception:
                    self._own_errors.append(f"{request.method} {request.target}\n{traceback.format_exc()}")
                    # Not 500: clients would ask again and again.
                    reply = error_reply(HubError(400, "", traceback.format_exc()))
            elif failure.status is None:
                reply = None
            else:
                reply = error_reply(HubError(failure.status, "", "a failure made for a test"))
            status = reply.status if reply else 0
            self.requests.append(LoggedRequest(request.method, request.target, status, request.token is not None))
            return reply

    def _failure(self, request: Request) -> _Failure | None:
        for failure in self._failures:
            if failure.method == request.method and re.search(failure.pattern, request.target):
                failure.countdown -= 1
                if failure.countdown == 0:
                    self._failures.remove(failure)
                    return failure
        return None


def _kind(repo_type: str) -> str:
    if f"{repo_type}s" not in KINDS:
        raise ValueError(f"`repo_type` must be 'model', 'dataset' or 'space', got {repo_type!r}.")
    return f"{repo_type}s"


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # connections that clients keep open do not hold up the end
    request_queue_size = 64  # clients open many at once
    hub: LocalHub

    def server_bind(self) -> None:
        # Not by HTTPServer, which asks for the name of this machine: without a name server that takes seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that was killed is no error here
            with self.hub._lock:
                self.hub._own_errors.append(traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet: two would wait for each other
    server: _Server

    def _answer(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.close_connection = True
            body, reply = b"", error_reply(HubError(411, "", "a body needs a Content-Length"))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = self.server.hub.answer(Request(self.command, self.path, headers, body))
        if reply is None:
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal: `LocalHub.requests` is the log."""

"""What is asked of the local Hub and what it answers, as values; and who asks."""

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from local_hub_store import HubError


@dataclass(frozen=True)
class User:
    name: str
    role: str  # of the token: "read" or "write"
    organizations: tuple[str, ...] = ()

    def owns(self, namespace: str) -> bool:
        return namespace == self.name or namespace in self.organizations


@dataclass
class Request:
    method: str
    target: str  # as it was sent: quoted path and query
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def parts(self) -> list[str]:
        """The segments of the path, still quoted: a revision with a slash is one of them."""
        return self.target.partition("?")[0].strip("/").split("/")

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.target.partition("?")[2])

    def flag(self, name: str) -> bool:
        return self.query.get(name, [""])[0].lower() in ("1", "true")

    @property
    def token(self) -> str | None:
        kind, _, token = self.headers.get("authorization", "").partition(" ")
        return token if kind.lower() == "bearer" else None

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise HubError(400, "", f"the body of {self.method} {self.target} must be a JSON object")
        return value


@dataclass
class Reply:
    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def json_reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return Reply(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})


def error_reply(error: HubError, headers: dict[str, str] | None = None) -> Reply:
    # An answer to HEAD has no body, so the text is in a header too.
    told = {"X-Error-Message": error.message.replace("\n", " ").encode("ascii", "replace").decode(), **(headers or {})}
    if error.code:
        told["X-Error-Code"] = error.code
    return json_reply({"error": error.message}, error.status, told)


def unauthorized(code: str = "") -> HubError:
    """
    For somebody without a token. Clients know by the `https://` of a URL that a 401 is about a repository; the URLs
    here have none, so the code says it.
    """
    return HubError(401, code, "Invalid username or password.")

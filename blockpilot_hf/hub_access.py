"""Whether the Hub can be asked and written to: names, tokens, and its errors in one sentence each."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id


def check_namespace(namespace: str) -> None:
    """
    Raises:
        `ValueError`: if it cannot be the name of a user or an organization.
    """
    try:
        if "/" in namespace or not namespace:
            raise HFValidationError("one name, without a slash")
        validate_repo_id(f"{namespace}/name")
    except HFValidationError as error:
        raise ValueError(
            f"`--namespace` takes the name of a user or an organization of the Hub, got {namespace!r}."
        ) from error


def check_token(api: HfApi, namespace: str) -> None:
    """
    Whether the Hub knows the token and it may write in the namespace, as far as it can be told without writing.

    Raises:
        `OSError`: if not.
    """
    if not (api.token or get_token()):
        raise OSError("Pushing needs a token that may write. Run `hf auth login`, set HF_TOKEN or pass `--token`.")
    with hub_errors(api):
        who = api.whoami()
    role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise OSError(
            f"The token of {who['name']} may only read. Make one that may write at {api.endpoint}/settings/tokens."
        )
    names = [who["name"], *(org["name"] for org in who.get("orgs") or ())]
    # What a fine-grained token may do is only known when it does it.
    if role == "write" and namespace.lower() not in [name.lower() for name in names]:
        raise OSError(
            f"The token of {who['name']} may not write to {namespace}. Its namespaces are {', '.join(names)}."
        )


@contextmanager
def hub_errors(api: HfApi, repo_id: str | None = None) -> Iterator[None]:
    """Errors of the Hub as one sentence each, with what to do."""
    where = f" ({repo_id})" if repo_id else ""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise OSError(f"HF_HUB_OFFLINE is set, so {api.endpoint} cannot be asked. Unset it to push.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = error.server_message or str(error).splitlines()[0]
        meaning = {
            401: "The Hub does not know the token. Run `hf auth login`, or give another by HF_TOKEN or `--token`",
            403: "The token may not write there. Use one that may, or another `--namespace`",
            412: "Someone else changed the repository in the meantime. Push again",
        }.get(status, "The Hub refused")
        raise OSError(f"{meaning}{where}: {said}") from error
    except RuntimeError as error:  # in which the client wraps what went wrong with a large file
        raise OSError(f"{str(error).rstrip('.')}{where}: {error.__cause__ or 'no reason given'}") from error
    except HTTPError as error:
        raise OSError(
            f"{api.endpoint} cannot be reached{where}: {error}. Check the network and HF_ENDPOINT, and push again."
        ) from error


__all__ = ["check_namespace", "check_token", "hub_errors"]

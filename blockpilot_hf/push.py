"""Assembled repositories to the Hub, one commit each and none where nothing changes.

A commit appears whole or not at all, so whatever stops a push, each repository is as it was or as it should be, and the
same push again does the rest. Policies go first: a drafter names its policy with the commit that it was pushed with.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from .export import RECIPE_NAME, FileChange, assemble, compare_files, fill_in, read_config
from .export_checks import check_repository
from .hub_access import hub_errors

# What loading a policy reads: while these stay the same, a drafter goes on naming the commit that it names.
_LOADED = ("config.json", "model.safetensors")


@dataclass(frozen=True)
class Remote:
    """
    A repository as the Hub has it.

    Args:
        head (`str`): Id of the newest commit.
        files (`dict[str, str]`): SHA-256 or git's SHA-1 of every file, by path; none that are hidden.
        is_private (`bool`): Whether others cannot see it.
        has_branch (`bool`): Whether the branch is there that was asked for; else this is `main`.
    """

    head: str
    files: dict[str, str]
    is_private: bool
    has_branch: bool


@dataclass(frozen=True)
class Plan:
    """
    What a push does to one repository.

    Args:
        repo_id (`str`): With the namespace.
        folder (`Path`): The assembled files.
        remote ([`Remote`], *optional*): What is there; `None` if nothing is, or nothing that may be seen.
        changes (`list[FileChange]`): By file.
        awaits (`str`, *optional*): Id of the policy whose next commit this drafter will name.
    """

    repo_id: str
    folder: Path
    remote: Remote | None
    changes: list[FileChange]
    awaits: str | None = None

    @property
    def has_changes(self) -> bool:
        """Whether there is anything to commit."""
        return any(change.status != "unchanged" for change in self.changes)


@contextmanager
def assembled(names: Sequence[str], namespace: str) -> Iterator[dict[str, Path]]:
    """
    Folders of the repositories as they are pushed, checked, by name; gone afterwards.

    Raises:
        `ValueError`: if one of them is not fit to be pushed.
    """
    with tempfile.TemporaryDirectory(prefix="blockpilot-push-") as work:
        folders = {name: Path(work, name) for name in names}
        for name, folder in folders.items():
            assemble(name, folder)
            fill_in(folder, namespace)
            check_repository(folder)
        yield folders


def plan_push(
    api: HfApi, folders: dict[str, Path], namespace: str, *, private: bool = False, revision: str | None = None
) -> list[Plan]:
    """
    Compare with the Hub, and write nothing there.

    Args:
        folders (`dict[str, Path]`): From [`assembled`]. The policy's commit is written into a drafter's config.
        private (`bool`, *optional*, defaults to `False`): Whether what is pushed has to be private.
        revision (`str`, *optional*): Branch, `main` by default.

    Raises:
        `ValueError`: for a repository that is public and should be private, and for one of another kind.
        `OSError`: if the Hub cannot be asked.
    """
    plans: dict[str, Plan] = {}
    for name, folder in folders.items():
        repo_id = f"{namespace}/{name}"
        remote = _remote(api, repo_id, revision)
        if remote is not None:
            marker = "custom_generate/generate.py" if name == RECIPE_NAME else "config.json"
            _check_remote(repo_id, remote, marker, private)
        policy = _policy_of(folder)
        awaits = None
        if policy is not None:
            pin = _pin(api, policy, plans.get(policy), repo_id, remote, revision)
            fill_in(folder, namespace, pin)
            awaits = policy if pin is None else None
        changes = compare_files(folder, remote.files if remote else {})
        plans[repo_id] = Plan(repo_id, folder, remote, changes, awaits)
    return list(plans.values())


def plan_unseen(folders: dict[str, Path], namespace: str) -> list[Plan]:
    """What would be pushed, where the Hub cannot be asked."""
    return [
        Plan(
            f"{namespace}/{name}",
            folder,
            None,
            [replace(change, status="not compared") for change in compare_files(folder, {})],
        )
        for name, folder in folders.items()
    ]


def push(
    api: HfApi,
    plans: Sequence[Plan],
    namespace: str,
    *,
    message: str,
    private: bool = False,
    revision: str | None = None,
) -> Iterator[tuple[Plan, str | None]]:
    """
    Carry plans out in their order.

    Args:
        message (`str`): First line of the commits.
        private (`bool`, *optional*, defaults to `False`): Of repositories that are made.
        revision (`str`, *optional*): Branch, made where it is missing.

    Yields:
        `tuple(Plan, str | None)`: what is done, with the address of the commit, `None` where nothing changed.

    Raises:
        `OSError`: if the Hub refuses, or someone else changed a repository since it was compared.
    """
    commits: dict[str, str] = {}
    for plan in plans:
        if plan.awaits is not None:
            fill_in(plan.folder, namespace, commits[plan.awaits])
            plan = replace(plan, changes=compare_files(plan.folder, plan.remote.files if plan.remote else {}))
        with hub_errors(api, plan.repo_id):
            if plan.remote is None:
                api.create_repo(plan.repo_id, private=private or None, exist_ok=True)
            if revision is not None and (plan.remote is None or not plan.remote.has_branch):
                api.create_branch(plan.repo_id, branch=revision, exist_ok=True)
            if not plan.has_changes:
                yield plan, None
                continue
            commit = api.create_commit(
                plan.repo_id,
                _operations(plan),
                commit_message=message,
                revision=revision,
                parent_commit=plan.remote.head if plan.remote else None,
            )
        commits[plan.repo_id] = commit.oid
        yield plan, commit.commit_url


def _operations(plan: Plan) -> list[Any]:
    """Files by their paths: open ones would be sent as large ones whatever their size."""
    operations: list[Any] = []
    for change in plan.changes:
        if change.status == "removed":
            operations.append(CommitOperationDelete(change.path))
        elif change.status != "unchanged":
            operations.append(CommitOperationAdd(change.path, plan.folder / change.path))
    return operations


def _remote(api: HfApi, repo_id: str, revision: str | None) -> Remote | None:
    with hub_errors(api, repo_id):
        has_branch = True
        try:
            try:
                info = api.model_info(repo_id, revision=revision, files_metadata=True)
            except RevisionNotFoundError:
                has_branch = False
                info = api.model_info(repo_id, files_metadata=True)
        except RepositoryNotFoundError:
            return None
    files = {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id or "" for file in info.siblings or ()}
    # Hidden files are the Hub's own, such as `.gitattributes`, or were put there by other tools.
    files = {path: oid for path, oid in files.items() if not path.startswith(".")}
    return Remote(info.sha or "", files, bool(info.private), has_branch)


def _check_remote(repo_id: str, remote: Remote, marker: str, private: bool) -> None:
    if private and not remote.is_private:
        raise ValueError(
            f"{repo_id} is there and public, and `--private` is for repositories that are made. Make it private in its "
            "settings, or leave `--private` out."
        )
    others = sorted(set(remote.files) - {"README.md"})
    if others and marker not in remote.files:
        raise ValueError(
            f"{repo_id} is there and holds something else ({', '.join(others[:3])}, no {marker}). Push to another "
            "namespace, or rename that repository."
        )


def _policy_of(folder: Path) -> str | None:
    return read_config(folder).get("policy") if (folder / "config.json").is_file() else None


def _pin(
    api: HfApi, policy: str, plan: Plan | None, repo_id: str, remote: Remote | None, revision: str | None
) -> str | None:
    """
    The commit of its policy that a drafter is to name: the one that it names while loading that reads the same, else
    the newest; `None` if that is still to be made.
    """
    named = None
    if remote is not None and "config.json" in remote.files:
        with hub_errors(api, repo_id), tempfile.TemporaryDirectory() as work:
            api.hf_hub_download(repo_id, "config.json", revision=remote.head, local_dir=work)
            config = read_config(Path(work))
        named = config.get("policy_revision") if config.get("policy") == policy else None
    at_named = _remote(api, policy, named) if named else None
    if at_named is not None and at_named.has_branch:
        if plan is None:
            return named
        now = compare_files(plan.folder, at_named.files)
        if all(change.status == "unchanged" for change in now if change.path in _LOADED):
            return named
    if plan is not None:
        return plan.remote.head if plan.remote and not plan.has_changes else None
    there = _remote(api, policy, revision)
    if there is None:
        raise ValueError(
            f"{repo_id} names its policy {policy}, which is not on the Hub. Push it too: "
            f"`--repos {policy.rpartition('/')[2]},{repo_id.rpartition('/')[2]}`."
        )
    return there.head


__all__ = [
    "Plan",
    "Remote",
    "assembled",
    "plan_push",
    "plan_unseen",
    "push",
]

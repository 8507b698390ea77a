"""`blockpilot export` and `blockpilot push`: the embedded pair and the recipe as Hub repositories."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import HfApi

from .cli_common import package_version
from .cli_console import Screen, working
from .display import counted
from .export import REPOSITORIES, FileChange, chosen_repositories, export
from .hub_access import check_namespace, check_token
from .push import Plan, assembled, plan_push, plan_unseen, push

Repositories = Annotated[
    str | None,
    typer.Option(
        "--repos",
        help=f"Only these, comma-separated: {', '.join(REPOSITORIES)}.",
        show_default="all",
        metavar="NAMES",
    ),
]


def export_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them, one folder each.")],
    repos: Repositories = None,
) -> None:
    """
    Write the repositories file for file as they lie on the Hub: weights, records and cards as they come with this
    package, and copies of its code. An earlier export is brought up to date; in a checkout `blockpilot export
    hub_cards` does that for the copies there.
    """
    screen = Screen()
    for name, changes in export(folder, _names(repos)).items():
        _show(screen, str(folder / name), changes)


def push_command(
    namespace: Annotated[str, typer.Option(help="User or organization to push to.", metavar="NAME")],
    private: Annotated[
        bool, typer.Option("--private", help="Make new repositories private. One that is there has to be.")
    ] = False,
    repos: Repositories = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be uploaded, and upload nothing; needs no token.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, made where it is missing.", show_default="main", metavar="BRANCH")
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="Token that may write.", show_default="HF_TOKEN, else that of `hf auth login`")
    ] = None,
) -> None:
    """
    Assemble the repositories, check them, show what is new, and upload it in one commit each. Where nothing is new
    there is no commit. Policies go first: the drafter's config names the commit of its policy.
    """
    check_namespace(namespace)
    names = chosen_repositories(_names(repos))
    screen = Screen()
    api = HfApi(token=token, library_name="blockpilot_hf", library_version=package_version())
    if not dry_run:
        check_token(api, namespace)
    with ExitStack() as stack:
        with working("checking the repositories"):
            folders = stack.enter_context(assembled(names, namespace))
        unseen = None
        try:
            plans = plan_push(api, folders, namespace, private=private, revision=revision)
        except OSError as error:
            if not dry_run:
                raise
            plans, unseen = plan_unseen(folders, namespace), error
        for plan in plans:
            _show(screen, plan.repo_id, plan.changes, "; names the coming commit of its policy" if plan.awaits else "")
        if unseen is not None:
            screen.line(f"not compared with the Hub: {unseen}")
        if dry_run:
            screen.line("nothing was uploaded (`--dry-run`)")
            return
        _push(screen, api, plans, namespace, private=private, revision=revision)


def _push(
    screen: Screen, api: HfApi, plans: Sequence[Plan], namespace: str, *, private: bool, revision: str | None
) -> None:
    """Whatever stops it, say how far it came."""
    waiting = [plan.repo_id for plan in plans]
    message = f"Upload with blockpilot_hf {package_version()}"
    try:
        for plan, url in push(api, plans, namespace, message=message, private=private, revision=revision):
            waiting.remove(plan.repo_id)
            screen.line(f"{plan.repo_id}: {url or 'unchanged'}")
    finally:
        if waiting:
            done = [plan.repo_id for plan in plans if plan.repo_id not in waiting]
            print(
                f"done: {', '.join(done) or 'none'}; not done: {', '.join(waiting)}. The same command does the rest.",
                file=sys.stderr,
            )


def _show(screen: Screen, title: str, changes: Sequence[FileChange], note: str = "") -> None:
    statuses = [change.status for change in changes]
    parts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    size = sum(change.size for change in changes)
    rows = [
        [change.path, f"{change.size:,}" if change.status != "removed" else "-", change.status] for change in changes
    ]
    screen.table(f"{title}: {counted(len(changes), 'file')}, {size / 1e6:.1f} MB", ["file", "bytes", "status"], rows)
    screen.line(f"{', '.join(parts)}{note}")
    screen.line()


def _names(repos: str | None) -> list[str] | None:
    return None if repos is None else [name.strip() for name in repos.split(",")]


__all__ = ["export_command", "push_command"]

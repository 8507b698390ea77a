"""The Space as it lies on the Hub: `python demo/assemble.py FOLDER --namespace NAME [--push] [--private]`.

Writes a folder that stands alone: this one's files, a copy of the package, and the embedded drafter and policies. With
`--push` it becomes the Space `NAME/blockpilot`, in one commit.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi

import blockpilot_hf
from blockpilot_hf.embedded import EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME
from blockpilot_hf.export import NAMESPACE
from blockpilot_hf.hub_access import check_namespace, check_token, hub_errors
from blockpilot_hf.loading import EMBEDDED_DRAFTER_NAME, embedded_drafter_dir

SPACE_NAME = "blockpilot"
# Of no use on the Hub.
_STAYS = ("assemble.py", "screenshots.py")
_MODELS = (EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME)


def assemble(folder: Path, namespace: str) -> None:
    """
    Write the Space's files.

    Args:
        folder (`Path`): New or empty.
        namespace (`str`): User or organisation whose models the README names.

    Raises:
        `ValueError`: if the folder holds anything.
    """
    check_namespace(namespace)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty. Name a new folder.")
    here, package = Path(__file__).parent, Path(blockpilot_hf.__file__).parent
    files = {
        path.name: path
        for path in sorted(here.iterdir())
        if path.suffix in (".py", ".css", ".md", ".txt") and path.name not in _STAYS
    }
    files |= {f"blockpilot_hf/{path.name}": path for path in package.iterdir() if path.suffix in (".py", ".jsonl")}
    for name in _MODELS:
        for file in ("config.json", "model.safetensors"):
            files[f"blockpilot_hf/hub_cards/{name}/{file}"] = embedded_drafter_dir().parent / name / file
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    card = folder / "README.md"
    card.write_text(card.read_text(encoding="utf-8").replace(f"{NAMESPACE}/", f"{namespace}/"), encoding="utf-8")


def push(folder: Path, namespace: str, *, private: bool = False) -> str:
    """
    Make an assembled folder the Space of a namespace; files there that are not in the folder go.

    Returns:
        `str`: The address of the commit.

    Raises:
        `OSError`: if the Hub refuses.
    """
    api, repo_id = HfApi(library_name="blockpilot_hf"), f"{namespace}/{SPACE_NAME}"
    check_token(api, namespace)
    with hub_errors(api, repo_id):
        api.create_repo(repo_id, repo_type="space", space_sdk="gradio", private=private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            repo_type="space",
            folder_path=folder,
            delete_patterns="*",
            commit_message=f"Upload with blockpilot_hf {blockpilot_hf.__version__}",
        )
    return str(commit.commit_url)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where to write; with --push a temporary one by default")
    parser.add_argument("--namespace", required=True, help="user or organisation of the Hub")
    parser.add_argument("--push", action="store_true", help="upload it as the Space NAMESPACE/blockpilot")
    parser.add_argument("--private", action="store_true", help="make a new Space private")
    given = parser.parse_args()
    if given.folder is None and not given.push:
        parser.error("name a folder, or --push")
    try:
        with tempfile.TemporaryDirectory(prefix="blockpilot-space-") as work:
            folder = given.folder or Path(work, "space")
            assemble(folder, given.namespace)
            print(push(folder, given.namespace, private=given.private) if given.push else folder)
    except (ValueError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()

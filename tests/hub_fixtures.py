"""Fixtures around the local Hub, which `conftest.py` makes known to all tests, and small helpers that go with them."""

from pathlib import Path
from typing import Any

import pytest
from local_hub import LocalHub
from python_process import PythonSession


@pytest.fixture
def local_hub():
    """An empty [`LocalHub`] for one test. To share one in a module, make a fixture of `with LocalHub() as hub`."""
    with LocalHub() as hub:
        yield hub


@pytest.fixture(scope="session")
def shared_hub():
    """
    A [`LocalHub`] for all tests that keep to repositories of their own name. It has the users `ada`, by a token that
    writes (`.ada`) and one that reads (`.reader`), `bob` (`.bob`), and `cy`, a member of `team` (`.member`).
    """
    with LocalHub() as hub:
        hub.ada, hub.reader, hub.bob = hub.add_user("ada"), hub.add_user("ada", "read"), hub.add_user("bob")
        hub.member = hub.add_user("cy", organizations=("team",))
        yield hub
        assert hub.pending_failures == 0


@pytest.fixture(scope="session")
def hub_process(shared_hub, tmp_path_factory):
    """A bare process with no token of its own, for `huggingface_hub` against [`shared_hub`]."""
    with PythonSession(shared_hub.environment(tmp_path_factory.mktemp("hub-process") / "home")) as session:
        yield session


@pytest.fixture
def hub_client(hub_process, tmp_path):
    """Run code in [`hub_process`] with all of `huggingface_hub`, `api(token)`, and a `cache_dir` of this test."""
    head = "from huggingface_hub import *\nfrom pathlib import Path\ndef api(token=False): return HfApi(token=token)\n"

    def run(code: str, **variables: Any) -> Any:
        return hub_process.run(head + code, cache_dir=str(tmp_path / "cache"), **variables)

    return run


def write_folder(folder: Path, files: dict[str, bytes]) -> str:
    """Write `files` below `folder` and return its path."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return str(folder)

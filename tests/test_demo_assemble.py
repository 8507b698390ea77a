"""The Space as it goes to the Hub: whole without the checkout, and pushed in one commit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import metadata_load
from python_process import installed_python

import blockpilot_hf

DEMO = Path(blockpilot_hf.__file__).resolve().parent.parent / "demo"

# What a Space's machine does: the folder is the first place to import from, and there is no checkout.
START = """
import sys
from pathlib import Path
checkout, folder = sys.argv[1:]
kept = [place for place in sys.path if Path(place or ".").resolve() not in (Path(checkout), Path(checkout, "demo"))]
sys.path = [folder, *kept]
named = lambda finder: getattr(finder, "__module__", type(finder).__module__).lower()
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in named(finder)]
import socket
def refuse(*arguments, **kwargs):
    raise AssertionError("the network was asked")
socket.socket.connect = refuse
import app, models, blockpilot_hf
from blockpilot_hf.loading import embedded_drafter_dir, load_embedded_drafter, policy_of_drafter
from session import Session
built = app.build(Session(models.Models(lambda: None), app.Limits()))
print(Path(blockpilot_hf.__file__).parent, embedded_drafter_dir(), type(built).__name__)
print(policy_of_drafter(load_embedded_drafter()).config.head)
"""


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    folder = tmp_path_factory.mktemp("space") / "space"
    done = subprocess.run(
        [sys.executable, str(DEMO / "assemble.py"), str(folder), "--namespace", "ada"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(DEMO.parent)},
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_folder_is_whole_and_names_the_namespace(space):
    assert {"README.md", "app.py", "requirements.txt", "style.css", "blockpilot_hf"} <= {
        p.name for p in space.iterdir()
    }
    assert not (space / "assemble.py").exists() and not list(space.rglob("__pycache__"))
    data = metadata_load(space / "README.md")
    assert data["sdk"] == "gradio" and (space / data["app_file"]).is_file()
    assert (
        all(not name.startswith("NAMESPACE") for name in data["models"])
        and "ada/SmolLM2-135M-Instruct-DFlash-b8" in data["models"]
    )
    assert "NAMESPACE/" not in (space / "README.md").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in space.rglob("*.safetensors")) <= 30e6


def test_page_is_built_from_the_folder_alone_and_without_a_network(space, tmp_path):
    pytest.importorskip("gradio")
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "SPACE_ID": "ada/blockpilot",
        "GRADIO_ANALYTICS_ENABLED": "False",
    }
    done = installed_python(START, environment, str(DEMO.parent), str(space), cwd=tmp_path)
    package, drafter, kind = done.stdout.splitlines()[0].split()
    assert package == str(space / "blockpilot_hf") and drafter.startswith(package) and kind == "Blocks"
    assert done.stdout.splitlines()[1] == "curve"


def test_a_folder_that_holds_something_is_left_alone(space):
    done = subprocess.run(
        [sys.executable, str(DEMO / "assemble.py"), str(space), "--namespace", "ada"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(DEMO.parent)},
    )
    assert done.returncode == 1 and "not empty" in done.stderr


def test_a_push_is_one_commit_of_a_space(shared_hub, space, tmp_path):
    token = shared_hub.add_user("spacer")
    environment = shared_hub.environment(tmp_path / "home", token=token)
    environment["PYTHONPATH"] = str(DEMO.parent)
    command = [sys.executable, str(DEMO / "assemble.py"), "--namespace", "spacer", "--push"]
    for _ in range(2):  # the second one changes nothing
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and "/commit/" in done.stdout, done.stderr
    there = shared_hub.files("spacer/blockpilot", repo_type="space")
    assert {"app.py", "blockpilot_hf/generate.py"} <= set(there)
    assert there["app.py"] == (space / "app.py").read_bytes()
    assert len(shared_hub.commits("spacer/blockpilot", repo_type="space")) == 2, "not the first commit and one more"
    refused = subprocess.run([*command[:-2], "else", "--push"], capture_output=True, text=True, env=environment)
    assert refused.returncode == 1 and "may not write to else" in refused.stderr

"""Processes without this project: what they find, and that a failure in them is seen here."""

import json

import pytest
import python_process
from python_process import PythonSession, bare_python, installed_python, required_distributions

PRESENT = """
import importlib.metadata, importlib.util, json, sys
from pathlib import Path
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
names = ('torch', 'transformers', 'huggingface_hub', 'safetensors', 'blockpilot_hf', 'pytest', 'typer')
found = {name: [importlib.util.find_spec(name) is not None, version(name) is not None] for name in names}
print(json.dumps([found, any(Path(entry, 'blockpilot_hf').is_dir() for entry in sys.path), sys.argv]))
"""


def test_bare_process_has_the_libraries_and_not_this_project(shared_hub, tmp_path):
    env = shared_hub.environment(tmp_path)
    bare, here, argv = json.loads(bare_python(PRESENT, env, "an argument").stdout)
    installed, there, _ = json.loads(installed_python(PRESENT, env).stdout)
    libraries = ("torch", "transformers", "huggingface_hub", "safetensors", "typer")
    assert bare == {name: [name in libraries] * 2 for name in bare} and not here
    assert {name for name, (found, _) in installed.items() if found} == set(bare) and there
    assert argv == ["-c", "an argument"]
    done = bare_python("import blockpilot_hf", env, check=False)
    assert done.returncode and "ModuleNotFoundError: No module named 'blockpilot_hf'" in done.stderr
    assert "jinja2" in required_distributions("torch") and "pytest" not in required_distributions("transformers")


def test_bare_process_refuses_an_installed_copy_or_does_not_start(shared_hub, tmp_path, monkeypatch):
    """A package beside the libraries, as after `pip install .`, is hidden; one that is not hidden would be noticed."""
    (tmp_path / "blockpilot_hf").mkdir()
    (tmp_path / "blockpilot_hf" / "__init__.py").write_text("")
    settings = python_process._bare_settings()
    settings = {**settings, "path": [*settings["path"], str(tmp_path)]}
    env, code = shared_hub.environment(tmp_path), "import sys; print(sys.path)"
    monkeypatch.setattr(python_process, "_bare_settings", lambda: settings)
    assert str(tmp_path) in bare_python(code, env).stdout
    settings["modules"] = [name for name in settings["modules"] if name != "blockpilot_hf"]
    done = bare_python(code, env, check=False)
    assert done.returncode and not done.stdout and "blockpilot_hf is importable, from" in done.stderr


def test_session_reports_what_goes_wrong_and_goes_on(hub_process):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        hub_process.run("1 / 0")
    with pytest.raises(AssertionError, match="not JSON serializable"):
        hub_process.run("result = object()")
    assert (
        hub_process.run("import sys\nprint('said', file=sys.stderr)\nprint('printed')\nresult = twice * 2", twice=3)
        == 6
    )
    assert hub_process.run("result = 'twice' in globals()") is False
    assert "said" in hub_process.errors() and "printed" in hub_process.errors()


def test_session_that_ends_says_so(shared_hub, tmp_path):
    with PythonSession(shared_hub.environment(tmp_path)) as session:
        with pytest.raises(AssertionError, match=r"(?s)the process ended.*last words"):
            session.run("import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos._exit(3)")
        with pytest.raises(AssertionError, match="the process ended"):
            session.run("result = 1")

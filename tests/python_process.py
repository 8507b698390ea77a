"""
Python in processes of their own: as it is installed here, or bare, which is with torch, transformers and what these two
require, and without this project or anything else. Bare ones stand for a new virtual environment and start in a second.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import blockpilot_hf

START = Path(__file__).with_name("python_start.py")
PROJECT = ("blockpilot_hf", "blockpilot")  # modules that a bare process refuses to find
LIBRARIES = ("torch", "transformers", "huggingface-hub", "safetensors")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_distributions(*names: str) -> set[str]:
    """Normal names of distributions and of all that they require here, optional ones left out."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in names]
    while waiting:
        name, extras = waiting.pop()
        if (_normal(name), extras) in seen:
            continue
        seen.add((_normal(name), extras))
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, texts):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((requirement.name, tuple(sorted(requirement.extras))))
    return {name for name, _ in seen}


@functools.lru_cache(maxsize=1)
def _bare_settings() -> dict[str, Any]:
    """Where a bare process looks, and what it does not find there. Without `.pth` files: editable installs are gone."""
    kept, modules, distributions = required_distributions(*LIBRARIES), set(PROJECT), set()
    for distribution in importlib.metadata.distributions():
        name = _normal(distribution.metadata["Name"])
        if name not in kept:
            distributions.add(name)
            for line in (distribution.read_text("RECORD") or "").splitlines():
                first, _, rest = line.partition(",")[0].partition("/")
                modules.add(first if rest else first.partition(".")[0])
    folders = [*site.getsitepackages(), site.getusersitepackages()] if site.ENABLE_USER_SITE else site.getsitepackages()
    for name in LIBRARIES:
        origin = importlib.util.find_spec(name.replace("-", "_")).origin
        folders.append(str(Path(origin).parent.parent))
    return {
        "path": list(dict.fromkeys(folders)),
        "modules": sorted(name for name in modules if name.isidentifier()),
        "distributions": sorted(distributions),
        "project": PROJECT,
    }


def _command(is_bare: bool, mode: str, *arguments: str) -> list[str]:
    settings = {**(_bare_settings() if is_bare else {}), "is_bare": is_bare}
    options = ["-I", "-S"] if is_bare else []  # no PYTHONPATH, no folder of a script, no site-packages
    return [sys.executable, "-X", "utf8", *options, str(START), json.dumps(settings), mode, *arguments]


def _environment(env: dict[str, str], is_bare: bool) -> dict[str, str]:
    if is_bare:
        return env
    # The copy of the package that the tests have, wherever it lies.
    paths = [str(Path(blockpilot_hf.__file__).parent.parent), env.get("PYTHONPATH", "")]
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _run(is_bare: bool, code: str, env: dict[str, str], arguments: tuple[str, ...], **kwargs: Any) -> Any:
    check, cwd = kwargs.pop("check"), kwargs.pop("cwd")
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            _command(is_bare, code, *map(str, arguments)),
            env=_environment(env, is_bare),
            cwd=cwd or empty,
            capture_output=True,
            encoding="utf-8",
            **kwargs,
        )
    assert not check or done.returncode == 0, done.stderr
    return done


def bare_python(
    code: str,
    env: dict[str, str],
    *arguments: str,
    input: str | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> "subprocess.CompletedProcess[str]":
    """
    Run `code` where this project cannot be imported, which the process verifies first.

    Args:
        code (`str`): It finds `arguments` in `sys.argv[1:]` and the helper `raised` of `python_start.py`.
        env (`dict[str, str]`): All environment variables, for instance [`LocalHub.environment`].
        input (`str`, *optional*): Text for its standard input.
        cwd (`Path`, *optional*): Its working directory, an empty one by default.
        check (`bool`, *optional*, defaults to `True`): Fail with its error stream unless it exits with 0.

    Returns:
        `subprocess.CompletedProcess`: With its output as text.
    """
    return _run(True, code, env, arguments, input=input, cwd=cwd, check=check)


def installed_python(
    code: str,
    env: dict[str, str],
    *arguments: str,
    input: str | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> "subprocess.CompletedProcess[str]":
    """Like [`bare_python`], with all that is installed here and the copy of this project that the tests import."""
    return _run(False, code, env, arguments, input=input, cwd=cwd, check=check)


def is_error(answer: dict[str, Any] | None, name: str, status: int | None, *texts: str) -> bool:
    """Whether `raised` of `python_start.py` saw this class or one below it, this HTTP status, and these texts in it."""
    assert answer is not None, "nothing was raised"
    assert name in answer["types"] and answer["status"] == status, answer
    assert all(text in answer["message"] for text in texts), answer
    return True


class PythonSession:
    """
    A process that runs one piece of code after another, so that imports are paid for once. Use it as a context.

    Args:
        env (`dict[str, str]`): All environment variables, for instance [`LocalHub.environment`].
        is_bare (`bool`, *optional*, defaults to `True`): Without this project, as [`bare_python`].
        cwd (`Path`, *optional*): Its working directory, an empty one by default.
    """

    def __init__(self, env: dict[str, str], *, is_bare: bool = True, cwd: Path | None = None):
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name, "errors.txt")
        empty = Path(self._folder.name, "empty")
        empty.mkdir()
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                _command(is_bare, "serve"),
                env=_environment(env, is_bare),
                cwd=cwd or empty,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
            )

    def __enter__(self) -> "PythonSession":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it may have ended by itself
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def run(self, code: str, **variables: Any) -> Any:
        """
        Run `code` with `variables` (values of JSON) as globals, in a fresh namespace; modules stay imported.

        Returns:
            What the code called `result`, as JSON brings it here; `None` if it set nothing.

        Raises:
            `AssertionError`: With the traceback if the code raised, or with the error stream if the process ended.
        """
        try:
            self._process.stdin.write(json.dumps({"code": code, "variables": variables}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        assert line, f"the process ended:\n{self.errors()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def errors(self) -> str:
        """What was written to its error stream so far, warnings and prints included."""
        return self._errors.read_text(encoding="utf-8", errors="replace")

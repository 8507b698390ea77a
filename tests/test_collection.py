"""The suite itself: processes that share it (`pytest -n 2`) must find the same tests in the same order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_process_collects_the_same_tests_in_the_same_order():
    """Parameters from a set, or ids that hold a memory address, differ from process to process."""

    def collected(hash_seed):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTEST_ADDOPTS": ""}
        folder = Path(__file__).resolve().parent
        done = subprocess.run(
            [*command, str(folder)], cwd=folder.parent, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:]
        return [line for line in done.stdout.splitlines() if "::" in line]

    first = collected("1")
    assert len(first) > 100 and collected("2") == first

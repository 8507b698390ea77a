"""The import order of the package, what may travel to the Hub, and what importing it costs."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import blockpilot_hf
from blockpilot_hf.hub import RECIPE_MODULES

PACKAGE = Path(blockpilot_hf.__file__).parent

# A module imports only modules above it.
# Down to `generate` the files are copied into Hub repositories, where nothing else is installed.
TRAVELLING = [*RECIPE_MODULES]
ORDER = [
    *TRAVELLING,
    "hub",
    "drafter_sizes",
    "embedded",
    "prompts",
    "json_lines",
    "units",
    "processes",
    "parity",
    "calibration",
    "texts",
    "parallel_drafting",
    "replay",
    "target_states",
    "batch_answers",
    "target_texts",
    "sweep",
    "flight_simulation",
    "sweep_check",
    "drafter_start",
    "drafter_recipe",
    "drafter_checkpoint",
    "drafter_loss",
    "drafter_estimate",
    "drafter_training",
    "drafter_record",
    "display",
    "training_display",
    "training_plot",
    "drafter_run",
    "intervals",
    "policy_training",
    "evaluation_rules",
    "evaluation",
    "evaluation_display",
    "plot_style",
    "evaluation_plots",
    "throughput",
    "throughput_timing",
    "throughput_display",
    "throughput_card",
    "benchmark_sets",
    "benchmark_prompts",
    "peer_dflash",
    "benchmark_methods",
    "benchmark",
    "benchmark_summary",
    "record_reading",
    "benchmark_reading",
    "benchmark_display",
    "benchmark_latex",
    "benchmark_prompt_plots",
    "benchmark_plots",
    "peak_memory",
    "scaling",
    "scaling_summary",
    "scaling_reading",
    "scaling_display",
    "scaling_plot",
    "export",
    "benchmark_card",
    "scaling_card",
    "card_parts",
    "card_results",
    "recipe_card",
    "drafter_card",
    "policy_card",
    "cards",
    "export_checks",
    "hub_access",
    "push",
    "cli_measure",
    "cli_answers",
    "cli_console",
    "cli_common",
    "cli_generate",
    "cli_verify",
    "cli_prepare",
    "cli_train",
    "cli_sweep",
    "cli_calibrate",
    "cli_policy",
    "cli_throughput",
    "cli_evaluate",
    "cli_report",
    "cli_benchmark",
    "cli_scaling",
    "cli_hub",
    "cli",
]
ALLOWED_ABROAD = {"torch", "transformers"} | set(sys.stdlib_module_names)
# Needed by one part only, so importing the package must not load them.
NOT_AT_IMPORT = [
    *("gradio", "datasets", "sklearn", "accelerate", "gguf", "typer", "rich", "pytest", "scipy", "matplotlib"),
    "dflash",
]

# An installed package holds copies of its files for the Hub, in a folder of their own.
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "hub_cards" not in path.relative_to(PACKAGE).parts)
MODULES = [name for name in ORDER if (PACKAGE / f"{name}.py").is_file()]


def imports_of(source):
    """`(level, module, names)` of every import statement, in functions and conditions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, [alias.name]
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module, [alias.name for alias in node.names]


def violations(name, source):
    """What `source`, as module `name`, imports against the rules."""
    above = ORDER[: ORDER.index(name)]
    for level, module, names in imports_of(source):
        if level == 0:
            top = module.split(".")[0]
            if top == "blockpilot_hf":
                yield f"`{module}` by its absolute name: a copied file would import the installed package"
            elif name in TRAVELLING and top not in ALLOWED_ABROAD:
                yield f"`{module}`: only torch, transformers and the standard library are there on the Hub"
        elif level > 1 or module is None or "." in module:
            # Remote code follows `from .x import y` only when it looks for files to fetch.
            yield f"`from {'.' * level}{module or ''} import {', '.join(names)}`: write `from .x import y`"
        elif module not in above:
            yield f"`.{module}`, which is not above it in the order"


def test_every_file_has_its_place_in_the_order():
    known = {f"{name}.py" for name in ORDER} | {"__init__.py", "__main__.py"}
    unknown = [str(path.relative_to(PACKAGE)) for path in FILES if str(path.relative_to(PACKAGE)) not in known]
    assert not unknown, f"{unknown} have no place in the import order. Add them to ORDER in {Path(__file__).name}."


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_only_what_is_above_it(name):
    assert list(violations(name, (PACKAGE / f"{name}.py").read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("from .verification import x", True),
        ("import torch.nn.functional as F", True),
        ("from transformers.cache_utils import Cache", True),
        ("def f():\n    from .hub import x", False),
        ("from .decoding import x", False),
        ("from . import verification", False),
        ("from ..package import x", False),
        ("from .training.prompts import x", False),
        ("import blockpilot_hf.verification", False),
        ("import numpy", False),
        ("if True:\n    from safetensors.torch import load_file", False),
    ],
)
def test_rules_catch_what_they_forbid(statement, allowed):
    assert (list(violations("decoding", statement)) == []) is allowed


def _loaded_after(names):
    """Modules of a fresh interpreter after importing `names`, in the order in which they came."""
    code = (
        "import contextlib, importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    with contextlib.suppress(ImportError):\n"  # transformers puts some names there that are not importable
        "        importlib.import_module(name)\n"
        "print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(names)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_loads_no_extras():
    """What the same parts of transformers load by themselves where it is installed is not ours to count."""
    ours = _loaded_after(["blockpilot_hf"])
    parts = [name for name in ours if name.split(".")[0] == "transformers"]
    assert "blockpilot_hf" in ours and "transformers" in parts
    theirs = _loaded_after(parts)
    extras = {name.split(".")[0] for name in set(ours) - set(theirs)} & set(NOT_AT_IMPORT)
    assert not extras, f"`import blockpilot_hf` loads {sorted(extras)}; import them where they are used."


def test_package_imports_again_and_reloads():
    """Registering model types twice is an error in transformers; a notebook does it by reloading."""
    code = (
        "import importlib, sys, blockpilot_hf\n"
        "importlib.reload(blockpilot_hf)\n"
        "for name in [n for n in sys.modules if n.split('.')[0] == 'blockpilot_hf']:\n"
        "    del sys.modules[name]\n"
        "again = importlib.import_module('blockpilot_hf')\n"
        "assert again is not blockpilot_hf\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert importlib.import_module("blockpilot_hf") is blockpilot_hf


PICKLING = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}


def pickling(source):
    """Calls and imports that write or read pickles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            call = f"{node.value.id}.{node.attr}"
            if call in ("torch.save", "torch.load", "np.save", "np.load", "numpy.save", "numpy.load"):
                yield call
    for _, module, _ in imports_of(source):
        if module and module.split(".")[0] in PICKLING:
            yield module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_pickled(path):
    assert list(pickling(path.read_text(encoding="utf-8"))) == []


def test_the_search_for_pickles_finds_them():
    source = "import torch, pickle\nfrom joblib import dump\ntorch.save(1, 'x')\ny = torch.load\n"
    assert sorted(pickling(source)) == ["joblib", "pickle", "torch.load", "torch.save"]

"""What is built from a checkout: whole, the embedded drafter and policy included, and usable away from it."""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import save_embedded_pair
from safetensors import safe_open

import blockpilot_hf
from blockpilot_hf import BlockPilot
from blockpilot_hf.embedded import (
    EMBEDDED_DRAFTER_NAME,
    EMBEDDED_MASK_TOKEN_ID,
    EMBEDDED_PAPER_POLICY_NAME,
    EMBEDDED_POLICY_NAME,
    EMBEDDED_TARGET_LAYER_IDS,
    EMBEDDED_TARGET_NAME,
)
from blockpilot_hf.loading import policy_of_drafter

ROOT = Path(__file__).resolve().parent.parent
NO_BUILDS = shutil.ignore_patterns("__pycache__", "*.pyc")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The files of this checkout that are built from, with a tiny pair in place of the embedded one."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    for name in ("blockpilot_hf", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=NO_BUILDS)
    save_embedded_pair(folder / "hub_cards")
    for name in (EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME):
        (folder / "hub_cards" / name / "README.md").write_text("A card.")
    return folder


def build(folder, kind, to):
    """A wheel or sdist of `folder`, without a network: by the build backend itself."""
    backend = pytest.importorskip("hatchling.build")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where a build backend looks
        return Path(to, getattr(backend, f"build_{kind}")(str(to)))


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return build(checkout, "wheel", tmp_path_factory.mktemp("dist"))


def files_below(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def files_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_the_package_and_the_embedded_pair_and_nothing_else(checkout, wheel):
    expected = {f"blockpilot_hf/{name}": content for name, content in files_below(checkout / "blockpilot_hf").items()}
    pair = files_below(checkout / "hub_cards")
    expected |= {f"blockpilot_hf/hub_cards/{name}": content for name, content in pair.items()}
    assert {"blockpilot_hf/py.typed", "blockpilot_hf/generate.py"} < expected.keys()
    for name in ("config.json", "model.safetensors", "README.md"):
        assert {f"{EMBEDDED_DRAFTER_NAME}/{name}", f"{EMBEDDED_POLICY_NAME}/{name}"} < pair.keys()
    assert files_of(wheel) == expected


def test_source_archive_builds_the_same_wheel(checkout, wheel, tmp_path):
    archive = build(checkout, "sdist", tmp_path)
    with tarfile.open(archive) as tar:
        # Patch releases of Python before 3.11.4 do not know the filter; the archive is our own.
        tar.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert files_of(build(unpacked, "wheel", tmp_path)) == files_of(wheel)


def test_installed_wheel_finds_its_pilot_away_from_the_checkout(wheel, tmp_path):
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run([*install, "--target", str(tmp_path / "site"), str(wheel)], capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        pytest.skip("no pip in this environment")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "site" / "bin").glob("blockpilot*"))
    code = (
        "import json, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import blockpilot_hf\n"
        "from blockpilot_hf.loading import policy_of_drafter\n"
        "pilot = blockpilot_hf.BlockPilot.from_pretrained()\n"
        "sizes = policy_of_drafter(pilot.drafter).config.block_sizes\n"
        "print(json.dumps([blockpilot_hf.__file__, pilot.drafter.name_or_path, sizes]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    package, folder, sizes = json.loads(done.stdout.splitlines()[-1])
    assert Path(package).parent == tmp_path / "site" / "blockpilot_hf"
    assert Path(folder) == tmp_path / "site" / "blockpilot_hf" / "hub_cards" / EMBEDDED_DRAFTER_NAME
    assert sizes == [3]


@pytest.fixture
def pair():
    """The folders of the embedded drafter and policy in this checkout."""
    folders = [
        ROOT / "hub_cards" / name for name in (EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME)
    ]
    missing = [str(folder) for folder in folders if not (folder / "model.safetensors").is_file()]
    if missing:
        pytest.skip(f"the embedded pair is not in this checkout: no weights in {missing}")
    return folders


def test_this_checkout_holds_the_embedded_pair(pair):
    drafter, policy, _ = pair
    for folder in pair:
        assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in folder.iterdir()}
    files = [path for folder in pair for path in folder.rglob("*")]
    assert sum(path.stat().st_size for path in files if path.suffix == ".safetensors") < 30_000_000
    assert sum(path.stat().st_size for path in files) < 40_000_000  # with the records
    with safe_open(drafter / "model.safetensors", framework="pt") as weights:
        dtypes = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
        assert dtypes.pop("shortlist_ids") == "I64" and set(dtypes.values()) == {"BF16"}
    config = json.loads((drafter / "config.json").read_text())
    assert (drafter / config["policy"]).resolve() == policy.resolve()
    assert config["target_name_or_path"] == EMBEDDED_TARGET_NAME
    assert config["target_layer_ids"] == EMBEDDED_TARGET_LAYER_IDS
    assert (config["mask_token_id"], config["block_size"]) == (EMBEDDED_MASK_TOKEN_ID, 8)


def test_embedded_pair_loads_from_this_checkout(pair):
    if Path(blockpilot_hf.__file__).parent.parent != ROOT:
        pytest.skip("another copy of the package is the one imported")
    pilot = BlockPilot.from_pretrained()
    policy = policy_of_drafter(pilot.drafter)
    assert Path(pilot.drafter.name_or_path) == pair[0]
    assert 1 in policy.config.block_sizes and max(policy.config.block_sizes) <= pilot.drafter.config.block_size

"""The folder that is passed as `custom_generate=`: what lies in it, and how it comes to lie there."""

import ast
import os
import re
import shutil
import stat
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
from conftest import make_prompt
from transformers.dynamic_module_utils import check_python_requirements, get_relative_import_files
from transformers.utils.import_utils import split_package_version

import blockpilot_hf
from blockpilot_hf import custom_generate_dir, hub

PACKAGE = Path(blockpilot_hf.__file__).parent


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_folder_holds_the_packages_own_files(home):
    files = _files(custom_generate_dir())
    assert files.pop("custom_generate/requirements.txt").decode().splitlines() == [*hub.REQUIREMENTS]
    assert files == {f"custom_generate/{name}.py": (PACKAGE / f"{name}.py").read_bytes() for name in hub.RECIPE_MODULES}
    assert "custom_generate/generate.py" in files


def test_folder_holds_what_loading_remote_code_looks_for_and_no_more():
    looked_for = get_relative_import_files(PACKAGE / "generate.py")
    assert {"generate", *(Path(file).stem for file in looked_for)} == set(hub.RECIPE_MODULES)
    assert len(hub.RECIPE_MODULES) == len(set(hub.RECIPE_MODULES))


def test_recipe_requires_what_the_package_requires(target, drafter, recipe):
    """In the one form that transformers reads: a name, or a name, one comparison and numbers."""
    project = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    lowest = dict(re.findall(r'^  "(torch|transformers)(>=[\d.]+)', project, flags=re.MULTILINE))
    assert [*hub.REQUIREMENTS] == [f"{name}{lowest[name]}" for name in ("torch", "transformers")]
    for line in hub.REQUIREMENTS:
        assert split_package_version(line)[1] == ">="
    check_python_requirements(recipe, requirements_file="custom_generate/requirements.txt")
    wrong = Path(recipe).with_name("wrong")
    shutil.copytree(recipe, wrong)
    (wrong / "custom_generate" / "requirements.txt").write_text("torch>=99\ntransformers>=5.24\n")
    with pytest.raises(ImportError, match=r"Missing requirements.*\ntorch>=99 \(installed: "):
        target.generate(make_prompt(4), assistant_model=drafter, custom_generate=str(wrong), trust_remote_code=True)


def test_every_import_of_the_folder_is_found_beside_the_importing_file(home):
    """Remote code is fetched file by file along `from .name import`; anything else is not there on another machine."""
    for path in Path(custom_generate_dir(), "custom_generate").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module and "." not in node.module, (path.name, ast.unparse(node))
                assert path.with_name(f"{node.module}.py").is_file(), (path.name, ast.unparse(node))


def test_folder_lies_in_the_hugging_face_home_and_stays_the_same(home):
    folder = Path(custom_generate_dir())
    assert home in folder.parents
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert custom_generate_dir() == str(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_home_may_be_given_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "~/hf")
    monkeypatch.chdir(tmp_path)
    assert tmp_path / "hf" in Path(custom_generate_dir()).parents
    assert not Path(tmp_path, "~").exists()


def test_without_the_variable_the_folder_lies_where_the_library_keeps_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "constant"))
    for unset in (lambda: monkeypatch.delenv("HF_HOME", raising=False), lambda: monkeypatch.setenv("HF_HOME", "")):
        unset()
        assert hub.blockpilot_cache_dir() == tmp_path / "constant" / "blockpilot"
    monkeypatch.setenv("SOMEWHERE", str(tmp_path / "variable"))
    monkeypatch.setenv("HF_HOME", "$SOMEWHERE/hf")
    assert hub.blockpilot_cache_dir() == tmp_path / "variable" / "hf" / "blockpilot"


def test_other_code_gets_another_folder(home, tmp_path, monkeypatch):
    first = custom_generate_dir()
    copy = tmp_path / "blockpilot_hf"
    shutil.copytree(PACKAGE, copy)
    with open(copy / "features.py", "a") as file:
        file.write("\n# Another version.\n")
    monkeypatch.setattr(hub, "__file__", str(copy / "hub.py"))
    assert custom_generate_dir() != first
    assert _files(first)["custom_generate/features.py"] == (PACKAGE / "features.py").read_bytes()


def test_folder_can_be_read_by_others(home):
    """A temporary folder is closed to them when it is made."""
    assert stat.S_IMODE(os.stat(custom_generate_dir()).st_mode) & 0o555 == 0o555


def test_half_made_folder_of_a_killed_process_is_not_taken_for_a_whole_one(home, monkeypatch):
    """Killed while writing: no clean-up runs."""
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(hub.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        custom_generate_dir()
    left = list((home / "blockpilot").iterdir())
    assert len(left) == 1
    monkeypatch.undo()
    monkeypatch.setenv("HF_HOME", str(home))
    folder = custom_generate_dir()
    assert Path(folder) not in left
    assert len(_files(folder)) == len(hub.recipe_files())


def test_failure_while_writing_leaves_nothing(home, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        custom_generate_dir()
    assert list((home / "blockpilot").iterdir()) == []


def test_two_at_once_get_one_whole_folder(home, monkeypatch):
    """Both find no folder and write their own; the second to finish takes the first one's."""
    rename = Path.rename

    def late(path, to):
        if not Path(to).exists():
            monkeypatch.setattr(Path, "rename", rename)
            assert custom_generate_dir() == str(to)  # another process, faster
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", late)
    folder = custom_generate_dir()
    assert len(_files(folder)) == len(hub.recipe_files())
    assert [path.name for path in (home / "blockpilot").iterdir()] == [Path(folder).name]


def test_many_threads_get_one_whole_folder(home):
    with ThreadPool(8) as pool:
        folders = set(pool.map(lambda _: custom_generate_dir(), range(16)))
    assert len(folders) == 1
    assert [path.name for path in (home / "blockpilot").iterdir()] == [Path(*folders).name]

"""What Hub repositories are made of: the mirror in this checkout, `export`, and what makes one unfit to be pushed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_mirror import HUB_CARDS, use_mirror
from safetensors.torch import load_file, save_file

from blockpilot_hf import loading
from blockpilot_hf.cli import _run
from blockpilot_hf.embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME
from blockpilot_hf.export import REPOSITORIES, assemble, code_of, export, files_of, fill_in, is_code
from blockpilot_hf.export_checks import check_repository

PACKAGE = Path(loading.__file__).parent
MODELS = [name for name in REPOSITORIES if name != "blockpilot"]


def contents(folder):
    return {path: (folder / path).read_bytes() for path in files_of(folder)}


# The mirror of this checkout


@pytest.mark.parametrize("name", REPOSITORIES)
def test_copies_of_code_in_the_mirror_are_the_packages_own_and_all_that_is_needed(name):
    """After a change of a file that travels: `blockpilot export hub_cards`."""
    there = {path: content for path, content in contents(HUB_CARDS / name).items() if is_code(path)}
    assert there == code_of(name)
    for path, content in there.items():
        if path.endswith(".py"):
            assert content == (PACKAGE / Path(path).name).read_bytes()


@pytest.mark.parametrize("name", REPOSITORIES)
def test_mirror_is_file_for_file_what_export_writes(name, tmp_path):
    assemble(name, tmp_path / name)
    assert contents(HUB_CARDS / name) == contents(tmp_path / name)


def test_mirror_holds_the_repositories_and_nothing_else():
    assert {path.name for path in HUB_CARDS.iterdir() if not path.name.startswith(".")} == set(REPOSITORIES)


@pytest.mark.parametrize("name", REPOSITORIES)
def test_mirror_can_be_pushed_as_it_is(name, tmp_path):
    assemble(name, tmp_path / name)
    fill_in(tmp_path / name, "some-org", "0" * 40)
    check_repository(tmp_path / name)


@pytest.mark.parametrize("name", MODELS)
def test_save_pretrained_writes_config_and_code_of_the_mirror(name, tmp_path):
    model = loading.load_drafter(HUB_CARDS / name) if "DFlash" in name else loading.load_policy(HUB_CARDS / name)
    model.save_pretrained(tmp_path)
    saved, mirror = contents(tmp_path), contents(HUB_CARDS / name)
    assert {path for path in saved if is_code(path)} == {path for path in mirror if is_code(path)}
    for path in saved.keys() - {"README.md", "config.json", "model.safetensors"}:
        assert saved[path] == mirror[path]
    configs = [json.loads(files["config.json"]) for files in (saved, mirror)]
    for config in configs:
        del config["transformers_version"]
    assert configs[0] == configs[1]
    weights = [load_file(folder / "model.safetensors") for folder in (tmp_path, HUB_CARDS / name)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_nothing_in_the_mirror_is_pickled():
    for path in HUB_CARDS.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.suffix in {".json", ".md", ".py", ".safetensors", ".txt"}, path
            assert not path.read_bytes().startswith((b"PK", *(bytes([0x80, i]) for i in range(2, 6)))), path


# Export to a folder


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    return use_mirror(monkeypatch, tmp_path)


def statuses(changes):
    return {name: {change.path: change.status for change in of_one} for name, of_one in changes.items()}


def test_export_writes_the_mirror_and_a_second_one_changes_nothing(mirror, tmp_path):
    first = statuses(export(tmp_path / "new" / "out"))
    assert list(first) == list(REPOSITORIES)
    assert {status for of_one in first.values() for status in of_one.values()} == {"new"}
    assert contents(tmp_path / "new" / "out") == contents(mirror)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "new" / "out").rglob("*")}
    second = statuses(export(tmp_path / "new" / "out"))
    assert {status for of_one in second.values() for status in of_one.values()} == {"unchanged"}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "new" / "out").rglob("*")} == before


def test_export_brings_the_mirror_itself_up_to_date(mirror):
    before = contents(mirror)
    (mirror / EMBEDDED_POLICY_NAME / "features.py").write_text("# An older one.\n")
    (mirror / EMBEDDED_POLICY_NAME / "gone.py").write_text("# No longer needed.\n")
    (mirror / "blockpilot" / "custom_generate" / "generate.py").unlink()
    config = json.loads((mirror / EMBEDDED_DRAFTER_NAME / "config.json").read_text())
    del config["auto_map"]
    (mirror / EMBEDDED_DRAFTER_NAME / "config.json").write_text(json.dumps(config))
    changed = {
        (name, path): status
        for name, of_one in statuses(export(mirror)).items()
        for path, status in of_one.items()
        if status != "unchanged"
    }
    assert changed == {
        (EMBEDDED_POLICY_NAME, "features.py"): "changed",
        (EMBEDDED_POLICY_NAME, "gone.py"): "removed",
        ("blockpilot", "custom_generate/generate.py"): "new",
        (EMBEDDED_DRAFTER_NAME, "config.json"): "changed",
    }
    assert contents(mirror) == before


def test_only_the_repositories_that_are_named_are_written(mirror, tmp_path):
    out = tmp_path / "out"
    assert list(export(out, [EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME])) == [
        EMBEDDED_POLICY_NAME,
        EMBEDDED_DRAFTER_NAME,
    ]
    assert {path.name for path in out.iterdir()} == {EMBEDDED_POLICY_NAME, EMBEDDED_DRAFTER_NAME}


def test_what_python_and_other_tools_leave_in_the_mirror_stays_out(mirror, tmp_path):
    """An installed package has its files compiled, these too."""
    cache = mirror / "blockpilot" / "custom_generate" / "__pycache__"
    cache.mkdir()
    (cache / "generate.cpython-311.pyc").write_bytes(b"compiled")
    (mirror / "blockpilot" / ".DS_Store").write_bytes(b"")
    assert export(tmp_path / "out") and export(mirror)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.startswith(("__pycache__", "."))]
    assert cache.is_dir()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: out.write_text("text"), "out is a file. Name a folder"),
        (
            lambda out: (out / "holiday.jpg", out.mkdir())[0].write_bytes(b""),
            "holds holiday.jpg, which is no repository",
        ),
        (
            lambda out: (out / "blockpilot" / "notes.txt", (out / "blockpilot").mkdir(parents=True))[0].write_text("x"),
            "holds notes.txt, which no export wrote. Move that",
        ),
    ],
    ids=["file", "folder of other things", "repository with other things"],
)
def test_a_place_that_is_taken_is_left_alone(mirror, tmp_path, capsys, make, message):
    out = tmp_path / "out"
    make(out)
    before = out.read_text() if out.is_file() else contents(out)
    capsys.readouterr()
    assert _run(["export", str(out)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert (out.read_text() if out.is_file() else contents(out)) == before


def test_an_unknown_repository_is_refused_with_those_that_are_known(mirror, tmp_path, capsys):
    for given in ("drafter", "", "blockpilot,drafter"):
        assert _run(["export", str(tmp_path / "out"), "--repos", given]) == 2
        error = capsys.readouterr().err
        assert "There is no repository" in error and all(name in error for name in REPOSITORIES)
    assert not (tmp_path / "out").exists()
    assert _run(["export", str(tmp_path / "out"), "--repos", f"blockpilot, {EMBEDDED_POLICY_NAME}"]) == 0


def test_the_command_says_what_it_wrote(mirror, tmp_path, capsys):
    assert _run(["export", str(tmp_path / "out"), "--repos", EMBEDDED_POLICY_NAME]) == 0
    printed = capsys.readouterr().out
    unwrapped = "".join(printed.split())
    assert f"{tmp_path / 'out' / EMBEDDED_POLICY_NAME}:9files" in unwrapped and "9 new" in printed
    assert "modeling_blockpilot.py" in printed
    _run(["export", str(tmp_path / "out"), "--repos", EMBEDDED_POLICY_NAME])
    assert "9 unchanged" in capsys.readouterr().out


def test_a_file_that_is_no_part_of_a_repository_stops_the_export(mirror, tmp_path):
    (mirror / EMBEDDED_DRAFTER_NAME / "optimizer.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"optimizer.pt is not part of a repository. Take it out"):
        export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_the_mirror_the_error_says_where_it_comes_with(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "__file__", str(tmp_path / "package" / "loading.py"))
    with pytest.raises(FileNotFoundError, match="Install blockpilot-hf from its wheel or a whole checkout"):
        export(tmp_path / "out")


# For a namespace


def test_the_namespace_is_filled_into_cards_and_configs_and_nowhere_else(mirror, tmp_path):
    for name in REPOSITORIES:
        assemble(name, tmp_path / name)
        (tmp_path / name / "README.md").write_text(
            f"[a](../{EMBEDDED_POLICY_NAME}) [b](../blockpilot/) `NAMESPACE/blockpilot` [c](model.safetensors)\n"
        )
        before = contents(tmp_path / name)
        fill_in(tmp_path / name, "some-org", "f" * 40)
        after = contents(tmp_path / name)
        assert after.pop("README.md").decode() == (
            f"[a](https://huggingface.co/some-org/{EMBEDDED_POLICY_NAME}) "
            "[b](https://huggingface.co/some-org/blockpilot) `some-org/blockpilot` [c](model.safetensors)\n"
        )
        changed = {path for path in after if after[path] != before[path]}
        assert changed == ({"config.json"} if name in MODELS else set())
        if name in MODELS:
            configs = [json.loads(files["config.json"]) for files in (before, after)]
            expected = {"drafter_name_or_path": f"some-org/{EMBEDDED_DRAFTER_NAME}"}
            if name == EMBEDDED_DRAFTER_NAME:
                expected = {"policy": f"some-org/{EMBEDDED_POLICY_NAME}", "policy_revision": "f" * 40}
            assert configs[1] == {**configs[0], **expected}


# What makes a repository unfit


def spoil_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def spoil_card(folder, old, new):
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert old in card
    (folder / "README.md").write_text(card.replace(old, new, 1), encoding="utf-8")


def spoil_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


SPOILED = {
    "pickle by its name": (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin is a pickle"),
    "pickle by its content": (lambda f: torch.save({}, f / "weights.safetensors"), "weights.safetensors is a pickle"),
    "path in a record": (
        lambda f: (f / "record.json").write_text('{"command": "blockpilot sweep /home/me/texts"}'),
        "record.json names '/home/me/texts', a path of this machine",
    ),
    "record that was cut off": (lambda f: (f / "record.json").write_text('{"a": '), "record.json is no JSON"),
    "path in the card": (lambda f: spoil_card(f, "\n# ", "\nSee ~/my/notes.\n# "), "names '~/my/notes.'"),
    "foreign import": (
        lambda f: (f / "modeling_blockpilot.py").write_text("import numpy\n"),
        "modeling_blockpilot.py imports numpy, and only torch and transformers are there",
    ),
    "import of the package": (
        lambda f: (f / "modeling_blockpilot.py").write_text("from blockpilot_hf.costs import x\n"),
        "imports blockpilot_hf.costs",
    ),
    "missing module": (lambda f: (f / "features.py").unlink(), "imports .features, which is not beside it"),
    "missing entry": (lambda f: (f / "modeling_blockpilot.py").unlink(), "modeling_blockpilot.py is missing"),
    "module that nothing needs": (lambda f: (f / "more.py").write_text(""), "more.py is imported by nothing"),
    "no auto_map": (lambda f: spoil_config(f, auto_map=None), "not one for AutoConfig and AutoModel"),
    "folder in the config": (
        lambda f: spoil_config(f, target_name_or_path="/models/target"),
        "names the folder '/models/target' in `target_name_or_path`",
    ),
    "policy that is a folder": (lambda f: spoil_config(f, policy="../policy"), "'../policy', which is no Hub id"),
    "config that does not load": (lambda f: spoil_config(f, block_sizes=[0]), "do not load: .*block_sizes"),
    "config of another type": (lambda f: spoil_config(f, model_type="llama"), "'llama', which is none of this package"),
    "tensor missing": (lambda f: spoil_weights(f, lambda t: t.popitem()), "do not load: .*missing"),
    "tensor too many": (
        lambda f: spoil_weights(f, lambda t: t.update(more=torch.zeros(1))),
        "do not load: .*not expected: more",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "weights cut off": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-8]),
        "do not load",
    ),
    "no card": (lambda f: (f / "README.md").unlink(), "README.md is missing"),
    "card without front matter": (lambda f: (f / "README.md").write_text("# Mine\n"), "without front matter"),
    "front matter that is no YAML": (
        lambda f: spoil_card(f, "license: apache-2.0", "license: [apache-2.0"),
        "front matter of README.md cannot be read",
    ),
    "empty entry": (lambda f: spoil_card(f, "language: en", "language:"), "language in the front matter .* is empty"),
    "path in the front matter": (
        lambda f: spoil_card(f, "base_model: HuggingFaceTB/", "base_model: /models/"),
        "base_model in the front matter of README.md is '/models/",
    ),
    "namespace not filled in": (lambda f: spoil_card(f, "\n# ", "\nNAMESPACE/x\n# "), "still says NAMESPACE"),
    "link to nowhere": (
        lambda f: spoil_card(f, "\n# ", "\n[x](plots/x.png)\n# "),
        r"links to plots/x.png, which is not",
    ),
}


@pytest.fixture(scope="module")
def policy_repository(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("fit")
        use_mirror(patch, root)
        assemble(EMBEDDED_POLICY_NAME, root / "policy")
    fill_in(root / "policy", "some-org")
    return root / "policy"


@pytest.mark.parametrize("kind", SPOILED)
def test_a_repository_that_others_could_not_use_is_refused_with_the_reason(kind, policy_repository, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(policy_repository, folder)
    check_repository(folder)
    spoil, message = SPOILED[kind]
    spoil(folder)
    with pytest.raises(ValueError, match=f"(?s)policy cannot be pushed: .*{message}"):
        check_repository(folder)


def test_neither_line_breaks_nor_folders_here_make_a_repository_unfit(policy_repository, tmp_path, monkeypatch):
    folder = tmp_path / "policy"
    shutil.copytree(policy_repository, folder)
    (folder / "record.json").write_text(json.dumps({"text": "\n\nand/or\n\\frac\\n", "share": "1/2 https://x.org/a/b"}))
    spoil_config(folder, policy="some-org/policy")
    for name in ("some-org/policy", "transformers", f"some-org/{EMBEDDED_DRAFTER_NAME}", "en"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    check_repository(folder)


def test_all_that_is_wrong_is_said_at_once(policy_repository, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(policy_repository, folder)
    (folder / "more.py").write_text("")
    (folder / "README.md").unlink()
    with pytest.raises(ValueError, match=r"more.py is imported by nothing; README.md is missing\.$"):
        check_repository(folder)

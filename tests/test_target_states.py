import contextlib
import os
import resource
import time

import pytest
import torch
from conftest import make_target
from drafter_texts import make_text

from blockpilot_hf.target_states import TargetStatesReader, target_states, weights_fingerprint
from blockpilot_hf.texts import Text

LAYERS = [0, 2]


@pytest.fixture(scope="module")
def text(target):
    return make_text(target)


def reader(target, folder, layers=None, fingerprint="0"):
    return TargetStatesReader(target, layers or LAYERS, folder=folder, fingerprint=fingerprint)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gemma3"])
def test_states_are_those_that_decoding_hands_to_a_drafter(kind):
    target = make_target(kind)
    text = make_text(target)
    found = target_states(target, LAYERS, text)
    outputs = target(torch.tensor([text.ids]), output_hidden_states=True)
    expected = torch.cat([outputs.hidden_states[i + 1] for i in LAYERS], dim=-1)[0]
    torch.testing.assert_close(found.context, expected)
    torch.testing.assert_close(target.get_output_embeddings()(found.last), outputs.logits[0], rtol=1e-4, atol=1e-4)
    assert not found.context.requires_grad and not found.last.requires_grad


def test_the_last_layer_may_be_among_those_read(target, text):
    states = target(torch.tensor([text.ids]), output_hidden_states=True).hidden_states
    found = target_states(target, [1, 3], text)
    torch.testing.assert_close(found.context, torch.cat([states[2], states[4]], dim=-1)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_states_are_bit_for_bit_those_computed_at_every_visit(dtype, text, tmp_path):
    target = make_target().to(dtype)
    kept, computed = reader(target, tmp_path), reader(target, None)
    first, again, without = kept(text), kept(text), computed(text)
    for name in ("context", "last"):
        values = getattr(without, name)
        assert values.dtype == dtype
        assert torch.equal(getattr(first, name), values) and torch.equal(getattr(again, name), values)
        # Rounded, whether kept or not.
        assert torch.equal(values, values.to(torch.bfloat16).to(dtype))


def test_kept_states_are_read_and_not_computed_again(target, text, tmp_path, monkeypatch):
    kept = reader(target, tmp_path)
    assert not kept.has(text)
    kept(text)
    assert kept.has(text) and reader(target, tmp_path).has(text)
    monkeypatch.setattr("blockpilot_hf.target_states.target_states", lambda *args: pytest.fail("computed"))
    kept(text)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_token_takes_the_disk_that_is_told(target, tmp_path):
    sizes = []
    for num_new in (10, 20):
        folder = tmp_path / str(num_new)
        kept = reader(target, folder)
        kept(make_text(target, num_new=num_new))
        sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
    assert abs(sizes[1] - sizes[0] - 10 * kept.bytes_per_token) < 16  # the header's own length


def test_another_text_target_dtype_or_set_of_layers_is_another_file(target, text, tmp_path):
    other = Text(text.id, text.category, text.prompt_ids, (*text.answer_ids[:-1], text.answer_ids[-1] ^ 1))
    readers = [
        reader(target, tmp_path),
        reader(target, tmp_path, layers=[1, 2]),
        reader(target, tmp_path, fingerprint="1"),
        reader(make_target().to(torch.bfloat16), tmp_path),
    ]
    for kept in readers:
        assert not kept.has(text)
        kept(text)
    readers[0](other)
    assert len(list(tmp_path.iterdir())) == 5
    # What names a text does not matter.
    assert readers[0].has(Text("renamed", "other", text.prompt_ids, text.answer_ids))


@pytest.mark.parametrize("damage", [b"", b"\x10\x00", b"not safetensors at all"])
def test_a_damaged_file_is_computed_again(target, text, tmp_path, damage):
    kept = reader(target, tmp_path)
    right = kept(text)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert torch.equal(kept(text).context, right.context)
    assert file.stat().st_size > 100


def test_while_a_file_is_written_it_has_a_name_that_is_known_to_be_unfinished(target, text, tmp_path, monkeypatch):
    """The library that writes such files used to have one of its own, which nobody removed after a kill."""
    replace, seen = os.replace, []

    def watched(source, destination):
        seen.extend(path.name for path in tmp_path.iterdir())
        replace(source, destination)

    monkeypatch.setattr(os, "replace", watched)
    kept = reader(target, tmp_path)
    kept(text)
    (whole,) = tmp_path.iterdir()
    assert seen == [f"{whole.name}.{os.getpid()}"]
    # Killed there, what it leaves is removed later.
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    whole.unlink()
    with pytest.raises(KeyboardInterrupt):
        kept(text)
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    reader(target, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_runs_left_is_removed_and_what_others_write_is_not(target, text, tmp_path):
    reader(target, tmp_path)(text)
    (whole,) = tmp_path.iterdir()
    stale, young = (whole.with_name(f"{whole.name}.{i}") for i in (1, 2))
    for file in (stale, young):
        file.write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(stale, (hours_ago, hours_ago))
    os.utime(whole, (hours_ago, hours_ago))
    reader(target, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([whole, young])


@contextlib.contextmanager
def small_files_only():
    """The limit on the size of files is what a process can set for itself; writing then fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_is_told_and_nothing_half_stays(target, text, tmp_path):
    kept = reader(target, tmp_path)
    with small_files_only(), pytest.raises(OSError, match=r"states cannot be written to .*Free some space"):
        kept(text)
    assert list(tmp_path.iterdir()) == []
    kept(text)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_told(target, text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="states cannot be written to"):
        reader(target, tmp_path / "file" / "states")(text)


def test_the_fingerprint_is_of_the_weights_whatever_dtype_they_are_loaded_in():
    rounded = make_target().to(torch.bfloat16)
    first = weights_fingerprint(rounded)
    assert len(first) == 16 and weights_fingerprint(rounded.to(torch.float32)) == first
    with torch.no_grad():
        rounded.model.layers[2].mlp.up_proj.weight[3, 4] *= 1.5
    assert weights_fingerprint(rounded) != first
    assert weights_fingerprint(make_target(seed=1).to(torch.bfloat16)) != first

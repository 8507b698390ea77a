"""Fixtures of the command line's tests: a tiny pair saved as folders, and a way to call commands in this process."""

import json
import sys

import pytest
import torch
from conftest import make_drafter, make_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockpilot_hf import BlockPilotConfig, BlockPilotPolicy, cli

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer():
    """One id per byte, like the smallest pieces of a byte-level BPE, and four special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", *letters]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(words[:4])
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE)


def _is_printable(text):
    return len(text) == 1 and text.isascii() and text.isprintable()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """`target` with its tokenizer, a `drafter` that fits it, and a `policy` of three sizes."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer()
    target = make_target("llama", vocab_size=len(tokenizer) + 4)
    with torch.no_grad():
        # Answers of printable ASCII that never stop early: every other token scores 0, which is never the best.
        for token_id in range(target.lm_head.out_features):
            if not _is_printable(tokenizer.decode([token_id], skip_special_tokens=True)):
                target.lm_head.weight[token_id] = 0
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    make_drafter(target).save_pretrained(root / "drafter")
    BlockPilotPolicy(BlockPilotConfig(block_sizes=[2, 4, 8], features="compact", hidden_size=4)).save_pretrained(
        root / "policy"
    )
    return root


@pytest.fixture
def run(monkeypatch, capsys, folders):
    """
    `run(verb, *arguments)` to `(status, stdout, stderr)`, on the tiny target with a scripted drafter unless others are
    named; `columns` is the width.
    """

    def run(verb, *arguments, target=True, columns=80):
        named = ["--target", str(folders / "target"), "--dtype", "float32"] if target else []
        if target and "--drafter" not in arguments:
            named += ["--drafter", "scripted"]
        monkeypatch.setattr(sys, "argv", ["blockpilot", verb, *named, *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": f"p[{i}]", "prompt": f"text {i}"}) + "\n" for i in range(3)))
    return file

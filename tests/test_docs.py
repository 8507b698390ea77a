"""The README's `python` blocks run as pasted, and print what their comments say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md"]


def python_blocks(text: str) -> list[str]:
    """Blocks whose info string is exactly `python`; others (`py`, `bash`, ...) are shown, not run."""
    return re.findall(r"^```python[ \t]*\n(.*?)^```[ \t]*$", text, flags=re.DOTALL | re.MULTILINE)


def expected_outputs(block: str) -> list[str]:
    return [match.strip() for match in re.findall(r"^\s*# -> (.*)$", block, flags=re.MULTILINE)]


def run_blocks(blocks: list[str], printed) -> None:
    """
    Run in one namespace; what a block prints must hold its `# -> ` comments, in their order.

    Args:
        printed (`Callable[[], str]`): Returns what was printed since it was last called.
    """
    namespace: dict = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, "<block>", "exec"), namespace)
        output, start = printed(), 0
        for expected in expected_outputs(block):
            found = output.find(expected, start)
            assert found >= 0, f"{expected!r} is not in what the block printed: {output!r}"
            start = found + len(expected)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_blocks_run_and_print_what_they_say(name, capsys):
    pytest.importorskip("gguf")
    blocks = python_blocks((ROOT / name).read_text(encoding="utf-8"))
    assert blocks
    assert any(expected_outputs(block) for block in blocks)
    capsys.readouterr()
    run_blocks(blocks, lambda: capsys.readouterr().out)


def test_only_python_blocks_are_taken_and_their_comments_are_compared(capsys):
    text = "```py\n1 / 0\n```\n```python\nx = 1\n```\nand\n```python\nprint(x + 1)\n# -> 2\n```\n"
    blocks = python_blocks(text)
    assert blocks == ["x = 1\n", "print(x + 1)\n# -> 2\n"]
    run_blocks(blocks, lambda: capsys.readouterr().out)
    with pytest.raises(AssertionError, match="'3' is not in"):
        run_blocks(["print(2)\n# -> 3\n"], lambda: capsys.readouterr().out)

"""Where the prompt sets of the papers lie, and how a row of each becomes a prompt. Loads nothing."""

from collections.abc import Callable
from dataclasses import dataclass


def as_it_is(text: str, more: str) -> str:
    """The text alone."""
    return text


def boxed(text: str, more: str) -> str:
    """A problem in words, whose answer can be found again."""
    return f"{text}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def function_to_complete(text: str, more: str) -> str:
    """The head of a Python function, to be written."""
    return f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{text}\n```"


def instruction_with_input(text: str, more: str) -> str:
    """An instruction, and below it what it is about, if anything."""
    return f"{text}\n\nInput:\n{more}" if more else text


def issue_to_fix(text: str, more: str) -> str:
    """An issue of a repository, without the repository."""
    return f"Problem Statement:\n{text}\nPlease fix the issue described above."


def contest_problem(text: str, more: str) -> str:
    """A problem of a programming contest, with the code that a solution has to start from, if any."""
    task = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
        "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program"
    )
    if more:
        form, code = "Use the following code structure:", more
    else:
        form, code = "Write your code in the following format:", "# YOUR CODE HERE"
    return (
        f"{task}\n\n### Question:\n{text}\n\n### Format: {form}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )


@dataclass(frozen=True)
class PromptSet:
    """
    A table of prompts and how to read it.

    Args:
        about (`str`): A line for the help.
        repo_id (`str`): Dataset on the Hub; of a set with a `url`, the repository that it belongs to.
        config (`str`, *optional*): Its configuration.
        split (`str`): Its split.
        column (`str`, *optional*): Column with the prompt. By default the first that is there of those in `COLUMNS`.
        more_column (`str`, *optional*): A second column that the format takes.
        category (`str`): Category of all rows; the groups of reports are made of these.
        category_column (`str`, *optional*): Column with categories instead.
        format (`Callable[[str, str], str]`): From the texts of `column` and `more_column` to the prompt.
        files (`tuple[str, ...]`): JSON lines files of a dataset that has no configurations to load it by.
        url (`str`, *optional*): A JSON lines file that is not on the Hub, with `{revision}` in its address.
    """

    about: str
    repo_id: str
    config: str | None = None
    split: str = "test"
    column: str | None = None
    more_column: str | None = None
    category: str = ""
    category_column: str | None = None
    format: Callable[[str, str], str] = as_it_is
    files: tuple[str, ...] = ()
    url: str | None = None


EMBEDDED = "embedded"
# Where a prompt is looked for in a dataset that names no column.
COLUMNS = ("turns", "prompt", "messages")

# Ids, configurations, splits and prompt formats are those that DFlash's authors evaluated with, so that figures can be
# compared (github.com/z-lab/dflash: `model/utils.py` before commit ca91d5e, `dflash/benchmark.py` since). For the same
# reason the formats keep their wording to the letter. Spec-Bench is not among theirs.
HUB_SETS = {
    "gsm8k": PromptSet(
        "1,319 word problems of primary school",
        "openai/gsm8k",
        config="main",
        column="question",
        category="gsm8k",
        format=boxed,
    ),
    "math500": PromptSet(
        "500 problems of mathematics contests",
        "HuggingFaceH4/MATH-500",
        column="problem",
        category="math",
        format=boxed,
    ),
    "aime24": PromptSet(
        "30 problems of the AIME 2024",
        "HuggingFaceH4/aime_2024",
        split="train",
        column="problem",
        category="math",
        format=boxed,
    ),
    # Others publish the same 30 problems under other ids and splits, such as math-ai/aime25 (test).
    "aime25": PromptSet(
        "30 problems of the AIME 2025",
        "MathArena/aime_2025",
        split="train",
        column="problem",
        category="math",
        format=boxed,
    ),
    "humaneval": PromptSet(
        "164 Python functions to complete",
        "openai/openai_humaneval",
        column="prompt",
        category="humaneval",
        format=function_to_complete,
    ),
    "mbpp": PromptSet(
        "257 short Python tasks (the sanitized test split)",
        "google-research-datasets/mbpp",
        config="sanitized",
        column="prompt",
        category="code",
    ),
    # Its repository has a loading script, which `datasets` no longer runs, so its files are named one by one. They hold
    # the hidden tests too, which is why they are large. The wording of the prompt goes back to LiveCodeBench (MIT).
    "livecodebench": PromptSet(
        "1,055 problems of programming contests (downloads several GB)",
        "livecodebench/code_generation_lite",
        column="question_content",
        more_column="starter_code",
        category="code",
        format=contest_problem,
        files=("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"),
    ),
    # The project's newer home on the Hub is SWE-bench/SWE-bench_Lite.
    "swe-bench": PromptSet(
        "300 issues of Python projects (SWE-bench Lite)",
        "princeton-nlp/SWE-bench_Lite",
        column="problem_statement",
        category="code",
        format=issue_to_fix,
    ),
    "mt-bench": PromptSet(
        "80 conversations of two turns, in eight categories",
        "HuggingFaceH4/mt_bench_prompts",
        split="train",
        column="prompt",
        category_column="category",
    ),
    "alpaca": PromptSet(
        "52,002 instructions; use a limit",
        "tatsu-lab/alpaca",
        split="train",
        column="instruction",
        more_column="input",
        category="instruction",
        format=instruction_with_input,
    ),
    # Its authors keep it in their repository and not on the Hub, where copies differ in their columns.
    "spec-bench": PromptSet(
        "480 prompts of six kinds, some with two turns",
        "hemingkx/Spec-Bench",
        column="turns",
        category_column="category",
        url="https://raw.githubusercontent.com/hemingkx/Spec-Bench/{revision}/data/spec_bench/question.jsonl",
    ),
}

PROMPT_SETS = {
    EMBEDDED: "48 prompts of our own in six groups, of which any multiple of six is balanced",
    **{name: known.about for name, known in HUB_SETS.items()},
}


__all__ = ["COLUMNS", "EMBEDDED", "HUB_SETS", "PROMPT_SETS", "PromptSet"]

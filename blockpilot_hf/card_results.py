"""Figures of records as the front matter of cards has them, for the Hub's pages. Knows nothing of models."""

from collections.abc import Iterator, Mapping
from typing import Any

from huggingface_hub import EvalResult

from .card_parts import TASK
from .display import counted
from .evaluation_display import temperature_name
from .export import NAMESPACE
from .throughput import FLIGHT, LOOKUP_FLIGHT

# What pages of the Hub show; the records have them all.
_DIGITS = 3


def drafter_results(
    intervals: Mapping[str, Mapping[str, Any]], record: Mapping[str, Any], repository: str
) -> Iterator[EvalResult]:
    """
    Acceptance lengths of a drafter.

    Args:
        intervals (`Mapping`): `estimate`, `low` and `high` by group.
        record (`Mapping`): Of `blockpilot train-drafter`, as in `validation.json`.
        repository (`str`): Its name.
    """
    name = f"Acceptance length at block size {record['block_size']} (tokens per step)"
    for group, entry in intervals.items():
        number = record["acceptance_length"][group]["num_prompts"]
        source = (repository, "validation.json")
        yield _result("greedy", group, "acceptance_length", name, entry, number, source)


def policy_results(
    record: Mapping[str, Any], policy: str, repository: str, throughput: Mapping[str, Mapping[str, Any]]
) -> Iterator[EvalResult]:
    """
    What choosing once per prompt gives by group, and for all prompts deciding in flight, simulated and timed.

    Args:
        record (`Mapping`): Of `blockpilot evaluate`, as in `evaluation.json`.
        policy (`str`): Its name there.
        repository (`str`): Name of its repository.
        throughput (`Mapping[str, Mapping]`): Records of `blockpilot evaluate --objective throughput` by file name.
    """
    for result in record["results"]:
        comparison = next(one for one in result["comparisons"] if policy in one["policies"])
        kind = temperature_name(result["temperature"])
        for group, judged in comparison["groups"].items():
            if not judged["is_enough"]:
                continue  # its star does not come along
            told, number, source = judged["rules"][f"policy {policy}"], judged["num_prompts"], "evaluation.json"
            name = "Acceptance length (tokens per step), block size chosen once per prompt"
            yield _result(kind, group, "acceptance_length", name, told["tau"], number, (repository, source))
            if "speedup" in told:
                name = "Speed over plain decoding, simulated, block size chosen once per prompt"
                yield _result(kind, group, "speedup", name, told["speedup"], number, (repository, source))
    for source, of_file in throughput.items():
        timed = of_file["timed"]
        for result in [*(of_file["results"] if timed is None else []), *([timed] if timed else [])]:
            judged = result["groups"]["all"]
            data = f"costs: {result['source']}"
            if timed is not None:
                data = f"{result['dtype']}, {counted(result['machine']['num_threads'], 'thread')}"
            kind = f"{temperature_name(result['temperature'])}, {'simulated' if timed is None else 'timed'}"
            names = {FLIGHT: "every step decides, without copies from the text", LOOKUP_FLIGHT: "every step decides"}
            for rule, name in names.items():
                if told := judged["rules"].get(f"{rule} {policy}"):
                    name, number = f"Speed over plain decoding, {name}", judged["num_prompts"]
                    yield _result(kind, "all", "speedup", name, told["speedup"], number, (repository, source), data)


def _result(
    kind: str,
    group: str,
    metric: str,
    metric_name: str,
    entry: Mapping[str, Any],
    num_prompts: int,
    source: tuple[str, str],
    data: str = "",
) -> EvalResult:
    """
    One figure of a record as the front matter has it.

    Args:
        kind (`str`): What was done with the prompts, say `"greedy"`.
        group (`str`): Of the prompts, `"all"` for every one.
        metric, metric_name (`str`): Its id and what pages show.
        entry (`Mapping`): `estimate`, `low` and `high` of the record.
        num_prompts (`int`): Of the group.
        source (`tuple(str, str)`): Names of the repository and of the record in it.
        data (`str`, *optional*): More about how it came about, such as a cost table.
    """
    repository, record = source
    arguments: dict[str, Any] = {"num_prompts": num_prompts}
    if entry.get("low") is not None and entry.get("high") is not None:
        arguments["interval_95"] = [round(entry["low"], _DIGITS), round(entry["high"], _DIGITS)]
    return EvalResult(
        task_type=TASK,
        task_name="Text generation",
        # Results are told apart by type, config, split and revision of the data set, not by its name.
        dataset_type="custom",
        dataset_config=", ".join(filter(None, (kind, group, data))),
        dataset_name="Held-out prompts" + ("" if group == "all" else f": {group}") + (f", {data}" if data else ""),
        dataset_split="test",
        metric_type=metric,
        metric_name=f"{metric_name}, {kind}",
        metric_value=round(entry["estimate"], _DIGITS),
        metric_args=arguments,
        source_name=record,
        source_url=f"https://huggingface.co/{NAMESPACE}/{repository}/blob/main/{record}",
    )


__all__ = ["drafter_results", "policy_results"]

"""A policy's card, rendered from the records that lie beside its weights. Knows nothing of models."""

from collections.abc import Mapping, Sequence
from typing import Any

from .benchmark_card import benchmark_section
from .card_parts import FIT, model_card, notes, sources, usage_snippet
from .card_results import policy_results
from .costs import CostTable
from .embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME
from .evaluation_display import (
    CONTROL_NOTE,
    choices_table,
    control_lines,
    figure,
    gains_table,
    groups_table,
    markdown_table,
    rules_table,
    temperature_name,
)
from .evaluation_rules import ENOUGH_PROMPTS
from .scaling_card import scaling_section
from .throughput import FLIGHT, LOOKUP_FLIGHT
from .throughput_card import throughput_section

# Less than this over plain decoding is hardly worth loading two more models.
_WORTH_IT = 1.05


def policy_card(
    record: dict[str, Any],
    name: str = EMBEDDED_POLICY_NAME,
    training: dict[str, Any] | None = None,
    throughput: Mapping[str, dict[str, Any]] | None = None,
    benchmarks: Sequence[dict[str, Any]] = (),
    scalings: Sequence[dict[str, Any]] = (),
) -> str:
    """
    A policy's `README.md`.

    Args:
        record (`dict`): Of `blockpilot evaluate`, as in `evaluation.json`.
        name (`str`): The policy's, in the record too, unless it is the only one there.
        training (`dict`, *optional*): Of `blockpilot train-policy`, as in `training.json`.
        throughput (`Mapping[str, dict]`, *optional*): Of `blockpilot evaluate --objective throughput`, by file name.
        benchmarks (`Sequence[dict]`, *optional*): Of `blockpilot benchmark`.
        scalings (`Sequence[dict]`, *optional*): Of `blockpilot scaling`.

    Raises:
        `ValueError`: if the record has several policies and none of that name.
    """
    known, throughput = record["meta_info"]["policies"], throughput or {}
    if name not in known and len(known) != 1:
        raise ValueError(f"The record has no policy {name!r}, only {sorted(known)}. Evaluate it under that name.")
    policy = name if name in known else next(iter(known))
    sizes, sweep = ", ".join(map(str, known[policy]["block_sizes"])), record["meta_info"]["sweep"]
    picks = {
        EMBEDDED_POLICY_NAME: f"the block size ({sizes}; 1 is plain decoding) with which they are fastest",
        EMBEDDED_PAPER_POLICY_NAME: f"the block size ({sizes}) with the largest acceptance length, as in the paper",
    }.get(name, f"the block size ({sizes})")
    priced = "; times plain is the speed over plain decoding under the\ncost table below, prefill aside"
    priced = "" if record["costs"] is None else priced
    reads = "reads the target's distribution at the last prompt position, once per prompt, and picks"
    if training is not None and training["settings"].get("head") == "curve":
        reads = (
            "reads the target's distribution and the drafter's context at the last prompt position, once per prompt, "
            "predicts the acceptance\nlength at every block size, and under the costs of the device at hand picks"
        )
    body = f"""\
# {name}

A [BlockPilot](https://arxiv.org/abs/2606.31315) policy for [{EMBEDDED_DRAFTER_NAME}](../{EMBEDDED_DRAFTER_NAME}) and SmolLM2-135M-Instruct: it
{reads} {picks}.
{_headline(record, policy, throughput)}
With torch and transformers alone:

{usage_snippet(name)}

With the package blockpilot_hf, which brings drafter, policies and target:

```python
from blockpilot_hf import BlockPilot
{_installed(name)}
```

## What it is worth

On held-out prompts, from a sweep: how decoding goes at every block size on one and the same text{_limit(sweep)},
in {sweep["dtype"]}. Tau is the acceptance length, the mean over prompts; tok/step is pooled{priced}. In brackets 95 % bootstrap intervals over prompts ({record["settings"]["num_resamples"]:,} resamples). The best constant
was chosen on the training prompts; the best per text cannot be had without decoding at every size first.
{_checked(record)}

{_results(record, policy)}

Command: `{record["run_info"]["command"]}`. Weights (fingerprints): policy `{known[policy]["fingerprint"]}`, drafter
`{sweep["drafter_fingerprint"]}`, target `{sweep["target_fingerprint"]}`. By prompt: `evaluation.json`.
{_section(benchmark_section(benchmarks))}{_section(scaling_section(scalings))}{_section(throughput_section(list(throughput.values())))}{_costs(record["costs"])}{_training(training)}
## Limits

{FIT}
- {_made_for(known[policy]["sampling"])}
{_not_worth_it(record, policy)}
{sources("Spec-Bench (Apache-2.0), HumanEval (MIT) and GSM8K, test part (MIT)")}"""
    tags = ["blockpilot", "speculative-decoding"]
    return model_card(name, body, tags=tags, results=list(policy_results(record, policy, name, throughput)))


def _installed(name: str) -> str:
    """How the package loads its target and a pilot with this policy."""
    if name == EMBEDDED_POLICY_NAME:
        return """\
from blockpilot_hf.embedded import load_embedded_target

target, tokenizer = load_embedded_target()
pilot = BlockPilot.from_pretrained()  # the drafter and this policy
inputs = tokenizer("7 times 8 is", return_tensors="pt")
output = pilot.generate(target, **inputs, max_new_tokens=32, do_sample=False, return_dict_in_generate=True)
print(output.blockpilot.block_size, output.blockpilot.scores)"""
    return f"""\
from blockpilot_hf.loading import embedded_drafter_dir

pilot = BlockPilot.from_pretrained(policy=embedded_drafter_dir().parent / "{name}")
print(pilot.policy.config.block_sizes)"""


def _headline(record: dict[str, Any], policy: str, throughput: Mapping[str, dict[str, Any]]) -> str:
    """The figures that most come for, one a line."""
    told = []
    for one in throughput.values():
        for result in one["results"] if one["timed"] is None else [one["timed"]]:
            rules = result["groups"]["all"]["rules"]
            for rule, lookup in ((LOOKUP_FLIGHT, ""), (FLIGHT, "with `lookup=False`, ")):
                if found := rules.get(f"{rule} {policy}"):
                    how = f"{lookup}{'timed in ' + result['dtype'] if one['timed'] else 'simulated'}"
                    how += f", costs: {result['source']}"
                    told.append(f"{figure(found['speedup'])}: {how}; {result['num_prompts']} prompts")
    if not told and record["costs"] is not None:
        for result in record["results"]:
            speed = _comparison(result, policy)["groups"]["all"]["rules"][f"policy {policy}"]["speedup"]
            how = f"simulated, {temperature_name(result['temperature'])}, block size chosen once per prompt"
            told.append(f"{figure(speed)}: {how}; {result['num_prompts']} prompts")
    if not told:
        return ""
    lines = "\n".join(f"- {line}" for line in told)
    return f"\nTimes as fast as plain decoding with default settings, on held-out prompts:\n\n{lines}\n"


def _not_worth_it(record: dict[str, Any], policy: str) -> str:
    """Groups of prompts that it makes no faster."""
    found = []
    for result in record["results"] if record["costs"] is not None else ():
        for name, group in _comparison(result, policy)["groups"].items():
            speed = group["rules"][f"policy {policy}"]["speedup"]
            if group["is_enough"] and speed["estimate"] < _WORTH_IT:
                found.append(f"{name} ({figure(speed)}, {temperature_name(result['temperature'])})")
    if not found:
        return ""
    return f"- Where choosing once per prompt is no faster than plain decoding, or hardly, so that `model.generate` alone does as well:\n  {', '.join(found)}.\n"


def _comparison(result: dict[str, Any], policy: str) -> dict[str, Any]:
    return next(one for one in result["comparisons"] if policy in one["policies"])


def _results(record: dict[str, Any], policy: str) -> str:
    parts = []
    for result in record["results"]:
        comparison = _comparison(result, policy)
        parts.append(f"### {temperature_name(result['temperature']).capitalize()}")
        tables = [
            rules_table(result, comparison),
            gains_table(comparison),
            groups_table(comparison, policy),
            choices_table(comparison, policy),
        ]
        for table in tables:
            parts.append(table.markdown)
        if not all(group["is_enough"] for group in comparison["groups"].values()):
            parts.append(f"\\* fewer than {ENOUGH_PROMPTS} prompts: too few for a claim.")
        parts += [f"{line[0].upper()}{line[1:]}." for line in control_lines(comparison)]
    return "\n\n".join([*parts, CONTROL_NOTE])


def _limit(sweep: dict[str, Any]) -> str:
    tokens = sweep["max_new_tokens"]
    return "" if tokens is None else f" of at most {tokens} new tokens"


def _checked(record: dict[str, Any]) -> str:
    """Whether the prompts are held out."""
    lists = record["overlap"]["lists"]
    unknown = [name for name, entry in lists.items() if not entry["is_checked"]]
    checked = len(lists) - len(unknown)
    dropped = record["overlap"]["num_prompts_dropped"]
    told = f"Hashes of the prompts were compared with {checked} of {len(lists)} lists of training prompts; "
    told += f"{dropped} that were on one were left out." if dropped else "none was on one."
    return told + (f" Without a list: {', '.join(unknown)}." if unknown else "")


def _section(section: str) -> str:
    return f"\n{section}" if section else ""


def _costs(costs: dict[str, Any] | None) -> str:
    if costs is None:
        return ""
    table = CostTable.from_dict(costs)
    sizes = sorted(table.verify_s)
    prices = markdown_table(
        ["block size", *map(str, sizes)],
        [
            ["verify, ms", *(f"{table.verify_at(size) * 1e3:.1f}" for size in sizes)],
            ["draft, ms", *(f"{table.draft_at(size) * 1e3:.1f}" if size > 1 else "-" for size in sizes)],
        ],
    )
    machine, length = table.key, table.reference_length
    return f"""
## Costs

Medians on {machine["num_threads"]} threads of {machine["device"]} in {machine["dtype"]}, {length} tokens of context, torch {machine["torch"]}:

{prices}

Speeds above hold for machines where these ratios hold, roughly.
"""


def _training(training: dict[str, Any] | None) -> str:
    if training is None:
        return ""
    settings, prompts = training["settings"], training["num_prompts"]
    rule = "tokens per second under the cost table" if settings["rule"] == "seconds" else "acceptance length"
    compact = "64 sorted log-probabilities, entropy, margin and the sampling settings"
    features = {
        "compact": compact,
        "compact+context": f"{compact}; the drafter's projected context",
        "logits": "the logits over the whole vocabulary",
    }[settings["features"]]
    if settings.get("head") == "curve":
        learned = "Learned: the acceptance length at every block size (squared error of its logarithm)"
        objective = ""
    else:
        learned = f"Labels: the block size with the most {rule}, the smallest among equals"
        weighted = ", class weights" if settings["class_weights"] else ""
        objective = f' Objective "{settings["objective"]}"{weighted}.'
    return f"""
## Training

{learned}, on {training["num_texts"]["train"]:,} texts of {prompts["train"]:,} prompts; stopped by {prompts["validation"]:,} other
prompts, the best of {settings["num_seeds"]} seed{"s" if settings["num_seeds"] > 1 else ""}.{objective} Features: {features}.
{_accuracy(training)}Command: `{training["run_info"]["command"]}`.{notes(training["run_info"])}
"""


def _accuracy(training: dict[str, Any]) -> str:
    """How well a curve head predicts on the prompts that stopped its training."""
    entries = (training.get("curve_accuracy") or {}).get("validation")
    if not entries:
        return ""
    rows = [
        [
            str(entry["block_size"]),
            f"{entry['mean']:.2f}",
            f"{entry['mean_absolute_error']:.3f}",
            f"{entry['mean_absolute_error_of_the_mean']:.3f}",
            f"{entry['r2']:.2f}",
        ]
        for entry in entries
    ]
    header = ["block size", "tau", "mean absolute error", "of predicting the training mean", "r2"]
    return f"On those prompts:\n\n{markdown_table(header, rows)}\n\n"


def _made_for(sampling: dict[str, Any] | None) -> str:
    if sampling and "temperature" in sampling:
        name = temperature_name(sampling["temperature"])
        return f"Made for {name} decoding: other sampling settings had no part in training."
    return "Made for greedy decoding and for sampling at the temperatures above, without top-k and top-p."


__all__ = ["policy_card"]

"""The embedded drafter's card, rendered from its record. Knows nothing of models."""

from typing import Any

import numpy as np

from .card_parts import FIT, model_card, notes, sources, usage_snippet
from .card_results import drafter_results
from .embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME
from .evaluation_display import figure, markdown_table, temperature_name
from .intervals import bootstrap_intervals


def drafter_card(record: dict[str, Any]) -> str:
    """
    The drafter's `README.md`.

    Args:
        record (`dict`): Of `blockpilot train-drafter`, as in `validation.json`.
    """
    intervals = _intervals(record)
    rows = markdown_table(
        ["prompts", "number", "acceptance length"],
        [
            [name, str(record["acceptance_length"][name]["num_prompts"]), figure(entry)]
            for name, entry in intervals.items()
        ],
    )
    run, meta, settings = record["run_info"], record["meta_info"], record["settings"]
    body = f"""\
# {EMBEDDED_DRAFTER_NAME}

A [DFlash](https://arxiv.org/abs/2602.06036) drafter for SmolLM2-135M-Instruct: it proposes {record["block_size"] - 1} tokens in one pass, and the target
verifies them in one pass, so that `generate` needs fewer passes and gives the same text. Made to go with
[{EMBEDDED_POLICY_NAME}](../{EMBEDDED_POLICY_NAME}), which picks the block size for each prompt.

With torch and transformers alone (its config names the policy):

{usage_snippet()}

With the package blockpilot_hf, which brings drafter, policy and target:

```python
from blockpilot_hf import BlockPilot
from blockpilot_hf.embedded import load_embedded_target

target, tokenizer = load_embedded_target()
pilot = BlockPilot.from_pretrained()  # this drafter and its policy
inputs = tokenizer("7 times 8 is", return_tensors="pt")
print(tokenizer.decode(pilot.generate(target, **inputs, max_new_tokens=32, do_sample=False)[0]))
```

It is an ordinary DFlash drafter: transformers' own `generate(assistant_model=drafter, speculation_type="dflash")` takes it too, greedily and at one
fixed block size.

## Acceptance length

Tokens per verification step at block size {record["block_size"]} along the trajectories that decoding takes, on prompts that training did not see; mean
over steps of a text, then over texts. Plain decoding has 1. In brackets 95 % bootstrap intervals over prompts.

{rows}

Command: `{run["command"]}`. Weights (fingerprints): drafter `{meta["drafter_fingerprint"]}`, target `{meta["target_fingerprint"]}`;
target in {meta["target_dtype"]}. By prompt: `validation.json`.

## Training

{meta["num_parameters"] / 1e6:.1f} M parameters, context from the target's layers {", ".join(map(str, settings["target_layer_ids"]))}, {_start(meta)}. {run["num_steps"]:,} steps of
{settings["sequences_per_step"] * settings.get("accumulation", 1)} texts with {settings["anchors_per_sequence"]} random anchors each{_block_sizes(settings)}, {meta["num_texts"]:,} texts that the target wrote itself{_temperatures(meta)}; AdamW with a cosine
from {settings["learning_rate"]:g}, position weights {_weights(settings)}, {settings["distillation"]:.0%} of the loss against the target's whole distribution.
{run["training_s"] / 60:.0f} minutes{_precision(settings)}.{notes(run)}
{_progress(record)}
## Limits

{FIT}
- It knows the kinds of prompts that it was trained on. What it is worth on others, and where it is not, is on the card of the
  policy, by group; without a policy that falls back to plain decoding, a block where nothing is accepted costs time.

{sources("of the same sources as the training prompts, none of which training saw")}"""
    return model_card(
        EMBEDDED_DRAFTER_NAME,
        body,
        tags=["dflash", "speculative-decoding", "block-diffusion"],
        results=list(drafter_results(intervals, record, EMBEDDED_DRAFTER_NAME)),
    )


def _intervals(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Acceptance length by group with its interval, `"all"` last."""
    found = {}
    for name, group in _all_last(record["acceptance_length"]).items():
        entries = [entry for entry in record["per_prompt"] if name in ("all", entry["category"])]
        ends = bootstrap_intervals(
            {"tau": np.array([entry["acceptance_length"] for entry in entries])}, {"tau": lambda means: means["tau"]}
        )["tau"]
        found[name] = {"estimate": group["acceptance_length"], "low": ends.low, "high": ends.high}
    return found


def _progress(record: dict[str, Any]) -> str:
    """How acceptance grew with data and steps, where it is on record."""
    entries = record.get("progress", [])
    if not entries:
        return ""
    names = list(_all_last(entries[-1]["acceptance_length"]))
    rows = [
        [
            *(str(entry["run"]), f"{entry['step']:,}", f"{entry['num_texts']:,}", f"{entry['num_visits']:,}"),
            f"{entry['training_s'] / 60:.0f}",
            str(entry["acceptance_length"]["all"]["num_prompts"]),
            *(f"{entry['acceptance_length'][name]['acceptance_length']:.2f}" for name in names),
        ]
        for entry in entries
    ]
    header = ["run", "steps", "texts", "visits", "minutes", "held out", *names]
    return f"\nAcceptance length against data and steps; a run starts from the end of the one before:\n\n{markdown_table(header, rows)}\n"


def _start(meta: dict[str, Any]) -> str:
    init = meta.get("init")
    return f"started from the drafter `{init['fingerprint']}`" if init else "started from the target's last layers"


def _block_sizes(settings: dict[str, Any]) -> str:
    sizes = settings.get("block_sizes")
    return f" in blocks of {', '.join(map(str, sizes))}" if sizes else ""


def _weights(settings: dict[str, Any]) -> str:
    gamma = settings["gamma"]
    return "exp(-(k - 1) / gamma), gamma by block size" if gamma is None else f"exp(-(k - 1) / {gamma:g})"


def _precision(settings: dict[str, Any]) -> str:
    precision = settings.get("mixed_precision", "no")
    return "" if precision == "no" else f", in {precision} mixed precision"


def _temperatures(meta: dict[str, Any]) -> str:
    """How the texts were drawn, where it is on record."""
    counts = {temperature_name(float(t)): number for t, number in meta.get("temperatures", {}).items()}
    return f" ({', '.join(f'{number:,} {name}' for name, number in counts.items())})" if counts else ""


def _all_last(groups: dict[str, Any]) -> dict[str, Any]:
    return {**{name: group for name, group in groups.items() if name != "all"}, "all": groups["all"]}


__all__ = ["drafter_card"]

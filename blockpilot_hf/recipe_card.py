"""The recipe's card, which has no figures of its own."""

from .card_parts import CITATION, model_card, usage_snippet
from .embedded import EMBEDDED_DRAFTER_NAME, EMBEDDED_POLICY_NAME
from .export import RECIPE_NAME
from .hub import REQUIREMENTS


def recipe_card() -> str:
    """The `README.md` of the recipe, which has no figures of its own."""
    body = f"""\
# {RECIPE_NAME}

A decoding recipe for transformers: a [DFlash](https://arxiv.org/abs/2602.06036) drafter proposes a block of tokens in one pass, the target verifies it in one
pass, and a [BlockPilot](https://arxiv.org/abs/2606.31315) policy picks the block size for each prompt. The output is the target's own: in float32 the text that
plain `generate` gives for the same seed.

{usage_snippet()}

Needs {" and ".join(REQUIREMENTS)} and nothing else. `trust_remote_code=True` runs the Python files of this repository, copies of those of the package
blockpilot_hf; pass `revision=` with a commit to stay with the ones that you have read.

- `assistant_model`: the drafter, here [{EMBEDDED_DRAFTER_NAME}](../{EMBEDDED_DRAFTER_NAME}); any DFlash drafter that fits the target.
- `policy`: object, folder or Hub id; by default the one that the drafter names, here [{EMBEDDED_POLICY_NAME}](../{EMBEDDED_POLICY_NAME}). `False` for none.
- `block_size`: fixes the size; 1 is plain decoding.
- `adapt="flight"`: each step decides how much to draft, copy and verify, which is the default; `"prompt"`: one size for the whole answer, which is what a policy
  by the paper's rule is asked for.
- `lookup=False`: steps in flight only draft. By default they also copy what followed the same tokens earlier in prompt and answer (prompt lookup), where that pays.

With `return_dict_in_generate=True` the output has a field `blockpilot`, the record of the call.

## Limits

- One row at a time: batches are decoded row by row.
- No beams, no encoder-decoder models; what else is refused is said by the error, before the first pass.
- In bfloat16 a wider pass rounds differently, which can turn a near-tie.

{CITATION}"""
    tags = ["blockpilot", "dflash", "speculative-decoding", "block-diffusion"]
    return model_card(RECIPE_NAME, body, tags=tags, has_weights=False)


__all__ = ["recipe_card"]

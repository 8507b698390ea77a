"""A tiny pair for the Space's tests: it writes a given text, in blocks of known sizes, with right and wrong drafts."""

import time

import torch
from cli_models import byte_tokenizer
from conftest import make_drafter, make_target

from blockpilot_hf import BlockPilot, BlockPilotConfig, BlockPilotPolicy
from blockpilot_hf.parity import ScriptedDrafter
from models import Loaded, Models

# Indentation, blank lines, a tab, characters of two to four bytes, one of several code points, and what HTML means.
TEXT = 'def f(x):\n    if x < 1 && "a":\n\n        return {"día": "🙂 你好 👩‍🚀"}\n\t<b>&amp;</b>\r\n\n  end '


def writing_pair(text=TEXT, *, accuracy=0.7, block_size=8, seconds_per_pass=0.0, ends=True, repeats=1):
    """
    A [`Loaded`] whose target answers every prompt with `text` and the end of the answer.

    Args:
        accuracy (`float`): Share of right drafted tokens.
        seconds_per_pass (`float`): Passes take at least so long.
        ends (`bool`): Else the text goes on from its beginning.
    """
    tokenizer = byte_tokenizer()
    target = make_target("llama", vocab_size=len(tokenizer) + 4, max_position_embeddings=4096)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    ids = tokenizer(text).input_ids * repeats + ([tokenizer.eos_token_id] if ends else [])
    start = tokenizer.convert_tokens_to_ids("<|assistant|>")
    lengths = {}  # of the prompt at hand

    def write(module, args, kwargs, output):
        """The tokens after the prompt are told by their positions."""
        if seconds_per_pass:
            time.sleep(seconds_per_pass)
        given = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        width = output.logits.shape[1]
        cache = output.cache if "cache" in output else output.past_key_values  # by the version of transformers
        last = int(cache.get_seq_length())  # positions seen, this pass included
        if (given == start).any():  # the prompt's last token
            lengths["prompt"] = last - given.shape[1] + int((given[0] == start).nonzero()[-1]) + 1
        for j in range(width):
            number = last - width + j + 1 - lengths["prompt"]
            wanted = ids[number % len(ids)] if not ends else ids[min(number, len(ids) - 1)]
            output.logits[:, j, wanted] = 50.0
        return output

    target.register_forward_hook(write, with_kwargs=True)
    drafter = ScriptedDrafter(target, accuracy=accuracy, block_size=block_size)
    drafter.script = torch.zeros(0, dtype=torch.long)

    draft = drafter.draft_block

    def draft_block(anchor_ids, context, *, position, block_size):
        long = ids * (1 + 4096 // len(ids)) if not ends else ids
        drafter.script = torch.tensor([0] * lengths["prompt"] + long)
        return draft(anchor_ids, context, position=position, block_size=block_size)

    drafter.draft_block = draft_block
    facts = {"target": "tiny", "drafter": "scripted", "policy": "none", "dtype": "float32", "device": "CPU"}
    return Loaded(target, tokenizer, BlockPilot(drafter, False), facts={**facts, "num_threads": 1})


def tiny_pair():
    """A [`Loaded`] with a random target, a real drafter and both kinds of policies; it writes printable ASCII."""
    tokenizer = byte_tokenizer()
    target = make_target("llama", vocab_size=len(tokenizer) + 4)
    with torch.no_grad():
        for token_id in range(target.lm_head.out_features):
            piece = tokenizer.decode([token_id], skip_special_tokens=True)
            if not (len(piece) == 1 and piece.isascii() and piece.isprintable()):
                target.lm_head.weight[token_id] = 0
    drafter = make_drafter(target)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = {"block_sizes": [1, 2, 4, 8], "features": "compact", "hidden_size": 4}
        curve = BlockPilotPolicy(BlockPilotConfig(**config, head="curve")).eval()
        paper = BlockPilotPolicy(BlockPilotConfig(block_sizes=[2, 4, 8], features="compact", hidden_size=4)).eval()
    facts = {"target": "tiny", "drafter": "tiny", "policy": "tiny", "dtype": "float32", "device": "CPU"}
    return Loaded(target, tokenizer, BlockPilot(drafter, False), curve, paper, {**facts, "num_threads": 1})


def ready(loaded):
    """Models that are there already."""
    models = Models(lambda: loaded)
    models.get()
    return models

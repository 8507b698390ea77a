"""`BlockPilotCandidateGenerator`: everything on the draft side of one call, for one row.

It owns the drafter's cache and the context that the drafter has not seen yet, asks the policy for the block size once
after the prefill, drafts blocks, and in flight lets every step decide how much to copy, to draft and to verify. It is a
transformers `CandidateGenerator`, so it also works in place of the stock one in assisted decoding. It never touches the
target's cache, processors or criteria, and leaves drafter, policy and target as they are: a second call starts from a
second object.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.cache_utils import DFlashCache
from transformers.generation import CandidateGenerator
from transformers.utils import logging

from .checks import (
    check_adapt,
    check_block_size,
    check_drafter,
    check_lookup,
    check_pair,
    check_policy,
    check_states,
    default_adapt,
    vocab_rows,
)
from .costs import CostTable
from .default_costs import costs_for
from .features import projected_context
from .flight import COPY_WIDTH, Flight
from .lookup import Lookup
from .verification import DraftBlock, DraftSampling, propose

logger = logging.get_logger(__name__)

# Tokens of a plain stretch whose states wait for the drafter before it takes them in.
_CHUNK = 64


class BlockPilotCandidateGenerator(CandidateGenerator):
    """
    Args:
        drafter (`PreTrainedModel`): A DFlash drafter; recognised by its config's attributes, not by its class.
        target (`PreTrainedModel`): The model whose output is reproduced. Its embedding and head are looked up anew.
        generation_config (`GenerationConfig`): Of this call, with `max_length` set.
        policy (`BlockPilotPolicy`, *optional*): Chooses the block size after the prefill.
        block_size (`int`, *optional*): Fixes the block size; goes before the policy.
        adapt (`str`, *optional*):
            `"prompt"`: one block size for the whole answer. `"flight"`: each step decides how much to draft and to
            verify, from what was accepted so far. By default as [`default_adapt`] says.
        costs ([`CostTable`], *optional*): Seconds of passes; by default [`costs_for`] the pair, where they are needed.
        lookup (`bool`, *optional*):
            In flight, whether a step may also copy what followed the same tokens earlier ([`Lookup`]); by default it
            may.
        draft_sampling (`bool`, *optional*, defaults to `False`):
            Draw the drafted tokens from the drafter's distribution when sampling, instead of taking its argmax.

    Raises:
        `ValueError`, `TypeError`: if drafter, target, policy and block size do not fit together.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: Any,
        target: Any,
        generation_config: GenerationConfig,
        *,
        policy: Any = None,
        block_size: int | None = None,
        adapt: str | None = None,
        costs: CostTable | None = None,
        lookup: bool | None = None,
        draft_sampling: bool = False,
    ):
        check_drafter(drafter)
        check_pair(target, drafter)
        check_adapt(adapt, block_size)
        if block_size is not None:
            check_block_size(block_size)
            block_size = int(block_size)  # numpy's integers are no sizes to slice with
        elif policy is not None:
            check_policy(policy, target, drafter)
        self.drafter = drafter
        self.target = target
        self.policy = policy if block_size is None else None
        self.generation_config = generation_config
        self.block_size: int = block_size  # type: ignore[assignment]  # `None` until `choose`
        self.scores: dict[int, float] | None = None
        self.reason = "fixed by the caller"
        self.costs = costs
        self.adapt = adapt or ("prompt" if block_size is not None else default_adapt(self.policy))
        check_lookup(lookup, self.adapt)
        self.source = ""  # of the step at hand: "drafter", "lookup", or neither
        self._flight: Flight | None = None
        self._lookup = Lookup() if self.adapt == "flight" and lookup is not False else None
        self._copied: list[int] = []  # what the step at hand copies
        self._sampling = _draft_sampling(generation_config) if draft_sampling else None
        self._limits = position_limits(target)
        self._cache = DFlashCache(config=drafter.config)
        self._cache.activate_past_recording()
        self._pending: list[torch.Tensor] = []  # context that the drafter has not seen, (1, n, hidden * taps) each
        self._num_cached = 0
        self._num_context = 0  # tokens whose states are known: the position of the anchor
        self._offset = 0  # of the target's position of the anchor from that number
        self._head_dtype: torch.dtype | None = None
        self._last_step = 1, False  # of stock assisted decoding: verified width, and whether there was a draft
        if block_size is not None:
            self._warn_if_above_training()

    @property
    def needs_context(self) -> bool:
        """Whether the target's hidden states are wanted: not where plain decoding is all that will come."""
        return self.block_size != 1 or self.adapt == "flight"

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """Keywords for the target's passes: only the layers that the drafter reads are returned."""
        # `hidden_states[0]` is the embedding, so the output of layer k is entry k + 1.
        return (
            {"output_hidden_states": [i + 1 for i in self.drafter.config.target_layer_ids]}
            if self.needs_context
            else {}
        )

    def choose(
        self,
        logits: torch.Tensor,
        hidden_states: tuple[torch.Tensor | None, ...] | None = None,
        prompt_length: int | None = None,
    ) -> int:
        """
        Fix the block size of the call, once, from the prefill. In flight it is only where decisions start from: what a
        curve head predicts is their prior, and a policy that names one size for all steps is not asked.

        Args:
            logits (`torch.FloatTensor` of shape `(1, vocab_size)`): Raw target logits at the last prompt position.
            hidden_states (`tuple[torch.FloatTensor]`, *optional*):
                `(1, width, hidden_size)` per captured layer, the last prompt position at the end: for policies that
                read the drafter's context.
            prompt_length (`int`, *optional*): Costs are looked up there.
        """
        if self.block_size is not None:
            return self.block_size
        prior = None
        predicts_curve = getattr(getattr(self.policy, "config", None), "head", "") == "curve"
        if self.adapt == "flight" or predicts_curve:
            self.costs = self.costs or costs_for(self.target, self.drafter)
        if self.policy is not None and (self.adapt == "prompt" or predicts_curve):
            choice = self._ask_policy(self.policy, logits, hidden_states, prompt_length)
            self.block_size, self.scores, self.reason = choice.block_size, choice.scores, choice.reason
            prior = getattr(choice, "acceptance_lengths", None)
            check_block_size(self.block_size)
        else:
            self.block_size = self.drafter.config.block_size
            self.reason = "no policy: the block size of the drafter's training"
            if self.policy is not None:
                self.reason = "in flight a policy that names one size is not asked: the drafter's training's"
            elif self.adapt == "prompt":
                logger.warning_once(
                    f"No policy given or named by the drafter: every prompt uses its block size {self.block_size}."
                )
        if self.adapt == "flight":
            self._take_off(prior)
        self._warn_if_above_training()
        return self.block_size

    def _ask_policy(
        self,
        policy: Any,
        logits: torch.Tensor,
        hidden_states: tuple[torch.Tensor | None, ...] | None,
        prompt_length: int | None,
    ) -> Any:
        config = self.generation_config
        settings: dict[str, Any] = {
            "temperature": (1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0,
            "top_k": config.top_k if config.do_sample else None,
            "top_p": config.top_p if config.do_sample else None,
        }
        if getattr(policy.config, "head", "") == "curve":
            settings["costs"] = self.costs
            settings["context_length"] = prompt_length
        if getattr(policy.config, "features", "") == "compact+context":
            assert hidden_states is not None, "the prefill's states are captured where a drafter reads them"
            taps = [hidden_states[i + 1][:, -1] for i in self.drafter.config.target_layer_ids]
            joined = torch.cat([tap.to(self._device, self._dtype) for tap in taps], dim=-1)
            settings["context"] = projected_context(self.drafter, joined)
        return policy.choose(logits, **settings)

    def _take_off(self, prior: dict[int, float] | None) -> None:
        """Blocks may be as large as the policy's largest candidate; without one, as the drafter was trained for."""
        self._flight = Flight(self.costs, sizes_up_to(max(prior) if prior else self.block_size), prior=prior)

    def observe(self, hidden_states: tuple[torch.Tensor | None, ...], kept: torch.Tensor | int) -> None:
        """
        Take in the target's states of committed tokens.

        Args:
            hidden_states (`tuple[torch.FloatTensor]`): `(1, width, hidden_size)` per captured layer.
            kept (`int` or `torch.BoolTensor` of shape `(width,)`): How many, or which, positions are committed tokens.
        """
        if not self.needs_context:
            return
        taps = [hidden_states[i + 1] for i in self.drafter.config.target_layer_ids]
        check_states(self.target, taps)
        picked = [tap[:, :kept] if isinstance(kept, int) else tap[:, kept.to(tap.device)] for tap in taps]
        self._head_dtype = picked[0].dtype
        # Joining copies, so the states of the other positions and layers can be freed.
        context = torch.cat([tap.to(self._device, self._dtype) for tap in picked], dim=-1)
        self._pending.append(context)
        self._num_context += context.shape[1]
        if self._flight is not None and len(self._pending) >= _CHUNK and not hasattr(self.drafter, "draft_block"):
            # A stretch of plain steps: states are wide, what the drafter keeps of them is not.
            self._pass_drafter(self._noise_embeds(self._no_anchor, 1))

    def locate_anchor(self, position: int) -> None:
        """Say at which position the target counts the anchor: users may give positions of their own."""
        self._offset = position - self._num_context

    def plan(self, remaining: int, input_ids: torch.LongTensor | None = None) -> tuple[int, str]:
        """
        Positions to verify in the next step before anything is proposed, and why they are fewer than the block size. In
        flight this decides the block size too, and whether the block is drafted or copied.

        Args:
            remaining (`int`): Tokens left in the budget; a step commits at most as many as it verifies.
            input_ids (`torch.LongTensor` of shape `(1, length)`, *optional*):
                The sequence so far; without it nothing is copied.
        """
        self.source = "drafter"
        if self._flight is None:
            width, reason = self.verify_width(remaining)
        elif (width := self._copy_width(remaining, input_ids)) > 1:
            self.source, self.block_size, reason = "lookup", width, ""
        else:
            self.block_size, reason = self._flight.draft_size(
                remaining, self._num_context, largest=self._room_of_drafter
            )
            width, reason = (1, reason) if self.block_size == 1 else self.verify_width(remaining)
        if width == 1:
            self.source = ""
        return width, reason

    def _copy_width(self, remaining: int, input_ids: torch.LongTensor | None) -> int:
        """Positions to verify of a copy, the anchor included; 1 for none."""
        if self._lookup is None or self._flight is None or input_ids is None:
            return 1
        num_padding = input_ids.shape[1] - 1 - self._num_context
        self._lookup.extend(input_ids[0, num_padding + len(self._lookup) :].tolist())
        most, _ = self._within_target(min(COPY_WIDTH, max(1, remaining)))
        match_length, self._copied = self._lookup.find(most - 1)
        if not match_length:
            return 1
        return self._flight.copy_width(match_length, most, remaining, self._num_context, largest=self._room_of_drafter)

    def trim(self, draft: DraftBlock, width: int, reason: str) -> tuple[int, str]:
        """
        How many of the positions to verify now that the draft is there: in flight as many as pay.

        Args:
            draft ([`DraftBlock`]): What [`draft_block`] gave.
            width (`int`): What [`plan`] gave, with its reason.
        """
        if self._flight is None or self.source == "lookup":
            return width, reason
        pays = self._flight.verify_width(draft.confidence[0].tolist(), width)
        return (pays, "trimmed to what pays") if pays < width else (width, reason)

    def learn(self, verify_width: int, num_accepted: int, *, was_drafted: bool) -> None:
        """
        Take in how a step went.

        Args:
            verify_width (`int`): Positions that the target checked.
            num_accepted (`int`): Drafted tokens that it accepted.
            was_drafted (`bool`): Whether there was a draft or a copy.
        """
        if self._flight is not None:
            self._flight.learn(verify_width, num_accepted, was_drafted=was_drafted)

    def verify_width(self, remaining: int) -> tuple[int, str]:
        """
        Positions to verify in the next step, and why they are fewer than the block size.

        Args:
            remaining (`int`): Tokens left in the budget; a step commits at most as many as it verifies.
        """
        if self.block_size == 1:
            return 1, ""
        room = self._room_of_drafter
        if room is not None and self.block_size > room:
            self._pending.clear()  # it will not draft again
            return 1, "past the drafter's position limit"
        width, reason = self.block_size, ""
        if remaining < width:
            width, reason = max(1, remaining), "end of the token budget"
        width, limited = self._within_target(width)
        return width, limited or reason

    def _within_target(self, width: int) -> tuple[int, str]:
        """As much of a width as one pass of the target may span here, and why it is less."""
        anchor, reason = self._num_context + self._offset, ""
        for boundary, is_hard in self._limits:
            if anchor < boundary < anchor + width:
                width, reason = boundary - anchor, "the target's position limit"
            elif anchor >= boundary and is_hard:
                return 1, "past the target's position limit"
        return width, reason

    @property
    def _room_of_drafter(self) -> int | None:
        """Positions from the anchor to the drafter's limit."""
        limit = getattr(self.drafter.config, "max_position_embeddings", None)
        return None if limit is None else limit - self._num_context

    @torch.no_grad()
    def draft_block(self, anchor_ids: torch.LongTensor) -> DraftBlock:
        """
        Draft one whole block after the anchor, from all context observed so far. A drafter that has a method
        `draft_block(anchor_ids, context, *, position, block_size)` of its own drafts by that.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(1, 1)`): The last committed token.

        Returns:
            [`DraftBlock`] with `block_size - 1` tokens; in flight they may be copied ones.
        """
        if self.source == "lookup":
            copied = anchor_ids.new_tensor([self._copied[: self.block_size - 1]])
            return DraftBlock(copied, None, torch.ones(copied.shape))
        if hasattr(self.drafter, "draft_block"):
            context, self._pending = self._joined_context(), []
            return self.drafter.draft_block(anchor_ids, context, position=self._num_context, block_size=self.block_size)
        width = self.block_size
        outputs = self._pass_drafter(self._noise_embeds(anchor_ids, width))
        # Two dimensions: a batch-1 slice keeps the stride of the whole block, and a matmul on it leaves the fast path.
        logits = self._logits(outputs.last_hidden_state[:, 1:].flatten(0, 1))
        return propose(logits.view(anchor_ids.shape[0], width - 1, -1), self._sampling)

    @torch.no_grad()
    def _pass_drafter(self, noise_embeds: torch.Tensor) -> Any:
        """A block `(1, width, hidden_size)` through the drafter, which takes in the context that waits for it."""
        context, self._pending = self._joined_context(), []
        width, num_new = noise_embeds.shape[1], context.shape[1]
        position_ids = torch.arange(self._num_cached, self._num_cached + num_new + width, device=self._device)
        self._cache.set_previous_accepted_tokens(num_new)
        outputs = self.drafter(
            noise_embeds=noise_embeds,
            context_hidden_states=context,
            position_ids=position_ids.unsqueeze(0),
            attention_mask=None,
            cache=self._cache,
        )
        # The block's own keys and values go; the context's stay for the next block.
        self._cache.crop(-width)
        self._num_cached += num_new
        return outputs

    def _joined_context(self) -> torch.Tensor:
        return torch.cat(self._pending, dim=1) if len(self._pending) != 1 else self._pending[0]

    def _noise_embeds(self, anchor_ids: torch.LongTensor, width: int) -> torch.Tensor:
        mask_ids = anchor_ids.new_full((anchor_ids.shape[0], width - 1), self.drafter.config.mask_token_id)
        embeds = raw_embedding(self.target.get_input_embeddings(), torch.cat([anchor_ids, mask_ids], dim=-1))
        return embeds.to(self._device, self._dtype) * getattr(self.drafter.config, "input_embedding_scale", 1.0)

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits `(positions, vocab)` of drafted tokens over the ids that drafter and target share."""
        head = self.target.get_output_embeddings()
        parameter = next(head.parameters(), None)  # none in a dynamically quantized head
        device = parameter.device if parameter is not None and not parameter.is_meta else self.target.device
        hidden_states = hidden_states.to(device, self._head_dtype)
        transform = getattr(self.drafter, "draft_logits", None)
        logits = head(hidden_states) if transform is None else transform(hidden_states, head)
        shared = min(getattr(self.drafter.config, "vocab_size", None) or logits.shape[-1], vocab_rows(self.target))
        return logits[:, :shared]

    def _warn_if_above_training(self) -> None:
        trained = self.drafter.config.block_size
        if self.block_size is not None and self.block_size > trained:
            logger.warning_once(
                f"Block size {self.block_size} is above the {trained} that the drafter was trained for: the additional "
                "positions are seldom accepted."
            )

    @property
    def _no_anchor(self) -> torch.Tensor:
        """Stands where a pass is made for its context alone."""
        return torch.tensor([[self.drafter.config.mask_token_id]], device=self._device)

    @property
    def _device(self) -> torch.device:
        return self.drafter.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.drafter.dtype

    # transformers' own interface, called by stock assisted decoding

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, None]:
        """The sequence with drafted tokens appended; the prefill's round drafts nothing. See `CandidateGenerator`."""
        if is_first_iteration:
            return input_ids, None
        if self._num_context == 0:
            self.choose(model_outputs.logits[:, -1], model_outputs.hidden_states, input_ids.shape[1] - 1)
            mask = (model_kwargs or {}).get("attention_mask")
            prompt_length = input_ids.shape[1] - 1
            self.observe(model_outputs.hidden_states, prompt_length if mask is None else mask[0, :prompt_length].bool())
        else:
            self.observe(model_outputs.hidden_states, int(n_last_matches) + 1)
        width, reason = self.plan(self.generation_config.max_length - input_ids.shape[1], input_ids)
        self._last_step = width, width > 1
        if width == 1:
            return input_ids, None
        draft = self.draft_block(input_ids[:, -1:])
        width, _ = self.trim(draft, width, reason)
        self._last_step = width, True
        return torch.cat([input_ids, draft.token_ids[:, : width - 1].to(input_ids.device)], dim=-1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """In flight, how the step went is evidence for the next one."""
        width, was_drafted = self._last_step
        self.learn(width, int(num_matches), was_drafted=was_drafted)


def sizes_up_to(largest: int) -> list[int]:
    """Few sizes, each about half of the next: a draft may be verified in part."""
    sizes = [largest]
    while sizes[0] > 2:
        sizes.insert(0, max(2, sizes[0] // 2))
    return sizes


def _draft_sampling(config: GenerationConfig) -> DraftSampling | None:
    if not config.do_sample:
        return None
    return DraftSampling(
        temperature=1.0 if config.temperature is None else float(config.temperature),
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
    )


def raw_embedding(embedding: nn.Module, ids: torch.LongTensor) -> torch.Tensor:
    """Rows of the embedding table. Subclasses that scale or normalise them do so for the target, not for a drafter."""
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.is_meta:
        return embedding(ids)
    ids = ids.to(weight.device)
    is_subclass = isinstance(embedding, nn.Embedding) and type(embedding).forward is not nn.Embedding.forward
    return F.embedding(ids, weight) if is_subclass and weight.is_floating_point() else embedding(ids)


def position_limits(target: Any) -> list[tuple[int, bool]]:
    """
    Positions that one verifying pass must not span, with whether the target decodes token by token beyond them.

    Plain decoding may end before it reaches such a position, a wide pass may not look past it. Long-rope targets change
    their rotary frequencies at the length they were first trained on, for the whole pass.
    """
    config = target.config.get_text_config(decoder=True)
    limits = []
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # some have settings for each type of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limits.append((rope["original_max_position_embeddings"], False))
    if getattr(config, "max_position_embeddings", None):
        limits.append((config.max_position_embeddings, True))
    return limits

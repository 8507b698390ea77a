"""The bridge between `model.generate` and the decode loop. All call forms end in `BlockPilot.__call__`:

- `model.generate(**inputs, assistant_model=drafter, custom_generate=folder_or_repo, trust_remote_code=True)` runs the
  function `generate` below,
- `model.generate(**inputs, custom_generate=pilot)` calls the pilot like one of transformers' own decoding methods,
- `pilot.generate(model, **inputs, streamer=..., stop_strings=..., tokenizer=...)` binds what does not reach a callable.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

from .batching import RowInputs, collect, split_rows
from .candidate_generator import BlockPilotCandidateGenerator
from .checks import check_adapt, check_block_size, check_call, check_drafter, check_lookup, unwrapped
from .costs import CostTable
from .decoding import Decoding, reset_user_cache
from .loading import load_drafter, load_embedded_drafter, load_policy, policy_of_drafter
from .packing import pack_linear_weights
from .trace import DecodeTrace, StepRecord

# Meant for finding the recipe, but transformers also hands them to the function it found: how to get at a repository,
# which holds for a policy too, and which one.
_ACCESS_KEYWORDS = ("token", "cache_dir", "local_files_only", "force_download", "proxies")
_PLACE_KEYWORDS = ("revision", "repo_type", "subfolder", "code_revision")


class BlockPilot:
    """
    A drafter with a policy, to be given to `generate` as `custom_generate`. Keeps no state between calls, so one pilot
    serves several threads.

    Args:
        drafter (`PreTrainedModel`): A DFlash drafter.
        policy (`BlockPilotPolicy`, `str` or `False`, *optional*):
            Policy, its folder or Hub id. By default the one that the drafter's config names, else none: flights then
            start from what is common, and with `adapt="prompt"` every prompt uses the drafter's block size. `False`:
            none in any case.
        adapt (`str`, *optional*):
            `"flight"`: each step decides how much to draft, copy and verify, from what was accepted so far and what
            passes cost; never much slower than plain decoding. `"prompt"`: one block size for the whole answer. By
            default in flight, except with a policy that names one size for the whole answer (a choice head, as in the
            paper).
        costs ([`CostTable`] or `str`, *optional*):
            What passes cost, or the file that says so; by default what `blockpilot calibrate` measured for the pair on
            this machine, else a default for the kind of device.
        lookup (`bool`, *optional*):
            In flight, whether a step may copy what followed the same tokens earlier in prompt and answer instead of
            drafting (prompt lookup): free to propose, and right where texts repeat themselves. By default it may.
        draft_sampling (`bool`, *optional*, defaults to `False`):
            When sampling, draw the drafted tokens instead of taking the drafter's argmax. The output is then
            distributed as the target's, but the same seed does not give plain `generate`'s text.
        hub_kwargs (`dict`, *optional*):
            `token`, `cache_dir`, `local_files_only`, `revision`, ... for policies that are named by a string.
    """

    def __init__(
        self,
        drafter: Any,
        policy: Any = None,
        *,
        adapt: str | None = None,
        costs: CostTable | str | os.PathLike | None = None,
        lookup: bool | None = None,
        draft_sampling: bool = False,
        hub_kwargs: dict[str, Any] | None = None,
    ):
        check_drafter(drafter)
        check_adapt(adapt)
        check_lookup(lookup, adapt)
        self.drafter = drafter
        self.adapt = adapt
        self.costs = _resolve_costs(costs)
        self.lookup = lookup
        self.draft_sampling = draft_sampling
        self.hub_kwargs = hub_kwargs or {}
        self.policy = load_policy(policy, **self.hub_kwargs) if isinstance(policy, str | os.PathLike) else policy

    @classmethod
    def from_pretrained(
        cls,
        drafter: Any = None,
        policy: Any = None,
        *,
        adapt: str | None = None,
        costs: CostTable | str | os.PathLike | None = None,
        lookup: bool | None = None,
        draft_sampling: bool = False,
        revision: str | None = None,
        policy_revision: str | None = None,
        subfolder: str = "",
        policy_subfolder: str = "",
        dtype: Any = "auto",
        pack: bool | None = None,
        **kwargs: Any,
    ) -> "BlockPilot":
        """
        Load drafter and policy from folders or the Hub; without arguments, those of the embedded target.

        Args:
            drafter (`str` or `PreTrainedModel`, *optional*): Folder, Hub id or object.
            policy, adapt, costs, lookup, draft_sampling: See [`BlockPilot`].
            revision, subfolder (`str`, *optional*): Of the drafter.
            policy_revision, policy_subfolder (`str`, *optional*): Of the policy.
            dtype (`torch.dtype` or `str`, *optional*, defaults to `"auto"`):
                Of the drafter. `"auto"` is that of its file, for the embedded drafter what suits its device.
            pack (`bool`, *optional*):
                Whether to prepack the drafter ([`pack_linear_weights`]); by default the embedded one, where it pays.
            kwargs: `token`, `cache_dir`, `local_files_only`, `force_download`, `proxies` for both, and everything else
                that `from_pretrained` takes (`device_map`, `attn_implementation`, ...) for the drafter.

        Raises:
            `FileNotFoundError`: without a drafter, if this copy of the package came without the embedded one.
        """
        where = {"revision": revision, "subfolder": subfolder} if revision or subfolder else {}
        if drafter is None:
            drafter = load_embedded_drafter(dtype=dtype, pack=pack, **where, **kwargs)
        elif isinstance(drafter, str | os.PathLike):
            drafter = load_drafter(drafter, dtype=dtype, **where, **kwargs)
        if pack:
            pack_linear_weights(drafter)
        of_policy = {k: v for k, v in kwargs.items() if k in _ACCESS_KEYWORDS}
        of_policy.update({"revision": policy_revision} if policy_revision else {})
        of_policy.update({"subfolder": policy_subfolder} if policy_subfolder else {})
        settings: dict[str, Any] = {"adapt": adapt, "costs": costs, "lookup": lookup, "draft_sampling": draft_sampling}
        return cls(drafter, policy, **settings, hub_kwargs=of_policy)

    def generate(
        self,
        model: Any,
        inputs: torch.Tensor | None = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        stop_strings: str | list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        `model.generate` with this pilot, streaming and stop strings included.

        Args:
            model (`PreTrainedModel`): The target; may be wrapped by PEFT, `torch.compile` or data parallelism.
            inputs (`torch.LongTensor` of shape `(batch_size, length)`, *optional*): The prompt; or `input_ids=`.
            streamer (`BaseStreamer`, *optional*): Gets the prompt, then token after token. One row only.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed for `stop_strings`.
            stop_strings (`str` or `list[str]`, *optional*): As in `generate`.
            kwargs: Everything that `generate` takes, and `policy`, `block_size`, `adapt`, `costs`, `lookup`,
                `on_choice`, `on_step`, `time_steps` for this call.

        Returns:
            What `generate` returns. With `return_dict_in_generate=True` a `GenerateDecoderOnlyOutput` whose field
            `blockpilot` is a [`DecodeTrace`].
        """
        for name in ("assistant_model", "custom_generate"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(
                    f"`{name}` is this pilot's own part here. Leave it out, or call `model.generate` with it."
                )
        if kwargs.pop("synced_gpus", None):
            raise ValueError("`synced_gpus` is not supported: ranks verify different numbers of tokens.")
        model = unwrapped(model)
        kwargs, criteria = _take_stop_strings(model, stop_strings, tokenizer, kwargs)
        if criteria is not None:
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criteria])
        if inputs is not None:
            kwargs["inputs"] = inputs
        # The class's own method: a target whose repository carries this recipe has `model.generate` replaced by it.
        return type(model).generate(model, custom_generate=functools.partial(self, streamer=streamer), **kwargs)

    def __call__(
        self,
        model: Any,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        synced_gpus: bool = False,
        *,
        policy: Any = None,
        block_size: int | None = None,
        adapt: str | None = None,
        costs: CostTable | str | os.PathLike | None = None,
        lookup: bool | None = None,
        on_choice: Callable[[DecodeTrace], None] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        time_steps: bool | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """
        Decode what `generate` prepared; called by it. The keyword-only arguments may be given to `model.generate`.

        Args:
            policy: For this call, as in [`BlockPilot`].
            block_size (`int`, *optional*): Fixes the block size, any integer >= 1; 1 is plain decoding.
            adapt, costs, lookup: For this call, as in [`BlockPilot`]. A fixed block size stays what it is.
            on_choice (`Callable[[DecodeTrace], None]`, *optional*):
                Called once per row when the block size is chosen, before the first verification step. The trace is the
                one that grows with every step from then on.
            on_step (`Callable[[StepRecord], None]`, *optional*): Called after every verification step.
            time_steps (`bool`, *optional*): Seconds of single steps on a GPU, at the price of a synchronisation each.

        Raises:
            `ValueError`: for what cannot be decoded exactly in blocks, before the first pass; only whether a cache can
                be cropped is known after the prefill.
        """
        if block_size is not None:
            check_block_size(block_size)
        check_adapt(adapt, block_size)
        check_lookup(lookup, "prompt" if block_size is not None else adapt)
        check_call(model, generation_config, model_kwargs, input_ids.shape[0])
        if streamer is not None and input_ids.shape[0] > 1:
            raise ValueError(f"A streamer takes one row at a time, got {input_ids.shape[0]} rows.")
        reset_user_cache(input_ids, model_kwargs, generation_config)
        policy = False if block_size is not None else self._resolve_policy(policy)
        # A pilot that adapts in flight may still be called with a fixed size.
        adapt = "prompt" if block_size is not None else adapt or self.adapt
        if lookup is None and adapt != "prompt":
            lookup = self.lookup
        costs = self.costs if costs is None else _resolve_costs(costs)
        if streamer is not None:
            streamer.put(input_ids.cpu())

        decodings = []
        for row in split_rows(input_ids, model_kwargs, logits_processor, stopping_criteria):
            generator = BlockPilotCandidateGenerator(
                self.drafter,
                model,
                generation_config,
                policy=policy or None,
                block_size=block_size,
                adapt=adapt,
                costs=costs,
                lookup=lookup,
                draft_sampling=self.draft_sampling,
            )
            decodings.append(
                _decode_row(model, row, generator, generation_config, streamer, on_choice, on_step, time_steps)
            )
        if streamer is not None:
            streamer.end()
        for decoding in decodings:
            decoding.warn_if_useless()
        return collect(decodings, generation_config)

    def _resolve_policy(self, policy: Any) -> Any:
        """The policy of a call: given with it, given to the pilot, named by the drafter; `None` or `False` for none."""
        if isinstance(policy, str | os.PathLike):
            return load_policy(policy, **self.hub_kwargs)
        if policy is None:
            policy = self.policy
        return policy_of_drafter(self.drafter, **self.hub_kwargs) if policy is None else policy


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """
    The recipe behind `custom_generate="<folder or repo>"`: binds drafter and policy to a pilot and generates with it.

    A target whose own folder holds the recipe has `model.generate` replaced by this function. There a call without a
    drafter, or with another `custom_generate`, is the class's own `generate`.

    Args:
        args: As `generate` takes them; the prompt may come first.
        model (`PreTrainedModel`): The target.
        kwargs: `assistant_model` (the drafter), `policy` and `draft_sampling` as in [`BlockPilot`], and everything that
            [`BlockPilot.generate`] takes, `adapt`, `costs` and `lookup` included.

    Raises:
        `ValueError`: if no drafter is given.
    """
    if kwargs.get("custom_generate") is not None or "assistant_model" not in kwargs:
        return type(model).generate(model, *args, **kwargs)
    hub_kwargs = {key: kwargs.pop(key) for key in _ACCESS_KEYWORDS if key in kwargs}
    for key in _PLACE_KEYWORDS:
        kwargs.pop(key, None)
    drafter = kwargs.pop("assistant_model")
    if drafter is None:
        raise ValueError(
            "`assistant_model` is missing. Pass a DFlash drafter: `generate(assistant_model=drafter, ...)`."
        )
    policy, draft_sampling = kwargs.pop("policy", None), kwargs.pop("draft_sampling", False)
    pilot = BlockPilot(drafter, policy, draft_sampling=draft_sampling, hub_kwargs=hub_kwargs)
    return pilot.generate(model, *args, **kwargs)


def _resolve_costs(costs: Any) -> CostTable | None:
    if costs is None or isinstance(costs, CostTable) or hasattr(costs, "verify_at"):
        return costs
    if isinstance(costs, str | os.PathLike):
        return CostTable.load(costs)
    raise TypeError(
        f"`costs` must be a `CostTable` or the file of one, as `blockpilot calibrate --output` writes it, got "
        f"{type(costs).__name__}."
    )


def _decode_row(
    model: Any,
    row: RowInputs,
    generator: BlockPilotCandidateGenerator,
    generation_config: GenerationConfig,
    streamer: Any,
    on_choice: Callable[[DecodeTrace], None] | None,
    on_step: Callable[[StepRecord], None] | None,
    time_steps: bool | None,
) -> Decoding:
    """Run the loop to its end, handing tokens and records on as they come."""
    decoding = Decoding(
        model,
        row.input_ids,
        generator,
        logits_processor=row.logits_processor,
        stopping_criteria=row.stopping_criteria,
        generation_config=generation_config,
        model_kwargs=row.model_kwargs,
        row=row.index,
        time_steps=time_steps,
    )
    try:
        first = decoding.prefill()
        if on_choice is not None:
            on_choice(decoding.trace)
        if streamer is not None:
            streamer.put(first[0].cpu())
        for record in decoding.steps():
            if streamer is not None:
                # One token at a time, as in plain decoding: a streamer may count them or look at the last one.
                for token_id in record.committed_ids:
                    streamer.put(torch.tensor([token_id]))
            if on_step is not None:
                on_step(record)
    finally:
        # The cache may outlive the call: the next prefill must not keep every state of its sliding layers.
        for layer in getattr(row.model_kwargs.get("cache"), "layers", ()):
            if hasattr(layer, "record_past"):
                layer.record_past = False
    return decoding


def _take_stop_strings(
    model: Any, stop_strings: Any, tokenizer: Any, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], StopStringCriteria | None]:
    """`generate` cannot build this criterion for a callable, which gets no tokenizer: built here, and unset there."""
    config = kwargs.get("generation_config")
    if stop_strings is None and config is not None and config.stop_strings is not None:
        stop_strings = config.stop_strings
    if stop_strings is None:
        stop_strings = model.generation_config.stop_strings
    if stop_strings is None:
        return kwargs, None
    if tokenizer is None:
        raise ValueError("`stop_strings` needs the tokenizer of the target. Pass `tokenizer=`.")
    # The keyword goes before every config, also where it says `None`.
    return {**kwargs, "stop_strings": None}, StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)

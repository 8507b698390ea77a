"""`blockpilot train-drafter`: from texts that a target wrote to a drafter for it, and what that is worth."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .cli_common import Dtype, Target, load_target
from .drafter_recipe import DrafterTrainingConfig, default_gamma
from .drafter_run import DrafterRun, only_run_in
from .drafter_start import DEFAULT_BLOCK_SIZE, DEFAULT_NUM_LAYERS, drafter_from_target
from .drafter_training import CHECKPOINT_EVERY, VALIDATE_EVERY, DrafterTrainer
from .embedded import EMBEDDED_MASK_TOKEN_ID, EMBEDDED_TARGET_LAYER_IDS
from .loading import load_drafter
from .modeling_dflash import DFlashDraftModel
from .texts import first_of_each_category, read_texts, split_by_prompt, spread

# While training goes on; the result is judged on all that are held out.
_QUICK_PER_CATEGORY = 10
_Recipe = DrafterTrainingConfig


def train_drafter(
    texts: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="Texts that the target wrote: .jsonl or .jsonl.gz with `prompt_ids`, `answer_ids` and optionally "
            "`category` per line.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            file_okay=False, help="Folder for drafter, record and checkpoints. The same command goes on there."
        ),
    ],
    target: Target = None,
    dtype: Dtype = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(min=2, help="Positions of a block, the anchor included.", show_default=str(DEFAULT_BLOCK_SIZE)),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the drafter.", show_default=str(DEFAULT_NUM_LAYERS))
    ] = None,
    target_layers: Annotated[
        str | None,
        typer.Option(
            help="Layers of the target that the drafter reads, zero-based, comma-separated.",
            show_default="five, spread over the target",
        ),
    ] = None,
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Token that stands at the positions to be drafted, one that texts do not contain. "
            "Needed with --target.",
            show_default=f"{EMBEDDED_MASK_TOKEN_ID} for the embedded target",
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="Drafter to start from: folder or Hub id. It brings layers, target layers and mask token.",
            show_default="the target's last layers",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps. May be changed to go on.")] = _Recipe.steps,
    sequences_per_step: Annotated[int, typer.Option(min=1, help="Texts per step.")] = _Recipe.sequences_per_step,
    anchors: Annotated[int, typer.Option(min=1, help="Anchors per text.")] = _Recipe.anchors_per_sequence,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, at its highest.")] = _Recipe.learning_rate,
    gamma: Annotated[
        float | None,
        typer.Option(
            help="Position k of a block weighs exp(-(k - 1) / gamma).", show_default="4, 5, 7 for blocks of 8, 10, 16"
        ),
    ] = None,
    distillation: Annotated[
        float, typer.Option(help="Share of the loss taken against the target's whole distribution.")
    ] = _Recipe.distillation,
    seed: Annotated[int, typer.Option(help="Of start, order and anchors.")] = _Recipe.seed,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Train on that many texts, a like share of every category.")
    ] = None,
    validation_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts of each category that are held out, at most a fifth.")
    ] = 20,
    validate_every: Annotated[int, typer.Option(min=1, help="Steps from one validation to the next.")] = VALIDATE_EVERY,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps from one checkpoint to the next.")
    ] = CHECKPOINT_EVERY,
    states: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder where the target's states are kept.", show_default="'states' in the output"
        ),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute the target's states at every visit instead of keeping them.")
    ] = False,
) -> None:
    """Train a drafter on TEXTS. Stopped or killed, the same command goes on and ends with the same weights."""
    if recompute and states is not None:
        raise ValueError("`--states` keeps the target's states, `--recompute` does not. Give one of the two.")
    with only_run_in(output):
        start = None
        if init is not None:
            _refuse_with_init({"--layers": layers, "--target-layers": target_layers, "--mask-token-id": mask_token_id})
            start = _drafter_to_go_on_with(init, block_size)
        elif mask_token_id is None:
            mask_token_id = _default_mask_token_id(target)
        size = start.config.block_size if start is not None else block_size or DEFAULT_BLOCK_SIZE
        config = DrafterTrainingConfig(
            steps=steps,
            sequences_per_step=sequences_per_step,
            anchors_per_sequence=anchors,
            learning_rate=learning_rate,
            gamma=default_gamma(size) if gamma is None else gamma,
            distillation=distillation,
            seed=seed,
        )
        taps = _layer_ids(target_layers)
        if taps is None and target is None:
            taps = EMBEDDED_TARGET_LAYER_IDS
        known, held_out = split_by_prompt(read_texts(texts), validation_prompts)
        known = known if limit is None else spread(known, limit)
        # Not packed: kept states would be those of another way to compute them.
        model, _ = load_target(target, dtype, pack=False)
        model.requires_grad_(False)
        if start is None:
            assert mask_token_id is not None  # given, or the embedded target's
            start = drafter_from_target(
                model,
                num_layers=layers or DEFAULT_NUM_LAYERS,
                block_size=size,
                mask_token_id=mask_token_id,
                target_layer_ids=taps,
                seed=seed,
            )
        trainer = DrafterTrainer(
            model,
            start.to(model.device),
            known,
            first_of_each_category(held_out, _QUICK_PER_CATEGORY),
            config,
            output,
            None if recompute else states or output / "states",
        )
        run = DrafterRun(
            trainer,
            held_out,
            texts_file=texts,
            command=["blockpilot", *sys.argv[1:]],
            console=Console(highlight=False, markup=False, emoji=False),
        )
        try:
            status = run(validate_every=validate_every, checkpoint_every=checkpoint_every)
        except FloatingPointError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    raise typer.Exit(status)


def _refuse_with_init(options: dict[str, Any]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            f"`--init` brings a drafter with its own sizes, so {', '.join(given)} cannot be given with it."
        )


def _drafter_to_go_on_with(init: str, block_size: int | None) -> Any:
    """In float32, as training needs it, and without what was true of the weights that it had before."""
    drafter = load_drafter(init).float()
    if not isinstance(drafter, DFlashDraftModel):
        raise ValueError(f"`--init {init}` is a {type(drafter).__name__}. Only DFlash drafters can be trained further.")
    config = drafter.config
    config.block_size = block_size or config.block_size
    drafter.set_shortlist(None)  # training looks for a better one
    config.policy = config.policy_revision = config.target_fingerprint = None
    return drafter


def _default_mask_token_id(target: str | None) -> int:
    if target is not None:
        raise ValueError(
            f"`--target {target}` needs `--mask-token-id`: the id of a token that texts do not contain, a reserved or "
            "unused one, to stand at the positions to be drafted."
        )
    return EMBEDDED_MASK_TOKEN_ID


def _layer_ids(option: str | None) -> list[int] | None:
    if option is None:
        return None
    parts = [part.strip() for part in option.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"`--target-layers` takes layer numbers separated by commas, such as 1,8,15, got {option!r}.")
    return [int(part) for part in parts]


__all__ = ["train_drafter"]

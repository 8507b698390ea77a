"""`blockpilot train-drafter`: from texts that a target wrote to a drafter for it, and what that is worth."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .cli_common import Dtype, Target, load_target
from .drafter_recipe import DrafterTrainingConfig, default_gamma
from .drafter_record import TrainingPrompts, hold_out, progress_of, quick_part, read_training_prompts, source_record
from .drafter_run import DrafterRun, only_run_in
from .drafter_start import DEFAULT_BLOCK_SIZE, DEFAULT_NUM_LAYERS, drafter_from_target
from .drafter_training import CHECKPOINT_EVERY, VALIDATE_EVERY, DrafterTrainer
from .embedded import EMBEDDED_MASK_TOKEN_ID, EMBEDDED_TARGET_LAYER_IDS
from .loading import load_drafter
from .modeling_dflash import DFlashDraftModel
from .processes import Processes
from .target_states import weights_fingerprint
from .texts import read_texts, spread
from .training_plot import check_plot

# While training goes on; the result is judged on all that are held out.
_QUICK_PER_CATEGORY = 10
_VALIDATION_PROMPTS = 20
_Recipe = DrafterTrainingConfig


def train_drafter(
    texts: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help="Texts that the target wrote: folders that `blockpilot prepare` made, .jsonl or .jsonl.gz with "
            "`prompt_ids`, `answer_ids` and optionally `category` per line. Several may be given.",
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
    mixed_block_sizes: Annotated[
        str | None,
        typer.Option(
            help="Block sizes of which one is drawn for every visit of a text, such as 4,8,16. The drafter's own, "
            "--block-size, is one of them, the largest by default.",
            show_default="always --block-size",
        ),
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
    accumulation: Annotated[
        int, typer.Option(min=1, help="How many times that many texts make a step.")
    ] = _Recipe.accumulation,
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
    mixed_precision: Annotated[
        str, typer.Option(metavar="no|bf16", help="bf16: the drafter's passes in bfloat16, weights in float32.")
    ] = _Recipe.mixed_precision,
    min_token_count: Annotated[
        int,
        typer.Option(
            min=1, help="The drafter learns and proposes only tokens that occur so often in the texts' answers."
        ),
    ] = _Recipe.min_token_count,
    seed: Annotated[int, typer.Option(help="Of start, order and anchors.")] = _Recipe.seed,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Train on that many texts, a like share of every category.")
    ] = None,
    validation_prompts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts of each category that are held out, at most a fifth.",
            show_default=str(_VALIDATION_PROMPTS),
        ),
    ] = None,
    validation_texts: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="Texts of other prompts to judge the drafter on.", show_default="prompts held out"
        ),
    ] = None,
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
    plot: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            metavar="FILE.png",
            help="Draw loss, tau, learning rate and pace at every validation and at the end. With a finished run's "
            "command only this is done. Missing folders are made in --output.",
        ),
    ] = None,
) -> None:
    """Train a drafter on TEXTS. Stopped or killed, the same command goes on and ends with the same weights."""
    if recompute and states is not None:
        raise ValueError("`--states` keeps the target's states, `--recompute` does not. Give one of the two.")
    if validation_texts is not None and validation_prompts is not None:
        raise ValueError("`--validation-texts` takes the place of `--validation-prompts`. Give one of the two.")
    if plot is not None:
        check_plot(plot, output)
    with Processes.current() as processes, only_run_in(output) if processes.is_main else contextlib.nullcontext():
        processes.wait()  # the others would read what this folder's run writes, if the main one may not train there
        console = Console(highlight=False, markup=False, emoji=False, quiet=not processes.is_main)
        start, earlier, progress = None, TrainingPrompts(), []
        made_of: dict[str, Any] = {}
        if init is not None:
            _refuse_with_init({"--layers": layers, "--target-layers": target_layers, "--mask-token-id": mask_token_id})
            start = _drafter_to_go_on_with(init, block_size)
            made_of["init"] = {"name": Path(init).name, "fingerprint": weights_fingerprint(start)}
            progress = progress_of(init)
            earlier = read_training_prompts(init) or TrainingPrompts(is_complete=False)
            if not earlier.is_complete:
                console.print(
                    f"note: {init} does not say on which prompts it was trained, so neither will the new drafter: "
                    "whether held-out prompts were among them cannot be checked",
                    soft_wrap=not console.is_terminal,
                )
        elif mask_token_id is None:
            mask_token_id = _default_mask_token_id(target)
        sizes = _numbers("--mixed-block-sizes", "block sizes", "4,8,16", mixed_block_sizes)
        mixed = None if sizes is None else tuple(sorted(set(sizes)))
        size = start.config.block_size if start is not None else block_size or max(mixed or (DEFAULT_BLOCK_SIZE,))
        config = DrafterTrainingConfig(
            steps=steps,
            sequences_per_step=sequences_per_step,
            accumulation=accumulation,
            anchors_per_sequence=anchors,
            learning_rate=learning_rate,
            gamma=default_gamma(size) if gamma is None and mixed is None else gamma,
            block_sizes=mixed,
            distillation=distillation,
            mixed_precision=mixed_precision,
            min_token_count=min_token_count,
            seed=seed,
        )
        if mixed is not None and size not in mixed:
            raise ValueError(
                f"The drafter's block size {size} is not among `--mixed-block-sizes` {','.join(map(str, mixed))}. Add "
                "it there, or name one of them with `--block-size`."
            )
        taps = _numbers("--target-layers", "layer numbers", "1,8,15", target_layers)
        if taps is None and target is None:
            taps = EMBEDDED_TARGET_LAYER_IDS
        read = [read_texts(path) for path in texts]
        made_of["texts"] = [source_record(*pair) for pair in zip(texts, read, strict=True)]
        validation = None if validation_texts is None else read_texts(validation_texts)
        if validation_texts is not None and validation is not None:
            made_of["validation_texts"] = source_record(validation_texts, validation)
        known, held_out = hold_out(
            [text for part in read for text in part],
            _VALIDATION_PROMPTS if validation_prompts is None else validation_prompts,
            validation=validation,
            earlier=earlier.hashes,
        )
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
            quick_part(held_out, _QUICK_PER_CATEGORY),
            config,
            output,
            None if recompute else states or output / "states",
            processes=processes,
        )
        run = DrafterRun(
            trainer,
            held_out,
            made_of=made_of,
            earlier_prompts=earlier,
            earlier_progress=progress,
            command=["blockpilot", *sys.argv[1:]],
            console=console,
            plot=plot,
        )
        try:
            status = run(validate_every=validate_every, checkpoint_every=checkpoint_every)
        except FloatingPointError as error:
            if processes.is_main:
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


def _numbers(option: str, what: str, example: str, value: str | None) -> list[int] | None:
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"`{option}` takes {what} separated by commas, such as {example}, got {value!r}.")
    return [int(part) for part in parts]


__all__ = ["train_drafter"]

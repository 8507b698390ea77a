"""Models that load whole or not at all. Knows nothing of what the weights mean."""

from .sharing import SharedModel


class ExactPreTrainedModel(SharedModel):
    """
    A `PreTrainedModel` whose checkpoint must hold exactly its own tensors. A missing one would be random and an
    additional one ignored, and a model that only proposes or advises would go on answering: nothing would notice.
    """

    # What to look at when the tensors do not fit; ends the error message.
    _loading_hint = ""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """
        As [`~transformers.PreTrainedModel.from_pretrained`], from safetensors only.

        Raises:
            `ValueError`: If the checkpoint lacks a tensor, has one too many, or has one of another shape.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        # Mismatches are let through here to be reported below with the others.
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True, use_safetensors=True)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        found = {
            "missing": sorted(info["missing_keys"]),
            "not expected": sorted(info["unexpected_keys"]),
            "of another shape": sorted(
                f"{name} {tuple(saved)} instead of {tuple(wanted)}" for name, saved, wanted in info["mismatched_keys"]
            ),
        }
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)
        if listed:
            raise ValueError(
                f"The weights of {str(pretrained_model_name_or_path)!r} do not fit its config: {listed}. "
                f"{cls._loading_hint}"
            )
        for parameter in model.parameters():
            if parameter.device.type == "cpu":
                # Loaded weights lie in the mapped file at any offset, and CPU kernels sum in another order when memory
                # is not aligned: without the copy the same weights would compute other numbers after saving.
                parameter.data = parameter.data.clone()
        return (model, info) if wants_info else model


__all__ = ["ExactPreTrainedModel"]

"""Adaptive block-diffusion speculative decoding for `model.generate`."""

from transformers import AutoConfig, AutoModel

from .candidate_generator import BlockPilotCandidateGenerator
from .configuration_blockpilot import BlockPilotConfig
from .configuration_dflash import DFlashConfig
from .generate import BlockPilot
from .hub import custom_generate_dir
from .modeling_blockpilot import BlockPilotPolicy
from .modeling_dflash import DFlashDraftModel
from .trace import DecodeTrace, StepRecord

__version__ = "0.1.0"

# Registered classes go before the code in a folder or repository, with `trust_remote_code=True` too: transformers runs
# that for types which it does not know or has itself.
for _config, _model in ((DFlashConfig, DFlashDraftModel), (BlockPilotConfig, BlockPilotPolicy)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)

__all__ = [
    "BlockPilot",
    "BlockPilotCandidateGenerator",
    "BlockPilotConfig",
    "BlockPilotPolicy",
    "DFlashConfig",
    "DFlashDraftModel",
    "DecodeTrace",
    "StepRecord",
    "custom_generate_dir",
]

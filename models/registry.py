"""Which class runs which architecture name; `models.config` refuses every other name."""

from models.dflash import DFlashDrafter
from models.target import Target

TARGETS: dict[str, type[Target]] = {
    "LlamaForCausalLM": Target,
    "Qwen3ForCausalLM": Target,
}
DRAFTERS: dict[str, type[DFlashDrafter]] = {
    "DFlashDraftModel": DFlashDrafter,
}

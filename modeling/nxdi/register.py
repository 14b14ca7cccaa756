"""Makes NxDI's own tools find the model by the name that they look up."""

from __future__ import annotations

from neuronx_distributed_inference.utils.constants import MODEL_TYPES

from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM

# An architecture's name up to "For", in small letters: Qwen3NextForCausalLM, Qwen3_5For..., Qwen3_5MoeFor...
NAMES = ("qwen3next", "qwen3_5", "qwen3_5moe")


def register() -> None:
    """Enters the model into NxDI's `MODEL_TYPES`; calling it again changes nothing."""
    for name in NAMES:
        MODEL_TYPES[name] = {"causal-lm": NeuronHybridForCausalLM}

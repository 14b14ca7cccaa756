"""What all suspected mistakes have in common, and the names of their causes."""

from __future__ import annotations

from nxdi_qwen.parity.plain_layer import PlainLayer

PADDING, CONV_TAIL, DECAY, HEADS = "padding", "conv tail", "decay", "head mapping"
GATE_SPLIT, NORM, ROPE = "gate split", "norm", "rope"
CHUNK_CARRY, RESET, CACHE, CAUSAL = "chunk carry", "state reset", "KV cache", "causal mask"
MIXING, WEIGHTS, PRECISION, IDLE = "expert mixing", "weight layout", "state precision", "idle row"


class Mistake(PlainLayer):
    """A plain layer with one method as the mistake has it. `cause`: as reports name it; `what`: the evidence."""

    cause: str
    what: str

    @classmethod
    def possible(cls, layer: PlainLayer) -> bool:
        """Whether the mistake can be made in such a layer."""
        raise NotImplementedError

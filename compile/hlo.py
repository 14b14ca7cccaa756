"""The HLO target: every graph of an NxDI application as the module that neuronx-cc would be given."""

from __future__ import annotations

from nxdi_qwen.compile.lowering import LoweredGraph, lower, named_tensors
from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM
from nxdi_qwen.modeling.nxdi.tracing import as_rank, traced_modules

GraphName = tuple[str, int]
"""Tag of the submodel, and bucket."""


def lower_application(application: NeuronHybridForCausalLM, rank: int = 0) -> dict[GraphName, LoweredGraph]:
    """One rank's graphs. Their weights are uninitialised; `LoweredGraph.run` takes the ones to use."""
    with as_rank(application.neuron_config.tp_degree, rank):
        return {
            (traced.tag, traced.bucket): lower(
                traced.module, traced.inputs, named_tensors(traced.module), traced.aliases
            )
            for traced in traced_modules(application)
        }

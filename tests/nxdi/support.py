"""NxDI applications of the fixtures, in NxDI's CPU mode or lowered and run on XLA's CPU backend."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed

# The first import puts stand-ins in the place of the Neuron SDK, which all others need.
from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig, HybridNeuronConfig  # isort: skip
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed_inference.models import application_base

from nxdi_qwen.compile.hlo import lower_application
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM


def application(checkpoint: Path, **options: Any) -> NeuronHybridForCausalLM:
    """An application that is not loaded; `options` are those of HybridNeuronConfig."""
    neuron_config = HybridNeuronConfig(**{"torch_dtype": torch.float32} | options)
    config = HybridInferenceConfig.for_model(ModelSource.from_checkpoint(checkpoint).config, neuron_config)
    return NeuronHybridForCausalLM(str(checkpoint), config)


def cpu_application(checkpoint: Path, **options: Any) -> NeuronHybridForCausalLM:
    """An application in NxDI's CPU mode: no buckets, so prompts may be as long as the cache.

    The first one of a process makes NxD's groups, or `single_rank` has; all others share them.
    """
    options.setdefault("max_context_length", options["seq_len"])
    app = application(checkpoint, **{"on_cpu": True} | options)
    with contextlib.ExitStack() as stack:
        if parallel_state.model_parallel_is_initialized():
            stack.enter_context(patch.object(application_base, "initialize_model_parallel"))
        app.to_cpu()
    return app


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    """Inside, this process is the only rank of NxD's groups: applications in CPU mode are made and called there.

    Outside nothing is left of it, so that graphs can be lowered: `to_cpu` would set NXD_CPU_MODE for good.
    """
    with patch.dict(os.environ, NXD_CPU_MODE="1"), patch.dict(vars(parallel_state), _single_rank_groups()):
        yield


@functools.cache
def _single_rank_groups() -> dict[str, Any]:
    """The variables of `parallel_state`. Made once: gloo has threads for every group, which never end and never sleep.

    NxDI would make the process group on a fixed port, which only one process of a machine can have.
    """
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with patch.dict(os.environ, NXD_CPU_MODE="1"), patch.dict(vars(parallel_state)):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, skip_collective_init=True)
        return {name: value for name, value in vars(parallel_state).items() if name.isupper()}


class LoweredApplication:
    """All graphs of an application at degree 1, sharing one set of weights and states by name."""

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        self.application = application(checkpoint, **{"enable_bucketing": True} | options)
        self.graphs = lower_application(self.application)
        weights = self.application.checkpoint_loader_fn()
        self.values: dict[str, Tensor] = {}
        for graph in self.graphs.values():
            self.values |= {name: weights.get(name, value) for name, value in graph.values.items()}
        self.state_names = list(next(iter(self.graphs.values())).aliases)

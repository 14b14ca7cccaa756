"""The traced modules of an application, one a submodel and bucket, as NxD's model builder takes them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.trace.mock_torchdist import mock_distributed
from torch import Tensor, nn

from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM


class TracedModule(NamedTuple):
    """One graph to be: `aliases` maps state parameters of `module` to the outputs that replace them."""

    tag: str
    bucket: int
    module: nn.Module
    inputs: tuple[Tensor, ...]
    aliases: Mapping[Tensor | str, int]


@contextmanager
def _made_on(device: torch.device) -> Iterator[None]:
    """Inside, modules make their parameters on `device`, NxD's experts too, whose own default is the CPU."""
    init = functools.partialmethod(ExpertMLPsV2.__init__, device=device)
    with device, mock.patch.object(ExpertMLPsV2, "__init__", init):
        yield


@contextmanager
def as_rank(degree: int, rank: int = 0) -> Iterator[None]:
    """Inside, NxD takes this process for one rank of `degree`; it has no others to talk to."""
    with mock_distributed(world_size=degree):
        torch.distributed.init_process_group("xla", rank=rank, world_size=degree)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=degree, skip_collective_init=True)
        parallel_state.set_aot_mode(True)
        try:
            yield
        finally:
            parallel_state.set_aot_mode(False)
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def traced_modules(application: NeuronHybridForCausalLM, device: str = "cpu") -> Iterator[TracedModule]:
    """Every submodel at every bucket, inside `as_rank`; buckets of a submodel share one module, one after the other.

    On the device "meta" the modules have shapes, and no memory for their parameters.
    """
    for wrapper in application.models:
        instance = wrapper.get_model_instance()
        with _made_on(torch.device(device)):
            instance.load_module()
        for number, inputs in enumerate(wrapper.input_generator()):
            module, aliases = instance.get(number)
            yield TracedModule(wrapper.tag, wrapper.neuron_config.buckets[number], module, inputs, aliases)

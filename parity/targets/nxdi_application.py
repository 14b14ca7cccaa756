"""NxDI applications of a checkpoint, in NxDI's CPU mode or as lowered graphs. NxDI is imported where one is made."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed

from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.errors import InputError

if TYPE_CHECKING:
    from nxdi_qwen.compile.lowering import LoweredGraph
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM

Route = tuple[str, int]
"""A graph: tag and bucket."""


def check_nxdi(kind: str, *more: str) -> None:
    """Raises InputError where NxDI, or one of the modules `more`, cannot be imported."""
    names = ("neuronx_distributed", "neuronx_distributed_inference", *more)
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"{kind} needs NxDI, and {', '.join(missing)} cannot be imported: docs/neuron.md says how to make such an "
            "environment; a reference that needs another one can be kept with --save and given as stored:DIR"
        )


def application(checkpoint: Path, **options: Any) -> NeuronHybridForCausalLM:
    """An application that is not loaded; `options` are those of HybridNeuronConfig."""
    # The first import puts stand-ins in the place of the Neuron SDK, which all others need.
    from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig, HybridNeuronConfig  # isort: skip
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM

    neuron_config = HybridNeuronConfig(**{"torch_dtype": torch.float32} | options)
    config = HybridInferenceConfig.for_model(ModelSource.from_checkpoint(checkpoint).config, neuron_config)
    return NeuronHybridForCausalLM(str(checkpoint), config)


def cpu_application(checkpoint: Path, **options: Any) -> NeuronHybridForCausalLM:
    """An application in NxDI's CPU mode: no buckets, so prompts may be as long as the cache.

    The first one of a process makes NxD's groups, or `single_rank` has; all others share them.
    """
    options.setdefault("max_context_length", options["seq_len"])
    app = application(checkpoint, **{"on_cpu": True} | options)
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed_inference.models import application_base

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
    import nxdi_qwen.modeling.nxdi  # isort: skip  # noqa: F401, stand-ins for a missing SDK, which the next import needs
    from neuronx_distributed.parallel_layers import parallel_state

    with patch.dict(os.environ, NXD_CPU_MODE="1"), patch.dict(vars(parallel_state), _single_rank_groups()):
        yield


@functools.cache
def _single_rank_groups() -> dict[str, Any]:
    """The variables of `parallel_state`. Made once: gloo has threads for every group, which never end and never sleep.

    NxDI would make the process group on a fixed port, which only one process of a machine can have.
    """
    from neuronx_distributed.parallel_layers import parallel_state

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with patch.dict(os.environ, NXD_CPU_MODE="1"), patch.dict(vars(parallel_state)):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, skip_collective_init=True)
        return {name: value for name, value in vars(parallel_state).items() if name.isupper()}


class LoweredApplication:
    """All graphs of an application at degree 1, sharing one set of weights and states by name."""

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        from nxdi_qwen.compile.hlo import lower_application

        self.application = application(checkpoint, **{"enable_bucketing": True} | options)
        self.graphs = lower_application(self.application)
        weights = self.application.checkpoint_loader_fn()
        self.values: dict[str, Tensor] = {}
        for graph in self.graphs.values():
            self.values |= {name: weights.get(name, value) for name, value in graph.values.items()}
        self.state_names = list(next(iter(self.graphs.values())).aliases)


class HostedGraphs:
    """`forward` of an application with its lowered graphs in the place of the compiled model: everything outside the
    graphs is NxDI's own code, as on a device.

    Like NxD's model, it finds the graph of a call by the shapes of the inputs alone. The states start as `fill`;
    nothing may rely on zeros. `graphs` and `values` are this object's own and may be changed, `before` changes the
    inputs of a graph. `calls` lists the graphs that ran, `outputs` is what the last one returned.
    """

    def __init__(self, lowered: LoweredApplication, fill: float = torch.nan) -> None:
        from nxdi_qwen.modeling.nxdi.model import describe

        self.application = lowered.application
        self.graphs: dict[Route, LoweredGraph] = dict(lowered.graphs)
        self.state_names = lowered.state_names
        self.description = describe(self.application.config)
        self.values = dict(lowered.values)
        for name in self.state_names:
            self.values[name] = torch.full_like(self.values[name], fill)
        self.routes: dict[str, Route] = {
            _shapes(inputs): (wrapper.tag, bucket)
            for wrapper in self.application.models
            for bucket, inputs in zip(wrapper.neuron_config.buckets, wrapper.input_generator(), strict=True)
        }
        assert len(self.routes) == len(self.graphs), "NxD's model could not tell two graphs apart"
        self.before: Callable[[list[Tensor]], list[Tensor]] = lambda inputs: inputs
        self.calls: list[Route] = []
        self.outputs: list[Tensor] = []

    def forward(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        slots: Sequence[int],
        lengths: Sequence[int] | None = None,
        **more: Tensor,
    ) -> Tensor:
        """One call for rows of equally many tokens behind `starts`, of which `lengths` (None: all) are valid.

        A slot of -1 is an idle row. `more` goes to the application. Returns logits [B, n, V], or sampled tokens.
        """
        from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

        for wrapper in self.application.models:
            wrapper.model, wrapper.is_neuron = self._run, lambda: True
        ids = torch.tensor(tokens)
        index = torch.arange(ids.shape[1])
        positions = torch.tensor(starts)[:, None] + index
        if lengths is not None:
            valid = index < torch.tensor(lengths)[:, None]
            positions = torch.where(valid, positions, 1)  # as NxDI pads them
            more["attention_mask"] = valid.to(torch.int64)
        output = self.application.forward(
            ids,
            seq_ids=torch.tensor(slots),
            position_ids=positions,
            sampling_params=prepare_sampling_params(len(slots)),  # its default has as many rows as there are slots
            **more,
        )
        result: Tensor = output.tokens if output.logits is None else output.logits
        return result

    def _run(self, *inputs: Tensor) -> Tensor:
        route = self.routes[_shapes(inputs)]
        self.calls.append(route)
        self.outputs = self.graphs[route].run(self.before(list(inputs)), self.values)
        return self.outputs[0]


def _shapes(inputs: Sequence[Tensor]) -> str:
    return str([list(tensor.shape) for tensor in inputs])

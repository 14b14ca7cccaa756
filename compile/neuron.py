"""The Neuron target: an NxDI application for a model, compiled by NxDI where the Neuron SDK is."""

from __future__ import annotations

from pathlib import Path

from nxdi_qwen.compile.artifact import copy_checkpoint_files, written_atomically
from nxdi_qwen.compile.neuron_options import NeuronOptions
from nxdi_qwen.compile.source import DTYPES, ModelSource

# The first import puts stand-ins in the place of a missing SDK, which all others need.
from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig, HybridNeuronConfig  # isort: skip
from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig

from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM

TARGET = "neuron"


def neuron_config(source: ModelSource, options: NeuronOptions) -> HybridNeuronConfig:
    """NxDI's options for what the user chose: continuous batching, a prompt at a time, all requests in one decode."""
    max_length, buckets, decode_buckets, dtype = options.resolve(source)
    slots, largest = options.shared.slots, buckets.lengths[-1]
    length = max(max_length, largest)
    logical_cores = {} if options.logical_cores is None else {"logical_nc_config": options.logical_cores}
    return HybridNeuronConfig(
        torch_dtype=DTYPES[dtype],
        batch_size=slots,
        ctx_batch_size=1,
        is_continuous_batching=True,
        seq_len=length,
        max_context_length=largest,
        enable_bucketing=True,
        context_encoding_buckets=list(buckets.lengths),
        token_generation_buckets=[*decode_buckets[:-1], length],
        continuation_buckets=[largest] if largest < length else None,
        tp_degree=options.shared.degree,
        **logical_cores,
        compiler_flags=options.compiler_flags,
        on_device_sampling_config=OnDeviceSamplingConfig() if options.on_device_sampling else None,
        save_sharded_checkpoint=True,
    )


def application_of(source: ModelSource, options: NeuronOptions) -> NeuronHybridForCausalLM:
    """The application, with nothing compiled or loaded. Raises InputError for options that do not fit the model."""
    config = HybridInferenceConfig.for_model(source.config, neuron_config(source, options))
    return NeuronHybridForCausalLM(str(source.folder or source.name), config)


def compile_neuron(source: ModelSource, out: Path, options: NeuronOptions) -> None:
    """Writes what NxDI writes (`model.pt`, `neuron_config.json`, one weights file a rank), the configuration and
    the tokenizer into the new folder `out`, atomically. `source` is a checkpoint folder.
    """
    application = application_of(source, options)
    with written_atomically(out) as folder:
        application.compile(str(folder))
        copy_checkpoint_files(source, folder)

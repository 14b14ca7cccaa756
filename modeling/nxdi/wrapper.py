"""NxDI's wrapper of a traced submodel, for the inputs of this port's graphs."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed_inference.models.model_wrapper import ModelWrapper
from torch import Tensor
from torch.nn import functional

CONTINUATION_MODEL_TAG = "continuation_model"
# Where NxDI's `NeuronBaseModel.forward` takes the block table; the arguments between it and `adapter_ids` stay empty.
_BLOCK_TABLE = 12
_ADAPTER_IDS = 6
_PREV_HIDDEN = 5


def with_block_table(inputs: tuple[Any, ...], block_table: Tensor) -> tuple[Any, ...]:
    """The positional inputs up to `adapter_ids`, then nothing, then the block table [B, n]."""
    empty = [torch.empty(0) for _ in range(_BLOCK_TABLE - _ADAPTER_IDS - 1)]
    return (*inputs[: _ADAPTER_IDS + 1], *empty, block_table)


def _told_apart(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a graph that continues, with `prev_hidden`, which no graph reads, as [B, 1] instead of [B].

    NxD's compiled model finds the graph by the shapes of the inputs alone, and a piece may be as long as a prompt.
    """
    return (*inputs[:_PREV_HIDDEN], inputs[_PREV_HIDDEN].reshape(-1, 1), *inputs[_PREV_HIDDEN + 1 :])


class HybridModelWrapper(ModelWrapper):
    """Adds the graphs that continue a prompt, block tables, and the user's compiler flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.neuron_config.compiler_flags:
            self.compiler_args += f" {self.neuron_config.compiler_flags}"

    def input_generator(self) -> list[tuple[Any, ...]]:
        inputs = super().input_generator()
        if self.tag == CONTINUATION_MODEL_TAG:
            inputs = [_told_apart(example) for example in inputs]
        if not self.is_block_kv_layout:
            return inputs
        rows = self.neuron_config.batch_size
        return [
            with_block_table(example, torch.zeros(rows, self._table_width(bucket), dtype=torch.int32))
            for example, bucket in zip(inputs, self.neuron_config.buckets, strict=True)
        ]

    def pad_inputs(self, *args: Any, pad_type: str = "first_fit") -> tuple[Any, ...]:
        """Pads to the bucket: the tokens of a piece like those of a prompt, and the block table."""
        bucket = self.get_target_bucket(*args, strategy=pad_type)
        if self.tag == CONTINUATION_MODEL_TAG:
            missing = bucket - args[0].shape[1]
            args = _told_apart((*(functional.pad(arg, (0, missing)) for arg in args[:3]), *args[3:]))
        else:
            args = super().pad_inputs(*args, pad_type=pad_type)
        if self.is_block_kv_layout:
            missing = self._table_width(bucket) - args[_BLOCK_TABLE].shape[1]
            args = (*args[:_BLOCK_TABLE], functional.pad(args[_BLOCK_TABLE], (0, missing)))
        return tuple(args)

    def _table_width(self, bucket: int) -> int:
        """Blocks that a graph of this bucket can see."""
        visible = self.neuron_config.max_length if self.tag == CONTINUATION_MODEL_TAG else bucket
        return -(-visible // int(self.neuron_config.pa_block_size))

    def _forward_with_pad(self, *args: Any) -> Any:
        if not self.is_block_kv_layout:
            return super()._forward_with_pad(*args)
        # The base class leaves block tables out. Idle rows repeat the first one and say so in their `seq_ids`.
        rows, missing = args[3].shape[0], self.neuron_config.batch_size - args[3].shape[0]
        padded = [
            arg if arg.numel() == 0 else torch.cat([arg, arg[:1].expand(missing, *arg.shape[1:])]) for arg in args
        ]
        padded[3] = functional.pad(args[3], (0, missing), value=-1)
        outputs = self._forward(*padded)
        if self.is_neuron():
            return outputs[:rows]
        result, *state = outputs
        return [result[:rows], *state]

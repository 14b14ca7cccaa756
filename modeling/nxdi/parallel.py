"""The seam of `modeling.parallel` over NxD's parallel layers.

NxD cuts a whole tensor into equal contiguous slabs, one a rank. This project's rule gives every rank a range that may
be shared with others or filled up with zeros. Both agree on the tensor in which the ranks' parts stand one after the
other: `weights.joined_parts` writes it, and the layers here are as wide as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from neuronx_distributed.parallel_layers import layers as nxd
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from nxdi_qwen.modeling.parallel import ParallelLayers
from nxdi_qwen.modeling.partition import Cut, Parallel, local_shape


def all_reduce(x: Tensor) -> Tensor:
    """Sum over the tensor-parallel ranks, in float32."""
    return reduce_from_tensor_model_parallel_region(x.to(torch.float32)).to(x.dtype)


class RowParallelLinear(nxd.RowParallelLinear):
    """NxD's layer, whose sum over the ranks a caller may put off; see `modeling.parallel.RowParallelLinear`."""

    def partial(self, x: Tensor) -> Tensor:
        """This rank's share of the sum, without the bias."""
        return nn.functional.linear(x, self.weight)


class PartitionedWeight(nxd.BaseParallelLinear):
    """A parameter `weight` that NxD cuts like that of a linear layer, which is the kind of module it looks into."""

    def __init__(self, shape: Sequence[int], cut: Cut, parallel: Parallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(local_shape(shape, (cut,), parallel), dtype=dtype), requires_grad=False)
        set_tensor_model_parallel_attributes(
            self.weight, is_parallel=True, dim=cut.dim, stride=1, num_partitions=parallel.degree
        )


class NxdParallelLayers(ParallelLayers):
    """Makes NxD's layers."""

    def column(self, in_features: int, cut: Cut, dtype: torch.dtype, bias: bool = False) -> nn.Module:
        return nxd.ColumnParallelLinear(in_features, self._joined(cut), bias=bias, gather_output=False, dtype=dtype)

    def row(self, cut: Cut, out_features: int, dtype: torch.dtype, bias: bool = False) -> RowParallelLinear:
        return RowParallelLinear(self._joined(cut), out_features, bias=bias, input_is_parallel=True, dtype=dtype)

    def weight(self, shape: Sequence[int], cut: Cut, dtype: torch.dtype) -> PartitionedWeight:
        return PartitionedWeight(shape, cut, self.parallel, dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        return all_reduce(x)

    def _joined(self, cut: Cut) -> int:
        """The width of all ranks' parts together."""
        return cut.part(self.parallel).size * self.parallel.degree

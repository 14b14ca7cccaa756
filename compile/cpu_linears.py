"""Linear layers rewritten for the CPU, which reads their weights slowly.

``x W^T`` in bfloat16 hands the weight to the matrix product as its right side, which is repacked for AMX, the matrix
unit of some processors, at every call. Written as ``(W x^T)^T`` the weight is the left side and is read as it lies.
Measured on 2 cores of a Xeon with AMX, torch 2.13, weights [1024 ... 8192, 1024 ... 3584] beyond the caches, medians of
15: 1.3 to 2 times as fast for 2 to 128 rows; at 512 rows half as fast where the weight has 1,024 rows. One row would go
to another kernel, which is slower than two rows there, so it is doubled. Without AMX nothing is repacked: on 2 cores of
an AMD EPYC, medians of 7, up to 16 rows are 0.5 to 1.0 times as fast for four of five weights, 64 and 128 rows 1.0 to
1.2 times.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

MAX_ROWS = 128
# The result is a transposed matrix, which some of its readers read slowly: it is not worth it where there is little to
# read, and with more rows than these it is copied.
MIN_WEIGHT_BYTES = 2 << 20
MAX_TRANSPOSED_ROWS = 32


def weights_are_repacked() -> bool:
    """Whether this machine repacks weights at every call: whether it has AMX."""
    return torch.cpu._is_amx_tile_supported()


def read_weights_in_place(program: ExportedProgram) -> None:
    """Rewrites the bfloat16 linear layers of `program` that have at most `MAX_ROWS` rows, no bias and at least
    `MIN_WEIGHT_BYTES` of weights, in place.
    """
    aten = torch.ops.aten
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight, *bias = node.args
        shape = node.meta["val"].shape
        rows = shape[:-1].numel()
        weights = weight.meta["val"]
        if rows > MAX_ROWS or bias or weights.dtype != torch.bfloat16 or weights.nbytes < MIN_WEIGHT_BYTES:
            continue
        with graph.inserting_before(node):
            call = graph.call_function
            flat = call(aten.reshape.default, (x, [rows, x.meta["val"].shape[-1]]))
            if rows == 1:
                flat = call(aten.cat.default, ([flat, flat],))
            out = call(aten.t.default, (call(aten.mm.default, (weight, call(aten.t.default, (flat,)))),))
            if rows == 1:
                out = call(aten.slice.Tensor, (out, 0, 0, 1))
            if rows > MAX_TRANSPOSED_ROWS:
                out = call(aten.clone.default, (out,), {"memory_format": torch.contiguous_format})
            out = call(aten.reshape.default, (out, list(shape)))
        node.replace_all_uses_with(out)
        graph.erase_node(node)
    program.graph_module.recompile()

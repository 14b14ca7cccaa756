"""What a captured graph must be before it goes into an artifact: static, of known operations, of rank 4 at most,
with all state threaded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from nxdi_qwen.compile.graphs import GraphSpec, quiet_export
from nxdi_qwen.modeling.state import StateTensor

MAX_RANK = 4

# Core ATen operations whose lowering uses only HLO opcodes that occur in models which neuronx-cc is known to compile.
_KNOWN = {
    "_softmax", "_to_copy", "_unsafe_view", "abs", "add", "addmm", "alias", "all_gather", "all_reduce", "amax",
    "arange", "bitwise_not", "bmm", "cat", "clamp", "clone", "cos", "detach", "div", "embedding", "empty", "eq",
    "exp", "expand", "full", "full_like", "gather", "ge", "gt", "index", "index_select", "le", "lift_fresh_copy",
    "logical_not", "lt", "mean", "mm", "mul", "ne", "neg", "ones", "permute", "pow", "reciprocal", "repeat",
    "rsqrt", "rsub", "scalar_tensor", "select", "sigmoid", "sin", "slice", "sort", "split_with_sizes", "squeeze",
    "sub", "sum", "topk", "transpose", "unsqueeze", "view", "where", "zeros",
}  # fmt: skip
# Operations beyond that list, each with the reason why it is expected to compile.
_EXPECTED = {
    "log": "softplus of the decay; nki.language.log exists on every NeuronCore that NKI supports (log1p: v4 on)",
}
# Bookkeeping of torch.export that computes nothing.
_SILENT = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size"}


class GraphError(RuntimeError):
    """A captured graph breaks a rule of the target; the message names the graph, the operation and the line of the
    model.
    """


def check_graph(program: ExportedProgram, spec: GraphSpec, state: Sequence[StateTensor]) -> dict[str, int]:
    """Checks `program`, which takes and returns `state`, in its core ATen form. Returns its size: {"nodes": calls,
    "max_rank": largest rank}.

    Raises GraphError for a dynamic shape, an unknown operation, a tensor above rank 4, or a state tensor that is not
    read, not written, or changes its shape or dtype.
    """
    with quiet_export():
        core = program.run_decompositions()
    nodes, max_rank = 0, 0
    for node in core.graph.nodes:
        for tensor in _tensors(node):
            if not all(isinstance(size, int) for size in tensor.shape):
                raise GraphError(f"{spec.name}: dynamic shape {tuple(tensor.shape)} at {_where(node)}")
            max_rank = max(max_rank, tensor.dim())
            if tensor.dim() > MAX_RANK:
                raise GraphError(f"{spec.name}: rank {tensor.dim()} above {MAX_RANK} at {_where(node)}")
        if node.op == "call_function" and node.target is not operator.getitem:
            name = _operation(node)
            if name in _SILENT:
                continue
            if name not in _KNOWN and name not in _EXPECTED:
                raise GraphError(f"{spec.name}: operation {name} is not known to compile, at {_where(node)}")
            nodes += 1
    _check_state(core, spec, state)
    return {"nodes": nodes, "max_rank": max_rank}


def _check_state(program: ExportedProgram, spec: GraphSpec, state: Sequence[StateTensor]) -> None:
    """The state is the tail of both inputs and outputs, in one order; output i must come from input i, through a
    selection.
    """
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    outputs = next(node for node in program.graph.nodes if node.op == "output").args[0]
    # Where there is no state, nothing stands behind the end of either.
    first_read, first_written = (len(nodes) - len(state) for nodes in (placeholders, outputs))
    for tensor, read, written in zip(state, placeholders[first_read:], outputs[first_written:], strict=True):
        where = f"{spec.name}: state {tensor.name}"
        for node in (read, written):
            value = node.meta["val"]
            if tuple(value.shape) != tensor.shape or value.dtype != tensor.dtype:
                raise GraphError(f"{where} is {tuple(value.shape)} {value.dtype}, not {tensor.shape} {tensor.dtype}")
        if not written.meta["val"].is_contiguous():
            raise GraphError(f"{where} is not returned contiguous, as the next graph takes it")
        if written is read:
            raise GraphError(f"{where} is returned as it came: nothing is written")
        if written not in read.users or _operation(written) != "where":
            raise GraphError(
                f"{where} is not carried over: its output does not select between its own input and the new value"
            )
        if len(read.users) < 2:
            raise GraphError(f"{where} is never read")


def _operation(node: Node) -> str:
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else str(target)


def _tensors(node: Node) -> Iterator[Tensor]:
    value = node.meta.get("val")
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, Tensor):
            yield item


def _where(node: Node) -> str:
    """The innermost line of this package that made the node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    own = [
        i for i, line in enumerate(lines) if line.startswith("File ") and ("/modeling/" in line or "/compile/" in line)
    ]
    if not own:
        return f"node {node.name}"
    code = lines[own[-1] + 1] if own[-1] + 1 < len(lines) else ""
    return f"{lines[own[-1]]}: {code}"

"""Torch modules as HLO, through torch_xla's lazy tensors, and the execution of such a graph on XLA's CPU backend.

`lower` gives the module that a Neuron compiler would be handed: every input, weight and state is a parameter of the
entry computation that is known by name, and the states are tied to outputs by the alias table. `LoweredGraph.run`
executes that very module, not the trace it came from, so what it computes is what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxdi_qwen.compile import hlo_proto
from nxdi_qwen.modeling.errors import InputError

# HLO's name of each element type.
_DTYPES = {
    torch.bool: "pred", torch.int8: "s8", torch.int16: "s16", torch.int32: "s32", torch.int64: "s64", torch.uint8: "u8",
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3fn", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip


@dataclass
class LoweredGraph:
    """A module lowered to HLO.

    proto: the serialized HloModuleProto, with its alias table and with `parameters` as the entry's parameter names.
    parameters: by HLO parameter number: "input:0" ... for inputs, a weight's or state's own name, "constant:N" for a
        tensor that the call made itself, or read without its being among the parameters.
    aliases: state -> index of the output that replaces it, as asked for; the proto's table lacks those in `missing`.
    missing: names ("input:0" too) that no parameter of the graph stands for: they do not matter to any output.
    mutated: names whose tensor the call changed in place. The graph has no such effect, only its outputs count.
    fallbacks: operations that ran on the CPU while tracing, so that their result is a constant of this graph.
    constants: "constant:N" -> CPU tensor.
    values: copies of every weight, state and buffer by name, on the CPU; without those on the meta device.
    """

    proto: bytes = field(repr=False)
    parameters: tuple[str, ...]
    aliases: dict[str, int]
    missing: tuple[str, ...]
    mutated: tuple[str, ...]
    fallbacks: tuple[str, ...]
    constants: dict[str, Tensor]
    values: dict[str, Tensor] = field(repr=False)
    _computation: Any = field(default=None, init=False, repr=False)

    def save(self, path: Path) -> None:
        """Writes the proto, which is what compilers take."""
        path.write_bytes(self.proto)

    def run(self, inputs: Sequence[Tensor], values: MutableMapping[str, Tensor]) -> list[Tensor]:
        """Executes the proto on XLA's CPU backend -> the outputs, CPU tensors.

        inputs: in the shapes and dtypes of those lowered with. values: name -> tensor of every other parameter; its
        entries of aliased states are replaced by the outputs that the proto's alias table names, and nothing else
        carries over. Graphs that are given the same mapping share weights and states. InputError for a parameter that
        has no value or one of another shape or dtype.
        """
        import torch_xla

        if self._computation is None:
            self._computation = torch_xla._XLAC._xla_op_computation_from_module_proto("lowered", self.proto)
        module = hlo_proto.parse_module(self.proto)
        device = _cpu_device()
        arguments = [
            _pick(name, inputs, {**values, **self.constants}, hlo_proto.shape_text(parameter.shape)).detach().to(device)
            for name, parameter in zip(self.parameters, hlo_proto.entry_parameters(module), strict=True)
        ]
        results = torch_xla._XLAC._xla_user_computation("nxdi_qwen::lowered", arguments, self._computation)
        outputs: list[Tensor] = torch_xla._XLAC._xla_get_cpu_tensors(results)
        for number, index in hlo_proto.alias_table(module).items():
            values[self.parameters[number]] = outputs[index]
        return outputs


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of `module` by name, each tensor once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def lower(
    call: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    aliases: Mapping[Tensor | str, int],
) -> LoweredGraph:
    """Lowers `call(*inputs)`, which returns a flat list of tensors.

    inputs: CPU tensors; their shapes and dtypes are the graph's, their values do not matter. parameters: every weight,
    state and buffer that `call` reads, by name (`named_tensors`). While `call` runs, these very objects lie on the XLA
    device, afterwards they are what they were, and so are the attributes of the modules in `call`, if it is one.
    Parameters on the meta device cost no memory; their graph runs once it is given values. aliases: a state, by name or
    as the very tensor, -> index of the output that takes its place.

    InputError for an alias of an unknown tensor or output, for two states with one output, and for an output that is
    not computed on the XLA device.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    xlac = torch_xla._XLAC
    device = _cpu_device()
    parameters = _distinct(parameters)
    with _tracing(xlac), torch.no_grad():
        twins = {name: _twin(tensor, device) for name, tensor in parameters.items()}
        arguments = [tensor.detach().to(device) for tensor in inputs]
        # Only now all of these are device data; without, a 0-d tensor would become a constant.
        torch_xla.sync()
        xm.wait_device_ops()
        # A copy keeps naming the data that came in when `call` changes a tensor in place.
        named = {f"input:{number}": tensor for number, tensor in enumerate(arguments)} | twins
        handles = {name: tensor.detach().clone() for name, tensor in named.items()}

        before = _fallbacks(xlac)
        with _swapped(parameters, twins), _attributes_kept(call):
            outputs = list(call(*arguments))
            for index, output in enumerate(outputs):
                if output.device.type != "xla":
                    raise InputError(f"output {index} lies on {output.device}: compute it from the inputs")
            context = xlac.lowering.LoweringContext()
            context.build(outputs)
            mutated = xlac._check_tensor_need_materialization([*arguments, *parameters.values()])
        fallbacks = sorted(name for name, count in _fallbacks(xlac).items() if count > before.get(name, 0))
        numbers = {name: context.tensor_parameter_id(handle) for name, handle in handles.items()}
        module = hlo_proto.parse_module(context.hlo())
        names = {number: name for name, number in numbers.items() if number >= 0}
        on_device = context.device_parameter_id_tensor_mapping()
        constants = {}
        for number in sorted(set(range(len(hlo_proto.entry_parameters(module)))) - set(names)):
            names[number] = f"constant:{number}"
            constants[names[number]] = on_device[number].cpu()

    by_name = _aliases_by_name(aliases, parameters, len(outputs))
    _write_tables(module, names, {numbers[name]: index for name, index in by_name.items() if numbers[name] >= 0})
    return LoweredGraph(
        proto=module.SerializeToString(deterministic=True),
        parameters=tuple(names[number] for number in sorted(names)),
        aliases=by_name,
        missing=tuple(name for name, number in numbers.items() if number < 0),
        mutated=tuple(name for name, changed in zip(handles, mutated, strict=True) if changed),
        fallbacks=tuple(fallbacks),
        constants=constants,
        # Copied: a run of the module itself may change its states in place, and nothing of that may reach this graph.
        values={name: tensor.detach().clone() for name, tensor in parameters.items() if not tensor.is_meta},
    )


def _cpu_device() -> torch.device:
    """XLA's CPU device. InputError in a process that already uses another one: a process has one kind."""
    import torch_xla

    try:
        torch_xla.runtime.set_device_type("CPU")
    except RuntimeError as error:
        raise InputError("XLA runs on another device in this process: lower graphs in a new one") from error
    device: torch.device = torch_xla.device()
    return device


def _distinct(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`parameters` with every tensor object once, under its first name (tied weights)."""
    first: dict[int, str] = {}
    for name, tensor in parameters.items():
        first.setdefault(id(tensor), name)
    return {name: parameters[name] for name in first.values()}


def _twin(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on the XLA device, of the same class and with the same Python attributes."""
    if tensor.is_meta:
        import torch_xla.core.xla_builder as xla_builder

        twin = xla_builder.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
    else:
        twin = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=False)
    twin.__dict__.update(tensor.__dict__)
    return twin


@contextmanager
def _swapped(parameters: Mapping[str, Tensor], twins: Mapping[str, Tensor]) -> Iterator[None]:
    """Puts the twins' contents into the parameters' objects: whoever holds one, an alias table too, needs no change."""
    swapped = []
    try:
        for name, tensor in parameters.items():
            torch.utils.swap_tensors(tensor, twins[name])
            swapped.append(name)
        yield
    except BaseException:
        # What failed may hold some of them, which then cannot be swapped: that error would hide the one to be seen.
        for name in swapped:
            with suppress(RuntimeError):
                torch.utils.swap_tensors(parameters[name], twins[name])
        raise
    for name in swapped:
        torch.utils.swap_tensors(parameters[name], twins[name])


@contextmanager
def _attributes_kept(call: object) -> Iterator[None]:
    """Undoes what modules keep from a call: a table made on first use would stay behind on the XLA device."""
    modules = list(call.modules()) if isinstance(call, nn.Module) else []
    before = [(module, dict(module.__dict__), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _fallbacks(xlac: Any) -> dict[str, int]:
    """How often each operation was computed on the CPU in this process so far."""
    return {name: xlac._xla_counter_value(name) for name in xlac._get_executed_fallback_ops()}


@contextmanager
def _tracing(xlac: Any) -> Iterator[None]:
    """Instructions name the source line they come from; Python numbers are constants instead of parameters; and equal
    0-d tensors are parameters of their own (not looked up among those that were already uploaded).
    """
    settings = {"ir_debug": True, "xla_all_numbers_special_scalars": True, "xla_enable_device_data_cache": False}
    before = {name: getattr(xlac, f"_get_{name}")() for name in settings}
    try:
        for name, value in settings.items():
            getattr(xlac, f"_set_{name}")(value)
        yield
    finally:
        for name, value in before.items():
            getattr(xlac, f"_set_{name}")(value)


def _aliases_by_name(
    aliases: Mapping[Tensor | str, int], parameters: Mapping[str, Tensor], outputs: int
) -> dict[str, int]:
    names = {id(tensor): name for name, tensor in parameters.items()}
    result: dict[str, int] = {}
    taken: dict[int, str] = {}
    for key, index in aliases.items():
        name = key if isinstance(key, str) else names.get(id(key), "")
        if name not in parameters:
            what = key if isinstance(key, str) else f"a tensor {tuple(key.shape)}"
            raise InputError(
                f"output {index} is aliased to {what}, which is not among the parameters: pass it with them"
            )
        if not 0 <= index < outputs:
            raise InputError(f"{name} is aliased to output {index} of {outputs}: give an index below {outputs}")
        if index in taken:
            raise InputError(f"{name} and {taken[index]} are both aliased to output {index}: give each its own")
        result[name], taken[index] = index, name
    return result


def _write_tables(module: Any, names: Mapping[int, str], aliases: Mapping[int, int]) -> None:
    """The parameters' names and the alias table, neither of which torch_xla writes."""
    ordered = [names[number] for number in sorted(names)]
    for shape in (module.host_program_shape, hlo_proto.entry_computation(module).program_shape):
        del shape.parameter_names[:]
        shape.parameter_names.extend(ordered)
    for parameter in hlo_proto.entry_parameters(module):
        parameter.metadata.Clear()  # the line of this file that uploaded it
        parameter.metadata.op_name = names[parameter.parameter_number]
    for number, index in sorted(aliases.items()):
        module.input_output_alias.entries.add(
            output_shape_index=[index], parameter_number=number, kind=hlo_proto.MUST_ALIAS
        )


def _pick(name: str, inputs: Sequence[Tensor], values: Mapping[str, Tensor], expected: str) -> Tensor:
    if name.startswith("input:"):
        number = int(name.removeprefix("input:"))
        if number >= len(inputs):
            raise InputError(f"{len(inputs)} inputs were given, the graph reads {name}: pass them all")
        tensor = inputs[number]
    elif name in values:
        tensor = values[name]
    else:
        raise InputError(f"{name} has no value: add it to the values that the graph runs with")
    found = f"{_DTYPES[tensor.dtype]}[{','.join(str(size) for size in tensor.shape)}]"
    if found != expected:
        raise InputError(f"{name} is {found}, the graph takes {expected}: pass it in that shape and dtype")
    return tensor

"""The messages of an HLO module, as far as they are read or written here.

Declared by name and field number after openxla's `xla/service/hlo.proto` and `xla/xla_data.proto`. Whatever is not
declared survives parsing and writing as unknown fields. The descriptors live in a pool of their own: another package in
the process may have registered the full `xla` messages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from nxdi_qwen.modeling.errors import InputError

_PACKAGE = "nxdi_qwen_hlo"

# message -> field -> (number, type); "*" stands before the type of a repeated field. PrimitiveType and the alias' Kind
# are enumerations: on the wire an int32.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ShapeProto": {
        "element_type": (2, "int32"),
        "dimensions": (3, "*int64"),
        "tuple_shapes": (4, "*ShapeProto"),
        "is_dynamic_dimension": (6, "*bool"),
    },
    "ProgramShapeProto": {
        "parameters": (1, "*ShapeProto"),
        "result": (2, "ShapeProto"),
        "parameter_names": (3, "*string"),
    },
    "OpMetadata": {
        "op_type": (1, "string"),
        "op_name": (2, "string"),
        "source_file": (3, "string"),
        "source_line": (4, "int32"),
    },
    "HloInstructionProto": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "ShapeProto"),
        "metadata": (7, "OpMetadata"),
        "parameter_number": (9, "int64"),
        "custom_call_target": (28, "string"),
        "id": (35, "int64"),
        "operand_ids": (36, "*int64"),
        "called_computation_ids": (38, "*int64"),
    },
    "HloComputationProto": {
        "name": (1, "string"),
        "instructions": (2, "*HloInstructionProto"),
        "program_shape": (4, "ProgramShapeProto"),
        "id": (5, "int64"),
        "root_id": (6, "int64"),
    },
    "AliasEntryProto": {
        "output_shape_index": (1, "*int64"),
        "parameter_number": (2, "int64"),
        "parameter_shape_index": (3, "*int64"),
        "kind": (4, "int32"),
    },
    "HloInputOutputAliasProto": {"entries": (1, "*AliasEntryProto")},
    "HloModuleProto": {
        "name": (1, "string"),
        "computations": (3, "*HloComputationProto"),
        "host_program_shape": (4, "ProgramShapeProto"),
        "entry_computation_id": (6, "int64"),
        "input_output_alias": (8, "HloInputOutputAliasProto"),
    },
}

# Kind of an alias: buffers that must be the same at run time, as a state that is updated in place needs.
MUST_ALIAS = 2

# PrimitiveType: number -> (name as in HLO text, bits of an element; 0: not an array).
PRIMITIVE_TYPES = {
    1: ("pred", 8), 2: ("s8", 8), 3: ("s16", 16), 4: ("s32", 32), 5: ("s64", 64), 6: ("u8", 8), 7: ("u16", 16),
    8: ("u32", 32), 9: ("u64", 64), 10: ("f16", 16), 11: ("f32", 32), 12: ("f64", 64), 13: ("tuple", 0),
    14: ("opaque", 0), 15: ("c64", 64), 16: ("bf16", 16), 17: ("token", 0), 18: ("c128", 128), 19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8), 21: ("s4", 4), 22: ("u4", 4), 23: ("f8e4m3b11fnuz", 8), 24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8), 26: ("s2", 2), 27: ("u2", 2), 28: ("f8e4m3", 8), 29: ("f8e3m4", 8), 30: ("s1", 1),
    31: ("u1", 1), 32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8), 34: ("buffer", 0),
}  # fmt: skip


@functools.cache
def _declare() -> dict[str, Any]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise InputError("HLO graphs need the package protobuf: pip install 'nxdi-qwen[hlo]'") from error

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for message_name, fields in _MESSAGES.items():
        declared = file.message_type.add(name=message_name)
        for field_name, (number, kind) in fields.items():
            field = declared.field.add(name=field_name, number=number)
            field.label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            if kind in _MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


def message(name: str) -> Any:
    """The class of a message, such as "HloModuleProto". InputError when protobuf is not installed."""
    return _declare()[name]


def parse_module(data: bytes) -> Any:
    """`data`, a serialized HloModuleProto -> the message. InputError when it is none."""
    module = message("HloModuleProto")()
    try:
        module.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError has another base in each of its implementations
        raise InputError(
            f"these {len(data)} bytes are no serialized HLO module ({error}): pass the bytes of a .hlo file"
        ) from error
    if not any(computation.id == module.entry_computation_id for computation in module.computations):
        raise InputError(
            f"the HLO module has no entry computation: its {len(data)} bytes are truncated or of another message"
        )
    return module


def entry_computation(module: Any) -> Any:
    """The computation that a module's execution starts with."""
    return next(each for each in module.computations if each.id == module.entry_computation_id)


def root_instruction(computation: Any) -> Any:
    """The instruction whose value a computation returns."""
    return next(each for each in computation.instructions if each.id == computation.root_id)


def entry_parameters(module: Any) -> list[Any]:
    """The entry computation's parameter instructions, by parameter number."""
    instructions = entry_computation(module).instructions
    return sorted((each for each in instructions if each.opcode == "parameter"), key=lambda each: each.parameter_number)


def output_shapes(module: Any) -> list[Any]:
    """The shapes of the flat outputs; a module that returns one array has one."""
    shape = root_instruction(entry_computation(module)).shape
    return list(shape.tuple_shapes) if element_name(shape) == "tuple" else [shape]


def alias_table(module: Any) -> dict[int, int]:
    """Parameter number -> index of the output that takes its place."""
    return {
        entry.parameter_number: (entry.output_shape_index[0] if entry.output_shape_index else 0)
        for entry in module.input_output_alias.entries
    }


def element_name(shape: Any) -> str:
    """A shape's element type as HLO text writes it, such as "f32"."""
    return PRIMITIVE_TYPES.get(shape.element_type, (f"type {shape.element_type}", 0))[0]


def shape_text(shape: Any) -> str:
    """A shape as HLO text writes it, without its layout: "f32[2,4]", "(f32[2], s32[])"."""
    if element_name(shape) == "tuple":
        return f"({', '.join(shape_text(each) for each in shape.tuple_shapes)})"
    return f"{element_name(shape)}[{','.join(str(size) for size in shape.dimensions)}]"


def arrays(shape: Any) -> Iterator[Any]:
    """The array shapes in `shape`: itself, or those within a tuple."""
    if element_name(shape) == "tuple":
        for each in shape.tuple_shapes:
            yield from arrays(each)
    else:
        yield shape


def element_count(shape: Any) -> int:
    """Elements of an array shape."""
    count = 1
    for size in shape.dimensions:
        count *= size
    return count


def byte_count(shape: Any) -> int:
    """Bytes of an array shape without padding."""
    return (element_count(shape) * PRIMITIVE_TYPES.get(shape.element_type, ("", 0))[1] + 7) // 8

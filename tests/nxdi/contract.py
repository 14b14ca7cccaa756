"""The contract between the port and NxDI: ``python -m tests.nxdi.contract`` records it, where NxDI is installed.

`contract.json` holds, with the versions that they come from: the names that the port imports; for each class that it
derives from or handles, the members that it overrides, calls, reads or sets, with their signatures; and how NxDI itself
calls what is overridden. Signatures and calls are texts: "(self, a, b=None, *, c, **kwargs)", "(_, c=_, **_)".

Per class, `members` are those that NxDI defines; `hooks` the port defines and NxDI only reads; `own` are the port's
own, whose names NxDI must not take.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts import command
from tests.nxdi.port_uses import LIBRARIES, Uses, port_sources, read_uses

RECORD = Path(__file__).with_suffix(".json")
ATTRIBUTE, MISSING = "attribute", "missing"
# Called by its positions, which the wrapper's inputs have to keep, by compiled graphs: no text shows that.
POSITIONAL = {"neuronx_distributed_inference.models.model_base.NeuronBaseModel": ("forward",)}

Contract = dict[str, Any]


def load_record() -> Contract:
    record: Contract = json.loads(RECORD.read_text())
    return record


def real_contract(uses: Uses) -> Contract:
    """What the installed NxD and NxDI have of it; `MISSING` is what they do not have."""
    import nxdi_qwen.modeling.nxdi  # noqa: F401  stand-ins in the place of a missing Neuron SDK

    names = {name: _resolve(name) for name in uses.names}
    classes = {name: _resolve(name) for name in uses.members}
    modules = {inspect.getmodule(each) for each in [*names.values(), *_layers(classes.values())]}
    texts = [_tree(module) for module in modules if module and module.__name__.startswith(LIBRARIES)]
    read = frozenset(name for text in texts for name in _read_attributes(text))
    calls = _calls(texts)
    return {
        "versions": {name: importlib.import_module(f"{name}._version").__version__ for name in LIBRARIES},
        "names": {name: _described(names[name]) for name in sorted(names)},
        "classes": {name: _class_contract(name, classes[name], uses, read, calls) for name in sorted(classes)},
    }


def _class_contract(name: str, cls: type, uses: Uses, read: frozenset[str], calls: Mapping[str, set[str]]) -> Contract:
    used, defined = {*uses.members[name], *POSITIONAL.get(name, ())}, uses.defined[name]
    attributes = frozenset().union(*(_stored_on_self(layer) for layer in _layers([cls])))
    members = {}
    for member in sorted(used):
        if hasattr(cls, member):
            members[member] = _described(inspect.getattr_static(cls, member))
        elif member in attributes:
            members[member] = ATTRIBUTE
        elif member not in defined:
            members[member] = MISSING
    methods = {method for owner, method in uses.methods if owner == name}
    overridden = sorted(methods & members.keys() & calls.keys() - {"__init__"})
    hooks = (defined - methods - members.keys()) & read
    return {
        "members": members,
        "calls": {method: sorted(calls[method]) for method in overridden},
        "hooks": sorted(hooks),
        "own": sorted(used - members.keys() - hooks),
    }


def _resolve(dotted: str) -> Any:
    """The object with this name, or the class `_Missing`."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        try:
            return functools.reduce(getattr, parts[count:], found)
        except AttributeError:
            break
    return _Missing


class _Missing:
    """In the place of what is not there."""


def _described(found: Any) -> str:
    """A signature, a text constant as it is, or what else it is."""
    found = getattr(found, "__func__", found)  # of a class method
    if found is _Missing:
        return MISSING
    if isinstance(found, str):
        return repr(found)
    if inspect.isclass(found) or callable(found):
        return _signature(found)
    return "module" if isinstance(found, ModuleType) else ATTRIBUTE


def _signature(function: Any) -> str:
    """Without annotations; a default that is no literal stands there as the name of its class."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if default is not parameter.empty and not _is_literal(default):
            parameter = parameter.replace(default=_Written(type(default).__name__))
        parameters.append(parameter.replace(annotation=parameter.empty))
    return str(inspect.Signature(parameters))


class _Written(str):
    """A text whose representation is itself."""

    def __repr__(self) -> str:
        return str(self)


def _is_literal(value: Any) -> bool:
    try:
        ast.parse(repr(value), mode="eval")
    except SyntaxError:
        return False
    return True


def _layers(classes: Iterable[type]) -> list[type]:
    """The classes and those that they derive from, as far as they are NxD's or NxDI's."""
    return [layer for cls in classes for layer in cls.__mro__ if layer.__module__.startswith(LIBRARIES)]


@functools.cache
def _tree(module: ModuleType) -> ast.AST:
    return ast.parse(inspect.getsource(module))


@functools.cache
def _stored_on_self(cls: type) -> frozenset[str]:
    """The attributes that a class gives its objects, and the fields of a data class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    names = {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
    registered = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in _REGISTER)
    names |= {name for node in registered for name in _texts(node.args[:1])}
    return frozenset(names | set(cls.__annotations__))


_REGISTER = ("register_parameter", "register_buffer")


def _read_attributes(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and _name(node.func) in ("getattr", "hasattr"):
            yield from _texts(node.args[1:2])


def _texts(arguments: Iterable[ast.expr]) -> list[str]:
    """The text constants among arguments."""
    return [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def _calls(trees: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Method -> how one of this name is called, as "(_, c=_, **_)"."""
    result: dict[str, set[str]] = defaultdict(set)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            positional = ["*_" if isinstance(each, ast.Starred) else "_" for each in node.args]
            keywords = sorted({f"{each.arg}=_" if each.arg else "**_" for each in node.keywords}, key=_stars_last)
            result[node.func.attr].add(f"({', '.join(positional + keywords)})")
    return result


def _stars_last(argument: str) -> tuple[bool, str]:
    return argument.startswith("*"), argument


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def differences(recorded: Contract, real: Contract) -> list[str]:
    """A line for everything that the record and the installed packages have different."""
    return list(_differ("", {k: recorded[k] for k in ("names", "classes")}, {k: real[k] for k in ("names", "classes")}))


def _differ(where: str, recorded: Any, real: Any) -> Iterable[str]:
    if isinstance(recorded, dict) and isinstance(real, dict):
        for key in sorted({*recorded, *real}):
            yield from _differ(f"{where} {key}", recorded.get(key, "nothing"), real.get(key, "nothing"))
    elif recorded != real:
        yield f"{where.strip()}: recorded {recorded}, installed {real}"


def _missing(contract: Contract) -> Iterable[str]:
    yield from (name for name, text in contract["names"].items() if text == MISSING)
    for owner, each in contract["classes"].items():
        yield from (f"{owner}.{name}" for name, text in each["members"].items() if text == MISSING)


def versions(contract: Contract) -> str:
    return ", ".join(f"{name} {version}" for name, version in contract["versions"].items())


def main(arguments: list[str] | None = None) -> int:
    command.Parser(prog="python -m tests.nxdi.contract", description=__doc__).parse_args(arguments)
    if absent := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise InputError(f"{', '.join(absent)} cannot be imported: run this in an environment with NxDI")
    before = load_record() if RECORD.exists() else None
    real = real_contract(read_uses(port_sources()))
    if missing := list(_missing(real)):
        raise InputError(f"{versions(real)} have no {', '.join(missing)}: mend the port")
    RECORD.write_text(json.dumps(real, indent=1) + "\n")
    for line in differences(before, real) if before else []:
        print(line)
    print(f"{RECORD.name}: {versions(real)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))

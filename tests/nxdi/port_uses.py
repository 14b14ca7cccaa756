"""What the port uses of NxD and NxDI, read from its source text: nothing of it is imported."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = ("modeling", "compile", "scripts")
LIBRARIES = ("neuronx_distributed", "neuronx_distributed_inference")
_PORT = "nxdi_qwen.modeling.nxdi"

# Classes that the port meets without importing them: simple name -> module.
_MET = {
    "DecoderModelInstance": "neuronx_distributed_inference.models.model_wrapper",
    "ModelBuilder": "neuronx_distributed.trace.model_builder",
    "BlockwiseMatmulConfig": "neuronx_distributed.modules.moe.moe_configs",
    "RouterConfig": "neuronx_distributed.modules.moe.moe_configs",
    "ColumnParallelLinear": "neuronx_distributed.parallel_layers.layers",
    "SPMDRank": "neuronx_distributed.parallel_layers.layers",
}
# Members whose values' classes no annotation tells: (class or "*", member) -> class of what it is or returns.
_VALUES = {
    ("*", "neuron_config"): "MoENeuronConfig",
    ("*", "kv_mgr"): "KVCacheManager",
    ("*", "context_encoding_model"): "ModelWrapper",
    ("*", "token_generation_model"): "ModelWrapper",
    ("*", "speculation_model"): "ModelWrapper",
    ("NeuronBaseForCausalLM", "config"): "InferenceConfig",
    ("NeuronBaseForCausalLM", "get_builder"): "ModelBuilder",
    ("ModelWrapper", "model"): "NeuronBaseModel",
    ("ModelWrapper", "get_model_instance"): "DecoderModelInstance",
    ("NeuronBaseModel", "lm_head"): "ColumnParallelLinear",
    ("NeuronBaseModel", "rank_util"): "SPMDRank",
    ("MoENeuronConfig", "router_config"): "RouterConfig",
    ("MoENeuronConfig", "blockwise_matmul_config"): "BlockwiseMatmulConfig",
}
# The same for the elements of lists, and for members that are classes and called to make one.
_ELEMENTS = {("NeuronBaseForCausalLM", "models"): "ModelWrapper"}
_MADE = {("NeuronBaseForCausalLM", "model_wrapper"): "ModelWrapper"}
# The table in the configuration whose keys are options of NxDI, and the class that has them.
_OPTION_TABLE, _OPTIONS = "_REFUSED", "MoENeuronConfig"


@dataclass(frozen=True)
class Call:
    """A call of `target`, a dotted name or "class.member": how many positional arguments, which keywords, and whether
    there are more of either behind a star.
    """

    target: str
    positional: int
    keywords: tuple[str, ...]
    stars: bool
    place: str


@dataclass
class Uses:
    """names: dotted names that are imported, or attributes of such. members: NxDI class -> member -> places; defined,
    those that the port gives a value or a body, which NxDI need not know. methods: (NxDI class, method) -> the port's
    definitions (place, parameters). Classes are dotted; those of the port stand for the NxDI class they derive from.
    """

    names: dict[str, str] = field(default_factory=dict)
    members: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    defined: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    methods: dict[tuple[str, str], list[tuple[str, ast.arguments]]] = field(default_factory=lambda: defaultdict(list))
    calls: list[Call] = field(default_factory=list)


def port_sources() -> dict[str, str]:
    """Path below the project -> text, of every file that imports NxD, NxDI or the port on them."""
    files = (path for folder in _FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    return {path: text for path, text in texts.items() if any(_imports(ast.parse(text), *LIBRARIES, _PORT))}


def _imports(tree: ast.AST, *packages: str) -> Iterator[tuple[str, str]]:
    """(local name, dotted name) of what a module imports out of `packages`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.asname or alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            continue
        yield from (each for each in found if each[1].startswith(tuple(f"{package}." for package in packages)))


def read_uses(sources: Mapping[str, str]) -> Uses:
    """`sources`: path -> text of the port's files."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    uses = Uses()
    classes = dict(_MET)
    bases: dict[str, str] = {}
    returns: dict[str, ast.expr] = {}
    for tree in trees.values():
        local = dict(_imports(tree, *LIBRARIES))
        classes |= {name: dotted.rpartition(".")[0] for name, dotted in local.items() if name[:1].isupper()}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.bases:
                bases[node.name] = _dotted(node.bases[0], local)
            elif isinstance(node, ast.FunctionDef) and node.returns:
                returns[node.name] = node.returns
    # A class that derives from the port's own stands for the first one of NxDI above it.
    for name, base in bases.items():
        while base in bases:
            base = bases[base]
        bases[name] = base
    dotted = {base for base in bases.values() if base.startswith(LIBRARIES)}
    classes |= {base.rpartition(".")[2]: base.rpartition(".")[0] for base in dotted}
    bases = {name: base.rpartition(".")[2] for name, base in bases.items() if base in dotted}
    for path, tree in trees.items():
        _Reader(path, uses, classes, bases, returns, dict(_imports(tree, *LIBRARIES))).visit(tree)
    return uses


def _dotted(node: ast.expr, local: Mapping[str, str]) -> str:
    """The dotted name of a chain of attributes on an imported name; the bare name of another; "" for the rest."""
    if isinstance(node, ast.Name):
        return local.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, local)):
        return f"{owner}.{node.attr}"
    return ""


class _Reader(ast.NodeVisitor):
    """Follows variables, in the order of the text, as far as annotations and the tables above tell their classes."""

    def __init__(
        self,
        path: str,
        uses: Uses,
        classes: Mapping[str, str],
        bases: Mapping[str, str],
        returns: Mapping[str, ast.expr],
        local: Mapping[str, str],
    ) -> None:
        self.path, self.uses, self.classes, self.bases, self.returns = path, uses, classes, bases, returns
        self.local = local
        self.owner = ""  # the NxDI class of the class around
        self.variables: dict[str, str] = {}
        for dotted in local.values():
            uses.names.setdefault(dotted, path)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.owner = self.bases.get(node.name, "")
        for each in node.body:
            if self.owner and isinstance(each, ast.FunctionDef):
                self.uses.methods[self._class(self.owner), each.name].append((self._place(each), each.args))
                self._member(self.owner, each.name, each, defined=True)
            for target in each.targets if self.owner and isinstance(each, ast.Assign) else []:
                if isinstance(target, ast.Name):
                    self._member(self.owner, target.id, each, defined=True)
        self.generic_visit(node)
        self.owner = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        with self._scope():
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in arguments:
                self.variables[argument.arg] = self._annotated(argument.annotation)
            if arguments and arguments[0].arg in ("self", "cls"):
                self.variables[arguments[0].arg] = self.owner
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.variables[target.id] = self._type(node.value)
            elif isinstance(target, ast.Tuple):
                self.variables |= {each.id: "" for each in target.elts if isinstance(each, ast.Name)}

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if getattr(node.target, "id", "") == _OPTION_TABLE and isinstance(node.value, ast.Dict):
            for key in node.value.keys:
                self._member(_OPTIONS, ast.literal_eval(key) if key else "", node)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        with self._scope():
            for each in node.generators:
                self._bind(each.target, each.iter)
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        dotted = _dotted(node, self.local)
        if dotted.startswith(tuple(f"{each}." for each in LIBRARIES)):
            self.uses.names.setdefault(dotted, self._place(node))
        elif not node.attr.startswith("__") and (owner := self._type(node.value)):
            self._member(owner, node.attr, node, defined=isinstance(node.ctx, ast.Store))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function, arguments = node.func, node.args
        if _dotted(function, {}).rpartition(".")[2] in ("partial", "partialmethod"):
            function, arguments = arguments[0], arguments[1:]
            stars = True
        else:
            stars = any(isinstance(each, ast.Starred) for each in arguments) or any(
                keyword.arg is None for keyword in node.keywords
            )
        keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
        if isinstance(function, ast.Name) and self.bases.get(function.id) == _OPTIONS:
            for name in keywords:
                self._member(_OPTIONS, name, node)
        if self.owner == _OPTIONS and _dotted(function, {}) in ("kwargs.pop", "kwargs.setdefault"):
            own = _dotted(function, {}) == "kwargs.pop"  # what is taken out does not reach NxDI
            self._member(_OPTIONS, ast.literal_eval(arguments[0]), node, defined=own)
        if target := self._target(function):
            count = sum(not isinstance(each, ast.Starred) for each in arguments)
            self.uses.calls.append(Call(target, count, keywords, stars, self._place(node)))

    def _target(self, function: ast.expr) -> str:
        """The dotted name of a function, of a constructor, or of a member, that is called; "" for one of the port."""
        if (dotted := _dotted(function, self.local)) in self.uses.names:
            return dotted
        if not isinstance(function, ast.Attribute) or not (owner := self._type(function.value)):
            return ""
        if made := _MADE.get((owner, function.attr)):
            return self._class(made)
        return f"{self._class(owner)}.{function.attr}"

    def _type(self, node: ast.expr) -> str:
        """The NxDI class, by its simple name, of an expression's value; "" where that is not known."""
        if isinstance(node, ast.Name):
            return self.variables.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return _VALUES.get((self._type(node.value), node.attr)) or _VALUES.get(("*", node.attr), "")
        if isinstance(node, ast.Call):
            name = _dotted(node.func, {}).rpartition(".")[2]
            if name == "super":
                return self.owner
            if name == "deepcopy":
                return self._type(node.args[0])
            if isinstance(node.func, ast.Attribute) and (value := self._type(node.func)):
                return value
            return self._named(name) or self._annotated(self.returns.get(name))
        return ""

    def _bind(self, target: ast.expr, items: ast.expr) -> None:
        if isinstance(target, ast.Name) and isinstance(items, ast.Attribute):
            self.variables[target.id] = _ELEMENTS.get((self._type(items.value), items.attr), "")

    def _annotated(self, annotation: ast.expr | None) -> str:
        while isinstance(annotation, ast.BinOp):  # X | None
            annotation = annotation.left
        return self._named(annotation.id) if isinstance(annotation, ast.Name) else ""

    def _named(self, name: str) -> str:
        base = self.bases.get(name, name)
        return base if base in self.classes else ""

    def _class(self, name: str) -> str:
        return f"{self.classes[name]}.{name}"

    def _member(self, owner: str, name: str, node: ast.stmt | ast.expr, defined: bool = False) -> None:
        self.uses.members[self._class(owner)].setdefault(name, self._place(node))
        if defined:
            self.uses.defined[self._class(owner)].add(name)

    def _place(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}:{node.lineno}"

    @contextmanager
    def _scope(self) -> Iterator[None]:
        outer = self.variables
        self.variables = dict(outer)
        try:
            yield
        finally:
            self.variables = outer

"""The port's own text against the recorded contract with NxDI, everywhere; the record against the real NxDI."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.nxdi.contract import ATTRIBUTE, Contract, differences, load_record, real_contract, versions
from tests.nxdi.port_uses import Uses, port_sources, read_uses

MODEL = "neuronx_distributed_inference.models.model_base.NeuronBaseModel"
APPLICATION = "neuronx_distributed_inference.models.model_base.NeuronBaseForCausalLM"
OPTIONS = "neuronx_distributed_inference.models.config.MoENeuronConfig"


def parameters(text: str) -> inspect.Signature:
    """A recorded signature; its defaults are their texts. The object that a method belongs to counts as one."""
    function = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return signature(function.args)


def signature(arguments: ast.arguments) -> inspect.Signature:
    kind, result = inspect.Parameter, []
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    for each, default in zip(positional, defaults, strict=True):
        result.append(_parameter(each, kind.POSITIONAL_OR_KEYWORD, default))
    if arguments.vararg:
        result.append(_parameter(arguments.vararg, kind.VAR_POSITIONAL, None))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        result.append(_parameter(each, kind.KEYWORD_ONLY, default))
    if arguments.kwarg:
        result.append(_parameter(arguments.kwarg, kind.VAR_KEYWORD, None))
    return inspect.Signature(result)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    value = inspect.Parameter.empty if default is None else ast.unparse(default)
    return inspect.Parameter(argument.arg, kind, default=value)


def not_taken(own: inspect.Signature, recorded: inspect.Signature) -> Iterator[str]:
    """The recorded parameters that `own` does not take, neither by name nor at their position."""
    kinds = {each.kind for each in own.parameters.values()}
    named = {n for n, p in own.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name, parameter in recorded.parameters.items():
        by_name = name in named or inspect.Parameter.VAR_KEYWORD in kinds
        by_position = parameter.kind is not parameter.KEYWORD_ONLY and inspect.Parameter.VAR_POSITIONAL in kinds
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and not (by_name or by_position):
            yield name


def call_fault(own: inspect.Signature, recorded: inspect.Signature, call: str) -> str:
    """What is wrong where NxDI makes a recorded call of a method and meets `own`; "" for nothing."""
    node = ast.parse(f"f{call}", mode="eval").body
    assert isinstance(node, ast.Call)
    count = 1 + sum(not isinstance(each, ast.Starred) for each in node.args)
    keywords = [each.arg for each in node.keywords if each.arg]
    stars = len(keywords) < len(node.keywords) or count <= len(node.args)
    try:
        (own.bind_partial if stars else own.bind)(*[0] * count, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    for mine, theirs in zip(own.parameters.values(), [*recorded.parameters.values()][:count], strict=False):
        if mine.kind is not mine.POSITIONAL_OR_KEYWORD:
            break
        if mine.name != theirs.name:
            return f"gets {theirs.name} for {mine.name}"
    return ""


def faults(uses: Uses, record: Contract) -> list[str]:
    """A line for everything in which the port and the record do not agree."""
    return [*_name_faults(uses, record), *_override_faults(uses, record), *_call_faults(uses, record)]


def _name_faults(uses: Uses, record: Contract) -> Iterator[str]:
    recorded = {"": {*record["names"]}}
    recorded |= {name: {*c["members"], *c["hooks"], *c["own"]} for name, c in record["classes"].items()}
    recorded[MODEL] -= {"forward"}  # recorded for its positions
    used: dict[str, dict[str, str]] = {"": uses.names, **uses.members}
    for owner in sorted({*recorded, *used}):
        mine, theirs = used.get(owner, {}), recorded.get(owner, set())
        yield from (f"{mine[name]} uses {owner} {name}, which is not recorded" for name in sorted(mine.keys() - theirs))
        yield from (f"{owner} {name} is recorded and not used" for name in sorted(theirs - mine.keys()))


def _override_faults(uses: Uses, record: Contract) -> Iterator[str]:
    for (owner, method), definitions in uses.methods.items():
        contract = record["classes"].get(owner, {"members": {}})
        text = contract["members"].get(method, ATTRIBUTE)
        if text == ATTRIBUTE or method == "__init__":  # a class has its own constructor
            continue
        recorded = parameters(text)
        for place, arguments in definitions:
            own = signature(arguments)
            yield from (f"{place} {method} does not take {name}" for name in not_taken(own, recorded))
            for call in contract["calls"].get(method, ()):
                if fault := call_fault(own, recorded, call):
                    yield f"{place} NxDI calls {method}{call}: {fault}"


def _call_faults(uses: Uses, record: Contract) -> Iterator[str]:
    known = {name: text for name, text in record["names"].items() if text.startswith("(")}
    for owner, contract in record["classes"].items():
        known |= {f"{owner}.{name}": text for name, text in contract["members"].items() if text.startswith("(")}
    for call in uses.calls:
        if call.target not in known:
            continue
        function = parameters(known[call.target])
        own = [0] if next(iter(function.parameters), "") in ("self", "cls") else []
        try:
            bind = function.bind_partial if call.stars else function.bind
            bind(*own, *[0] * call.positional, **dict.fromkeys(call.keywords))
        except TypeError as error:
            yield f"{call.place} calls {call.target}: {error}"


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return port_sources()


@pytest.fixture
def record() -> Contract:
    return load_record()


def test_the_port_keeps_to_the_record(sources: dict[str, str], record: Contract) -> None:
    found = faults(read_uses(sources), record)
    mend = "where the port is right, run python -m tests.nxdi.contract; a new name of its own can be added by hand"
    assert not found, "\n".join([f"recorded from {versions(record)}; {mend}", *found])


def test_inputs_stand_where_the_traced_forward_takes_them(sources: dict[str, str], record: Contract) -> None:
    order = [*parameters(record["classes"][MODEL]["members"]["forward"]).parameters][1:]
    assert order[:5] == ["input_ids", "attention_mask", "position_ids", "seq_ids", "sampling_params"]
    tree = ast.parse(sources["modeling/nxdi/wrapper.py"])
    places = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert order[places["_PREV_HIDDEN"]] == "prev_hidden"
    assert order[places["_ADAPTER_IDS"]] == "adapter_ids"
    assert order[places["_BLOCK_TABLE"]] == "active_block_table"


def _renamed(owner: str, method: str, before: str, after: str) -> Callable[[Contract], None]:
    def change(record: Contract) -> None:
        members = record["classes"][owner]["members"]
        assert before in members[method]
        members[method] = members[method].replace(before, after)

    return change


def _option_is_gone(record: Contract) -> None:
    del record["classes"][OPTIONS]["members"]["pa_num_blocks"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _renamed(APPLICATION, "_get_model_outputs", "slot_mapping", "slots"),
            "_get_model_outputs does not take slots",
        ),
        (_renamed(MODEL, "_is_context_encoding", "input_ids", "tokens"), "_is_context_encoding does not take tokens"),
        (_option_is_gone, "pa_num_blocks, which is not recorded"),
    ],
)
def test_another_nxdi_is_noticed(
    sources: dict[str, str], record: Contract, change: Callable[[Contract], None], message: str
) -> None:
    change(record)
    assert any(message in fault for fault in faults(read_uses(sources), record))


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        (
            "register.py",
            "from __future__ import annotations\n",
            "from neuronx_distributed_inference.utils.constants import OTHER\n",
            "constants.OTHER, which is not recorded",
        ),
        ("moe.py", "initialize_moe_module", "shared_expert", "initialize_moe_module is recorded and not used"),
        ("causal_lm.py", "        tf_args: Any = None,\n", "", "_get_model_outputs does not take tf_args"),
        (
            "causal_lm.py",
            "        position_ids: Tensor,\n        seq_ids: Tensor,\n",
            "        seq_ids: Tensor,\n        position_ids: Tensor,\n",
            "gets position_ids for seq_ids",
        ),
        ("cache.py", "def get_kv_by_layer_id", "def get_kv_of_layer", "get_kv_of_layer, which is not recorded"),
        ("model.py", "use_spmd_rank=", "use_rank=", "unexpected keyword argument 'use_rank'"),
        ("config.py", '"fused_qkv"', '"fused_all"', "fused_all, which is not recorded"),
        ("tracing.py", "device=device)\n", "place=device)\n", "unexpected keyword argument 'place'"),
    ],
)
def test_another_port_is_noticed(
    sources: dict[str, str], record: Contract, file: str, before: str, after: str, message: str
) -> None:
    path = f"modeling/nxdi/{file}"
    assert before in sources[path]
    changed = {**sources, path: sources[path].replace(before, after)}
    assert any(message in fault for fault in faults(read_uses(changed), record))


@pytest.mark.nxdi
def test_a_change_of_the_real_nxdi_is_named(
    sources: dict[str, str], record: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of NxDI is imported before it is changed here: a module first imported meanwhile would keep what it found.
    import nxdi_qwen.modeling.nxdi.causal_lm  # noqa: F401  # isort: skip
    from neuronx_distributed_inference.models import model_wrapper

    def pad_inputs(self: Any, *args: Any, pad: str = "first_fit") -> None: ...

    monkeypatch.setattr(model_wrapper.ModelWrapper, "pad_inputs", pad_inputs)
    monkeypatch.setattr(model_wrapper, "SPECULATION_MODEL_TAG", "verification_model")
    monkeypatch.delattr(model_wrapper.ModelWrapper, "get_model_instance")
    monkeypatch.setattr(model_wrapper.ModelWrapper, "_table_width", 0, raising=False)
    changes = differences(record, real_contract(read_uses(sources)))
    for expected in (
        "ModelWrapper members _table_width: recorded nothing, installed attribute",
        "ModelWrapper members pad_inputs: recorded (self, *args, pad_type='first_fit'), installed (self, *args, pad=",
        "ModelWrapper members get_model_instance: recorded (self), installed missing",
        "SPECULATION_MODEL_TAG: recorded 'speculation_model', installed 'verification_model'",
    ):
        assert any(expected in line for line in changes), changes


@pytest.mark.nxdi
def test_the_record_is_that_of_the_real_nxdi(sources: dict[str, str], record: Contract) -> None:
    real = real_contract(read_uses(sources))
    changes = differences(record, real)
    assert not changes, f"recorded from {versions(record)}, installed {versions(real)}:\n" + "\n".join(changes)

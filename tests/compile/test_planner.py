"""The planner against what it plans: bytes of real artifacts, operations that torch counts in Hugging Face's model,
drawn experts; and what it refuses, with an answer that is then accepted."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.cpu import CompileOptions, compile_cpu
from nxdi_qwen.compile.instances import groupings, instance_names, machine
from nxdi_qwen.compile.planner import LABEL, Shard, plan, slots_by_degree
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.modeling.partition import Parallel, allowed_degrees
from nxdi_qwen.modeling.presets import PRESETS, preset
from tests.artifacts import checkpoint_of
from tests.hf_fixtures import FIXTURES, hf_model, prompt_ids
from tests.support import loaded_fixture

TRN2 = machine("trn2.3xlarge", 2)
GIB = 1 << 30


def test_the_machines_are_those_of_the_documentation() -> None:
    """AWS Neuron documentation: Trainium2, Trainium3, Amazon EC2 Trn2 architecture, logical NeuronCores."""
    sizes = {(name, size): machine(name, size) for name in instance_names() for size in groupings()}
    assert {key: on.cores for key, on in sizes.items()} == {
        ("trn2.3xlarge", 1): 8,
        ("trn2.3xlarge", 2): 4,
        ("trn2.48xlarge", 1): 128,
        ("trn2.48xlarge", 2): 64,
        ("trn3-chip", 1): 8,
        ("trn3-chip", 2): 4,
    }
    assert TRN2.memory_bytes == 24 * GIB and TRN2.bandwidth == pytest.approx(0.725e12)
    assert TRN2.flops["bfloat16"] == pytest.approx(667e12 / 4)
    trn3 = sizes["trn3-chip", 1]
    assert (trn3.memory_bytes, trn3.bandwidth) == (18 * GIB, pytest.approx(4.9e12 / 8))
    assert trn3.flops["bfloat16"] == pytest.approx(671e12 / 8)
    assert all("AWS Neuron documentation" in on.sources["chip"] for on in sizes.values())
    assert all(0 < on.usable_bytes == on.memory_bytes - on.reserve_bytes for on in sizes.values())


@pytest.mark.parametrize(
    ("name", "size", "message"), [("inf2", 2, "no instance 'inf2'"), ("trn3-chip", 3, "use 1 or 2")]
)
def test_an_unknown_machine_is_refused(name: str, size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        machine(name, size)


ARTIFACTS = [
    ("qwen3_5_moe", 1, 1),
    ("qwen3_5_moe", 2, 1),
    ("qwen3_5_moe", 4, 2),
    ("qwen3_5", 2, 1),
    ("qwen3_5", 4, 1),
    ("qwen3_next_mixed", 4, 1),
]


@pytest.mark.parametrize(("name", "degree", "expert_degree"), ARTIFACTS)
def test_bytes_are_those_that_cpu_artifacts_allocate(
    name: str, degree: int, expert_degree: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every rank's weights as they are loaded, and the state that the artifact's graphs take."""
    slots, length = 3, 200
    source = ModelSource.from_checkpoint(checkpoint_of(tmp_path_factory, name))
    options = CompileOptions(slots, length, (64,), "bfloat16", degree=degree, expert_degree=expert_degree)
    compile_cpu(source, tmp_path / "artifact", options)
    manifest = open_artifact(tmp_path / "artifact")
    planned = Shard(source.config, "bfloat16", degree, expert_degree)
    assert len(manifest.weights) == degree
    for entry in manifest.weights:
        weights = load_file(tmp_path / "artifact" / entry.file)
        assert planned.weight_bytes == pytest.approx(sum(tensor.nbytes for tensor in weights.values()), rel=0.01)
    state = [torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"])) for tensor in manifest.state]
    keys_and_values = [tensor.nbytes for tensor in state if length in tensor.shape]
    kv, recurrent = planned.slot_bytes(length)
    assert slots * kv == pytest.approx(sum(keys_and_values), rel=0.01) and len(keys_and_values) == 2
    assert slots * (kv + recurrent) == pytest.approx(sum(tensor.nbytes for tensor in state), rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_every_rank_of_a_public_model_has_the_planned_bytes(name: str) -> None:
    """The parameters and buffers of the model's own modules, on the meta device."""
    for degree in allowed_degrees(preset(name)):
        planned = Shard(preset(name), "bfloat16", degree).weight_bytes
        for rank in {0, degree // 2, degree - 1}:
            with torch.device("meta"):
                model = HybridCausalLM(preset(name), torch.bfloat16, Parallel(degree, rank))
            tensors = [*model.parameters(), *model.buffers()]
            assert planned == sum(tensor.nbytes for tensor in tensors), (degree, rank)


@pytest.mark.parametrize("name", FIXTURES)
def test_weights_at_degree_1_are_those_of_hugging_face(name: str) -> None:
    shard = Shard(loaded_fixture(name).config, "float32", 1)
    reference = sum(parameter.nbytes for parameter in hf_model(name).parameters())
    derived = 4 * shard.config.rotary_dim // 2 + 8  # rope.inv_freq, and the rank
    assert shard.weight_bytes == reference + derived


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_decode_operations_are_those_that_torch_counts(name: str) -> None:
    """In matrix products. Without the GDN's own: Hugging Face writes its recurrence as sums, and torch counts the
    convolution for the kernel's padding as well."""
    model, config, context = hf_model(name), loaded_fixture(name).config, 40
    cache, ids = DynamicCache(config=model.config), prompt_ids(model, context)[None]
    model(ids[:, :-1], cache=cache, use_cache=True)
    with FlopCounterMode(display=False) as counter:
        model(ids[:, -1:], cache=cache, use_cache=True)
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counted.items() if operation != torch.ops.aten.convolution)
    recurrence = 6 * config.value_dim * config.linear_key_head_dim
    gated_delta = recurrence + 2 * config.conv_dim * config.linear_conv_kernel_dim
    planned = Shard(config, "float32", 1).decode(TRN2, 1, context).operations
    assert planned - config.layer_types.count("linear_attention") * gated_delta == products


def test_prefill_operations_are_those_of_its_tokens() -> None:
    """Decoding the tokens of a prompt one by one does the same work, but for the head, which prefill uses once."""
    config, tokens = preset("qwen3.5-9b"), 50
    shard = Shard(config, "bfloat16", 2)
    steps = sum(shard.decode(TRN2, 1, context).operations for context in range(1, tokens + 1))
    head = 2 * config.vocab_size * config.hidden_size // 2
    assert shard.prefill(TRN2, tokens).operations == steps - (tokens - 1) * head


def test_work_is_shared_by_the_ranks() -> None:
    """At degrees that replicate and fill up nothing but the router and the shared expert's gate."""
    config = preset("qwen3.5-35b-a3b")
    whole = Shard(config, "bfloat16", 1).prefill(TRN2, 4096).operations
    for degree, experts in ((2, 1), (2, 2)):
        half = Shard(config, "bfloat16", degree, experts).prefill(TRN2, 4096).operations
        replicated = 4096 * 2 * 40 * config.hidden_size * (config.num_experts + 1)
        assert half == (whole + replicated) / 2


def test_decode_reads_the_expected_number_of_distinct_experts() -> None:
    """Against drawn routings, and on the bytes: what a batch adds is its state and its experts."""
    config = preset("qwen3.5-35b-a3b")
    experts, chosen, batch = config.num_experts, config.num_experts_per_tok, 12
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(400, batch, experts, generator=generator).topk(chosen, dim=-1).indices
    drawn = sum(draw.unique().numel() for draw in draws) / len(draws)
    shard = Shard(config, "bfloat16", 4)
    one, many = shard.decode(TRN2, 1, 4096), shard.decode(TRN2, batch, 4096)
    assert one.distinct_experts == pytest.approx(chosen)
    assert many.distinct_experts == pytest.approx(drawn, rel=0.01)
    kv, state = shard.slot_bytes(4096)
    expert_bytes = 40 * 3 * config.hidden_size * 512 * 2 / 4  # layers, matrices, H, I, bytes, ranks
    added = (batch - 1) * (kv + 2 * state) + (drawn - chosen) * expert_bytes
    assert many.bytes_moved - one.bytes_moved == pytest.approx(added, rel=0.01)
    dense = Shard(preset("qwen3.5-9b"), "bfloat16", 1).decode(TRN2, 4, 100)
    assert dense.distinct_experts is None


def test_floors_are_bytes_over_bandwidth_or_operations_over_peak() -> None:
    """By hand for 27B at degree 4: 0.725 TB/s and 166.75 TFLOPS a core; 64 layers, 16 with attention over 6 query heads
    and one KV head of 256, 48 with 12 recurrent heads of 128 x 128."""
    shard = Shard(preset("qwen3.5-27b"), "bfloat16", 4)
    assert shard.slot_bytes(1000) == (16 * 2 * 1000 * 256 * 2, 48 * (12 * 128 * 128 * 4 + 20 * 128 * 3 * 2))
    embedding = 248320 * 5120 * 2 // 4
    step = shard.decode(TRN2, 1, 1000)
    kv, state = shard.slot_bytes(1000)
    assert step.bytes_moved == shard.weight_bytes - embedding + kv + 2 * state
    assert step.bound == "memory" and step.seconds == pytest.approx(step.bytes_moved / 0.725e12)
    assert step.tokens_per_second == pytest.approx(1 / step.seconds)
    prompt = shard.prefill(TRN2, 32768)
    assert prompt.bound == "compute" and prompt.seconds == pytest.approx(prompt.operations / 166.75e12)
    # Near 2 operations a parameter and token; attention adds a sixth at this length.
    assert prompt.operations == pytest.approx(2 * 25.6e9 / 4 * 32768 * 1.13, rel=0.05)


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "qwen3.5-27b", "qwen3-next-80b-a3b", "qwen3.5-397b-a17b"])
def test_slots_and_contexts_fill_the_memory_and_no_more(name: str) -> None:
    config, fitting = preset(name), 0
    for instance in instance_names():
        for size in groupings():
            on = machine(instance, size)
            for degree in (degree for degree in allowed_degrees(config) if degree <= on.cores):
                shard = Shard(config, "bfloat16", degree)
                for context in (1, 2048, 262144):
                    slots = shard.slots(on, context)
                    fitting += slots > 0
                    assert slots == 0 or shard.needed(slots, context) <= on.usable_bytes
                    assert shard.needed(slots + 1, context) > on.usable_bytes
                for slots in (1, 16):
                    longest = shard.largest_context(on, slots)
                    assert longest == 0 or shard.needed(slots, longest) <= on.usable_bytes
                    assert longest == 262144 or shard.needed(slots, longest + 1) > on.usable_bytes
    assert fitting > 0


def test_a_plan_says_everything_as_json() -> None:
    result = plan(preset("qwen3-next-80b-a3b"), "next", machine("trn2.48xlarge", 2), 16, 4, batch=8, max_length=5000)
    values = json.loads(json.dumps(dataclasses.asdict(result)))
    assert values["label"] == LABEL and "nothing measured on hardware" in LABEL
    assert (values["degree"], values["expert_degree"], values["replicas"]) == (16, 4, 4)
    assert [row["context"] for row in values["contexts"]] == [1024, 4096, 5000, 16384, 65536, 262144]
    slots = [row["slots"] for row in values["contexts"]]
    assert slots == sorted(slots, reverse=True) and slots[2] >= 8
    assert values["largest_context"] == 262144 > values["largest_context_of_batch"] > 5000
    assert values["decode"]["batch"] == 8 and values["decode"]["context"] == 5000
    assert values["weight_bytes"] + values["free_bytes"] == 22 * GIB
    assert set(values["machine"]["sources"]) == {"chip", "instance", "logical cores", "reserve"}


def test_without_room_for_a_slot_there_is_no_floor() -> None:
    # 35B-A3B fills a core of 12 GiB at degree 8 so far that the longest context has no place.
    config = dataclasses.replace(preset("qwen3.5-35b-a3b"), max_position_embeddings=1 << 20)
    result = plan(config, "longer", machine("trn2.3xlarge", 1), 8)
    last = result.contexts[-1]
    assert (last.context, last.slots, last.decode_one, last.decode_all, last.prefill) == (1 << 20, 0, None, None, None)
    assert 262144 < result.largest_context < 1 << 20


def test_degrees_to_compare() -> None:
    config = preset("qwen3.5-35b-a3b")
    asked = plan(config, "moe", machine("trn2.48xlarge", 2), 8, 2)
    table = slots_by_degree(config, machine("trn2.48xlarge", 2), asked, [1024, 65536])
    assert list(table) == [4, 8, 16, 32]  # 1 and 2 do not fit; 64 is refused
    assert table[8] == [asked.contexts[0].slots, next(row.slots for row in asked.contexts if row.context == 65536)]


REFUSED = {
    "more than memory": ("qwen3.5-27b", "trn2.3xlarge", 2, 1, {}, "needs 25.18 GiB a core"),
    "more than any degree of the instance": ("qwen3.5-397b-a17b", "trn2.3xlarge", 4, 1, {}, "needs 184.8"),
    "more cores than there are": ("qwen3.5-27b", "trn2.3xlarge", 8, 1, {}, "more than the 4 cores of trn2.3xlarge"),
    "a degree that the model refuses": ("qwen3.5-9b", "trn2.3xlarge", 3, 1, {}, "degree 3 does not fit"),
    "no value heads left": ("qwen3.5-9b", "trn2.48xlarge", 64, 1, {}, "degree 64 is refused"),
    "degree 0": ("qwen3.5-9b", "trn2.3xlarge", 0, 1, {}, "degree 0 is out of range"),
    "experts of a dense model": ("qwen3.5-9b", "trn2.3xlarge", 4, 2, {}, "expert degree 2 is for models with experts"),
    "experts do not divide": ("qwen3.5-35b-a3b", "trn2.3xlarge", 4, 3, {}, "expert degree 3 does not divide degree 4"),
    "expert degree 0": ("qwen3.5-35b-a3b", "trn2.3xlarge", 4, 0, {}, "expert degree 0"),
    "the batch": ("qwen3.5-27b", "trn2.3xlarge", 4, 1, {"batch": 40, "max_length": 16384}, "40 x 16384 tokens"),
    "the batch on any machine": ("qwen3.5-27b", "trn2.3xlarge", 4, 1, {"batch": 99, "max_length": 262144}, "no known"),
    "smaller cores": ("qwen3.5-35b-a3b", "trn3-chip", 1, 1, {"dtype": "float32"}, "a core of trn3-chip has 34.00"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_and_the_answer_is_accepted(case: str) -> None:
    name, instance, degree, experts, rest, message = REFUSED[case]
    with pytest.raises(InputError) as caught:
        plan(preset(name), name, machine(instance, 2), degree, experts, **rest)
    text = str(caught.value)
    assert message in text and "\n" not in text
    answer = dict(re.findall(r"--([a-z-]+) ([\w.-]*\w)", text.partition("the nearest that fits is")[2].split(";")[0]))
    less = dict(re.findall(r"--([a-z-]+) (\d+)", text.partition("at this degree")[2]))
    assert answer or less
    if answer:
        on = machine(answer.get("instance", instance), int(answer.get("logical-cores", 2)))
        plan(preset(name), name, on, int(answer["degree"]), int(answer.get("expert-degree", experts)), **rest)
    for option, key in (("batch-size", "batch"), ("max-length", "max_length")):
        if option in less:
            plan(preset(name), name, machine(instance, 2), degree, experts, **(rest | {key: int(less[option])}))
            with pytest.raises(InputError):
                plan(preset(name), name, machine(instance, 2), degree, experts, **(rest | {key: int(less[option]) + 1}))


def test_the_nearest_degree_is_the_nearest() -> None:
    def answer(name: str, instance: str, degree: int) -> str:
        with pytest.raises(InputError) as caught:
            plan(preset(name), name, machine(instance, 2), degree)
        return str(caught.value).partition("the nearest that fits is ")[2].split(";")[0]

    assert answer("qwen3.5-27b", "trn2.48xlarge", 1) == "--degree 4"
    assert answer("qwen3.5-9b", "trn2.48xlarge", 64) == "--degree 32"
    assert answer("qwen3.5-9b", "trn2.48xlarge", 6) == "--degree 8"
    assert answer("qwen3.5-122b-a10b", "trn2.3xlarge", 4) == "--degree 16 --instance trn2.48xlarge"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ({"batch": 0}, "batch size 0 is not possible"),
        ({"max_length": 0}, "maximum length 0 is out of range"),
        ({"max_length": 262145}, "takes 1 to 262144 tokens"),
    ],
)
def test_bad_requests_are_refused(rest: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(preset("qwen3.5-9b"), "qwen3.5-9b", TRN2, 4, **rest)


def test_a_model_with_a_short_context() -> None:
    config: ModelConfig = dataclasses.replace(preset("qwen3.5-0.8b"), max_position_embeddings=300)
    result = plan(config, "short", TRN2, 1, max_length=200)
    assert [row.context for row in result.contexts] == [200, 300]
    assert result.largest_context == 300 and math.isfinite(result.contexts[0].prefill.seconds)

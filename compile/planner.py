"""What a model needs of a machine at a degree: memory per core, requests that fit, and roofline floors of the time.

Bytes are summed from the shapes that the artifact's weights and state have (`weight_specs`, `describe_state`). Times
are floors: the larger of bytes moved over bandwidth and operations over peak, for one core, with nothing else counted.
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass

from nxdi_qwen.compile.instances import Machine, groupings, instance_names, machine
from nxdi_qwen.compile.source import DTYPES
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import Parallel, allowed_degrees, check_degree
from nxdi_qwen.modeling.state import StateTensor, describe_state
from nxdi_qwen.modeling.weights import weight_specs

LABEL = "roofline floor, nothing measured on hardware"
ASSUMPTIONS = (
    "bytes of weights and state: exact, from the shapes of the compiled artifact; the reserve is an estimate",
    "decode floor: weights once a step, the whole context's keys and values of every slot, GDN state read and written",
    "decode of experts: the distinct experts that a batch is expected to choose, if routing were uniform",
    "prefill floor: one prompt as long as the context, causal attention, the recurrence's fewest operations",
    "not counted: collectives, activations, host and launch time, padding to buckets",
)
_TABLE_CONTEXTS = (1024, 4096, 16384, 65536, 262144)


@dataclass(frozen=True)
class Floor:
    """The least time of one forward pass over `tokens` tokens of each of `batch` requests, on one core of the degree.

    `bytes_moved` from and to memory, `operations` (a multiply-add is two), `seconds`, what bounds it ("memory" or
    "compute"), the tokens per second that no run can exceed, and the experts of a layer, on all ranks together, that
    the pass is expected to read (None for a dense model).
    """

    batch: int
    tokens: int
    context: int
    bytes_moved: int
    operations: int
    seconds: float
    bound: str
    tokens_per_second: float
    distinct_experts: float | None


@dataclass(frozen=True)
class ContextPlan:
    """What a context length costs. Bytes are per slot and core; `slots` fit beside the weights; the floors of decode
    are for one request and for all `slots`. Without room for a slot there are no floors.
    """

    context: int
    kv_bytes_per_slot: int
    state_bytes_per_slot: int
    slots: int
    decode_one: Floor | None
    decode_all: Floor | None
    prefill: Floor | None


@dataclass(frozen=True)
class Plan:
    """A model on a machine. Bytes are per core; `replicas` of the model fit the instance; contexts in tokens, 0 where
    not even one token fits.
    """

    label: str
    model: str
    dtype: str
    degree: int
    expert_degree: int
    machine: Machine
    replicas: int
    weight_bytes: int
    free_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_slot: int
    batch: int
    max_length: int
    decode: Floor
    largest_context: int
    largest_context_of_batch: int
    longest_context_of_model: int
    contexts: tuple[ContextPlan, ...]
    assumptions: tuple[str, ...] = ASSUMPTIONS


class Shard:
    """One rank of a model: its bytes and its work. All ranks have the same shapes, so rank 0 stands for each."""

    def __init__(self, config: ModelConfig, dtype: str, degree: int, expert_degree: int = 1) -> None:
        """Raises InputError for a degree that the model refuses."""
        check_degree(config, degree, expert_degree)
        self.config = config
        self.dtype = dtype
        self.parallel = Parallel(degree, 0, expert_degree)
        self.specs = weight_specs(config, DTYPES[dtype], self.parallel)
        self.weight_bytes = sum(math.prod(shape) * kind.itemsize for shape, kind in self.specs.values())

    def slot_bytes(self, context: int) -> tuple[int, int]:
        """(keys and values, GDN state) of a request of up to `context` tokens."""
        kv = state = 0
        for tensor in self._state(context):
            if tensor.role in ("key", "value"):
                kv += tensor.bytes_per_slot
            else:
                state += tensor.bytes_per_slot
        return kv, state

    def needed(self, slots: int, context: int) -> int:
        """Bytes of the weights and of `slots` slots."""
        return self.weight_bytes + slots * sum(self.slot_bytes(context))

    def slots(self, on: Machine, context: int) -> int:
        """Slots of `context` tokens that fit beside the weights."""
        return max(0, (on.usable_bytes - self.weight_bytes) // sum(self.slot_bytes(context)))

    def largest_context(self, on: Machine, slots: int) -> int:
        """The longest context that `slots` slots can have, at most the model's longest; 0 if none."""
        lengths = range(1, self.config.max_position_embeddings + 1)
        return bisect.bisect_right(lengths, on.usable_bytes, key=lambda context: self.needed(slots, context))

    def decode(self, on: Machine, batch: int, context: int) -> Floor:
        """One token for each of `batch` requests that hold `context` tokens."""
        kv, state = self.slot_bytes(context)
        bytes_moved = self._weights_read(batch) + batch * (kv + 2 * state)
        operations = batch * (
            self._layer_operations() + self._head_operations() + 4 * self._attention_width() * context
        )
        return self._floor(on, batch, 1, context, bytes_moved, operations)

    def prefill(self, on: Machine, context: int) -> Floor:
        """A prompt of `context` tokens, the head for its last one. Token t attends to t tokens: t (t + 1) / 2 pairs."""
        bytes_moved = self._weights_read(context) + sum(self.slot_bytes(context))
        attention = 2 * self._attention_width() * context * (context + 1)
        operations = context * self._layer_operations() + self._head_operations() + attention
        return self._floor(on, 1, context, context, bytes_moved, operations)

    def _floor(self, on: Machine, batch: int, tokens: int, context: int, moved: float, operations: float) -> Floor:
        memory, compute = moved / on.bandwidth, operations / on.flops[self.dtype]
        seconds = max(memory, compute)
        bound = "memory" if memory >= compute else "compute"
        rate = batch * tokens / seconds
        experts = self.config.num_experts
        distinct = experts * _expert_share(self.config, batch * tokens) if experts else None
        return Floor(batch, tokens, context, round(moved), round(operations), seconds, bound, rate, distinct)

    def _state(self, context: int) -> tuple[StateTensor, ...]:
        return describe_state(self.config, 1, context, DTYPES[self.dtype], self.parallel).tensors

    def _weights_read(self, tokens: int) -> float:
        """Bytes of weights that a pass over `tokens` tokens reads. Of the embedding: rows, not worth counting."""
        share = _expert_share(self.config, tokens)
        return sum(
            math.prod(shape) * kind.itemsize * (share if _is_expert(name) else 1.0)
            for name, (shape, kind) in self.specs.items()
            if name != "embed_tokens.weight" or self.config.tie_word_embeddings
        )

    def _head_operations(self) -> int:
        """Operations of the head for a token."""
        head = "embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        return 2 * math.prod(self.specs[head][0])

    def _layer_operations(self) -> float:
        """Operations of all layers for a token, without attention over the context.

        Two for every entry of a matrix that a token meets; a token meets the share k / E of the experts. The recurrence
        reads S^T k, adds k delta^T and reads S^T q: six for every entry of a recurrent state.
        """
        share = _expert_share(self.config, 1)
        matrices = sum(
            2 * math.prod(shape) * (share if _is_expert(name) else 1.0)
            for name, (shape, _) in self.specs.items()
            if len(shape) > 1 and name not in ("embed_tokens.weight", "lm_head.weight")
        )
        recurrent = sum(math.prod(tensor.shape[1:]) for tensor in self._state(1) if tensor.role == "recurrent")
        return matrices + 6 * recurrent

    def _attention_width(self) -> int:
        """Query heads times head_dim, summed over the attention layers: what the output projections take in."""
        return sum(shape[1] for name, (shape, _) in self.specs.items() if name.endswith("self_attn.o_proj.weight"))


def plan(
    config: ModelConfig,
    name: str,
    on: Machine,
    degree: int,
    expert_degree: int = 1,
    dtype: str = "bfloat16",
    batch: int = 1,
    max_length: int = 2048,
) -> Plan:
    """The plan of `batch` requests of up to `max_length` tokens. `name` is how messages call the model.

    Raises InputError for what cannot be: it says why, and names the nearest that can.
    """
    longest = config.max_position_embeddings
    if batch < 1:
        raise InputError(f"batch size {batch} is not possible: give at least 1")
    if not 1 <= max_length <= longest:
        raise InputError(f"maximum length {max_length} is out of range: {name} takes 1 to {longest} tokens")
    shard = _checked_shard(config, name, on, degree, expert_degree, dtype, batch, max_length)
    kv_one, state = shard.slot_bytes(1)
    lengths = sorted({context for context in (*_TABLE_CONTEXTS, max_length, longest) if context <= longest})
    return Plan(
        label=LABEL,
        model=name,
        dtype=dtype,
        degree=degree,
        expert_degree=expert_degree,
        machine=on,
        replicas=on.cores // degree,
        weight_bytes=shard.weight_bytes,
        free_bytes=on.usable_bytes - shard.weight_bytes,
        kv_bytes_per_token=kv_one,
        state_bytes_per_slot=state,
        batch=batch,
        max_length=max_length,
        decode=shard.decode(on, batch, max_length),
        largest_context=shard.largest_context(on, 1),
        largest_context_of_batch=shard.largest_context(on, batch),
        longest_context_of_model=longest,
        contexts=tuple(_context_plan(shard, on, context) for context in lengths),
    )


def slots_by_degree(config: ModelConfig, on: Machine, asked: Plan, contexts: list[int]) -> dict[int, list[int]]:
    """degree -> slots of one replica at each of `contexts`: for the asked degree, and for every other that fits.

    The other degrees without expert parallelism, which changes nothing here: a rank holds the same bytes of experts.
    """
    shards = {degree: _shard(config, asked.dtype, degree, 1) for degree in _degrees(config, on)}
    shards[asked.degree] = _shard(config, asked.dtype, asked.degree, asked.expert_degree)
    table = {degree: [shards[degree].slots(on, context) for context in contexts] for degree in sorted(shards)}
    return {degree: slots for degree, slots in table.items() if any(slots)}


def _context_plan(shard: Shard, on: Machine, context: int) -> ContextPlan:
    kv, state = shard.slot_bytes(context)
    slots = shard.slots(on, context)
    if not slots:
        return ContextPlan(context, kv, state, 0, None, None, None)
    one, every = shard.decode(on, 1, context), shard.decode(on, slots, context)
    return ContextPlan(context, kv, state, slots, one, every, shard.prefill(on, context))


def _checked_shard(
    config: ModelConfig, name: str, on: Machine, degree: int, expert_degree: int, dtype: str, batch: int, context: int
) -> Shard:
    """The asked shard, if the model, the instance and its memory take it."""
    ask = functools.partial(_nearest, config, on, degree, expert_degree, dtype, batch, context)
    try:
        shard = _shard(config, dtype, degree, expert_degree)
    except InputError as error:
        raise InputError(f"{name}: {error}; {ask()}") from error
    if degree > on.cores:
        raise InputError(
            f"degree {degree} is more than the {on.cores} cores of {on.instance} "
            f"at --logical-cores {on.physical_per_logical}; {ask()}"
        )
    if shard.needed(batch, context) > on.usable_bytes:
        raise InputError(
            f"{name} at degree {degree} needs {gib(shard.needed(batch, context))} GiB a core (weights "
            f"{gib(shard.weight_bytes)}, the rest {batch} x {context} tokens), and a core of {on.instance} has "
            f"{gib(on.usable_bytes)} beside the reserve; {ask()}{_less(shard, on, batch, context)}"
        )
    return shard


def _nearest(
    config: ModelConfig, on: Machine, degree: int, expert_degree: int, dtype: str, batch: int, context: int
) -> str:
    """What to ask for instead: the nearest degree that fits, on the same machine or else on another."""
    others = [
        machine(instance, grouping)
        for instance in sorted(instance_names(), key=lambda instance: instance != on.instance)
        for grouping in sorted(groupings(), key=lambda grouping: grouping != on.physical_per_logical)
    ]
    for other in others:
        fits = [
            candidate
            for candidate in _degrees(config, other)
            if _shard(config, dtype, candidate, _expert_degree(config, candidate, expert_degree)).needed(batch, context)
            <= other.usable_bytes
        ]
        if not fits:
            continue
        best = min(fits, key=lambda candidate: (_distance(candidate, degree), -candidate))
        experts = _expert_degree(config, best, expert_degree)
        answer = f"the nearest that fits is --degree {best}"
        if experts != expert_degree:
            answer += f" --expert-degree {experts}"
        if other.instance != on.instance:
            answer += f" --instance {other.instance}"
        if other.physical_per_logical != on.physical_per_logical:
            answer += f" --logical-cores {other.physical_per_logical}"
        return answer
    return "no known instance fits it"


def _degrees(config: ModelConfig, on: Machine) -> list[int]:
    return [degree for degree in allowed_degrees(config) if degree <= on.cores]


def _expert_degree(config: ModelConfig, degree: int, asked: int) -> int:
    """The expert degree nearest to the asked one that the model takes at `degree`, which it takes without one."""

    def runs(experts: int) -> bool:
        try:
            check_degree(config, degree, experts)
        except InputError:
            return False
        return True

    return min((experts for experts in range(1, degree + 1) if runs(experts)), key=lambda some: _distance(some, asked))


def _distance(degree: int, asked: int) -> float:
    """How far apart two degrees are: in doublings."""
    return abs(math.log2(degree / max(1, asked)))


def _less(shard: Shard, on: Machine, batch: int, context: int) -> str:
    """What would fit without another degree, as the end of a message."""
    slots, shorter = shard.slots(on, context), shard.largest_context(on, batch)
    less = [f"--batch-size {slots}"] * (slots > 0) + [f"--max-length {shorter}"] * (shorter > 0)
    return f"; at this degree {' or '.join(less)} fits" if less else ""


@functools.lru_cache(maxsize=32)
def _shard(config: ModelConfig, dtype: str, degree: int, expert_degree: int) -> Shard:
    return Shard(config, dtype, degree, expert_degree)


def _is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def _expert_share(config: ModelConfig, tokens: int) -> float:
    """The share of the experts that `tokens` tokens are expected to choose, if each chose k of E at random."""
    return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens if config.num_experts else 0.0


def gib(count: float) -> str:
    """Bytes in GiB, as the messages and tables show them."""
    return f"{count / (1 << 30):,.2f}"

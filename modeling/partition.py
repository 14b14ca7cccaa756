"""The cutting rule: which part of a whole parameter or state tensor each rank owns.

Heads come in groups that must stay together: the query heads of one KV head, the value heads of one key head. With no
more ranks than groups, a rank owns whole groups. With more, the ranks share each group: the group's own head (key or
KV) is held by all of its ranks, and its members are dealt out in order, the same number to every rank. Where that
does not come out even, the missing members are zeros, which add nothing: their output projection is zero as well.

So every part is one contiguous range of the whole, zero-filled at its end, along one dimension. That takes parameters
whose outer index is the head, with the segments of a checkpoint's fused projections stored apart.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError

MAX_DEGREE = 64


class Over(enum.Enum):
    """Which ranks a dimension is cut over: all, the expert-parallel groups, or the ranks within one of them."""

    ALL = "all"
    EXPERT = "expert"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Parallel:
    """Where a process stands: `rank` of `degree`; `expert_degree` groups of neighbouring ranks share out the experts.

    Within a group, experts are cut along their intermediate size; all other layers are cut over all ranks.
    """

    degree: int = 1
    rank: int = 0
    expert_degree: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.degree <= MAX_DEGREE:
            raise InputError(f"degree {self.degree} is out of range: use 1 to {MAX_DEGREE}")
        if self.expert_degree < 1 or self.degree % self.expert_degree:
            raise InputError(f"expert degree {self.expert_degree} does not divide degree {self.degree}")
        if not 0 <= self.rank < self.degree:
            raise InputError(f"rank {self.rank} does not exist at degree {self.degree}")

    def place(self, over: Over) -> tuple[int, int]:
        """(number of parts, which of them this rank owns)."""
        within = self.degree // self.expert_degree
        if over is Over.EXPERT:
            return self.expert_degree, self.rank // within
        if over is Over.TENSOR:
            return within, self.rank % within
        return self.degree, self.rank


SINGLE = Parallel()


@dataclass(frozen=True)
class Part:
    """Entries [start, stop) of the whole, filled up with zeros to `size`."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Cut:
    """Dimension `dim` holds `groups` groups of `members` heads of `unit` entries.

    `shared`: every rank of a group holds all of it (key and KV heads); otherwise its members are dealt out.
    """

    dim: int
    groups: int
    members: int = 1
    unit: int = 1
    shared: bool = False
    over: Over = Over.ALL

    @property
    def size(self) -> int:
        """Entries of the whole dimension."""
        return self.groups * self.members * self.unit

    def part(self, parallel: Parallel) -> Part:
        """What this rank owns. Raises InputError where the groups and the ranks do not fit each other."""
        ranks, rank = parallel.place(self.over)
        if self.groups % ranks == 0:
            size = self.size // ranks
            return Part(rank * size, (rank + 1) * size, size)
        if ranks % self.groups:
            raise InputError(f"{self.groups} groups of heads or columns do not fit {ranks} ranks")
        sharers = ranks // self.groups
        group, position = divmod(rank, sharers)
        first = group * self.members * self.unit
        if self.shared:
            size = self.members * self.unit
            return Part(first, first + size, size)
        each = -(-self.members // sharers)
        start, stop = (min(position * each + n, self.members) for n in (0, each))
        return Part(first + start * self.unit, first + stop * self.unit, each * self.unit)


def even(dim: int, size: int, over: Over = Over.ALL) -> Cut:
    """`size` columns, experts or vocabulary entries, dealt out evenly."""
    return Cut(dim, groups=size, over=over)


def key_heads(config: ModelConfig, dim: int, unit: int) -> Cut:
    """The GDN key heads."""
    return Cut(dim, config.linear_num_key_heads, unit=unit, shared=True)


def value_heads(config: ModelConfig, dim: int, unit: int) -> Cut:
    """The GDN value heads, in groups by key head."""
    ratio = config.linear_num_value_heads // config.linear_num_key_heads
    return Cut(dim, config.linear_num_key_heads, ratio, unit)


def kv_heads(config: ModelConfig, dim: int, unit: int) -> Cut:
    """The KV heads of attention."""
    return Cut(dim, config.num_key_value_heads, unit=unit, shared=True)


def query_heads(config: ModelConfig, dim: int, unit: int) -> Cut:
    """The query heads of attention, in groups by KV head."""
    ratio = config.num_attention_heads // config.num_key_value_heads
    return Cut(dim, config.num_key_value_heads, ratio, unit)


def local_shape(shape: Sequence[int], cuts: Sequence[Cut], parallel: Parallel) -> tuple[int, ...]:
    """The shape of this rank's part of a whole of `shape`."""
    local = list(shape)
    for cut in cuts:
        local[cut.dim] = cut.part(parallel).size
    return tuple(local)


def take_part(whole: Tensor, cuts: Sequence[Cut], parallel: Parallel) -> Tensor:
    """This rank's part of `whole`, a view where nothing is filled up."""
    for cut in cuts:
        part = cut.part(parallel)
        whole = whole.narrow(cut.dim, part.start, part.stop - part.start)
        missing = part.size - (part.stop - part.start)
        if missing:
            shape = [*whole.shape[: cut.dim], missing, *whole.shape[cut.dim + 1 :]]
            whole = torch.cat([whole, whole.new_zeros(shape)], dim=cut.dim)
    return whole


def put_part(whole: Tensor, part: Tensor, cuts: Sequence[Cut], parallel: Parallel) -> None:
    """The inverse of `take_part`: writes a rank's part into its place in `whole`, without the filling."""
    for cut in cuts:
        own = cut.part(parallel)
        whole = whole.narrow(cut.dim, own.start, own.stop - own.start)
        part = part.narrow(cut.dim, 0, own.stop - own.start)
    whole.copy_(part)


def check_degree(config: ModelConfig, degree: int, expert_degree: int = 1) -> None:
    """Raises InputError, with the reason, where a model does not run at a degree.

    Refused beside what does not divide: degrees at which half of the ranks or more would hold no GDN value head. Three
    quarters of the layers are GDN; such ranks would take memory and collectives, and shorten nothing.
    """
    Parallel(degree, 0, expert_degree)
    for name, count in (
        ("linear_num_key_heads", config.linear_num_key_heads),
        ("num_key_value_heads", config.num_key_value_heads),
    ):
        if count % degree and degree % count:
            raise InputError(f"degree {degree} does not fit {name} {count}: use a divisor or a multiple of it")
    held = value_heads(config, 0, 1).part(Parallel(degree)).size * degree
    if 2 * config.linear_num_value_heads <= held and degree > 1:
        raise InputError(
            f"degree {degree} is refused: {config.linear_num_value_heads} GDN value heads would fill at most half "
            f"of the ranks' places; use a smaller degree"
        )
    widths = {"vocab_size": config.vocab_size, "intermediate_size": config.intermediate_size}
    widths["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    for name, width in widths.items():
        if width and width % degree:
            raise InputError(f"degree {degree} does not divide {name} {width}")
    if expert_degree > 1 and not config.num_experts:
        raise InputError(f"expert degree {expert_degree} is for models with experts: leave it out")
    if config.num_experts % expert_degree:
        raise InputError(f"expert degree {expert_degree} does not divide num_experts {config.num_experts}")
    within = degree // expert_degree
    if config.moe_intermediate_size and config.moe_intermediate_size % within:
        raise InputError(
            f"{within} ranks to an expert do not divide moe_intermediate_size {config.moe_intermediate_size}"
        )


def allowed_degrees(config: ModelConfig) -> list[int]:
    """The powers of two up to 64 at which a model runs."""

    def runs(degree: int) -> bool:
        try:
            check_degree(config, degree)
        except InputError:
            return False
        return True

    return [degree for degree in (1, 2, 4, 8, 16, 32, 64) if runs(degree)]

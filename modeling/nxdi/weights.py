"""Weights for NxDI: this project's parameters under the names and in the layout of NxDI's modules.

Either everything in memory, for NxD to cut (`joined_state_dict`), or what NxD would write of it, a file a rank, without
ever holding more than a block (`write_nxdi_ranks`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import Cut, Parallel, take_part
from nxdi_qwen.modeling.rope_frequencies import rope_inv_freq
from nxdi_qwen.modeling.weights.blocks import Account, Block, collect, share
from nxdi_qwen.modeling.weights.layout import RANK, ROPE, Specs, weight_cuts, weight_specs
from nxdi_qwen.modeling.weights.write import RankLayout, rank_file, rank_metadata, write_files

_logger = logging.getLogger("Neuron")  # NxDI's, so that a user sees one log

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_OUR_EXPERTS, _OUR_ROUTER = "mlp.experts.", "mlp.router.weight"
_ROUTER = "mlp.routed.router.linear_router.weight"
_EXPERTS = "mlp.routed.expert_mlps."
_GATE_UP, _DOWN = (f"{_EXPERTS}mlp_op.{name}.weight" for name in ("gate_up_proj", "down_proj"))


def joined_parts(whole: Tensor, cuts: tuple[Cut, ...], degree: int) -> Tensor:
    """All ranks' parts of a parameter one after the other: what NxD's contiguous cutting deals out again."""
    if not cuts:
        return whole
    (cut,) = cuts
    return torch.cat([take_part(whole, cuts, Parallel(degree, rank)) for rank in range(degree)], dim=cut.dim)


def joined_state_dict(
    blocks: Iterable[Block], config: ModelConfig, dtype: torch.dtype, degree: int
) -> dict[str, Tensor]:
    """Everything that `NeuronHybridModel` loads, before NxD cuts it for its ranks; the whole model is in memory."""
    cuts = weight_cuts(config, Parallel(degree))
    result: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for name, tensor in collect(blocks, config, dtype):
        if name == RANK:
            continue
        layer, _, part = name.partition(_OUR_EXPERTS)
        if part:
            experts[part] = tensor
            if len(experts) == 3:
                result |= {layer + key: value for key, value in _experts(experts).items()}
                experts = {}
        elif name.endswith(_OUR_ROUTER):
            result[name.replace(_OUR_ROUTER, _ROUTER)] = tensor.to(torch.float32)
        else:
            result[name] = joined_parts(tensor, cuts[name], degree)
    result |= {name: torch.arange(degree, dtype=torch.int32) for name in _rank_names(degree)}
    if config.tie_word_embeddings:
        result[_HEAD] = result[_EMBEDDING].clone()
    return result


def _experts(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """NxD's experts: gate and up side by side, [E, H, 2 I], and down [E, I, H]."""
    gate_up = torch.cat([parts["gate_proj"].transpose(1, 2), parts["up_proj"].transpose(1, 2)], dim=2)
    return {_GATE_UP: gate_up, _DOWN: parts["down_proj"].transpose(1, 2).contiguous()}


def _rank_names(degree: int) -> list[str]:
    """The tensors that tell a traced graph which rank runs it."""
    return ["rank_util.rank", *(["embed_tokens.rank_util.rank"] if degree > 1 else [])]


def write_nxdi_ranks(
    folder: Path,
    ranks: Iterable[int],
    config: ModelConfig,
    dtype: torch.dtype,
    degree: int,
    blocks: Iterable[Block],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the files of `ranks`, of `degree`, into `folder`: the names, shapes, dtypes and bits that NxD's own
    `shard_checkpoint` makes of `joined_state_dict`.

    `blocks` are those of all whole parameters; one of them is in memory at a time. The files get their names when all
    are complete; what was there before stays until then. Raises InputError for a rank that does not exist, and where
    the disk does not take them; ValueError and `progress`: see `write_files`.
    """
    cuts = weight_cuts(config, Parallel(degree))
    layouts = {rank: _layout(config, dtype, Parallel(degree, rank), cuts) for rank in ranks}
    partial = {rank: folder / f"{rank_file(rank)}.partial" for rank in layouts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_files({partial[rank]: each for rank, each in layouts.items()}, Account(config, dtype), blocks, progress)
        # All old files go before the first new one comes: a process that is killed here leaves no mixture of both.
        for rank in layouts:
            (folder / rank_file(rank)).unlink(missing_ok=True)
        for rank, path in partial.items():
            path.replace(folder / rank_file(rank))
    except OSError as error:
        why = f"the weights were not written to {folder} ({error}): make room there and compile again"
        raise InputError(why) from error
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def logged_progress(folder: Path) -> Callable[[int, int], None]:
    """A `progress` that logs every tenth of the way."""
    tenths = 0

    def progress(done: int, total: int) -> None:
        nonlocal tenths
        if 10 * done // total > tenths:
            tenths = 10 * done // total
            _logger.info("Weights to %s: %d %% of %.1f GB", folder, 10 * tenths, total / 1e9)

    return progress


def _layout(config: ModelConfig, dtype: torch.dtype, rank: Parallel, cuts: Mapping[str, tuple[Cut, ...]]) -> RankLayout:
    number = torch.tensor([rank.rank], dtype=torch.int32)
    derived = {ROPE: rope_inv_freq(config)} | dict.fromkeys(_rank_names(rank.degree), number)
    # NxD adds these as it cuts a model with experts.
    experts = (f"layers.{layer}.{_EXPERTS}spmd_rank.rank" for layer, sparse in enumerate(config.moe_layers) if sparse)
    derived |= dict.fromkeys(experts, number)
    specs = _specs(config, dtype, rank) | {name: ((1,), torch.int32) for name in derived if name != ROPE}

    def parts(block: Block) -> Iterator[Block]:
        own = share(block, cuts[block.name], rank)
        if own is None:
            return
        layer, _, part = own.name.partition(_OUR_EXPERTS)
        if part == "down_proj":
            expert, row = own.start
            yield Block(layer + _DOWN, (expert, 0, row), own.data.transpose(1, 2))
        elif part:
            expert, row = own.start
            width = specs[layer + _DOWN][0][1]
            column = row if part == "gate_proj" else width + row
            yield Block(layer + _GATE_UP, (expert, 0, column), own.data.transpose(1, 2))
        elif own.name.endswith(_OUR_ROUTER):
            yield Block(own.name.replace(_OUR_ROUTER, _ROUTER), own.start, own.data.to(torch.float32))
        else:
            yield own
            if own.name == _EMBEDDING and config.tie_word_embeddings:
                yield replace(own, name=_HEAD)

    return RankLayout(specs, rank_metadata(rank), derived, parts)


def _specs(config: ModelConfig, dtype: torch.dtype, rank: Parallel) -> Specs:
    """name -> (shape, dtype) of what blocks bring to a rank."""
    specs: Specs = {}
    for name, (shape, kept) in weight_specs(config, dtype, rank).items():
        layer, _, part = name.partition(_OUR_EXPERTS)
        if part == "gate_proj":
            experts, width, hidden = shape
            specs[layer + _GATE_UP] = (experts, hidden, 2 * width), kept
        elif part == "down_proj":
            experts, hidden, width = shape
            specs[layer + _DOWN] = (experts, width, hidden), kept
        elif name.endswith(_OUR_ROUTER):
            specs[name.replace(_OUR_ROUTER, _ROUTER)] = shape, torch.float32
        elif not part and name != RANK:
            specs[name] = shape, kept
    if config.tie_word_embeddings:
        specs[_HEAD] = specs[_EMBEDDING]
    return specs

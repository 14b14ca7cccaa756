"""The parallel layers without processes: contiguous slices give every rank its own heads, and the ranks add up.

Each half of a model is built here as a smaller model of its own, from slices alone: what a cutter that knows nothing of
heads (NxD's) does with the parameters.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.layers.context import Context, Way
from nxdi_qwen.modeling.model import DecoderLayer, text_positions
from nxdi_qwen.modeling.parallel import ColumnParallelLinear, ParallelLayers, RowParallelLinear, parameter_cuts
from nxdi_qwen.modeling.partition import Over, Parallel, even, take_part
from tests.comparison import relative
from tests.hf_fixtures import FIXTURES, hf_model
from tests.modeling.ported import ported_model

RANKS, ROWS, TOKENS, HELD = 2, 3, 9, 6
RANK = torch.tensor([0])  # of each half, which is a whole model to itself
# Value heads per key head: 2, 3, 3.
NAMES = ["qwen3_next", "qwen3_next_mixed", "qwen3_5"]
CUT = {
    0: [
        *("embed_tokens.weight", "lm_head.weight", "linear_attn.A_log.weight", "linear_attn.dt_bias.weight"),
        *(f"linear_attn.{name}_proj.weight" for name in "qkvzba"),
        *(f"linear_attn.{name}_conv.weight" for name in "qkv"),
        *(f"self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")),
        *(f"{mlp}.{name}_proj.weight" for mlp in ("mlp", "mlp.shared_expert") for name in ("gate", "up")),
    ],
    1: [
        *("linear_attn.out_proj.weight", "self_attn.o_proj.weight", "mlp.experts.gate_proj", "mlp.experts.up_proj"),
        *("mlp.down_proj.weight", "mlp.shared_expert.down_proj.weight"),
    ],
    2: ["mlp.experts.down_proj"],
    None: [
        *("norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight", "linear_attn.norm.weight"),
        *("self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.bias"),
        *("mlp.router.weight", "mlp.shared_expert_gate.weight"),
    ],
}


@pytest.mark.parametrize("degree", [-1, 0, 65])
def test_degrees_out_of_range_are_refused(degree: int) -> None:
    with pytest.raises(InputError, match=f"degree {degree} is out of range: use 1 to 64"):
        Parallel(degree=degree)


def test_a_rank_beyond_the_degree_is_refused() -> None:
    with pytest.raises(InputError, match="rank 1 does not exist at degree 1"):
        Parallel(rank=1)


@pytest.mark.parametrize("name", FIXTURES)
def test_every_parameter_says_where_it_is_cut(name: str) -> None:
    expected = {suffix: dim for dim, suffixes in CUT.items() for suffix in suffixes}
    for parameter_name, parameter in ported_model(name).named_parameters():
        suffix = parameter_name.split(".", 2)[2] if parameter_name.startswith("layers.") else parameter_name
        assert cut_dim(parameter) == expected[suffix], parameter_name
        by_expert = [cut.dim for cut in parameter_cuts(parameter) if cut.over is Over.EXPERT]
        assert by_expert == ([0] if ".experts." in parameter_name else [])
        assert not parameter.requires_grad
        for cut in parameter_cuts(parameter):
            assert parameter.shape[cut.dim] == cut.size
        if cut_dim(parameter) is not None:
            assert parameter.shape[cut_dim(parameter)] % RANKS == 0


def test_linear_layers() -> None:
    """Both kinds at degree 1; the bias of a row-parallel layer is not cut, for it is added once."""
    x, parallel = torch.randn(5, 12, generator=torch.Generator().manual_seed(0)), Parallel()
    column = ColumnParallelLinear(12, even(0, 8), parallel, torch.float32, bias=True)
    row = RowParallelLinear(even(1, 12), 8, parallel, torch.float32, bias=True)
    for layer in (column, row):
        randomise(layer)
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert column.bias is not None and cut_dim(column.bias) == 0
    assert row.bias is not None and parameter_cuts(row.bias) == ()


def cut_dim(parameter: nn.Parameter) -> int | None:
    """The dimension that is cut over the ranks when experts are not cut by number; None where there is none."""
    dims = [cut.dim for cut in parameter_cuts(parameter) if cut.over is not Over.EXPERT]
    assert len(dims) <= 1
    return dims[0] if dims else None


def slice_of(parameter: nn.Parameter, rank: int) -> Tensor:
    """The cutting rule, by a general cutter that knows nothing of heads; ours agrees with it."""
    dim = cut_dim(parameter)
    part = parameter.data if dim is None else parameter.data.chunk(RANKS, dim)[rank]
    assert torch.equal(part, take_part(parameter.data, parameter_cuts(parameter), Parallel(RANKS, rank)))
    return part


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5


def halved(config: ModelConfig) -> ModelConfig:
    names = ["num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"]
    names += ["intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"]
    sizes = {name: size // RANKS for name in names if (size := getattr(config, name)) is not None}
    return dataclasses.replace(config, **sizes)


def rank_layers(layer: DecoderLayer, config: ModelConfig, index: int) -> list[DecoderLayer]:
    """The layer as each rank has it; a bias that is added once, after the sum, stays with rank 0."""
    ranks = []
    for rank in range(RANKS):
        local = DecoderLayer(halved(config), index, ParallelLayers(Parallel()), torch.float32)
        local.load_state_dict({name: slice_of(parameter, rank) for name, parameter in layer.named_parameters()})
        if rank and local.is_attention and local.self_attn.o_proj.bias is not None:
            local.self_attn.o_proj.bias = nn.Parameter(torch.zeros(config.hidden_size))
        ranks.append(local)
    return ranks


def make_context(name: str) -> Context:
    start = torch.full((ROWS,), HELD)
    valid = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    cos, sin = ported_model(name).rope(text_positions(start, valid))
    return Context(Way.PREFILL, start, valid.sum(dim=1), cos, sin, (TOKENS,), RANK)


def cut_conv(state: Tensor, config: ModelConfig, rank: int) -> Tensor:
    """Channels are q, then k, then v, of the rank as of the whole."""
    parts = state.split([config.key_dim, config.key_dim, config.value_dim], dim=1)
    return torch.cat([part.chunk(RANKS, dim=1)[rank] for part in parts], dim=1)


@pytest.mark.parametrize("name", [*NAMES, "qwen3_5_bias"])
def test_mixers_add_up(name: str) -> None:
    """Each rank runs its slices on its part of the state; outputs sum to the whole's, new states are its parts."""
    model, context, generator = ported_model(name), make_context(name), torch.Generator().manual_seed(0)
    config, kinds = model.config, set()
    x = torch.randn(ROWS, TOKENS, config.hidden_size, generator=generator)
    for index, layer in enumerate(model.layers):
        kinds.add(layer.is_attention)
        mixer_name = "self_attn" if layer.is_attention else "linear_attn"
        if layer.is_attention:
            shape = (ROWS, config.num_key_value_heads, HELD + TOKENS, config.head_dim)
            state = tuple(torch.randn(shape, generator=generator) for _ in range(2))
            parts = [tuple(tensor.chunk(RANKS, dim=1)[rank] for tensor in state) for rank in range(RANKS)]
        else:
            heads, dims = config.linear_num_value_heads, (config.linear_key_head_dim, config.linear_value_head_dim)
            recurrent = torch.randn(ROWS, heads, *dims, generator=generator)
            conv = torch.randn(ROWS, config.conv_dim, config.linear_conv_kernel_dim - 1, generator=generator)
            parts = [(recurrent.chunk(RANKS, 1)[rank], cut_conv(conv, config, rank)) for rank in range(RANKS)]
            state = (recurrent, conv)
        whole, (new,) = getattr(layer, mixer_name)(x, state, context)
        total = torch.zeros_like(whole)
        for rank, local in enumerate(rank_layers(layer, config, index)):
            out, (local_new,) = getattr(local, mixer_name)(x, parts[rank], context)
            total += out
            assert relative(local_new[0], new[0].chunk(RANKS, dim=1)[rank]) < 1e-5
            second = new[1].chunk(RANKS, dim=1)[rank] if layer.is_attention else cut_conv(new[1], config, rank)
            assert relative(local_new[1], second) < 1e-5
        assert relative(total, whole) < 1e-5, index
    assert kinds == {True, False}


@pytest.mark.parametrize("way", [Way.PREFILL, Way.DECODE])
@pytest.mark.parametrize("name", NAMES)
def test_feed_forward_layers_add_up(name: str, way: Way) -> None:
    model = ported_model(name)
    x = torch.randn(ROWS, TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for index, layer in enumerate(model.layers):
        extra = (way, RANK) if layer.is_sparse else ()
        total = sum(local.mlp(x, *extra) for local in rank_layers(layer, model.config, index))
        assert relative(total, layer.mlp(x, *extra)) < 1e-5, index


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_tied"])
def test_the_head_stands_one_rank_after_the_other(name: str) -> None:
    model = ported_model(name)
    hidden = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    weight = model.embed_tokens.weight if model.config.tie_word_embeddings else model.lm_head.weight
    logits = torch.cat([hidden @ slice_of(weight, rank).T for rank in range(RANKS)], dim=-1)
    assert relative(logits, model.head(hidden)) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_slices_belong_to_the_heads_of_hugging_face(name: str) -> None:
    """Two key heads over two ranks: rank r has key head r and its value heads, however the checkpoint mixes them."""
    model, hf = ported_model(name), hf_model(name)
    c = hf.config
    ratio, dk, dv = c.linear_num_value_heads // 2, c.linear_key_head_dim, c.linear_value_head_dim
    assert c.linear_num_key_heads == RANKS
    for layer, hf_layer in zip(model.layers, hf.model.layers, strict=True):
        for rank in range(RANKS):
            own = slice(rank * ratio, (rank + 1) * ratio)  # value heads
            if hasattr(hf_layer, "self_attn"):
                ours, theirs, per = layer.self_attn, hf_layer.self_attn, c.num_attention_heads // RANKS
                heads = theirs.q_proj.weight.view(-1, 2, c.head_dim, c.hidden_size)[rank * per : (rank + 1) * per]
                sliced = slice_of(ours.q_proj.weight, rank).view(-1, 2, c.head_dim, c.hidden_size)
                assert torch.equal(sliced, heads), "per head the query, then its gate"
                continue
            ours, theirs = layer.linear_attn, hf_layer.linear_attn
            if hasattr(theirs, "in_proj_qkvz"):
                grouped = theirs.in_proj_qkvz.weight.view(RANKS, -1, c.hidden_size)[rank]
                q, k, v, z = grouped.split([dk, dk, ratio * dv, ratio * dv])
                b, a = theirs.in_proj_ba.weight.view(RANKS, -1, c.hidden_size)[rank].split([ratio, ratio])
            else:
                q, k, v = theirs.in_proj_qkv.weight.split([2 * dk, 2 * dk, 2 * ratio * dv])
                q, k = q.view(2, dk, -1)[rank], k.view(2, dk, -1)[rank]
                v, z = (x.view(2 * ratio, dv, -1)[own].flatten(0, 1) for x in (v, theirs.in_proj_z.weight))
                b, a = theirs.in_proj_b.weight[own], theirs.in_proj_a.weight[own]
            for part, expected in zip("qkvzba", (q, k, v, z, b, a), strict=True):
                assert torch.equal(slice_of(getattr(ours, f"{part}_proj").weight, rank), expected), part
            taps = theirs.conv1d.weight[:, 0].split([2 * dk, 2 * dk, 2 * ratio * dv])
            for part, expected, size in zip("qkv", taps, (dk, dk, ratio * dv), strict=True):
                expected = expected[rank * size : (rank + 1) * size]
                assert torch.equal(slice_of(getattr(ours, f"{part}_conv").weight, rank), expected), part
            assert torch.equal(slice_of(ours.A_log.weight, rank), theirs.A_log[own])
            assert torch.equal(slice_of(ours.dt_bias.weight, rank), theirs.dt_bias[own])

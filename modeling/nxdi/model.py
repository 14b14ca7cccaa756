"""The traced module: NxDI's base model around this project's layers."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed_inference.models.model_base import NeuronBaseModel
from neuronx_distributed_inference.modules.generation.sampling import create_sampler
from torch import Tensor, nn

from nxdi_qwen.modeling.layers.context import Context, Way
from nxdi_qwen.modeling.layers.norm import ZeroCenteredRMSNorm
from nxdi_qwen.modeling.model import DecoderLayer, RotaryFrequencies
from nxdi_qwen.modeling.nxdi.cache import HybridBlockCacheManager, HybridCacheManager, in_blocks
from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig
from nxdi_qwen.modeling.nxdi.moe import NxdSparseMoE
from nxdi_qwen.modeling.nxdi.parallel import NxdParallelLayers
from nxdi_qwen.modeling.ops.tokens import take_tokens
from nxdi_qwen.modeling.state import StateDescription, describe_state


def describe(config: HybridInferenceConfig) -> StateDescription:
    """The state of one rank, in the order of NxDI's `past_key_values`."""
    options = config.neuron_config
    description = describe_state(config.model, config.slots, options.max_length, options.torch_dtype, config.parallel)
    if options.is_block_kv_layout:
        return in_blocks(description, options.pa_num_blocks, options.pa_block_size)
    return description


class NeuronHybridModel(NeuronBaseModel):
    """One rank of the model. `forward` is the base class's; what it does to hidden states and state is here.

    Validity comes from the attention mask [B, T] in context encoding and from `seq_ids` (-1: idle) elsewhere, never
    from positions: NxDI pads those with 1, and a prompt of one token would become one of two.
    """

    def __init__(self, config: HybridInferenceConfig, optimize_inference: bool = True) -> None:
        super().__init__(config, optimize_inference)
        # `get_model_output` returns the hidden states that the head shall read; the base class picks no others.
        self.sliced_hidden = True

    def setup_attr_for_model(self, config: HybridInferenceConfig) -> None:
        options = config.neuron_config
        self.on_device_sampling = options.on_device_sampling_config is not None
        self.tp_degree = options.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = options.max_batch_size
        self.buckets = options.buckets

    def init_model(self, config: HybridInferenceConfig) -> None:
        model, dtype = config.model, config.neuron_config.torch_dtype
        layers = NxdParallelLayers(config.parallel)
        self.embed_tokens = ParallelEmbedding(
            model.vocab_size, model.hidden_size, dtype=dtype, use_spmd_rank=config.parallel.degree > 1
        )
        self.rope = RotaryFrequencies(model)
        # A parameter, so that the traced graph takes it as an input with the bits of every other target.
        frequencies = self.rope.inv_freq
        del self.rope.inv_freq
        self.rope.inv_freq = nn.Parameter(frequencies, requires_grad=False)
        self.layers = nn.ModuleList(
            DecoderLayer(model, index, layers, dtype, sparse_moe=lambda _, *args: NxdSparseMoE(config, *args))
            for index in range(model.num_hidden_layers)
        )
        self.norm = ZeroCenteredRMSNorm(model.hidden_size, model.rms_norm_eps, dtype)
        self.lm_head = ColumnParallelLinear(
            model.hidden_size, model.vocab_size, bias=False, gather_output=not self.on_device_sampling, dtype=dtype
        )

    def init_inference_optimization(self, config: HybridInferenceConfig) -> None:
        # Not the base class's: it would first make keys and values for every layer.
        if self.on_device_sampling:
            self.sampler = create_sampler(config.neuron_config, self.lm_head.tensor_parallel_group.size())
        manager = HybridBlockCacheManager if self.is_block_kv_layout else HybridCacheManager
        self.kv_mgr = manager(config, describe(config))

    def bfloat16(self) -> NeuronHybridModel:
        """Nothing: parameters are made in the dtype that each must have, and a cast would round the state."""
        return self

    def _is_context_encoding(self, input_ids: Tensor) -> bool:
        # By stage, not by length: a bucket may be as long as the tokens to verify.
        stage = self.neuron_config.is_prefill_stage
        return bool(stage) if stage is not None else input_ids.shape[-1] > 1

    def _is_for_speculation(self, input_ids: Tensor) -> bool:
        return input_ids.shape[-1] > 1 and not self._is_context_encoding(input_ids)

    def create_attn_mask(self, attention_mask: Tensor, *_: Any, **__: Any) -> Tensor:
        """The mask as it came, [B, T]: no matrix over the sequence is made of it."""
        return attention_mask

    def get_model_output(
        self,
        input_ids: Tensor,
        seq_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        is_for_context_encoding: bool = False,
        is_for_speculation: bool = False,
        rotary_position_ids: Tensor | None = None,
        active_block_table: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states for the head, [B, 1, H] after each row's last valid token ([B, T, H] in verification), and the
        new state. Verification returns, behind the state, that of each GDN layer after every token but the last:
        recurrent and conv rows, token by token, layer by layer.
        """
        rows, tokens = input_ids.shape
        start = position_ids[:, 0].to(torch.int64)
        slots = seq_ids.to(torch.int64)
        if is_for_context_encoding:
            way, lengths = Way.PREFILL, attention_mask[:, :tokens].to(torch.int64).sum(dim=1)
        else:
            way, lengths = Way.VERIFY if is_for_speculation else Way.DECODE, torch.full_like(start, tokens)
        lengths = torch.where(slots >= 0, lengths, 0)
        index = torch.arange(tokens, device=input_ids.device)
        if rotary_position_ids is None:
            positions = (start[:, None] + index).expand(3, -1, -1)
        else:
            positions = rotary_position_ids.to(torch.int64).expand(3, rows, tokens)
        cos, sin = self.rope(positions)
        ends = tuple(range(1, tokens + 1)) if way is Way.VERIFY else (tokens,)
        # Tokens behind others go to the graphs for continuation; see `NeuronHybridForCausalLM._submodel`.
        fresh = is_for_context_encoding and not self.neuron_config.is_continuation
        context = Context(way, start, lengths, cos, sin, ends, self.rank_util.get_rank().to(torch.int64), fresh)
        access = {
            "seq_ids": slots,
            "seq_len": self._visible_positions(),
            "start": start,
            "lengths": lengths,
            "block_table": active_block_table,
        }
        x = self.embed_tokens(input_ids)
        old = self.kv_mgr.get_cache(**access)
        states = []
        for layer, pair in zip(self.layers, old, strict=True):
            x, after = layer(x, tuple(pair), context)
            states.append(after)
        new = self.kv_mgr.update_cache(
            is_for_context_encoding=is_for_context_encoding,
            position_ids=position_ids,
            new_key_values=[after[-1] for after in states],
            **access,
        )
        x = self.norm(x)
        if way is Way.PREFILL:
            x = take_tokens(x, (lengths - 1).clamp(min=0)[:, None])
        for end in range(len(context.ends) - 1):
            for layer, after in zip(self.layers, states, strict=True):
                if not layer.is_attention:
                    new.extend(after[end])
        return x, new

    def _visible_positions(self) -> int:
        """Cache positions that a graph reads: its bucket; all of them where a piece goes on from any length."""
        return int(self.neuron_config.max_length if self.neuron_config.is_continuation else self.n_positions)

"""The applications: what NxDI's tools load, compile and call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.models.model_wrapper import SPECULATION_MODEL_TAG
from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig
from nxdi_qwen.modeling.nxdi.model import NeuronHybridModel
from nxdi_qwen.modeling.nxdi.weights import joined_state_dict, logged_progress, write_nxdi_ranks
from nxdi_qwen.modeling.nxdi.wrapper import CONTINUATION_MODEL_TAG, HybridModelWrapper, with_block_table
from nxdi_qwen.modeling.weights import Block, Checkpoint, checkpoint_blocks, plan_weights


class NeuronHybridForCausalLM(NeuronBaseForCausalLM):
    """Qwen3-Next, Qwen3.5 dense and Qwen3.5 MoE: the configuration says which.

    Beside NxDI's submodels there is one that goes on from a stored state (`continuation_buckets`): `forward` takes it
    for several tokens a row whose positions do not all start at 0. `attention_mask` [B, T] then covers the tokens of
    this call; tokens in front stand in the state.
    """

    _model_cls = NeuronHybridModel

    @classmethod
    def get_config_cls(cls) -> type[HybridInferenceConfig]:
        return HybridInferenceConfig

    def get_model_wrapper_cls(self) -> type[HybridModelWrapper]:
        return HybridModelWrapper

    def enable_context_encoding(self, **model_init_kwargs: Any) -> None:
        super().enable_context_encoding(**model_init_kwargs)
        self.continuation_model: HybridModelWrapper | None = None
        if self.neuron_config.continuation_buckets:
            self._enable_continuation(**model_init_kwargs)

    def enable_speculation(self, *args: Any, **kwargs: Any) -> None:
        super().enable_speculation(*args, **kwargs)
        # Verification does not replace single steps: a user may have no draft for a request. NxD lays the weights out
        # as one submodel wants them, which has asked by now: of two, each would expect its own layout.
        self.enable_token_generation(*args, **{**kwargs, "enable_wlt_optimization": False})

    def checkpoint_loader_fn(self, mmap: bool = False) -> dict[str, Tensor]:
        """The parameters before NxD cuts them; see `joined_state_dict`."""
        config, blocks = self._read_checkpoint()
        return joined_state_dict(blocks, config, self.neuron_config.torch_dtype, self.neuron_config.tp_degree)

    def shard_weights(
        self, compiled_model_path: str | Path, debug: bool = False, pre_shard_weights_hook: Any = None
    ) -> None:
        """Writes one file a rank of this host below `compiled_model_path`/weights, as NxD would, but from a stream.

        What NxDI leaves out is left out: everything with `skip_sharding`, or without `save_sharded_checkpoint`.
        """
        options = self.neuron_config
        if options.skip_sharding or not options.save_sharded_checkpoint:
            super().shard_weights(str(compiled_model_path), debug, pre_shard_weights_hook)
            return
        if pre_shard_weights_hook:
            pre_shard_weights_hook(self)
        folder = Path(compiled_model_path) / "weights"
        config, blocks = self._read_checkpoint()
        ranks = range(options.start_rank_id, options.start_rank_id + options.local_ranks_size)
        progress = logged_progress(folder)
        write_nxdi_ranks(folder, ranks, config, options.torch_dtype, options.tp_degree, blocks, progress)
        # Does nothing unless NxD's experimental layouts are asked for; the traced model expects them then.
        self.get_builder(debug).transform_weight_layout_with_overriden_option(sharded_checkpoint_dir=str(folder))

    def reset_kv_cache(self) -> None:
        """Zeroes the state of the submodels that run on the CPU."""
        for model in self.models:
            if model.model is not None and not model.is_neuron():
                for state in model.model.kv_mgr.past_key_values:
                    state.data.zero_()

    def _read_checkpoint(self) -> tuple[ModelConfig, Iterator[Block]]:
        """The configuration of the weights in `model_path` and the blocks of their stream."""
        checkpoint = Checkpoint.open(self.model_path)
        plan = plan_weights(self.config.model, checkpoint, load_config(self.model_path).quantization)
        return plan.config, checkpoint_blocks(plan, checkpoint, self.neuron_config.torch_dtype)

    def _enable_continuation(self, **model_init_kwargs: Any) -> None:
        config = copy.deepcopy(self.config)
        options = config.neuron_config
        options.batch_size = self.neuron_config.ctx_batch_size
        options.n_active_tokens = max(options.continuation_buckets)
        options.bucket_n_active_tokens = True
        options.is_prefill_stage = True
        options.is_continuation = True
        options.buckets = sorted(options.continuation_buckets)
        self.continuation_model = self.model_wrapper(
            config=config,
            model_cls=self._model_cls,
            tag=CONTINUATION_MODEL_TAG,
            compiler_args=self.get_compiler_args(),
            model_init_kwargs=model_init_kwargs,
        )
        # NxDI chooses them by the tag, and would compile this as it does single steps.
        self.continuation_model.compiler_args = self.context_encoding_model.compiler_args
        self.models.append(self.continuation_model)

    def _infer_attention_mask(self, position_ids: Tensor, *_: Any) -> Tensor:
        """Valid are the tokens whose positions count on from the first; NxDI pads positions with 1."""
        if position_ids.shape[1] == 1:
            return torch.ones(position_ids.shape[0], int(position_ids.max()) + 1, dtype=position_ids.dtype)
        expected = position_ids[:, :1] + torch.arange(position_ids.shape[1])
        if (position_ids[:, 1:3] == 1).all(dim=1).any() and position_ids.shape[1] > 2:
            raise InputError(
                "positions 0, 1, 1 are those of one token or of two, padded with 1: pass attention_mask, or pad with 0"
            )
        return (position_ids == expected).to(position_ids.dtype)

    def _get_model_outputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        seq_ids: Tensor,
        sampling_params: Tensor,
        prev_hidden: Tensor | None,
        adapter_ids: Tensor | None,
        medusa_args: Any,
        llava_args: Any,
        slot_mapping: Tensor | None = None,
        block_table: Tensor | None = None,
        full_context_lens: Tensor | None = None,
        computed_context_lens: Tensor | None = None,
        tf_args: Any = None,
    ) -> tuple[Any, bool]:
        if input_ids.shape[1] == 1 < attention_mask.shape[1]:
            # NxDI's generation adapter takes the padding of a prompt of one token, 1, for its last position: its first
            # token to decode would have position 2. The mask counts the tokens in front, or this one as well.
            position_ids = torch.minimum(position_ids, attention_mask.sum(dim=1, keepdim=True))
        model = self._submodel(input_ids, position_ids)
        if model is self.context_encoding_model:
            self.kv_cache_populated = True
        if model.tag == SPECULATION_MODEL_TAG:
            # All that NxDI does with it is to choose a bucket: for tokens in front, to which it adds those to verify.
            attention_mask = torch.ones(input_ids.shape[0], int(position_ids[:, 0].max()), dtype=torch.int32)
        tokens = (input_ids, attention_mask, position_ids)
        if self.continuation_model is not None and input_ids.shape[1] > max(model.neuron_config.buckets):
            return self._in_pieces(model, tokens, seq_ids, sampling_params, block_table)
        return self._call(model, tokens, seq_ids, sampling_params, block_table), model.is_neuron()

    def _call(
        self,
        model: HybridModelWrapper,
        tokens: tuple[Tensor, ...],
        seq_ids: Tensor,
        sampling_params: Tensor,
        block_table: Tensor | None,
    ) -> Any:
        """`tokens`: ids, mask and positions. What NxDI has beside these (hidden states, adapters) no graph reads."""
        nothing = torch.zeros(seq_ids.shape[0], dtype=torch.int32)
        inputs = (*tokens, seq_ids, sampling_params, nothing, nothing)
        if not self.neuron_config.is_block_kv_layout:
            return model(*inputs)
        if block_table is None:
            raise InputError("keys and values are in blocks: pass block_table, the blocks of each row in order")
        return model(*with_block_table(inputs, block_table))

    def _in_pieces(
        self,
        model: HybridModelWrapper,
        tokens: tuple[Tensor, ...],
        seq_ids: Tensor,
        sampling_params: Tensor,
        block_table: Tensor | None,
    ) -> tuple[Any, bool]:
        """Tokens above the largest bucket, in pieces of it: `model` takes the first, and the graphs that continue all
        others, however short. A row's result is that of its last piece.
        """
        assert self.continuation_model is not None
        longest = min(max(each.neuron_config.buckets) for each in (model, self.continuation_model))
        lengths = tokens[1].sum(dim=1)
        merged: list[Any] = []
        outputs: Any = None
        for begin in range(0, tokens[0].shape[1], longest):
            piece = tuple(each[:, begin : begin + longest] for each in tokens)
            outputs = self._call(
                self.continuation_model if begin else model, piece, seq_ids, sampling_params, block_table
            )
            if not model.is_neuron():
                self._copy_past_key_values(outputs)
            results = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
            if begin:
                goes_on = lengths > begin
                count = len(results) if model.is_neuron() else 1  # on the CPU, the state stands behind the result
                results[:count] = [
                    torch.where(goes_on.reshape(-1, *[1] * (new.dim() - 1)), new, old)
                    for new, old in zip(results[:count], merged[:count], strict=True)
                ]
            merged = results
        return (merged if isinstance(outputs, list | tuple) else merged[0]), model.is_neuron()

    def _submodel(self, input_ids: Tensor, position_ids: Tensor) -> HybridModelWrapper:
        tokens, first = input_ids.shape[1], position_ids[:, 0]
        if not first.any():
            return self.context_encoding_model
        if tokens == 1:
            return self.token_generation_model
        if tokens == self.neuron_config.speculation_length:
            return self.speculation_model
        if self.continuation_model is None:
            raise InputError(
                f"{tokens} tokens behind position {int(first.max())} need a graph that goes on from the state: "
                "compile with continuation_buckets"
            )
        return self.continuation_model

    def _copy_past_key_values(self, outputs: list[Any]) -> None:
        super()._copy_past_key_values(outputs)
        if self.continuation_model is not None:
            states = self.token_generation_model.model.kv_mgr.past_key_values
            for own, new in zip(self.continuation_model.model.kv_mgr.past_key_values, states, strict=True):
                own.data = new.data

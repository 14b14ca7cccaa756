"""NxDI's two configuration objects, filled from this project's own configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from neuronx_distributed.modules.moe.blockwise import can_use_blockwise_matmul_nki
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.config_loader import parse_config
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.nxdi import SDK_IS_INSTALLED
from nxdi_qwen.modeling.partition import Parallel, check_degree

_logger = logging.getLogger(__name__)

_NO_BLOCKS = 1 << 30
# Options of NxDI that would need another graph than the one that is traced here, and what they must be.
_REFUSED: dict[str, tuple[Any, str]] = {
    "padding_side": ("right", "context encoding takes padding on the right only"),
    "is_prefix_caching": (False, "a prefix of a hybrid model is more than its KV blocks"),
    "sequence_parallel_enabled": (False, "the recurrence runs over the whole sequence on every rank"),
    "flash_decoding_enabled": (False, "the KV cache is not cut over the sequence"),
    "cp_degree": (1, "the recurrence cannot be cut over the sequence"),
    "attention_dp_degree": (1, "slots are not cut over ranks"),
    "pp_degree": (1, "all layers are on every rank"),
    "ep_degree": (1, "experts are cut along their intermediate size"),
    "moe_ep_degree": (1, "experts are cut along their intermediate size"),
    "async_mode": (False, "a step that is issued ahead and dropped has advanced the recurrent state all the same"),
    "kv_cache_quant": (False, "the KV cache is in the model's dtype"),
    "quantized": (False, "weights are in 16 or 32 bit"),
    "quantized_mlp_kernel_enabled": (False, "weights are in 16 or 32 bit"),
    "activation_quantization_type": (None, "activations are in 16 or 32 bit"),
    "fused_qkv": (False, "query and gate, key and value are projected apart"),
    "enable_fused_speculation": (False, "no draft model is fused"),
    "is_medusa": (False, "there are no Medusa heads"),
    "medusa_speculation_length": (0, "there are no Medusa heads"),
    "windowed_context_encoding_size": (None, "use continuation_buckets"),
    "token_generation_batches": (None, "decode graphs have one batch size"),
    "lora_config": (None, "LoRA is not supported"),
    "hybrid_sharding_config": (None, "prompts and decode share the experts' weights"),
    "tensor_capture_config": (None, "every output behind the first is a state"),
    "tensor_replacement_config": (None, "the graphs take no further inputs"),
    "glu_mlp": (True, "the experts are gated"),
    "glu_type": ("glu", "the experts are SwiGLU"),
    "hidden_act_scaling_factor": (1.0, "the experts are SwiGLU"),
    "hidden_act_bias": (0.0, "the experts are SwiGLU"),
    "gate_clamp_upper_limit": (None, "the experts clamp nothing"),
    "gate_clamp_lower_limit": (None, "the experts clamp nothing"),
    "up_clamp_upper_limit": (None, "the experts clamp nothing"),
    "up_clamp_lower_limit": (None, "the experts clamp nothing"),
    "early_expert_affinity_modulation": (False, "an expert's output is weighted, not its input"),
    "capacity_factor": (None, "no token is dropped"),
}


class HybridNeuronConfig(MoENeuronConfig):
    """NxDI's options for compiling and running, with those of this port.

    `continuation_buckets`: lengths of pieces for which graphs are made that go on from the stored state (chunked
    prefill); None: none. `compiler_flags`: appended to the flags that NxDI gives neuronx-cc. With
    `is_block_kv_layout`, the keys and values of attention layers lie in `pa_num_blocks` blocks of `pa_block_size`
    tokens. `blockwise_matmul_config`: how NxD runs the routed experts of prompts; left out, it is chosen for the model
    (`HybridInferenceConfig`). Raises InputError for an option of NxDI that this port does not have.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.continuation_buckets: list[int] | None = kwargs.pop("continuation_buckets", None)
        self.compiler_flags: str = kwargs.pop("compiler_flags", "")
        # Set on the copy of the configuration that the graphs for continuation are traced with.
        self.is_continuation: bool = kwargs.pop("is_continuation", False)
        # Parameters are made in the dtype they must have: a cast of everything would round the recurrent state.
        if kwargs.setdefault("cast_type", "as-declared") != "as-declared":
            raise InputError('cast_type must be "as-declared": the recurrent state stays float32 at every dtype')
        # Rows that only fill up a batch must be told from real ones, or they would advance the state of their slot.
        if kwargs.setdefault("apply_seq_ids_mask", True) is not True:
            raise InputError("apply_seq_ids_mask must be true: idle rows would change the state of their slots")
        # Popped where this object was saved.
        chooses = "blockwise_matmul_config" not in kwargs
        self.chooses_experts_kernel: bool = kwargs.pop("chooses_experts_kernel", chooses)
        logical_cores = kwargs.get("logical_nc_config")
        # NxDI would cut the weights at every load, with the whole model in memory.
        kwargs.setdefault("save_sharded_checkpoint", True)
        super().__init__(**kwargs)
        for name, (accepted, reason) in _REFUSED.items():
            if getattr(self, name) != accepted:
                raise InputError(f"{name}={getattr(self, name)} is not supported: {reason}")
        if logical_cores not in (None, self.logical_nc_config):
            raise InputError(
                f"NEURON_LOGICAL_NC_CONFIG is {self.logical_nc_config}, and logical_nc_config (--logical-cores) "
                f"{logical_cores}: make the two equal, for compiling and for running"
            )
        if self.is_block_kv_layout and self.max_length % self.pa_block_size:
            raise InputError(f"pa_block_size {self.pa_block_size} does not divide the maximum length {self.max_length}")
        if self.ctx_batch_size not in (1, self.batch_size):
            raise InputError(
                f"ctx_batch_size {self.ctx_batch_size} is neither 1 nor the batch size {self.batch_size}: NxDI pads "
                "the ids of slots to the one and tokens to the other"
            )
        if self.continuation_buckets and max(self.continuation_buckets) > self.max_length:
            raise InputError(f"continuation_buckets reach beyond the maximum length {self.max_length}")


class HybridInferenceConfig(InferenceConfig):
    """The model and how it runs. `hybrid_model` holds this project's ModelConfig as a dictionary.

    Made by `for_model`, or, as NxDI's own tools do it, with a `load_config` that copies the attributes of a
    Hugging Face configuration, from which the ModelConfig is then read. Raises InputError where model and options do
    not fit each other.
    """

    @classmethod
    def for_model(cls, model: ModelConfig, neuron_config: HybridNeuronConfig) -> HybridInferenceConfig:
        return cls(neuron_config, hybrid_model=model.to_dict())

    @classmethod
    def get_neuron_config_cls(cls) -> type[HybridNeuronConfig]:
        return HybridNeuronConfig

    @property
    def model(self) -> ModelConfig:
        """This project's configuration of the model."""
        return ModelConfig.from_dict(self.hybrid_model)

    @property
    def parallel(self) -> Parallel:
        """The cut of all ranks; which of them this is, the traced graph learns from its `rank_util`."""
        return Parallel(self.neuron_config.tp_degree)

    @property
    def slots(self) -> int:
        """Requests that have a state at once."""
        return int(self.neuron_config.kv_cache_batch_size)

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1
        if not hasattr(self, "hybrid_model"):
            self.hybrid_model = parse_config(_plain(self.__dict__)).to_dict()
        model = self.model
        check_degree(model, self.neuron_config.tp_degree)
        longest = model.max_position_embeddings
        if self.neuron_config.max_length > longest:
            raise InputError(f"the maximum length {self.neuron_config.max_length} is above the model's {longest}")
        # The names by which NxDI's base classes and its generation adapter know these.
        self.vocab_size = model.vocab_size
        self.hidden_size = model.hidden_size
        self.num_hidden_layers = model.num_hidden_layers
        self.num_attention_heads = model.num_attention_heads
        self.num_key_value_heads = model.num_key_value_heads
        self.head_dim = model.head_dim
        self.max_position_embeddings = longest
        self.tie_word_embeddings = model.tie_word_embeddings
        self.eos_token_id = list(model.eos_token_ids) or None
        self.pad_token_id = model.pad_token_id or 0
        self.output_attentions = self.output_hidden_states = False
        if model.num_experts:
            self._add_experts(model)

    def get_text_config(self) -> HybridInferenceConfig:
        return self

    def _add_experts(self, model: ModelConfig) -> None:
        """What `initialize_moe_module` reads; the shared expert and its gate are this project's own layers."""
        self.num_local_experts = model.num_experts
        self.num_experts_per_tok = model.num_experts_per_tok
        self.n_shared_experts = 0
        self.intermediate_size = model.moe_intermediate_size
        self.hidden_act = "silu"
        options = self.neuron_config
        options.router_config.dtype = torch.float32
        options.router_config.act_fn = "softmax"
        options.normalize_top_k_affinities = model.norm_topk_prob
        self._choose_experts_kernel(model)
        # As NxDI's own Qwen3-MoE does, against extra additions in front of the collectives.
        options.disable_numeric_cc_token = True

    def _choose_experts_kernel(self, model: ModelConfig) -> None:
        """The routed experts of prompts: the kernel of the SDK that NxD 0.18 can call, or no kernel.

        Of its kernels for two physical cores a logical one, NxD's default raises NotImplementedError, and the one that
        cuts the intermediate size is there. Its torch form of blocks repeats an expert for every block of tokens, in
        the graph. A block that no prompt fills makes NxD compute all experts instead, as it does for short prompts.
        """
        options = self.neuron_config
        blocks = options.blockwise_matmul_config
        blocks.logical_nc_config = options.logical_nc_config
        if not SDK_IS_INSTALLED:
            blocks.block_size = _NO_BLOCKS
        elif options.chooses_experts_kernel:
            blocks.use_shard_on_intermediate_dynamic_while = can_use_blockwise_matmul_nki(
                hidden_size=model.hidden_size,
                intermediate_size_tp=self.intermediate_size // options.tp_degree,
                block_size=blocks.block_size,
                glu_mlp=options.glu_mlp,
                glu_type=options.glu_type,
                use_torch_block_wise=blocks.use_torch_block_wise,
                device=torch.device("meta"),  # any but the CPU, where no kernel runs
                logical_nc_config=options.logical_nc_config,
                use_shard_on_intermediate=True,
            )
            if not blocks.use_shard_on_intermediate_dynamic_while:
                blocks.block_size = _NO_BLOCKS
                _logger.warning(
                    "prompts compute all %d experts for every token, where a kernel would compute %d: NxD has none for "
                    "logical_nc_config %d and %d columns of an expert a rank (two physical cores a logical one and a "
                    "multiple of 16)",
                    model.num_experts,
                    model.num_experts_per_tok,
                    options.logical_nc_config,
                    self.intermediate_size // options.tp_degree,
                )


def _plain(value: Any) -> Any:
    """A Hugging Face configuration's attributes as config.json has them."""
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if key not in ("neuron_config", "fused_spec_config")}
    return value

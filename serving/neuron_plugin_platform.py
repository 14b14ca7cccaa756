"""The plugin's platform, for hybrid models: no prefix caching, blocks for both kinds of layers, and a worker that
declares the state as it is. For all other models the plugin's own functions are called, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig

from nxdi_qwen.modeling.config import LINEAR_ATTENTION, ModelConfig
from nxdi_qwen.modeling.config_loader import FAMILY_OF_MODEL_TYPE, load_config
from nxdi_qwen.modeling.partition import Parallel
from nxdi_qwen.modeling.state import describe_state
from nxdi_qwen.serving.cache_spec import set_blocks
from nxdi_qwen.serving.prefix_caching import turn_off

PLUGIN_WORKER = "vllm_neuron.worker.neuron_worker.NeuronWorker"
WORKER = "nxdi_qwen.serving.neuron_plugin_worker.HybridNeuronWorker"
_MARK = "_nxdi_qwen_checked_hybrid"


def supply(platform: Any) -> bool:
    """Wraps two class methods of the plugin's platform; False where that was done before."""
    if _MARK in vars(platform):
        return False
    check: Callable[[VllmConfig], None] = platform.check_and_update_config
    supports: Callable[[], bool] = platform.support_hybrid_kv_cache

    def check_and_update_config(cls: Any, vllm_config: VllmConfig) -> None:
        model = hybrid_model_of(vllm_config)
        setattr(cls, _MARK, model is not None)
        if model is None:
            check(vllm_config)
            return
        if vllm_config.cache_config.enable_prefix_caching:
            turn_off(vllm_config)
        check(vllm_config)
        fit_to_hybrid(vllm_config, model)

    def support_hybrid_kv_cache(cls: Any) -> bool:
        # vLLM asks this for the configuration that it has just had checked.
        return getattr(cls, _MARK) or supports()

    setattr(platform, _MARK, False)
    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.support_hybrid_kv_cache = classmethod(support_hybrid_kv_cache)
    return True


def hybrid_model_of(vllm_config: VllmConfig) -> ModelConfig | None:
    """The model's configuration if it is one of this project's with a GDN layer.

    Raises InputError where the model type is one of these and the folder is no checkpoint of it.
    """
    if vllm_config.model_config is None:  # vLLM also makes configurations without a model
        return None
    model_type = getattr(vllm_config.model_config.hf_config, "model_type", None)
    if not isinstance(model_type, str) or model_type not in FAMILY_OF_MODEL_TYPE:
        return None
    model = load_config(vllm_config.model_config.model).config
    return model if LINEAR_ATTENTION in model.layer_types else None


def fit_to_hybrid(vllm_config: VllmConfig, model: ModelConfig) -> None:
    """After the plugin has chosen its values: block sizes, and the worker that declares the state.

    The plugin makes a block as long as a request may be. Padded to such a page, a GDN layer's state would be counted
    many times over; so a block is as small as a state allows. Raises ValueError for what the plugin's runner cannot do
    with blocks of several groups of layers.
    """
    if vllm_config.scheduler_config.enable_chunked_prefill:
        raise ValueError(
            "chunked prefill is not supported for a model with linear-attention layers: unset "
            "DISABLE_NEURON_CUSTOM_SCHEDULER"
        )
    cache, model_config = vllm_config.cache_config, vllm_config.model_config
    options = vllm_config.additional_config.get("override_neuron_config") or {}
    degree = options.get("tp_degree", vllm_config.parallel_config.tensor_parallel_size)
    slots, length = vllm_config.scheduler_config.max_num_seqs, model_config.max_model_len
    set_blocks(cache, describe_state(model, slots, length, model_config.dtype, Parallel(degree)), length)
    if vllm_config.parallel_config.worker_cls == PLUGIN_WORKER:
        vllm_config.parallel_config.worker_cls = WORKER

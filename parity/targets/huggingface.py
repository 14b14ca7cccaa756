"""Hugging Face's own model: one row at a time, unpadded, with eager attention. In float32 it is the reference."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxdi_qwen.compile.source import DTYPES, ModelSource
from nxdi_qwen.modeling.config import FULL_ATTENTION
from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.huggingface_layer import run_huggingface_layer, text_model
from nxdi_qwen.parity.layer_run import LayerCase, LayerRun
from nxdi_qwen.parity.plain_weights import OuterWeights, Weights, layer_weights, outer_weights
from nxdi_qwen.parity.records import Description, Prompt, Run
from nxdi_qwen.parity.targets.side import OF_THE_CHECKPOINT, Side
from nxdi_qwen.parity.targets.tap import Choice, ModuleTap, joined

PINNED = "5.24.0"


class HuggingFaceSide(Side):
    """A checkpoint folder in transformers' classes."""

    def __init__(self, source: ModelSource, dtype: str) -> None:
        """Raises InputError where transformers is missing, or too old to know the model."""
        assert source.folder is not None
        versions = {"transformers": transformers_version(), "torch": torch.__version__}
        super().__init__(
            Description("huggingface", OF_THE_CHECKPOINT, dtype, versions),
            source.config,
            source.config.max_position_embeddings,
        )
        self._folder = source.folder
        self._model: Any = None
        self._quantized = load_config(source.folder).quantization is not None
        if self._quantized and importlib.util.find_spec("accelerate") is None:
            raise InputError("transformers reads FP8 checkpoints through accelerate: pip install accelerate")

    @property
    def model(self) -> Any:
        """The transformers model, loaded when first asked for."""
        if self._model is None:
            self._model = _load(self._folder, DTYPES[self.description.dtype], self._quantized)
        return self._model

    def release(self) -> None:
        self._model = None

    @torch.inference_mode()
    def run(self, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> Run:
        steps = steps if forced is None else len(forced)
        tap = ModuleTap(list(text_model(self.model).layers), router_of, _read_router)
        tokens: list[int] = []
        with tap.open():
            out = self.model(input_ids=torch.tensor([prompt.ids]), use_cache=True)
            logits = [out.logits[0].float()]
            caught = [tap.take(0, [len(prompt.ids)])]
            snapshots = [self._states(out.past_key_values)]
            for step in range(steps):
                tokens.append(int(logits[-1][-1].argmax()) if forced is None else forced[step])
                out = self.model(
                    input_ids=torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True
                )
                logits.append(out.logits[0].float())
                caught.append(tap.take(0, [1]))
                snapshots.append(self._states(out.past_key_values))
        states = {name: torch.stack([snapshot[name] for snapshot in snapshots]) for name in snapshots[0]}
        seen = joined(caught)
        return Run(
            prompt,
            tuple(tokens),
            torch.cat(logits),
            hidden=seen.hidden,
            states=states | self._caches(out.past_key_values),
            experts=seen.experts,
            router_margins=seen.margins,
        )

    def run_layer(self, index: int, case: LayerCase) -> LayerRun:
        return run_huggingface_layer(self.model, index, case)

    def layer_weights(self, index: int) -> Weights:
        return layer_weights(text_model(self.model).layers[index], self.config.linear_num_key_heads)

    def outer_weights(self) -> OuterWeights:
        return outer_weights(self.model)

    def _states(self, cache: Any) -> dict[str, Tensor]:
        """The states of GDN layers. Of the convolution's inputs the cache holds one more than is ever read again."""
        kept = self.config.linear_conv_kernel_dim - 1
        states = {}
        for layer, kind in enumerate(self.config.layer_types):
            if kind != FULL_ATTENTION:
                states[f"layers.{layer}.recurrent"] = cache.get_recurrent_state(layer)[0].float().clone()
                states[f"layers.{layer}.conv"] = cache.get_conv_state(layer)[0, :, -kept:].clone()
        return states

    def _caches(self, cache: Any) -> dict[str, Tensor]:
        caches = {}
        for layer, kind in enumerate(self.config.layer_types):
            if kind == FULL_ATTENTION:
                own = cache.layers[layer]
                caches[f"layers.{layer}.key"] = own.keys[0].transpose(0, 1).clone()
                caches[f"layers.{layer}.value"] = own.values[0].transpose(0, 1).clone()
        return caches


def transformers_version() -> str:
    """Raises InputError where transformers cannot be a reference."""
    try:
        import transformers
    except ImportError:
        raise InputError(f"transformers is not installed: pip install transformers=={PINNED}") from None
    version: str = transformers.__version__
    if int(version.split(".")[0]) < 5:
        # 4.57 restarts a continuation from zero and does not know qwen3_5.
        raise InputError(f"transformers {version} is no valid reference: pip install transformers=={PINNED}")
    return version


def router_of(layer: nn.Module) -> nn.Module | None:
    """The router of one of transformers' layers, where it has experts."""
    gate = getattr(getattr(layer, "mlp", None), "gate", None)
    return gate if isinstance(gate, nn.Module) else None


def _read_router(_: nn.Module, __: Tensor, output: Any) -> Choice:
    logits, _scores, experts = output
    return Choice(logits, experts)


def _load(folder: Path, dtype: torch.dtype, dequantize: bool) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    if dequantize:
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    model, loading = loaded
    if loading["missing_keys"]:
        raise InputError(f"transformers did not find {sorted(loading['missing_keys'])[0]} in {folder}")
    # `past_key_values` is the name that all of transformers 5 knows.
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    return model.to(dtype).eval()

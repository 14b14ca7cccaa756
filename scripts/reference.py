"""Hugging Face's own model as the reference: float32, one row at a time, unpadded."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.errors import InputError

PINNED = "5.24.0"


class Reference:
    """A checkpoint folder loaded by transformers in float32, with eager attention."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError where transformers is missing or too old to know the model."""
        try:
            import transformers
        except ImportError:
            raise InputError(f"transformers is not installed: pip install transformers=={PINNED}") from None
        self.version: str = transformers.__version__
        if int(self.version.split(".")[0]) < 5:
            # 4.57 restarts a continuation from zero and does not know qwen3_5.
            raise InputError(f"transformers {self.version} is no valid reference: pip install transformers=={PINNED}")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        if load_config(folder).quantization is not None:
            if importlib.util.find_spec("accelerate") is None:
                raise InputError("transformers reads FP8 checkpoints through accelerate: pip install accelerate")
            options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
        self._model, loading = loaded
        if loading["missing_keys"]:
            raise InputError(f"transformers did not find {sorted(loading['missing_keys'])[0]} in {folder}")
        self._model.float().eval()
        # `past_key_values` is the name that all of transformers 5 knows.
        warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)

    @torch.inference_mode()
    def run(self, ids: Sequence[int], steps: int) -> tuple[Tensor, list[int], Tensor]:
        """Logits after every token of `ids` [T, V]; the `steps` tokens it would take greedily; the logits after
        each of those [steps, V].
        """
        out = self._model(input_ids=torch.tensor([list(ids)]), use_cache=True)
        prefill = out.logits[0].float()
        tokens, decoded, last = [], [], prefill[-1]
        for _ in range(steps):
            tokens.append(int(last.argmax()))
            out = self._model(
                input_ids=torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True
            )
            last = out.logits[0, -1].float()
            decoded.append(last)
        return prefill, tokens, torch.stack(decoded) if decoded else prefill[:0]

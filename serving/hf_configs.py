"""Hugging Face configurations of Qwen3.5 for a transformers that has none: 4.57, which vLLM 0.16 and NxDI need.

They keep what config.json says, and add nothing that the model's own reader would take for a value of the file.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# What vLLM and its plugin look for beside `text_config`, not in it.
_OF_THE_TEXT_MODEL = ("num_key_value_heads", "head_dim", "layer_types")


class Qwen35TextConfig(PretrainedConfig):
    model_type = "qwen3_5_text"

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("tie_word_embeddings", False)  # the base class's own default is True
        super().__init__(**kwargs)


class Qwen35MoeTextConfig(Qwen35TextConfig):
    model_type = "qwen3_5_moe_text"


class Qwen35Config(Qwen35TextConfig):
    """A nested configuration, or a flat one under the outer model type."""

    model_type = "qwen3_5"
    sub_configs = {"text_config": Qwen35TextConfig}  # noqa: RUF012, the base class's attribute

    def __init__(self, text_config: dict[str, Any] | PretrainedConfig | None = None, **kwargs: Any) -> None:
        if isinstance(text_config, dict):
            text_config = self.sub_configs["text_config"](**text_config)
        if text_config is not None:
            self.text_config = text_config
        super().__init__(**kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_TEXT_MODEL and "text_config" in self.__dict__:
            return getattr(self.text_config, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")


class Qwen35MoeConfig(Qwen35Config):
    model_type = "qwen3_5_moe"
    sub_configs = {"text_config": Qwen35MoeTextConfig}  # noqa: RUF012


def register() -> None:
    """Makes `AutoConfig` read Qwen3.5 where transformers itself cannot; calling it again changes nothing."""
    for config in (Qwen35Config, Qwen35TextConfig, Qwen35MoeConfig, Qwen35MoeTextConfig):
        if config.model_type not in CONFIG_MAPPING:
            AutoConfig.register(config.model_type, config)

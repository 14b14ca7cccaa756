"""vLLM's entry points. vLLM calls them in each of its processes, wherever this package is installed: nothing heavy is
imported here, and nothing changes unless it was asked for.
"""

from __future__ import annotations

import importlib.util
import os

NAME = "nxdi_qwen"
"""The name of both entry points, and what vLLM's own variable `VLLM_PLUGINS` has to contain."""

PLUGINS_VARIABLE = "VLLM_PLUGINS"


def platform() -> str | None:
    """`vllm.platform_plugins`: the platform's class path where it was asked for by name, otherwise None."""
    return "nxdi_qwen.serving.platform.NxdiQwenPlatform" if asked_for() else None


def general() -> None:
    """`vllm.general_plugins`: the model classes of our own platform, or what the NxDI-based plugin lacks."""
    if asked_for():
        from nxdi_qwen.serving.hybrid_model import register
        from nxdi_qwen.serving.parent import leave_with_parent

        register()
        leave_with_parent()
    elif importlib.util.find_spec("vllm_neuron") is not None:
        from nxdi_qwen.serving.neuron_plugin import install

        install()


def asked_for() -> bool:
    """Whether `VLLM_PLUGINS` names this package."""
    return NAME in os.environ.get(PLUGINS_VARIABLE, "").split(",")

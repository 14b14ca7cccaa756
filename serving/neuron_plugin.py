"""Supplies the NxDI-based vLLM plugin (vllm-neuron 0.5.0 on vLLM 0.16.0) with what hybrid models need."""

from __future__ import annotations

import importlib.metadata

import vllm
from packaging.version import Version
from vllm.logger import init_logger

# vLLM shows what is logged below its own name.
logger = init_logger("vllm.nxdi_qwen")

NEEDED = {"vllm-neuron": "0.5.0", "vllm": "0.16.0"}


def install() -> None:
    """Changes the plugin's platform, in this process, where it is the current one. The second time, nothing happens.

    With other versions than `NEEDED`, one warning names those and the ones found, and nothing is changed.
    """
    from vllm.platforms import current_platform  # found at the first access, which must not be an import of this module

    platform = type(current_platform)
    if platform.__module__.partition(".")[0] != "vllm_neuron":
        return
    found = {"vllm-neuron": importlib.metadata.version("vllm-neuron"), "vllm": vllm.__version__}
    if any(Version(found[name]).base_version != needed for name, needed in NEEDED.items()):
        logger.warning(
            "nxdi-qwen leaves the Neuron plugin as it is: found %s; hybrid models are supplied for %s.",
            _listed(found),
            _listed(NEEDED),
        )
        return
    # Imported here: of another vLLM, these may need what it does not have.
    from nxdi_qwen.serving import hybrid_model, neuron_plugin_platform

    if neuron_plugin_platform.supply(platform):
        hybrid_model.register()


def _listed(versions: dict[str, str]) -> str:
    return " with ".join(f"{name} {version}" for name, version in versions.items())

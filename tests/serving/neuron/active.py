"""A pytest plugin for the Neuron plugin's own tests: vLLM loads its general plugins, and so this package, first.

That is before those tests put mocks in the place of vLLM's scheduler and of NxDI.
"""

from __future__ import annotations

import vllm_neuron

vllm_neuron._is_neuron_dev = lambda: True

from vllm.platforms import current_platform  # noqa: E402, the platform is found at this import
from vllm.plugins import load_general_plugins  # noqa: E402

from nxdi_qwen.serving.neuron_plugin_platform import supply  # noqa: E402

load_general_plugins()


def pytest_report_header() -> str:
    assert not supply(type(current_platform)), "this package was not loaded by vLLM"
    return "nxdi-qwen supplies the plugin's platform"

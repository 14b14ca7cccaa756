"""The model on NxD Inference's base classes: the only place that imports `neuronx_distributed*`.

Where the Neuron SDK is missing, importing this package puts inert stand-ins in its place (`sdk_stub`), so that NxDI can
be imported, run in its CPU mode and lowered to HLO. Nothing can be compiled for Neuron or run on it then.
"""

import importlib.util

SDK_IS_INSTALLED = importlib.util.find_spec("torch_neuronx") is not None

if not SDK_IS_INSTALLED:
    import nxdi_qwen.modeling.nxdi.sdk_stub  # noqa: F401

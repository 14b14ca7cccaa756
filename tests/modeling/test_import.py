"""The model and the compiler stand on torch and safetensors alone."""

from __future__ import annotations

import subprocess
import sys

NEED_NXDI = ("nxdi_qwen.modeling.nxdi", "nxdi_qwen.compile.hlo", "nxdi_qwen.compile.neuron")
FORBIDDEN = ("transformers", "neuronx_distributed", "neuronx_distributed_inference", "torch_xla", "vllm")

PROGRAM = f"""
import importlib, importlib.abc, pkgutil, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {FORBIDDEN!r}:
            raise ImportError(name + " must not be imported")

sys.meta_path.insert(0, Blocker())
for package in ("nxdi_qwen.modeling", "nxdi_qwen.compile"):
    root = importlib.import_module(package)
    print(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if not module.name.startswith({NEED_NXDI!r}):
            print(module.name)
            importlib.import_module(module.name)
"""


def test_no_module_needs_transformers_or_a_backend() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    imported = run.stdout.split()
    assert {"nxdi_qwen.modeling.model", "nxdi_qwen.modeling.weights.plan", "nxdi_qwen.compile.graphs"} <= set(imported)

"""Packaging: the folders at the top are the sub-packages of the (namespace) package `nxdi_qwen`."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
FOLDERS = ("modeling", "compile", "parity", "serving", "scripts")


def packages_below(folder: str) -> list[str]:
    """Import names of `folder` and of every folder below it, found on disk so that none can be forgotten."""
    found = find_namespace_packages(where=str(ROOT / folder), exclude=["*__pycache__*"])
    return [f"nxdi_qwen.{folder}"] + [f"nxdi_qwen.{folder}.{name}" for name in found]


setup(
    name="nxdi-qwen",
    version="0.1.0",
    description="Qwen3-Next and Qwen3.5 for AWS Neuron through NxD Inference, checked on CPU",
    python_requires=">=3.11,<3.13",
    package_dir={f"nxdi_qwen.{folder}": folder for folder in FOLDERS},
    packages=[name for folder in FOLDERS for name in packages_below(folder)],
    package_data={"": ["*.html", "*.json", "*.txt", "py.typed"]},
    install_requires=[
        *("torch>=2.9,<2.14", "safetensors>=0.4", "tokenizers>=0.21"),
        *("jinja2>=3.1", "rich>=13", "platformdirs>=4"),
    ],
    extras_require={
        "reference": ["transformers==5.24.0", "accelerate"],
        "server": ["httpx>=0.27", "tenacity>=8.2"],
        "plot": ["matplotlib>=3.9"],
        "report": ["plotly>=6"],
        "hlo": ["protobuf>=6", "jaxlib>=0.7"],
    },
    entry_points={
        "console_scripts": [
            "neuron-compile = nxdi_qwen.scripts.neuron_compile:main",
            "nxdi-qwen-benchmark = nxdi_qwen.scripts.benchmark:main",
            "nxdi-qwen-generate = nxdi_qwen.scripts.generate:main",
            "nxdi-qwen-hardware-report = nxdi_qwen.scripts.hardware_report:main",
            "nxdi-qwen-plan = nxdi_qwen.scripts.plan:main",
            "nxdi-qwen-serve = nxdi_qwen.scripts.serve:main",
            "logit-diff = nxdi_qwen.scripts.logit_diff:main",
        ],
        "pytest11": ["nxdi-qwen-parity = nxdi_qwen.parity.pytest_plugin"],
        "vllm.platform_plugins": ["nxdi_qwen = nxdi_qwen.serving.plugin:platform"],
        "vllm.general_plugins": ["nxdi_qwen = nxdi_qwen.serving.plugin:general"],
    },
)

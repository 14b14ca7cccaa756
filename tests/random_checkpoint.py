"""Writes a checkpoint of a public shape with random weights: ``python -m tests.random_checkpoint OUT [PRESET]``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from nxdi_qwen.modeling.presets import preset
from tests.true_sizes.shared_model import random_reference


def main() -> None:
    out = Path(sys.argv[1])
    name = sys.argv[2] if len(sys.argv) > 2 else "qwen3.5-0.8b"
    partial = out.with_name(f"{out.name}.partial")
    random_reference(preset(name), torch.bfloat16, torch.device("cpu")).save_pretrained(partial)
    partial.replace(out)


if __name__ == "__main__":
    main()

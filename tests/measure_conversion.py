"""Peak memory of a conversion: ``python -m tests.measure_conversion --gigabytes 20 --degree 4 --folder DIR``.

Makes a sharded bfloat16 checkpoint below DIR, converts it to one file a rank in a process of its own, prints how far
that process rose above what it had before it read the first weight, and removes everything it made.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from nxdi_qwen.compile.hardware_facts import peak_rss_bytes
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.weights import Checkpoint, checkpoint_blocks, plan_weights, write_ranks
from tests.modeling.weights.synthetic import checkpoint_shapes, make_config

# Bytes of the embedding and the head together, and of a layer, in bfloat16 (nearly all of it experts).
ENDS, LAYER = 4 * 65536 * 2048, 2 * 3 * 64 * 512 * 2048
SHARD_BYTES = 1 << 30


class Measured(NamedTuple):
    """Bytes of the checkpoint, resident bytes before and at the peak, seconds."""

    checkpoint: int
    base: int
    peak: int
    seconds: float


def model_of(gigabytes: float) -> ModelConfig:
    """A mixture-of-experts shape whose checkpoint has about so many bytes; its largest tensors have 268 MB."""
    layers = max(1, round((gigabytes * 1e9 - ENDS) / LAYER))
    return make_config(
        "qwen3_5_moe",
        vocab_size=65536,
        hidden_size=2048,
        num_hidden_layers=layers,
        layer_types=tuple("full_attention" if (n + 1) % 4 == 0 else "linear_attention" for n in range(layers)),
        moe_layers=(True,) * layers,
        num_experts=64,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_attention_heads=16,
        num_key_value_heads=2,
    )


def make_checkpoint(folder: Path, config: ModelConfig) -> int:
    """Writes the shards and their index; returns the bytes of all tensors."""
    folder.mkdir()
    noise = torch.randint(-32768, 32767, (8 << 20,), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    pattern = memoryview(noise.numpy()).cast("B")
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = total = 0
    for name, shape in checkpoint_shapes(config, stacked=True).items():
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
        total += 2 * math.prod(shape)
    weight_map = {}
    for number, shard in enumerate(shards):
        file, header, end = f"model-{number}.safetensors", {}, 0
        for name, shape in shard.items():
            count = 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + count]}
            weight_map[name] = file
            end += count
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as data:
            data.write(len(text).to_bytes(8, "little") + text)
            while end:
                end -= data.write(pattern[:end])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def convert(source: Path, out: Path, config: ModelConfig, degree: int) -> tuple[int, int]:
    """Resident bytes before the first weight is read, and the most there ever were."""
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(source)
    plan = plan_weights(config, checkpoint)
    base = peak_rss_bytes()
    out.mkdir()
    paths = [out / f"tp{rank}.safetensors" for rank in range(degree)]
    write_ranks(paths, config, torch.bfloat16, checkpoint_blocks(plan, checkpoint, torch.bfloat16))
    return base, peak_rss_bytes()


def measure(folder: Path, gigabytes: float, degree: int) -> Measured:
    """Converts a checkpoint of that size below `folder`, in a new process."""
    config = model_of(gigabytes)
    size = make_checkpoint(folder / "checkpoint", config)
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        base, peak = pool.apply(convert, (folder / "checkpoint", folder / "ranks", config, degree))
    return Measured(size, base, peak, time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--degree", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="needs twice the size free")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measured = measure(Path(folder), options.gigabytes, options.degree)
    print(
        f"{measured.checkpoint / 1e9:.1f} GB to degree {options.degree} in {measured.seconds:.0f} s: peak "
        f"{measured.peak / 1e6:.0f} MB, {(measured.peak - measured.base) / 1e6:.0f} MB above the base process"
    )


if __name__ == "__main__":
    main()

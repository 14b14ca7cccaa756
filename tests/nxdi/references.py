"""What Hugging Face 5.24.0 computes in float32, stored for environments that have an older transformers.

A folder of `references/` is one fixture of `tests.hf_fixtures`: its configuration files, the names and shapes of its
tensors, and Hugging Face's results. Weights are not stored: `write_checkpoint` draws them again, bit for bit, on any
machine. `python -m tests.nxdi.make_references` writes the folder; nothing here needs transformers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nxdi_qwen.modeling.errors import InputError

FOLDER = Path(__file__).parent / "references"
NAMES = (
    "qwen3_next",
    "qwen3_next_mixed",
    "qwen3_5",
    "qwen3_5_tied",
    "qwen3_5_bias",
    "qwen3_5_wide",
    "qwen3_5_moe",
    "qwen3_5_moe_tied",
)
FAMILY_NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # with the logits of every token, and bfloat16
LENGTHS = (1, 2, 3, 4, 63, 64, 65, 130)
RAGGED_LENGTHS = (3, 130, 1, 64)
GREEDY_LENGTHS = (3, 63, 130)
DECODE_STEPS, GREEDY_STEPS = 16, 24
BFLOAT16_PROMPT = 100


# --- The rule by which fixtures are filled: tests.hf_fixtures fills its models by it as well.


class Normal(NamedTuple):
    mean: float
    std: float


class Uniform(NamedTuple):
    low: float
    high: float


def distribution(name: str, shape: Sequence[int]) -> Normal | Uniform:
    """How the parameter `name` of a fixture is drawn; experts one by one or stacked.

    A linear layer keeps the scale of its input times a gain; the gains make each mixer's and each MLP's output about
    as large as the residual stream, so that no fault in a layer stays small in the logits.
    """
    gains = {"v_proj": 2.0, "down_proj": 0.8, "gate_up_proj": 1.2, "gate": 1.5, "lm_head": 2.5}
    parts = name.split(".")
    layer = parts[-1] if parts[-1] not in ("weight", "bias") else parts[-2]
    if "experts" in parts and layer in ("gate_proj", "up_proj"):
        layer = "gate_up_proj"
    if layer == "A_log":
        return Uniform(math.log(0.01), math.log(0.1))
    if layer == "dt_bias":
        return Normal(0.0, 0.7)
    if name.endswith("linear_attn.norm.weight"):
        return Normal(1.0, 0.3)
    if "norm" in layer or parts[-1] == "bias":
        return Normal(0.0, 0.3)
    if layer == "embed_tokens":
        return Normal(0.0, 0.8)
    gain = 3.0 if layer == "conv1d" else gains.get(layer, 1.0)
    return Normal(0.0, gain / math.sqrt(shape[-1]))


def query_key_pairs(weights: Mapping[str, Tensor], key_heads: int, dk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the rows that make q and of those that make k, in every input projection and convolution of GDN layers.

    A fixture gets 0.6 q + 0.8 k for its q. Where q . k of the first token cancels, the output norm magnifies float32
    rounding a hundredfold, and no comparison at 1e-5 is possible.
    """
    width, end = key_heads * dk, "linear_attn.conv1d.weight"
    for name, convolution in weights.items():
        if name.endswith(end):
            layer = name.removesuffix("conv1d.weight")
            if layer + "in_proj_qkvz.weight" in weights:  # grouped by key head
                q, k, *_ = weights[layer + "in_proj_qkvz.weight"].unflatten(0, (key_heads, -1)).split(dk, dim=1)
            else:
                q, k, *_ = weights[layer + "in_proj_qkv.weight"].split(width)
            yield q, k
            q_convolution, k_convolution, *_ = convolution.split(width)
            yield q_convolution, k_convolution


# --- Checkpoints


def write_checkpoint(name: str, folder: Path, *, rounded: bool = False, all_experts: bool = False) -> Path:
    """Write the fixture `name` as Hugging Face 5.24.0 saves a text model: config.json, generation_config.json and
    model.safetensors, float32. Returns `folder`.

    `rounded`: every value is one of bfloat16 (stored as float32), as the bfloat16 references have it. `all_experts`:
    each token goes to all experts. Raises InputError if this machine draws other weights than those of the references.
    """
    stored = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((stored / "config.json").read_text())
    if all_experts:
        config["num_experts_per_tok"] = config["num_experts"]
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    else:
        shutil.copyfile(stored / "config.json", folder / "config.json")
    shutil.copyfile(stored / "generation_config.json", folder / "generation_config.json")
    recorded = json.loads((stored / "tensors.json").read_text())
    weights = draw_weights(name, recorded["shapes"], config)
    if fingerprint(weights) != recorded["sha256"]:
        raise InputError(
            f"fixture {name}: torch {torch.__version__} draws other weights than those of the stored references; run "
            "python -m tests.nxdi.make_references with it and transformers 5.24.0, and look at what changed"
        )
    if rounded:
        weights = {key: tensor.to(torch.bfloat16).float() for key, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draw_weights(fixture: str, shapes: Mapping[str, Sequence[int]], config: Mapping[str, int]) -> dict[str, Tensor]:
    """The weights of a fixture by name, float32: `shapes` of all its tensors, `config` of the text model."""
    weights = {name: _draw(f"{fixture}/{name}", shape) for name, shape in sorted(shapes.items())}
    for query, key in query_key_pairs(weights, config["linear_num_key_heads"], config["linear_key_head_dim"]):
        query.copy_(0.6 * query.double() + 0.8 * key.double())
    return weights


def _draw(name: str, shape: Sequence[int]) -> Tensor:
    """torch's own normal numbers depend on the CPU's instructions. These come from integers, and each operation on
    them is exact or rounded once: a normal number is the sum of 12 uniform ones (variance 1/12 each), less 6."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**24, (12, *shape), generator=generator)
    rule = distribution(name, shape)
    if isinstance(rule, Uniform):
        value = bits[0].double() / 2**24 * (rule.high - rule.low) + rule.low
    else:
        value = (bits.sum(dim=0).double() / 2**24 - 6) * rule.std + rule.mean
    return value.float()


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """sha256 over names and float32 bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


# --- Results


@dataclass(frozen=True)
class Prompt:
    """A prompt and what follows it, one unpadded row.

    ids: [T] int64. continuation: [16] int64, random, fed token by token. logits: [17, V] float32, after the prompt and
    after each token of the continuation.
    """

    ids: Tensor
    continuation: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Greedy:
    """Greedy generation, which no end token stops.

    ids: [T] int64, the prompt. tokens: [24] int64. margins: [24] float32, of each choice: the largest logit less the
    second, over the largest |logit|.
    """

    ids: Tensor
    tokens: Tensor
    margins: Tensor


@dataclass(frozen=True)
class Run:
    """logits: [T, V] float32. experts: [T, MoE layers, k] int64, ascending; [T, 0, 0] for a dense model."""

    logits: Tensor
    experts: Tensor


@dataclass(frozen=True)
class Bfloat16:
    """One row of T = 116 tokens, of which the first 100 are the prompt, on weights rounded to bfloat16.

    ids: [T] int64. exact: one pass in float32. theirs: Hugging Face's bfloat16, prefill and 16 decode steps.
    """

    ids: Tensor
    exact: Run
    theirs: Run


@dataclass(frozen=True)
class Reference:
    """Results for one fixture.

    prompts: by length, `LENGTHS`. Length 64 is one token repeated; pad ids (256 and 0) stand first, last and inside in
    others. ragged: four of them for a batch. greedy: after three of them. every: [130, V] float32, logits of every
    token of the prompt of 130. bfloat16: by top-k, `all_experts` with all experts chosen (`write_checkpoint` has both).
    The last three are None for what a fixture has not (`FAMILY_NAMES`).
    """

    prompts: dict[int, Prompt]
    ragged: tuple[Prompt, ...]
    greedy: tuple[Greedy, ...]
    every: Tensor | None
    bfloat16: Bfloat16 | None
    all_experts: Bfloat16 | None


@functools.cache
def reference(name: str) -> Reference:
    """The stored results for a fixture of `NAMES`. To be read only."""
    stored = load_file(FOLDER / name / "results.safetensors")
    prompts = {n: Prompt(*(stored[f"{n}.{key}"] for key in ("ids", "continuation", "logits"))) for n in LENGTHS}
    greedy = zip(GREEDY_LENGTHS, stored["greedy.tokens"], stored["greedy.margins"], strict=True)
    return Reference(
        prompts=prompts,
        ragged=tuple(prompts[length] for length in RAGGED_LENGTHS),
        greedy=tuple(Greedy(prompts[length].ids, tokens, margins) for length, tokens, margins in greedy),
        every=stored.get("every"),
        bfloat16=_bfloat16(stored, "bfloat16"),
        all_experts=_bfloat16(stored, "all_experts"),
    )


def _bfloat16(stored: Mapping[str, Tensor], case: str) -> Bfloat16 | None:
    if f"{case}.exact.logits" not in stored:
        return None
    exact, theirs = (
        Run(stored[f"{case}.{run}.logits"].float(), stored[f"{case}.{run}.experts"].long())
        for run in ("exact", "theirs")
    )
    return Bfloat16(stored["bfloat16.ids"], exact, theirs)

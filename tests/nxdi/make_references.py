"""`python -m tests.nxdi.make_references` writes `references/` anew. Needs transformers 5.24.0.

On one machine a second run writes the same bytes; another CPU may round some results differently.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.byte_tokenizer import PAD_ID
from tests.hf_fixtures import FIXTURES, hf_model, reference_logits, reference_steps, save_checkpoint
from tests.modeling.test_bfloat16 import PROMPT, hf_bfloat16_run, hf_routers, in_bfloat16, record
from tests.nxdi.references import (
    BFLOAT16_PROMPT,
    DECODE_STEPS,
    FAMILY_NAMES,
    FOLDER,
    GREEDY_LENGTHS,
    GREEDY_STEPS,
    LENGTHS,
    NAMES,
    draw_weights,
    fingerprint,
    write_checkpoint,
)

TRANSFORMERS = "5.24.0"
REPEATED_LENGTH, REPEATED_ID = 64, 17
# What a program may pad with: the generation configuration's pad id, and zero.
PADS = {4: {1: PAD_ID}, 63: {-1: PAD_ID, 5: 0}, 65: {0: PAD_ID, 1: PAD_ID, 40: 0}, 130: {60: 0, 63: PAD_ID, 64: PAD_ID}}


def main() -> int:
    """Write the folder of every fixture; 2 and one line under another transformers."""
    console = Console(stderr=True)
    if transformers.__version__ != TRANSFORMERS:
        console.print(
            f"error: transformers {transformers.__version__} is not the reference: install transformers {TRANSFORMERS}",
            highlight=False,
            soft_wrap=True,
        )
        return 2
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in track(NAMES, description="references", console=console):
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        record_checkpoint(name, folder)
        save_file(results(name), folder / "results.safetensors")
    return 0


def record_checkpoint(name: str, folder: Path) -> None:
    """What `write_checkpoint` needs: the configuration files as Hugging Face writes them, and tensors.json."""
    with tempfile.TemporaryDirectory() as temporary:
        saved = save_checkpoint(hf_model(name), Path(temporary))
        for file in ("config.json", "generation_config.json"):
            shutil.copyfile(saved / file, folder / file)
        tensors = load_file(saved / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    shapes = {key: list(tensor.shape) for key, tensor in sorted(tensors.items())}
    sha256 = fingerprint(draw_weights(name, shapes, json.loads((folder / "config.json").read_text())))
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(shape)}" for key, shape in shapes.items())
    text = f'{{\n  "dtype": "float32",\n  "sha256": "{sha256}",\n  "shapes": {{\n{lines}\n  }}\n}}\n'
    (folder / "tensors.json").write_text(text)


def load_model(name: str, **form: bool) -> PreTrainedModel:
    """Hugging Face's model, float32, of the checkpoint that `write_checkpoint` writes in this `form`."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(name, Path(folder), **form)
        model = type(hf_model(name)).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.eval().requires_grad_(False)


def results(name: str) -> dict[str, Tensor]:
    """Hugging Face's results for a fixture, by the names under which `reference` looks for them."""
    model = load_model(name)
    generator = torch.Generator().manual_seed(NAMES.index(name))

    def random_ids(count: int) -> Tensor:
        return torch.randint(0, model.config.vocab_size, (count,), generator=generator)

    stored: dict[str, Tensor] = {}
    prompts = {length: random_ids(length) for length in LENGTHS}
    for length, ids in prompts.items():
        for place, pad in PADS.get(length, {}).items():
            ids[place] = pad
    prompts[REPEATED_LENGTH].fill_(REPEATED_ID)
    for length, ids in prompts.items():
        continuation = random_ids(DECODE_STEPS)
        continuation[3] = PAD_ID
        logits = reference_steps(model, ids, continuation).logits
        stored |= {f"{length}.ids": ids, f"{length}.continuation": continuation, f"{length}.logits": logits}
    runs = [greedy(model, prompts[length]) for length in GREEDY_LENGTHS]
    stored["greedy.tokens"], stored["greedy.margins"] = (torch.stack(part) for part in zip(*runs, strict=True))
    if name in FAMILY_NAMES:
        stored["every"] = reference_logits(model, prompts[LENGTHS[-1]])
        ids = stored["bfloat16.ids"] = random_ids(BFLOAT16_PROMPT + DECODE_STEPS)
        stored |= bfloat16_results("bfloat16", load_model(name, rounded=True), ids)
        if FIXTURES[name].moe:
            stored |= bfloat16_results("all_experts", load_model(name, rounded=True, all_experts=True), ids)
    return {key: tensor.contiguous() for key, tensor in stored.items()}


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [24] and margins [24] of `references.Greedy`."""
    cache = DynamicCache(config=model.config)
    tokens, margins, step = [], [], ids
    for _ in range(GREEDY_STEPS):
        logits = model(input_ids=step[None], cache=cache, use_cache=True).logits[0, -1]
        best = logits.topk(2)
        tokens.append(best.indices[0])
        margins.append((best.values[0] - best.values[1]) / logits.abs().max())
        step = best.indices[:1]
    return torch.stack(tokens), torch.stack(margins)


def bfloat16_results(case: str, model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """A float32 pass of `model`, whose weights are rounded, and its bfloat16 run."""
    assert PROMPT == BFLOAT16_PROMPT
    half = in_bfloat16(model)
    exact = record(hf_routers(model), 2, lambda: [reference_logits(model, ids)])
    theirs = record(hf_routers(half), 2, lambda: hf_bfloat16_run(half, ids))
    assert torch.equal(theirs.logits.bfloat16().float(), theirs.logits)
    return {
        f"{case}.exact.logits": exact.logits,
        f"{case}.theirs.logits": theirs.logits.bfloat16(),  # nothing is lost
        f"{case}.exact.experts": exact.experts.to(torch.uint8),
        f"{case}.theirs.experts": theirs.experts.to(torch.uint8),
    }


if __name__ == "__main__":
    sys.exit(main())

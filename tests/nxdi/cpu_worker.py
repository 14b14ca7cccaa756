"""One rank of NxDI's CPU mode: `torchrun -m tests.nxdi.cpu_worker FOLDER`.

Reads the fixtures' checkpoints from `FOLDER/NAME` and writes its results to `FOLDER/DEGREE-RANK.pt`: a dictionary of
`Result`, itself as a dictionary, by fixture. What is computed is compared by the tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from tests.nxdi.calls import MAX_LENGTH, Requests, replay, unloaded
from tests.nxdi.references import DECODE_STEPS, FAMILY_NAMES, GREEDY_STEPS, reference

# All have 2 KV heads and 2 key heads. Three value heads, and in one three query heads, to a group: at degree 4 some
# ranks hold one head less; tied heads; biases.
NAMES = (*FAMILY_NAMES, "qwen3_next_mixed", "qwen3_5_bias")
ALONE_LENGTHS = (1, 65, 130)
ALONE_STEPS = 4
SAMPLED, BROKEN = "qwen3_5_moe", "qwen3_5"


class Result(NamedTuple):
    """Logits by slot as `replay` gives them: of rows that come one by one, and of a ragged batch. `unloaded`: names of
    parameters.

    `broken`, for one fixture: logits of the ragged batch with one of the last rank's weights off by a hundredth.
    `sampled`, for one fixture: tokens [24, rows] taken on the device, and those of the largest logits after the same
    inputs.
    """

    alone: dict[int, Tensor]
    ragged: dict[int, Tensor]
    unloaded: list[str]
    broken: dict[int, Tensor] | None
    sampled: tuple[Tensor, Tensor] | None


def run(folder: Path, name: str, rank: int, options: dict[str, Any]) -> Result:
    from nxdi_qwen.parity.targets.nxdi_application import cpu_application

    app = cpu_application(folder / name, **options)
    # Under torchrun, `to_cpu` would make the process group again for the next application.
    os.environ.pop("WORLD_SIZE", None)
    module = app.context_encoding_model.model
    missing = unloaded(app, module, rank)
    apart = alone(app, name)
    together = ragged(app, name, DECODE_STEPS)
    sampled = on_device(app, folder / name, options) if name == SAMPLED else None
    broken = None
    if name == BROKEN:
        if rank == distributed.get_world_size() - 1:
            module.layers[0].linear_attn.out_proj.weight.data *= 1.01
        broken = ragged(app, name, steps=0)
    return Result(apart, together, missing, broken, sampled)


def alone(app: Any, name: str) -> dict[int, Tensor]:
    """Rows that come one by one, while those before them wait; then all decode."""
    requests, prompts = Requests(app), [reference(name).prompts[length] for length in ALONE_LENGTHS]
    rows = [[requests.prefill({slot: prompt.ids})[0]] for slot, prompt in enumerate(prompts)]
    for step in range(ALONE_STEPS):
        tokens = {slot: int(prompt.continuation[step]) for slot, prompt in enumerate(prompts)}
        for row, logits in zip(rows, requests.decode(tokens), strict=True):
            row.append(logits)
    return {slot: torch.stack(row) for slot, row in enumerate(rows)}


def ragged(app: Any, name: str, steps: int) -> dict[int, Tensor]:
    return replay(Requests(app), dict(enumerate(reference(name).ragged)), steps)


def on_device(app: Any, checkpoint: Path, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens [24, rows] that an application takes on the device, and the best ones by the logits of `app`."""
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig

    from nxdi_qwen.parity.targets.nxdi_application import cpu_application

    # With `on_cpu`, NxDI would look at the logits of one rank only.
    greedy = {"on_device_sampling_config": OnDeviceSamplingConfig(), "on_cpu": False, "disable_argmax_kernel": True}
    sampling, plain = Requests(cpu_application(checkpoint, **options, **greedy)), Requests(app)
    prompts = {slot: prompt.ids for slot, prompt in enumerate(reference(checkpoint.name).ragged)}
    tokens, best = [sampling.prefill(prompts)], [plain.prefill(prompts).argmax(-1)]
    while len(tokens) < GREEDY_STEPS:
        last = dict(enumerate(tokens[-1].tolist()))
        tokens.append(sampling.decode(last))
        best.append(plain.decode(last).argmax(-1))
    return torch.stack(tokens).to(torch.int64), torch.stack(best)


@torch.no_grad()
def main(folder: Path) -> None:
    torch.set_num_threads(1)
    degree, rank = (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK"))
    options = {"tp_degree": degree, "batch_size": 4, "seq_len": MAX_LENGTH}
    results = {name: run(folder, name, rank, options)._asdict() for name in NAMES}
    torch.save(results, folder / f"{degree}-{rank}.pt")
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

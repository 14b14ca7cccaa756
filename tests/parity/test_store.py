"""Kept runs come back as they were, are told apart by what they were computed from, and are refused when damaged."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.presets import preset
from nxdi_qwen.parity.records import Description, Prompt, Run, TopLogprobs
from nxdi_qwen.parity.run_file import PARTIAL
from nxdi_qwen.parity.store import Store, run_key
from nxdi_qwen.parity.targets.stored import StoredRuns, StoredSide

CONFIG = preset("qwen3.5-0.8b")
WHO = Description("huggingface", "a" * 64, "float32", {"transformers": "5.24.0"}, ("a note",))
PROMPT = Prompt("three", (1, 2, 3))


def run_of(prompt: Prompt = PROMPT, seed: int = 0, numbers: int = 100) -> Run:
    generator = torch.Generator().manual_seed(seed)
    return Run(
        prompt,
        (7, 8),
        torch.randn(5, numbers, generator=generator),
        top=TopLogprobs(torch.arange(10).reshape(5, 2), torch.randn(5, 2, generator=generator)),
        hidden=torch.randn(3, 5, 4, generator=generator).bfloat16(),
        states={
            "layers.0.recurrent": torch.randn(3, 2, 4, 4, generator=generator),
            "layers.1.key": torch.ones(5, 2, 4),
        },
        experts=torch.randint(0, 8, (2, 5, 2), generator=generator),
        router_margins=torch.rand(2, 5, generator=generator),
    )


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if dataclasses.is_dataclass(first):
        return all(same(getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(first))
    return bool(first == second)


def test_a_run_comes_back(tmp_path: Path) -> None:
    key = run_key(WHO, PROMPT, None, 2)
    assert Store(tmp_path).header(key) is None
    Store(tmp_path).put(key, run_of(), WHO, CONFIG)
    renamed = Prompt("another name", PROMPT.ids)
    found = Store(tmp_path).get(key, renamed)
    assert found is not None and same(found, dataclasses.replace(run_of(), prompt=renamed))
    header = Store(tmp_path).header(key)
    assert header is not None and (header.forced, header.description, header.config) == ((7, 8), WHO, CONFIG)


def test_keys_tell_apart_what_may_differ() -> None:
    change = dataclasses.replace
    keys = {
        run_key(WHO, PROMPT, None, 2),
        run_key(WHO, PROMPT, None, 3),
        run_key(WHO, PROMPT, (7, 8), 2),
        run_key(WHO, Prompt("three", (1, 2, 4)), None, 2),
        run_key(change(WHO, model_sha256="b" * 64), PROMPT, None, 2),
        run_key(change(WHO, dtype="bfloat16"), PROMPT, None, 2),
        run_key(change(WHO, versions={"transformers": "5.25.0"}), PROMPT, None, 2),
    }
    assert len(keys) == 7
    assert run_key(WHO, Prompt("renamed", PROMPT.ids), None, 2) in keys


@pytest.mark.parametrize("damage", ["truncated", "edited", "empty"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    key = run_key(WHO, PROMPT, None, 2)
    Store(tmp_path).put(key, run_of(), WHO, CONFIG)
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "edited":
        content[-1] ^= 1
    file.write_bytes(b"" if damage == "empty" else content if damage == "edited" else content[:-10])
    with pytest.raises(InputError, match=rf"{file.name} is truncated.*remove it, or choose another cache"):
        Store(tmp_path).header(key)


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    keys = [f"{number:032x}" for number in range(4)]
    foreign, half = tmp_path / "model.safetensors", tmp_path / f"{PARTIAL}x"
    foreign.write_bytes(bytes(10**6))  # somebody else's, whatever its size
    half.write_bytes(bytes(10**6))
    os.utime(half, (1, 1))
    size = 0
    for number, key in enumerate(keys[:3]):
        Store(tmp_path).put(key, run_of(seed=number, numbers=10_000), WHO, CONFIG)
        (file,) = tmp_path.glob(f"{key}.*")
        size = file.stat().st_size
        os.utime(file, (number + 10, number + 10))
    assert not half.exists()
    assert Store(tmp_path).header(keys[0]) is not None  # used again: now the second is the oldest
    store = Store(tmp_path, limit=3 * size + size // 2)
    store.put(keys[3], run_of(seed=3, numbers=10_000), WHO, CONFIG)
    assert [Store(tmp_path).header(key) is not None for key in keys] == [True, False, True, True]
    small = Store(tmp_path, limit=size // 2)
    small.put(keys[1], run_of(seed=1, numbers=10_000), WHO, CONFIG)
    assert small.get(keys[1], PROMPT) is not None  # what the process works with stays until its end
    small.trim()
    assert small.get(keys[1], PROMPT) is None and foreign.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write the cache .* choose another with --cache"):
        Store(tmp_path / "file" / "cache")


def test_stored_results(tmp_path: Path) -> None:
    prompts = [PROMPT, Prompt("one", (4,))]
    runs = StoredRuns(tmp_path / "kept", WHO, CONFIG)
    for number, prompt in enumerate(prompts):
        runs.add(run_of(prompt, number))
    side = StoredSide(tmp_path / "kept")
    assert side.prompts == prompts and side.description.kind == "stored" and side.description.model_sha256 == "a" * 64
    assert same(side.run(prompts[1], (7, 8), 2), run_of(prompts[1], 1))
    for ask, message in [
        (lambda: side.run(PROMPT, (7, 9), 2), "another continuation"),
        (lambda: side.forced(Prompt("new", (9,))), "no run of prompt new"),
        (lambda: side.expect(prompts, 3), "has 2 decode steps of prompt three, not 3"),
        (lambda: StoredRuns(tmp_path / "kept", WHO, CONFIG), "exists: remove it"),
        (lambda: StoredSide(tmp_path / "none"), "no stored results in"),
    ]:
        with pytest.raises(InputError, match=message):
            ask()
    other = StoredRuns(tmp_path / "other", dataclasses.replace(WHO, dtype="bfloat16"), CONFIG)
    other.add(run_of(Prompt("five", (5,))))
    (foreign,) = (tmp_path / "other").iterdir()
    foreign.rename(tmp_path / "kept" / foreign.name.replace("0001", "0003"))
    with pytest.raises(InputError, match="is of another run than the others"):
        StoredSide(tmp_path / "kept")

"""Where a model comes from: checkpoint folders and presets."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.modeling.parallel import parameter_cuts
from nxdi_qwen.modeling.partition import Parallel
from tests.artifacts import checkpoint_of, short_model
from tests.byte_tokenizer import IM_END_ID, PAD_ID

NAME = "qwen3_next_mixed"


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_of(tmp_path_factory, NAME), tmp_path / "model"))


def test_a_checkpoint_is_described(checkpoint: Path) -> None:
    source = ModelSource.from_checkpoint(checkpoint)
    assert source.name == "model" and source.folder == checkpoint
    assert source.config.tie_word_embeddings and set(source.config.eos_token_ids) == {PAD_ID, IM_END_ID}
    assert (source.generation.do_sample, source.generation.top_k, source.generation.top_p) == (True, 20, 0.8)
    assert [path.name for path in source.text_files] == ["tokenizer.json", "tokenizer_config.json"]


def test_what_was_ignored_is_noted(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"mamba_ssm_dtype": "float32"}))
    assert any("mamba_ssm_dtype" in note for note in ModelSource.from_checkpoint(checkpoint).notes)


def test_the_fingerprint_tells_checkpoints_apart(checkpoint: Path) -> None:
    first = ModelSource.from_checkpoint(checkpoint).fingerprint
    assert ModelSource.from_checkpoint(checkpoint).fingerprint == first
    moved = checkpoint.rename(checkpoint.with_name("other"))
    assert ModelSource.from_checkpoint(moved).fingerprint == first
    os.utime(moved / "model.safetensors", ns=(1, 1))
    assert ModelSource.from_checkpoint(moved).fingerprint != first


def test_the_loaded_model_is_complete(checkpoint: Path) -> None:
    source = ModelSource.from_checkpoint(checkpoint)
    told = []
    model = source.load(torch.float32, progress=lambda *at: told.append(at))
    fresh = HybridCausalLM(source.config, torch.float32, Parallel())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in fresh.named_parameters()]
    for (name, parameter), (_, expected) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert not parameter.is_meta and not parameter.requires_grad
        assert parameter_cuts(parameter) == parameter_cuts(expected), name
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert told[-1][0] == "weights" and told[-1][1] == told[-1][2] == len(told)

    embedding = short_model(NAME).model.embed_tokens.weight
    assert torch.equal(model.embed_tokens.weight, embedding)
    hidden = torch.randn(3, source.config.hidden_size)
    torch.testing.assert_close(model.head(hidden), hidden @ embedding.T)


def test_a_preset_needs_no_folder() -> None:
    source = ModelSource.from_preset("qwen3.5-0.8b")
    assert (source.config.num_hidden_layers, source.config.hidden_size, source.folder) == (24, 1024, None)
    assert source.text_files == () and "random weights" in source.notes[0]


def test_an_unknown_preset_is_refused_with_the_names() -> None:
    with pytest.raises(InputError, match=r"qwen3\.5-0\.8b"):
        ModelSource.from_preset("qwen9")


def test_no_folder() -> None:
    with pytest.raises(InputError, match=r"hf download Qwen/Qwen3\.5-0\.8B --local-dir Qwen3\.5-0\.8B"):
        ModelSource.from_checkpoint(Path("Qwen/Qwen3.5-0.8B"))

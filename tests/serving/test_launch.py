"""What follows from an artifact before vLLM is there, and that vLLM is left alone unless it is asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts.serve import MIDDLEWARE, serve, vllm_arguments
from nxdi_qwen.serving import plugin
from nxdi_qwen.serving.launch import engine_arguments
from nxdi_qwen.serving.slots import SlotTable
from tests.artifacts import MAX_LENGTH, SLOTS, artifact_of
from tests.command_line import call
from tests.compile.test_artifact import edited_manifest


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(tmp_path_factory, "qwen3_5")


def test_options_follow_from_the_artifact_unless_they_are_given(artifact: Path) -> None:
    given = ["--port", "1", "--max_num_seqs=2", "--enable-prefix-caching"]
    arguments = vllm_arguments(artifact, given)
    assert (arguments[0], arguments[-4:]) == (str(artifact), given)
    ours = arguments[1:-4]
    assert "--max-num-seqs" not in ours and "--no-enable-prefix-caching" not in ours
    assert [ours[place + 1] for place, text in enumerate(ours) if text == "--middleware"] == list(MIDDLEWARE)
    ours = vllm_arguments(artifact, [])
    assert "--no-enable-prefix-caching" in ours and "--skip-tokenizer-init" not in ours
    following = {"--dtype": "float32", "--max-model-len": str(MAX_LENGTH), "--max-num-seqs": str(SLOTS)}
    for option, value in following.items():
        assert ours[ours.index(option) + 1] == value


def test_without_the_checkpoints_files(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no artifact at"):
        engine_arguments(tmp_path / "none")
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    files = json.loads((copy / "manifest.json").read_text())["checkpoint_files"]
    for name, then in (("tokenizer.json", None), ("config.json", "was compiled from a preset and has no config.json")):
        (copy / name).unlink()
        del files[name]
        edited_manifest(copy, checkpoint_files=files)
        if then is None:
            assert engine_arguments(copy)["skip_tokenizer_init"] and "--skip-tokenizer-init" in vllm_arguments(copy, [])
        else:
            with pytest.raises(InputError, match=then):
                engine_arguments(copy)


def test_without_vllm_the_command_says_what_to_install(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    output = call(capsys, serve, artifact)
    assert output.status == 2 and "vLLM is not installed" in output.err


@pytest.mark.parametrize(
    ("names", "expected"),
    [(None, None), ("", None), ("other", None), ("nxdi_qwen_more", None), ("other,nxdi_qwen", "nxdi_qwen.serving.")],
)
def test_the_platform_is_there_only_where_it_is_named(
    names: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(plugin.PLUGINS_VARIABLE, raising=False)
    if names is not None:
        monkeypatch.setenv(plugin.PLUGINS_VARIABLE, names)
    path = plugin.platform()
    assert path is None if expected is None else str(path).startswith(expected)


def test_the_entry_points_import_nothing_heavy() -> None:
    program = (
        "import sys, nxdi_qwen.serving.plugin as p; p.platform(); "
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_slots_are_given_lowest_first_and_come_back() -> None:
    table = SlotTable(3)
    assert [table.take(name) for name in "abc"] == [0, 1, 2] and table.free == 0
    with pytest.raises(RuntimeError, match="no slot is free for request d: all 3 are held"):
        table.take("d")
    assert (table.release("b"), table.release("b")) == (1, None)
    assert "b" not in table and table.take("d") == 1
    assert table.holders_outside({"a", "d"}) == ["c"]

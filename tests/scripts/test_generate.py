"""nxdi-qwen-generate: text, chats and token ids in, streamed text or JSON out; bad input refused in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdi_qwen.compile.engine import Engine
from nxdi_qwen.compile.sampling import SamplingParams
from nxdi_qwen.scripts import generate as script
from nxdi_qwen.scripts.generate import generate
from tests.artifacts import MAX_LENGTH, artifact_of, served
from tests.command_line import call, refused
from tests.compile.test_artifact import changed_byte, edited_manifest
from tests.hf_fixtures import reference_logits

ROOT = Path(__file__).parents[2]
NAME = "qwen3_5"
GREEDY = ("--temperature", 0, "--ignore-eos")
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(tmp_path_factory, NAME)


@pytest.fixture
def shared_executor(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads the graphs once for all tests; one test loads them as a user does."""
    executor = served(tmp_path_factory, "exported", NAME).executor
    monkeypatch.setattr(script, "load_cpu", lambda *_: executor)


@pytest.fixture
def run(artifact: Path, shared_executor: None, capsys: pytest.CaptureFixture[str]) -> Any:
    """run(options) -> the completions of --json."""

    def run(*options: object) -> list[dict[str, Any]]:
        output = call(capsys, generate, "--artifacts", artifact, "--json", *options)
        assert output.status == 0, output.err
        result = json.loads(output.out)
        assert result["artifact"] == str(artifact)
        return list(result["completions"])

    return run


def encoded(text: str) -> list[int]:
    """Ids of the fixtures' tokenizer: a byte is its own id."""
    ids: list[int] = []
    for number, part in enumerate(text.split("<|im_")):
        if number:
            special = 257 if part.startswith("start|>") else 258
            ids.append(special)
            part = part.split("|>", 1)[1]
        ids += part.encode()
    return ids


def test_prompts_chats_and_ids_run_together(run: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    done = run("--prompt", "é", "--ids", "1,2,3", "--chat", "hi", "--prompt", "x" * 100, "--max-new-tokens", 5, *GREEDY)
    assert [one["prompt_ids"] for one in done] == [[0xC3, 0xA9], [1, 2, 3], encoded(CHAT), [120] * 100]
    assert [one["request"] for one in done] == [0, 1, 2, 3]
    model = served(tmp_path_factory, "exported", NAME).model
    for one in done:
        assert len(one["token_ids"]) == 5 and one["finish_reason"] == "length" and "logprobs" not in one
        logits = reference_logits(model, torch.tensor(one["prompt_ids"] + one["token_ids"]))[-6:-1]
        assert logits.argmax(dim=1).tolist() == one["token_ids"]
        assert isinstance(one["text"], str)


def test_the_template_gets_its_arguments(run: Any) -> None:
    def prompt(*options: object) -> list[int]:
        return list(run("--chat", "hi", "--max-new-tokens", 1, *options)[0]["prompt_ids"])

    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    assert prompt() == prompt("--thinking", "on") == encoded(CHAT)
    assert prompt("--thinking", "off") == encoded(CHAT + "\n</think>\n\n")
    assert prompt("--system", "be brief") == encoded(system + CHAT)
    assert prompt("--template-arguments", '{"enable_thinking": false}') == encoded(CHAT + "\n</think>\n\n")
    no_turn = prompt("--template-arguments", '{"add_generation_prompt": false}')
    assert no_turn == encoded("<|im_start|>user\nhi<|im_end|>\n")


def test_sampling_options_reach_the_engine(
    run: Any, tmp_path_factory: pytest.TempPathFactory, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []
    submit = Engine.submit

    def spying(engine: Engine, ids: list[int], params: SamplingParams) -> int:
        seen.append(params)
        return submit(engine, ids, params)

    monkeypatch.setattr(Engine, "submit", spying)
    first = run("--ids", "1,2", "--max-new-tokens", 6, "--seed", 3, "--ignore-eos")
    assert seen[-1] == SamplingParams(
        max_new_tokens=6, temperature=0.7, top_k=20, top_p=0.8, seed=3, ignore_eos=True
    )  # the fixture's generation_config.json
    assert run("--ids", "1,2", "--max-new-tokens", 6, "--seed", 3, "--ignore-eos") == first
    options = (
        "--temperature 0.5 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty 0.3 --logprobs 2 --max-new-tokens 3 --seed 1"
    )
    done = run("--ids", "1,2", *options.split(), "--stop", "abc", "--stop", "d")
    assert seen[-1] == SamplingParams(3, 0.5, 5, 0.9, 0.1, 1.1, 0.2, 0.3, 2, 1, ("abc", "d"))
    for entry, token in zip(done[0]["logprobs"], done[0]["token_ids"], strict=True):
        assert entry["id"] == token and entry["logprob"] <= 0 and len(entry["top"]) == 2


@pytest.mark.usefixtures("shared_executor")
def test_a_single_prompt_streams(
    artifact: Path, run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = run("--prompt", "ab", "--max-new-tokens", 6, *GREEDY)
    printed_at_step: list[str] = []
    step = Engine.step

    def spying(engine: Engine) -> Any:
        printed_at_step.append(capsys.readouterr().out)
        return step(engine)

    monkeypatch.setattr(Engine, "step", spying)
    output = call(capsys, generate, "--artifacts", artifact, "--prompt", "ab", "--max-new-tokens", 6, *GREEDY)
    assert "".join(printed_at_step) + output.out == expected["text"] + "\n"
    assert len([text for text in printed_at_step if text]) > 1, "nothing came before the end"


@pytest.mark.usefixtures("shared_executor")
def test_several_prompts_are_shown_with_their_numbers(
    artifact: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--prompt", "ab", "--prompt", "cd", "--max-new-tokens", 4, "--logprobs", 1, *GREEDY)
    expected = run(*arguments)
    output = call(capsys, generate, "--artifacts", artifact, *arguments)
    for one in expected:
        assert f"[{one['request']}] {one['text']}\n" in output.out
        for entry in one["logprobs"]:
            assert f"    {entry['id']} logprob {entry['logprob']:.4f}" in output.out


def without_tokenizer(artifact: Path, folder: Path, keep: tuple[str, ...] = ()) -> Path:
    """A copy of the artifact as it comes from a checkpoint without tokenizer files, but for those in `keep`."""
    copy = Path(shutil.copytree(artifact, folder / "copy"))
    content = json.loads((copy / "manifest.json").read_text())
    for name in list(content["checkpoint_files"]):
        if Path(name).name not in keep:
            (copy / name).unlink()
            del content["checkpoint_files"][name]
    edited_manifest(copy, checkpoint_files=content["checkpoint_files"])
    return copy


@pytest.mark.usefixtures("shared_executor")
@pytest.mark.parametrize("keep", [(), ("tokenizer_config.json",)])
def test_ids_need_no_tokenizer(
    keep: tuple[str, ...], artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = without_tokenizer(artifact, tmp_path, keep)
    arguments = ["--artifacts", copy, "--max-new-tokens", 3, *GREEDY]
    output = call(capsys, generate, *arguments, "--ids", "1,2,3")
    assert output.status == 0
    assert len(output.out.split()) == 3 and all(text.isdigit() for text in output.out.split())
    for text in (["--prompt", "x"], ["--chat", "x"], ["--ids", "1", "--stop", "x"]):
        refused(capsys, generate, tmp_path, [*arguments, *text], "no tokenizer")


OPTIONS: dict[str, tuple[list[object], str]] = {
    "no prompt": ([], "no prompt: give --prompt, --chat or --ids"),
    "empty text": (["--prompt", ""], "the prompt is empty: give at least one token"),
    "empty ids": (["--ids", ""], "the prompt is empty: give at least one token"),
    "one of two empty": (["--prompt", "x", "--prompt", ""], "the prompt is empty"),
    "too long": (["--prompt", "x" * 241], f"the prompt has 241 tokens, at most {MAX_LENGTH} fit"),
    "id above": (["--ids", "1,272"], "token id 272 at position 1 is outside the vocabulary of 272"),
    "id below": (["--ids=-1"], "token id -1 at position 0 is outside the vocabulary of 272"),
    "ids with a gap": (["--ids", "1,,2"], "'1,,2' is not a comma-separated list of whole numbers"),
    "thinking without a chat": (
        ["--ids", "1", "--thinking", "off"],
        "--thinking is for the chat template: give --chat",
    ),
    "system without a chat": (["--prompt", "x", "--system", "y"], "--system is for the chat template"),
    "ids no numbers": (["--ids", "1;2"], "'1;2' is not a comma-separated list of whole numbers"),
    "temperature": (["--ids", "1", "--temperature", "-1"], "temperature must be a number from 0 to 100, got -1.0"),
    "no tokens": (["--ids", "1", "--max-new-tokens", "0"], "max_new_tokens must be an integer of at least 1, got 0"),
    "top p": (["--ids", "1", "--top-p", "0"], "top_p must be a number above 0 and at most 1"),
    "seed": (["--ids", "1", "--seed", "x"], "argument --seed: invalid int value"),
    "empty stop": (["--ids", "1", "--stop", ""], "stop must be a tuple of non-empty strings"),
    "template arguments": (["--chat", "x", "--template-arguments", "{"], "'{' is not a JSON object"),
    "template arguments a list": (["--chat", "x", "--template-arguments", "[1]"], "'[1]' is not a JSON object"),
    "reserved argument": (["--chat", "x", "--template-arguments", '{"messages": 1}'], "'messages' is reserved"),
    "not Unicode": (["--prompt", "a\udcff"], "the text is not valid Unicode at character 1"),
}


@pytest.mark.usefixtures("shared_executor")
@pytest.mark.parametrize("case", OPTIONS)
def test_bad_input_is_refused(case: str, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, message = OPTIONS[case]
    refused(capsys, generate, tmp_path, ["--artifacts", artifact, *options], message)


def test_a_damaged_artifact_is_refused(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    weights = next((copy / "weights").iterdir())

    def check(message: str, *options: str) -> None:
        refused(capsys, generate, tmp_path, ["--artifacts", copy, "--ids", "1", *options], message)

    changed_byte(weights, -5)
    check("was edited or damaged", "--verify")
    edited_manifest(copy, format_version=0)
    check("has format version 0")
    (copy / "manifest.json").write_text("{}")
    check("does not describe an nxdi-qwen artifact")
    (copy / "manifest.json").unlink()
    check("is no complete artifact: it has no manifest.json")
    shutil.rmtree(copy)
    check("no artifact at ")


def test_the_console_script(artifact: Path) -> None:
    command = [str(Path(sys.executable).with_name("nxdi-qwen-generate")), "--artifacts", str(artifact)]
    options = ["--ids", "1,2,3", "--max-new-tokens", "4", "--seed", "1", "--ignore-eos", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (completion,) = json.loads(done.stdout)["completions"]
    assert len(completion["token_ids"]) == 4
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr

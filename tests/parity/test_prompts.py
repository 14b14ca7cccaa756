"""The built-in prompts cover their traps and fit; bad files and names are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nxdi_qwen.compile.text import TextCodec
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.presets import preset
from nxdi_qwen.parity.prompts import LENGTHS, SETS, TEXT_SET, TEXTS, built_in_prompts, read_prompts
from tests.byte_tokenizer import IM_END_ID, PAD_ID, write_tokenizer

CONFIG = dataclasses.replace(preset("qwen3.5-0.8b"), vocab_size=272, eos_token_ids=(IM_END_ID,), pad_token_id=PAD_ID)


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    write_tokenizer(tmp_path)
    return TextCodec.from_folder(tmp_path)


def test_all_sets(codec: TextCodec) -> None:
    prompts = {prompt.name: prompt.ids for prompt in built_in_prompts(CONFIG, 1000, codec)}
    assert {len(ids) for name, ids in prompts.items() if name.endswith("random")} == set(LENGTHS)
    assert len(set(prompts["100 repeated"])) == 1 and len(set(prompts["100 alternating"])) == 2
    special = prompts["70 with pad and end ids"]
    assert {PAD_ID, IM_END_ID} <= set(special[1:-1]) and special[0] in (PAD_ID, IM_END_ID)
    assert len(prompts["640 long"]) == 640
    assert [codec.decode(prompts[name]) for name in TEXTS] == list(TEXTS.values())
    assert all(0 <= token < CONFIG.vocab_size for ids in prompts.values() for token in ids)


def test_only_what_fits_and_what_is_named() -> None:
    assert all(len(prompt.ids) <= 63 for prompt in built_in_prompts(CONFIG, 63, None))
    assert [prompt.name for prompt in built_in_prompts(CONFIG, 90, None, ("long",))] == ["90 long"]
    assert [prompt.name for prompt in built_in_prompts(CONFIG, 4, None, ("lengths",))] == [
        "1 random",
        "3 random",
        "4 random",
    ]


def test_without_special_ids() -> None:
    plain = dataclasses.replace(CONFIG, eos_token_ids=(), pad_token_id=None)
    assert not any("pad and end" in prompt.name for prompt in built_in_prompts(plain, 1000, None))


def test_what_cannot_be_chosen() -> None:
    with pytest.raises(InputError, match=r"nonsense is no set of prompts: there are .*" + TEXT_SET):
        built_in_prompts(CONFIG, 1000, None, ("nonsense",))
    with pytest.raises(InputError, match="no prompt of text fits"):
        built_in_prompts(CONFIG, 1000, None, (TEXT_SET,))
    assert TEXT_SET not in SETS


def test_a_file(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "hé"}\n\n{"ids": [5, 6]}\n')
    assert [(prompt.name, prompt.ids) for prompt in read_prompts(file, tmp_path)] == [
        ("line 1", tuple("hé".encode())),
        ("line 3", (5, 6)),
    ]
    with pytest.raises(InputError, match="line 1 is a text, which needs the tokenizer"):
        read_prompts(file, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"txt": "a"}', "line 2 is neither"),
        ('{"text": 3}', "line 2 is neither"),
        ('{"ids": [1, 2.5]}', "line 2 is neither"),
        ('{"ids": [true]}', "line 2 is neither"),
        ('["ids"]', "line 2 is neither"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1]}\n' + line + "\n")
    with pytest.raises(InputError, match=message):
        read_prompts(file, None)

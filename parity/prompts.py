"""The prompts: built-in sets that cover the traps of these models, or a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nxdi_qwen.compile.text import TextCodec
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.records import Prompt

# Around one token, the convolution's four taps, the chunk of 64 and two chunks.
LENGTHS = (1, 3, 4, 5, 63, 64, 65, 127, 128, 129)
REPEATS = 100
LONG = 640
TEXTS = {
    "multilingual": "Das Wetter ist schön. Il fait très beau aujourd'hui. 今天天气很好。 今日はいい天気です。 "
    "오늘 날씨가 좋네요. Сегодня прекрасная погода. الطقس جميل اليوم. आज मौसम बहुत अच्छा है। 🌦️→☀️",
    "code": """\
def fibonacci(n: int) -> list[int]:
    a, b, out = 0, 1, []
    while len(out) < n:
        out.append(a)
        a, b = b, a + b
    return out

SELECT name, COUNT(*) FROM users GROUP BY name HAVING COUNT(*) > 1;
""",
}


def length_prompts(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    """Random ids."""
    return [Prompt(f"{length} random", _random_ids(length, vocab_size, seed=length)) for length in lengths]


def repeated_prompts(vocab_size: int) -> list[Prompt]:
    """One token, or two in turn: keys become equal, which random ids never show."""
    first, second = _random_ids(2, vocab_size, seed=0)
    return [
        Prompt(f"{REPEATS} repeated", (first,) * REPEATS),
        Prompt(f"{REPEATS} alternating", (first, second) * (REPEATS // 2)),
    ]


def _special(config: ModelConfig, room: int) -> list[Prompt]:
    """Pad and end ids are tokens like any other: at the front, inside and at the end."""
    special = [*config.eos_token_ids, *([] if config.pad_token_id is None else [config.pad_token_id])]
    special = [token for token in dict.fromkeys(special) if token < config.vocab_size]
    if not special:
        return []
    ids = list(_random_ids(70, config.vocab_size, seed=70))
    for number, place in enumerate((0, 5, 6, 7, 40, 63, 64, 68, 69)):
        ids[place] = special[number % len(special)]
    return [Prompt("70 with pad and end ids", tuple(ids))]


def _long(config: ModelConfig, room: int) -> list[Prompt]:
    length = min(LONG, room)
    return [Prompt(f"{length} long", _random_ids(length, config.vocab_size, seed=LONG))]


SETS: dict[str, Callable[[ModelConfig, int], list[Prompt]]] = {
    "lengths": lambda config, room: length_prompts(config.vocab_size),
    "repeated": lambda config, room: repeated_prompts(config.vocab_size),
    "special": _special,
    "long": _long,
}
TEXT_SET = "text"


def built_in_prompts(
    config: ModelConfig, room: int, codec: TextCodec | None, names: tuple[str, ...] = ()
) -> list[Prompt]:
    """The sets named (without names: all) as far as they fit: prompts of more than `room` tokens are left out.

    Texts are there with a tokenizer only. Raises InputError for an unknown name.
    """
    names = names or (*SETS, TEXT_SET)
    prompts = []
    for name in names:
        if name == TEXT_SET:
            prompts += [Prompt(title, tuple(codec.encode(text))) for title, text in TEXTS.items()] if codec else []
        elif name in SETS:
            prompts += SETS[name](config, room)
        else:
            known = ", ".join((*SETS, TEXT_SET))
            raise InputError(f"{name} is no set of prompts: there are {known}")
    fitting = [prompt for prompt in prompts if len(prompt.ids) <= room]
    if not fitting:
        raise InputError(f"no prompt of {', '.join(names)} fits: there is room for {room} tokens")
    return fitting


def read_prompts(path: Path, folder: Path | None) -> list[Prompt]:
    """Prompts from JSON lines `{"text": ...}` or `{"ids": [...]}`; texts by the tokenizer in `folder`.

    Raises InputError naming the line for anything else.
    """
    prompts: list[Prompt] = []
    codec: TextCodec | None = None
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # texts may hold the other ends of lines
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable UTF-8 file ({error})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{where} is not JSON") from None
        if isinstance(entry, dict) and entry.keys() == {"text"} and isinstance(entry["text"], str):
            if folder is None:
                raise InputError(
                    f"{where} is a text, which needs the tokenizer of --model DIR: give ids, or the folder"
                )
            codec = codec or TextCodec.from_folder(folder)
            ids = codec.encode(entry["text"])
        elif isinstance(entry, dict) and entry.keys() == {"ids"} and _is_ids(entry["ids"]):
            ids = entry["ids"]
        else:
            raise InputError(f'{where} is neither {{"text": "..."}} nor {{"ids": [1, 2, 3]}}')
        prompts.append(Prompt(f"line {number}", tuple(ids)))
    if not prompts:
        raise InputError(f"{path} has no prompts")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _random_ids(count: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())

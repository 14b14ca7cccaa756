"""Text in and out of a model: the tokenizer of a folder, streaming text, stop strings."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from nxdi_qwen.compile.chat_template import ChatTemplate, render_chat
from nxdi_qwen.modeling.errors import InputError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"

# What transformers 5 hands to a chat template.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """The tokenizer of a model folder, with its special tokens and its chat template.

    special_tokens: name ("eos_token" ...) -> text, for the chat template.
    chat_template: None where the folder has none.
    """

    def __init__(
        self, tokenizer: Tokenizer, special_tokens: dict[str, str], chat_template: ChatTemplate | None
    ) -> None:
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        # A tokenizer.json may hold the settings of somebody's training run.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path) -> TextCodec:
        """Reads tokenizer.json, tokenizer_config.json and the chat template beside them, as transformers does.

        Errors: InputError where tokenizer.json is missing or unreadable, or is not a byte-level one (every
        tokenizer of the family is).
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise InputError(f"no tokenizer in {folder}: put {TOKENIZER_FILE} there, or give token ids with --ids")
        decoder = _read_json(path).get("decoder")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise InputError(f"{path}: the decoder is {decoder!r}, not ByteLevel: give token ids with --ids instead")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise InputError(f"{path}: not a readable tokenizer ({error})") from error
        config = _read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
        _add_missing_tokens(tokenizer, config, folder / CONFIG_FILE)
        return cls(tokenizer, _special_tokens(config), _read_chat_template(folder, config))

    @staticmethod
    def files(folder: Path) -> list[Path]:
        """The files of `folder` that `from_folder` reads. A copy keeps their paths relative to `folder`."""
        single = [folder / name for name in (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE)]
        return [path for path in single if path.is_file()] + _more_templates(folder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Special tokens written out in the text become their ids.

        add_special_tokens: also add what the tokenizer puts around a text (Qwen's puts nothing).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode at character {error.start}: give UTF-8") from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_arguments: Any) -> list[int]:
        """The ids of a conversation through the chat template; arguments as in `render_chat`."""
        if self.chat_template is None:
            raise InputError(f"the tokenizer has no chat template: give a plain prompt, or add {TEMPLATE_FILE}")
        text = render_chat(self.chat_template, messages, **{**self.special_tokens, **template_arguments})
        return self.encode(text, add_special_tokens=False)  # the template has written them

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD; ids the tokenizer does not know are skipped."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes one id adds to the text: none for an unknown id or a skipped special token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or (skip_special_tokens and token_id in self._special_ids):
            return b""
        # The library's rule: a token with any character outside the alphabet (an added one) stands for itself.
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode("utf-8")


class StreamingDecoder:
    """Text as the ids come, whole code points only; all pieces together are `codec.decode` of all ids.

    A byte sequence that may still become a character is held back, so U+FFFD appears only where it is certain.
    """

    def __init__(self, codec: TextCodec, skip_special_tokens: bool = True) -> None:
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes, perhaps none."""
        return self._utf8.decode(self._codec.token_bytes(token_id, self._skip_special_tokens))

    def flush(self) -> str:
        """The rest at the end: U+FFFD where the ids end within a character."""
        return self._utf8.decode(b"", final=True)


class StopChecker:
    """Ends a streamed text at the first stop string, wherever the text was cut into pieces.

    The first is the one that is complete first; of two complete at the same character, the longer. The stop string
    is not part of the text.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise InputError("a stop string is empty: leave it out")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certainly before any stop string. Sets `stopped` when one was found: nothing follows."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        released = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[released:]
        return text[:released]

    def flush(self) -> str:
        """What was held back, when the text ends for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (Radford et al. 2019): printable Latin-1 stands for itself, the rest, in
    order, for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable UTF-8 file ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def _token_text(value: object) -> str | None:
    """The text of a token as configurations write it: a string, an object with "content", or null."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _add_missing_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Adds tokens that only tokenizer_config.json names, in the order of their ids."""
    entries = config.get("added_tokens_decoder") or {}
    try:
        tokens = {int(key): _added_token(entry) for key, entry in entries.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: added_tokens_decoder is damaged ({error}); download it again") from error
    for token_id, token in sorted(tokens.items()):
        if tokenizer.token_to_id(token.content) is None:
            tokenizer.add_tokens([token])
        actual = tokenizer.token_to_id(token.content)
        if actual != token_id:
            raise InputError(f"{path}: token {token.content!r} has id {token_id}, but {actual} in {TOKENIZER_FILE}")


def _added_token(entry: dict[str, Any]) -> AddedToken:
    options = {name: value for name, value in entry.items() if name != "content" and not name.startswith("__")}
    return AddedToken(entry["content"], **options)


def _more_templates(folder: Path) -> list[Path]:
    return sorted((folder / MORE_TEMPLATES).glob("*.jinja"))


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """Template files, where there are any, replace the template in tokenizer_config.json."""
    paths = {path.stem: path for path in _more_templates(folder)}
    if (folder / TEMPLATE_FILE).is_file():
        paths = {"default": folder / TEMPLATE_FILE, **paths}
    if paths:
        return {name: _read_text(path) for name, path in paths.items()}
    template = config.get("chat_template")
    if template is None or isinstance(template, (str, list, dict)):
        return template
    raise InputError(f"{folder / CONFIG_FILE}: chat_template must be a text or a list of named ones, got {template!r}")

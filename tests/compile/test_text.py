"""Tokenizer folders, streaming text, stop strings and chat templates, against tokenizers and transformers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nxdi_qwen.compile.chat_template import render_chat
from nxdi_qwen.compile.text import StopChecker, StreamingDecoder, TextCodec
from nxdi_qwen.modeling.errors import InputError

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café — déjà vu",
    "你好世界 🙂👩‍👩‍👧 हिन्दी",
    "a <b> & 'c' \"d\"",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
PLAIN_ADDED = ["<think>", "</think>", "é→x", "…"]  # the last two: outside, and partly outside, the byte alphabet

QWEN_LIKE = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content %}{% if part.type == 'text' %}{{ part.text }}{% else %}{% continue %}{% endif %}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, thought=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if ns.last == -1 %}
    {{- raise_exception('No user message <found>') }}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ text_of(messages[0].content) + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {% for tool in tools %}
    {{ tool | tojson }}
    {% endfor %}
    {{- '</tools>' + (tools | tojson(indent=2)) + '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {%- if message.role == 'system' and (tools or not loop.first) %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- set ns.thought = true %}{% set inner = 'set inside' %}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text_of(message.content or '') | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + ' ' + call.function.arguments | tojson + '</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
        {{- inner }}
    {%- else %}
        {{- text_of(message.content) }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

SIMPLE = """\
{% if not bos_token %}no bos {% endif %}{{ missing }}{{ eos_token }}
  {% for m in messages %}
  {{ m['role'] | upper }}: {{ m['content'] }}
    {% endfor %}
{{ dict(a=1, b=messages|length) | tojson }} {{ {'z': 'ü<>&\\'"', 'a': [1, 2.5, none, true]} | tojson(sort_keys=true) }}
{{ 'ü' | tojson(ensure_ascii=true) }} {{ strftime_now('%Y') | length }} {{ namespace(self=3).self }}

"""

NAMED = [{"name": "default", "template": "plain {{ messages[0].content }}"}, {"name": "tool_use", "template": "tools"}]

TOOLS = [
    {"type": "function", "function": {"name": "wetter", "description": "Wie ist es <heute> & morgen in Köln? 天气"}},
    {
        "type": "function",
        "function": {"name": "t", "parameters": {"type": "object", "properties": {"x": {"enum": [1]}}}},
    },
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hi <b> & ünïcode 你好 'q'"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be short.", "name": None},
        {
            "role": "user",
            "content": [{"type": "text", "text": "two "}, {"type": "image"}, {"type": "text", "text": "parts"}],
        },
        {"role": "assistant", "content": " Yes ", "reasoning_content": "\nold thought\n"},
        {"role": "user", "content": "And now?\n"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "new thought",
            "tool_calls": [{"type": "function", "function": {"name": "t", "arguments": {"ort": "Köln", "x": "<1>"}}}],
        },
    ],
]


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    return tokenizer


def save(folder: Path, chat_template: object) -> PreTrainedTokenizerFast:
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), chat_template=chat_template, **special)
    tokenizer.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save(path, QWEN_LIKE)
    return path


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec.from_folder(folder)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Tokenizer folders


@pytest.mark.parametrize("text", [*CORPUS, "", " ", "<|im_start|>user\n<think>é→x…<|im_end|>", "\x00\u0301\U0010ffff"])
def test_encode_and_decode_are_transformers(folder: Path, codec: TextCodec, text: str) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = codec.encode(text)
    assert ids == reference(text)["input_ids"]
    for skip in (True, False):
        assert codec.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_read(codec: TextCodec) -> None:
    assert codec.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_tokens_only_in_the_configuration_are_added(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    size = byte_level_tokenizer().get_vocab_size()
    entry = {"content": "<|extra|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    edit_config(copy, added_tokens_decoder={str(size): {**entry, "special": True}})
    codec = TextCodec.from_folder(copy)
    assert codec.encode("a<|extra|>")[-1] == size
    assert codec.decode([size]) == "" and codec.decode([size], skip_special_tokens=False) == "<|extra|>"
    edit_config(copy, added_tokens_decoder={str(size + 1): {**entry, "special": True}})
    with pytest.raises(InputError, match=rf"'<\|extra\|>' has id {size + 1}, but {size}"):
        TextCodec.from_folder(copy)


@pytest.mark.parametrize(
    "tokens", [{"5": {}}, {"a": {"content": "x"}}, {"5": None}, {"5": {"content": 5}}, "abc"], ids=str
)
def test_damaged_added_tokens_are_refused(folder: Path, tmp_path: Path, tokens: object) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit_config(copy, added_tokens_decoder=tokens)
    with pytest.raises(InputError, match="added_tokens_decoder is damaged"):
        TextCodec.from_folder(copy)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec.from_folder(tmp_path)
    assert codec.decode(codec.encode(CORPUS[0])) == CORPUS[0]
    assert codec.decode(codec.encode("a")) == "a"


def test_files_are_enough_for_a_copy(folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(folder, tmp_path / "source"))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "model.safetensors").write_text("")
    target = tmp_path / "target"
    names = [path.relative_to(source) for path in TextCodec.files(source)]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target / name)
    assert [str(name) for name in names] == [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]
    original, copy = TextCodec.from_folder(source), TextCodec.from_folder(target)
    assert copy.encode(CORPUS[2]) == original.encode(CORPUS[2])
    assert copy.chat_template == original.chat_template and copy.special_tokens == original.special_tokens
    assert copy.decode(copy.encode_chat(CONVERSATIONS[0], tools=TOOLS)) == "tools"


def test_bad_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer in .*--ids"):
        TextCodec.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": ')
    with pytest.raises(InputError, match=r"tokenizer.json: not a readable JSON"):
        TextCodec.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}, "model": 3}')
    with pytest.raises(InputError, match="not a readable tokenizer"):
        TextCodec.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "Metaspace"}}')
    with pytest.raises(InputError, match="Metaspace"):
        TextCodec.from_folder(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: holds a list"):
        TextCodec.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(InputError, match="chat_template must be"):
        TextCodec.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja: not a readable UTF-8"):
        TextCodec.from_folder(tmp_path)


def test_text_that_is_not_unicode_is_refused(codec: TextCodec) -> None:
    with pytest.raises(InputError, match="character 2"):
        codec.encode("ab\udcff")


# Streaming


def stream(codec: TextCodec, ids: list[int], skip: bool = True) -> list[str]:
    decoder = StreamingDecoder(codec, skip_special_tokens=skip)
    return [decoder.push(token_id) for token_id in ids] + [decoder.flush()]


@pytest.mark.parametrize("text", CORPUS)
def test_streamed_text_has_no_replacement_character(codec: TextCodec, text: str) -> None:
    pieces = stream(codec, codec.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_over_four_tokens_comes_with_the_last(codec: TextCodec) -> None:
    ids = [next(i for i in range(330) if codec.token_bytes(i) == bytes([byte])) for byte in "😀".encode()]
    assert stream(codec, ids) == ["", "", "", "😀", ""]
    assert stream(codec, ids[:3]) == ["", "", "", "\ufffd"]
    assert stream(codec, ids[1:2]) == ["\ufffd", ""]


@pytest.mark.parametrize("skip", [True, False])
def test_streamed_random_ids_are_the_decoded_text(codec: TextCodec, skip: bool) -> None:
    generator = random.Random(0)
    single_bytes = [i for i in range(330) if len(codec.token_bytes(i)) == 1 and codec.token_bytes(i) >= b"\x80"]
    for case in range(400):
        choice = range(350) if case % 2 else single_bytes  # ids above the vocabulary are among them
        ids = [generator.choice(choice) for _ in range(generator.randint(0, 40))]
        assert "".join(stream(codec, ids, skip)) == codec.decode(ids, skip_special_tokens=skip)


# Stop strings


def stopped(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    checker = StopChecker(stop)
    released = ""
    for piece in pieces:
        released += checker.push(piece)
        assert not any(text in released for text in stop)
    return released + checker.flush(), checker.stopped


def test_stop_strings_over_boundaries() -> None:
    assert stopped(["\n\nUser:"], ["Hel", "lo\n", "\nUs", "er", ": x", "y"]) == ("Hello", True)
    assert stopped(["</s>"], ["a<", "/", "b</", "s", "> no"]) == ("a</b", True)
    assert stopped(["</s>"], ["a<", "/s"]) == ("a</s", False)
    assert stopped(["aab"], ["a", "a", "a", "b"]) == ("a", True)
    assert stopped([], ["a", "b"]) == ("ab", False)
    assert stopped(["a"], ["abc"]) == ("", True)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["END", "NEVER"])
    assert [checker.push(piece) for piece in ["abc", "dE", "x", "NEVEN", "D"]] == ["abc", "d", "Ex", "NEV", ""]
    assert checker.stopped and checker.push("more") == "" and checker.flush() == ""


def test_the_result_does_not_depend_on_the_pieces() -> None:
    generator = random.Random(1)
    for _ in range(2000):
        text = "".join(generator.choice("abc") for _ in range(12))
        stop = ["".join(generator.choice("abc") for _ in range(generator.randint(1, 4))) for _ in range(3)]
        ends = [(end, len(s)) for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
        first = min(ends, key=lambda pair: (pair[0], -pair[1]), default=None)
        expected = (text, False) if first is None else (text[: first[0] - first[1]], True)
        pieces, rest = [], text
        while rest:
            size = generator.randint(1, 5)
            pieces.append(rest[:size])
            rest = rest[size:]
        assert stopped(stop, pieces) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        StopChecker(["a", ""])


# Chat templates


@pytest.mark.parametrize("template", [QWEN_LIKE, SIMPLE, NAMED], ids=["qwen", "simple", "named"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system", "long"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_chat_text_and_ids_are_transformers(template: object, messages: list, tools: object, tmp_path: Path) -> None:
    reference = save(tmp_path, template)
    codec = TextCodec.from_folder(tmp_path)
    for arguments in ({}, {"enable_thinking": False}, {"enable_thinking": True, "bos_token": "<s>"}):
        for prompt in (True, False):
            options = {"tools": tools, "add_generation_prompt": prompt, **arguments}
            expected = reference.apply_chat_template(messages, tokenize=False, **options)
            assert codec.chat_template is not None
            assert render_chat(codec.chat_template, messages, **{**codec.special_tokens, **options}) == expected
            ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            assert codec.encode_chat(messages, **options) == ids


def test_a_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    save(tmp_path, "from the file")
    edit_config(tmp_path, chat_template="from the configuration")
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(CONVERSATIONS[0], tokenize=False) == (
        "from the file"
    )
    codec = TextCodec.from_folder(tmp_path)
    assert codec.decode(codec.encode_chat(CONVERSATIONS[0])) == "from the file"
    (tmp_path / "chat_template.jinja").unlink()
    codec = TextCodec.from_folder(tmp_path)
    assert codec.decode(codec.encode_chat(CONVERSATIONS[0])) == "from the configuration"
    edit_config(tmp_path, chat_template=NAMED)
    codec = TextCodec.from_folder(tmp_path)
    assert codec.decode(codec.encode_chat(CONVERSATIONS[1])) == "plain Be short."


def test_a_chat_gets_no_special_tokens_but_the_templates(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[(SPECIAL[0], 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    codec = TextCodec.from_folder(tmp_path)
    assert codec.encode("Hello") == [0, *codec.encode_chat([{"role": "user", "content": "Hello"}])]


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": None, "reasoning": "r"}]
    render_chat("{{ messages[0].thinking }}", messages)
    assert messages == [{"role": "user", "content": None, "reasoning": "r"}]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Roles must\nalternate') }}", "Roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ nothing.field }}", "'nothing' is undefined"),
        ("{{ 'a' + none }}", "concatenate"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ dict.update(messages[0], role='x') }}", "no attribute 'update'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace(_x=1) %}", "underscore"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "underscore"),
    ],
)
def test_a_failing_template_is_one_line(template: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        render_chat(template, CONVERSATIONS[0])
    assert "\n" not in str(caught.value) and str(caught.value).startswith("the chat template refuses")


def test_bad_chat_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no messages"):
        render_chat("x", [])
    with pytest.raises(InputError, match="must be an object"):
        render_chat("x", ["hello"])  # type: ignore[list-item]
    with pytest.raises(InputError, match="reserved"):
        render_chat("x", CONVERSATIONS[0], messages=[])
    with pytest.raises(InputError, match="no chat template is named"):
        render_chat([{"name": "rag", "template": "x"}], CONVERSATIONS[0])
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="has no chat template"):
        TextCodec.from_folder(tmp_path).encode_chat(CONVERSATIONS[0])

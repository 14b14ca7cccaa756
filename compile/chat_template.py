"""Chat templates: the text of a conversation as the model was trained to read it.

Templates are Jinja, in the dialect of transformers' `apply_chat_template`: sandboxed, trimmed blocks, `break` and
`continue`, `tojson` without HTML escaping, `raise_exception`, `strftime_now`, and the `generation` tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from nxdi_qwen.modeling.errors import InputError

# One template, or several by name as older tokenizer_config.json files have them.
ChatTemplate = str | Mapping[str, str] | Sequence[Mapping[str, str]]

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # first to last: which one wins


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **template_arguments: Any,
) -> str:
    """The text of a conversation, as transformers' `apply_chat_template(..., tokenize=False)` gives it.

    template: one template, or several named ones: then "tool_use" where there are tools and there is one of that
        name, otherwise "default".
    messages: JSON-like objects with a "role" and usually a "content". Keys that are None count as absent; reasoning
        under any of its three usual names is found under "reasoning_content".
    template_arguments: what else the template may read: `bos_token`, `eos_token`, `enable_thinking` ... One the
        template does not read is ignored; one it reads and does not get is undefined (empty and false).

    Errors: InputError for no messages, a template that does not parse or fails, and for `raise_exception` in it.
    """
    for name in _RESERVED:
        if name in template_arguments:
            raise InputError(f"template argument {name!r} is reserved: choose another name")
    if not messages:
        raise InputError("the conversation has no messages: give at least one")
    variables = {
        **template_arguments,
        "messages": [_normalised(message) for message in messages],
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    source = _choose(template, has_tools=tools is not None)
    try:
        return _compile(source).render(variables)
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the chat template refuses this conversation or is faulty: {reason}") from error


def _choose(template: ChatTemplate, has_tools: bool) -> str:
    if isinstance(template, str):
        return template
    if isinstance(template, Mapping):
        named = dict(template)
    else:
        try:
            named = {entry["name"]: entry["template"] for entry in template}
        except (KeyError, TypeError):
            raise InputError('a list of chat templates holds objects with "name" and "template"') from None
    for name in ("tool_use", "default") if has_tools else ("default",):
        if name in named:
            return named[name]
    raise InputError(f'no chat template is named "default", only {sorted(named)}: add one to the tokenizer\'s files')


def _normalised(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f'a chat message must be an object with "role" and "content", got {message!r}')
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = [present[key] for key in _REASONING_KEYS if key in present]
    if reasoning:
        present["reasoning_content"] = reasoning[0]
        present.setdefault("thinking", reasoning[0])
    return present


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    # Templates come with checkpoints, so they are foreign code: hence the sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment.from_string(source)


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant said; for inference it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (not a ClassVar in the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _TemplateDict:
    """`dict(...)` in a template. The type itself would hand out `dict.update`, past the immutable sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _TemplateNamespace(Namespace):
    """`namespace(...)` in a template, without names that start with an underscore: Python's own may be among them."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: `namespace(self=...)` is allowed
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold a name with an underscore in front: {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

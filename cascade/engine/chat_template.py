"""Chat templates as Transformers runs them: Jinja in a sandbox, with the functions that it documents for templates.

Templates of models are written for that, and give the same text here as `apply_chat_template` gives there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # placed after the text of a last message that is continued
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts; templates read the first two


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **values: Any,
) -> str:
    """The text that the template ``source`` writes for a conversation; raises any error of the template, and `ValueError`.

    With ``continue_final_message`` the text ends where the last message does.
    """
    if not messages:
        raise ValueError("the conversation is empty")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    shaped = [_message(message) for message in messages]
    last = _marked(shaped[-1], source) if continue_final_message else ""
    given = {"messages": shaped, "tools": _plain(tools), "documents": None, "add_generation_prompt": add_generation_prompt}
    text = _compiled(source).render(**given, **_plain(values))
    return _cut(text, last) if continue_final_message else text


@lru_cache
def variables(source: str) -> frozenset[str]:
    """Names that a template reads and does not set."""
    return frozenset(find_undeclared_variables(_environment().parse(source)))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without null fields, with thoughts under both names that templates read."""
    fields: dict[str, Any] = {name: _plain(value) for name, value in message.items() if value is not None}
    thoughts = next((fields[name] for name in THOUGHTS if name in fields), None)
    return fields if thoughts is None else {"thinking": thoughts, **fields, "reasoning_content": thoughts}


def _plain(value: Any) -> Any:
    """A copy with JSON values only; others become the name of their type, since templates are untrusted programs."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=_strange))


def _strange(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


def _marked(message: dict[str, Any], source: str) -> str:
    """Put `MARK` after the text of a message; returns the text."""
    content = message.get("content")
    if content is None:
        raise ValueError("the last message has no content to continue")
    if "content" not in source:
        raise ValueError("the template reads no content of messages, so the last one cannot be continued")
    if not isinstance(content, list | tuple):
        message["content"] = content + MARK
        return str(content)
    for part in reversed(content):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + MARK
            return text
    raise ValueError("the last message has no text to continue")


def _cut(text: str, last: str) -> str:
    """The text before `MARK`; if the template trims trailing blanks, the result has none."""
    if last.strip() not in text or MARK.strip() not in text:
        raise ValueError("the template leaves out the last message, or parts of it, so it cannot be continued")
    end = text.rindex(MARK.strip())
    return text[:end] if text[end : end + len(MARK)] == MARK else text[:end].rstrip()


@lru_cache
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "dict": _Dict(), "namespace": _Namespace}
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """Supports ``{% generation %}``, which marks a model's own text for training: here it only keeps the content."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # variables that the block sets stay inside it
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore, which would give templates access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's filter without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)

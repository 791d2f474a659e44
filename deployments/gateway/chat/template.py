"""The chat template that a tokenizer was published with: it alone writes prompts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

from jinja2 import Environment, meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from deployments.gateway.chat.omissions import MessageDict, omission
from deployments.gateway.chat.probes import PROBE_NAME, PROBE_TOOL, PROBE_WORDS, QUESTION, RESULT, probe_call, saying
from deployments.gateway.chat.thoughts import CLOSE, OPEN

OWN_NAMES = {"messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}  # of every template, not for clients
PYTHON_OBJECT = "{'a': 1}"  # arguments of a probe, printed by a template that wants them as text


@dataclass(frozen=True, slots=True)
class Style:
    """How a conversation is to be written: further variables of the template, and how its last turn is."""

    values: Mapping[str, Any] = field(default_factory=dict)
    prompts: bool = True  # the assistant's turn is begun
    goes_on: bool = False  # the last message is the begin of what the assistant says
    reasoning_effort: str | None = None  # a variable, too, but templates need not read it


class ChatTemplate:
    """A tokenizer's chat template, or its absence, which refuses every conversation.

    A prompt is to the token what `apply_chat_template` gives for the client's own messages and tools, or it is refused.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend

    def encode(
        self, messages: Sequence[MessageDict], tools: Sequence[MessageDict] | None = None, style: Style = Style()
    ) -> list[int]:
        """Token ids of a conversation in OpenAI's form.

        Raises:
            InvalidRequest: there is no template, it does not read a variable of ``style``, does not take these messages, or
                leaves out a part of them.
        """
        self._check(style)
        said = [self._translated(message) for message in messages]
        try:
            text = self._render(said, tools, style)
        except Exception as error:  # templates are programs
            reason = " ".join(str(error).split())[:200]
            raise InvalidRequest(f"The model's chat template does not take these messages: {reason}") from None
        lost = omission(said, tools, lambda messages, tools: self._written(messages, tools, style))
        if lost is not None:
            raise InvalidRequest(lost)
        return self._backend.encode(text, add_special_tokens=False)

    def _translated(self, message: MessageDict) -> MessageDict:
        """OpenAI's message in the form that Transformers documents for templates; nothing is added, moved or lost.

        Fields that are null are absent; arguments of calls are objects rather than JSON in a text, and contents of several
        parts one text, each unless the template takes them as they came; thoughts bear the name that templates read.
        """
        said = {name: value for name, value in message.items() if value is not None}
        if "reasoning" in said:
            said.setdefault("reasoning_content", said["reasoning"])
        if isinstance(said.get("content"), list) and said["role"] not in self._roles_in_parts:
            said["content"] = "".join(part["text"] for part in said["content"])
        if "tool_calls" in said and self._takes_objects:
            said["tool_calls"] = [_with_object(call) for call in said["tool_calls"]]
        return said

    def _check(self, style: Style) -> None:
        """Raise `InvalidRequest` if there is no template, or none that reads all variables of ``style``."""
        if self._backend.chat_template is None:
            raise InvalidRequest(
                "The model has no chat template: ask it to complete a text, or save its tokenizer with a chat_template.jinja"
            )
        strange = next((name for name in style.values if name not in self.variables), None)
        if strange is not None:
            reads = ", ".join(self.variables)[:200] or "none"
            raise InvalidRequest(f"chat_template_kwargs has {strange[:60]!r}: of these the model's chat template reads {reads}")

    # what the template reads

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Names that it reads and that clients may set."""
        environment = Environment(extensions=[loopcontrols, Generation])
        names: set[str] = set()
        for source in self._sources:
            names |= meta.find_undeclared_variables(environment.parse(source))
        own = OWN_NAMES | set(signature(self._backend.apply_chat_template).parameters) | set(self._backend.special_tokens_map)
        return tuple(sorted(names - own))

    @cached_property
    def thinks(self) -> bool:
        """Whether the assistant may think out loud: the template names the tags around thoughts."""
        text = "\n".join(self._sources)
        return OPEN in text and CLOSE in text

    @property
    def _sources(self) -> list[str]:
        given: Any = self._backend.chat_template
        return [] if given is None else list(given.values()) if isinstance(given, dict) else [given]

    # what the template writes, found out by letting it write

    @cached_property
    def shows_tools(self) -> bool:
        return PROBE_NAME in self._probe([QUESTION])

    @cached_property
    def written_call(self) -> str:
        """What stands where the assistant's words would, if it calls a tool; "" if nothing does."""
        said = self._probe([QUESTION, saying("assistant")], style=Style(prompts=False))
        before = said.partition(PROBE_WORDS)[0].rstrip()
        called = self._called(as_object=self._takes_objects)
        return called[len(before) :].strip() if called.startswith(before) else called

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether arguments of calls are objects for it, as Transformers has them, rather than JSON in a text, as OpenAI."""
        written = self._called(as_object=True)
        return PYTHON_OBJECT not in written if written else not self._called(as_object=False)

    def _called(self, *, as_object: bool) -> str:
        """A conversation in which the assistant calls a tool; some templates want the result, too."""
        asked, style = [QUESTION, probe_call(as_object)], Style(prompts=False)
        return self._probe(asked, style=style) or self._probe([*asked, RESULT], style=style)

    @cached_property
    def _roles_in_parts(self) -> frozenset[str]:
        """Roles whose contents it takes as lists of parts; others print the list, or fail."""
        first = {role: [saying(role, in_parts=True), QUESTION] for role in ("system", "developer")}
        then = {"user": [], "assistant": [QUESTION], "tool": [QUESTION, probe_call(self._takes_objects)]}
        probes = first | {role: [*before, saying(role, in_parts=True)] for role, before in then.items()}
        written = {role: self._probe(probe, style=Style(prompts=False)) for role, probe in probes.items()}
        printed = (f"'text': '{PROBE_WORDS}", f'"text": "{PROBE_WORDS}')  # as it is, by Python or as JSON
        return frozenset(r for r, text in written.items() if PROBE_WORDS in text and not any(one in text for one in printed))

    def _probe(self, messages: Sequence[MessageDict], *, style: Style = Style()) -> str:
        """What it writes, told of the probe's tool; "" if it refuses."""
        return self._written(messages, [PROBE_TOOL], style) or ""

    def _written(self, messages: Sequence[MessageDict], tools: Sequence[MessageDict] | None, style: Style) -> str | None:
        """What it writes; ``None`` if it refuses."""
        try:
            return self._render(messages, tools, style)
        except Exception:  # a template says no as it likes
            return None

    def _render(self, messages: Sequence[MessageDict], tools: Sequence[MessageDict] | None, style: Style) -> str:
        named = style.reasoning_effort is not None and "reasoning_effort" in self.variables
        effort = {"reasoning_effort": style.reasoning_effort} if named else {}
        text = self._backend.apply_chat_template(
            list(messages),
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=style.prompts,
            continue_final_message=style.goes_on,
            **{**effort, **style.values},
        )
        assert isinstance(text, str)
        return text


class Generation(Extension):
    """Transformers' own block, which marks what the assistant says and changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # as in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_object(call: MessageDict) -> MessageDict:
    """A call with its arguments as an object; no text at all is an empty one."""
    function = call["function"]
    return call | {"function": function | {"arguments": json.loads(function["arguments"] or "{}")}}

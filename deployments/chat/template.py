"""A tokenizer's chat template: what it reads and writes, found out by letting it write some."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

from jinja2 import Environment, meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerBase

from cascade.errors import InvalidRequest
from deployments.chat.thoughts import CLOSE, OPEN

Turn = dict[str, Any]
PROBE_ID, SECOND_ID = "probe1234", "probe5678"  # some templates want nine letters and digits
PROBE_NAME, SECOND_NAME = "probe_tool", "probe_second"
PROBE_SAYING = "probe_saying"
PROBE_RESULT = "probe_result"
PROBE_TOOL: Turn = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def _calls(*named: tuple[str, str]) -> Turn:
    calls = [{"id": id, "type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name, id in named]
    return {"role": "assistant", "content": "", "tool_calls": calls}


QUESTION: Turn = {"role": "user", "content": "probe_question"}
CALL = _calls((PROBE_NAME, PROBE_ID))
RESULT: Turn = {"role": "tool", "content": PROBE_RESULT, "tool_call_id": PROBE_ID, "name": PROBE_NAME}
TWO_CALLS = _calls((PROBE_NAME, PROBE_ID), (SECOND_NAME, SECOND_ID))
OWN_NAMES = {"messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}  # of every template, not for clients


@dataclass(frozen=True, slots=True)
class Style:
    """How a conversation is to be written: further variables of the template, and how its last turn is."""

    values: Mapping[str, Any] = field(default_factory=dict)
    prompts: bool = True  # the assistant's turn is begun
    goes_on: bool = False  # the last message is the begin of what the assistant says


class Template:
    """The template of a tokenizer, which has one."""

    def __init__(self, backend: PreTrainedTokenizerBase) -> None:
        self._backend = backend

    def write(self, turns: Sequence[Turn], tools: Sequence[Turn] | None, style: Style) -> str:
        """The text of a conversation; raises `InvalidRequest`."""
        try:
            return self._render(turns, tools, style)
        except Exception as error:  # templates are programs
            reason = " ".join(str(error).split())[:200]
            raise InvalidRequest(f"The model's chat template does not take these messages: {reason}") from None

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
        """Whether it knows thoughts of the assistant: it names the tags around them."""
        text = "\n".join(self._sources)
        return OPEN in text and CLOSE in text

    @property
    def _sources(self) -> list[str]:
        given: Any = self._backend.chat_template
        return list(given.values()) if isinstance(given, dict) else [given]

    # what it writes

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the model reads which tools there are."""
        return PROBE_NAME in self._probe([QUESTION])

    @cached_property
    def written_call(self) -> str:
        """What stands where the assistant's words would, if it calls a tool; "" if nothing does."""
        said = self._probe([QUESTION, {"role": "assistant", "content": PROBE_SAYING}], prompts=False)
        before = said.partition(PROBE_SAYING)[0].rstrip()
        called = self._probe([QUESTION, CALL], prompts=False) or self._probe([QUESTION, CALL, RESULT], prompts=False)
        return called[len(before) :].strip() if called.startswith(before) else called

    @cached_property
    def writes_calls(self) -> bool:
        return PROBE_NAME in self.written_call

    @cached_property
    def writes_several_calls(self) -> bool:
        """In one turn."""
        return SECOND_NAME in self._probe([QUESTION, TWO_CALLS], prompts=False)

    @cached_property
    def writes_results(self) -> bool:
        return PROBE_RESULT in self._probe([QUESTION, CALL, RESULT])

    @cached_property
    def writes_developers(self) -> bool:
        return PROBE_SAYING in self._probe([{"role": "developer", "content": PROBE_SAYING}, QUESTION])

    def leaves_out(
        self, doubted: Sequence[int], turns: Sequence[Turn], tools: Sequence[Turn] | None, style: Style
    ) -> int | None:
        """The first of the ``doubted`` turns whose content does not get into the text in any form, by its index."""
        marks = {index: f"{PROBE_SAYING}{index}." for index in doubted}
        marked = [turn | {"content": marks[index]} if index in marks else turn for index, turn in enumerate(turns)]
        try:
            text = self._render(marked, tools, style)
        except Exception:  # other contents are not taken there, which says nothing of these
            return None
        return next((index for index, mark in marks.items() if mark not in text), None)

    def _probe(self, turns: Sequence[Turn], *, prompts: bool = True) -> str:
        try:
            return self._render(turns, [PROBE_TOOL], Style(prompts=prompts))
        except Exception:  # a template says no as it likes
            return ""

    def _render(self, turns: Sequence[Turn], tools: Sequence[Turn] | None, style: Style) -> str:
        shown: Any = None if tools is None else list(tools)
        text = self._backend.apply_chat_template(
            list(turns),
            tools=shown,
            tokenize=False,
            add_generation_prompt=style.prompts,
            continue_final_message=style.goes_on,
            **style.values,
        )
        assert isinstance(text, str)
        return text


class Generation(Extension):
    """Transformers' own block, which marks what the assistant says and changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # as in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

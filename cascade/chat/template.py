"""The chat template of a tokenizer, which writes prompts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from jinja2.defaults import DEFAULT_NAMESPACE

from cascade.engine.chat_template import variables
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import LONE_SURROGATE, is_text

MessageDict = dict[str, Any]

OPEN, CLOSE = "<think>", "</think>"  # around thoughts
CUT = "INVALID_JSON"  # key of the object that stands for arguments that are not a JSON object
OWN_NAMES = {  # variables of every template, which clients cannot set
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"),
    *DEFAULT_NAMESPACE,
}
# Parts of a probe conversation: the text that a template writes for it shows what the template supports.
PROBE_ID = "probe1234"  # some templates want nine letters and digits
PROBE_NAME, PROBE_WORDS, PROBE_ARGUMENT = "probe_tool", "probe_words", "probe_argument"
PROBE_TOOL: MessageDict = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {PROBE_ARGUMENT: {"type": "integer"}}, "required": [PROBE_ARGUMENT]},
    },
}
QUESTION: MessageDict = {"role": "user", "content": "probe_question"}
RESULT: MessageDict = {"role": "tool", "content": "probe_result", "tool_call_id": PROBE_ID, "name": PROBE_NAME}
REFUSED = "refused"  # result of a probe: the template refuses contents of a role
PRINTED = f"{{'{PROBE_ARGUMENT}': 1}}"  # the probe's arguments, printed by a template that wants them as text


@dataclass(frozen=True, slots=True)
class Style:
    """How a conversation is written: further variables of the template, and how the last turn ends."""

    values: Mapping[str, Any] = field(default_factory=dict)
    prompts: bool = True  # begin the assistant's turn
    goes_on: bool = False  # continue the last message
    reasoning_effort: str | None = None  # another variable, which templates may ignore


class ChatTemplate:
    """A tokenizer's chat template. A tokenizer without one refuses every conversation.

    A prompt has exactly the tokens that `apply_chat_template` gives for the client's messages and tools, or it is refused.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._content_form = cache(self._probe_content)
        self._drops_calls = cache(self._probe_calls)

    def encode(
        self, messages: Sequence[MessageDict], tools: Sequence[MessageDict] | None = None, style: Style = Style()
    ) -> list[int]:
        """Token ids of a conversation in OpenAI's form; raises the errors of `text`."""
        return self._tokenizer.encode_part(self.text(messages, tools, style))

    def text(self, messages: Sequence[MessageDict], tools: Sequence[MessageDict] | None = None, style: Style = Style()) -> str:
        """The prompt of a conversation in OpenAI's form.

        Raises:
            InvalidRequest: there is no template, or it does not read a variable of ``style``, refuses these messages, or
                leaves out tools, calls or a role.
        """
        self._check(style)
        if tools and not self.shows_tools:
            raise InvalidRequest(
                "The model's chat template shows no tools: give none, or say in a message what may be called", "tools"
            )
        shaped = [self._translated(index, message, bool(tools)) for index, message in enumerate(messages)]
        try:
            return self._render(shaped, tools, style)
        except Exception as error:  # templates are programs
            reason = " ".join(str(error).split())[:200]
            raise InvalidRequest(f"The model's chat template does not take these messages: {reason}", "messages") from None

    def _translated(self, index: int, message: MessageDict, tools: bool) -> MessageDict:
        """OpenAI's message in the form that Transformers documents for templates, with the same contents in the same order.

        Null fields are left out. Arguments of calls become objects, unless the template takes text or they were cut off.
        Contents of several parts become one text, unless the template takes parts. Thoughts get the name that templates read.
        The role developer becomes system if the template does not know it.
        """
        turn = {name: value for name, value in message.items() if value is not None}
        if not turn.get("tool_calls"):
            turn.pop("tool_calls", None)
        if turn["role"] == "developer" and self._content_form("developer", tools) in (None, REFUSED):
            turn["role"] = "system"
        form, content = self._content_form(turn["role"], tools), turn.get("content", "")
        if form is None and content:
            raise InvalidRequest(
                f"The model's chat template leaves out messages.{index}, whose role is {turn['role']!r}: use another role",
                f"messages.{index}.role",
            )
        if "reasoning" in turn:
            turn.setdefault("reasoning_content", turn["reasoning"])
        if form == "parts" and content and isinstance(content, str):
            turn["content"] = [{"type": "text", "text": content}]
        elif form != "parts" and isinstance(content, list):
            turn["content"] = "".join(part["text"] for part in content)
        if "tool_calls" in turn:
            if self._drops_calls(tools):
                where = f"messages.{index}.tool_calls"
                raise InvalidRequest(f"The model's chat template leaves out {where}: say them in words", where)
            calls = [_with_text(call) for call in turn["tool_calls"]]
            turn["tool_calls"] = [self._with_object(call) for call in calls] if self._takes_objects else calls
        return turn

    def _check(self, style: Style) -> None:
        """Raise `InvalidRequest` if there is no template, or it does not read all variables of ``style``."""
        if self._tokenizer.chat_template is None:
            raise InvalidRequest(
                "The model has no chat template: request a completion, or save its tokenizer with a chat_template.jinja",
                "messages",
            )
        strange = next((name for name in style.values if name not in self.variables), None)
        if strange is not None:
            reads = ", ".join(self.variables)[:200] or "none"
            raise InvalidRequest(
                f"chat_template_kwargs has {strange[:60]!r}: of these the model's chat template reads {reads}",
                "chat_template_kwargs",
            )

    # variables that the template reads

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the template reads and clients may set."""
        names = set[str]().union(*map(variables, self._sources))
        return tuple(sorted(names - OWN_NAMES - set(self._tokenizer.special_tokens)))

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """The variables that turn thinking on or off."""
        return tuple(name for name in ("enable_thinking", "thinking") if name in self.variables)

    @cached_property
    def thinks(self) -> bool:
        """Whether the model may write thoughts, because the template has the tags around them."""
        text = "\n".join(self._sources)
        return OPEN in text and CLOSE in text

    @property
    def _sources(self) -> list[str]:
        given = self._tokenizer.chat_template
        return [] if given is None else list(given.values()) if isinstance(given, dict) else [given]

    # properties of the template, found by probes

    @cached_property
    def shows_tools(self) -> bool:
        return PROBE_NAME in (self._probe([QUESTION], Style()) or "")

    @cached_property
    def writes_names(self) -> bool:
        """Whether the template writes the ``name`` of messages."""
        return PROBE_NAME in (self._probe([{**QUESTION, "name": PROBE_NAME}], tools=False) or "")

    @cached_property
    def written_call(self) -> str:
        """The text that the template writes for a call of a tool; "" if it writes none."""
        text = self._probe([QUESTION, {"role": "assistant", "content": PROBE_WORDS}]) or ""
        before, called = text.partition(PROBE_WORDS)[0].rstrip(), self._called(self._takes_objects)
        return called[len(before) :].strip() if called.startswith(before) else called

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether the template takes arguments of calls as objects, like Transformers, or as JSON text, like OpenAI's API."""
        written = self._called(as_object=True)
        return PRINTED not in written if written else not self._called(as_object=False)

    def _probe_calls(self, tools: bool) -> bool:
        """Whether the template silently leaves out calls."""
        written = self._called(self._takes_objects, tools)
        return bool(written) and PROBE_ARGUMENT not in written.rpartition("probe_question")[2]

    @cached_property
    def _takes_texts(self) -> bool:
        """Whether arguments of calls may be any text, in a template that takes objects."""
        return bool(self._called(as_object=False))

    def _with_object(self, call: MessageDict) -> MessageDict:
        """A call with its arguments as an object; empty text becomes an empty object.

        Text that is not an object was cut off. It stays text, or becomes a member of an object, as in Anthropic's API, if the
        template takes only objects.
        """
        function, arguments = call["function"], call["function"]["arguments"]
        try:
            given: Any = parsed_object(arguments or "{}")
        except ValueError:
            given = arguments if self._takes_texts else {CUT: arguments}
        return call | {"function": function | {"arguments": given}}

    def _called(self, as_object: bool, tools: bool = True) -> str:
        """A conversation in which the assistant calls a tool, also with the result, which some templates need."""
        messages = [QUESTION, _probe_call(as_object)]
        return self._probe(messages, tools=tools) or self._probe([*messages, RESULT], tools=tools) or ""

    def _probe_content(self, role: str, tools: bool) -> str | None:
        """Whether the template takes contents of a role as "text" or "parts", or refuses both; ``None`` if it leaves both out.

        A tokenizer may have another template for conversations with ``tools``.
        """
        before = {"assistant": [QUESTION], "tool": [QUESTION, _probe_call(self._takes_objects)]}.get(role, [])
        after = [QUESTION] if role in ("system", "developer") else []
        named = {"tool_call_id": PROBE_ID, "name": PROBE_NAME} if role == "tool" else {}
        refused = False
        for form, content in (("text", PROBE_WORDS), ("parts", [{"type": "text", "text": PROBE_WORDS}])):
            written = self._probe([*before, {"role": role, "content": content, **named}, *after], tools=tools)
            if PROBE_WORDS in (written or ""):
                return form
            refused = refused or written is None
        return REFUSED if refused else None  # later the template itself raises, with its reason

    def _probe(self, messages: Sequence[MessageDict], style: Style = Style(prompts=False), *, tools: bool = True) -> str | None:
        """The text that the template writes for ``messages``, with the probe's tool if ``tools``; ``None`` if it refuses."""
        try:
            return self._render(messages, [PROBE_TOOL] if tools else None, style)
        except Exception:  # templates may raise anything
            return None

    def _render(self, messages: Sequence[MessageDict], tools: Sequence[MessageDict] | None, style: Style) -> str:
        named = style.reasoning_effort is not None and "reasoning_effort" in self.variables
        effort = {"reasoning_effort": style.reasoning_effort} if named else {}
        return self._tokenizer.apply_chat_template(
            messages,
            tools or None,
            add_generation_prompt=style.prompts,
            continue_final_message=style.goes_on,
            **{**effort, **style.values},
        )


def _with_text(call: MessageDict) -> MessageDict:
    """A call with its arguments as JSON text, as in OpenAI's API, if a client gives an object."""
    function = call["function"]
    given = function["arguments"]
    return (
        call if isinstance(given, str) else call | {"function": function | {"arguments": json.dumps(given, ensure_ascii=False)}}
    )


def _probe_call(as_object: bool) -> MessageDict:
    """A call of the probe's tool, with its arguments as an object or as JSON text."""
    arguments = {PROBE_ARGUMENT: 1}
    function = {"name": PROBE_NAME, "arguments": arguments if as_object else json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": PROBE_ID, "type": "function", "function": function}]}


def parsed_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; raises `ValueError` for anything else."""
    try:
        parsed = json.loads(text)
        shown = json.dumps(parsed, ensure_ascii=False)
    except (ValueError, RecursionError):
        parsed, shown = None, ""
    if not isinstance(parsed, dict):
        raise ValueError("it must be the text of a JSON object")
    if not is_text(shown):
        raise ValueError(LONE_SURROGATE)
    return parsed

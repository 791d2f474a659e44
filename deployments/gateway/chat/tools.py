"""Tools of a conversation: who may be called, in which format, and what of it is enforced."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import Structured
from deployments.gateway.chat.calls import CallParser
from deployments.gateway.chat.conversation import Conversation
from deployments.gateway.chat.formats import FORMATS, JSON, ToolFormat
from deployments.gateway.chat.grammars import Grammars
from deployments.gateway.chat.reader import TurnReader
from deployments.gateway.chat.template import ChatTemplate
from deployments.gateway.chat.thoughts import CLOSE, OPEN, ThoughtSplitter


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's tools ask for."""

    shown: bool = False  # to the model
    structured: Structured | None = None  # what the text has to be, if calls are enforced
    schemas: Mapping[int, Structured] = field(default_factory=dict)  # that are enforced, by the index of the tool
    free: bool = True  # it may be other words, too
    form: ToolFormat | None = None  # of calls, if the text is read for them
    functions: frozenset[str] = frozenset()  # that may be called


class Toolbox:
    """What a served model can do with tools; ``name`` is that of its format, found out by its template if not given."""

    def __init__(self, tokenizer: Tokenizer, name: str | None) -> None:
        self.template = ChatTemplate(tokenizer)
        self.grammars = Grammars(tokenizer)
        self._name = name

    @cached_property
    def format(self) -> ToolFormat | None:
        """How the model writes calls, if that is known."""
        if self._name is not None:
            return FORMATS[self._name]
        return next((form for form in FORMATS.values() if form.wrote(self.template.written_call)), None)

    def plan(self, body: Conversation) -> ToolPlan:
        """Raises `InvalidRequest`."""
        choice = body.chosen_tool
        if choice == "none":
            return ToolPlan()
        free = choice == "auto"
        if free:
            self._check_free()
        tools = enumerate(body.tools or ())  # by index
        named = None if isinstance(choice, str) else choice.function.name
        functions = {index: tool.function for index, tool in tools if named in (None, tool.function.name)}
        schemas = {index: one.schema_of_object for index, one in functions.items() if not free or one.strict}
        names = {index: one.name for index, one in functions.items()}
        form, several = self.format or JSON, isinstance(choice, str) and body.parallel_tool_calls is not False
        return ToolPlan(
            shown=self.template.shows_tools,
            structured=self.grammars.calls(form, names, schemas, free, several) if schemas or not several else None,
            schemas={index: Structured(json_schema=schema) for index, schema in schemas.items()},
            free=free,
            form=form,
            functions=frozenset(names.values()),
        )

    def reader(self, plan: ToolPlan, splitter: ThoughtSplitter | None, told: bool) -> TurnReader:
        """Takes one answer apart; thoughts too if there is a ``splitter``, left out if they are not ``told``."""
        parser = None if plan.form is None else CallParser(plan.form, plan.functions)
        marks = () if plan.form is None else plan.form.marks
        hidden = self.grammars.hidden((*marks, *((OPEN, CLOSE) if splitter else ())))
        return TurnReader(parser, hidden, splitter, told)

    def _check_free(self) -> None:
        """Raise `InvalidRequest` if the model cannot choose by itself."""
        remedy = "use 'required' or name a function, which are enforced, or 'none'"
        if not self.template.shows_tools:
            raise InvalidRequest(f"tool_choice is 'auto' and the model's chat template shows no tools: {remedy}")
        if self.format is None:
            names = ", ".join(FORMATS)
            raise InvalidRequest(
                f"tool_choice is 'auto' and how the model writes calls is not known: {remedy}; "
                f"or let the server's router.tool_format be one of {names}"
            )

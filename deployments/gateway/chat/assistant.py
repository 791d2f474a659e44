"""Turns conversations, over any protocol, into prompts, parameters and readers of answers.

Grammars enforce calls of tools, in a model's format, and structured output after thoughts.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tokenizers import AddedToken

from cascade.chat.conversation import ChatMessage, Conversation, ToolBody
from cascade.chat.template import CLOSE, OPEN, PROBE_ARGUMENT, PROBE_NAME, ChatTemplate, Style
from cascade.engine.grammar import JSON_OPTIONS, UNFORCED, compilable, source, unenforced
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import MAX_GRAMMAR_CHARS, SamplingParams, Structured
from deployments.gateway.chat.calls import FORMATS, JSON, CallParser, ToolFormat
from deployments.gateway.chat.reader import TAIL, ThoughtSplitter, TurnReader, opened, prompted
from deployments.gateway.model import ServedModel, reading

MAX_CALLS = 16  # enforced calls in one answer at most


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How tools of a request are used; without a ``form`` no function can be called."""

    shown: bool = False  # whether the prompt shows the tools
    form: ToolFormat | None = None  # the form of calls
    functions: Mapping[int, str] = field(default_factory=dict)  # by index of the tool: names of functions that may be called
    schemas: Mapping[int, dict[str, Any]] = field(default_factory=dict)  # by index: schemas of arguments that are enforced
    free: bool = True  # the text may also have words
    several: bool = True  # the text may have several calls


@dataclass(frozen=True, slots=True)
class ChatTask:
    """The task of a conversation for the full tier."""

    ids: list[int]  # the prompt's tokens
    params: SamplingParams
    reader: Callable[[], TurnReader]  # makes a reader for each answer
    unread: tuple[str, ...] = ()  # fields that the chat template ignores, and keywords that grammars cannot enforce


class Assistant:
    """A served model for conversations; ``tool_format`` is the form of its calls, by default the one in its chat template."""

    def __init__(self, model: ServedModel, tool_format: str | None) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._tool_format = tool_format
        self.template = ChatTemplate(model.tokenizer)
        self._grammars = GrammarWriter(model.tokenizer)

    async def prompt(self, conversation: Conversation) -> tuple[ToolPlan, list[int]]:
        """The plan for a conversation's tools, and the prompt's token ids; raises `InvalidRequest`."""
        plan = self._plan(conversation)
        return plan, await self.encode(conversation.messages, conversation.tools if plan.shown else None, conversation.style)

    async def task(self, conversation: Conversation, sampling: Callable[[dict[str, Any]], SamplingParams]) -> ChatTask:
        """The task of a conversation; raises `InvalidRequest`.

        ``sampling`` makes the request's parameters from defaults. Without ``max_tokens`` the turn may fill the context.
        """
        plan, ids = await self.prompt(conversation)
        params = sampling(self._model.defaults_for(len(ids)))
        words = params.structured
        free = unenforced(words, *(Structured(json_schema=schema) for schema in plan.schemas.values()))
        params = await self._enforced(plan, params)
        within = self._within(conversation, ids)
        any_words = words is None and plan.free and plan.form is not None and bool(plan.form.begin)
        if params.structured is not None and within is not None and not any_words:
            if within:  # otherwise the form holds from the first token on, and the model does not think
                await self._model.check_grammar(params.structured)
                structured = self._grammars.after_thoughts(params.structured, params.structured is not words)
                params = replace(params, structured=structured)
            else:
                within = None
        shown, variables = conversation.include_reasoning is not False, self.template.variables
        names = any(message.name and message.role != "tool" for message in conversation.messages)
        unread = {
            "reasoning_effort": conversation.reasoning_effort and "reasoning_effort" not in variables,
            "messages.name": names and not self.template.writes_names,
        }
        inert = [name for name, is_unread in unread.items() if is_unread]
        return ChatTask(ids, params, lambda: self._reader(plan, within, shown), (*inert, *free))

    async def encode(self, messages: Sequence[ChatMessage], tools: Sequence[ToolBody] | None, style: Style) -> list[int]:
        """Token ids of a conversation; raises `InvalidRequest`."""
        turns = [message.given for message in messages]
        shown = None if tools is None else [tool.given for tool in tools]
        num_chars = sum(message.num_chars for message in messages) + len(str(shown or ""))
        self._model.check_length(num_chars)
        return await reading(num_chars, self.template.encode, turns, shown, style)

    async def _enforced(self, plan: ToolPlan, params: SamplingParams) -> SamplingParams:
        """``params`` with a grammar for words and calls, if calls are enforced; raises `InvalidRequest`."""
        words = params.structured
        if plan.form is None or not (plan.schemas or not plan.several or words):
            return params
        # calls without a mark may begin like words, and a grammar's rules may have the same names as ours
        if words is not None and not (plan.free and plan.form.begin and words.grammar is None):
            raise InvalidRequest("tools and response_format or structured cannot both be enforced: leave one out", "tools")
        if params.ignore_eos:
            raise InvalidRequest("ignore_eos is true: with tools whose calls are enforced the text must end", "ignore_eos")
        if words is not None:
            await self._model.check_grammar(words)
        for index, schema in plan.schemas.items():
            try:
                await self._model.check_grammar(Structured(json_schema=schema))
            except InvalidRequest as error:
                where = f"tools.{index}.function.parameters"
                raise InvalidRequest(str(error).replace("structured.json_schema", where), where) from None
        grammar = self._grammars.calls(plan, words)
        return replace(params, structured=grammar)

    def _within(self, conversation: Conversation, ids: Sequence[int]) -> bool | None:
        """Whether the prompt ends within thoughts; ``None`` if thoughts are not separated."""
        if conversation.separate_reasoning is False or not self.template.thinks:
            return None
        if conversation.continue_final_message:
            last = conversation.messages[-1]
            return None if last.thoughts and not opened(last.text) else opened(last.text)
        return prompted(self._tokenizer.decode(ids[-TAIL:], skip_special_tokens=False))

    # tools

    @cached_property
    def format(self) -> ToolFormat | None:
        """The format of the model's calls, if known: the one that can parse a call written by the template."""
        if self._tool_format is not None:
            return FORMATS[self._tool_format]
        return next((form for form in FORMATS.values() if self._wrote(form)), None)

    def _wrote(self, form: ToolFormat) -> bool:
        text = self.template.written_call
        calls = CallParser(form, frozenset({PROBE_NAME})).take(text, True).calls
        whole = bool(calls) and calls[0].arguments.endswith("}") and json.loads(calls[0].arguments) == {PROBE_ARGUMENT: 1}
        return whole and (bool(form.named) or f'"{form.key}"' in text)

    def _plan(self, body: Conversation) -> ToolPlan:
        choice = body.chosen_tool
        if choice == "none":
            return ToolPlan()
        free = choice == "auto"
        if free:
            self._check_free()
        tools = enumerate(body.tools or ())  # by index
        named = None if isinstance(choice, str) else choice.function.name
        functions = {index: tool.function for index, tool in tools if named in (None, tool.function.name)}
        return ToolPlan(
            shown=self.template.shows_tools,
            form=self.format or JSON,
            functions={index: tool.name for index, tool in functions.items()},
            schemas={index: tool.schema_of_object for index, tool in functions.items() if not free or tool.strict},
            free=free,
            several=isinstance(choice, str) and body.parallel_tool_calls is not False,
        )

    def _reader(self, plan: ToolPlan, within: bool | None, show_thoughts: bool) -> TurnReader:
        """A reader of one answer for calls and, unless ``within`` is ``None``, thoughts; see `TurnReader`."""
        parser = None if plan.form is None else CallParser(plan.form, frozenset(plan.functions.values()))
        splitter = None if within is None else ThoughtSplitter(within)
        marks = (*(plan.form.marks if plan.form else ()), *((OPEN, CLOSE) if splitter else ()))
        return TurnReader(parser, self._grammars.hidden(marks), splitter, show_thoughts)

    def _check_free(self) -> None:
        remedy = "use 'required' or name a function, which are enforced, or 'none'"
        if not self.template.shows_tools:
            raise InvalidRequest(f"tool_choice is 'auto' and the model's chat template shows no tools: {remedy}", "tool_choice")
        if self.format is None:
            names = ", ".join(FORMATS)
            raise InvalidRequest(
                f"tool_choice is 'auto' and how the model writes calls is not known: {remedy}; "
                f"or let the server's router.tool_format be one of {names}",
                "tool_choice",
            )


class GrammarWriter:
    """Writes grammars, in llguidance's Lark, for the tokens of a tokenizer.

    A mark that is an added token is written as that token; others are spelled. Special tokens among free words are allowed by
    their ids, since words are matched as text, which does not contain them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def hidden(self, marks: Sequence[str]) -> dict[int, str]:
        """The ``marks`` that are special tokens, which decoding leaves out, by their ids."""
        return {id: token.content for id, token in self._added.items() if token.special and token.content in marks}

    def calls(self, plan: ToolPlan, words: Structured | None) -> Structured:
        """A grammar of the calls of a plan, as chat templates write them; if it is free also of words, or of ``words``.

        Arguments without a schema are any object. Raises `InvalidRequest` if the grammar becomes too long.
        """
        form = plan.form
        assert form is not None, "only functions of a form can be called"
        begin, end = self._mark(form.begin), self._mark(form.end)
        if form.listed:
            opening, between, closing = '" "? "["', '", "', '"]"'
        elif form.end:
            opening, between, closing = r'"\n"', rf'"\n" {end} "\n" {begin} "\n"', rf'"\n" {end}'
        else:
            opening, between, closing = "", begin if form.named else f'"{form.again} "', ""
        more = f"({between} call){{0,{MAX_CALLS - 1}}}" if plan.several else ""
        if words is not None:
            rules = [f"start: words | {begin} calls", _rule("words", words)]
        else:
            rules = self._words(form) if plan.free else [f"start: {begin} calls"]
        rules += [f"calls: {opening} call {more} {closing}", "call: " + " | ".join(f"call_{index}" for index in plan.functions)]
        for index, name in plan.functions.items():
            schema = {**compilable(plan.schemas.get(index, {"type": "object"})), "x-guidance": JSON_OPTIONS}
            head = json.dumps(f'{{"name": {json.dumps(name)}, "{form.key}": ')
            call = f"{json.dumps(name)} {self._mark(form.named)} args_{index}" if form.named else f'{head} args_{index} "}}"'
            rules += [f"call_{index}: {call}", f"args_{index}: %json {json.dumps(schema)}"]
        return _checked(rules, "tools need")

    def after_thoughts(self, structured: Structured, tools: bool) -> Structured:
        """A grammar of the rest of thoughts that the prompt has begun, a few blanks, and ``structured``.

        ``tools``: ``structured`` is a grammar of `calls`. Raises `InvalidRequest`.
        """
        close = self._id(CLOSE)
        if close is None or (structured.grammar is not None and not tools):
            cause = "is no token of the model" if close is None else "has no place before structured.grammar"
            raise InvalidRequest(
                f"The prompt has begun the model's thoughts, whose end {CLOSE} {cause}: turn them off with "
                "chat_template_kwargs, or set separate_reasoning to false to hold the text from its first token",
                "structured",
            )
        other = self._others(CLOSE)
        rules = [
            f"start: {f'(THOUGHTS? {other})*' if other else ''} THOUGHTS? <[{close}]> BLANKS? body",
            f"THOUGHTS: {_free(CLOSE)}",
            r"BLANKS: /[ \t\r\n]{1,4}/",
        ]
        return _checked([*rules, _rule("body", structured)], "Behind thoughts this needs")

    def _words(self, form: ToolFormat) -> list[str]:
        """Rules for words and special tokens without the mark of calls, and then calls or none.

        A terminal is greedy: two in a row could together spell the mark.
        """
        other = self._others(form.begin)
        if not form.begin:  # special tokens before a bracket do not turn a call into words, since decoding leaves them out
            text, unseen = (f"{other}* (FIRST ({other} WORDS?)*)?", f"{other}*") if other else ("FIRST?", "")
            return [f"start: {text} | {unseen} calls", r"FIRST: /\s*[^{\s](?s:.*)/", "WORDS: /(?s:.+)/"]
        text, before = (f"WORDS? ({other} WORDS?)*", f"(WORDS? {other})*") if other else ("WORDS?", "")
        words = f"WORDS: {_free(form.begin)}"
        if self._id(form.begin) is not None:
            return [f"start: text | text {self._mark(form.begin)} calls", f"text: {text}", words]
        spelled = f"BEFORE: (/(?s:.*)/ & ~/{_spelling(form.begin)}/) {json.dumps(form.begin)}"
        return [f"start: {text} | {before} BEFORE calls", words, spelled]

    def _others(self, mark: str) -> str:
        """A class of all added tokens but the ``mark`` and those that end a text; "" if there are none."""
        kept = {id for id, token in self._added.items() if token.content != mark} - set(self._tokenizer.end_ids)
        return f"<[{_ranges(kept)}]>" if kept else ""

    def _mark(self, text: str) -> str:
        """A mark in a grammar: its token, or its characters."""
        id = self._id(text)
        return json.dumps(text) if id is None else f"<[{id}]>"

    def _id(self, text: str) -> int | None:
        return next((id for id, token in self._added.items() if token.content == text), None)

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self._tokenizer.added_tokens


def _rule(name: str, structured: Structured) -> str:
    """``structured`` as a rule of this name; other rules of a grammar keep their names."""
    body = structured.grammar or source(structured).removeprefix(UNFORCED)
    return body.replace("start:", f"{name}:", 1)


def _spelling(mark: str) -> str:
    """A regular expression for texts that contain the ``mark``."""
    return rf"(?s:.*{re.escape(mark)}.*)".replace("/", r"\/")


def _free(mark: str) -> str:
    """A terminal for any text that does not contain the ``mark``."""
    return f"/(?s:.+)/ & ~/{_spelling(mark)}/"


def _ranges(ids: Set[int]) -> str:
    begins = [id for id in sorted(ids) if id - 1 not in ids]
    ends = [id for id in sorted(ids) if id + 1 not in ids]
    return ",".join(f"{begin}-{end}" for begin, end in zip(begins, ends, strict=True))


def _checked(rules: Sequence[str], what: str) -> Structured:
    text = "\n".join(rules)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{what} a grammar of {len(text)} characters: at most {MAX_GRAMMAR_CHARS} are taken", "structured")
    return Structured(grammar=text)

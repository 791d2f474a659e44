"""Tools of chats: who may be called, in which form, and what of it is enforced."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import AddedToken

from cascade.engine.grammar import JSON_OPTIONS
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import MAX_GRAMMAR_CHARS, Structured
from deployments.chat.calls import CALL_ID, Reader, ToolFormat
from deployments.chat.conversation import Conversation, FunctionBody
from deployments.chat.prompt import ChatTemplate
from deployments.chat.template import PROBE_NAME
from deployments.chat.thoughts import CLOSE, OPEN, Splitter

MAX_CALLS = 16  # in one answer whose calls are enforced

JSON = ToolFormat("json", again=";")
FORMATS = {
    form.name: form
    for form in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>"),  # NousResearch's Hermes, Qwen 2.5 and 3
        ToolFormat("mistral", "[TOOL_CALLS]", listed=True, id_len=9, id_prefix=""),  # up to the tokenizers of version 7
        ToolFormat("mistral11", "[TOOL_CALLS]", named="[ARGS]", id_len=9, id_prefix=""),  # from 11 on
        ToolFormat("llama3", again=";", key="parameters"),
        JSON,
    )
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request's tools ask for."""

    shown: bool = False  # to the model
    structured: Structured | None = None  # what the text has to be, if calls are enforced
    schemas: Mapping[int, Structured] = field(default_factory=dict)  # that are enforced, by the index of the tool
    free: bool = True  # it may be other words, too
    form: ToolFormat | None = None  # of calls, if it is read for them
    functions: frozenset[str] = frozenset()  # which are called


class Toolbox:
    """What a served model can do with tools; ``name`` is that of its format, found out by its template if not given."""

    def __init__(self, tokenizer: Tokenizer, name: str | None) -> None:
        self.template = ChatTemplate(tokenizer)
        self._tokenizer = tokenizer
        self._name = name

    @cached_property
    def format(self) -> ToolFormat | None:
        """How the model writes calls, if that is known."""
        if self._name is not None:
            return FORMATS[self._name]
        return next((form for form in FORMATS.values() if _writes(form, self.template.written_call)), None)

    def plan(self, body: Conversation) -> Plan:
        """Raises `InvalidRequest`."""
        choice = body.chosen_tool
        if choice == "none":
            return Plan()
        assert body.tools is not None, "there is nothing to choose from"
        if choice == "auto":
            self._check_free()
        form, free = self.format or JSON, choice == "auto"
        functions = {
            index: tool.function
            for index, tool in enumerate(body.tools)
            if isinstance(choice, str) or tool.function.name == choice.function.name
        }
        several = isinstance(choice, str) and body.parallel_tool_calls is not False
        schemas = {index: one.schema_of_object for index, one in functions.items() if not free or one.strict}
        structured = self._grammar(form, functions, schemas, free, several) if schemas or not several else None
        names = frozenset(function.name for function in functions.values())
        return Plan(
            self.template.shows_tools,
            structured,
            {index: Structured(json_schema=schema) for index, schema in schemas.items()},
            free,
            form,
            names,
        )

    def reader(self, plan: Plan, splitter: Splitter | None, told: bool) -> Reader:
        """Takes one answer apart; thoughts too if there is a ``splitter``, left out if they are not ``told``."""
        form = plan.form
        calls = () if form is None else (form.begin, form.end, form.named, CALL_ID if form.named else "")
        hidden = self._hidden((*calls, *((OPEN, CLOSE) if splitter else ())))
        return Reader(form, plan.functions, hidden, splitter, told)

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

    def _hidden(self, marks: Sequence[str]) -> dict[int, str]:
        """Those of the ``marks`` that decoding leaves out: special tokens."""
        return {id: token.content for id, token in self._added.items() if token.special and token.content in marks}

    # grammars

    def _grammar(
        self,
        form: ToolFormat,
        functions: Mapping[int, FunctionBody],
        schemas: Mapping[int, dict[str, Any]],
        free: bool,
        several: bool,
    ) -> Structured:
        """Calls in the format, just as chat templates write them; ``free``: words too, with calls behind them or none."""
        begin, end = self._mark(form.begin), self._mark(form.end)
        rules = self._words(form) if free else [f"start: {begin} calls"]
        more = f"{{0,{MAX_CALLS - 1}}}"
        if form.listed:
            calls = '" "? "[" call ' + (f'(", " call){more} "]"' if several else '"]"')
        elif form.named:
            calls = "call" + (f" ({begin} call){more}" if several else "")
        elif form.begin:
            calls = rf'"\n" call "\n" {end}' + (rf' ("\n" {begin} "\n" call "\n" {end}){more}' if several else "")
        else:
            calls = "call" + (f' ("{form.again} " call){more}' if several else "")
        rules += [f"calls: {calls}", "call: " + " | ".join(f"call_{index}" for index in functions)]
        for index, function in functions.items():
            schema = {**schemas.get(index, {"type": "object"}), "x-guidance": JSON_OPTIONS}
            rules += [self._call(index, form, function.name), f"args_{index}: %json {json.dumps(schema)}"]
        text = "\n".join(rules)
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"tools need a grammar of {len(text)} characters: at most {MAX_GRAMMAR_CHARS} are taken")
        return Structured(grammar=text)

    def _call(self, index: int, form: ToolFormat, name: str) -> str:
        """The rule of a call of one function."""
        if form.named:
            return f"call_{index}: {json.dumps(name)} {self._mark(form.named)} args_{index}"
        head = f'{{"name": {json.dumps(name)}, "{form.key}": '
        return f'call_{index}: {json.dumps(head)} args_{index} "}}"'

    def _words(self, form: ToolFormat) -> list[str]:
        """Rules for words without the mark of calls, special tokens among them, and then calls or none.

        A terminal takes as much as it can: two in a row could spell the mark between them.
        """
        kept = [id for id, one in self._added.items() if one.content != form.begin and id not in self._tokenizer.end_ids]
        other = f"<[{_ranges(kept)}]>" if kept else ""
        if not form.begin:  # special tokens before a bracket do not make words of it: decoding leaves them out
            text, unseen = (f"{other}* (FIRST ({other} WORDS?)*)?", f"{other}* ") if kept else ("FIRST?", "")
            return [f"start: {text} | {unseen}calls", r"FIRST: /\s*[^{\s](?s:.*)/", "WORDS: /(?s:.+)/"]
        text = f"FIRST? ({other} WORDS?)*" if kept else "FIRST?"
        mark = re.escape(form.begin).replace("/", r"\/")
        free = f"/(?s:.+)/ & ~/(?s:.*{mark}.*)/"
        rules = [f"FIRST: {free}", f"WORDS: {free}"]
        if self._id(form.begin) is not None:
            return [f"start: text | text {self._mark(form.begin)} calls", f"text: {text}", *rules]
        before = f"(FIRST? {other})* " if kept else ""
        return [
            f"start: {text} | {before}BEFORE calls",
            *rules,
            f"BEFORE: (/(?s:.*)/ & ~/(?s:.*{mark}.*)/) {json.dumps(form.begin)}",
        ]

    def after_thoughts(self, structured: Structured, tools: bool) -> Structured:
        """A grammar of thoughts that the prompt has begun, their end, blanks, and what is enforced; raises `InvalidRequest`.

        ``tools``: it is a grammar of calls, such as `plan` makes.
        """
        kept = [id for id, one in self._added.items() if one.content != CLOSE and id not in self._tokenizer.end_ids]
        other = f"(THOUGHTS? <[{_ranges(kept)}]>)*" if kept else ""
        free, close = "/(?s:{})/ & ~/(?s:.*" + CLOSE.replace("/", r"\/") + ".*)/", self._id(CLOSE)
        thoughts = f"THOUGHTS: {free.format('.+')}"
        if close is None:  # two terminals in a row could spell the tag between them
            rules = [f"start: {other} LAST BLANKS? body", thoughts, f'LAST: ({free.format(".*")}) "{CLOSE}"']
        else:
            rules = [f"start: {other} THOUGHTS? <[{close}]> BLANKS? body", thoughts]
        body = (structured.grammar or "").replace("start:", "body:", 1) if tools else _body(structured)
        text = "\n".join([*rules, r"BLANKS: /[ \t\r\n]{1,4}/", body])
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"Behind thoughts this needs a grammar of {len(text)} characters: {MAX_GRAMMAR_CHARS} are taken"
            )
        return Structured(grammar=text)

    def _mark(self, text: str) -> str:
        """A mark in a grammar: the token it is, or its characters."""
        id = self._id(text)
        return json.dumps(text) if id is None else f"<[{id}]>"

    def _id(self, text: str) -> int | None:
        return next((id for id, token in self._added.items() if token.content == text), None)

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return dict(self._tokenizer.backend.added_tokens_decoder)


def _body(structured: Structured) -> str:
    """What is enforced as a rule of a grammar; raises `InvalidRequest`."""
    if structured.json_object or structured.json_schema is not None:
        schema: Any = {"type": "object"} if structured.json_object else json.loads(structured.schema)
        if not isinstance(schema, dict):
            raise InvalidRequest(f"structured.json_schema is {structured.schema[:40]}: behind thoughts it must be an object")
        return f"body: %json {json.dumps({'x-guidance': JSON_OPTIONS, **schema})}"
    if structured.choice:
        return "body: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
    if structured.regex is not None:
        sound = re.sub(
            r"\\.|[/\n]", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), structured.regex, flags=re.DOTALL
        )
        return f"body: BODY\nBODY: /{sound}/"
    raise InvalidRequest(
        "structured.grammar is given and the prompt has begun the model's thoughts, which it has no room for: turn them off "
        "with chat_template_kwargs, or set separate_reasoning to false to hold the text from its first token"
    )


def _ranges(ids: Sequence[int]) -> str:
    """Token ids as the grammar names them."""
    begins = [id for id in sorted(ids) if id - 1 not in ids]
    ends = [id for id in sorted(ids) if id + 1 not in ids]
    return ",".join(f"{begin}-{end}" for begin, end in zip(begins, ends, strict=True))


def _writes(form: ToolFormat, written: str) -> bool:
    """Whether a call as the template writes it is of this format."""
    name, arguments = rf'"name": ?"{PROBE_NAME}"', rf'"{form.key}": ?\{{"a": ?1\}}'
    if form.named:
        between = rf"({re.escape(CALL_ID)}\w+)?"
        return re.search(re.escape(form.begin) + PROBE_NAME + between + re.escape(form.named) + r"\{", written) is not None
    call = rf"\{{\s*({name}, ?{arguments}|{arguments}, ?{name})"
    if form.begin:
        return re.search(re.escape(form.begin) + r"\s*" + (r"\[" if form.listed else "") + call, written) is not None
    return re.match(call, written) is not None

"""Grammars that hold a text to calls of tools, in the format that a model knows, and texts after thoughts."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken

from cascade.engine.grammar import JSON_OPTIONS
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import MAX_GRAMMAR_CHARS, Structured
from deployments.gateway.chat.formats import ToolFormat
from deployments.gateway.chat.thoughts import CLOSE

MAX_CALLS = 16  # in one answer whose calls are enforced


class Grammars:
    """Writes grammars, in llguidance's Lark, for the tokens of a tokenizer.

    A mark that is an added token is that token; others are spelled. Special tokens among free words are allowed by their ids,
    since words are matched as text, which they are no part of.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def hidden(self, marks: Sequence[str]) -> dict[int, str]:
        """Those of the ``marks`` that decoding leaves out, special tokens, by their ids."""
        return {id: token.content for id, token in self._added.items() if token.special and token.content in marks}

    def calls(
        self, form: ToolFormat, functions: Mapping[int, str], schemas: Mapping[int, dict[str, Any]], free: bool, several: bool
    ) -> Structured:
        """Calls of ``functions``, just as chat templates write them, or with ``free`` words and then calls or none.

        Names and ``schemas`` of arguments go by the index of the tool; without a schema these are any object. Raises
        `InvalidRequest` if the grammar becomes too long.
        """
        rules = self._words(form) if free else [f"start: {self._mark(form.begin)} calls"]
        rules += [f"calls: {self._sequence(form, several)}", "call: " + " | ".join(f"call_{index}" for index in functions)]
        for index, name in functions.items():
            schema = {**schemas.get(index, {"type": "object"}), "x-guidance": JSON_OPTIONS}
            rules += [self._call(index, form, name), f"args_{index}: %json {json.dumps(schema)}"]
        return _checked(rules, "tools need")

    def after_thoughts(self, structured: Structured, tools: bool) -> Structured:
        """The end of thoughts that the prompt has begun, a few blanks, and what is enforced; raises `InvalidRequest`.

        ``tools``: it is a grammar of calls, such as `calls` makes.
        """
        other = self._others(CLOSE)
        other = f"(THOUGHTS? {other})*" if other else ""
        free, close = "/(?s:{})/ & ~/(?s:.*" + CLOSE.replace("/", r"\/") + ".*)/", self._id(CLOSE)
        thoughts = f"THOUGHTS: {free.format('.+')}"
        if close is None:  # two terminals in a row could spell the tag between them
            rules = [f"start: {other} LAST BLANKS? body", thoughts, f'LAST: ({free.format(".*")}) "{CLOSE}"']
        else:
            rules = [f"start: {other} THOUGHTS? <[{close}]> BLANKS? body", thoughts]
        body = (structured.grammar or "").replace("start:", "body:", 1) if tools else _body(structured)
        return _checked([*rules, r"BLANKS: /[ \t\r\n]{1,4}/", body], "Behind thoughts this needs")

    def _sequence(self, form: ToolFormat, several: bool) -> str:
        """One call or several, after the mark that begins them."""
        begin, end, more = self._mark(form.begin), self._mark(form.end), f"{{0,{MAX_CALLS - 1}}}"
        if form.listed:
            return '" "? "[" call ' + (f'(", " call){more} "]"' if several else '"]"')
        if form.named:
            return "call" + (f" ({begin} call){more}" if several else "")
        if form.begin:
            return rf'"\n" call "\n" {end}' + (rf' ("\n" {begin} "\n" call "\n" {end}){more}' if several else "")
        return "call" + (f' ("{form.again} " call){more}' if several else "")

    def _call(self, index: int, form: ToolFormat, name: str) -> str:
        if form.named:
            return f"call_{index}: {json.dumps(name)} {self._mark(form.named)} args_{index}"
        head = f'{{"name": {json.dumps(name)}, "{form.key}": '
        return f'call_{index}: {json.dumps(head)} args_{index} "}}"'

    def _words(self, form: ToolFormat) -> list[str]:
        """Rules for words without the mark of calls, special tokens among them, and then calls or none.

        A terminal takes as much as it can: two in a row could spell the mark between them.
        """
        other = self._others(form.begin)
        if not form.begin:  # special tokens before a bracket do not make words of it: decoding leaves them out
            text, unseen = (f"{other}* (FIRST ({other} WORDS?)*)?", f"{other}* ") if other else ("FIRST?", "")
            return [f"start: {text} | {unseen}calls", r"FIRST: /\s*[^{\s](?s:.*)/", "WORDS: /(?s:.+)/"]
        text = f"FIRST? ({other} WORDS?)*" if other else "FIRST?"
        mark = re.escape(form.begin).replace("/", r"\/")
        free = f"/(?s:.+)/ & ~/(?s:.*{mark}.*)/"
        rules = [f"FIRST: {free}", f"WORDS: {free}"]
        if self._id(form.begin) is not None:
            return [f"start: text | text {self._mark(form.begin)} calls", f"text: {text}", *rules]
        before = f"(FIRST? {other})* " if other else ""
        spelled = f"BEFORE: (/(?s:.*)/ & ~/(?s:.*{mark}.*)/) {json.dumps(form.begin)}"
        return [f"start: {text} | {before}BEFORE calls", *rules, spelled]

    def _others(self, mark: str) -> str:
        """Any added token but the ``mark`` and those that end a text; "" if there is none."""
        kept = [id for id, one in self._added.items() if one.content != mark and id not in self._tokenizer.end_ids]
        return f"<[{_ranges(kept)}]>" if kept else ""

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
    begins = [id for id in sorted(ids) if id - 1 not in ids]
    ends = [id for id in sorted(ids) if id + 1 not in ids]
    return ",".join(f"{begin}-{end}" for begin, end in zip(begins, ends, strict=True))


def _checked(rules: Sequence[str], what: str) -> Structured:
    text = "\n".join(rules)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{what} a grammar of {len(text)} characters: at most {MAX_GRAMMAR_CHARS} are taken")
    return Structured(grammar=text)

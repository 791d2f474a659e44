"""Grammars for enforced calls of tools, in a model's format, and for structured output after thoughts."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from tokenizers import AddedToken

from cascade.chat.template import CLOSE
from cascade.engine.grammar import JSON_OPTIONS, UNFORCED, compilable, source
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import MAX_GRAMMAR_CHARS, Structured
from deployments.gateway.chat.calls import ToolFormat

MAX_CALLS = 16  # enforced calls in one answer at most


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

    def calls(
        self,
        form: ToolFormat,
        functions: Mapping[int, str],
        schemas: Mapping[int, dict[str, Any]],
        free: bool,
        several: bool,
        words: Structured | None,
    ) -> Structured:
        """A grammar of calls of ``functions``, as chat templates write them; with ``free`` also of words, or of ``words``.

        Names and ``schemas`` of arguments go by the index of the tool; without a schema these are any object. Raises
        `InvalidRequest` if the grammar becomes too long.
        """
        begin, end = self._mark(form.begin), self._mark(form.end)
        if form.listed:
            opening, between, closing = '" "? "["', '", "', '"]"'
        elif form.end:
            opening, between, closing = r'"\n"', rf'"\n" {end} "\n" {begin} "\n"', rf'"\n" {end}'
        else:
            opening, between, closing = "", begin if form.named else f'"{form.again} "', ""
        more = f"({between} call){{0,{MAX_CALLS - 1}}}" if several else ""
        if words is not None:
            rules = [f"start: words | {begin} calls", _rule("words", words)]
        else:
            rules = self._words(form) if free else [f"start: {begin} calls"]
        rules += [f"calls: {opening} call {more} {closing}", "call: " + " | ".join(f"call_{index}" for index in functions)]
        for index, name in functions.items():
            schema = {**compilable(schemas.get(index, {"type": "object"})), "x-guidance": JSON_OPTIONS}
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

"""Calls of tools: the formats in which models write them, and a parser that finds them in a streamed answer."""

import re
import secrets
import string
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import regex

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # resumed with each piece of an answer

LETTERS = string.ascii_letters + string.digits
CALL_ID = "[CALL_ID]"  # some models write this and an id between name and arguments
B = r"\s{0,64}+"  # blanks; bounded, since text that may become a call is parsed again with each piece
NAME = r"(?P<name>[A-Za-z0-9_-]{1,64}+)"
OBJECT = rf'\{{{B}(?:"type"{B}:{B}"function"{B},{B})?"name"{B}:{B}"{NAME}"{B},{B}"(?:arguments|parameters)"{B}:'
MAX_BLANKS = 32  # blanks before a mark that are removed from the words
OUTSIDE_STRING = re.compile(r'[{}"]')
INSIDE_STRING = re.compile(r'\\.|"', re.DOTALL)


@dataclass(frozen=True)
class ToolFormat:
    """The form in which a family of models writes calls.

    A call is a JSON object with the ``name`` of a function and then its arguments as ``key``. If there is a mark ``named``,
    a call is a bare name, this mark, and a JSON object of arguments.
    """

    name: str
    begin: str = ""  # the mark before calls; "" if either the whole text is calls or none of it
    end: str = ""  # the mark after each call
    listed: bool = False  # the calls are in one JSON list
    again: str = ""  # separator between calls that are not in a list and have no mark of their own
    key: str = "arguments"
    named: str = ""
    id_len: int = 24  # letters and digits of a call's id; some templates require a certain number
    id_prefix: str = "call_"

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks, which may be special tokens that decoding leaves out."""
        return (self.begin, self.end, self.named, CALL_ID if self.named else "")

    @property
    def head(self) -> Any:
        """Pattern of a call, without ``begin``, up to the bracket of its arguments."""
        if self.named:
            call = rf"{NAME}(?:{regex.escape(CALL_ID)}\w{{1,64}}+)?{regex.escape(self.named)}"
        else:
            between = r"\[" if self.listed else self.again
            call = rf"(?:{between})?{B}{OBJECT}"
        return regex.compile(rf"{B}{call}{B}\{{")

    @property
    def after(self) -> Any:
        """Pattern after a call, with a group ``more`` if another call follows without ``begin``; ``None`` if nothing does."""
        if self.listed:
            return regex.compile(rf"{B}(?:(?P<more>,)|\])")
        return regex.compile(B + regex.escape(self.end)) if self.end else None

    def new_id(self) -> str:
        """A new id for a call, to which its result refers."""
        return self.id_prefix + "".join(secrets.choice(LETTERS) for _ in range(self.id_len))


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


def call_body(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in the form of chat completions."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(slots=True)
class CallDelta:
    """A call, or a piece of one: its first piece has id and name, later ones continue the arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""  # JSON as the model wrote it

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's form in whole messages."""
        return call_body(self.id, self.name, self.arguments)

    @property
    def streamed(self) -> dict[str, Any]:
        """OpenAI's form in streams."""
        return {"index": self.index, **(self.body if self.id else {"function": {"arguments": self.arguments}})}


@dataclass(slots=True)
class Delta:
    """Thoughts, words and pieces of calls in an answer or a piece of one."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    thoughts: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.calls or self.thoughts)

    @property
    def reasoning(self) -> dict[str, str]:
        """Thoughts under both names, one for clients of DeepSeek and SGLang, one for those of vLLM and OpenRouter."""
        return {"reasoning_content": self.thoughts, "reasoning": self.thoughts} if self.thoughts else {}


class ObjectScanner:
    """Finds the end of a JSON object that comes in pieces, after its opening bracket."""

    def __init__(self) -> None:
        self._depth = 1
        self._quoted = False

    def scan(self, text: str) -> tuple[int, bool]:
        """How far the object extends in ``text``, and whether it ends there; half an escape is left unread."""
        at = 0
        while sign_at := (INSIDE_STRING if self._quoted else OUTSIDE_STRING).search(text, at):
            at, sign = sign_at.end(), sign_at.group()
            if sign == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if sign == "{" else -1
                if self._depth == 0:
                    return at, True
        return len(text) - (self._quoted and text.endswith("\\") and len(text) > at), False


class CallParser:
    """Separates words and calls of one answer; anything but calls of ``functions`` stays words.

    `_read` parses the whole answer, and waits for more of it at each ``yield``.
    """

    def __init__(self, form: ToolFormat, functions: frozenset[str]) -> None:
        self.finished = False  # there are calls, and the last one is complete
        self._form = form
        self._functions = functions
        self._unread = ""
        self._ended = False  # no more text comes
        self._num_calls = 0
        self._delta = Delta()
        self._reading = self._read()

    def take(self, text: str, ended: bool) -> Delta:
        """Parse the next piece of the answer; ``ended``: it is the last one."""
        self._unread += text
        self._ended = ended
        self._delta = Delta()
        next(self._reading)
        return self._delta

    def _read(self) -> Reading[None]:
        form, head, after = self._form, self._form.head, self._form.after
        candidate = (yield from self._words()) if form.begin else ""  # becomes words if no call follows
        while True:
            call = yield from self._certain(head)
            if call is None or call["name"] not in self._functions:
                self._delta.content += candidate
                candidate = yield from self._words()
                continue
            self.finished = False
            self._cut(call.end() - 1)
            self._delta.calls.append(CallDelta(self._num_calls, form.new_id(), call["name"]))
            self._num_calls += 1
            self._argue(self._cut(1))
            yield from self._object(self._argue)
            if not form.named:  # skip the rest of the call's object after the arguments
                yield from self._object(lambda text: None)
            self.finished = True
            behind = None if after is None else (yield from self._certain(after))
            candidate = self._cut(behind.end()) if behind is not None else ""
            if form.begin and not (behind is not None and behind.groupdict().get("more")):
                candidate = yield from self._words()

    def _words(self) -> Reading[str]:
        """Hand out words up to the next mark of calls, and return the mark; without one, hand out all the rest."""
        begin = regex.compile(rf"\s{{0,{MAX_BLANKS}}}+" + regex.escape(self._form.begin))
        while True:
            mark = begin.search(self._unread, partial=not self._ended) if self._form.begin else None
            words = self._cut(mark.start() if mark else len(self._unread))
            self._delta.content += words.rstrip() if self._ended and self._num_calls and not mark else words
            if mark and not mark.partial:
                return self._cut(mark.end() - mark.start())
            yield

    def _certain(self, pattern: Any) -> Reading[Any]:
        """The match of ``pattern`` at the beginning of the unread text, once more text cannot change it."""
        while (match := pattern.match(self._unread, partial=not self._ended)) is not None and match.partial:
            yield
        return match

    def _object(self, take: Callable[[str], None]) -> Reading[None]:
        """Pass the rest of a JSON object, after its opening bracket, to ``take`` as it comes."""
        scanner = ObjectScanner()
        while True:
            end, whole = scanner.scan(self._unread)
            take(self._cut(end))
            if whole:
                return
            yield

    def _cut(self, num_chars: int) -> str:
        cut, self._unread = self._unread[:num_chars], self._unread[num_chars:]
        return cut

    def _argue(self, text: str) -> None:
        if not self._delta.calls:
            self._delta.calls.append(CallDelta(self._num_calls - 1))
        self._delta.calls[-1].arguments += text

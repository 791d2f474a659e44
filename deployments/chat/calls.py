"""What a model wrote, taken apart as it comes: thoughts, words, and calls of tools."""

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cascade.answer import Chunk, Completion
from deployments.chat.thoughts import Splitter, overlap

LETTERS = string.ascii_letters + string.digits
CALL_ID = "[CALL_ID]"  # which some models write between name and arguments
MAX_NAME_CHARS = 128  # of a function, and what may stand between it and its arguments
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
OUTSIDE = re.compile(r'[{}\[\]"]')
INSIDE = re.compile(r'\\.|"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How models of a family write calls: JSON objects with the ``name`` of a function and its arguments as ``key``.

    With ``named`` they are a bare name, this mark, and a JSON object of arguments.
    """

    name: str
    begin: str = ""  # before calls; "" where the whole text is calls or none is
    end: str = ""  # behind each call
    listed: bool = False  # the calls stand in one JSON list
    again: str = ""  # between two calls that are neither listed nor begun anew
    key: str = "arguments"
    named: str = ""
    id_len: int = 24  # letters and digits of the ids of calls, some templates want just so many
    id_prefix: str = "call_"

    @property
    def fresh_id(self) -> str:
        """A name for a call, which its result refers to."""
        return self.id_prefix + "".join(secrets.choice(LETTERS) for _ in range(self.id_len))


@dataclass(slots=True)
class Delta:
    """What a piece of text adds to a message."""

    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index, in OpenAI's form of streamed calls
    thoughts: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.calls or self.thoughts)

    def add(self, piece: "Delta") -> None:
        """What the next piece of the same answer says."""
        self.content += piece.content
        self.thoughts += piece.thoughts
        for index, call in piece.calls.items():
            if index in self.calls:
                self.calls[index]["function"]["arguments"] += call["function"]["arguments"]
            else:
                self.calls[index] = call

    @property
    def reasoning(self) -> dict[str, str]:
        """Thoughts under both names: clients of DeepSeek and SGLang read the one, those of vLLM and OpenRouter the other."""
        return {"reasoning_content": self.thoughts, "reasoning": self.thoughts} if self.thoughts else {}

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI streams it."""
        content = {"content": self.content} if self.content else {}
        return self.reasoning | content | ({"tool_calls": list(self.calls.values())} if self.calls else {})


class Scanner:
    """Finds the end of a JSON object piece by piece, ``depth`` brackets inside of it."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False

    def scan(self, text: str, at: int = 0) -> tuple[int, bool]:
        """How far the object goes in ``text`` from ``at`` on, and whether it ends there; half an escape is left."""
        while found := (INSIDE if self._quoted else OUTSIDE).search(text, at):
            at = found.end()
            sign = found.group()
            if sign == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return at, True
        return len(text) - (self._quoted and text.endswith("\\") and len(text) > at), False


class Reader:
    """Reads one answer. What is no call of one of ``functions`` stays text; without a form nothing is one.

    ``hidden`` are the texts of tokens that decoding leaves out and that the format or thoughts need. Thoughts are told apart if
    there is a ``splitter``, and left out if they are not ``told``; calls in thoughts are thoughts.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        functions: frozenset[str],
        hidden: Mapping[int, str],
        splitter: Splitter | None = None,
        told: bool = True,
    ) -> None:
        self._form = form or ToolFormat("")
        self._functions = functions
        self._hidden = hidden
        self._splitter = splitter
        self._told = told
        self._begins: list[int] = []  # of tokens, in characters of the text with what is hidden, if thoughts are told apart
        self._num_chars = 0
        self._rest = ""  # not understood yet
        self._said = False  # words were handed out
        self._num_calls = 0
        self._call = ""  # what was read of the present call and not handed out, to be words if it is none
        self._scanner = Scanner()
        self._num_scanned = 0  # characters of the rest, while the whole object is waited for
        self._state = self._words if form else self._plain
        self._delta = Delta()
        self._ended = False

    @property
    def finished(self) -> bool:
        """There are calls, and the last one is whole."""
        return self._num_calls > 0 and self._state not in (self._arguments, self._tail)

    @property
    def num_thought_tokens(self) -> int | None:
        """Tokens so far that begin within the thoughts, tags included; ``None`` if thoughts are not told apart."""
        return None if self._splitter is None else sum(map(self._splitter.holds, self._begins))

    def take(self, chunk: Chunk) -> Delta:
        """One more piece of the answer."""
        self._ended = chunk.completion is not None
        self._rest += self._thought(chunk) if self._splitter else self._spelled(chunk)
        while self._state():
            pass
        delta, self._delta = self._delta, Delta()
        return delta

    def _thought(self, chunk: Chunk) -> str:
        """Text of a piece without thoughts, which are told."""
        assert self._splitter is not None
        thoughts, words = self._splitter.take(self._spelled(chunk), self._ended)
        self._delta.thoughts += thoughts if self._told else ""
        return words

    def _spelled(self, chunk: Chunk) -> str:
        """The text of a piece with that of hidden tokens in their places."""
        if not self._hidden and not self._splitter:
            return chunk.text
        parts, at = [], 0
        for token, end in zip(chunk.token_ids, chunk.ends, strict=True):
            self._begins += [self._num_chars] if self._splitter else []
            parts.append(chunk.text[at:end] + self._hidden.get(token, ""))
            self._num_chars += len(parts[-1])
            at = end
        self._num_chars += len(chunk.text) - at
        return "".join(parts) + chunk.text[at:]

    # states: each takes what it understands from the rest, and is true if another one may go on

    def _plain(self) -> bool:
        """Where nothing can be a call."""
        self._say(self._rest)
        self._rest = ""
        return False

    def _words(self) -> bool:
        """Text, up to where calls begin."""
        begin = self._form.begin
        if not begin:
            return self._whole()
        at = self._rest.find(begin)
        if at >= 0:
            words = self._rest[:at].rstrip()
            self._say(words)
            at += len(begin)
            self._call, self._rest = self._rest[len(words) : at], self._rest[at:]
            return self._enter(self._first if self._form.listed else self._name if self._form.named else self._head)
        kept = 0 if self._ended else overlap(self._rest, begin)
        words = self._rest[: len(self._rest) - kept]
        if self._ended and self._num_calls:
            words = words.rstrip()  # blanks behind calls say nothing
        elif not self._ended:
            words = words.rstrip()  # those before calls neither
        self._say(words)
        self._rest = self._rest[len(words) :]
        return False

    def _whole(self) -> bool:
        """Where nothing marks calls: they are all of the text, or there are none."""
        begun = self._said or bool(self._num_calls)
        if not self._said and self._rest.lstrip().startswith("{"):
            return self._enter(self._head)
        blank = not self._said and not self._rest.strip()  # before anything, or behind calls
        if not blank or (self._ended and not begun):
            self._say(self._rest)
            self._rest = ""
        return False

    def _first(self) -> bool:
        """The bracket of a list of calls."""
        rest = self._rest.lstrip()
        if rest.startswith("["):
            self._call, self._rest = self._call + self._rest[: -len(rest)] + "[", rest[1:]
            return self._enter(self._head)
        return self._no_call() if rest or self._ended else False

    def _head(self) -> bool:
        """The name of a call, or all of it where the name does not come first."""
        found = HEAD.match(self._rest)
        if found:
            name = json.loads(found[1], strict=False)
            if name not in self._functions:
                return self._no_call()
            self._rest = self._rest[found.end() :]
            self._begin(name)
            return self._enter(self._arguments)
        blank = len(self._rest) - len(self._rest.lstrip())
        if self._rest[blank : blank + 1] not in ("", "{"):
            return self._no_call()
        end, whole = self._scanner.scan(self._rest, max(blank, self._num_scanned))
        self._num_scanned = end
        if not whole:
            return self._no_call() if self._ended else False
        call = _parsed(self._rest[blank:end], bare=bool(self._form.begin))
        if call is None or call[0] not in self._functions:
            return self._no_call()
        self._begin(call[0])
        self._add(call[1])
        self._rest = self._rest[end:]
        return self._enter(self._behind)

    def _name(self) -> bool:
        """The bare name of a call, up to the bracket of its arguments."""
        mark = self._form.named
        name, marked, rest = self._rest.partition(mark)
        if not marked or not rest.strip():
            possible = len(name) <= MAX_NAME_CHARS and not self._ended
            return False if possible else self._no_call()
        name = name.partition(CALL_ID)[0].strip()
        if name not in self._functions or not rest.lstrip().startswith("{"):
            return self._no_call()
        self._begin(name)
        self._rest = rest.lstrip()
        return self._enter(self._arguments)

    def _arguments(self) -> bool:
        end, whole = self._scanner.scan(self._rest)
        self._add(self._rest[:end])
        self._rest = self._rest[end:]
        if not whole:
            return False
        return self._enter(self._behind) if self._form.named else self._enter(self._tail, depth=1)

    def _tail(self) -> bool:
        """The rest of the object behind the arguments."""
        end, whole = self._scanner.scan(self._rest)
        self._rest = self._rest[end:]
        return self._enter(self._behind) if whole else False

    def _behind(self) -> bool:
        """What may stand between calls."""
        form, rest = self._form, self._rest.lstrip()
        signs = [*([",", "]"] if form.listed else []), *filter(None, (form.end, form.again))]
        for sign in signs:
            if rest.startswith(sign):
                self._rest = rest[len(sign) :]
                return self._enter(self._head if sign in (",", form.again) else self._words)
        if not self._ended and any(sign.startswith(rest) for sign in signs):
            return False
        return self._enter(self._words)

    # what they do

    def _enter(self, state: Callable[[], bool], depth: int = 0) -> bool:
        self._state, self._scanner, self._num_scanned = state, Scanner(depth), 0
        return True

    def _no_call(self) -> bool:
        """It looked like one: these are words."""
        self._say(self._call)
        self._said = True
        return self._enter(self._words)

    def _say(self, words: str) -> None:
        if words:
            self._said = True
            self._delta.content += words
        self._call = ""

    def _begin(self, name: str) -> None:
        self._delta.calls[self._num_calls] = {
            "index": self._num_calls,
            "id": self._form.fresh_id,
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        self._num_calls += 1
        self._call = ""

    def _add(self, arguments: str) -> None:
        if arguments:
            index = self._num_calls - 1
            call = self._delta.calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
            call["function"]["arguments"] += arguments


def read(chunks: Iterable[Chunk], completion: Completion, reader: Reader | None) -> tuple[Delta, str]:
    """What a whole answer says and calls, and why it ended; without a reader it calls nothing."""
    if reader is None:
        return Delta(completion.text), completion.finish_reason
    said = Delta()
    for chunk in chunks:
        said.add(reader.take(chunk))
    return said, reason(completion, reader)


def reason(completion: Completion, reader: Reader | None) -> str:
    """Why an answer ended: calls that were cut are none."""
    called = reader is not None and reader.finished and completion.finish_reason == "stop"
    return "tool_calls" if called else completion.finish_reason


def _parsed(text: str, *, bare: bool) -> tuple[str, str] | None:
    """Name and arguments of a call in any order; ``None`` if it is none. If ``bare`` a name alone will do."""
    try:
        call = json.loads(text)
        name = call["name"]
        given = call["arguments"] if "arguments" in call else call.get("parameters") if bare else call["parameters"]
        given = {} if given is None and bare else given
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)

"""Calls of tools in the text of an answer, found as it comes."""

import json
import re
from collections.abc import Callable

from cascade.answer import overlap
from deployments.gateway.chat.delta import Delta
from deployments.gateway.chat.formats import CALL_ID, ToolFormat

MAX_NAME_CHARS = 128  # of a function's bare name, with what may stand between it and its arguments
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
OUTSIDE_STRING = re.compile(r'[{}\[\]"]')
INSIDE_STRING = re.compile(r'\\.|"', re.DOTALL)


class ObjectScanner:
    """Finds the end of a JSON object that comes in pieces; ``depth`` brackets of it are open already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False

    def scan(self, text: str, at: int = 0) -> tuple[int, bool]:
        """How far the object goes in ``text`` from ``at`` on, and whether it ends there; half an escape is left over."""
        while found := (INSIDE_STRING if self._quoted else OUTSIDE_STRING).search(text, at):
            at = found.end()
            sign = found.group()
            if sign == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return at, True
        return len(text) - (self._quoted and text.endswith("\\") and len(text) > at), False


class CallParser:
    """Tells words and calls of one answer apart; what is no call of one of ``functions`` stays words.

    A machine with one state for each part of a call. A state is a method: it takes what it understands from the front of
    the unread text, and returns whether to go on at once, with the state that it has entered.
    """

    def __init__(self, form: ToolFormat, functions: frozenset[str]) -> None:
        self._form = form
        self._functions = functions
        self._unread = ""
        self._ended = False  # the unread text is the last
        self._state: Callable[[], bool] = self._words
        self._candidate = ""  # read of what may become a call: words, if it does not
        self._scanner = ObjectScanner()
        self._num_scanned = 0  # unread characters that the scanner has seen
        self._spoken = False  # words were told
        self._num_calls = 0
        self._delta = Delta()

    @property
    def finished(self) -> bool:
        """There are calls, and the last one is whole."""
        return self._num_calls > 0 and self._state not in (self._arguments, self._rest_of_object)

    def take(self, text: str, ended: bool) -> Delta:
        """What the next piece of the answer brings; ``ended``: it is the last."""
        self._unread += text
        self._ended = ended
        while self._state():
            pass
        delta, self._delta = self._delta, Delta()
        return delta

    # states

    def _words(self) -> bool:
        begin = self._form.begin
        if not begin:
            return self._words_or_object()
        words, mark, rest = self._unread.partition(begin)
        if mark:
            told = words.rstrip()
            self._say(told)
            self._candidate, self._unread = words[len(told) :] + mark, rest
            return self._enter(self._bracket if self._form.listed else self._name if self._form.named else self._object)
        told = words if self._ended else words[: len(words) - overlap(words, begin)]
        if self._num_calls or not self._ended:
            told = told.rstrip()  # blanks say nothing after calls, or before some that may come
        self._say(told)
        self._unread = self._unread[len(told) :]
        return False

    def _words_or_object(self) -> bool:
        """The begin of a text, or what is after a call, where no mark tells of calls: they are all of a text or none of it."""
        if not self._spoken and self._unread.lstrip().startswith("{"):
            return self._enter(self._object)
        waits = not self._spoken and not self._unread.strip() and (self._num_calls or not self._ended)
        if not waits:
            self._say(self._unread)
            self._unread = ""
        return False

    def _bracket(self) -> bool:
        blanks, bracket, rest = self._unread.partition("[")
        if bracket and not blanks.strip():
            self._candidate, self._unread = self._candidate + blanks + bracket, rest
            return self._enter(self._object)
        return self._no_call() if self._unread.strip() or self._ended else False

    def _object(self) -> bool:
        """A call up to its arguments if its name comes first, as most models write it, else all of it."""
        found = HEAD.match(self._unread)
        if found is None:
            return self._whole_object()
        name = json.loads(found[1], strict=False)
        if name not in self._functions:
            return self._no_call()
        self._unread = self._unread[found.end() :]
        self._begin(name)
        return self._enter(self._arguments)

    def _whole_object(self) -> bool:
        blank = len(self._unread) - len(self._unread.lstrip())
        if self._unread[blank : blank + 1] not in ("", "{"):
            return self._no_call()
        end, whole = self._scanner.scan(self._unread, max(blank, self._num_scanned))
        self._num_scanned = end
        if not whole:
            return self._no_call() if self._ended else False
        call = parsed_call(self._unread[blank:end], bare=bool(self._form.begin))
        if call is None or call[0] not in self._functions:
            return self._no_call()
        self._begin(call[0])
        self._delta.add_arguments(self._num_calls - 1, call[1])
        self._unread = self._unread[end:]
        return self._enter(self._behind)

    def _name(self) -> bool:
        """The bare name of a function, the mark after it, and the bracket of its arguments."""
        name, mark, rest = self._unread.partition(self._form.named)
        if not mark or not rest.strip():
            possible = len(name) <= MAX_NAME_CHARS and not self._ended
            return False if possible else self._no_call()
        name = name.partition(CALL_ID)[0].strip()
        if name not in self._functions or not rest.lstrip().startswith("{"):
            return self._no_call()
        self._begin(name)
        self._unread = rest.lstrip()
        return self._enter(self._arguments)

    def _arguments(self) -> bool:
        end, whole = self._scanner.scan(self._unread)
        self._delta.add_arguments(self._num_calls - 1, self._unread[:end])
        self._unread = self._unread[end:]
        if not whole:
            return False
        return self._enter(self._behind) if self._form.named else self._enter(self._rest_of_object, depth=1)

    def _rest_of_object(self) -> bool:
        """What the object of a call has after its arguments, which says nothing."""
        end, whole = self._scanner.scan(self._unread)
        self._unread = self._unread[end:]
        return self._enter(self._behind) if whole else False

    def _behind(self) -> bool:
        """What may stand after a call."""
        form, rest = self._form, self._unread.lstrip()
        signs = [*([",", "]"] if form.listed else []), *filter(None, (form.end, form.again))]
        for sign in signs:
            if rest.startswith(sign):
                self._unread = rest[len(sign) :]
                return self._enter(self._object if sign in (",", form.again) else self._words)
        if not self._ended and any(sign.startswith(rest) for sign in signs):
            return False
        return self._enter(self._words)

    # steps of states

    def _enter(self, state: Callable[[], bool], depth: int = 0) -> bool:
        self._state, self._scanner, self._num_scanned = state, ObjectScanner(depth), 0
        return True

    def _no_call(self) -> bool:
        self._say(self._candidate)
        self._spoken = True
        return self._enter(self._words)

    def _say(self, words: str) -> None:
        self._spoken = self._spoken or bool(words)
        self._delta.content += words
        self._candidate = ""

    def _begin(self, name: str) -> None:
        self._delta.begin_call(self._num_calls, self._form.new_id(), name)
        self._num_calls += 1
        self._candidate = ""


def parsed_call(text: str, *, bare: bool) -> tuple[str, str] | None:
    """Name and arguments of a call, in any order; ``None`` if ``text`` is none. With ``bare`` a name alone will do."""
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

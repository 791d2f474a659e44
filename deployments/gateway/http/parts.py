"""What the Responses and the Messages API share: tools as chats have them, and one turn as a row of parts.

Each part grows until the next begins.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from cascade.answer import Chunk, Completion
from cascade.chat.conversation import Body
from deployments.gateway.chat.assistant import ChatTask
from deployments.gateway.chat.calls import CallDelta
from deployments.gateway.http.events import Reply, event

FUNCTION = {"name", "description", "parameters", "strict"}  # fields of a tool that chat completions have
Events = Iterator[dict[str, Any]]  # each is to be written before the next is asked for: parts grow meanwhile


class ForeignTool(Body):
    """A tool that is no function, such as one of the provider's own: the model is not told of it."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def kind_of_tool(function: str) -> Callable[[Any], str]:
    """Tells the tag of a tool where functions have the type ``function``; a space keeps tags out of places in errors."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return "another tool" if isinstance(kind, str) and kind != function else "our tool"

    return tag


def left_out(tools: Sequence[Any] | None) -> list[str]:
    """Tools that the model is not told of, as a warning has them."""
    kinds = dict.fromkeys(tool.type for tool in tools or () if isinstance(tool, ForeignTool))
    return [f"tools of type {kind}" for kind in kinds]


def named_tool(name: str) -> dict[str, Any]:
    """The choice of this function, as chat completions have it."""
    return {"type": "function", "function": {"name": name}}


def tool_fields(given: Sequence[Body] | None, choice: Any, parallel: bool | None) -> dict[str, Any]:
    """The fields of chat completions about tools; to choose freely among none is no choice."""
    own = [tool for tool in given or () if not isinstance(tool, ForeignTool)]
    tools = [{"type": "function", "function": tool.model_dump(include=FUNCTION, exclude_none=True)} for tool in own]
    fields: dict[str, Any] = {"tools": tools, "parallel_tool_calls": parallel} if tools else {}
    return fields | ({"tool_choice": choice} if tools or choice != "auto" else {})


class PartsReply(Reply):
    """The one answer to a request; ``answer`` is its body as the first event has it, which `_finish` completes."""

    THOUGHTS: ClassVar[str]  # kinds of parts
    WORDS: ClassVar[str]
    CALLS: ClassVar[str]

    def __init__(self, task: ChatTask, answer: dict[str, Any]) -> None:
        self._reader = task.reader()
        self._answer = answer
        self._begun = False
        self._parts: list[dict[str, Any]] = []
        self._open = False  # the last part grows

    def whole(self, pieces: Sequence[tuple[int, Chunk]]) -> dict[str, Any]:
        for _, chunk in pieces:
            for _ in self._events(chunk):
                pass
        return self._answer

    def piece(self, index: int, chunk: Chunk) -> bytes:
        return b"".join(map(self._event, self._events(chunk)))

    def _events(self, chunk: Chunk) -> Events:
        delta = self._reader.take(chunk)
        if not self._begun:
            self._begun = True
            yield from self._start()
        continued = [(self.CALLS, call.arguments, None) for call in delta.calls if not call.id]
        texts = [(self.THOUGHTS, delta.thoughts, None), (self.WORDS, delta.content, None)]
        begun = [(self.CALLS, call.arguments, call) for call in delta.calls if call.id]
        for kind, text, call in [*continued, *texts, *begun]:
            if call is not None or (text and not (self._open and self._parts[-1]["type"] == kind)):
                yield from self._begin(kind, call)
            if text:
                yield self._grow(kind, self._parts[-1], text)
        if chunk.completion is not None:
            yield from self._finish(chunk.completion)

    def _event(self, content: dict[str, Any]) -> bytes:
        return event(content, content["type"])

    def _begin(self, kind: str, call: CallDelta | None = None) -> Events:
        yield from self._close()
        self._open = True
        yield from self._add(kind, call)

    def _close(self) -> Events:
        """End the part that grows, if there is one."""
        if self._open:
            self._open = False
            yield from self._end(self._parts[-1])

    @abstractmethod
    def _start(self) -> Events:
        """The answer begins."""

    @abstractmethod
    def _add(self, kind: str, call: CallDelta | None) -> Events:
        """A part begins, to which the text of this kind, or the arguments of a ``call``, are added."""

    @abstractmethod
    def _grow(self, kind: str, part: dict[str, Any], text: str) -> dict[str, Any]:
        """A piece of the last part has come."""

    @abstractmethod
    def _end(self, part: dict[str, Any]) -> Events:
        """The last part is whole."""

    @abstractmethod
    def _finish(self, end: Completion) -> Events:
        """The last piece has come."""

"""Shared by the Responses and the Messages API: tools in the form of chats, and a turn as a sequence of parts.

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
Events = Iterator[dict[str, Any]]  # each must be written before the next is taken, since parts grow in between


class ForeignTool(Body):
    """A tool that is not a function, such as a provider's own: the model does not see it."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def kind_of_tool(function: str) -> Callable[[Any], str]:
    """A discriminator of tools; functions have the type ``function``. Tags have a space, which keeps them out of errors."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return "another tool" if isinstance(kind, str) and kind != function else "our tool"

    return tag


def left_out(tools: Sequence[Any] | None) -> list[str]:
    """Tools that the model does not see, for a warning."""
    kinds = dict.fromkeys(tool.type for tool in tools or () if isinstance(tool, ForeignTool))
    return [f"tools of type {kind}" for kind in kinds]


def named_tool(name: str) -> dict[str, Any]:
    """The choice of a function in the form of chat completions."""
    return {"type": "function", "function": {"name": name}}


def tool_fields(given: Sequence[Body] | None, choice: Any, parallel: bool | None) -> dict[str, Any]:
    """The fields of chat completions on tools; a free choice without tools is left out."""
    own = [tool for tool in given or () if not isinstance(tool, ForeignTool)]
    tools = [{"type": "function", "function": tool.model_dump(include=FUNCTION, exclude_none=True)} for tool in own]
    fields: dict[str, Any] = {"tools": tools, "parallel_tool_calls": parallel} if tools else {}
    return fields | ({"tool_choice": choice} if tools or choice != "auto" else {})


class PartsReply(Reply):
    """The single answer to a request; ``answer`` is the body in the first event, which `_finish` completes."""

    THOUGHTS: ClassVar[str]  # kinds of parts
    WORDS: ClassVar[str]
    CALLS: ClassVar[str]

    def __init__(self, task: ChatTask, answer: dict[str, Any]) -> None:
        self._reader = task.reader()
        self._answer = answer
        self._begun = False
        self._parts: list[dict[str, Any]] = []
        self._open = False  # whether the last part is still growing

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
        """End the part that is growing, if there is one."""
        if self._open:
            self._open = False
            yield from self._end(self._parts[-1])

    # begin and end the answer, begin a part (of text of this kind, or of the arguments of a ``call``), add to it, and end it

    @abstractmethod
    def _start(self) -> Events: ...

    @abstractmethod
    def _finish(self, end: Completion) -> Events: ...

    @abstractmethod
    def _add(self, kind: str, call: CallDelta | None) -> Events: ...

    @abstractmethod
    def _grow(self, kind: str, part: dict[str, Any], text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _end(self, part: dict[str, Any]) -> Events: ...

"""What the Responses and the Messages API share: one turn as a row of parts, each of which grows until the next begins."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from cascade.answer import Chunk, Completion
from deployments.gateway.admission.status import Refusal
from deployments.gateway.chat.assistant import ChatTask
from deployments.gateway.chat.delta import Delta
from deployments.gateway.http.events import event

Said = Iterator[dict[str, Any]]  # events, each to be written before the next is asked for: parts grow meanwhile


class PartsReply(ABC):
    """The one answer to a request."""

    THOUGHTS: ClassVar[str]  # kinds of parts
    WORDS: ClassVar[str]

    def __init__(self, task: ChatTask, answer: dict[str, Any]) -> None:
        self._reader = task.new_reader()
        self._answer = answer  # as it is told at the begin; `_finish` completes it
        self._begun = False

    def whole(self, pieces: Sequence[tuple[int, Chunk]]) -> dict[str, Any]:
        """The answer at once."""
        for _, chunk in pieces:
            for _ in self._events(chunk):
                pass
        return self._answer

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Events of the next piece of the answer."""
        return b"".join(map(self._event, self._events(chunk)))

    def end(self) -> bytes:
        """Nothing: the last piece has ended the stream."""
        return b""

    @abstractmethod
    def failed(self, refused: Refusal) -> bytes:
        """What comes in place of the end."""

    def _events(self, chunk: Chunk) -> Said:
        """Events of a piece."""
        said = Delta(chunk.text) if self._reader is None else self._reader.take(chunk)
        if not self._begun:
            self._begun = True
            yield from self._start()
        for call in said.calls.values():
            if "id" not in call:  # the one that was begun before
                yield from self._argue(call["function"]["arguments"])
        if said.thoughts:
            yield from self._write(self.THOUGHTS, said.thoughts)
        if said.content:
            yield from self._write(self.WORDS, said.content)
        for call in said.calls.values():
            if "id" in call:
                yield from self._call(call["id"], call["function"]["name"])
                yield from self._argue(call["function"]["arguments"])
        if chunk.completion is not None:
            yield from self._finish(chunk.completion)

    def _event(self, said: dict[str, Any]) -> bytes:
        return event(said, said["type"])

    @abstractmethod
    def _start(self) -> Said:
        """The answer begins."""

    @abstractmethod
    def _write(self, kind: str, text: str) -> Said:
        """A piece of thoughts or words."""

    @abstractmethod
    def _call(self, id: str, name: str) -> Said:
        """A call begins."""

    @abstractmethod
    def _argue(self, arguments: str) -> Said:
        """A piece of its arguments."""

    @abstractmethod
    def _finish(self, end: Completion) -> Said:
        """The last piece has come."""

"""The requests of one call of the library, between the answers that it collects and the full tier."""

from collections.abc import Callable, Iterator, Sequence

from cascade.answer import Answer, Chunk
from cascade.chain.tier import Tier
from cascade.errors import InvalidRequest, Unavailable
from cascade.messages import Close, Failed, Link, Message, Proposal


class Requests:
    """Opened together, told apart by their session; ``link`` takes what the tier ``full`` answers."""

    def __init__(self, full: Tier, answers: Sequence[Answer], link: Link) -> None:
        self._full = full
        self._answers = {answer.opening.session: answer for answer in answers}
        self._link = link

    @property
    def finished(self) -> bool:
        return not self._answers

    def run(self, receive: Callable[[], Message]) -> Iterator[Chunk]:
        try:
            self.open()
            while not self.finished:
                yield from self.take(receive())
        finally:
            self.close()

    def open(self) -> None:
        self._full.post([answer.opening for answer in self._answers.values()], self._link)

    def take(self, message: Message) -> list[Chunk]:
        assert isinstance(message, Proposal | Failed)
        answer = self._answers.get(message.session)
        if answer is None:
            return []
        if isinstance(message, Failed):
            raise InvalidRequest(message.reason) if message.fault else Unavailable(f"The full tier failed: {message.reason}")
        chunk, commit = answer.take(message)
        if answer.finished:
            del self._answers[message.session]
            self._full.post([Close(message.session)])
        elif commit is not None:
            self._full.post([commit])
        return [chunk] if chunk is not None else []

    def close(self) -> None:
        """End what has not finished."""
        if self._answers:
            self._full.post([Close(session) for session in self._answers])
            self._answers.clear()


class Deliver(Link):
    """The end of a link that hands each message to a function."""

    def __init__(self, deliver: Callable[[Message], object]) -> None:
        self._deliver = deliver

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._deliver(message)

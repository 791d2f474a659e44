"""Links in memory: between the tiers of one process, and from its full tier to callers."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from cascade.answer import Answer, Chunk
from cascade.errors import InvalidRequest, Unavailable
from cascade.messages import Close, Failed, Link, Message, Open, Proposal, mint
from cascade.tier.tier import Tier


def join(tiers: Sequence[Tier]) -> None:
    """Give every tier, bottom to top and not started yet, a link to the tiers below it."""
    below: dict[str, Tier] = {}
    for tier in tiers:
        if below:
            tier.below = LocalDownlink(below, Deliver(tier.post))
        below = {**below, tier.name: tier}


class Deliver(Link):
    """Hands messages to a function."""

    def __init__(self, deliver: Callable[[Sequence[Message]], object]) -> None:
        self._deliver = deliver

    def send(self, messages: Sequence[Message]) -> None:
        self._deliver(messages)


class LocalDownlink(Link):
    """Link to the tiers below: an Open goes to the tier that it names, later messages of its session follow it there."""

    def __init__(self, tiers: Mapping[str, Tier], up: Link) -> None:
        self._tiers = tiers
        self._up = up
        self._routes: dict[str, Tier] = {}  # each session's tier, until its Close

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Open):
                self._routes[message.session] = self._tiers[message.spec.tier]
            route = self._routes.get(message.session)
            if isinstance(message, Close):
                self._routes.pop(message.session, None)
            if route is not None:
                route.post([message], self._up)


class Requests:
    """The requests of one call, by session; ``link`` takes the proposals of the tier ``full``."""

    def __init__(self, full: Tier, answers: Sequence[Answer], link: Link) -> None:
        self._full = full
        self._answers = {mint(): answer for answer in answers}
        self._link = link

    @property
    def finished(self) -> bool:
        return not self._answers

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(self._answers)

    def run(self, receive: Callable[[], Sequence[Message]]) -> Iterator[Chunk]:
        """Open all, and yield pieces from the messages that ``receive`` waits for, until all are finished."""
        try:
            self.open()
            while not self.finished:
                for message in receive():
                    yield from self.receive(message)
        finally:
            self.close()

    def open(self) -> None:
        self._full.post([Open(session, answer.spec) for session, answer in self._answers.items()], self._link)

    def receive(self, message: Message) -> list[Chunk]:
        """The next piece of text that a message of the full tier brings, if any."""
        assert isinstance(message, Proposal | Failed)
        answer = self._answers.get(message.session)
        if answer is None:
            return []
        if isinstance(message, Failed):
            raise InvalidRequest(message.reason) if message.fault else Unavailable(f"The full tier failed: {message.reason}")
        chunk, commit = answer.receive(message)
        if answer.finished:
            del self._answers[message.session]
            self._full.post([Close(message.session)])
        elif commit is not None:
            self._full.post([commit])
        return [chunk] if chunk is not None else []

    def close(self) -> None:
        if self._answers:
            self._full.post([Close(session) for session in self._answers])
            self._answers.clear()


class Mailbox(Link):
    """Takes the messages of a pass for all requests of an event loop at once.

    Waking the event loop costs the tier's thread more than all else that an answer needs, since both then compete for the GIL.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inboxes: dict[str, asyncio.Queue[Message]] = {}  # one for each session

    def send(self, messages: Sequence[Message]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: its readers are gone
            self._loop.call_soon_threadsafe(self._sort, messages)

    @contextlib.contextmanager
    def reading(self, sessions: Sequence[str]) -> Iterator[asyncio.Queue[Message]]:
        """A queue for the messages of ``sessions``, while the context is open."""
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._inboxes |= dict.fromkeys(sessions, inbox)
        try:
            yield inbox
        finally:
            for session in sessions:
                del self._inboxes[session]

    @property
    def idle(self) -> bool:
        return not self._inboxes

    def _sort(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if (inbox := self._inboxes.get(message.session)) is not None:
                inbox.put_nowait(message)

"""Links between tiers of different processes: their two ends."""

import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

from cascade.chain.tier import Tier
from cascade.messages import Close, Failed, Link, Message, Open
from cascade.processes.channel import Channel


class Downlink(Link):
    """The upper end: joins a tier of this process to those below it elsewhere. ``deliver`` gets what they say, in any thread.

    A tier whose process has ended fails the sessions that it had, and those that are opened until `attach` brings it back.
    """

    def __init__(self, deliver: Callable[[Sequence[Message]], object]) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        self._channels: dict[str, Channel] = {}  # by tier
        self._routes: dict[str, tuple[str, Channel]] = {}  # tier and channel, by session

    def attach(self, tier: str, sock: socket.socket) -> None:
        """Reach ``tier`` through ``sock`` from now on."""
        channel = Channel(sock, self._hear, lambda: self._lose(tier, channel), tier)
        with self._lock:
            self._channels[tier] = channel
        channel.start()

    def send(self, messages: Sequence[Message]) -> None:
        batches: dict[Channel, list[Message]] = {}
        failed: list[Message] = []
        with self._lock:
            for message in messages:
                if isinstance(message, Open) and (found := self._channels.get(message.tier)) is not None:
                    self._routes[message.session] = message.tier, found
                elif isinstance(message, Open):
                    failed.append(_lost(message.session, message.tier))
                route = self._routes.get(message.session)
                if isinstance(message, Close):
                    self._routes.pop(message.session, None)
                if route is not None:
                    batches.setdefault(route[1], []).append(message)
        for channel, batch in batches.items():
            channel.send(batch)
        if failed:
            self._deliver(failed)

    def close(self) -> None:
        """Break all links."""
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def _hear(self, messages: Sequence[Message]) -> None:
        with self._lock:
            for message in messages:
                if isinstance(message, Failed):
                    self._routes.pop(message.session, None)
        self._deliver(messages)

    def _lose(self, tier: str, channel: Channel) -> None:
        """The other end is gone: its sessions have failed."""
        with self._lock:
            if self._channels.get(tier) is channel:
                del self._channels[tier]
            lost = [session for session, route in self._routes.items() if route[1] is channel]
            for session in lost:
                del self._routes[session]
        if lost:
            self._deliver([_lost(session, tier) for session in lost])


class Uplink(Link):
    """The lower end: joins a drafter of this process to a tier above it elsewhere. ``ended`` is called when that is gone."""

    def __init__(self, sock: socket.socket, drafter: Tier, ended: Callable[["Uplink"], object]) -> None:
        self._drafter = drafter
        self._sessions: set[str] = set()
        self._finish = partial(ended, self)
        self._channel = Channel(sock, self._take, self._end, "above")
        self._channel.start()

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Failed):
                self._sessions.discard(message.session)
        self._channel.send(messages)

    def close(self) -> None:
        """Break the link."""
        self._channel.close()

    def _take(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Open):
                self._sessions.add(message.session)
            elif isinstance(message, Close):
                self._sessions.discard(message.session)
        self._drafter.post(messages, self)

    def _end(self) -> None:
        """The tier above is gone, and its sessions with it."""
        self._drafter.post([Close(session) for session in list(self._sessions)])
        self._finish()


def _lost(session: str, tier: str) -> Failed:
    return Failed(session, f"the process of tier {tier} has ended", tier)

"""Links in memory: joins the tiers of one process, and drafters without a model to the tier above them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cascade.chain.tier import Tier
from cascade.messages import Close, Failed, Link, Message, Open


class Drafter(Protocol):
    """Whoever answers Opens and Commits with proposals: a `Tier`, or one of `cascade.drafters`."""

    def post(self, messages: Sequence[Message], up: Link | None = None) -> None:
        """Take messages from above; Opens come with the link that takes their session's proposals."""


def join(
    tiers: Sequence[Tier], drafters: Mapping[str, Drafter] | None = None, beyond: Callable[[Tier], Link] | None = None
) -> None:
    """Give every tier, bottom to top and not started yet, a link to the tiers below it and to all ``drafters``.

    Below all of them may be tiers of other processes, to which ``beyond`` makes a link.
    """
    below: dict[str, Drafter] = dict(drafters or {})
    for tier in tiers:
        if below or beyond is not None:
            tier.below = LocalDownlink(tier, below, None if beyond is None else beyond(tier))
        below = {**below, tier.name: tier}


class LocalDownlink(Link):
    """What the tier ``owner`` sends down: an Open goes to the drafter it names, what follows goes where its Open went.

    Sessions of those that are not among ``drafters`` go on to the link ``beyond``.
    """

    def __init__(self, owner: Tier, drafters: Mapping[str, Drafter], beyond: Link | None = None) -> None:
        self._drafters = drafters
        self._beyond = beyond
        self._routes: dict[str, Drafter] = {}
        self._up = LocalUplink(owner, self._routes)

    def send(self, messages: Sequence[Message]) -> None:
        elsewhere = [message for message in messages if not self._post(message)]
        if elsewhere and self._beyond is not None:
            self._beyond.send(elsewhere)

    def _post(self, message: Message) -> bool:
        """Hand a message to the drafter that it is for, if that is here."""
        if isinstance(message, Open) and message.tier in self._drafters:
            self._routes[message.session] = self._drafters[message.tier]
        route = self._routes.get(message.session)
        if isinstance(message, Close):
            self._routes.pop(message.session, None)
        if route is not None:
            route.post([message], self._up)
        return route is not None


class LocalUplink(Link):
    """What comes back up to the tier ``owner``."""

    def __init__(self, owner: Tier, routes: dict[str, Drafter]) -> None:
        self._owner = owner
        self._routes = routes

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Failed):
                self._routes.pop(message.session, None)
        self._owner.post(messages)

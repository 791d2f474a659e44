"""Links in memory: joins the tiers of one process."""

from collections.abc import Callable, Mapping, Sequence

from cascade.messages import Close, Failed, Link, Message, Open
from cascade.tier.tier import Tier


def join(tiers: Sequence[Tier], beyond: Callable[[Tier], Link] | None = None) -> None:
    """Give every tier, bottom to top and not started yet, a link to the tiers below it.

    Below all of them may be tiers of other processes, to which ``beyond`` makes a link.
    """
    below: dict[str, Tier] = {}
    for tier in tiers:
        if below or beyond is not None:
            tier.below = LocalDownlink(tier, below, None if beyond is None else beyond(tier))
        below = {**below, tier.name: tier}


class LocalDownlink(Link):
    """What the tier ``owner`` sends down: an Open goes to the tier it names, what follows goes where its Open went.

    Sessions of those that are not among ``tiers`` go on to the link ``beyond``.
    """

    def __init__(self, owner: Tier, tiers: Mapping[str, Tier], beyond: Link | None = None) -> None:
        self._tiers = tiers
        self._beyond = beyond
        self._routes: dict[str, Tier] = {}
        self._up = LocalUplink(owner, self._routes)

    def send(self, messages: Sequence[Message]) -> None:
        elsewhere = [message for message in messages if not self._post(message)]
        if elsewhere and self._beyond is not None:
            self._beyond.send(elsewhere)

    def _post(self, message: Message) -> bool:
        """Hand a message to the tier that it is for, if that is here."""
        if isinstance(message, Open) and message.tier in self._tiers:
            self._routes[message.session] = self._tiers[message.tier]
        route = self._routes.get(message.session)
        if isinstance(message, Close):
            self._routes.pop(message.session, None)
        if route is not None:
            route.post([message], self._up)
        return route is not None


class LocalUplink(Link):
    """What comes back up to the tier ``owner``."""

    def __init__(self, owner: Tier, routes: dict[str, Tier]) -> None:
        self._owner = owner
        self._routes = routes

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Failed):
                self._routes.pop(message.session, None)
        self._owner.post(messages)

"""Links in memory: joins the tiers of one process."""

from collections.abc import Mapping, Sequence

from cascade.messages import Close, Failed, Link, Message, Open
from cascade.tier.tier import Tier


def join(tiers: Sequence[Tier]) -> None:
    """Give every tier, bottom to top and not started yet, a link to the tiers below it."""
    below: dict[str, Tier] = {}
    for tier in tiers:
        if below:
            tier.below = LocalDownlink(tier, below)
        below = {**below, tier.name: tier}


class LocalDownlink(Link):
    """What the tier ``owner`` sends down: an Open goes to the tier it names, what follows goes where its Open went."""

    def __init__(self, owner: Tier, tiers: Mapping[str, Tier]) -> None:
        self._tiers = tiers
        self._routes: dict[str, Tier] = {}
        self._up = LocalUplink(owner, self._routes)

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Open):
                self._routes[message.session] = self._tiers[message.tier]
            route = self._routes.get(message.session)
            if isinstance(message, Close):
                self._routes.pop(message.session, None)
            if route is not None:
                route.post([message], self._up)


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

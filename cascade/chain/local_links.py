"""Links in memory: joins the tiers of one process."""

from collections.abc import Mapping, Sequence

from cascade.chain.tier import Tier
from cascade.messages import Close, Failed, Link, Message, Open


def join(tiers: Sequence[Tier]) -> None:
    """Give every tier, bottom to top and not started yet, a link to those below it."""
    for level, tier in enumerate(tiers[1:], start=1):
        tier.below = Downlink(tier, {lower.name: lower for lower in tiers[:level]})


class Downlink(Link):
    """What a tier sends down: an Open goes to the tier it names, what follows goes where its Open went."""

    def __init__(self, owner: Tier, lower: Mapping[str, Tier]) -> None:
        self._lower = lower
        self._routes: dict[str, Tier] = {}
        self._up = Uplink(owner, self._routes)

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Open):
                self._routes[message.session] = self._lower[message.tier]
            route = self._routes.get(message.session)
            if isinstance(message, Close):
                self._routes.pop(message.session, None)
            if route is not None:
                route.post([message], self._up)


class Uplink(Link):
    """What comes back up to the tier ``owner``."""

    def __init__(self, owner: Tier, routes: dict[str, Tier]) -> None:
        self._owner = owner
        self._routes = routes

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Failed):
                self._routes.pop(message.session, None)
        self._owner.post(messages)

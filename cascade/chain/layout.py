"""How many replicas each tier is worth: a pure function of what the tiers report.

A *layout* is a number of replicas for each tier, bottom to top. Of those that the budget allows and that keep the time per
token that is wanted, the best has most tokens/s for its devices: ``log(tokens/s) - worth * log(devices)``. So a device is
worth its place if it adds at least ``worth`` times what devices give on average, for a full replica as for a draft tier.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cascade.chain.profile import PassCost

Layout: TypeAlias = tuple[int, ...]  # replicas, bottom to top
Gains: TypeAlias = Mapping[frozenset[str], float]  # times as many tokens/s as without drafts, by the draft tiers there are

SLACK = 1.15  # a new layout must do for so many times the sessions of now: a load that wavers by less moves nothing
BETTER = 1.05  # times the tokens/s for its devices make a layout better than the one there is
MOST_KV = 0.9  # of a full replica's positions may be held; beyond that sessions begin to wait
ROUNDING = 1e-9  # devices are decimal fractions


@dataclass(frozen=True, slots=True)
class Goal:
    """What an application may take and shall give."""

    max_devices: float
    slowdown: float = 1.5  # times the time per token of a session that has the full tier to itself, without drafts
    worth: float = 0.5  # of the tokens/s that a device gives on average, the least that one more must add


@dataclass(frozen=True, slots=True)
class TierLoad:
    """What a tier has and has to do, all its replicas together."""

    name: str
    devices: float  # of a replica
    least: int  # replicas
    most: int
    cost: PassCost  # seconds of a pass, by the sessions in it
    replicas: int = 0  # that serve
    sessions: float = 0.0  # open ones, with those that wait for a replica
    waiting: float = 0.0  # of them, without a place in memory or a replica
    busy: float = 1.0  # share of the time that a replica is in passes
    kv_use: float = 0.0  # share of a replica's positions that sessions hold

    @property
    def load(self) -> float:
        """Sessions that fill passes: of those with a place, the share in which passes run."""
        return self.waiting + max(0.0, self.sessions - self.waiting) * min(1.0, self.busy)

    @property
    def kv_replicas(self) -> float:
        """Replicas that hold the keys and values of all sessions, those without a place counted like the others."""
        placed = max(self.sessions - self.waiting, 1.0)
        return self.replicas * self.kv_use * max(1.0, self.sessions / placed) / MOST_KV

    def capacity(self, slowdown: float) -> float:
        """Sessions in a pass that takes at most ``slowdown`` times as long as one of a single session."""
        most, limit = 1.0, slowdown * self.cost(1)
        while most < 1024 and self.cost(int(most) + 1) <= limit:
            most += 1
        return most


class _Score(NamedTuple):
    """How good a layout is; larger is better."""

    meets: bool  # the time per token that is wanted
    value: float


def choose(tiers: Sequence[TierLoad], gains: Gains, goal: Goal, current: Layout) -> Layout:
    """The layout there should be, ``current`` unless another one is clearly better now and with a little more to do.

    ``tiers`` go bottom to top, the last is the full one. ``gains`` has all sets of draft tiers; the empty one is 1. Never over
    the budget, nor under the least replicas where these fit; with anything to do the full tier has at least one.
    """
    room = _Room(tiers, gains, goal)
    if not tiers[-1].sessions:
        return room.smallest
    best = room.best(SLACK)
    if current not in room or (
        better(room.score(best, 1.0), room.score(current, 1.0)) and better(room.score(best, SLACK), room.score(current, SLACK))
    ):
        return best
    return current


def better(one: _Score, other: _Score) -> bool:
    """Whether a layout with that score is worth a change."""
    if one.meets != other.meets:
        return one.meets
    return one.value > other.value + math.log(BETTER)


def devices(tiers: Sequence[TierLoad], layout: Layout) -> float:
    """That a layout takes."""
    return sum(tier.devices * count for tier, count in zip(tiers, layout, strict=True))


class _Room:
    """The layouts that a budget allows."""

    def __init__(self, tiers: Sequence[TierLoad], gains: Gains, goal: Goal) -> None:
        self._tiers = tiers
        self._drafts, self._full = tiers[:-1], tiers[-1]
        self._gains = gains
        self._goal = goal
        self._capacity = [tier.capacity(goal.slowdown) for tier in self._drafts]
        self._wanted_s = goal.slowdown * self._full.cost(1)

    @property
    def smallest(self) -> Layout:
        return tuple(tier.least for tier in self._tiers)

    def __contains__(self, layout: Layout) -> bool:
        within = all(tier.least <= count <= tier.most for tier, count in zip(self._tiers, layout, strict=True))
        return within and layout[-1] > 0 and self._fits(layout)

    def best(self, slack: float) -> Layout:
        """With ``slack`` times the sessions; of equals the one with fewer devices."""
        fitting = [layout for layout in self._layouts() if self._fits(layout)]
        floor = (*self.smallest[:-1], max(1, self._full.least))
        return max(fitting, key=lambda one: (self.score(one, slack), -devices(self._tiers, one)), default=floor)

    def score(self, layout: Layout, slack: float) -> _Score:
        load = slack * max(1.0, self._full.load)
        rate = self._gain(layout, load) / self._cost(load / layout[-1])
        meets = rate * self._wanted_s >= 1 - ROUNDING and layout[-1] >= min(self._full.most, self._full.kv_replicas)
        price = self._goal.worth * math.log(devices(self._tiers, layout)) if meets else 0.0
        return _Score(meets, math.log(rate) - price)

    def _fits(self, layout: Layout) -> bool:
        return devices(self._tiers, layout) <= self._goal.max_devices + ROUNDING

    def _layouts(self) -> "itertools.product[Layout]":
        """Each draft tier with the fewest it may have, one, or all that it needs for its sessions."""
        load = SLACK * max(1.0, self._full.load)
        counts = []
        for tier, capacity in zip(self._drafts, self._capacity, strict=True):
            needed = math.ceil(load / capacity - ROUNDING)
            counts.append({min(tier.most, max(tier.least, count)) for count in (0, 1, needed)})
        return itertools.product(*map(sorted, counts), range(max(1, self._full.least), max(1, self._full.most) + 1))

    def _gain(self, layout: Layout, load: float) -> float:
        """Of the draft tiers there are; what they cannot take on goes without."""
        there = [
            (tier, count, room) for tier, count, room in zip(self._drafts, layout[:-1], self._capacity, strict=True) if count
        ]
        if not there:
            return 1.0
        covered = min(1.0, *(count * room / load for _, count, room in there))
        return 1.0 + (self._gains[frozenset(tier.name for tier, _, _ in there)] - 1.0) * covered

    def _cost(self, sessions: float) -> float:
        """Seconds of a pass of the full tier, on a straight line between whole sessions."""
        below, share = math.floor(sessions), sessions % 1.0
        cost = self._full.cost
        return cost(max(1, below)) * (1 - share) + cost(max(1, below + 1)) * share

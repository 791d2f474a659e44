"""How many replicas each tier is worth: a pure function of what the tiers report.

A *layout* is a number of replicas for each tier, bottom to top. What has to be done is a number of tokens a second, not of
sessions: where requests come by themselves a layout that is slower has more sessions, and one that is faster has fewer.
For each set of draft tiers there are the fewest full replicas that give the time per token that is wanted. A set pays if
sessions are faster with it than with its devices in full replicas, and by so much that ``log(speed) - worth * log(devices)`` is
more.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cascade.planner.cost import PassCost

Layout: TypeAlias = tuple[int, ...]  # replicas, bottom to top
Drafts: TypeAlias = frozenset[str]  # tiers that draft, by name
Gains: TypeAlias = Mapping[Drafts, Mapping[int, float]]  # by `load_bucket`: times the tokens/s without drafts
Speeds: TypeAlias = Mapping[int, Mapping[Drafts, float]]  # by `load_bucket`: tokens/s of a session, by who drafts

SLACK = 1.15  # replicas go if the others have room for so many times the load: one that wavers by less moves nothing
BETTER = 1.05  # times the speed for its devices make another set of draft tiers the better one
OPTIMISM = 2.0  # times the speed that draft tiers are hoped to give that have not been tried
CROWDED = 1.5  # times as long as for one session may passes of a draft tier take
MOST_KV = 0.9  # of a full replica's positions may be held; beyond that sessions begin to wait
MOST_SESSIONS = 1024  # of a replica
HALVINGS = 12
ROUNDING = 1e-9  # devices are decimal fractions


@dataclass(frozen=True, slots=True)
class Goal:
    """What an application may take and shall give."""

    max_devices: float
    slowdown: float = 1.5  # times the time per token of a session that has the full tier to itself, without drafts
    worth: float = 0.5  # share by which sessions must at least become faster for each share more of devices


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
    tokens_s: float = 0.0  # written in a second
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
        return _most(lambda sessions: self.cost(sessions) <= slowdown * self.cost(1))


def choose(tiers: Sequence[TierLoad], gains: Gains, goal: Goal, current: Layout) -> Layout:
    """The layout there should be, ``current`` unless another one is needed, or clearly better.

    ``tiers`` go bottom to top, the last is the full one; drafts without ``gains`` are taken to be well worth a trial. Never
    over the budget, nor under the least replicas where these fit; with anything to do the full tier has at least one.
    """
    if not tiers[-1].sessions and not tiers[-1].tokens_s:
        return tuple(tier.least for tier in tiers)
    room = _Room(tiers, gains, goal, current)
    options = list(room.options(1.0))
    if not options:
        return (*(tier.least for tier in tiers[:-1]), max(1, tiers[-1].least))
    best = max(options, key=lambda option: option.rank)
    kept = next((option for option in options if option.drafts == room.drafts_of(current)), None)
    if kept is None or better(best, kept):
        return best.layout
    later = next((option for option in room.options(SLACK) if option.drafts == kept.drafts), kept)
    full = min(max(current[-1], kept.layout[-1]), max(later.layout[-1], kept.layout[-1]))
    layout = (*kept.layout[:-1], full)
    return layout if room.fits(layout) else kept.layout


class Option(NamedTuple):
    """A set of draft tiers, with the full replicas that are needed beside it."""

    layout: Layout
    drafts: Drafts
    meets: bool  # the time per token that is wanted
    value: float  # speed for its devices, or of all together if that is not met; logarithm

    @property
    def rank(self) -> tuple[bool, float]:
        return self.meets, self.value


def better(one: Option, other: Option) -> bool:
    """Whether it is worth a change."""
    if one.meets != other.meets:
        return one.meets
    return one.value > other.value + math.log(BETTER)


def devices(tiers: Sequence[TierLoad], layout: Layout) -> float:
    """That a layout takes."""
    return sum(tier.devices * count for tier, count in zip(tiers, layout, strict=True))


class _Room:
    """What a budget allows, and what it gives."""

    def __init__(self, tiers: Sequence[TierLoad], gains: Gains, goal: Goal, current: Layout) -> None:
        self._tiers = tiers
        self._drafts, self._full = tiers[:-1], tiers[-1]
        self._gains = gains
        self._current = self.drafts_of(current)
        self._hopeful = not self._current or bool(gains.get(self._current))  # one trial at a time
        self._goal = goal
        self._token_s = goal.slowdown * self._full.cost(1)  # that is wanted
        # sessions slower than wanted want more than they get
        self._demand = max(self._full.tokens_s, self._full.load / self._token_s, ROUNDING)

    def drafts_of(self, layout: Layout) -> Drafts:
        return frozenset(tier.name for tier, count in zip(self._drafts, layout[:-1], strict=True) if count)

    def fits(self, layout: Layout) -> bool:
        return devices(self._tiers, layout) <= self._goal.max_devices + ROUNDING

    def options(self, slack: float) -> Iterator[Option]:
        """For each set of draft tiers that the budget allows, one that pays or the empty one."""
        demand = slack * self._demand
        for chosen in itertools.product((False, True), repeat=len(self._drafts)):
            drafts = self._counts(chosen, demand)
            option = None if drafts is None else self._option(drafts, demand)
            if option is not None and (not any(chosen) or self._pays(option, demand)):
                yield option

    def _counts(self, chosen: Sequence[bool], demand: float) -> Layout | None:
        """Replicas of the draft tiers: as many as their sessions need if they are chosen; ``None`` if some cannot be so."""
        counts = []
        for tier, wanted in zip(self._drafts, chosen, strict=True):
            if wanted is not bool(tier.least) and (tier.least or not tier.most):
                return None  # it is always there
            needed = math.ceil(demand * self._token_s / tier.capacity(CROWDED) - ROUNDING)
            counts.append(min(tier.most, max(tier.least, needed, 1)) if wanted else 0)
        return tuple(counts)

    def _option(self, drafts: Layout, demand: float) -> Option | None:
        """The fewest full replicas that suffice beside these draft tiers, else as many as fit."""
        names = self.drafts_of((*drafts, 0))
        least = max(1, self._full.least)
        left = self._goal.max_devices - devices(self._drafts, drafts)
        most = min(self._full.most, int(left / self._full.devices + ROUNDING))
        if most < least:
            return None
        each = self._capacity(names) / self._token_s
        needed = max(math.ceil(demand / each - ROUNDING), math.ceil(self._full.kv_replicas - ROUNDING))
        layout = (*drafts, min(most, max(least, needed)))
        if layout[-1] < needed:
            return Option(layout, names, False, math.log(layout[-1] * each))
        price = self._goal.worth * math.log(devices(self._tiers, layout))
        return Option(layout, names, True, math.log(self._speed(names, layout[-1], demand)) - price)

    def _pays(self, option: Option, demand: float) -> bool:
        """Whether sessions are faster than with the same devices in full replicas."""
        if not option.meets:
            return True
        always = sum(tier.devices * tier.least for tier in self._drafts)
        replicas = min(self._full.most, int((devices(self._tiers, option.layout) - always) / self._full.devices + ROUNDING))
        base = self.drafts_of(tuple(tier.least for tier in self._tiers))
        return self._speed(option.drafts, option.layout[-1], demand) > self._speed(base, max(1, replicas), demand)

    def _capacity(self, drafts: Drafts) -> float:
        """Sessions of a full replica that have the time per token that is wanted, as far as gains are known there."""
        sure = self._gains.get(drafts, {})

        def quick(sessions: float) -> bool:
            gain = _between({**sure, max(sure) + 1: 1.0}, sessions) if drafts and sure else 1.0
            return max(1.0, gain) * self._token_s >= self._full.cost(sessions) * (1 - ROUNDING)

        return _most(quick)

    def _speed(self, drafts: Drafts, replicas: int, demand: float) -> float:
        """Tokens a second of a session where so many replicas write all that is to be written."""
        each = demand / replicas

        def slack(sessions: float) -> bool:
            return sessions * self._rate(drafts, sessions) <= each

        return self._rate(drafts, _most(slack))

    def _rate(self, drafts: Drafts, sessions: float) -> float:
        return self._gain(drafts, sessions) / self._full.cost(sessions)

    def _gain(self, drafts: Drafts, sessions: float) -> float:
        """At the nearest load. Of drafts that are unknown there is hope where they come to those that there are."""
        if known := self._gains.get(drafts):
            return _between(known, sessions)
        if drafts and (drafts == self._current or (self._hopeful and drafts > self._current)):
            fewer = (_between(known, sessions) for names, known in self._gains.items() if known and names < drafts)
            return OPTIMISM * max((1.0, *fewer))
        return 1.0


def _between(known: Mapping[int, float], sessions: float) -> float:
    """Gain with so many sessions: on a straight line between crowds, outside of them as at the nearest."""
    place = math.log2(max(1.0, sessions))
    below = max((one for one in known if one <= place), default=min(known))
    above = min((one for one in known if one > place), default=max(known))
    if above <= below:
        return known[below]
    return known[below] + (known[above] - known[below]) * max(0.0, place - below) / (above - below)


def _most(holds: Callable[[float], bool]) -> float:
    """Most sessions, 1 at least, for which something ``holds`` that does for fewer."""
    low, high = 1.0, float(MOST_SESSIONS)
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

"""Many replicas over hours in virtual time: what a rule of scaling costs in devices, and what it does to answers.

Coarser than `cascade.simulation.simulate`: sessions of a full replica share its passes, each writing ``gain / cost(sessions)``
tokens a second, where gains by draft tiers and load are given (measured, or simulated with real sessions by `forecast.Bench`).
Prompts take no time, memory is never short, and a replica that is to go ends its answers first.
"""

import heapq
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.arrivals import Arrival
from cascade.planner.chains import load_bucket
from cascade.planner.replicas import CROWDED, Layout, Speeds, TierLoad
from cascade.planner.scaling import Scaler

LOOK_S = 5.0  # between two decisions
NOISE = 0.05  # of the speeds that a planner measures, standard deviation of the logarithm
LOOK_BACK = 0.3  # weight of the latest look in what is reported

Table = Mapping[frozenset[str], Sequence[tuple[int, float]]]
"""Gains by draft tiers, at numbers of sessions of a full replica."""
Rule = Callable[[Sequence[TierLoad], Speeds, float], Layout]
"""Replicas to ask for, of tiers bottom to top with what planners measure, at a time; `Scaler.decide` is one."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Tiers bottom to top with their bounds, what they gain, and how long a replica takes to start; seconds."""

    tiers: tuple[TierLoad, ...]
    gains: Table
    start_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Course:
    """What came of it."""

    device_hours: float  # of replicas that start, serve or end their answers
    token_s: tuple[float, ...]  # of each request, from its arrival to its end, for each token
    most_devices: float  # asked for at once
    changes: int  # of the layout

    def quantile(self, share: float) -> float:
        """Seconds a token, of requests."""
        ordered = sorted(self.token_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def static(layout: Layout) -> Rule:
    """That never changes."""
    return lambda tiers, speeds, now: layout


def run(fleet: Fleet, trace: Sequence[Arrival], rule: Rule | Scaler, first: Layout, seed: int = 0) -> Course:
    """Serve ``trace`` with the layouts of ``rule``, beginning with ``first``, all of which serve already."""
    return _Run(fleet, trace, rule.decide if isinstance(rule, Scaler) else rule, first, seed).finish()


@dataclass(slots=True, eq=False)
class _Replica:
    """Of the full tier. ``written`` is what a session that was always there would have written; tokens."""

    ready_s: float
    going: bool = False
    written: float = 0.0
    since: float = 0.0
    rate: float = 0.0  # tokens a second of each session
    version: int = 0
    sessions: list[tuple[float, int]] = field(default_factory=list)  # heap: what is written when it ends, and its number


class _Run:
    """One course of events."""

    def __init__(self, fleet: Fleet, trace: Sequence[Arrival], rule: Rule, first: Layout, seed: int) -> None:
        self._fleet, self._trace, self._rule = fleet, trace, rule
        self._lots = random.Random(seed)
        self._full = [_Replica(0.0) for _ in range(first[-1])]
        self._drafts = {tier.name: [0.0] * count for tier, count in zip(fleet.tiers[:-1], first, strict=False)}  # ready when
        self._layout = first
        self._sessions = self._tokens_s = 0.0  # smoothed
        self._total = self._counted = 0.0  # tokens, and those up to the latest look
        self._waiting: list[int] = []  # for a full replica
        self._due: list[tuple[float, int, _Replica, int]] = []
        self._count = 0
        self._rates: dict[tuple[frozenset[str], int, float], float] = {}
        self._drafting, self._covered = frozenset[str](), 1.0
        self._device_s, self._most, self._changes = 0.0, 0.0, 0
        self._token_s: list[float] = []

    def finish(self) -> Course:
        look, place = 0.0, 0
        while len(self._token_s) < len(self._trace):
            arrives = self._trace[place].at_s if place < len(self._trace) else math.inf
            ends = self._due[0][0] if self._due else math.inf
            if look <= min(arrives, ends):
                self._look(look)
                look += LOOK_S
            elif arrives <= ends:
                self._place(place, arrives)
                place += 1
            else:
                now, _, replica, version = heapq.heappop(self._due)
                self._end(now, replica, version)
        hours = self._device_s / 3600
        return Course(hours, tuple(self._token_s), self._most, self._changes)

    # sessions

    def _place(self, number: int, now: float) -> None:
        """At the less loaded of two replicas, as Ray Serve does."""
        there = [replica for replica in self._full if not replica.going and replica.ready_s <= now]
        if not there:
            self._waiting.append(number)
            return
        replica = min(self._lots.sample(there, min(2, len(there))), key=lambda one: len(one.sessions))
        self._go_on(replica, now)
        heapq.heappush(replica.sessions, (replica.written + self._trace[number].tokens, number))
        self._await_next(replica, now)

    def _end(self, now: float, replica: _Replica, version: int) -> None:
        if version != replica.version:
            return
        self._go_on(replica, now)
        number = heapq.heappop(replica.sessions)[1]
        arrival = self._trace[number]
        self._token_s.append((now - arrival.at_s) / arrival.tokens)
        self._await_next(replica, now)

    def _go_on(self, replica: _Replica, now: float) -> None:
        replica.written += replica.rate * (now - replica.since)
        self._total += replica.rate * (now - replica.since) * len(replica.sessions)
        replica.since = now

    def _await_next(self, replica: _Replica, now: float) -> None:
        replica.version += 1
        if replica.sessions:
            replica.rate = self._rate(len(replica.sessions))
            left = max(0.0, replica.sessions[0][0] - replica.written)
            self._count += 1
            heapq.heappush(self._due, (now + left / replica.rate, self._count, replica, replica.version))

    def _rate(self, sessions: int) -> float:
        key = (self._drafting, sessions, self._covered)
        if key not in self._rates:
            gain = 1 + (self._gain(self._drafting, sessions) - 1) * self._covered
            self._rates[key] = max(1.0, gain) / self._fleet.tiers[-1].cost(sessions)  # planners leave out what does not pay
        return self._rates[key]

    def _gain(self, names: frozenset[str], sessions: float) -> float:
        """Between the points of the table on a straight line over the logarithm of sessions."""
        if not names:
            return 1.0
        points = self._fleet.gains[names]
        counts = [count for count, _ in points]
        upper = min(max(1, bisect_left(counts, sessions)), len(points) - 1)
        (n0, g0), (n1, g1) = points[upper - 1], points[upper]
        share = (math.log(max(1.0, sessions)) - math.log(n0)) / (math.log(n1) - math.log(n0))
        return g0 + (g1 - g0) * min(1.0, share)

    # replicas

    def _look(self, now: float) -> None:
        """Count devices, ask the rule, start and end replicas."""
        self._full = [one for one in self._full if not one.going or one.sessions]
        tiers = self._loads(now)
        self._device_s += LOOK_S * (
            sum(tier.devices * len(self._drafts[tier.name]) for tier in tiers[:-1]) + tiers[-1].devices * len(self._full)
        )
        layout = self._rule(tiers, self._speeds(tiers), now)
        self._changes += layout != self._layout
        self._layout = layout
        self._most = max(self._most, sum(tier.devices * count for tier, count in zip(tiers, layout, strict=True)))
        for tier, count in zip(tiers[:-1], layout, strict=False):
            ready = sorted(self._drafts[tier.name])[:count]
            self._drafts[tier.name] = ready + [now + self._fleet.start_s] * (count - len(ready))
        self._ask_full(layout[-1], now)
        self._draft(now)
        waiting, self._waiting = self._waiting, []
        for number in waiting:
            self._place(number, now)

    def _ask_full(self, count: int, now: float) -> None:
        staying = [one for one in self._full if not one.going]
        self._full += [_Replica(now + self._fleet.start_s, since=now) for _ in range(count - len(staying))]
        for one in sorted(staying, key=lambda one: (one.ready_s <= now, len(one.sessions)))[: max(0, len(staying) - count)]:
            one.going = True

    def _draft(self, now: float) -> None:
        """With the draft tiers that serve, as far as they suffice for all sessions."""
        ready = {name: sum(at <= now for at in replicas) for name, replicas in self._drafts.items()}
        self._drafting = max(
            (names for names in (frozenset(), *self._fleet.gains) if all(ready[name] for name in names)), key=len
        )
        sessions = max(1, sum(len(one.sessions) for one in self._full))
        room = [
            ready[tier.name] * tier.capacity(CROWDED) / sessions
            for tier in self._fleet.tiers[:-1]
            if tier.name in self._drafting
        ]
        self._covered = round(min(1.0, *room, 1.0), 1)
        for one in self._full:
            self._go_on(one, now)
            self._await_next(one, now)

    def _loads(self, now: float) -> list[TierLoad]:
        sessions = sum(len(one.sessions) for one in self._full) + len(self._waiting)
        self._sessions += LOOK_BACK * (sessions - self._sessions)
        self._tokens_s += LOOK_BACK * ((self._total - self._counted) / LOOK_S - self._tokens_s)
        self._counted = self._total
        counted = self._sessions if sessions or self._sessions > 0.1 else 0.0
        counts = [sum(at <= now for at in replicas) for replicas in self._drafts.values()]
        counts.append(sum(one.ready_s <= now and not one.going for one in self._full))
        return [
            replace(tier, replicas=count, sessions=counted, waiting=float(len(self._waiting)), tokens_s=self._tokens_s)
            for tier, count in zip(self._fleet.tiers, counts, strict=True)
        ]

    def _speeds(self, tiers: Sequence[TierLoad]) -> Speeds:
        """What planners measure, of the draft tiers that serve."""
        sessions = max(1.0, tiers[-1].sessions / max(1, tiers[-1].replicas))
        alone = 1 / tiers[-1].cost(round(sessions))
        there = {tier.name for tier in tiers[:-1] if tier.replicas}
        named = [frozenset[str](), *(names for names in self._fleet.gains if names <= there)]
        measured = {names: alone * self._gain(names, sessions) * self._lots.lognormvariate(0, NOISE) for names in named}
        return {load_bucket(sessions): measured}

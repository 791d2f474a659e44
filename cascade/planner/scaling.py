"""Replicas over time: what draft tiers gain is learnt and forgotten, and layouts change only after a while.

`cascade.planner.replicas.choose` judges one moment. Here are its memory and its patience; time is an argument, so that
servers and the simulator of fleets follow the same rules.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cascade.planner.chains import load_bucket
from cascade.planner.replicas import Drafts, Gains, Goal, Layout, Speeds, TierLoad, choose, devices

RECENT = 0.2  # weight of the latest gain beside those before it
LONGEST = 4  # doublings of the rest of a tier that did not pay time and again
ALONE: Drafts = frozenset()
WAVER = 0.07  # share by which a load differs that is still the same


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to wait; seconds."""

    up_delay_s: float = 10.0  # for which more full replicas are needed before they are asked for
    down_delay_s: float = 60.0  # the same of any other change
    trial_s: float = 60.0  # for which a draft tier serves before it is judged
    rest_s: float = 600.0  # before one that did not pay is tried again, twice as long each time that it does not


@dataclass(slots=True)
class Learnt:
    """What sets of draft tiers gain, by how many sessions a full replica had."""

    pace: Pace
    _known: dict[Drafts, dict[int, float]] = field(default_factory=dict)
    _awake: dict[str, float] = field(default_factory=dict)  # since when
    _asleep: dict[str, float] = field(default_factory=dict)
    _losses: dict[str, int] = field(default_factory=dict)

    def saw(self, tiers: Sequence[TierLoad], speeds: Speeds, now: float) -> None:
        """``speeds`` are as full replicas measure them at the loads that they have; of absent tiers they are old."""
        for tier in tiers[:-1]:
            self._note(tier, tiers[-1], now)
        tried = {name for name, since in self._awake.items() if now - since >= self.pace.trial_s}
        for names in _sets(tried) if tiers[-1].sessions and tiers[-1].replicas else ():
            gains = {load: rate[names] / rate[ALONE] for load, rate in speeds.items() if rate.get(ALONE) and names in rate}
            if not gains and not all(tier.sessions for tier in tiers[:-1] if tier.name in names):  # there, and nobody asks
                gains = {load_bucket(tiers[-1].sessions / tiers[-1].replicas): 1.0}
            known = self._known.setdefault(names, {}) if gains else {}
            for load, gain in gains.items():
                known[load] = known[load] + RECENT * (gain - known[load]) if load in known else gain

    @property
    def gains(self) -> Gains:
        """Of sets of draft tiers that were tried."""
        return self._known

    def _note(self, tier: TierLoad, full: TierLoad, now: float) -> None:
        """A tier comes and goes; one that has been away for long may have become better."""
        name = tier.name
        if tier.replicas:
            self._asleep.pop(name, None)
            if now - self._awake.setdefault(name, now) > self.pace.rest_s:
                self._losses.pop(name, None)
            return
        if self._awake.pop(name, None) is not None and full.sessions:
            self._losses[name] = min(LONGEST, self._losses.get(name, 0) + 1)
        rest_s = self.pace.rest_s * 2 ** max(0, self._losses.get(name, 1) - 1)
        if now - self._asleep.setdefault(name, now) >= rest_s:
            self._asleep[name] = now
            for names in [names for names in self._known if name in names]:
                del self._known[names]


@dataclass(slots=True)
class Patience:
    """Follows layouts that are wanted for long enough."""

    pace: Pace
    layout: Layout  # that is asked for
    _since: float = 0.0
    _direction: int = 0
    _most: Layout = ()

    def follow(self, wanted: Layout, now: float) -> Layout:
        """The layout to ask for. One with less is the largest that was wanted meanwhile."""
        direction = _direction(self.layout, wanted)
        if direction != self._direction:
            self._direction, self._since, self._most = direction, now, wanted
        if wanted[::-1] > self._most[::-1]:
            self._most = wanted
        urgent = wanted[-1] > self.layout[-1]  # nobody waits for draft tiers
        if direction and now - self._since >= (self.pace.up_delay_s if urgent else self.pace.down_delay_s):
            self.layout = wanted if direction > 0 else self._most
            self._direction = 0
        return self.layout


@dataclass(slots=True)
class Steady:
    """The load of the full tier without its wavering.

    Replicas are whole: at some loads a waver asks for one more here and for another set of draft tiers there, for ever.
    """

    _held: dict[str, Any] = field(default_factory=dict)  # numbers, by the name of the measure

    def follow(self, full: TierLoad) -> TierLoad:
        """``full`` with each of its measures as it was, unless that has moved."""
        for name in ("sessions", "waiting", "tokens_s", "busy", "kv_use"):
            seen, held = getattr(full, name), self._held.get(name, 0.0)
            if not seen or abs(seen - held) > WAVER * held:
                self._held[name] = seen
        return replace(full, **self._held)


class Scaler:
    """Chooses the layout of an application, again and again."""

    def __init__(self, goal: Goal, pace: Pace) -> None:
        self._goal = goal
        self._pace = pace
        self._learnt = Learnt(pace)
        self._steady = Steady()
        self._patience: Patience | None = None

    def decide(self, tiers: Sequence[TierLoad], speeds: Speeds, now: float) -> Layout:
        """Replicas to ask for, of tiers bottom to top; see `Learnt.saw` for ``speeds``."""
        if self._patience is None:
            self._patience = Patience(self._pace, tuple(max(tier.least, tier.replicas) for tier in tiers))
        self._learnt.saw(tiers, speeds, now)
        steady = (*tiers[:-1], self._steady.follow(tiers[-1]))
        wanted = choose(steady, self._learnt.gains, self._goal, self._patience.layout)
        return granted(tiers, self._patience.follow(wanted, now), self._goal.max_devices)


def granted(tiers: Sequence[TierLoad], wanted: Layout, max_devices: float) -> Layout:
    """Of what is wanted, what there are devices for while replicas that are too many still serve; draft tiers wait first."""
    counts = list(wanted)
    for place, tier in enumerate(tiers):
        while counts[place] > tier.replicas and _in_use(tiers, counts) > max_devices:
            counts[place] -= 1
    return tuple(counts)


def _in_use(tiers: Sequence[TierLoad], counts: Sequence[int]) -> float:
    return devices(tiers, tuple(max(count, tier.replicas) for tier, count in zip(tiers, counts, strict=True)))


def _direction(old: Layout, new: Layout) -> int:
    """1 if more is wanted of the full tier, or of the others where that stays; -1 if less; 0 if nothing changes."""
    return (new[::-1] > old[::-1]) - (new[::-1] < old[::-1])


def _sets(names: Iterable[str]) -> list[Drafts]:
    """All but the empty one."""
    every = sorted(names)
    return [frozenset(some) for size in range(1, len(every) + 1) for some in itertools.combinations(every, size)]

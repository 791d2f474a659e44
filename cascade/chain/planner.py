"""What a tier decides by what it has measured: who drafts for it.

Pure; the serving tier and the simulator follow the same rules.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from cascade.chain.layout import crowd
from cascade.chain.plan import ALONE, Chain, Course, Plan, Purse, Seen

Spared: TypeAlias = Literal["load", "low_acceptance", "short"]


class Planner:
    """Chooses who drafts: of all courses that a request allows, the one that is measured to be fastest.

    What counts is what comes out: own tokens of a session in a second. Costs of passes, wires and messages, agreement, and
    what tiers on the same processors take from each other are all in it. Courses are measured apart for different numbers
    of sessions. A tier begins alone and tries the others: drafters inside the tier, then small chains of small tiers. Where
    branches and drafters are allowed, chains are tried with them, and the best one without. The time that trials lose against
    the best course known is paid from one purse, which a small share of all time goes into: so no trial makes a cascade slow.
    """

    def __init__(self) -> None:
        self._purse = Purse()
        self._plans: dict[tuple[Course, bool], dict[int, Plan]] = {}  # by what is allowed and who is sampled, and by load

    def course(self, allowed: Course, num_sessions: int, *, sampled: bool = False) -> Course:
        """What a session shall use now that may use ``allowed``, in a tier of so many sessions.

        Those that are ``sampled``, at a temperature above 0, are judged apart: far fewer guesses are right there.
        """
        return self._plan(allowed, num_sessions, sampled=sampled).course

    def saw(self, allowed: Course, used: Course, num_sessions: int, seen: Seen, *, sampled: bool = False) -> None:
        """What some of so many sessions had of a pass, who were to use ``used``."""
        self._plan(allowed, num_sessions, sampled=sampled).saw(used, seen, num_sessions)

    def spared(self, allowed: Course, num_sessions: int, *, sampled: bool = False) -> Spared:
        """Why nobody drafts now: it pays with fewer sessions, it never did, or there was no time to try."""
        load, plans = crowd(num_sessions), self._plans.get((allowed, sampled), {})
        if any(plan.best != ALONE for less, plan in plans.items() if less < load):
            return "load"
        return "low_acceptance" if any(plan.num_trials for plan in plans.values()) else "short"

    def speeds(self, num_sessions: int) -> dict[Chain, float]:
        """Own tokens of a session in a second by who drafts, as measured with so many sessions, where most was measured.

        Safe to call from any thread.
        """
        plans = [plans.get(crowd(num_sessions)) for plans in list(self._plans.values())]
        measured = [list(plan.records.items()) for plan in plans if plan is not None]
        speeds: dict[Chain, float] = {}
        for course, record in max(measured, key=lambda records: sum(one.seconds for _, one in records), default=[]):
            if record.rate and not record.borrowed:
                speeds[course.tiers] = max(record.rate, speeds.get(course.tiers, 0.0))
        return speeds

    def measured(self) -> Iterator["Measured"]:
        """What each course that was tried gives, by what is allowed, who is sampled and how many sessions there are.

        May be asked from any thread.
        """
        for (allowed, sampled), plans in list(self._plans.items()):
            for load, plan in list(plans.items()):
                known = {one: record.rate for one, record in list(plan.records.items()) if record.rate and not record.borrowed}
                yield Measured(allowed, sampled, 1 << load, known)

    def _plan(self, allowed: Course, num_sessions: int, *, sampled: bool) -> Plan:
        plans = self._plans.setdefault((allowed, sampled), {})
        load = crowd(num_sessions)
        if load not in plans:
            near = min(plans, key=lambda other: abs(other - load), default=None)
            plans[load] = Plan(allowed, self._purse, crowded=load >= crowd(3))
            if near is not None:
                plans[load].borrow(plans[near])
        return plans[load]


class Measured(NamedTuple):
    """Own tokens of a session in a second, by course, in a tier of about so many sessions that may use ``allowed``."""

    allowed: Course
    sampled: bool
    num_sessions: int
    rates: dict[Course, float]

"""What a tier decides by what it has measured: when to start a pass, and who drafts for it.

Pure; the serving tier and the simulator follow the same rules.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from cascade.chain.session import Session

Chain: TypeAlias = tuple[str, ...]  # tiers below that take part, top to bottom
Spared: TypeAlias = Literal["load", "low_acceptance", "short"]

LOCKSTEP_PATIENCE_S = 5.0  # a lockstep verifier goes on without a whole window after this time: nothing hangs

GLANCE = 4  # passes by which a course is judged at least; so many alone begin
TRIAL = 12  # rows by which it is judged at least
REST = 64  # passes between two trials of courses that are known
BREAK = 16  # the same where the next one may well be the best, for all that is known
LONGEST = 4  # times so many where it remains unclear which one is better
RAREST = 8  # times so many where the other one is far from being the best, or has lost several times in a row
DOUBT = 1.3  # a rate known from ``n`` rows may well be wrong by ``DOUBT / sqrt(n)`` of it
AGED = 0.3  # weight of earlier trials beside a new one
BETTER = 1.03  # times the rate of the course in use make another one the best
CROWDED = 1.15  # the same from three sessions on: what begins and ends with each answer is not measured, and grows with them
MEMORY = 0.99  # weight of a pass that is left after the next one
HEAD_START_S = 0.01  # what trials may cost a session before they have earned anything
SHARE = 0.03  # of a tier's time, which they may cost on top of that
PRICE_S = 0.01  # what a trial may cost, unless two passes alone are more
MOST_S = 1.0  # what any trial may cost


@dataclass(frozen=True, slots=True)
class Policy:
    """Go on with whatever guesses are there; only behind a correction wait for those that are worth it.

    A guess saves some of a pass if it and the guesses before it are right. While that is more than the time the drafter
    needs to make it, wait for it. The session measures both in passes, see `DraftStats`: a tier far slower than
    its drafter waits for a few guesses, one that is not starts at once. Simulated over sixteen cascades, bursts of errors
    included: pairs and threes are on average within 1.5 % of the best rule of this kind, and at worst within 10 %.
    """

    patience: float = 1.0  # longest wait for guesses, as a share of one pass of this tier
    guess_worth: float = 0.12  # what a right guess saves, as a share of one pass
    max_guesses: int = 16  # guesses scored in one pass at most

    def start_at(self, session: Session, since: float, pass_s: float) -> float:
        """Time at which a session that has been idle ``since`` then should be scored with what it has; seconds.

        ``pass_s`` is what a pass of this tier costs. A time that has passed means now.
        """
        if not session.drafter or session.prefilling or not session.room:
            return since
        if session.opening.lockstep:
            return since if session.window_full else since + LOCKSTEP_PATIENCE_S
        stats, usable = session.draft_stats, session.usable
        worth = self.guess_worth * stats.chance(usable + 1)
        if stats.interrupted and usable < session.room and worth > 1 / stats.guesses:
            return since + self.patience * pass_s
        return since


class Course(NamedTuple):
    """A way to draft."""

    tiers: Chain = ()
    branches: bool = False  # they offer and prepare some; without, they draft lines
    drafters: bool = False  # those inside the tier take part


ALONE = Course()


class Planner:
    """Chooses who drafts: of all courses that a request allows, the one that is measured to be fastest.

    What counts is what comes out: own tokens of a session in a second. Costs of passes, wires and messages, agreement, and
    what tiers on the same processors take from each other are all in it. Courses are measured apart for different numbers
    of sessions. A tier begins alone and tries the others: drafters inside the tier, then small chains of small tiers. Where
    branches and drafters are allowed, chains are tried with them, and the best one without. The time that trials lose against
    the best course known is paid from one purse, which a small share of all time goes into: so no trial makes a cascade slow.
    """

    def __init__(self) -> None:
        self._purse = _Purse()
        self._plans: dict[tuple[Course, bool], dict[int, _Plan]] = {}  # by what is allowed and who is sampled, and by load

    def course(self, allowed: Course, num_sessions: int, *, sampled: bool = False) -> Course:
        """What a session shall use now that may use ``allowed``, in a tier of so many sessions.

        Those that are ``sampled``, at a temperature above 0, are judged apart: far fewer guesses are right there.
        """
        return self._plan(allowed, num_sessions, sampled=sampled).course

    def saw(self, allowed: Course, used: Course, num_sessions: int, seen: "Seen", *, sampled: bool = False) -> None:
        """What some of so many sessions had of a pass, who were to use ``used``."""
        self._plan(allowed, num_sessions, sampled=sampled).saw(used, seen, num_sessions)

    def spared(self, allowed: Course, num_sessions: int, *, sampled: bool = False) -> Spared:
        """Why nobody drafts now: it pays with fewer sessions, it never did, or there was no time to try."""
        load, plans = _load(num_sessions), self._plans.get((allowed, sampled), {})
        if any(plan.best != ALONE for less, plan in plans.items() if less < load):
            return "load"
        return "low_acceptance" if any(plan.num_trials for plan in plans.values()) else "short"

    def speeds(self, num_sessions: int) -> dict[Chain, float]:
        """Own tokens of a session in a second by who drafts, as measured with so many sessions, where most was measured.

        Safe to call from any thread.
        """
        plans = [plans.get(_load(num_sessions)) for plans in list(self._plans.values())]
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

    def _plan(self, allowed: Course, num_sessions: int, *, sampled: bool) -> "_Plan":
        plans = self._plans.setdefault((allowed, sampled), {})
        load = _load(num_sessions)
        if load not in plans:
            near = min(plans, key=lambda other: abs(other - load), default=None)
            plans[load] = _Plan(allowed, self._purse, crowded=load >= _load(3))
            if near is not None:
                plans[load].borrow(plans[near])
        return plans[load]


def _load(num_sessions: int) -> int:
    """1, 2, 3 to 5, 6 to 11, 12 to 22, ...: the borders lie between powers of two, at which loads like to be held."""
    return round(math.log2(max(1, num_sessions)))


class Measured(NamedTuple):
    """Own tokens of a session in a second, by course, in a tier of about so many sessions that may use ``allowed``."""

    allowed: Course
    sampled: bool
    num_sessions: int
    rates: dict[Course, float]


@dataclass(slots=True)
class Seen:
    """What rows of a pass gave, in so many seconds of all their sessions together."""

    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    settled: bool = True  # guesses had time to come: before that a course costs time, but is not judged


@dataclass(slots=True)
class _Purse:
    """Seconds of a session that trials may still cost; less than none after one that cost more than it should."""

    seconds: float = HEAD_START_S

    def save(self, seconds: float) -> None:
        self.seconds += seconds

    def hold(self, most: float) -> None:
        """Keep no more than the next trial may cost: else a load that is new had a fortune to lose in its first seconds."""
        self.seconds = min(most, self.seconds)


@dataclass(slots=True)
class _Record:
    """What a course gave, the latest pass counting most, and what to try it again may cost."""

    tokens: float = 0.0
    seconds: float = 0.0
    rows: float = 0.0
    borrowed: bool = False  # it says what another load gave, if anything: the first trial here takes its place
    tried: int = 0  # number of its last trial, 0: none
    lost: int = 0  # trials one after another that did not make it the best
    price_s: float = PRICE_S

    @property
    def rate(self) -> float:
        """Own tokens of a session in a second, 0 if that is not known."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def hope(self) -> float:
        """The rate that it may well have."""
        return self.rate * (1.0 if self.borrowed else 1 + DOUBT / math.sqrt(max(1.0, self.rows)))

    def add(self, tokens: float, seconds: float, rows: float) -> None:
        self.tokens = MEMORY * self.tokens + tokens
        self.seconds = MEMORY * self.seconds + seconds
        self.rows = MEMORY * self.rows + rows

    def join(self, trial: "_Record", *, anew: bool) -> None:
        """One more trial, beside what is known so far, or ``anew`` in its place."""
        left = 0.0 if trial.rows and (anew or self.borrowed) else AGED
        self.borrowed &= not trial.rows
        self.tokens = left * self.tokens + trial.tokens
        self.seconds = left * self.seconds + trial.seconds
        self.rows = left * self.rows + trial.rows


@dataclass(slots=True)
class _Plan:
    """For one load: what is known of each course, which is the best, and which one is in use."""

    allowed: Course
    purse: _Purse
    crowded: bool = False
    best: Course = ALONE  # known so far
    course: Course = ALONE  # in use: the best one, or one on trial
    num_trials: int = 0
    passes: int = 0  # settled ones since the course is in use
    rows: int = 0
    unchecked: int = 0  # passes since it is known what the tier gives alone
    cost_s: float = 0.0  # of the trial
    trial: _Record = field(default_factory=_Record)
    lent: float = 0.0  # rate without drafts of the load whose records these are, until it is known here
    records: dict[Course, _Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tiers, branches, drafters = self.allowed
        sizes = range(len(tiers) + 1)
        chains = [chain[::-1] for size in sizes for chain in itertools.combinations(tiers[::-1], size)]
        self.records = {ALONE: _Record()}
        self.records |= {Course(chain, branches and bool(chain), drafters): _Record() for chain in chains}

    def borrow(self, near: "_Plan") -> None:
        """Begin with what is known at another load; of what paid there only the best is asked for at once."""
        self.lent = near.lent or near.records[ALONE].rate
        self.num_trials = near.num_trials
        for course, known in near.records.items() if self.lent else ():
            if course != ALONE:
                if course == near.best:
                    self.records[course] = replace(known)
                else:
                    self.records[course] = replace(known, tokens=min(known.tokens, self.lent * known.seconds), borrowed=True)

    def saw(self, used: Course, seen: Seen, num_sessions: int) -> None:
        """What some of so many sessions had of a pass, who were to use ``used``."""
        if used != self.course or seen.seconds <= 0:
            return  # they have yet to follow
        tokens, seconds = seen.tokens / num_sessions, seen.seconds / num_sessions
        trying = used != self.best
        self.unchecked = self.unchecked + 1 if used != ALONE else 0
        if seen.settled:
            (self.trial if trying else self.records[used]).add(tokens, seconds, seen.rows)
            self.passes += 1
            self.rows += seen.rows
        self.purse.save(SHARE * seconds)
        best = self.records[self.best].rate
        if trying:
            self.cost_s += seconds - tokens / best
        elif best and not self.passes:  # slowed by what a trial has left below
            self.purse.save(tokens / best - seconds)
        if trying and (self._dear() or (self.passes >= GLANCE and self.rows >= TRIAL and self._decided(best))):
            self._judge()
        elif not trying and self.passes >= GLANCE:
            self._seek()

    def _dear(self) -> bool:
        """Whether a trial has cost what it may."""
        return self.cost_s > self._price(self.course) and not self._free(self.course)

    def _decided(self, best: float) -> bool:
        """Whether a trial tells enough: not while what is tried may well be better than the best, and is not seen to be."""
        return self.rows >= LONGEST * TRIAL or self.trial.rate > BETTER * best or self.trial.hope < best

    def _judge(self) -> None:
        """End a trial. If it was too short to tell, the next one may cost twice as much."""
        record, price_s = self.records[self.course], self._price(self.course)
        record.price_s = min(price_s, max(PRICE_S, self.cost_s)) if self.passes >= GLANCE else min(MOST_S, 2 * price_s)
        if self.passes or self.course != ALONE:  # how fast the full tier is alone stays known
            record.join(self.trial, anew=self._free(self.course))
        self.purse.save(0.0 if self._free(self.course) else min(0.0, -self.cost_s))
        self.num_trials += 1
        record.tried = self.num_trials
        record.lost += 1
        if self._fastest() == self.course:
            self.records[self.best].tried = self.num_trials
            self.best = self.course
            for other in self.records.values():  # against this one
                other.lost = 0
        self._use(self.best)

    def _seek(self) -> None:
        """Try a course that was better than the best one is by now; else the next, if the purse can pay half of its price."""
        if self.lent:  # the rate without drafts is known here too: those of others in proportion
            share, self.lent = self.records[ALONE].rate / self.lent, 0.0
            for course, record in self.records.items():
                record.tokens *= share if course != ALONE else 1.0
        next_, rest = self._next()
        self.purse.hold(self._price(next_))
        if (fastest := self._fastest()) != self.best:
            self._use(fastest)
        elif self._free(ALONE) and self.unchecked >= REST << min(4, self.records[ALONE].lost):
            self._use(ALONE)
        elif self.passes >= rest and 2 * self.purse.seconds >= self._price(next_):
            self._use(next_)

    def _next(self) -> tuple[Course, int]:
        """What to try next, and after how many passes: what is unknown, what may be the best, then each in turn."""
        records, best = self.records, self.best
        if best.tiers and self.passes >= REST:
            for other in (best._replace(branches=not best.branches), best._replace(drafters=not best.drafters)):
                if other.branches <= self.allowed.branches and other.drafters <= self.allowed.drafters:
                    records.setdefault(other, _Record())
        others = [course for course in records if course != best]
        eldest, hopeful = min(others, key=lambda one: records[one].tried), max(others, key=lambda one: records[one].hope)
        if not records[eldest].tried:
            return eldest, 0
        twice = records[hopeful].tried == self.num_trials  # in a row, while others are forgotten
        if not twice and records[hopeful].hope > BETTER * records[best].rate:
            return hopeful, BREAK << min(6, records[hopeful].lost)
        worse = records[best].rate / max(1e-9, records[eldest].hope)
        return eldest, round(REST * min(RAREST, max(worse, 2.0 ** (records[eldest].lost - 1))))

    def _fastest(self) -> Course:
        """The best course by what is known; the one that was, unless another is clearly better, or alone is better at all."""
        rates = {course: record.rate for course, record in self.records.items()}
        fastest = max(rates, key=lambda course: rates[course] / self._margin(course))
        if rates[fastest] > self._margin(fastest) * rates[self.best]:
            return fastest
        return ALONE if rates[ALONE] > rates[self.best] else self.best

    def _free(self, course: Course) -> bool:
        """Whether to try it takes nothing from the purse: where answers begin and end all the time, rates of one moment are not
        those of the next, and what the others are held against, at no cost of what is promised, must be known.
        """
        return self.crowded and course == ALONE

    def _margin(self, course: Course) -> float:
        """Times the rate of the best course that make this one the best."""
        return CROWDED if self.crowded and course.tiers else BETTER

    def _use(self, course: Course) -> None:
        if course != self.course:
            self.passes = self.rows = 0
        self.course, self.cost_s, self.trial = course, 0.0, _Record()

    def _price(self, course: Course) -> float:
        """Seconds that a trial may cost: those of two passes alone at least, more where more has been gained."""
        alone, best = self.records[ALONE].rate, self.records[self.best].rate
        return max(self.records[course].price_s, (1 + best / alone) / alone)

"""Courses, which are ways to draft, and how the best of them is found by trials that cost little. Pure."""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

Chain: TypeAlias = tuple[str, ...]  # tiers below that take part, top to bottom

GLANCE = 4  # passes by which a course is judged at least; so many alone begin
TRIAL = 12  # rows by which it is judged at least
REST = 64  # passes between two trials of courses that are known
BREAK = 16  # the same where the next one may well be the best, for all that is known
LONGEST = 4  # times so many where it remains unclear which one is better
RAREST = 8  # times so many where the other one is far from being the best, or has lost several times in a row
DOUBT = 1.3  # a rate known from ``n`` rows may well be wrong by ``DOUBT / sqrt(n)`` of it
AGED = 0.3  # weight of earlier trials beside a new one
BETTER = 1.03  # times the rate of the course in use make another one the best
BURSTS = 0.95  # the same of drafters inside against none, below three sessions: gains come in bursts, silence costs little
CROWDED = 1.15  # the same from three sessions on: what begins and ends with each answer is not measured, and grows with them
MEMORY = 0.99  # weight of a pass that is left after the next one
HEAD_START_S = 0.01  # what trials may cost a session before they have earned anything
SHARE = 0.03  # of a tier's time, which they may cost on top of that
PRICE_S = 0.01  # what a trial may cost, unless two passes alone are more
MOST_S = 1.0  # what any trial may cost


class Course(NamedTuple):
    """A way to draft."""

    tiers: Chain = ()
    branches: bool = False  # they offer and prepare some; without, they draft lines
    drafters: bool = False  # those inside the tier take part


ALONE = Course()
INSIDE = Course(drafters=True)


@dataclass(slots=True)
class Seen:
    """What rows of a pass gave, in so many seconds of all their sessions together."""

    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    settled: bool = True  # guesses had time to come: before that a course costs time, but is not judged


@dataclass(slots=True)
class Purse:
    """Seconds of a session that trials may still cost; less than none after one that cost more than it should."""

    seconds: float = HEAD_START_S

    def save(self, seconds: float) -> None:
        self.seconds += seconds

    def hold(self, most: float) -> None:
        """Keep no more than the next trial may cost: else a load that is new had a fortune to lose in its first seconds."""
        self.seconds = min(most, self.seconds)


@dataclass(slots=True)
class Record:
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

    def join(self, trial: "Record", *, anew: bool) -> None:
        """One more trial, beside what is known so far, or ``anew`` in its place."""
        left = 0.0 if trial.rows and (anew or self.borrowed) else AGED
        self.borrowed &= not trial.rows
        self.tokens = left * self.tokens + trial.tokens
        self.seconds = left * self.seconds + trial.seconds
        self.rows = left * self.rows + trial.rows


@dataclass(slots=True)
class Plan:
    """For one load: what is known of each course, which is the best, and which one is in use."""

    allowed: Course
    purse: Purse
    crowded: bool = False
    best: Course = ALONE  # known so far
    course: Course = ALONE  # in use: the best one, or one on trial
    num_trials: int = 0
    passes: int = 0  # settled ones since the course is in use
    rows: int = 0
    unchecked: dict[Course, int] = field(
        default_factory=dict
    )  # passes since it is known what those give that cost nothing to try
    cost_s: float = 0.0  # of the trial
    trial: Record = field(default_factory=Record)
    lent: float = 0.0  # rate without drafts of the load whose records these are, until it is known here
    records: dict[Course, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tiers, branches, drafters = self.allowed
        sizes = range(len(tiers) + 1)
        chains = [chain[::-1] for size in sizes for chain in itertools.combinations(tiers[::-1], size)]
        self.records = {ALONE: Record()}
        self.records |= {Course(chain, branches and bool(chain), drafters): Record() for chain in chains}
        if self.crowded:
            self.unchecked = {course: 0 for course in (ALONE, INSIDE) if course in self.records}

    def borrow(self, near: "Plan") -> None:
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
        for course in self.unchecked:
            self.unchecked[course] = self.unchecked[course] + 1 if used != course else 0
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
        enough = min(BETTER, self._margin(self.course)) * best
        return self.rows >= LONGEST * TRIAL or self.trial.rate > enough or self.trial.hope < best

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
            for course, other in self.records.items():  # against this one
                if not (course.tiers and self._free(self.course)):  # alone and drafters inside often take turns
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
        elif due := [
            course for course, passes in self.unchecked.items() if passes >= REST << min(4, self.records[course].lost)
        ]:
            self._use(due[0])
        elif self.passes >= rest and (2 * self.purse.seconds >= self._price(next_) or self._owed(next_)):
            self._use(next_)

    def _next(self) -> tuple[Course, int]:
        """What to try next, and after how many passes: what is unknown, what may be the best, then each in turn."""
        records, best = self.records, self.best
        if best.tiers and self.passes >= REST:
            for other in (best._replace(branches=not best.branches), best._replace(drafters=not best.drafters)):
                if other.branches <= self.allowed.branches and other.drafters <= self.allowed.drafters:
                    records.setdefault(other, Record())
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
        """The best course by what is known; the one that was, unless another is better by its margin."""
        rates = {course: record.rate for course, record in self.records.items()}
        fastest = max(rates, key=lambda course: rates[course] / self._margin(course))
        return fastest if rates[fastest] > self._margin(fastest) * rates[self.best] else self.best

    def _free(self, course: Course) -> bool:
        """Whether to try it takes nothing from the purse: where answers begin and end all the time, rates of one moment are not
        those of the next, and what the others are held against must be known: at no cost of what is promised alone, and at next
        to none with drafters inside the tier.
        """
        return course in self.unchecked

    def _owed(self, course: Course) -> bool:
        """Whether it is tried whatever the purse holds, which other loads and texts may have emptied: drafters inside, once."""
        return course == INSIDE and not self.crowded and not self.records[course].tried

    def _margin(self, course: Course) -> float:
        """Times the rate of the best course that make this one the best: clearly better, or alone and better at all."""
        if not self.crowded and {course, self.best} == {ALONE, INSIDE}:
            return BURSTS if course == INSIDE else 1 / BURSTS
        if course == ALONE:
            return 1.0
        return CROWDED if self.crowded and course.tiers else BETTER

    def _use(self, course: Course) -> None:
        if course != self.course:
            self.passes = self.rows = 0
        self.course, self.cost_s, self.trial = course, 0.0, Record()

    def _price(self, course: Course) -> float:
        """Seconds that a trial may cost: those of two passes alone at least, more where more has been gained."""
        alone, best = self.records[ALONE].rate, self.records[self.best].rate
        return max(self.records[course].price_s, (1 + best / alone) / alone)

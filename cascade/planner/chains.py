"""Which of the tiers below draft: the chain with which a session gets most tokens in a second.

Guesses of a tier that is attached are compared with the text that comes whether a pass scores them or not, so how many a pass
scores is computed (`cascade.planner.choice`), and none is one of the answers. What remains is whom to ask. A tier on
processors of its own costs next to nothing while its guesses are not believed: it drafts from the first token on, until it is
seen not to pay. A tier that shares this one's processors slows its passes, which can only be seen while it works: so a tier
begins without those, and spends at most `SHARE` of its time on finding out.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Chain: TypeAlias = tuple[str, ...]  # tiers below that draft, top to bottom
Undrafted: TypeAlias = Literal["load", "low_acceptance", "short"]

ALONE: Chain = ()
SHARE = 0.02  # of a tier's time that exploring may cost
MEMORY = 0.99  # weight of what is known that is left after the next pass
DOUBT = 1.3  # relative error of a rate known from one row; of ``n`` rows over sqrt(n)
BETTER = 1.03  # times the best rate make another chain the best
MIN_PASSES, MIN_ROWS = 4, 12  # by which a chain is judged
MAX_ROWS = 48  # of an exploration, though it may remain unclear which chain is better
ROWS_OF_PASS = 4  # rows of a pass that count: they share what made it long or short


@dataclass(slots=True)
class Estimate:
    """Own tokens of a session in a second, the latest passes counting most."""

    tokens: float = 0.0
    seconds: float = 0.0
    rows: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, 0 if that is not known."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def upper_bound(self) -> float:
        """The rate that it may well have."""
        return self.rate * (1 + DOUBT / math.sqrt(self.rows)) if self.rows else math.inf

    def add(self, tokens: float, seconds: float, rows: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.rows += rows

    def fade(self) -> None:
        """Another pass has come since: the rate stays, and is less certain."""
        self.tokens, self.seconds, self.rows = MEMORY * self.tokens, MEMORY * self.seconds, MEMORY * self.rows


class Seen(NamedTuple):
    """What rows of one kind had of a pass: own tokens, and seconds since their last pass, of all these rows together."""

    rows: int
    tokens: int
    seconds: float
    alone_s: float  # that the pass is predicted to take without drafts
    settled: bool = True  # guesses had time to come: before that a chain costs time, but is not judged


@dataclass(slots=True)
class Budget:
    """Seconds that exploring has cost a tier, and all seconds."""

    spent_s: float = 0.0
    total_s: float = 0.0

    def allows(self, price_s: float) -> bool:
        return self.spent_s + price_s <= SHARE * self.total_s


@dataclass(slots=True)
class Choice:
    """For requests of one kind at one load: what each chain gives, the best, and the one in use.

    These two differ while a chain is explored.
    """

    estimates: dict[Chain, Estimate]  # those to be explored first stand first
    best: Chain
    budget: Budget
    used: Chain = field(init=False)
    price_s: dict[Chain, float] = field(default_factory=dict)  # that exploring a chain may cost
    passes: int = 0  # settled ones since the chain is in use
    rows: float = 0.0  # of these
    cost_s: float = 0.0  # of exploring it so far

    def __post_init__(self) -> None:
        self.used = self.best

    def record(self, used: Chain, seen: Seen, num_sessions: int) -> None:
        """Take what rows had that were to use ``used``, of a tier with so many sessions."""
        if used != self.used or seen.seconds <= 0:
            return  # they have yet to follow
        tokens, seconds = seen.tokens / seen.rows, seen.seconds / seen.rows
        share = seen.rows / num_sessions
        for estimate in self.estimates.values():
            estimate.fade()
        if seen.settled:
            rows = min(seen.rows, ROWS_OF_PASS)
            self.estimates[used].add(rows * tokens, rows * seconds, rows)
            self.passes += 1
            self.rows += rows
        self.budget.total_s += share * seconds
        best = self.estimates[self.best].rate
        lost_s = seconds - tokens / best if best else 0.0
        if used != self.best:
            self.cost_s += lost_s
            self.budget.spent_s += share * lost_s
            self._judge()
        elif not seen.settled:  # slowed by what exploring has left at work below
            self.budget.spent_s += share * max(0.0, lost_s)
        elif self.passes >= MIN_ROWS:  # of a crowd, twelve rows are over before its drafters have read their prompts
            self._seek(1 / seen.alone_s, seconds)

    def _judge(self) -> None:
        """End exploring when it is clear which chain is better, or when it costs too much."""
        estimate, best = self.estimates[self.used], self.estimates[self.best].rate
        enough = self.passes >= MIN_PASSES and self.rows >= MIN_ROWS
        if enough and estimate.rate > BETTER * best:
            self.price_s[self.used] = max(0.0, self.cost_s)
            self.best = self.used
        elif enough and (estimate.upper_bound < best or self.rows >= MAX_ROWS):
            self.price_s[self.used] = max(0.0, self.cost_s)
            self._use(self.best)
        elif self.cost_s > self.price_s[self.used]:
            self.price_s[self.used] = 2 * self.cost_s  # it was too short to tell
            self._use(self.best)

    def _seek(self, alone: float, turn_s: float) -> None:
        """Use a chain that is known to be better than the best by now, else explore one that may be.

        ``alone`` is the rate without drafts as predicted: it counts until it has been measured, but for `SHARE` of it.
        """
        best = self.estimates[self.best].rate
        rates = {chain: estimate.rate for chain, estimate in self.estimates.items()}
        rates[ALONE] = rates[ALONE] or alone / (1 + SHARE)
        fastest = max(rates, key=lambda chain: rates[chain])
        if rates[fastest] > (1.0 if fastest == ALONE else BETTER) * best:
            self.best = fastest
            self._use(fastest)
            return
        others = {chain: estimate.upper_bound for chain, estimate in self.estimates.items() if chain != self.best}
        hopeful = max(others, key=lambda chain: others[chain])  # of equal ones the first
        if others[hopeful] > BETTER * best and self.budget.allows(self.price_s.setdefault(hopeful, MIN_PASSES * turn_s)):
            self._use(hopeful)

    def _use(self, chain: Chain) -> None:
        self.used, self.passes, self.rows, self.cost_s = chain, 0, 0.0, 0.0


class Planner:
    """Chooses for each kind of request (the tiers that it allows, greedy or sampled) and each load of the tier.

    What counts is what comes out: own tokens of a session in a second. Costs of passes, wires and messages, agreement, and
    what tiers on the same processors take from each other are all in it.
    """

    def __init__(self, shared: Collection[str] = ()) -> None:
        """``shared`` names tiers below that compute on the processors of this one."""
        self._shared = frozenset(shared)
        self._budget = Budget()
        self._choices: dict[tuple[Chain, bool], dict[int, Choice]] = {}  # by kind and load

    def chain(self, allowed: Chain, num_sessions: int, *, sampled: bool = False) -> Chain:
        """Who shall draft for a session that may use ``allowed``, in a tier of so many sessions.

        Sessions that are ``sampled``, at a temperature above 0, are judged apart: far fewer guesses are right there.
        """
        return self._choice(allowed, num_sessions, sampled=sampled).used

    def record(self, allowed: Chain, used: Chain, num_sessions: int, seen: Seen, *, sampled: bool = False) -> None:
        """What some of so many sessions had of a pass, who were to use ``used``."""
        self._choice(allowed, num_sessions, sampled=sampled).record(used, seen, num_sessions)

    def undrafted(self, allowed: Chain, num_sessions: int, *, sampled: bool = False) -> Undrafted:
        """Why nobody drafts now: it pays with fewer sessions, it never did, or there was no time to find out."""
        load, choices = load_bucket(num_sessions), self._choices.get((allowed, sampled), {})
        if any(choice.best != ALONE for less, choice in choices.items() if less < load):
            return "load"
        known = (chain for choice in choices.values() for chain, estimate in choice.estimates.items() if estimate.rows)
        return "low_acceptance" if any(chain != ALONE for chain in known) else "short"

    def rates(self, num_sessions: int) -> dict[Chain, float]:
        """Own tokens of a session in a second by who drafts, as measured with so many sessions, where most was measured.

        Safe to call from any thread.
        """
        load = load_bucket(num_sessions)
        choices = [choices[load] for choices in list(self._choices.values()) if load in choices]
        most = max(choices, key=lambda choice: sum(one.seconds for one in choice.estimates.values()), default=None)
        return _measured(most) if most is not None else {}

    def measured(self) -> Iterator["Measured"]:
        """What each chain gives, by kind and load; safe to ask from any thread."""
        for (allowed, sampled), choices in list(self._choices.items()):
            for load, choice in list(choices.items()):
                yield Measured(allowed, sampled, 1 << load, _measured(choice))

    def _choice(self, allowed: Chain, num_sessions: int, *, sampled: bool) -> Choice:
        choices = self._choices.setdefault((allowed, sampled), {})
        load = load_bucket(num_sessions)
        if load not in choices:
            near = min(choices, key=lambda other: abs(other - load), default=None)
            choices[load] = self._begin(allowed, None if near is None else choices[near].best)
        return choices[load]

    def _begin(self, allowed: Chain, near: Chain | None) -> Choice:
        """With what is best at the nearest load, else with all tiers; never with those that share processors."""
        sizes = range(len(allowed) + 1)
        chains = [chain[::-1] for size in sizes for chain in itertools.combinations(allowed[::-1], size)]  # small ones first
        apart = tuple(tier for tier in (allowed if near is None else near) if tier not in self._shared)
        first = [near] if near is not None else []
        return Choice({chain: Estimate() for chain in dict.fromkeys([*first, *chains])}, apart, self._budget)


class Measured(NamedTuple):
    """Own tokens of a session in a second by chain, in a tier of about so many sessions that may use ``allowed``."""

    allowed: Chain
    sampled: bool
    num_sessions: int
    rates: Mapping[Chain, float]


class Worth(NamedTuple):
    """Tokens per second with a tier below over those without, in a tier of about so many sessions."""

    drafter: str
    sampled: bool
    num_sessions: int
    factor: float  # below 1: the tier is faster without


def load_bucket(sessions: float) -> int:
    """Class of a number of sessions: 1, 2, 3 to 5, 6 to 11, 12 to 22, ...

    The borders lie between powers of two, at which loads like to be held.
    """
    return round(math.log2(max(1.0, sessions)))


def worths(measured: Iterator[Measured]) -> list[Worth]:
    """That of every tier below with which something was measured, and without which something was.

    Where requests may use different tiers, those count that may use most.
    """
    widest: dict[tuple[bool, int], Measured] = {}
    for one in measured:
        key = (one.sampled, one.num_sessions)
        if key not in widest or len(one.allowed) > len(widest[key].allowed):
            widest[key] = one
    found = []
    for (sampled, num_sessions), one in widest.items():
        for tier in one.allowed:
            best = {part: max((r for c, r in one.rates.items() if (tier in c) is part), default=0.0) for part in (True, False)}
            if all(best.values()):
                found.append(Worth(tier, sampled, num_sessions, best[True] / best[False]))
    return found


def _measured(choice: Choice) -> dict[Chain, float]:
    return {chain: estimate.rate for chain, estimate in list(choice.estimates.items()) if estimate.rate}

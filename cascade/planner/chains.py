"""Which of the tiers below draft: the chain with which a session gets most tokens in a second.

Guesses of a tier that is attached are compared with the text that comes whether a pass scores them or not, so how many a pass
scores is computed (`cascade.planner.choice`), and none is one of the answers. What remains is whom to ask. A tier on
processors of its own costs next to nothing while its guesses are not believed: it drafts from the first token on, until it is
seen not to pay. A tier that shares this one's processors slows its passes, which can only be seen while it works: so a tier
begins without those, and looks at them when `SHARE` of its time has come to what that may cost: at most, and all of it.
"""

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Chain: TypeAlias = tuple[str, ...]  # tiers below that draft, top to bottom
Undrafted: TypeAlias = Literal["load", "low_acceptance", "short"]

ALONE: Chain = ()
SHARE = 0.02  # of a tier's time that exploring may cost
MEMORY = 0.99  # weight of what is known that is left after the next pass
DOUBT = 1.3  # relative error of a rate known from one pass; of ``n`` passes over sqrt(n)
BETTER = 1.03  # times the best rate make another chain the best
MIN_PASSES = 12  # by which a chain is judged, be it of one session or of a crowd, whose drafters read all prompts at first
FEW_PASSES, MAX_PASSES = 4, 48  # of an exploration: of one that is clearly worse, and of one that remains unclear
PRICE = 12.0  # passes alone that an exploration may cost, beside the reading of the texts


@dataclass(slots=True)
class Estimate:
    """Own tokens of a session in a second, the latest passes counting most."""

    tokens: float = 0.0
    seconds: float = 0.0
    passes: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, 0 if that is not known."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def upper_bound(self) -> float:
        """The rate that it may well have."""
        return self.rate * (1 + DOUBT / math.sqrt(self.passes)) if self.passes else math.inf

    def add(self, tokens: float, seconds: float) -> None:
        """What rows had of a pass, on average: they share what made it long or short."""
        self.tokens += tokens
        self.seconds += seconds
        self.passes += 1

    def fade(self) -> None:
        """Another pass has come since: the rate stays, and is less certain."""
        self.tokens, self.seconds, self.passes = MEMORY * self.tokens, MEMORY * self.seconds, MEMORY * self.passes


class Seen(NamedTuple):
    """What rows of one kind had of a pass: own tokens, and seconds since their last pass, of all these rows together."""

    rows: int
    tokens: int
    seconds: float
    alone_s: float  # that the pass is predicted to take without drafts
    settled: bool = True  # guesses had time to come: before that a chain costs time, but is not judged
    reading_s: float = 0.0  # in which this tier would read the texts of these rows: tiers below that begin to draft have to


@dataclass(slots=True)
class Budget:
    """Seconds that exploring has cost a tier, and all seconds."""

    spent_s: float = 0.0
    total_s: float = 0.0


@dataclass(slots=True)
class Choice:
    """For requests of one kind at one load: what each chain gives, the best, and the one in use.

    These two differ while a chain is explored.
    """

    estimates: dict[Chain, Estimate]  # those to be explored first stand first
    best: Chain
    budget: Budget
    apart: Chain = ALONE  # all tiers with processors of their own, with which some sessions draft while the others go alone
    used: Chain = field(init=False)
    price_s: dict[Chain, float] = field(default_factory=dict)  # of explorations that were cut short, what the next may cost
    passes: int = 0  # settled ones since the chain is in use
    cost_s: float = 0.0  # of exploring it so far
    may_cost_s: float = 0.0  # in all

    def __post_init__(self) -> None:
        self.used = self.best

    def record(self, used: Chain, seen: Seen, num_sessions: int) -> None:
        """Take what rows had that were to use ``used``, of a tier with so many sessions."""
        scouts = used == self.apart and self.used == ALONE
        if seen.seconds <= 0 or not (used == self.used or scouts):
            return  # they have yet to follow
        tokens, seconds = seen.tokens / seen.rows, seen.seconds / seen.rows
        share = seen.rows / num_sessions
        if seen.settled:
            self.estimates[used].add(tokens, seconds)
        if used != self.used:
            return
        for estimate in self.estimates.values():
            estimate.fade()
        self.passes += seen.settled
        self.budget.total_s += share * seconds
        best = self.estimates[self.best].rate
        lost_s = seconds - tokens / best if best else 0.0
        if used != self.best:
            self.cost_s += lost_s
            self.budget.spent_s += share * lost_s
            self._judge()
        elif not seen.settled:  # slowed by what exploring has left at work below
            self.budget.spent_s += share * max(0.0, lost_s)
        elif self.passes >= MIN_PASSES:
            self._seek(1 / seen.alone_s, PRICE * seconds + seen.reading_s, share)

    def _judge(self) -> None:
        """End exploring when it is clear which chain is better, or when it costs too much."""
        estimate, best = self.estimates[self.used], self.estimates[self.best].rate
        if self.passes >= MIN_PASSES and estimate.rate > BETTER * best:
            self.price_s.pop(self.used, None)
            self.best = self.used
        elif self.passes >= MAX_PASSES or (self.passes >= FEW_PASSES and estimate.upper_bound < best):
            self.price_s.pop(self.used, None)
            self._use(self.best)
        elif self.cost_s > self.may_cost_s / 2:  # what tiers below still have to do may cost as much
            self.price_s[self.used] = 2 * self.may_cost_s
            self._use(self.best)

    def _seek(self, alone: float, price_s: float, share: float) -> None:
        """Use a chain that is known to be better than the best by now, else explore one that may be.

        ``alone`` is the rate without drafts as predicted: it counts until it has been measured, but for `SHARE` of it.
        ``price_s`` is what exploring may cost each of the sessions, which are a ``share`` of all.
        """
        best = self.estimates[self.best].rate
        known = (one for one in self.estimates.items() if one[1].passes >= MIN_PASSES or one[0] in (self.best, ALONE))
        rates = {chain: estimate.rate for chain, estimate in known}
        rates[ALONE] = rates[ALONE] or alone / (1 + SHARE)
        fastest = max(rates, key=lambda chain: rates[chain])
        if rates[fastest] > (1.0 if fastest == ALONE else BETTER) * best:
            self.best = fastest
            self._use(fastest)
            return
        others = {chain: estimate.upper_bound for chain, estimate in self.estimates.items() if chain != self.best}
        if ALONE in others and not self.estimates[ALONE].passes:
            others[ALONE] = alone * (1 + DOUBT / math.sqrt(MIN_PASSES))  # a prediction is worth as many
        hopeful = max(others, key=lambda chain: others[chain])  # of equal ones the first
        price_s = max(price_s, self.price_s.get(hopeful, 0.0))
        affordable = self.budget.spent_s + share * price_s <= SHARE * self.budget.total_s
        if affordable and others[hopeful] > BETTER * best:
            self._use(hopeful, price_s)

    def _use(self, chain: Chain, price_s: float = 0.0) -> None:
        self.used, self.passes, self.cost_s, self.may_cost_s = chain, 0, 0.0, price_s


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

    def chain(self, allowed: Chain, num_sessions: int, *, sampled: bool = False, scouts: bool = False) -> Chain:
        """Who shall draft for a session that may use ``allowed``, in a tier of so many sessions.

        Sessions that are ``sampled``, at a temperature above 0, are judged apart: far fewer guesses are right there. One that
        ``scouts`` drafts where that costs the others nothing, though nobody does: so it is seen when it begins to pay.
        """
        choice = self._choice(allowed, num_sessions, sampled=sampled)
        return choice.used or (choice.apart if scouts else ALONE)

    def record(self, allowed: Chain, used: Chain, num_sessions: int, seen: Seen, *, sampled: bool = False) -> None:
        """What some of so many sessions had of a pass, who were to use ``used``."""
        self._choice(allowed, num_sessions, sampled=sampled).record(used, seen, num_sessions)

    def undrafted(self, allowed: Chain, num_sessions: int, *, sampled: bool = False) -> Undrafted:
        """Why nobody drafts now: it pays with fewer sessions, it never did, or there was no time to find out."""
        load, choices = load_bucket(num_sessions), self._choices.get((allowed, sampled), {})
        if any(choice.best != ALONE for less, choice in choices.items() if less < load):
            return "load"
        known = (chain for choice in choices.values() for chain, estimate in choice.estimates.items() if estimate.passes)
        return "low_acceptance" if any(chain != ALONE for chain in known) else "short"

    def rates(self, num_sessions: int) -> dict[Chain, float]:
        """Own tokens of a session in a second by who drafts, as measured with so many sessions, where most was measured.

        Safe to call from any thread.
        """
        load = load_bucket(num_sessions)
        choices = [choices[load] for choices in list(self._choices.values()) if load in choices]
        most = max(choices, key=lambda choice: sum(one.seconds for one in choice.estimates.values()), default=None)
        return _measured(most) if most is not None else {}

    def worths(self) -> list["Worth"]:
        """What is known of every tier below with which something was measured, and without which something was.

        Where requests may use different tiers, those count that may use most. Safe to call from any thread.
        """
        found: dict[tuple[str, bool, int], Worth] = {}
        for (allowed, sampled), choices in sorted(self._choices.items(), key=lambda one: len(one[0][0])):
            for load, choice in list(choices.items()):
                rates = _measured(choice)
                for tier in allowed:
                    best, without = (
                        max((rates[c] for c in rates if (tier in c) is part), default=0.0) for part in (True, False)
                    )
                    if best and without:
                        found[tier, sampled, load] = Worth(tier, sampled, 1 << load, best / without)
        return list(found.values())

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
        apart = tuple(tier for tier in allowed if tier not in self._shared)
        best = apart if near is None else tuple(tier for tier in near if tier in apart)
        first = [near] if near is not None else []
        return Choice({chain: Estimate() for chain in dict.fromkeys([*first, *chains])}, best, self._budget, apart)


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


def _measured(choice: Choice) -> dict[Chain, float]:
    return {chain: estimate.rate for chain, estimate in list(choice.estimates.items()) if estimate.rate}

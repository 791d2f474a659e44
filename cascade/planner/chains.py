"""Chooses which of the tiers below draft: the chain that gives a session most tokens per second.

This module decides which tiers are attached; `cascade.planner.choice` decides how many of their guesses a pass scores. A tier
with processors of its own costs next to nothing while its guesses are not scored. So it drafts from the first token on, until
it turns out not to pay. A tier that shares the verifier's processors slows its passes, by how much only a trial shows. So such
tiers begin detached, and are explored when `EXPLORATION_SHARE` of the verifier's time covers the whole price. With few sessions
the first trial of a chain may also cost the time that text drafters have saved for requests of its kind. A chain that was
slower than none at some load is not explored at higher loads, where guesses cost more, until `LOSS_MEMORY_S` later.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from cascade.answer import Undrafted
from cascade.planner.tuning import (
    BETTER,
    EXPLORATION_PASSES,
    EXPLORATION_SHARE,
    FEW_PASSES,
    FEW_SESSIONS,
    LOSS_MEMORY_S,
    MAX_PASSES,
    MIN_PASSES,
    RATE_DOUBT,
    RATE_MEMORY,
)

Chain: TypeAlias = tuple[str, ...]  # tiers below that draft, top to bottom

ALONE: Chain = ()


@dataclass(slots=True)
class Estimate:
    """Own tokens per second of a session; recent passes count most."""

    tokens: float = 0.0
    seconds: float = 0.0
    passes: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, 0 if unknown."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def upper_bound(self) -> float:
        """The highest plausible rate."""
        return self.rate * (1 + RATE_DOUBT / math.sqrt(self.passes)) if self.passes else math.inf

    def add(self, tokens: float, seconds: float) -> None:
        """Add a pass by the means over its rows, since all of its rows share what made it long or short."""
        self.tokens += tokens
        self.seconds += seconds
        self.passes += 1

    def fade(self) -> None:
        """Another pass has run: the rate stays the same, but becomes less certain."""
        self.tokens *= RATE_MEMORY
        self.seconds *= RATE_MEMORY
        self.passes *= RATE_MEMORY


class Seen(NamedTuple):
    """Gains of a pass's rows of one kind: sums of their own tokens, and of the seconds since their last passes."""

    rows: int
    tokens: int
    seconds: float
    alone_s: float  # predicted seconds of the pass without drafts
    settled: bool = True  # guesses had time to arrive; before that a chain costs time, but is not judged
    share: float = 1.0  # the share of the tier's sessions that are of this kind, those that still prefill included
    reading_s: float = 0.0  # this tier's seconds to prefill the texts of these sessions, as a new drafter must


@dataclass(slots=True)
class Exploration:
    """The budget and the losses of exploration, shared by all loads of one kind of request."""

    spent_s: float = 0.0  # seconds that exploration cost, and seconds of its budget that lapsed
    total_s: float = 0.0  # seconds of the tier's passes
    gained_s: float = 0.0  # seconds that drafters inside the tier have saved
    # by chain: the lowest load at which it was slower than none, and `total_s` at that time
    lost: dict[Chain, tuple[int, float]] = field(default_factory=dict)

    def lost_below(self, load: int, chain: Chain) -> bool:
        """Whether a chain was slower than none at a lower load within `LOSS_MEMORY_S`."""
        lowest, then_s = self.lost.get(chain, (load, 0.0))
        return lowest < load and self.total_s < then_s + LOSS_MEMORY_S


@dataclass(slots=True)
class Choice:
    """For requests of one kind at one load: what each chain gives, the best one, and the one in use.

    The last two differ while a chain is explored.
    """

    load: int  # see `load_bucket`
    estimates: dict[Chain, Estimate]  # in the order of exploration
    best: Chain
    used: Chain
    apart: Chain  # all tiers with processors of their own: scouts draft with them even while others do not
    exploration: Exploration
    price_s: dict[Chain, float] = field(default_factory=dict)  # price of the next exploration, after one was cut short
    passes: int = 0  # settled passes with the chain in use
    cost_s: float = 0.0  # cost of this exploration so far
    may_cost_s: float = 0.0  # limit of this exploration's cost

    def relocate(self, apart: Chain) -> None:
        """``apart`` turns out to be the tiers with processors of their own. If they were never tried, begin with them."""
        gained = not set(apart) <= set(self.apart)
        self.apart = apart
        if gained and not self.estimates[apart].passes:
            self.best = apart
            self._use(apart)

    def record(self, used: Chain, seen: Seen, num_sessions: int) -> None:
        """Learn from rows whose sessions were to use ``used``, in a tier of ``num_sessions`` sessions."""
        scouts = used == self.apart and self.used == ALONE
        if seen.seconds <= 0 or not (used == self.used or scouts):
            return  # these sessions have not switched yet
        tokens, seconds = seen.tokens / seen.rows, seen.seconds / seen.rows
        share = seen.share
        if seen.settled:
            self.estimates[used].add(tokens, seconds)
        if used != self.used:
            return
        for estimate in self.estimates.values():
            estimate.fade()
        self.passes += seen.settled
        self.exploration.total_s += share * seconds
        best = self.estimates[self.best].rate
        lost_s = seconds - tokens / best if best else 0.0
        if used == self.best == ALONE:
            self.exploration.gained_s += share * (tokens * seen.alone_s - seconds)
        if used != self.best:
            self.cost_s += lost_s
            self.exploration.spent_s += share * lost_s
            self._judge()
        elif not seen.settled:  # an exploration has ended, but tiers below still slow this one
            self.exploration.spent_s += share * max(0.0, lost_s)
        elif self.passes >= MIN_PASSES:
            self._seek(1 / seen.alone_s, EXPLORATION_PASSES * seconds + seen.reading_s, share, num_sessions)

    def _judge(self) -> None:
        """End the exploration when it is clear which chain is better, or when it has cost too much."""
        estimate, best = self.estimates[self.used], self.estimates[self.best].rate
        if self.passes >= MIN_PASSES and estimate.rate > BETTER * best:
            self.price_s.pop(self.used, None)
            self._prefer(self.used)
        elif self.passes >= MAX_PASSES or (self.passes >= FEW_PASSES and estimate.upper_bound < best):
            self.price_s.pop(self.used, None)
            self._give_up()
        elif self.cost_s > self.may_cost_s / 2:  # work still queued below may cost as much again
            self.price_s[self.used] = 2 * self.may_cost_s
            self._give_up()

    def _seek(self, alone: float, price_s: float, share: float, num_sessions: int) -> None:
        """Switch to a chain that was measured to be better than the best one; if there is none, explore one that may be.

        ``alone`` is the predicted rate without drafts. Reduced by `EXPLORATION_SHARE`, it is used until the rate is measured.
        ``price_s`` is what exploring may cost each of the sessions, which are a ``share`` of all ``num_sessions``.
        """
        best = self.estimates[self.best].rate
        measured = (item for item in self.estimates.items() if item[1].passes >= MIN_PASSES or item[0] in (self.best, ALONE))
        rates = {chain: estimate.rate for chain, estimate in measured}
        rates[ALONE] = rates[ALONE] or alone / (1 + EXPLORATION_SHARE)
        fastest = max(rates, key=lambda chain: rates[chain])
        if rates[fastest] > (1.0 if fastest == ALONE else BETTER) * best:
            self._prefer(fastest)
            self._use(fastest)
            return
        others = {
            chain: estimate.upper_bound
            for chain, estimate in self.estimates.items()
            if chain != self.best and not self.exploration.lost_below(self.load, chain)
        }
        if ALONE in others and not self.estimates[ALONE].passes:
            others[ALONE] = alone * (1 + RATE_DOUBT / math.sqrt(MIN_PASSES))  # a prediction counts as MIN_PASSES passes
        if not others:
            return
        hopeful = max(others, key=lambda chain: others[chain])  # the first of equal ones
        price_s = max(price_s, self.price_s.get(hopeful, 0.0))
        budget_s = earned_s = EXPLORATION_SHARE * self.exploration.total_s
        if num_sessions <= FEW_SESSIONS and not self.estimates[hopeful].passes:  # its first try
            budget_s += max(0.0, self.exploration.gained_s)
        affordable = self.exploration.spent_s + share * price_s <= budget_s
        if affordable and others[hopeful] > BETTER * best:
            # the rest of the budget lapses, so that hours without exploration do not pay for many in a row
            self.exploration.spent_s = max(self.exploration.spent_s, earned_s - share * price_s)
            self._use(hopeful, price_s)

    def _prefer(self, chain: Chain) -> None:
        """Make a chain the best one; its earlier losses no longer count."""
        self.best = chain
        self.exploration.lost.pop(chain, None)

    def _give_up(self) -> None:
        if self.passes >= FEW_PASSES and self.estimates[self.used].rate < self.estimates[ALONE].rate:
            self.exploration.lost[self.used] = self.load, self.exploration.total_s
        self._use(self.best)

    def _use(self, chain: Chain, price_s: float = 0.0) -> None:
        self.used, self.passes, self.cost_s, self.may_cost_s = chain, 0, 0.0, price_s


class Planner:
    """Chooses a chain for each kind of request (the tiers it allows, greedy or sampled) and each load of the tier.

    The measure is own tokens per second of a session. It covers the costs of passes and messages, acceptance, and how much
    tiers on the same processors slow each other.
    """

    def __init__(self, shared: Collection[str] = ()) -> None:
        """``shared`` names tiers below that may compute on the processors of this one; see `locate`."""
        self.shared = self._sharing = frozenset(shared)
        self._explorations: defaultdict[tuple[Chain, bool], Exploration] = defaultdict(Exploration)  # by kind of request
        self._choices: dict[tuple[Chain, bool], dict[int, Choice]] = {}  # by kind and load

    def chain(self, allowed: Chain, num_sessions: int, *, sampled: bool = False, scouts: bool = False) -> Chain:
        """The chain for a session that may use ``allowed``, in a tier of ``num_sessions``.

        ``sampled`` sessions (temperature above 0) are judged separately, since far fewer of their guesses are right. A session
        that ``scouts`` drafts with tiers on processors of their own even while others do not, which shows when that pays.
        """
        choice = self._choice(allowed, num_sessions, sampled=sampled)
        return choice.used or (choice.apart if scouts else ALONE)

    def locate(self, tier: str, near: bool) -> None:
        """Note whether a tier below has a replica on this machine. Safe to call from any thread."""
        self.shared = self.shared | {tier} & self._sharing if near else self.shared - {tier}

    def record(self, allowed: Chain, used: Chain, num_sessions: int, seen: Seen, *, sampled: bool = False) -> None:
        """Learn from rows of a pass whose sessions were to use ``used``; see `Seen`."""
        self._choice(allowed, num_sessions, sampled=sampled).record(used, seen, num_sessions)

    def undrafted(self, allowed: Chain, num_sessions: int, *, sampled: bool = False) -> Undrafted:
        """Why no tier drafts: it pays only at lower load, it never paid, or there was no time to find out."""
        load, choices = load_bucket(num_sessions), self._choices.get((allowed, sampled), {})
        if any(choice.best != ALONE for less, choice in choices.items() if less < load):
            return "load"
        tried = (chain for choice in choices.values() for chain, estimate in choice.estimates.items() if estimate.passes)
        return "low_acceptance" if any(chain != ALONE for chain in tried) else "short"

    def worths(self) -> list["Worth"]:
        """The gain of each tier below, where chains with it and without it were measured.

        Kinds of requests that may use more tiers take precedence. Safe to call from any thread.
        """
        worths: dict[tuple[str, bool, int], Worth] = {}
        for (allowed, sampled), choices in sorted(self._choices.items(), key=lambda item: len(item[0][0])):
            for load, choice in list(choices.items()):
                for tier in allowed:
                    best, without = (
                        max(estimate.rate for chain, estimate in choice.estimates.items() if (tier in chain) is part)
                        for part in (True, False)
                    )
                    if best and without:
                        worths[tier, sampled, load] = Worth(tier, sampled, 1 << load, best / without)
        return list(worths.values())

    def _choice(self, allowed: Chain, num_sessions: int, *, sampled: bool) -> Choice:
        """The choice at a load. A new one begins with the best chain of the nearest load, or all tiers, without shared ones."""
        choices, load = self._choices.setdefault((allowed, sampled), {}), load_bucket(num_sessions)
        shared = self.shared
        apart = tuple(tier for tier in allowed if tier not in shared)
        for choice in choices.values():
            if choice.apart != apart:
                choice.relocate(apart)
        if load not in choices:
            near = min(choices, key=lambda other: abs(other - load), default=None)
            first = [] if near is None else [choices[near].best]
            sizes = range(len(allowed) + 1)  # so short chains are explored first
            chains = [chain[::-1] for size in sizes for chain in itertools.combinations(allowed[::-1], size)]
            best = tuple(tier for tier in first[0] if tier in apart) if first else apart
            estimates = {chain: Estimate() for chain in dict.fromkeys(first + chains)}
            choices[load] = Choice(load, estimates, best, best, apart, self._explorations[allowed, sampled])
        return choices[load]


class Worth(NamedTuple):
    """Tokens per second with a tier below over those without it, at about ``num_sessions`` sessions."""

    drafter: str
    sampled: bool
    num_sessions: int
    factor: float  # below 1: the tier is faster without


def load_bucket(sessions: float) -> int:
    """The load class of a number of sessions: 1, 2, 3 to 5, 6 to 11, 12 to 22, ...

    Powers of two, which are common in tests and limits, lie inside the classes.
    """
    return round(math.log2(max(1.0, sessions)))

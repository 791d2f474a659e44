"""What a tier decides by what it has measured: when to start a pass, and which tiers below take part.

Pure; the serving tier and the simulator follow the same rules.
"""

import itertools
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from cascade.chain.session import Session

Chain: TypeAlias = tuple[str, ...]  # tiers below that take part, top to bottom
Spared: TypeAlias = Literal["load", "low_acceptance"]

LOCKSTEP_PATIENCE_S = 5.0  # a lockstep verifier goes on without a whole window after this time: nothing hangs

TRIAL = 16  # rows by which a chain is judged
GLANCE = 8  # passes that it takes at least, and by which a trial that goes badly ends
BADLY = 0.6  # of the rate of the chain in use
BETTER = 1.03  # times that rate make another chain the one in use
REGRET = 0.005  # share of a tier's time that the trials of each other chain may cost
MEMORY = 0.99  # weight of a pass that is left after the next one
STALE = 0.5  # weight of what is known of a chain that is left when it is tried again


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


class Planner:
    """Chooses the tiers below that take part: of all chains that a request allows, the one that is measured to be fastest.

    What counts is what comes out: own tokens of a session in a second. Costs of passes, wires and messages, agreement, and
    what tiers on the same processors take from each other are all in it. Chains are measured apart for different numbers
    of sessions; one without any tier is among them, so a cascade that does not pay ends, whatever the reason.
    """

    def __init__(self) -> None:
        self._plans: dict[Chain, dict[int, _Plan]] = {}  # by what is allowed and by load

    def chain(self, allowed: Chain, num_sessions: int) -> Chain:
        """Tiers below to use now for a session that may use those of ``allowed``, in a tier of so many sessions."""
        return self._plan(allowed, num_sessions).chain

    def saw(self, allowed: Chain, used: Chain, num_sessions: int, rows: int, tokens: int, seconds: float) -> bool:
        """A pass gave ``tokens`` to ``rows`` sessions ``seconds`` after the one before; whether another chain is used now."""
        plan = self._plan(allowed, num_sessions)
        before = plan.chain
        plan.saw(used, rows, tokens, rows * seconds)
        return plan.chain != before

    def spared(self, allowed: Chain, num_sessions: int) -> Spared:
        """Why drafting does not pay now: it does with fewer sessions, or it never did."""
        load = num_sessions.bit_length()
        paid = any(plan.best for less, plan in self._plans.get(allowed, {}).items() if less < load)
        return "load" if paid else "low_acceptance"

    def _plan(self, allowed: Chain, num_sessions: int) -> "_Plan":
        plans = self._plans.setdefault(allowed, {})
        load = num_sessions.bit_length()
        if load not in plans:
            near = min(plans, key=lambda other: abs(other - load), default=None)
            plans[load] = _Plan(allowed, allowed) if near is None else plans[near].lend()
        return plans[load]


@dataclass(slots=True)
class _Rate:
    """Own tokens of a session in a second, the latest counting most."""

    tokens: float = 0.0
    seconds: float = 0.0
    tried: int = 0  # pass at which its last trial ended
    length: int = 0  # passes of that trial

    @property
    def known(self) -> bool:
        return self.seconds > 0

    def __call__(self) -> float:
        return self.tokens / self.seconds if self.known else 0.0

    def add(self, tokens: float, seconds: float, left: float = MEMORY) -> None:
        self.tokens = left * self.tokens + tokens
        self.seconds = left * self.seconds + seconds


@dataclass(slots=True)
class _Plan:
    """For one load: what each chain has given, which is the best, and which one is in use."""

    allowed: Chain
    best: Chain  # known so far
    chain: Chain = ()  # in use: the best one, or one on trial
    passes: int = 0
    judged_passes: int = 0  # since the chain in use was last judged
    judged_rows: int = 0
    recent: _Rate = field(default_factory=_Rate)
    rates: dict[Chain, _Rate] = field(default_factory=dict)
    lent: float = 0.0  # rate of the best chain at another load, to which those of others are relative until it is known

    def __post_init__(self) -> None:
        self.chain = self.best
        sizes = (len(self.allowed), *range(len(self.allowed)))  # the whole chain first, then none of it
        self.rates = {chain: _Rate() for size in sizes for chain in itertools.combinations(self.allowed, size)}

    def lend(self) -> "_Plan":
        """The plan of a load that is new: the same, until it is measured; whether to draft at all is tried there at once."""
        plan, rate = _Plan(self.allowed, self.best), self.rates[self.best]
        if rate.known:
            plan.lent = rate()
            for chain, known in self.rates.items():
                if known.known and chain and chain != self.best:
                    plan.rates[chain] = replace(known, tried=0)
        return plan

    def saw(self, used: Chain, rows: int, tokens: int, seconds: float) -> None:
        """A pass of sessions that used ``used`` gave ``tokens`` in so many seconds of all of them together."""
        self.passes += 1
        rate = self.rates.get(used)
        if rate is None or seconds <= 0:
            return
        rate.add(tokens, seconds)
        if used != self.chain:
            return  # sessions that have yet to follow
        self.recent.add(tokens, seconds, 1.0)
        self.judged_passes += 1
        self.judged_rows += rows
        bad = self.chain != self.best and self.recent() < BADLY * self.rates[self.best]()
        if self.judged_passes >= GLANCE and (self.judged_rows >= TRIAL or bad):
            self._judge()

    def _judge(self) -> None:
        rates, tried = self.rates, self.chain
        if self.lent:
            share, self.lent = rates[self.best]() / self.lent, 0.0
            for chain, rate in rates.items():
                rate.tokens *= 1.0 if chain == self.best else share
        if tried != self.best:
            if rates[tried]() > BETTER * rates[self.best]():
                self.best, tried = tried, self.best
            rates[tried].tried, rates[tried].length = self.passes, self.judged_passes
        self.chain = self._next()
        self.judged_passes, self.judged_rows, self.recent = 0, 0, _Rate()
        if self.chain != self.best:
            rates[self.chain].add(0.0, 0.0, STALE)

    def _next(self) -> Chain:
        """Of the other chains the first that was never tried, is due again, or may be better now; else the best."""
        best = self.rates[self.best]()
        for chain, rate in self.rates.items():
            if chain != self.best and (not rate.known or rate() > BETTER * best or self._due(rate, best)):
                return chain
        return self.best

    def _due(self, rate: _Rate, best: float) -> bool:
        """The time that its last trial cost is a small share of what has passed since."""
        lost = rate.length * (best / max(rate(), 1e-9) - 1)
        return self.passes - rate.tried >= max(rate.length, lost / REGRET)

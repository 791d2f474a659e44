"""Whom the sessions of a tier draft with: as planned, and around tiers that failed until they are due again."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from cascade.messages import Commit, Failed, Message, Proposal
from cascade.planner import Chain, Planner
from cascade.schedule import CHUNK
from cascade.seat import Health
from cascade.session import Session, Work

SETTLING = 4  # passes for which the first guesses of a new drafter may be missing before that is held against it


class Drafted(Protocol):
    """A session with what is known of its drafters."""

    session: Session
    chain: Chain  # tiers below that it shall use now
    using: Chain  # tiers below that it was opened with
    settling: int  # passes to come that say nothing about them yet
    alone: bool  # it is too much for the tiers below


S = TypeVar("S", bound=Drafted)


class Drafters(Generic[S]):
    """``send`` takes messages to the tier that it names; ``mint`` gives names to sessions."""

    def __init__(self, send: Callable[[str, Message], None], mint: Callable[[], str], planner: Planner) -> None:
        self._send = send
        self._mint = mint
        self._planner = planner
        self._health = Health()
        self._seats: dict[str, S] = {}  # by the name of their session below

    def seat(self, session: str) -> S | None:
        """Who drafts with the session of that name below."""
        return self._seats.get(session)

    def begin(self, seat: S, num_sessions: int, now: float) -> None:
        """Find a drafter for a new session, one of so many."""
        self._plan(seat, num_sessions)
        self.draft(seat, now)

    def draft(self, seat: S, now: float) -> float | None:
        """Draft with the best usable tier of the session's chain; when to try a better one, None if there is none."""
        chain, session = seat.chain, seat.session
        if session.done or seat.using == chain:
            return None
        usable = self._usable(chain, now) or (self._usable(session.opening.chain, now) if chain else ())
        if not chain:
            self.leave(seat)
        elif usable and seat.using != usable:
            self.leave(seat)
            opening = session.attach(usable[0], self._mint(), usable[1:])
            seat.using, seat.settling = usable, SETTLING
            self._seats[opening.session] = seat
            self._send(session.drafter, opening)
        failed = (tier for tier in chain if not self._health.usable(tier, now))
        return min((self._health.retry_at[tier] for tier in failed), default=None)

    def _usable(self, chain: Chain, now: float) -> Chain:
        """From its first usable tier on; what is below that one is its own affair."""
        first = next((i for i, tier in enumerate(chain) if self._health.usable(tier, now)), len(chain))
        return chain[first:]

    def leave(self, seat: S) -> None:
        """Let go of the drafter, if there is one; closing a session that has failed is harmless."""
        drafter = seat.session.drafter
        self._seats.pop(seat.session.drafter_session, None)
        closing = seat.session.detach()
        seat.using, seat.settling = (), 0
        if closing is not None:
            self._send(drafter, closing)

    def tell(self, seat: S, commit: Commit) -> None:
        """The text has changed."""
        if seat.session.drafter:
            self._send(seat.session.drafter, commit)

    def hear(self, message: Proposal | Failed, now: float) -> tuple[str, str] | None:
        """A message from below; the drafter that is lost and the reason, if one is."""
        seat = self._seats.get(message.session)
        if seat is None:
            return None
        drafter = seat.session.drafter
        if isinstance(message, Proposal):
            seat.session.propose(message)
            seat.settling = 0
            self._health.works(drafter)
            return None
        if message.fault:  # others may draft there, this one nowhere
            seat.alone, seat.chain = True, ()
        else:
            self._health.failed(message.tier or drafter, now)
        self.leave(seat)
        self.draft(seat, now)
        return drafter, message.reason

    def passed(self, seats: Collection[S], rows: Sequence[tuple[S, Work, int]], seconds: float, now: float) -> None:
        """A pass gave each of ``rows`` so many own tokens, ``seconds`` after the one before; ``seats`` are all sessions."""
        totals: dict[tuple[Chain, Chain], tuple[int, int]] = defaultdict(lambda: (0, 0))
        for seat, work, num_new in rows:
            allowed = seat.session.opening.chain
            if not (seat.session.opening.adaptive and allowed) or len(work.tokens) - work.num_own >= CHUNK:
                continue
            if seat.settling:
                seat.settling -= 1
            elif seat.using == seat.chain:
                num_rows, tokens = totals[allowed, seat.using]
                totals[allowed, seat.using] = num_rows + 1, tokens + num_new
        changed = False
        for (allowed, used), (num_rows, tokens) in totals.items():
            changed |= self._planner.saw(allowed, used, len(seats), num_rows, tokens, seconds)
        if changed:
            for seat in seats:
                self._plan(seat, len(seats))
                self.draft(seat, now)

    def _plan(self, seat: S, num_sessions: int) -> None:
        session = seat.session
        allowed = session.opening.chain
        if seat.alone or not session.opening.adaptive or not allowed:
            seat.chain = () if seat.alone else allowed
            return
        seat.chain = self._planner.chain(allowed, num_sessions)
        session.spared = "" if seat.chain else self._planner.spared(allowed, num_sessions)

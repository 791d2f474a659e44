"""Which sessions of a tier have a place in memory. When it is short, some wait, or lose theirs and are scored again later.

Sessions rank by when they were opened. Each may take the place of those behind it, and of those that have been idle for a
while; so the first one always gets on, and every one is the first some day.
"""

from collections.abc import Callable, Collection, Sequence

from cascade.pool import BLOCK, Pool
from cascade.schedule import rank
from cascade.scorer import Store
from cascade.seat import Seat
from cascade.session import Session

IDLE_S = 1.0  # after which a session that has nothing to score may lose its place to any other
RETRY_S = 0.1  # before a session that waits for memory looks again, if nothing else happens


class Memory:
    """Keys and values of the sessions of one tier: at most ``num_tokens`` positions in ``new_store`` stores."""

    def __init__(self, new_store: Callable[[], Store], num_tokens: int) -> None:
        self.pool = Pool(new_store, num_tokens)
        self.preempted = 0  # times that a session lost its place

    def problem(self, positions: int) -> str | None:
        """Why a session of this length can never be served, if so."""
        if self.pool.fits(positions):
            return None
        return (
            f"its memory holds {self.pool.total * BLOCK} tokens in {self.pool.total} blocks of {BLOCK}, "
            f"the request may need {positions} in {self.pool.blocks(positions)}"
        )

    def admit(self, seats: Collection[Seat], max_guesses: int, now: float) -> tuple[list[Seat], bool]:
        """The sessions that can be scored, all with room for that; and whether others wait for memory."""
        ranked: Sequence[Seat] = sorted(seats, key=rank)
        able, waiting = [], False
        for seat in ranked:
            session = seat.session
            if session.stalled:
                continue
            positions = len(session.text) + min(session.usable, max_guesses)
            if self._seat(seat, positions, ranked, now):
                able.append(seat)
            else:
                waiting = True
        return able, waiting

    def scored(self, seat: Seat) -> None:
        """Let others reuse the prompt once it is scored: nothing rolls it back."""
        strip, session = seat.strip, seat.session
        prompt_len = session.opening.prompt_len
        if strip is not None and not strip.keys and BLOCK <= prompt_len <= session.kv_len:
            self.pool.share(strip, session.text[:prompt_len], _salt(session))

    def leave(self, seat: Seat, *, spoilt: bool = False) -> None:
        """A session is over; what it leaves is kept for reuse unless it may be ``spoilt``."""
        strip, session, seat.strip = seat.strip, seat.session, None
        if strip is not None and spoilt:
            self.pool.drop(strip)
        elif strip is not None:
            self.pool.close(strip, session.text[: session.kv_len], _salt(session))

    def check(self, seats: Collection[Seat] = ()) -> None:
        """Raise `AssertionError`, with the arithmetic, if the books do not balance."""
        self.pool.check()
        held = sum(strip.users for strip in {seat.strip for seat in seats if seat.strip is not None})
        seated = sum(seat.strip is not None for seat in seats)
        assert held == seated, f"strips have {held} users, and {seated} sessions have a place in memory"
        for seat in seats:
            capacity = seat.strip.capacity if seat.strip else 0
            assert seat.session.kv_len <= capacity, f"{seat.session.kv_len} positions are said to be in room for {capacity}"

    def _seat(self, seat: Seat, positions: int, ranked: Sequence[Seat], now: float) -> bool:
        """Make room for so many positions, at the cost of others if need be."""
        strip = seat.strip
        if strip is not None and strip.users == 1 and positions <= strip.capacity:
            return True
        while not self._take(seat, positions):
            victim = next((s for s in reversed(ranked) if s.strip and _yields(s, seat, now)), None)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _take(self, seat: Seat, positions: int) -> bool:
        session = seat.session
        if seat.strip is not None:
            strip = self.pool.reserve(seat.strip, positions, session.kv_len)
            if strip is None:
                return False
        else:
            found = self.pool.open(session.text, _salt(session), positions)
            if found is None:
                return False
            strip, session.kv_len = found
        seat.strip = strip
        return True

    def _preempt(self, seat: Seat) -> None:
        assert seat.strip is not None
        self.pool.drop(seat.strip)
        seat.strip, seat.session.kv_len = None, 0
        self.preempted += 1


def _salt(session: Session) -> str:
    """Sessions with the same one may share keys and values, which depend on the adapter."""
    opening = session.opening
    own = "" if opening.params.prompt_logprobs is None else opening.session  # whose logits nobody has left
    return f"{opening.params.adapter}\0{opening.cache_salt}\0{own}"


def _yields(seat: Seat, other: Seat, now: float) -> bool:
    """Whether ``seat`` has to give its place to ``other``."""
    idle = seat.session.stalled and now - seat.since > IDLE_S
    return seat is not other and (idle or rank(seat) > rank(other))

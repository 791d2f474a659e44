"""Which rows make up the next pass. Pure; the serving tier and the simulator follow the same rule.

A pass has a budget of tokens. Sessions that write come before those that read, each in its turn; a long text is read in chunks
beside them, of a size that stretches the pass only so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cascade.planner import Policy
from cascade.session import Session, Work

PRIORITY_S = 10.0  # a session goes before others that came so much earlier, for each step of priority: so nobody starves
CHUNK = 32  # positions to catch up with that make a session one that reads
SHARE = 4  # readers get at least this part of a pass, one over it
STRETCH = 3.0  # reading beside sessions that write may take so many times their pass
SMOOTHING = 0.1  # weight of the latest pass in mean costs


class Waiting(Protocol):
    """A session that could be scored."""

    session: Session
    since: float  # when it became idle
    opened: float


S = TypeVar("S", bound=Waiting)


@dataclass(slots=True)
class Costs:
    """What passes took lately, seconds."""

    pass_s: float  # one without reading
    token_s: float = 0.0  # what each token that was read added to one; 0 until one is known

    def saw(self, works: Sequence[Work], seconds: float) -> None:
        """A pass with these rows took so long."""
        read = sum(len(work.tokens) - work.num_own for work in works)
        if not read:
            self.pass_s += SMOOTHING * (seconds - self.pass_s)
        elif read >= CHUNK:
            token_s = max(0.0, seconds - self.pass_s) / read
            self.token_s += (SMOOTHING if self.token_s else 1.0) * (token_s - self.token_s)


def rank(seat: Waiting) -> float:
    """Lower ones have the older right: as if each had come earlier or later by its priority."""
    return seat.opened + PRIORITY_S * seat.session.opening.priority


def schedule(
    seats: Sequence[S], policy: Policy, costs: Costs, max_tokens: int, now: float
) -> tuple[list[tuple[S, Work]], float | None]:
    """The rows of the next pass, and when to look again if there are none; None: not before something happens.

    None of ``seats`` is stalled. A pass starts when one session wants it, and takes along those that would still wait: it costs
    them less than the next. It scores at most ``max_tokens``.
    """
    ready = [(policy.start_at(seat.session, seat.since, costs.pass_s), seat) for seat in seats]
    first = min((start_at for start_at, _ in ready), default=None)
    if first is None or first > now:
        return [], first
    joining = [seat for start_at, seat in ready if start_at <= now or not seat.session.opening.lockstep]
    readers = [seat for seat in joining if seat.session.num_pending >= CHUNK]
    writers = [seat for seat in joining if seat.session.num_pending < CHUNK]
    reading = _reading_budget(readers, writers, costs, max_tokens)
    batch = _write(writers, max_tokens - reading, policy.max_guesses)
    scored = sum(len(work.tokens) for _, work in batch)
    left = min(max_tokens - scored, _stretch(costs, max_tokens) if batch else max_tokens)
    return batch + _read(readers, left, policy.max_guesses), None


def _reading_budget(readers: Sequence[S], writers: Sequence[S], costs: Costs, max_tokens: int) -> int:
    """Tokens of a pass that those who write have to leave."""
    if not readers or not writers:
        return max_tokens if readers else 0
    turn = min(map(_turn, readers)) < min(map(_turn, writers))  # where a pass is too short to be shared
    share = max_tokens // SHARE or int(turn)
    return min(share, _stretch(costs, max_tokens), sum(seat.session.num_pending for seat in readers))


def _stretch(costs: Costs, max_tokens: int) -> int:
    """Tokens that may be read beside sessions that write."""
    return max(CHUNK, min(max_tokens, int(STRETCH * costs.pass_s / costs.token_s))) if costs.token_s else max_tokens


def _write(seats: Sequence[S], budget: int, max_guesses: int) -> list[tuple[S, Work]]:
    """Everyone's text before anyone's guesses, and those first who wait longest."""
    rows: list[tuple[S, Work]] = []
    wanted = {id(seat): seat.session.num_pending + min(seat.session.usable, max_guesses) for seat in seats}
    enough = sum(wanted.values()) <= budget
    for index, seat in enumerate(sorted(seats, key=_turn)):
        if budget <= 0:
            break
        fair = max(seat.session.num_pending, budget // (len(seats) - index))
        work = seat.session.work(min(budget, wanted[id(seat)] if enough else min(fair, wanted[id(seat)])))
        budget -= len(work.tokens)
        rows.append((seat, work))
    return rows


def _read(seats: Sequence[S], budget: int, max_guesses: int) -> list[tuple[S, Work]]:
    """Half of the budget for the first to come, the rest for the shortest texts: neither waits for all of the other."""
    if not seats or budget <= 0:
        return []
    eldest = min(seats, key=rank)
    others = sorted((seat for seat in seats if seat is not eldest), key=lambda seat: (seat.session.num_pending, rank(seat)))
    rest = sum(seat.session.num_pending for seat in others)
    first = max(budget - rest, -(-budget // 2))
    rows: list[tuple[S, Work]] = []
    for seat in (eldest, *others):
        work = seat.session.work(min(first if seat is eldest else budget, seat.session.num_pending + max_guesses))
        budget -= len(work.tokens)
        rows.append((seat, work))
        if budget <= 0:
            break
    return rows


def _turn(seat: Waiting) -> float:
    """Lower ones have waited longer since their last pass; a step of priority is worth a while of waiting."""
    return seat.since + PRIORITY_S * seat.session.opening.priority

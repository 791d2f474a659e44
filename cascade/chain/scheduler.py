"""Which rows make up the next pass. Pure; the serving tier and the simulator follow the same rule.

A pass has a budget of tokens. Sessions that write come before those that read, each in its turn; a long text is read in chunks
beside them, of a size that stretches the pass only so far.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from cascade.chain.planner import Policy
from cascade.chain.profile import CHUNK, Profile
from cascade.chain.session import Work
from cascade.chain.slot import Slot, U

PRIORITY_S = 10.0  # a session goes before others that came so much earlier, for each step of priority: so nobody starves
SHARE = 4  # readers get at least this part of a pass, one over it
STRETCH = 3.0  # reading beside sessions that write may take so many times their pass


Batch: TypeAlias = list[tuple[Slot[U], Work]]


def rank(slot: Slot[Any]) -> float:
    """Lower ones have the older right: as if each had come earlier or later by its priority."""
    return slot.opened + PRIORITY_S * slot.session.opening.priority


def schedule(
    slots: Sequence[Slot[U]], policy: Policy, profile: Profile, max_tokens: int, now: float
) -> tuple[Batch[U], float | None]:
    """The rows of the next pass, and when to look again if there are none; None: not before something happens.

    None of ``slots`` is stalled. A pass starts when one session wants it, and takes along those that would still wait: it costs
    them less than the next. It scores at most ``max_tokens``.
    """
    ready = [(policy.start_at(slot.session, slot.since, profile.pass_s), slot) for slot in slots]
    first = min((start_at for start_at, _ in ready), default=None)
    if first is None or first > now:
        return [], first
    joining = [slot for start_at, slot in ready if start_at <= now or not slot.session.opening.lockstep]
    readers = [slot for slot in joining if slot.session.num_pending >= CHUNK]
    writers = [slot for slot in joining if slot.session.num_pending < CHUNK]
    reading = _reading_budget(readers, writers, profile, max_tokens)
    batch = _write(writers, max_tokens - reading, policy.max_guesses)
    scored = sum(len(work) for _, work in batch)
    left = min(max_tokens - scored, _stretch(profile, max_tokens) if batch else max_tokens)
    return batch + _read(readers, left, policy.max_guesses), None


def _reading_budget(readers: Sequence[Slot[U]], writers: Sequence[Slot[U]], profile: Profile, max_tokens: int) -> int:
    """Tokens of a pass that those who write have to leave."""
    if not readers or not writers:
        return max_tokens if readers else 0
    turn = min(map(_turn, readers)) < min(map(_turn, writers))  # where a pass is too short to be shared
    share = max_tokens // SHARE or int(turn)
    return min(share, _stretch(profile, max_tokens), sum(slot.session.num_pending for slot in readers))


def _stretch(profile: Profile, max_tokens: int) -> int:
    """Tokens that may be read beside sessions that write."""
    return max(CHUNK, min(max_tokens, int(STRETCH * profile.pass_s / profile.token_s))) if profile.token_s else max_tokens


def _write(slots: Sequence[Slot[U]], budget: int, max_guesses: int) -> Batch[U]:
    """Everyone's text before anyone's guesses, and those first who wait longest."""
    rows: Batch[U] = []
    wanted = {id(slot): slot.session.num_pending + min(slot.session.usable, max_guesses) for slot in slots}
    enough = sum(wanted.values()) <= budget
    for index, slot in enumerate(sorted(slots, key=_turn)):
        if budget <= 0:
            break
        fair = max(slot.session.num_pending, budget // (len(slots) - index))
        work = slot.session.work(min(budget, wanted[id(slot)] if enough else min(fair, wanted[id(slot)])))
        budget -= len(work)
        rows.append((slot, work))
    return rows


def _read(slots: Sequence[Slot[U]], budget: int, max_guesses: int) -> Batch[U]:
    """Half of the budget for the first to come, the rest for the shortest texts: neither waits for all of the other."""
    if not slots or budget <= 0:
        return []
    eldest = min(slots, key=rank)
    others = sorted((slot for slot in slots if slot is not eldest), key=lambda slot: (slot.session.num_pending, rank(slot)))
    rest = sum(slot.session.num_pending for slot in others)
    first = max(budget - rest, -(-budget // 2))
    rows: Batch[U] = []
    for slot in (eldest, *others):
        work = slot.session.work(min(first if slot is eldest else budget, slot.session.num_pending + max_guesses))
        budget -= len(work)
        rows.append((slot, work))
        if budget <= 0:
            break
    return rows


def _turn(slot: Slot[Any]) -> float:
    """Lower ones have waited longer since their last pass; a step of priority is worth a while of waiting."""
    return slot.since + PRIORITY_S * slot.session.opening.priority

"""Decides which sessions of a tier have memory for keys and values. If it is short, some wait, or are preempted and rescored.

Sessions rank by the time at which they were opened. Each may preempt those after it, and those that have been idle for a while.
So the first one always proceeds, and in the end every session becomes the first.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from cascade.scorer import BLOCK, MAX_FORKED, UNREAD, RowState, Store
from cascade.session.branches import Branch
from cascade.tier.block_manager import BlockManager
from cascade.tier.scheduler import rank
from cascade.tier.slot import Fork, Slot, U

log = logging.getLogger(__name__)

IDLE_S = 1.0  # a session with nothing to score for this long may be preempted by any other
MEMORY_RETRY_S = 0.1  # between two tries of a session that waits for memory, if nothing else happens


class KVAdmission:
    """Keys and values of the sessions of one tier: at most ``num_tokens`` positions in ``new_store`` stores."""

    def __init__(self, new_store: Callable[[], Store], num_tokens: int) -> None:
        self.block_manager = BlockManager(new_store, num_tokens)
        self.preempted = 0  # times that a session lost its memory

    @property
    def num_tokens(self) -> int:
        """Positions that the longest session may have."""
        return self.block_manager.total * BLOCK

    def problem(self, positions: int) -> str | None:
        """Why a session of this length can never be served; None if it can."""
        if self.block_manager.fits(positions):
            return None
        return (
            f"its memory holds {self.num_tokens} tokens in {self.block_manager.total} blocks of {BLOCK}, "
            f"the request may need {positions} in {self.block_manager.blocks(positions)}"
        )

    def admit(
        self, slots: Collection[Slot[U]], max_guesses: int, now: float
    ) -> tuple[list[Slot[U]], list[Slot[U]], float | None]:
        """The sessions that have room for their next row; those that get no room although no other session has any, since the
        device has less memory than expected; and when to try again, if other sessions wait for memory."""
        ranked: Sequence[Slot[U]] = sorted(slots, key=rank)
        able: list[Slot[U]] = []
        lost: list[Slot[U]] = []
        waiting = False
        for slot in ranked:
            session = slot.session
            if session.stalled:
                if session.branches is not None and slot.allocation is not None:
                    able.append(slot)
                continue
            length, held = len(session.text), slot.allocation
            roomy = held is not None and length + max_guesses <= held.capacity
            if roomy or self._reserve(slot, length + min(session.depth, max_guesses)):
                able.append(slot)
            elif self._place(slot, length, ranked, now):  # no session is preempted for guesses
                assert slot.allocation is not None
                session.max_depth = min(session.max_depth, slot.allocation.capacity - length)
                able.append(slot)
            elif any(other.allocation is not None for other in ranked if other is not slot):
                waiting = True
            else:
                lost.append(slot)
        return able, lost, now + MEMORY_RETRY_S if waiting else None

    def scored(self, slot: Slot[Any]) -> None:
        """Let others reuse the prompt once all of it is scored."""
        allocation, session = slot.allocation, slot.session
        prompt_len = session.spec.prompt_len
        if allocation is not None and not allocation.keys and BLOCK <= prompt_len <= session.kv_len:
            self.block_manager.share(allocation, session.text[:prompt_len], _salt(slot))

    def fork(self, slot: Slot[Any], branch: Branch, text: list[int], state: RowState | None) -> bool:
        """Give a branch room for its keys and values; False if memory is short."""
        blocks = self.block_manager.lend(MAX_FORKED)
        if blocks is None:
            return False
        try:
            slot.forks[branch] = Fork(slot.cache.fork(branch.start), blocks, text, state)
        except Exception:
            log.exception("A branch gets no memory")
            self.block_manager.give_back(blocks)
            return False
        return True

    def settle(self, slot: Slot[Any], accepted: Branch | None = None) -> None:
        """Move the keys and values of the ``accepted`` branch, which is the text now, into the session's store; without room
        they are computed again. Free the forks of branches that are gone."""
        session, branches = slot.session, slot.session.branches
        if branches is None:
            return
        if accepted is not None and (fork := slot.forks.pop(accepted, None)) is not None:
            assert slot.allocation is not None
            if self.block_manager.reserve(slot.allocation, accepted.kv_len):  # while the fork still holds its blocks
                slot.cache.join(fork.store)
                session.kv_len = accepted.kv_len
            else:
                fork.store.free()
            self.block_manager.give_back(fork.blocks)
        for branch in [branch for branch in slot.forks if branch not in branches.held]:
            self._free(slot.forks.pop(branch))

    def _free(self, fork: Fork) -> None:
        fork.store.free()
        self.block_manager.give_back(fork.blocks)

    def _free_branches(self, slot: Slot[Any]) -> None:
        while slot.forks:
            self._free(slot.forks.popitem()[1])
        if slot.session.branches is not None:
            slot.session.branches.held = []

    def leave(self, slot: Slot[Any], *, spoilt: bool = False) -> None:
        """A session has ended; its keys and values are kept for reuse, unless they may be wrong (``spoilt``)."""
        self._free_branches(slot)
        allocation, session, slot.allocation = slot.allocation, slot.session, None
        if allocation is not None and spoilt:
            self.block_manager.drop(allocation)
        elif allocation is not None:
            self.block_manager.close(allocation, session.text[: session.kv_len], _salt(slot))

    def _place(self, slot: Slot[U], positions: int, ranked: Sequence[Slot[U]], now: float) -> bool:
        """Make room for ``positions``; if needed, preempt others, then give up the session's own branches."""
        while not self._reserve(slot, positions):
            victim = _victim(slot, ranked, now)
            if victim is None and slot.forks:
                self._free_branches(slot)
                continue
            if victim is None:
                return False
            self._free_branches(victim)
            assert victim.allocation is not None
            self.block_manager.drop(victim.allocation)
            victim.allocation, victim.session.kv_len = None, 0
            self.preempted += 1
        return True

    def _reserve(self, slot: Slot[Any], positions: int) -> bool:
        """Make room for ``positions`` without preempting others."""
        if slot.allocation is not None:
            return positions <= slot.allocation.capacity or self.block_manager.reserve(slot.allocation, positions)
        session = slot.session
        opened = self.block_manager.open(session.text, _salt(slot), positions)
        if opened is None:
            return False
        slot.allocation, session.kv_len = opened
        if len(session.text) == len(session.spec.tokens):  # later it would count what it had computed itself
            session.cached = min(session.kv_len, session.spec.prompt_len)
        return True


def _salt(slot: Slot[Any]) -> str:
    """Sessions with the same salt may share keys and values, which depend on the adapter and on heads."""
    spec = slot.session.spec
    own = "" if spec.params.prompt_logprobs is None else slot.session.name  # log-probabilities need all positions scored
    return f"{spec.params.adapter}\0{spec.cache_salt}\0{own}\0{slot.model_guesses != UNREAD}"


def _victim(slot: Slot[U], ranked: Sequence[Slot[U]], now: float) -> Slot[U] | None:
    """The session that ``slot`` preempts: the last one after it, or else the last one that is idle."""
    is_after = True  # told by the place in the list, since sessions opened together have the same rank
    for other in reversed(ranked):
        if other is slot:
            is_after = False
        elif other.allocation is not None and (is_after or (other.session.stalled and now - other.since > IDLE_S)):
            return other
    return None

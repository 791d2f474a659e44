"""What a session occupies at a tier, and what the tier knows of those below it."""

from dataclasses import dataclass, field

from cascade.chain.block_manager import Allocation
from cascade.chain.session import Session, Work
from cascade.messages import Link
from cascade.scorer import RowState, Store

FIRST_BACKOFF_S = 0.25  # before a tier that failed is tried again
MAX_BACKOFF_S = 8.0


@dataclass(slots=True)
class Slot:
    """A session with what it occupies at this tier."""

    session: Session
    up: Link
    since: float  # when it became idle
    opened: float
    allocation: Allocation | None = None  # its keys and values, if it has a place in memory
    state: RowState | None = None  # of its text, if sampling parameters ask for it
    chain: tuple[str, ...] = ()  # tiers below that it shall use now
    using: tuple[str, ...] = ()  # tiers below that it was opened with
    settling: int = 0  # passes to come that say nothing about them yet
    alone: bool = False  # it is too much for the tiers below
    told: float = 0.0  # when the tier above last heard of guesses alone, if the session is watched

    @property
    def cache(self) -> Store:
        """Of a session that has a place in memory."""
        assert self.allocation is not None
        return self.allocation.store

    def ahead(self, work: Work) -> int:
        """Own tokens more than ``work`` asks for that are of use and have room; none with a drafter, who guesses them."""
        session = self.session
        if work.num_own != 1 or session.drafter or self.state is not None or self.allocation is None:
            return 0
        return min(session.room, self.allocation.capacity - len(session.text))

    @property
    def degraded(self) -> bool:
        """It drafts with other tiers than it should, or with none."""
        return self.using != self.chain


@dataclass(slots=True)
class Health:
    """Which tiers below failed lately and when to try them again."""

    backoff_s: dict[str, float] = field(default_factory=dict)
    retry_at: dict[str, float] = field(default_factory=dict)

    def failed(self, tier: str, now: float) -> None:
        wait = min(MAX_BACKOFF_S, self.backoff_s.get(tier, FIRST_BACKOFF_S / 2) * 2)
        self.backoff_s[tier], self.retry_at[tier] = wait, now + wait

    def works(self, tier: str) -> None:
        self.backoff_s.pop(tier, None)
        self.retry_at.pop(tier, None)

    def usable(self, tier: str, now: float) -> bool:
        return self.retry_at.get(tier, 0.0) <= now

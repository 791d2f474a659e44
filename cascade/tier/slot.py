"""A session's place at a tier, and the state of its drafters there."""

from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from cascade.messages import NO_ROUTING, Routing
from cascade.planner.acceptance import Calibration
from cascade.planner.chains import ALONE, Chain
from cascade.planner.tuning import SELDOM, USELESS_PASSES
from cascade.scorer import UNREAD, Guesser, RowState, Store
from cascade.session.branches import Branch
from cascade.session.session import Session
from cascade.tier.block_manager import Allocation

U = TypeVar("U")


class InnerDrafter(NamedTuple):
    """A drafter inside the tier that guesses for a session."""

    name: str
    calibration: Calibration  # how likely its guesses are right
    guesser: Guesser


@dataclass(slots=True)
class Fork:
    """The additional place of a branch."""

    store: Any  # keys and values, see `cascade.scorer.Store.fork`
    blocks: int  # blocks lent to it
    text: list[int]  # the session's text up to the branch, and the branch
    state: RowState | None = None  # the state of this text, if sampling parameters need one


@dataclass(slots=True, eq=False)
class Slot(Generic[U]):
    """A session's place at a tier; ``up`` is where its proposals go."""

    session: Session
    up: U
    since: float  # when it became idle, seconds
    opened: float
    routing: Routing = NO_ROUTING  # passed on to the sessions below
    allocation: Allocation | None = None  # keys and values, if the session has memory
    state: RowState | None = None  # the state of its text, if sampling parameters need one
    allowed: Chain = ALONE  # tiers below that its request allows, except those that cannot serve it
    chain: Chain = ALONE  # tiers that the planner has chosen
    attached: Chain = ALONE  # tiers that draft for it now
    num_drafters: int = 0  # sessions below that it has had
    scouts: bool = False  # it drafts with tiers on processors of their own, even while other sessions do not
    opened_in_turns: bool = False  # the tier below was told to take turns with this one
    least_chance: float = 0.0  # see `Commit`, for a tier below that takes turns with this one; else 0
    most: int = 0  # see `Commit`
    heard: float | None = None  # when the latest proposal of the tier below came, if any has
    settling: int = 0  # passes left in which a new drafter is not judged yet
    forks: dict[Branch, Fork] = field(default_factory=dict)
    drafters: tuple[InnerDrafter, ...] = ()
    unscored: int = 0  # passes since the last one that scored a guess

    @property
    def cache(self) -> Store:
        assert self.allocation is not None
        return self.allocation.store

    @property
    def awaits_guesses(self) -> bool:
        """Whether it is the turn of a tier below that takes turns with this one."""
        return 0 < self.least_chance <= 1

    @property
    def asks_drafters(self) -> bool:
        """Whether drafters inside the tier guess now: seldom, if their guesses do not pay."""
        return bool(self.drafters) and (self.unscored < USELESS_PASSES or self.unscored % SELDOM == 0)

    @property
    def planned(self) -> bool:
        """Whether the planner, not the request, chooses the tiers that draft."""
        return self.session.spec.adaptive and self.allowed != ALONE

    @property
    def sampled(self) -> bool:
        return self.session.spec.params.temperature > 0

    @property
    def model_guesses(self) -> int:
        """Guesses that the next pass shall make for a head; `UNREAD` without a head."""
        if not self.drafters:
            return UNREAD
        return min(self.session.max_depth, max([drafter.guesser.wants for drafter in self.drafters]))

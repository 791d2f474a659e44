"""What a session occupies at a tier, and what the tier knows of its drafters."""

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
    calibration: Calibration  # what its guesses are worth
    guesser: Guesser


@dataclass(slots=True)
class Fork:
    """What a branch occupies beside its session."""

    store: Any  # its keys and values, see `cascade.scorer.Store.fork`
    blocks: int  # lent for it
    text: list[int]  # the session's text up to the branch, and the branch
    state: RowState | None = None  # the state of this text, if sampling parameters ask for it


@dataclass(slots=True, eq=False)
class Slot(Generic[U]):
    """A session's place at a tier; ``up`` is where its proposals go."""

    session: Session
    up: U
    since: float  # when it became idle, seconds
    opened: float
    routing: Routing = NO_ROUTING  # how the sessions below travel
    allocation: Allocation | None = None  # its keys and values, if it has a place in memory
    state: RowState | None = None  # its text's state, if sampling parameters ask for it
    allowed: Chain = ALONE  # all tiers below that its request allows, without those that cannot serve it
    chain: Chain = ALONE  # those that the planner has chosen
    attached: Chain = ALONE  # those that draft for it
    num_drafters: int = 0  # sessions below that it has had
    scouts: bool = False  # it drafts with tiers on processors of their own, whatever the others do
    opened_in_turns: bool = False  # the tier below was told to write in turns with this one
    least_chance: float = 0.0  # see `Commit`, for a tier below that writes in turns with this one; else 0
    most: int = 0  # likewise
    heard: float | None = None  # when the latest proposal of the tier below came, if any has
    settling: int = 0  # passes to come that say nothing yet about a new drafter
    forks: dict[Branch, Fork] = field(default_factory=dict)
    drafters: tuple[InnerDrafter, ...] = ()
    unscored: int = 0  # passes since one last scored a guess

    @property
    def cache(self) -> Store:
        assert self.allocation is not None
        return self.allocation.store

    @property
    def awaits_guesses(self) -> bool:
        """A tier below that writes in turns with this one is to write now."""
        return 0 < self.least_chance <= 1

    @property
    def asks_drafters(self) -> bool:
        """Drafters inside the tier are to guess now: seldom where their guesses do not pay."""
        return bool(self.drafters) and (self.unscored < USELESS_PASSES or self.unscored % SELDOM == 0)

    @property
    def planned(self) -> bool:
        """The planner chooses who drafts for it, not its request."""
        return self.session.spec.adaptive and self.allowed != ALONE

    @property
    def sampled(self) -> bool:
        return self.session.spec.params.temperature > 0

    @property
    def model_guesses(self) -> int:
        """Guesses that the next pass is to make for drafters that read the model; `UNREAD` if none does."""
        if not self.drafters:
            return UNREAD
        return min(self.session.max_depth, max([drafter.guesser.wants for drafter in self.drafters]))

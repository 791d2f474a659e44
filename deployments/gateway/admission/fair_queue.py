"""Who is next: start-time fair queueing of answers, by tokens, with a weight for each key (Goyal, Vin, Cheng, SIGCOMM 1996).

Pure. Every key has a *tag*: the tokens that it was charged, over its weight. The key with the lowest tag is next, of its own
answers that with the lowest rank. An answer is charged when its turn comes, by what it is expected to take, and corrected when
that is known: so it does not matter how many turns there are at once. Who comes back starts at the tag of the last one whose
turn came: there is no credit for having been away.
"""

from bisect import insort
from dataclasses import dataclass, field

LEARNT = 0.125  # of a new length in the mean of those that a key's answers had


@dataclass(slots=True, eq=False)
class Ticket:
    """An answer that waits, or has its turn."""

    flow: "Flow"
    number: int  # in the order of coming
    rank: float  # lower goes before, among those of its key
    read: int  # tokens
    most: int  # tokens that it may write
    written: int = 0  # tokens
    charged: int = 0
    epoch: int = 0  # of its flow when it was charged


@dataclass(slots=True, eq=False)
class Flow:
    """The answers of one key."""

    weight: float
    waiting: list[Ticket] = field(default_factory=list)  # by rank
    own: float = 0.0  # tokens over weight, charged since it has waiting answers, and where it began
    debt: float = 0.0  # what was left then of what it had been charged before
    epoch: int = 0  # times that it has begun
    mean: float | None = None  # tokens that its answers wrote

    @property
    def tag(self) -> float:
        return self.own + self.debt

    def begin(self, virtual: float) -> None:
        """It was away, and has waiting answers again."""
        self.own, self.debt = virtual, max(0.0, self.tag - virtual)
        self.epoch += 1

    def charge(self, ticket: Ticket) -> None:
        """Its first answer has its turn."""
        expected = ticket.most if self.mean is None else min(ticket.most, round(self.mean))
        ticket.charged, ticket.epoch = ticket.read + expected, self.epoch
        self.own += ticket.charged / self.weight

    def correct(self, ticket: Ticket, tokens: int) -> None:
        """An answer took so many tokens."""
        change = (tokens - ticket.charged) / self.weight
        if ticket.epoch == self.epoch:
            self.own += change
        else:  # of an earlier time: it can only make what is left of that less, and never a credit
            self.debt = max(0.0, self.debt + change)


class FairQueue:
    """Answers that wait for their turn."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._waiting: dict[Flow, None] = {}  # those with waiting answers
        self._virtual = 0.0  # tag at which the last turn was given
        self._number = 0

    def join(self, name: str, weight: float, read: int, most: int, rank: float = 0.0) -> Ticket:
        """An answer of key ``name`` waits, which reads so many tokens and writes at most so many; keeps the last ``weight``."""
        flow = self._flows.setdefault(name, Flow(weight))
        flow.weight = weight
        if not flow.waiting:
            flow.begin(self._virtual)
            self._waiting[flow] = None
        self._number += 1
        ticket = Ticket(flow, self._number, rank, read, most)
        insort(flow.waiting, ticket, key=_place)
        return ticket

    def next(self) -> Ticket | None:
        """Whose turn it is, if any waits; it is charged and waits no more."""
        flow = min(self._waiting, key=_order, default=None)
        if flow is None:
            return None
        ticket = flow.waiting[0]
        self._virtual = max(self._virtual, flow.tag)
        self.leave(ticket)
        flow.charge(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """An answer waits no longer."""
        waiting = ticket.flow.waiting
        waiting.remove(ticket)
        if not waiting:
            del self._waiting[ticket.flow]

    def settle(self, ticket: Ticket) -> None:
        """An answer that had its turn has ended."""
        flow, written = ticket.flow, ticket.written
        flow.correct(ticket, ticket.read + written)
        flow.mean = written if flow.mean is None else flow.mean + LEARNT * (written - flow.mean)

    def undo(self, ticket: Ticket) -> None:
        """An answer gave its turn back, and took nothing."""
        ticket.flow.correct(ticket, 0)


def _order(flow: Flow) -> tuple[float, int]:
    """The lowest is next; of equal ones, whoever came first."""
    return flow.tag, flow.waiting[0].number


def _place(ticket: Ticket) -> tuple[float, int]:
    """Among those of its key."""
    return ticket.rank, ticket.number

"""The order of waiting answers: start-time fair queueing by tokens, with a weight for each key (Goyal, Vin, Cheng, 1996). Pure.

Every key is a *flow* with a *tag*: the tokens charged to it, over its weight. The flow with the lowest tag is next, with its
answer of the lowest rank. When its turn comes, an answer is charged the expected number of tokens; the charge is corrected when
it ends, so any number of answers may run at once. A flow that returns starts at the tag of the last turn: absence gives no
credit.
"""

from bisect import insort
from dataclasses import dataclass, field

LEARNING_RATE = 0.125  # weight of a new length in the mean length of a flow's answers


@dataclass(slots=True, eq=False)
class Ticket:
    """An answer that waits, or has its turn."""

    flow: "Flow"
    number: int  # answers are numbered in the order of arrival
    rank: float  # within a flow, lower goes first
    read: int  # tokens that it reads
    most: int  # tokens that it may write at most
    written: int = 0  # tokens written so far
    charged: int = 0  # tokens charged so far

    @property
    def order(self) -> tuple[float, int]:
        return self.rank, self.number


@dataclass(slots=True, eq=False)
class Flow:
    """The answers of one key."""

    weight: float
    waiting: list[Ticket] = field(default_factory=list)  # sorted by `Ticket.order`
    tag: float = 0.0  # tokens over weight
    start: float = 0.0  # least tag until the flow is empty again, since corrections give no credit either
    mean: float | None = None  # mean tokens that its answers wrote

    def charge(self, ticket: Ticket, tokens: int) -> None:
        """Set the total charge of an answer."""
        self.tag = max(self.start, self.tag + (tokens - ticket.charged) / self.weight)
        ticket.charged = tokens


class FairQueue:
    """Answers that wait for their turn."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._virtual = 0.0  # tag at which the last turn was given
        self._number = 0

    def join(self, name: str, weight: float, read: int, most: int, rank: float = 0.0) -> Ticket:
        """Queue an answer of key ``name`` that reads ``read`` and writes at most ``most`` tokens; keeps the last ``weight``."""
        flow = self._flows.setdefault(name, Flow(weight))
        flow.weight = weight
        if not flow.waiting:
            flow.start, flow.tag = self._virtual, max(flow.tag, self._virtual)
        self._number += 1
        ticket = Ticket(flow, self._number, rank, read, most)
        insort(flow.waiting, ticket, key=lambda waiting: waiting.order)
        return ticket

    def next(self) -> Ticket | None:
        """Take the next answer from the queue, and charge it; None if none waits."""
        waiting = (flow for flow in self._flows.values() if flow.waiting)
        flow = min(waiting, key=lambda flow: (flow.tag, flow.waiting[0].number), default=None)
        if flow is None:
            return None
        ticket = flow.waiting.pop(0)
        self._virtual = max(self._virtual, flow.tag)
        expected = ticket.most if flow.mean is None else min(ticket.most, round(flow.mean))
        flow.charge(ticket, ticket.read + expected)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """An answer no longer waits for its turn."""
        ticket.flow.waiting.remove(ticket)

    def settle(self, ticket: Ticket) -> None:
        """An answer that had its turn has ended."""
        flow, written = ticket.flow, ticket.written
        flow.charge(ticket, ticket.read + written)
        flow.mean = written if flow.mean is None else flow.mean + LEARNING_RATE * (written - flow.mean)

    def undo(self, ticket: Ticket) -> None:
        """An answer gave its turn back without using it."""
        ticket.flow.charge(ticket, 0)

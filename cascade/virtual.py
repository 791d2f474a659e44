"""Virtual time, and wires that take a while and may mistreat guesses."""

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable

from cascade.messages import Message, Proposal
from cascade.scenario import Scenario

ROUTER = "router"


class Agenda:
    """What happens next. Things due at the same time happen in the order they were put down."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        if time < math.inf:
            heapq.heappush(self._due, (max(time, self.now), self._count, action))

    def run(self, deadline: float, finished: Callable[[], bool]) -> None:
        """Until nothing is due, the deadline has passed or ``finished``."""
        while self._due and self._due[0][0] <= deadline and not finished():
            self.now, _, action = heapq.heappop(self._due)
            action()


class Wires:
    """Carries messages between tiers and router."""

    def __init__(self, agenda: Agenda, scenario: Scenario) -> None:
        self.agenda = agenda
        self.receivers: dict[str, Callable[[str, Message], None]] = {}
        self._faults = scenario.faults
        self._random = random.Random(scenario.faults.seed)
        self._hops = {tier.name: tier.hop_s for tier in scenario.tiers}
        self._levels = {tier.name: level for level, tier in enumerate(scenario.tiers)} | {ROUTER: len(scenario.tiers)}
        self._last: dict[tuple[str, str], float] = defaultdict(float)  # arrival of the last ordered message

    def send(self, source: str, target: str, message: Message) -> None:
        if not isinstance(message, Proposal):
            arrival = self._last[source, target] = max(self._last[source, target], self._arrival(source, target))
            self._deliver(arrival, source, target, message)
            return
        faults, draw = self._faults, self._random.random
        if target == ROUTER or draw() >= faults.loss:
            self._deliver(self._arrival(source, target), source, target, message)
        if draw() < faults.duplication:
            self._deliver(self._arrival(source, target), source, target, message)

    def _arrival(self, source: str, target: str) -> float:
        hop_s = self._hops[min(source, target, key=self._levels.__getitem__)]
        return self.agenda.now + hop_s + self._faults.jitter_s * self._random.random()

    def _deliver(self, time: float, source: str, target: str, message: Message) -> None:
        self.agenda.at(time, lambda: self.receivers[target](source, message))

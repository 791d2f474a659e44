"""Virtual time, devices that tiers may share, and wires that delay messages and may mistreat guesses."""

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable

from cascade.messages import Message, Proposal
from cascade.simulation.scenario import Scenario

ROUTER = "router"


class Agenda:
    """Actions and their times. Actions at the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        if time < math.inf:
            heapq.heappush(self._due, (max(time, self.now), self._count, action))

    def run(self, deadline: float, finished: Callable[[], bool]) -> None:
        """Run until nothing is due, the deadline has passed, or ``finished``."""
        while self._due and self._due[0][0] <= deadline and not finished():
            self.now, _, action = heapq.heappop(self._due)
            action()


class Device:
    """A processor that its jobs share equally: each of ``n`` runs at ``1/n`` of its speed."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []  # jobs, by the value of `_done` at which they end
        self._done = 0.0  # seconds of work, by `_since`, of a job that has run from the beginning
        self._since = 0.0
        self._count = 0
        self._plan = 0  # number of the latest plan; earlier ones are void

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        """Start a job that takes ``seconds`` without other jobs; one of 0 seconds ends at once."""
        if seconds <= 0:
            then()
            return
        self._go_on()
        self._count += 1
        heapq.heappush(self._jobs, (self._done + seconds, self._count, then))
        self._await_next()

    def _go_on(self) -> None:
        now = self._agenda.now
        if self._jobs:
            self._done += (now - self._since) / len(self._jobs)
        self._since = now

    def _await_next(self) -> None:
        self._plan += 1
        plan = self._plan
        if self._jobs:
            left = max(0.0, self._jobs[0][0] - self._done)
            self._agenda.at(self._since + left * len(self._jobs), lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._go_on()
        _, _, then = heapq.heappop(self._jobs)
        self._await_next()
        then()


class Wires:
    """Carries messages between tiers and router; also holds the devices of the tiers."""

    def __init__(self, agenda: Agenda, scenario: Scenario) -> None:
        self.agenda = agenda
        self.receivers: dict[str, Callable[[str, Message], None]] = {}
        self._faults = scenario.faults
        self._random = random.Random(scenario.faults.seed)
        self._hops = {tier.name: tier.hop_s for tier in scenario.tiers}
        self._levels = {tier.name: level for level, tier in enumerate(scenario.tiers)} | {ROUTER: len(scenario.tiers)}
        self._last: dict[tuple[str, str], float] = defaultdict(float)  # arrival of the last ordered message
        devices: dict[str, Device] = defaultdict(lambda: Device(agenda))
        self.devices = {tier.name: devices[tier.device or tier.name] for tier in scenario.tiers}

    def send(self, source: str, target: str, message: Message) -> None:
        """Messages of a source leave in order; guesses arrive late, twice, in another order or never."""
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

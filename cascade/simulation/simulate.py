"""A discrete-event simulation of the cascade: the real loops, sessions and answers in virtual time.

Pass costs and delays are given; own tokens come from any `Scorer` without weights. Faults are injected: delayed, repeated,
reordered and lost guesses, and deaths of replicas. The same scenario gives the same outcome.
"""

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cascade.answer import Answer
from cascade.messages import Close, Edge, Failed, Message, Open, Proposal, SessionSpec, add_edges
from cascade.planner.chains import Planner
from cascade.planner.cost import Profile
from cascade.simulation.scenario import Outcome, Scenario, SimTier
from cascade.tier.kv_admission import KVAdmission
from cascade.tier.loop import Limits, Loop
from cascade.tier.runner import row_of
from cascade.tier.scheduler import Batch

ROUTER = "router"
MUTE: Any = SimpleNamespace(step=lambda token: "", flush=lambda: "")  # a decoder for answers whose text is not needed


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


UNBOUNDED = 1 << 20  # tokens: the full tier never waits for the router
ASK_AGAIN_S = 0.05  # seconds until the router retries a full tier that died


class Stuck(RuntimeError):
    """A request did not finish: no event is left, or the scenario's time is over."""


def simulate(scenario: Scenario) -> Outcome:
    """Run ``scenario`` to its end; raises `Stuck` if it does not end."""
    agenda = Agenda()
    wires = Wires(agenda, scenario)
    nodes = [Node(tier, level, scenario, wires) for level, tier in enumerate(scenario.tiers)]
    router = Router(scenario, wires)
    wires.receivers[ROUTER] = router.receive
    wires.receivers.update({node.name: node.receive for node in nodes})
    for index, request in enumerate(scenario.requests):
        agenda.at(request.arrive_s, lambda index=index: router.ask(index))  # type: ignore[misc]
    for death in scenario.faults.deaths:
        node = next(node for node in nodes if node.name == death.tier)
        agenda.at(death.at_s, node.die)
        agenda.at(death.back_s, node.revive)
    agenda.run(scenario.deadline_s, lambda: router.finished)
    if not router.finished:
        raise Stuck(f"{router.num_finished} of {len(scenario.requests)} requests had finished after {agenda.now:.3f} s")
    order = range(len(scenario.requests))
    return Outcome(
        tuple(tuple(router.texts[i]) for i in order),
        tuple(tuple(router.times[i]) for i in order),
        tuple(add_edges({}, router.edges).values()),
        tuple(node.passes for node in nodes),
    )


class Node:
    """A tier in virtual time: the real loop, with passes of the given cost."""

    def __init__(self, tier: SimTier, level: int, scenario: Scenario, wires: Wires) -> None:
        self.name = tier.name
        self.passes = 0
        self._tier = tier
        self._level = level
        self._max_pass_tokens = scenario.max_pass_tokens
        self._wires = wires
        self._agenda = wires.agenda
        self._inbox: list[tuple[str, Message]] = []
        self._busy = self._dead = False
        self._lives = 0
        self._wake_at = math.inf
        self._profile = Profile([(tokens, tier.cost(tokens, 0) + tier.scored_s * tokens) for tokens in sorted(tier.timed)])
        lower = scenario.tiers[:level]
        self._shared = [below.name for below in lower if below.device and below.device == tier.device]
        self._loop = self._begin()

    def _begin(self) -> Loop[str]:
        model = self._tier.model
        return Loop(
            self.name,
            self._level,
            Limits(model.vocab_size, model.context_len, self._tier.policy),
            KVAdmission(model.new_cache, model.cache_tokens),
            self._profile,
            send_up=lambda above, message: self._wires.send(self.name, above, message),
            send_down=lambda tier, message: self._wires.send(self.name, tier, message),
            planner=Planner(self._shared),
            drafters=self._tier.drafters,
        )

    def receive(self, source: str, message: Message) -> None:
        """A message arrives; it is handled between passes."""
        if not self._dead:
            self._inbox.append((source, message))
            self._wake(self._agenda.now)
        elif isinstance(message, Open):
            self._wires.send(self.name, source, Failed(message.session, "the replica is dead", self.name))

    def die(self) -> None:
        """Lose everything, like a killed replica; links report it to the other tiers."""
        self._dead, self._busy = True, False
        self._lives += 1
        self._loop.fail_all("the replica died")
        self._loop = self._begin()
        inbox, self._inbox = self._inbox, []
        for source, message in inbox:
            self.receive(source, message)

    def revive(self) -> None:
        self._dead = False

    # the loop

    def _wake(self, time: float) -> None:
        if time < self._wake_at:
            self._wake_at = time
            self._agenda.at(time, lambda: self._awake(time))

    def _awake(self, time: float) -> None:
        if time == self._wake_at:
            self._wake_at = math.inf
            if not self._busy and not self._dead:
                self._step()

    def _step(self) -> None:
        now = self._agenda.now
        inbox, self._inbox = self._inbox, []
        for source, message in inbox:
            self._loop.receive(message, source, now)
        batch, wake_at = self._loop.schedule(self._max_pass_tokens, now)
        if batch:
            self._launch(batch)
        elif wake_at is not None:
            self._wake(wake_at)
        self._loop.settle(now)

    def _launch(self, batch: Batch[str]) -> None:
        launched = self._tier.model.launch([row_of(slot, work) for slot, work in batch])
        tier, scored = self._tier, sum(work.num_scored for _, work in batch)
        seconds = tier.cost(sum(len(work) for _, work in batch), sum(work.start for _, work in batch)) + tier.scored_s * scored
        self.passes += 1
        self._busy, life, now = True, self._lives, self._agenda.now
        self._wires.devices[self.name].run(seconds, lambda: self._advance(batch, launched, life, now))

    def _advance(self, batch: Batch[str], launched: Any, life: int, begin: float) -> None:
        if life != self._lives:
            return
        self._busy = False
        now = self._agenda.now
        works = [work for _, work in batch]
        read, context = sum(work.num_read for work in works), sum(work.start for work in works)
        self._profile.record(sum(map(len, works)), read, context, now - begin)
        self._loop.advance(batch, self._tier.model.collect(launched), now)
        self._wake(now)


@dataclass(slots=True)
class Router:
    """Opens requests at the full tier, takes its proposals as the answer, and retries when the tier dies."""

    scenario: Scenario
    wires: Wires
    texts: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)
    num_finished: int = 0
    edges: list[Edge] = field(default_factory=list)
    _answers: dict[str, Answer] = field(default_factory=dict)
    _num_opened: int = 0

    @property
    def finished(self) -> bool:
        return self.num_finished == len(self.scenario.requests)

    def ask(self, index: int) -> None:
        request, tiers = self.scenario.requests[index], self.scenario.tiers
        spec = SessionSpec(
            tokens=request.prompt,
            prompt_len=len(request.prompt),
            params=request.params,
            ends=request.ends,
            tier=tiers[-1].name,
            chain=tuple(tier.name for tier in reversed(tiers[:-1])),
            window=UNBOUNDED,
            drafters=tuple(drafter.name for tier in tiers for drafter in tier.drafters),
            draft_window=self.scenario.window,
            draft_branches=self.scenario.branches,
            adaptive=self.scenario.adaptive,
            cache_salt=request.cache_salt,
        )
        self.texts[index], self.times[index] = [], []
        self._open(Answer(spec, MUTE, index), spec)

    def receive(self, source: str, message: Message) -> None:
        answer = self._answers.get(message.session)
        if answer is None:
            return
        if isinstance(message, Failed):
            del self._answers[message.session]
            now = self.wires.agenda.now
            self.wires.agenda.at(now + ASK_AGAIN_S, lambda: self._open(answer, answer.spec.after(answer.tokens)))
        elif isinstance(message, Proposal):
            chunk, commit = answer.receive(message)
            if commit is not None:
                self.wires.send(ROUTER, source, commit)
            if chunk is not None:
                self.texts[answer.index] += chunk.token_ids
                self.times[answer.index] += [self.wires.agenda.now] * len(chunk.token_ids)
            if chunk is not None and chunk.completion is not None:
                self.num_finished += 1
                self.edges += chunk.completion.stats.edges
                del self._answers[message.session]
                self.wires.send(ROUTER, source, Close(message.session))

    def _open(self, answer: Answer, spec: SessionSpec) -> None:
        self._num_opened += 1
        session = f"{ROUTER}-{self._num_opened}"
        self._answers[session] = answer
        self.wires.send(ROUTER, spec.tier, Open(session, spec))

"""The cascade in virtual time: the real sessions, policy and answers, with the passes and the wires made up.

A discrete-event simulation of the loops of tiers. Costs of passes and delays of hops are given, own tokens come from any
`Scorer` without weights: `ToyModel`, or `forecast.Reader` for a measured acceptance. What a wire may do to
guesses (delay, repeat, reorder, lose) and deaths of replicas are injected. The same scenario gives the same outcome.
"""

import math
from dataclasses import dataclass, field

from cascade.answer import Answer
from cascade.chain.drafting import Drafters
from cascade.chain.planner import Chain, Planner
from cascade.chain.scheduler import Costs, schedule
from cascade.chain.session import Session, Work
from cascade.messages import Close, Commit, Edge, Failed, Message, Open, Proposal
from cascade.scorer import Row, Store
from cascade.simulation.scenario import Outcome, Scenario, SimTier, Usage
from cascade.simulation.virtual import ROUTER, Agenda, Wires

FULL_WINDOW = 1 << 20  # the full tier never waits for the router
RETRY_S = 0.05  # before the router asks a full tier that died again


class Stuck(RuntimeError):
    """A request did not finish: nothing is under way any more, or the scenario's time is over."""


def simulate(scenario: Scenario) -> Outcome:
    """Run ``scenario`` to its end; raises `Stuck` if it has none."""
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
        raise Stuck(f"{len(router.finish_s)} of {len(scenario.requests)} requests had finished after {agenda.now:.3f} s")
    order = range(len(scenario.requests))
    return Outcome(
        tuple(tuple(router.texts[i]) for i in order),
        tuple(router.finish_s[i] for i in order),
        total_edges(router.edges),
        tuple(node.usage for node in nodes),
    )


def total_edges(edges: list[Edge]) -> tuple[Edge, ...]:
    """Sums per pair of tiers, in order of appearance."""
    totals: dict[tuple[str, str], Edge] = {}
    for edge in edges:
        key = (edge.drafter, edge.verifier)
        totals[key] = totals[key] + edge if key in totals else edge
    return tuple(totals.values())


@dataclass(slots=True)
class _Slot:
    session: Session
    cache: Store
    above: str
    since: float  # when it became idle
    opened: float
    bare_since: float | None = None  # when a pass left it without a guess
    chain: Chain = ()  # tiers below that it shall use now
    using: Chain = ()  # tiers below that it was opened with
    settling: int = 0  # passes to come that say nothing about them yet
    alone: bool = False  # it is too much for the tiers below


class Node:
    """The loop of `cascade.chain.tier.Tier` in virtual time."""

    def __init__(self, tier: SimTier, level: int, scenario: Scenario, wires: Wires) -> None:
        self.name = tier.name
        self.usage = Usage(tier.name)
        self._tier = tier
        self._level = level
        self._max_pass_tokens = scenario.max_pass_tokens
        self._wires = wires
        self._agenda = wires.agenda
        self._slots: dict[str, _Slot] = {}
        self._inbox: list[tuple[str, Message]] = []
        self._drafters: Drafters[_Slot] = Drafters(self._send_down, self._mint, Planner())
        self._last_pass_at = 0.0
        self._busy = self._dead = False
        self._lives = 0
        self._num_opened = 0
        self._wake_at = math.inf
        self._costs = Costs(tier.cost(1))

    def receive(self, source: str, message: Message) -> None:
        """A message arrives; it is looked at between passes."""
        if not self._dead:
            self._inbox.append((source, message))
            self._wake(self._agenda.now)
        elif isinstance(message, Open):
            self._wires.send(self.name, source, Failed(message.session, "the replica is dead", self.name))

    def die(self) -> None:
        self._dead, self._busy = True, False
        self._lives += 1
        for slot in list(self._slots.values()):
            self._leave(slot)
            self._wires.send(self.name, slot.above, Failed(slot.session.opening.session, "the replica died", self.name))
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
        inbox, self._inbox = self._inbox, []
        for source, message in inbox:
            self._take(source, message)
        batch, wake_at = self._schedule(self._agenda.now)
        if batch:
            self._run(batch)
        else:
            self._wake(wake_at)

    def _schedule(self, now: float) -> tuple[list[tuple[_Slot, Work]], float]:
        slots = self._slots.values()
        retries = [self._drafters.draft(slot, now) for slot in slots if slot.using != slot.chain]
        wake_at = min((retry_at for retry_at in retries if retry_at is not None), default=math.inf)
        able = [slot for slot in slots if not slot.session.stalled]
        batch, again_at = schedule(able, self._tier.policy, self._costs, self._max_pass_tokens, now)
        return batch, min(wake_at, math.inf if again_at is None else again_at)

    def _run(self, batch: list[tuple[_Slot, Work]]) -> None:
        now, usage = self._agenda.now, self.usage
        for slot, work in batch:
            if work.num_own:
                slot.session.waited(now - slot.since)
                usage.waited_s += now - slot.since
            if slot.bare_since is not None:
                usage.corrections += 1
                usage.bubble_s += now - slot.bare_since
                slot.bare_since = None
        rows = [Row(s.cache, w.start, w.tokens, w.num_own, s.session.opening.params) for s, w in batch]
        own = self._tier.model.run(rows)
        num_tokens = sum(len(work.tokens) for _, work in batch)
        seconds = self._tier.cost(num_tokens)
        usage.passes += 1
        usage.tokens += num_tokens
        usage.busy_s += seconds
        self._busy, life = True, self._lives
        self._wires.devices[self.name].run(seconds, lambda: self._advance(batch, own, life, now))

    def _advance(self, batch: list[tuple[_Slot, Work]], own: list[list[int]], life: int, begin: float) -> None:
        if life != self._lives:
            return
        self._busy = False
        now = self._agenda.now
        self._costs.saw([work for _, work in batch], now - begin)
        seconds = now - max(self._last_pass_at, min(slot.since for slot, _ in batch))
        self._last_pass_at = now
        rows: list[tuple[_Slot, Work, int]] = []
        for (slot, work), tokens in zip(batch, own, strict=True):
            session = slot.session
            slot.since = now
            commit = session.advance(work, tokens)
            if commit is None:
                continue
            rows.append((slot, work, len(commit.tokens)))
            if session.drafter:
                slot.bare_since = None if session.guess or session.done else slot.since
                self._drafters.tell(slot, commit)
            if (proposal := session.proposal()) is not None:
                self._wires.send(self.name, slot.above, proposal)
        self._drafters.passed(self._slots.values(), rows, seconds, now)
        self._wake(now)

    # messages

    def _take(self, source: str, message: Message) -> None:
        if isinstance(message, Open):
            session = Session(message, self.name, self._level, self._tier.model.vocab_size)
            now = self._agenda.now
            opened = self._slots[message.session] = _Slot(session, self._tier.model.new_cache(), source, now, now)
            self._drafters.begin(opened, len(self._slots), now)
        elif isinstance(message, Proposal | Failed):
            self._drafters.hear(message, self._agenda.now)
        elif (slot := self._slots.get(message.session)) is not None:
            self._obey(slot, message)

    def _obey(self, slot: _Slot, message: Commit | Close) -> None:
        if isinstance(message, Close):
            self._leave(slot)
            return
        session = slot.session
        stalled = session.stalled
        change = session.commit(message.start, message.tokens)
        if change is not None:
            self._drafters.tell(slot, change)
        if change is not None or stalled:
            slot.since = self._agenda.now
            slot.bare_since = None

    def _send_down(self, tier: str, message: Message) -> None:
        self._wires.send(self.name, tier, message)

    def _mint(self) -> str:
        self._num_opened += 1
        return f"{self.name}-{self._num_opened}"

    def _leave(self, slot: _Slot) -> None:
        self._drafters.leave(slot)
        del self._slots[slot.session.opening.session]
        slot.cache.free()


@dataclass(slots=True)
class _Mute:
    """A decoder for answers that nobody reads."""

    def step(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(slots=True)
class Router:
    """Opens requests at the full tier, takes its proposals for the answer, and asks again when it died."""

    scenario: Scenario
    wires: Wires
    texts: dict[int, list[int]] = field(default_factory=dict)
    finish_s: dict[int, float] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    _answers: dict[str, Answer] = field(default_factory=dict)
    _num_opened: int = 0

    @property
    def finished(self) -> bool:
        return len(self.finish_s) == len(self.scenario.requests)

    def ask(self, index: int) -> None:
        request, tiers = self.scenario.requests[index], self.scenario.tiers
        opening = Open(
            session=self._session(),
            tokens=request.prompt,
            prompt_len=len(request.prompt),
            params=request.params,
            ends=request.ends,
            tier=tiers[-1].name,
            chain=tuple(tier.name for tier in reversed(tiers[:-1])),
            window=FULL_WINDOW,
            draft_window=self.scenario.window,
            lockstep=self.scenario.lockstep,
            adaptive=self.scenario.adaptive,
        )
        self.texts[index] = []
        self._open(Answer(opening, _Mute(), index), opening)

    def receive(self, source: str, message: Message) -> None:
        answer = self._answers.get(message.session)
        if answer is None:
            return
        if isinstance(message, Failed):
            del self._answers[message.session]
            now = self.wires.agenda.now
            self.wires.agenda.at(now + RETRY_S, lambda: self._open(answer, answer.replay(self._session())))
        elif isinstance(message, Proposal):
            chunk, commit = answer.take(message)
            if commit is not None:
                self.wires.send(ROUTER, source, commit)
            if chunk is not None:
                self.texts[answer.index] += chunk.token_ids
            if chunk is not None and chunk.completion is not None:
                self.finish_s[answer.index] = self.wires.agenda.now
                self.edges += chunk.completion.stats.edges
                del self._answers[message.session]
                self.wires.send(ROUTER, source, Close(message.session))

    def _open(self, answer: Answer, opening: Open) -> None:
        self._answers[opening.session] = answer
        self.wires.send(ROUTER, opening.tier, opening)

    def _session(self) -> str:
        self._num_opened += 1
        return f"{ROUTER}-{self._num_opened}"

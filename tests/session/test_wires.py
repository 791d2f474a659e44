"""Chains of sessions whose messages are late, lost, repeated and reordered: the text is the full tier's alone."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cascade.draft import Draft
from cascade.messages import Close, Commit, Failed, Message, Open, Proposal
from cascade.params import SamplingParams
from cascade.planner.acceptance import Calibration
from cascade.planner.choice import Policy
from cascade.planner.cost import Profile
from cascade.session.guesses import Hint
from cascade.session.session import Session
from cascade.tier.kv_admission import KVAdmission
from cascade.tier.loop import Limits, Loop
from cascade.tier.runner import row_of
from cascade.tier.slot import Slot
from tests.books import check_memory
from tests.cases import examples
from tests.session.test_session import VOCAB, opening
from tests.toys import ToyCache, ToyModel, full_text

AGREEMENTS = (0.5, 0.6, 0.7, 0.85)  # of the tiers below the full one, bottom to top
NAMES = ("tier0", "tier1", "tier2", "tier3", "tier4")  # bottom to top


def toys(num_tiers: int) -> list[ToyModel]:
    """Models bottom to top; their order makes a wrong entry in a cache show for many tokens."""
    return [ToyModel(VOCAB, order=6, agreement=share) for share in (*AGREEMENTS[5 - num_tiers :], 1.0)]


class Chain:
    """The loops of tiers bottom to top, with toy models, and the messages that are on their way."""

    def __init__(self, models: Sequence[ToyModel], opening: Open, step_s: float = 10.0) -> None:
        self.models = models
        self.top = len(models) - 1
        self.name, self.first = opening.session, replace(opening.spec, chain=NAMES[: self.top][::-1])
        self.down: list[deque[tuple[Message, int]]] = [deque() for _ in models]  # to the tier of that level, from another
        self.up: list[list[tuple[int, Proposal]]] = [[] for _ in models]  # from that level, to another
        self.passes = self.chunks = 0  # of the full tier, and those of them that gave no token
        self.num_opened = 0
        self.now, self.step_s = 0.0, step_s  # that a pass takes: longer than any tier waits, or no time
        self.loops = [self.loop(level) for level in range(len(models))]
        self.loops[-1].receive(Open(self.name, self.first), len(models), self.now)

    def loop(self, level: int) -> Loop[int]:
        def send_up(above: int, message: Message) -> None:
            assert isinstance(message, Proposal)
            self.up[level].append((above, message))

        def send_down(tier: str, message: Message) -> None:
            self.num_opened += isinstance(message, Open)
            self.down[NAMES.index(tier)].append((message, level))

        limits, memory = Limits(VOCAB, 4096, Policy()), KVAdmission(ToyCache, 1 << 14)
        return Loop(NAMES[level], level, limits, memory, Profile(), send_up=send_up, send_down=send_down)

    @property
    def full(self) -> Session:
        return self.loops[-1].slots[self.name].session

    def slots(self, level: int) -> list[Slot[int]]:
        return list(self.loops[level].slots.values())

    def obey(self, level: int) -> None:
        """Deliver the next message from above."""
        if self.down[level]:
            self.loops[level].receive(*self.down[level].popleft(), self.now)

    def hear(self, level: int, index: int, *, keep: bool = False) -> None:
        """Deliver any proposal of the tier at ``level``, and have it come again later if ``keep``."""
        if not self.up[level]:
            return
        above, proposal = sent = self.up[level][index % len(self.up[level])]
        if not keep:
            self.up[level].remove(sent)
        if level < self.top:
            self.loops[above].receive(proposal, None, self.now)
        elif tokens := proposal.draft.tokens[self.full.committed - proposal.start :]:
            self.down[level].append((Commit(self.name, self.full.committed, tokens), above))

    def fail(self, level: int) -> None:
        """The drafter of a tier says that it has failed; it is asked again later, and others meanwhile."""
        for slot in self.slots(level):
            if session := slot.session.drafter_session:
                self.loops[level].receive(Failed(session, "it is gone"), None, self.now)

    def score(self, level: int, max_tokens: int = 1000) -> bool:
        """One pass of a tier, if it has work."""
        loop = self.loops[level]
        batch, _ = loop.schedule(max_tokens, self.now)
        assert sum(len(work) for _, work in batch) <= max_tokens
        launched = self.models[level].launch([row_of(*row) for row in batch])
        loop.settle(self.now)
        if batch:
            self.now += self.step_s
            loop.advance(batch, self.models[level].collect(launched), self.now)
        if level == self.top and batch:
            self.passes += 1
            self.chunks += not batch[0][1].num_own
        return bool(batch)

    def settle(self) -> None:
        """Deliver everything, in order."""
        while True:
            for loop in self.loops:
                loop.settle(self.now)
            if not (any(self.down) or any(self.up)):
                break
            for level in reversed(range(self.top + 1)):
                while self.down[level]:
                    self.obey(level)
                while self.up[level]:
                    self.hear(level, 0)
        texts = {slot.session.name: slot.session for level in range(self.top) for slot in self.slots(level)}
        for level in range(1, self.top + 1):
            for above in (slot.session for slot in self.slots(level)):
                if (below := texts.get(above.drafter_session)) is not None:
                    assert below.text[: below.committed] == above.text, "a cut goes all the way down"

    def finish(self) -> None:
        """Deliver fairly, pass by pass, bottom to top and two passes of a drafter to one of its verifier."""
        begin, missing = self.passes, self.first.prompt_len + self.first.params.max_tokens - len(self.full.text)
        while not self.full.done:
            for level in range(self.top + 1):
                for _ in range(2 ** (self.top - level)):
                    self.settle()
                    self.score(level)
        assert self.passes - begin <= missing + len(self.first.tokens), "a pass of the full tier gave no token"
        self.settle()

    def leave(self) -> None:
        """The client goes; nothing of it is left anywhere."""
        self.loops[-1].receive(Close(self.name), None, self.now)
        self.settle()
        for level, loop in enumerate(self.loops):
            assert not self.slots(level)
            check_memory(loop.kv_admission)
            assert loop.kv_admission.block_manager.lent == 0

    def check(self) -> None:
        for level, loop in enumerate(self.loops):
            check_memory(loop.kv_admission, self.slots(level))
            for slot in self.slots(level):
                check_slot(slot, self.models[level])


def check_slot(slot: Slot[int], model: ToyModel) -> None:
    """What must hold between any two messages."""
    session = slot.session
    first, text = session.spec, session.text
    assert first.prompt_len <= session.committed <= len(text)
    assert 0 <= session.kv_len < len(text)
    if slot.allocation is not None:
        assert slot.cache.tokens[: session.kv_len] == text[: session.kv_len], "stale entries in the cache"  # type: ignore[attr-defined]
    for branch, fork in slot.forks.items():
        assert fork.store.tokens == branch.tokens[: branch.kv_len - branch.start], "a fork holds its branch"
    limit = first.prompt_len + first.params.max_tokens
    assert len(text) <= max(limit, len(first.tokens))
    for p in range(session.committed, len(text)):
        assert text[p] == model.own(tuple(text[max(0, p - model.order) : p]), p, first.params), "not its own token"
    if session.level == 0:
        assert not session.guesses.draft


GUESSED: dict[str, st.SearchStrategy[Any]] = {  # by nobody
    "level": st.integers(0, 4),
    "tokens": st.lists(st.integers(-1, VOCAB), max_size=30),
    "num_right": st.integers(0, 4),
    "back": st.none() | st.integers(1, 3),
}


class Wires(RuleBasedStateMachine):
    """Any interleaving of passes, messages, losses and nonsense; in the end the text must be the full tier's alone."""

    @initialize(
        num_tiers=st.integers(2, 5),
        windows=st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 7, 1000])),
        temperature=st.sampled_from([0.0, 1.0]),
        max_tokens=st.integers(1, 24),
        ends=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        branches=st.sampled_from([0, 1, 3, 8]),
    )
    def begin(
        self, num_tiers: int, windows: tuple[int, int], temperature: float, max_tokens: int, ends: frozenset[int], branches: int
    ) -> None:
        draft_window, window = windows
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=7)
        first = opening(params=params, ends=ends, window=window, draft_window=draft_window, draft_branches=branches)
        self.chain = Chain(toys(num_tiers), first)

    @rule(level=st.integers(0, 4), max_tokens=st.integers(1, 12))
    def score(self, level: int, max_tokens: int) -> None:
        self.chain.score(min(level, self.chain.top), max_tokens)

    @rule(level=st.integers(0, 4), times=st.integers(1, 3))
    def obey(self, level: int, times: int) -> None:
        for _ in range(times):
            self.chain.obey(min(level, self.chain.top))

    @rule(level=st.integers(0, 4), index=st.integers(0, 9), keep=st.booleans())
    def hear(self, level: int, index: int, keep: bool) -> None:
        self.chain.hear(min(level, self.chain.top), index, keep=keep)

    @rule()
    def settle(self) -> None:
        self.chain.settle()

    @rule(level=st.integers(0, 4))
    def lose(self, level: int) -> None:
        if level < self.chain.top:  # the answer's link loses nothing
            self.chain.up[level].clear()

    def guess(self, slot: Slot[int], tokens: list[int], num_right: int, back: int | None) -> Draft:
        """A line or tree that no drafter made; the first ``num_right`` guesses are true."""
        session, model, text = slot.session, self.chain.models[slot.session.level], list(slot.session.text)
        for p in range(len(text), len(text) + num_right):
            text.append(model.own(tuple(text[max(0, p - model.order) :]), p, session.spec.params))
        tokens = text[len(session.text) :] + tokens
        parents = () if back is None else tuple(max(-1, node - back) for node in range(len(tokens)))
        return Draft(tuple(tokens), bytes(len(tokens)), bytes(len(tokens)), parents)

    @rule(start=st.integers(-3, 30), **GUESSED)
    def babble(self, level: int, start: int, tokens: list[int], num_right: int, back: int | None) -> None:
        """A tier below says anything, and voids what it has said."""
        for slot in self.chain.slots(min(level, self.chain.top)):
            if slot.session.drafter:
                draft = self.guess(slot, tokens, num_right, back)
                begin = len(slot.session.text) if num_right else start
                slot.session.propose(Proposal(slot.session.drafter_session, begin, draft))

    @rule(**GUESSED)
    def whisper(self, level: int, tokens: list[int], num_right: int, back: int | None) -> None:
        """A drafter inside a tier guesses anything, beside what the tier below does."""
        for slot in self.chain.slots(min(level, self.chain.top)):
            session, draft = slot.session, self.guess(slot, tokens, num_right, back)
            session.hint([Hint("inside", Calibration(), draft), Hint("fool", Calibration(), Draft((1, 2), bytes(2)))])
            assert session.changed_from == len(session.text)

    @precondition(lambda self: self.chain.num_opened < 12)
    @rule(level=st.integers(1, 4))
    def replace_drafter(self, level: int) -> None:
        self.chain.fail(min(level, self.chain.top))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "chain"):
            self.chain.check()

    def teardown(self) -> None:
        if hasattr(self, "chain"):
            self.chain.finish()
            assert self.chain.full.text == full_text(self.chain.models[-1], self.chain.first)
            edges = [edge for edge in self.chain.full.edges if edge.verifier == self.chain.full.tier]
            assert sum(edge.emitted for edge in edges) == len(self.chain.full.text) - self.chain.first.prompt_len
            assert sum(edge.passes for edge in edges) == self.chain.passes - self.chain.chunks
            assert all(edge.accepted <= edge.proposed for edge in edges)
            assert sum(edge.emitted for edge in edges) == sum(edge.passes + edge.accepted for edge in edges)
            self.chain.leave()


class TestWires(Wires.TestCase):  # type: ignore[misc,name-defined]
    """Guards losslessness: text, cache, limits and totals, for any order of passes and messages."""

    settings = settings(max_examples=examples(1.3), stateful_step_count=40)


@given(
    num_tiers=st.integers(2, 5),
    draft_window=st.integers(1, 8),
    max_tokens=st.integers(1, 30),
    ends=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
)
def test_a_chain_never_deadlocks(num_tiers: int, draft_window: int, max_tokens: int, ends: frozenset[int]) -> None:
    """Guards against tiers that wait for each other: without losses some tier can always go on, with no patience."""
    first = opening(max_tokens, draft_window=draft_window, ends=ends)
    chain = Chain(toys(num_tiers), first, step_s=0.0)
    while not chain.full.done:
        chain.settle()
        moved = [chain.score(level) for level in range(num_tiers)]
        assert any(moved), "every tier waits for another"
        chain.check()
    assert chain.full.text == full_text(chain.models[-1], chain.first)

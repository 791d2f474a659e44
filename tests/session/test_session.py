"""The session: the text is the full tier's alone, whatever the messages do on their way."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.toy import ToyCache, ToyFork, ToyModel, full_text
from cascade.draft import Draft
from cascade.messages import RUNNER_UPS, Close, Commit, Edge, Message, Open, Proposal, origin
from cascade.params import SamplingParams
from cascade.planner.acceptance import Calibration, DraftStats, RunAhead
from cascade.scorer import Row, Scored
from cascade.session.branches import Branch
from cascade.session.guesses import Hint
from cascade.session.session import ProtocolError, Session
from cascade.session.work import Work
from tests.cases import examples

VOCAB = 12
AGREEMENTS = (0.5, 0.6, 0.7, 0.85)  # of the tiers below the full one, bottom to top


def toys(num_tiers: int, *, same: bool = False) -> list[ToyModel]:
    """Models bottom to top; their order makes a wrong entry in a cache show for many tokens."""
    shares = (1.0,) * 4 if same else AGREEMENTS
    return [ToyModel(VOCAB, order=6, agreement=share) for share in (*shares[5 - num_tiers :], 1.0)]


def opening(max_tokens: int = 24, **changes: object) -> Open:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=1)
    plain = Open("s", (1, 2, 3), 3, params, tier="full", window=1000, draft_window=5)
    return replace(plain, **changes)  # type: ignore[arg-type]


def fed(work: Work) -> list[int]:
    """All tokens of a row."""
    return [*work.tokens, *work.draft.tokens]


class Chain:
    """Sessions bottom to top with toy models and the messages that are on their way."""

    def __init__(self, models: Sequence[ToyModel], first: Open) -> None:
        self.models = models
        self.first = first
        self.top = len(models) - 1
        self.sessions: list[Session | None] = [None] * len(models)
        self.caches = [ToyCache() for _ in models]
        self.down: list[deque[Message]] = [deque() for _ in models]  # to the session of that level
        self.up: list[list[Proposal]] = [[] for _ in models]  # from the session of that level
        self.forks: list[dict[Branch, ToyFork]] = [{} for _ in models]
        self.passes = self.chunks = 0  # of the full tier, and those of them that gave no token
        self.num_opened = 0
        self.down[self.top].append(first)
        self.obey(self.top)

    @property
    def full(self) -> Session:
        session = self.sessions[self.top]
        assert session is not None
        return session

    def attach(self, level: int) -> None:
        """Let the session at ``level`` draft with the tier below, for the first time or again."""
        session = self.sessions[level]
        if level and session is not None and not session.done:
            self.detach(level)
            self.num_opened += 1
            self.down[level - 1].append(session.attach(f"tier{level - 1}", str(self.num_opened), ()))

    def detach(self, level: int) -> None:
        session = self.sessions[level]
        closing = session.detach() if session is not None else None
        if closing is not None:
            self.down[level - 1].append(closing)

    def obey(self, level: int) -> None:
        """Deliver the next message from above."""
        if not self.down[level]:
            return
        message = self.down[level].popleft()
        session = self.sessions[level]
        if isinstance(message, Open):
            session = Session(message, f"tier{level}", level, VOCAB)
            self.sessions[level], self.caches[level], self.forks[level] = session, ToyCache(), {}
            self.attach(level)
        elif session is None or message.session != session.opening.session:
            return
        elif isinstance(message, Close):
            self.detach(level)
            self.sessions[level] = None
        elif isinstance(message, Commit):
            change = session.commit(message.start, message.tokens)
            self.settle_branches(level, session)
            self.pass_on(level, change)

    def hear(self, level: int, index: int, *, keep: bool = False) -> None:
        """Deliver any proposal of the session at ``level``, and have it come again later if ``keep``."""
        proposals = self.up[level]
        if not proposals:
            return
        proposal = proposals[index % len(proposals)]
        if not keep:
            proposals.remove(proposal)
        if level == self.top:
            start = self.full.committed
            tokens = proposal.draft.tokens[start - proposal.start :]
            if tokens:
                self.down[level].append(Commit(self.first.session, start, tokens))
        elif (above := self.sessions[level + 1]) is not None:
            above.propose(proposal)

    def score(self, level: int, max_tokens: int = 1000) -> bool:
        """One pass of the session at ``level``, if it has work."""
        session = self.sessions[level]
        if session is None:
            return False
        self.branch(level, session)
        if session.stalled:
            return False
        work = session.work(max_tokens)
        assert len(work) <= max_tokens
        runner_ups = RUNNER_UPS if session.branches is not None else 0
        options = {"draft": work.draft, "runner_ups": runner_ups}
        row = Row(self.caches[level], work.start, work.tokens, work.num_own, session.opening.params, **options)  # type: ignore[arg-type]
        [scored] = self.models[level].run([row])
        commit = session.advance(work, scored)
        assert commit is None or session.num_pending == 1, "the last token, and only that, is scored by the next pass"
        self.pass_on(level, commit)
        if commit is not None and (proposal := session.proposal()) is not None:
            self.up[level].append(proposal)
        self.passes += level == self.top
        self.chunks += level == self.top and commit is None
        return True

    def branch(self, level: int, session: Session) -> None:
        """Write the likeliest branch of the session on, if it has any, and a new one with it."""
        ways = sorted(session.branch_candidates(), key=lambda way: -way[0])[:2]
        works = [session.branch_work(branch) for _, branch in ways]
        self.sweep(level, session)
        for work in works:
            branch = work.branch
            assert branch is not None
            assert session.branches is not None
            if branch not in session.branches.held:
                continue  # another has taken its place
            fork = self.forks[level].get(branch) or self.caches[level].fork(branch.start)
            self.forks[level][branch] = fork
            row = Row(fork, work.start, work.tokens, work.num_own, session.opening.params, runner_ups=RUNNER_UPS)
            [scored] = self.models[level].run([row])
            assert session.advance(work, scored) is None
            assert fork.tokens == branch.tokens[:-1], "a fork holds its branch"

    def sweep(self, level: int, session: Session) -> None:
        """Free the forks of branches that are gone."""
        held = session.branches.held if session.branches is not None else []
        for branch in [branch for branch in self.forks[level] if branch not in held]:
            self.forks[level].pop(branch).free()

    def settle_branches(self, level: int, session: Session) -> None:
        """Do after a commit what `cascade.tier.kv_admission.KVAdmission.settle` does."""
        if session.accepted_branch is not None and (fork := self.forks[level].pop(session.accepted_branch, None)) is not None:
            session.kv_len = session.accepted_branch.kv_len
            self.caches[level].join(fork)
        session.accepted_branch = None
        self.sweep(level, session)
        assert self.caches[level].tokens[: session.kv_len] == session.text[: session.kv_len], "the cache holds the text"

    def pass_on(self, level: int, commit: Commit | None) -> None:
        session = self.sessions[level]
        if commit is not None and session is not None and session.drafter:
            self.down[level - 1].append(commit)

    def settle(self) -> None:
        """Deliver everything, in order."""
        while any(self.down) or any(self.up):
            for level in reversed(range(self.top + 1)):
                while self.down[level]:
                    self.obey(level)
                while self.up[level]:
                    self.hear(level, 0)
        for above, below in zip(self.sessions[1:], self.sessions, strict=False):
            if above is not None and below is not None and below.opening.session == above.drafter_session:
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

    def check(self) -> None:
        for level, session in enumerate(self.sessions):
            if session is not None:
                check_session(session, self.models[level], self.caches[level])


def check_session(session: Session, model: ToyModel, cache: ToyCache) -> None:
    """What must hold between any two messages."""
    first, text = session.opening, session.text
    assert first.prompt_len <= session.committed <= len(text)
    assert 0 <= session.kv_len < len(text)
    assert cache.tokens[: session.kv_len] == text[: session.kv_len], "stale entries in the cache"
    assert len(session._origins) == len(text)
    assert len(session.guesses.draft.origins) == len(session.guesses.draft)
    limit = first.prompt_len + first.params.max_tokens
    assert len(text) <= max(limit, len(first.tokens))
    for p in range(session.committed, len(text)):
        assert text[p] == model.own(tuple(text[max(0, p - model.order) : p]), p, first.params), "not its own token"
    if (proposal := session.proposal()) is not None:
        assert len(proposal.draft.origins) == len(proposal.draft.tokens)
    if session.drafter == "" and session.level == 0:
        assert not session.guesses.draft


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

    @rule(
        level=st.integers(1, 4),
        start=st.integers(-3, 30),
        tokens=st.lists(st.integers(-1, VOCAB), max_size=30),
        num_right=st.integers(0, 4),
        back=st.none() | st.integers(1, 3),
    )
    def babble(self, level: int, start: int, tokens: list[int], num_right: int, back: int | None) -> None:
        """Lines and trees that no tier made; the first ``num_right`` guesses are true, and void what the drafter says."""
        level = min(level, self.chain.top)
        session, model = self.chain.sessions[level], self.chain.models[level]
        if session is None or not session.drafter:
            return
        if num_right:
            start, text = len(session.text), list(session.text)
            for p in range(start, start + num_right):
                text.append(model.own(tuple(text[max(0, p - model.order) :]), p, session.opening.params))
            tokens = text[start:] + tokens
        parents = () if back is None else tuple(max(-1, node - back) for node in range(len(tokens)))
        session.propose(Proposal(session.drafter_session, start, Draft(tuple(tokens), bytes(len(tokens)), parents=parents)))

    @rule(
        level=st.integers(0, 4),
        tokens=st.lists(st.integers(-1, VOCAB), max_size=20),
        num_right=st.integers(0, 4),
        back=st.none() | st.integers(1, 3),
    )
    def whisper(self, level: int, tokens: list[int], num_right: int, back: int | None) -> None:
        """A drafter inside a tier guesses anything, beside what the tier below does."""
        level = min(level, self.chain.top)
        session, model = self.chain.sessions[level], self.chain.models[level]
        if session is None:
            return
        text = list(session.text)
        for p in range(len(text), len(text) + num_right):
            text.append(model.own(tuple(text[max(0, p - model.order) :]), p, session.opening.params))
        tokens = text[len(session.text) :] + tokens
        parents = () if back is None else tuple(max(-1, node - back) for node in range(len(tokens)))
        draft = Draft(tuple(tokens), bytes(len(tokens)), bytes(len(tokens)), parents)
        session.hint([Hint("inside", Calibration(), draft), Hint("fool", Calibration(), Draft((1, 2), bytes(2)))])
        assert session.changed_from == len(session.text)

    @precondition(lambda self: self.chain.num_opened < 12)
    @rule(level=st.integers(1, 4), again=st.booleans())
    def replace_drafter(self, level: int, again: bool) -> None:
        level = min(level, self.chain.top)
        if again:
            self.chain.attach(level)
        else:
            self.chain.detach(level)

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


class TestWires(Wires.TestCase):  # type: ignore[misc,name-defined]
    """Guards losslessness: text, cache, limits and totals, for any order of passes and messages."""

    settings = settings(max_examples=examples(2), stateful_step_count=40)


@pytest.mark.parametrize("num_tiers", [2, 3, 5])
def test_identical_models_accept_everything(num_tiers: int) -> None:
    """Guards the cache of a fully accepted window: were its last token never fed, acceptance would fall, not the text."""
    chain = Chain(toys(num_tiers, same=True), opening(200))
    chain.finish()
    edges = chain.full.edges
    assert len(edges) == num_tiers
    assert all(edge.accepted == edge.proposed for edge in edges)
    assert all(edge.accepted for edge in edges if edge.drafter)
    for edge in edges:  # a pass that accepts its second guess accepted its first one; windows are shorter than 16 here
        assert sum(edge.accepted_by_position) == edge.accepted
        assert list(edge.accepted_by_position) == sorted(edge.accepted_by_position, reverse=True)
    assert chain.passes < 200 / 2.5  # nor does it fall with the length of the text


@given(
    num_tiers=st.integers(2, 5),
    draft_window=st.integers(1, 8),
    max_tokens=st.integers(1, 30),
    ends=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
)
def test_lockstep_never_deadlocks(num_tiers: int, draft_window: int, max_tokens: int, ends: frozenset[int]) -> None:
    """Guards against a window that is never called full: without losses some tier can always go on, with no patience."""
    chain = Chain(toys(num_tiers), opening(max_tokens, draft_window=draft_window, ends=ends, lockstep=True))
    while not chain.full.done:
        chain.settle()
        moved = [chain.score(level) for level, s in enumerate(chain.sessions) if s is not None and ready(s)]
        assert any(moved), "every tier waits for another"
        chain.check()
    assert chain.full.text == full_text(chain.models[-1], chain.first)


def ready(session: Session) -> bool:
    return not session.drafter or session.prefilling or not session.max_depth or session.window_full


def test_proposals_are_few_and_hold_back_little() -> None:
    """Guards both ends of the rule: a message for every own token costs a small tier more than its passes, and a verifier must
    never lack more than a quarter of what there is, nor anything once the drafter has stopped."""
    session = Session(opening(200, window=64), "tiny", 0, VOCAB)
    told, messages = len(session.text), 0
    while not session.stalled:
        work = session.work(10)
        session.advance(work, Scored([7] * work.num_scored))
        proposal = session.proposal()
        if proposal is not None:
            assert proposal.start == 3
            told, messages = proposal.start + len(proposal.draft.tokens), messages + 1
        assert 4 * (len(session.text) - told) < len(session.text) - 3
    assert told == len(session.text) == 3 + 64
    assert messages < 64 / 3
    assert session.proposal() is None
    session.commit(3, [7, 7, 9])
    assert session.proposal() is None
    work = session.work(10)
    session.advance(work, Scored([7] * work.num_scored))
    proposal = session.proposal()
    assert proposal is not None
    assert (proposal.start, proposal.draft.tokens) == (6, (7,))


def test_lost_proposals_do_not_stall_drafting() -> None:
    """Guards liveness: the next proposal makes a lost one good, even where the drafter had used up its window."""
    chain = Chain(toys(3, same=True), opening(120))
    chain.settle()
    for _ in range(20):  # both drafters run into their windows and nothing arrives
        for level in (0, 1):
            chain.score(level)
            chain.up[level].clear()
    assert all(session is not None and session.stalled for session in chain.sessions[:2])
    begin = len(chain.full.text)
    chain.finish()
    assert chain.passes < (120 + 3 - begin) / 2


def test_ended_drafter_goes_on_when_corrected() -> None:
    """Guards a session that said its end and was overruled: it must forget the end and draft on."""
    session = Session(opening(ends=frozenset([9])), "tier0", 0, VOCAB)
    session.advance(session.work(10), Scored([9]))
    assert session.done
    assert session.stalled
    session.commit(3, [4, 5])
    assert not session.done
    assert session.text == [1, 2, 3, 4, 5]
    assert fed(session.work(10)) == [4, 5]
    assert session.kv_len == 3


def drafting(first: Open) -> Session:
    """A session with a drafter whose session is called d."""
    session = Session(first, "full", 1, VOCAB)
    session.attach("tiny", "d", ())
    return session


@pytest.mark.parametrize(
    ("start", "guess", "commit", "left"),
    [
        (3, (4, 5, 6), (4, 5), (6,)),  # what it has foretold
        (3, (4, 5, 6), (4, 7), ()),
        (4, (7, 8), (7,), ()),  # a guess for the text that is cut, though it looks like the new one
    ],
)
def test_commits_keep_the_guesses_that_foretold_them(
    start: int, guess: tuple[int, ...], commit: tuple[int, ...], left: tuple[int, ...]
) -> None:
    """Guards the work of the tier below against news that it has foretold, and a text against guesses for another one."""
    session = drafting(opening())
    if start > 3:
        session.advance(session.work(10), Scored([4]))
    session.propose(Proposal("d", start, Draft(guess, bytes(len(guess)))))
    session.commit(3, commit)
    assert (session.text, session.guesses.draft.tokens) == ([1, 2, 3, *commit], left)
    session.commit(3, commit[:1])  # says nothing new
    assert (session.committed, session.guesses.draft.tokens) == (3 + len(commit), left)


@pytest.mark.parametrize("num_own", [1, 2, 3, 4])
def test_guesses_that_were_not_scored_are_kept(num_own: int) -> None:
    """Guards rows whose last guesses could not be scored: they are neither accepted nor lost, and count as not proposed."""
    session = Session(opening(), "full", 1, VOCAB)
    below = session.attach("tiny", "below", ())
    session.propose(Proposal(below.session, 3, Draft((4, 5, 6), bytes(3))))
    commit = session.advance(session.work(10), Scored([4, 5, 6, 7][:num_own]))
    assert commit == Commit("below", 3, (4, 5, 6, 7)[:num_own])
    assert (session.text[3:], list(session.guesses.draft.tokens)) == ([4, 5, 6, 7][:num_own], [4, 5, 6][num_own:])
    assert session.kv_len == len(session.text) - 1
    assert session.edges[0].proposed == session.edges[0].accepted == num_own - 1
    if session.guesses.draft:
        assert fed(session.work(10)) == [session.text[-1], *session.guesses.draft.tokens]


@pytest.mark.parametrize("start", [-1, 2, 4])
def test_commit_that_does_not_join_is_an_error(start: int) -> None:
    """Guards the text against a broken link: a commit in the prompt or after a gap is refused."""
    session = Session(opening(), "full", 0, VOCAB)
    with pytest.raises(ProtocolError):
        session.commit(start, [1])
    with pytest.raises(ProtocolError):
        session.commit(3, [])


@pytest.mark.parametrize(
    ("start", "tokens", "guess"),
    [
        (3, (4, 5), [4, 5]),
        (1, (2, 3, 4), [4]),  # begins inside the text
        (1, (2, 9, 4), []),  # contradicts it
        (4, (5,), []),  # after a gap
        (-5, (0,) * 9, []),
        (2, (3,), []),  # nothing new
        (3, (4, VOCAB, 5), [4]),  # a token that this tier does not have
        (3, (-1, 5), []),
        (3, (), []),
    ],
)
def test_only_guesses_that_join_are_kept(start: int, tokens: tuple[int, ...], guess: list[int]) -> None:
    """Guards the embedding against ids it does not have, and the window against guesses for another text."""
    session = drafting(opening())
    session.propose(Proposal("d", start, Draft(tokens, bytes(len(tokens)))))
    assert list(session.guesses.draft.tokens) == guess
    session.propose(Proposal("stranger", 3, Draft((7, 7), bytes(2))))
    assert list(session.guesses.draft.tokens) == guess


def test_totals_of_two_drafters_are_kept_apart() -> None:
    """Guards metrics: a drafter is not praised or blamed for guesses of the one before, and a late message has old totals."""
    session = drafting(opening())
    session.propose(Proposal("d", 3, Draft((4,), bytes(1)), (Edge("", "tiny", passes=2, emitted=2),)))
    session.propose(Proposal("d", 3, Draft((4,), bytes(1)), (Edge("", "tiny", passes=1, emitted=1),)))
    session.advance(session.work(10), Scored([4, 5]))
    session.attach("medium", "e", ())
    session.advance(session.work(10), Scored([6]))
    session.propose(Proposal("e", 3, Draft((4,), bytes(1)), (Edge("", "medium", passes=1, emitted=1),)))
    totals = {(edge.drafter, edge.verifier): (edge.passes, edge.accepted, edge.emitted) for edge in session.edges}
    assert totals == {
        ("tiny", "full"): (1, 1, 2),
        ("medium", "full"): (1, 0, 1),
        ("", "tiny"): (2, 0, 2),
        ("", "medium"): (1, 0, 1),
    }


def test_totals_are_whole_at_the_end_of_a_text() -> None:
    """Guards statistics of answers: totals that are not sent with every proposal must not lack the last passes."""
    session = Session(opening(max_tokens=20), "full", 0, VOCAB)
    told: list[int] = []
    while not session.stalled:
        session.advance(session.work(10), Scored([4]))
        proposal = session.proposal()
        assert proposal is not None
        told += [edge.passes for edge in proposal.edges]
        session.commit(proposal.start, proposal.draft.tokens)
    assert told[0] == 1
    assert told[-1] == 20
    assert len(told) < 10


def test_agreement_does_not_depend_on_how_much_was_scored() -> None:
    """Guards the alarm on drafters: guesses that a pass had no room for are judged, too, each once."""
    for most in (1, 2, 3, 10):
        session = drafting(opening())
        session.propose(Proposal("d", 3, Draft((4, 5, 6, 7), bytes(4))))
        own, bare = [4, 5, 6, 8], 0
        while len(session.text) < 7:
            work = session.work(most)
            done = len(session.text) - 3
            bare += bool(work.num_own) and not work.draft
            session.advance(work, Scored(own[done : done + work.num_scored]))
        [edge] = session.edges
        assert (edge.agreed, edge.corrected, edge.agreement) == (3, 1, 0.75)
        assert edge.undrafted_passes == bare


def test_origins_tell_who_said_it_first() -> None:
    """Guards the colours of the demonstration: lowest tier of the unbroken chain, and whether it was a correction."""
    session = drafting(opening())
    session.propose(Proposal("d", 3, Draft((4, 5, 6), bytes([origin(0, False)] * 3))))
    session.advance(session.work(10), Scored([4, 8, 0, 0]))
    session.advance(session.work(10), Scored([7]))
    proposal = session.proposal()
    assert proposal is not None
    assert proposal.draft.tokens == (4, 8, 7)
    assert list(proposal.draft.origins) == [origin(0, False), origin(1, True), origin(1, False)]


def test_pace_is_counted_without_a_clock() -> None:
    """Guards the policy's eyes: only guesses that came while the drafter was left alone tell how fast it is."""
    pace = DraftStats(guesses=5.0)
    assert pace.interrupted
    pace.passed(num_guess=2, num_right=2, num_own=3)  # the first ones after a correction
    assert not pace.interrupted
    assert pace.guesses == 5.0
    pace.passed(num_guess=9, num_right=9, num_own=10)
    assert pace.guesses > 5.0
    pace.passed(num_guess=9, num_right=1, num_own=2)
    assert pace.interrupted


def test_chance_of_guesses_follows_what_was_right() -> None:
    """Guards the policy against waiting for guesses that are wrong after every correction."""
    good, bad = DraftStats(), DraftStats()
    for _ in range(20):
        good.passed(num_guess=4, num_right=3, num_own=4)
        bad.passed(num_guess=4, num_right=0, num_own=1)
    assert good.chance(0) == bad.chance(0) == 1
    assert good.chance(1) > 0.9
    assert good.chance(3) < good.chance(2) < good.chance(1)
    assert bad.chance(1) < 0.1


def test_drafter_that_is_corrected_runs_less_far_ahead() -> None:
    """Guards shared devices: passes for tokens that will hardly be kept take time from tiers that need it."""
    params = SamplingParams(max_tokens=500, temperature=0, seed=0)
    for lockstep, expected in ((False, range(2, 12)), (True, range(16, 17))):
        session = Session(Open("s", (1,), 1, params, window=16, lockstep=lockstep), "tiny", 0, 32)
        assert session.window == 16
        for _ in range(30):  # the tier above keeps one token and corrects the next
            while not session.stalled:
                work = session.work(512)
                session.advance(work, Scored([7] * work.num_scored))
            start = session.committed
            session.commit(start, (7, 8))
        assert session.window in expected


def test_of_a_tree_the_likeliest_nodes_are_scored() -> None:
    """Guards trees in short passes: what is scored comes with its parents, the likeliest first, and keeps its shape."""
    session = drafting(opening())
    session.propose(Proposal("d", 3, Draft((4, 5, 6, 7), bytes(4), bytes((255, 1, 16, 255)), parents=(-1, 0, 0, 2))))
    assert session.work(10).draft == Draft((4, 5, 6, 7), bytes(4), bytes((255, 1, 16, 255)), (-1, 0, 0, 2))
    assert fed(session.work(5)) == [1, 2, 3, 4, 5]
    session.advance(session.work(10), Scored([4, 6, 0, 7, 8]))
    assert session.text[3:] == [4, 6, 7, 8]


@pytest.mark.parametrize("left", [False, True])
def test_what_a_drafter_inside_guesses_is_scored_next(left: bool) -> None:
    """Guards hints: they are guesses like those of the tier below, and void once the text has gone on.

    What the tier below had guessed before it was left counted for nobody beside them.
    """
    session = drafting(opening())
    session.advance(session.work(10), Scored([4]))
    session.hint([Hint("inside", Calibration(), Draft((5, 6), bytes(2)))])
    session.propose(Proposal("d", 4, Draft((5, 7), bytes(2))))
    if left:
        session.detach()
    work = session.work(10)
    assert fed(work) == [4, 5, 7, 6]
    assert work.drafters == ("", "", "inside")
    session.advance(work, Scored([5, 6, 0, 9]))
    assert session.text[3:] == [4, 5, 6, 9]
    assert not session.guesses.hints
    counts = {edge.drafter: (edge.passes, edge.proposed, edge.accepted) for edge in session.edges}
    assert counts == {"inside": (0, 1, 1)} | ({"tiny": (1, 0, 0), "": (1, 2, 1)} if left else {"tiny": (2, 2, 1)})


@pytest.mark.parametrize("cut", [True, False])
def test_a_verdict_of_long_ago_is_no_error(cut: bool) -> None:
    """Guards long texts: after 1,300 verdicts of one kind the other was lost in rounding, and the tier failed."""
    run_ahead = RunAhead()
    run_ahead.judged(1, cut=not cut)
    for _ in range(30_000):
        run_ahead.judged(0 if cut else 1, cut=cut)
        assert run_ahead.tokens >= 0
    assert run_ahead.tokens < 1 if cut else run_ahead.tokens > 1e6

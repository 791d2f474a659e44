"""The tier loop in real threads with toy models: same text whatever happens, and nothing left behind."""

import contextlib
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cascade.answer import Answer
from cascade.draft import Draft
from cascade.engine.sampling.state import state_maker
from cascade.messages import Close, Commit, Failed, Link, Message, Open, SessionSpec, mint
from cascade.params import SamplingParams
from cascade.planner.choice import Policy
from cascade.planner.cost import Profile
from cascade.scorer import Row, RowState, RunnerUp, Scored
from cascade.simulation.toy_tier import TokenStore
from cascade.tier import runner
from cascade.tier.kv_admission import KVAdmission
from cascade.tier.local_links import join
from cascade.tier.loop import Limits, Loop
from cascade.tier.runner import FACTOR, GRACE_S, Watchdog, row_of
from cascade.tier.slot import Slot
from cascade.tier.tier import Tier
from tests.books import check_memory
from tests.toys import ToyCache, ToyModel, full_text
from tests.waiting import LONG_S, wait_until

NAMES = ("tiny", "medium", "full")
PROMPT = (1, 2, 3, 4, 5)


class Silent:
    """A decoder for texts that nobody reads."""

    def step(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Inbox(Link):
    """The router's end of a link."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.failures: list[Failed] = []

    def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.messages.put(message)
            if isinstance(message, Failed):
                self.failures.append(message)


class CountingModel(ToyModel):
    """Knows its caches, and fails on demand."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options)
        self.caches: list[ToyCache] = []
        self.poison: int | None = None  # passes with a row whose text has this token fail
        self.room: int | None = None  # tokens of a pass that there is memory for

    def new_cache(self) -> ToyCache:
        self.caches.append(super().new_cache())
        return self.caches[-1]

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        assert all(token < self.vocab_size for row in rows for token in row.input_ids), "it has no embedding of such tokens"
        if any(self.poison in row.tokens for row in rows):  # among guesses it may be in anyone's row
            raise RuntimeError("poison")
        if self.room is not None and sum(len(row.input_ids) for row in rows) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().launch(rows)

    @property
    def leaks(self) -> int:
        return sum(not cache.freed for cache in self.caches)


@pytest.fixture
def models() -> list[CountingModel]:
    return [
        CountingModel(agreement=0.6, pass_s=0.0002),
        CountingModel(agreement=0.8, pass_s=0.001),
        CountingModel(pass_s=0.004),
    ]


def running(tiers: list[Tier]) -> Iterator[list[Tier]]:
    """Tiers that are joined and run; after it nothing is left in them."""
    join(tiers)
    for tier in tiers:
        tier.start()
    yield tiers
    settle(tiers)
    for tier in tiers:
        check_memory(tier.kv_admission)
    for tier in reversed(tiers):
        tier.close()


@pytest.fixture
def tiers(models: list[CountingModel]) -> Iterator[list[Tier]]:
    tiers = [Tier(name, level, model) for level, (name, model) in enumerate(zip(NAMES, models, strict=True))]
    yield from running(tiers)
    assert [model.leaks for model in models] == [0, 0, 0]
    assert not [t for t in threading.enumerate() if t.name.startswith("tier-")]


def opening(seed: int = 1, temperature: float = 1.0, max_tokens: int = 40, **options: object) -> Open:
    params = SamplingParams(seed=seed, temperature=temperature, max_tokens=max_tokens)
    fields: dict[str, object] = {"chain": ("medium", "tiny"), "window": 4096, "draft_window": 8, **options}
    spec = SessionSpec(PROMPT, len(PROMPT), params)
    return Open(mint(), replace(spec, **fields))


def finish(tier: Tier, inbox: Inbox, answers: dict[str, Answer]) -> None:
    """Take proposals until all answers are complete, replaying those whose session fails."""
    while answers:
        message = inbox.messages.get(timeout=LONG_S)
        answer = answers.get(message.session)
        if answer is None:
            continue
        if isinstance(message, Failed):
            del answers[message.session]
            again = Open(mint(), answer.spec.after(answer.tokens))
            answers[again.session] = answer
            tier.post([again], inbox)
            continue
        _, commit = answer.receive(message)
        if answer.finished:
            del answers[message.session]
            tier.post([Close(message.session)])
        elif commit is not None:
            tier.post([commit])


def answered(tier: Tier, *requests: Open) -> tuple[list[Answer], Inbox]:
    """The answers to requests that come at once, and where they came."""
    inbox, answers = Inbox(), [Answer(request.spec, Silent()) for request in requests]
    tier.post(requests, inbox)
    finish(tier, inbox, {request.session: answer for request, answer in zip(requests, answers, strict=True)})
    return answers, inbox


def written(tier: Tier, *requests: Open) -> tuple[list[Answer], Inbox]:
    """The same, each with the text that the full toy writes alone."""
    answers, inbox = answered(tier, *requests)
    for request, answer in zip(requests, answers, strict=True):
        whole = [*request.spec.tokens[: request.spec.prompt_len], *answer.tokens]
        assert whole == full_text(ToyModel(), request.spec.after(()))
    return answers, inbox


@contextlib.contextmanager
def alone(model: Any, **options: Any) -> Iterator[Tier]:
    """A tier by itself; after it nothing is left in it."""
    tier = Tier("full", 0, model, **options)
    tier.start()
    try:
        yield tier
        settle([tier])
        check_memory(tier.kv_admission)
    finally:
        tier.close()


def loop_of(name: str, level: int, **options: Any) -> Loop[Any]:
    """A tier's loop without a thread or a model."""
    given: dict[str, Any] = {"profile": Profile(), "send_up": lambda up, message: None, "send_down": lambda tier, message: None}
    limits = Limits(32, 4096, Policy(), options.pop("new_state", None))
    return Loop(name, level, limits, KVAdmission(options.pop("new_store", ToyCache), 1 << 20), **given | options)


def refusal(tier: Tier, request: Open) -> Failed:
    inbox = Inbox()
    tier.post([request], inbox)
    message = inbox.messages.get(timeout=LONG_S)
    assert isinstance(message, Failed)
    return message


def settle(tiers: Sequence[Tier]) -> None:
    """Wait until Closes have reached the bottom."""
    wait_until(lambda: not any(tier.num_sessions for tier in tiers), lambda: [tier.num_sessions for tier in tiers])


def test_companions_share_passes(tiers: list[Tier], models: list[CountingModel]) -> None:
    """Guards sessions against each other: many at once give the texts they give alone, in passes that are batched."""
    chains, before = (("medium", "tiny"), ("tiny",), ("medium",), ()), models[-1].passes
    openings = [opening(seed, (0.0, 0.8, 1.5)[seed % 3], 30, chain=chains[seed % 4]) for seed in range(24)]
    for request, answer in zip(openings, written(tiers[-1], *openings)[0], strict=True):
        assert {edge.drafter for edge in answer.edges if edge.verifier == "full"} <= {"", *request.spec.chain[:1]}
    assert models[-1].passes - before < 24 * 30 / 4


def test_poisonous_row_harms_only_itself(tiers: list[Tier], models: list[CountingModel]) -> None:
    """Guards companions of a request whose row breaks the pass."""
    good = opening(1, 0.0, 20)
    good_text = full_text(ToyModel(), good.spec)
    poison = next(token for token in range(32) if token not in good_text)
    bad = opening(2, 0.0, 20, tokens=(1, poison), prompt_len=2)
    models[-1].poison = poison
    inbox, answer = Inbox(), Answer(good.spec, Silent())
    tiers[-1].post([good, bad], inbox)
    finish(tiers[-1], inbox, {good.session: answer})
    assert [failed.session for failed in inbox.failures] == [bad.session]
    assert [*PROMPT, *answer.tokens] == good_text
    assert tiers[-1].healthy


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": (1, 99)}, "32 token ids and the text has others"),
        ({"tokens": (1,) * 5000, "prompt_len": 5000}, "4096 tokens"),
        ({"params": SamplingParams(presence_penalty=1.0, seed=0)}, "honours only temperature"),
        (
            {"tokens": (1,) * 90, "prompt_len": 90, "params": SamplingParams(max_tokens=10, seed=0)},
            "its memory holds 96 tokens in 6 blocks of 16, the request may need 100 in 7",
        ),
    ],
)
def test_impossible_opens_fail_with_a_sentence(fields: dict[str, object], words: str) -> None:
    """Guards the model against rows that would break it, and the caller against a wait for ever, and against a tenth try."""
    with alone(ToyModel(), cache_tokens=100 if "memory" in words else None) as tier:
        message = refusal(tier, opening(**{"prompt_len": 2, **fields}))
        assert words in message.reason
        assert message.fault


def test_a_state_that_cannot_be_made_harms_only_its_request() -> None:
    """Guards the loop against a library of grammars that raises what it likes: it ended, and failed every session."""

    def raises(*of: object) -> RowState:
        raise RuntimeError("out of luck")

    with alone(ToyModel(), new_state=raises) as tier:
        failed = refusal(tier, opening(params=SamplingParams(presence_penalty=1.0, seed=0)))
        assert (failed.reason, failed.fault) == ("out of luck", False)
        written(tier, opening(chain=()))
        assert tier.healthy


def test_stopped_tier_answers() -> None:
    """Guards against an Open that waits for ever because its tier has stopped."""
    tier = Tier("full", 2, ToyModel())
    tier.start()
    tier.close()
    assert "tier full stopped" in refusal(tier, opening()).reason
    assert not tier.healthy


@pytest.mark.parametrize(
    ("poison", "between", "healthy"),
    [(7, False, True), (0, False, False), (0, True, True)],
    ids=["bad rows", "broken", "failures far apart"],
)
def test_broken_model_is_told_from_bad_rows(poison: int, between: bool, healthy: bool) -> None:
    """Guards healthy replicas against requests that nothing can score, and requests against broken replicas."""
    model = CountingModel()
    with alone(model) as tier:
        for number in range(5):
            request = {"tokens": (1, poison) * 20, "prompt_len": 40, "cache_salt": str(number), "chain": ()}
            model.poison = poison  # 0 is in the canary's row
            refusal(tier, opening(**request))
            model.poison = None
            if between:
                written(tier, opening(**request))
        assert tier.healthy == healthy
        assert tier.kv_admission.block_manager.reused == 0
    assert model.leaks == 0


@pytest.mark.parametrize("lack", ["context", "memory", "vocabulary"])
def test_a_tier_too_small_for_one_session_drafts_for_others(lack: str) -> None:
    """Guards a tier below: one session that did not fit there made all others go without it for a while."""
    small = CountingModel()
    small.context_len = 64 if lack == "context" else small.context_len
    small.vocab_size = 24 if lack == "vocabulary" else small.vocab_size
    below = Tier("tiny", 0, small, cache_tokens=64 if lack == "memory" else None)
    for tiers in running([below, Tier("full", 1, CountingModel(pass_s=0.001))]):
        full, num_beyond = tiers[-1], 0
        for max_tokens, drafters in ((90, {"tiny", ""}), (30, {"tiny"})):
            [answer], _ = written(full, opening(max_tokens, 1.0, max_tokens, chain=("tiny",)))
            num_beyond += sum(token >= small.vocab_size for token in answer.tokens)
            assert lack == "vocabulary" or {e.drafter for e in answer.edges if e.verifier == "full"} <= drafters
        assert (num_beyond > 0) == (lack == "vocabulary")
        assert below.stats.failures == 0
        assert not full._loop._drafting._failures


@pytest.mark.parametrize(("room", "prompt_len", "count"), [(17, 400, 1), (100, 400, 1), (20, len(PROMPT), 12)])
def test_what_is_too_much_for_a_pass_is_scored_in_smaller_ones(
    models: list[CountingModel], room: int, prompt_len: int, count: int
) -> None:
    """Guards a long prompt, or a crowd, against a device without memory for all of it: nobody fails, and few passes do."""
    models[-1].room = room
    prompt = tuple(random.Random(1).choices(range(16), k=prompt_len))
    spec = {"tokens": prompt, "prompt_len": prompt_len, "chain": ()}
    requests = [opening(seed, max_tokens=30, **spec) for seed in range(count)]
    with alone(models[-1], max_pass_tokens=256) as tier:
        _, inbox = written(tier, *requests)
        assert inbox.failures == []
        assert 0 < tier.stats.failures < tier.stats.passes / 2
        assert tier.healthy


def test_link_that_raises_harms_only_its_own_sessions(tiers: list[Tier]) -> None:
    """Guards the loop against a link that breaks its word: it must neither end nor lose the sessions of others."""

    class Broken(Link):
        def send(self, messages: Sequence[Message]) -> None:
            raise RuntimeError("the event loop is closed")

    tiers[-1].post([opening(1, 1.0, 2000)], Broken())
    written(tiers[-1], opening(2, 0.5, 60))
    assert tiers[-1].healthy


@pytest.mark.parametrize(("expected_s", "bound_s"), [(0.0, GRACE_S), (0.01, GRACE_S), (4.0, FACTOR * 4.0)])
def test_a_step_may_take_what_the_profile_says(monkeypatch: pytest.MonkeyPatch, expected_s: float, bound_s: float) -> None:
    """Guards slow machines: what a pass was measured to take decides, but for a grace that short ones have, too."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(runner, "time", clock)
    dog = Watchdog()
    assert not dog.hangs
    dog.begin(expected_s)
    clock.now += bound_s - 0.01
    assert not dog.hangs
    clock.now += 0.02
    assert dog.hangs
    dog.begin()
    assert not dog.hangs
    dog.rest()
    clock.now += 1e9
    assert not dog.hangs


class Noted(CountingModel, Link):
    """A model and the link above its tier, which note in one list what happens to them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        self.events.append("launch")
        return super().launch(rows)

    def send(self, messages: Sequence[Message]) -> None:
        self.events.append("send")


def test_a_device_never_waits_for_what_was_decided_to_be_told() -> None:
    """Guards devices: proposals were encoded and sent between the end of a pass and the start of the next."""
    noted = Noted()
    tier = Tier("full", 0, noted)
    tier.post([opening(max_tokens=3)], noted)
    tier.start()
    wait_until(lambda: noted.events.count("send") == 3)
    tier.close()
    assert noted.events[:6] == ["launch", "launch", "send", "launch", "send", "send"], "the last token is followed by no pass"


@pytest.mark.parametrize("others", [0, 1])
def test_sessions_that_leave_before_they_are_told_harm_nobody(others: int) -> None:
    """Guards the loop against a client that hangs up as its pass ends: it divided by the number of sessions."""
    model, sent = ToyModel(), list[Message]()
    loop = loop_of("full", 2, send_up=lambda up, message: sent.append(message))
    first, *rest = (Open(str(number), opening(adaptive=True).spec) for number in range(1 + others))
    for request in (first, *rest):
        loop.receive(request, "router", 0.0)
    batch, _ = loop.schedule(512, 0.0)
    loop.advance(batch, model.run([row_of(*row) for row in batch]), 1.0)
    loop.receive(Close(first.session), None, 1.0)
    loop.settle(1.0)
    assert [message.session for message in sent] == [request.session for request in rest]


def branching(**options: object) -> tuple[Loop[str], Slot[str]]:
    """A session of a drafter that has written 7, 7, and holds a branch after its first token's runner-up 8."""
    loop = loop_of("tiny", 0, new_state=state_maker(), new_store=TokenStore)
    loop.receive(opening(chain=(), branches=1, **options), "full", 0.0)
    for now in (1.0, 2.0):
        batch, _ = loop.schedule(512, now)
        loop.advance(batch, [Scored([7], runner_ups=[[RunnerUp(8, 1.0)]]) for _ in batch], now)
        loop.settle(now)
    [slot] = loop.slots.values()
    [branch] = slot.session.branches.held
    assert branch.tokens == [8, 7]
    return loop, slot


def test_a_branch_that_fails_when_another_takes_its_place_harms_nobody() -> None:
    """Guards the loop: a branch that could not be scored, and was held no more when that was known, ended it."""
    loop, slot = branching()
    slot.session.guesses.draft = Draft((5,), bytes(1))
    batch, _ = loop.schedule(512, 3.0)
    assert [work.branch is None for _, work in batch] == [True, False]
    loop.advance(batch, [Scored([7, 7], runner_ups=[[RunnerUp(5, 0.1)], []]), None], 3.0)
    loop.settle(3.0)
    assert [branch.tokens for branch in slot.session.branches.held] == [[5, 7]]
    loop.receive(Close(slot.session.name), None, 4.0)
    check_memory(loop.kv_admission)


def test_penalties_count_the_branch_that_became_the_text() -> None:
    """Guards guesses: after a correction that a drafter had prepared for, its penalties were those of the text before."""
    loop, slot = branching(params=SamplingParams(presence_penalty=1.0, temperature=0, seed=1, max_tokens=40))
    session, logits = slot.session, torch.zeros(1, 32)
    slot.state.counts(len(session.text), (), logits)  # as the last pass did
    loop.receive(Commit(session.name, len(PROMPT), (8,)), None, 3.0)
    assert session.text[len(PROMPT) :] == [8, 7]
    slot.state.rewind(session.kv_len)  # as the next pass does
    counts = slot.state.counts(len(session.text), (), logits)[0]
    assert counts.nonzero().flatten().tolist() == [7, 8]

"""What goes into a pass: budget, order and shares, without threads, models or clocks."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.draft import Draft
from cascade.messages import Open, SessionSpec
from cascade.params import SamplingParams
from cascade.planner.choice import Policy
from cascade.planner.cost import Profile
from cascade.planner.tuning import PREFILL_TOKENS, TRIED_SHARE
from cascade.scorer import Scored
from cascade.session.session import Session
from cascade.tier.runner import GRID
from cascade.tier.scheduler import MAX_STRETCH, PRIORITY_S, Batch, rank, schedule
from cascade.tier.slot import Slot
from tests.cases import examples

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=100_000)
POLICY = Policy()


def profile(pass_s: float = 0.01, token_s: float = 0.0) -> Profile:
    made = Profile([(1, pass_s)])
    made.token_s = token_s
    return made


def slot(pending: int, guesses: int = 0, *, since: float = 0.0, opened: float = 0.0, priority: int = 0) -> Slot[None]:
    """A session with so many positions to catch up with, and so many guesses after them."""
    spec = SessionSpec((1,) * pending, pending, GREEDY, window=10**6, draft_window=64, priority=priority)
    session = Session(Open("s", spec), "full", 1, 32)
    session.guesses.draft = Draft((1,) * guesses, bytes(guesses))
    return Slot(session, None, since, opened)


def sizes(batch: Batch[None]) -> dict[int, int]:
    return {id(slot): len(work) for slot, work in batch}


def picked(slots: list[Slot[None]], max_tokens: int = 512, costs: Profile | None = None, now: float = 1.0) -> list[int]:
    """Tokens of each slot in the next pass."""
    batch, again_at = schedule(slots, POLICY, costs or profile(), max_tokens, now)
    assert again_at is None
    tokens_of = sizes(batch)
    return [tokens_of.get(id(slot), 0) for slot in slots]


slots = st.lists(
    st.builds(
        slot,
        st.one_of(st.integers(1, 10), st.integers(30, 3000)),
        st.integers(0, 30),
        since=st.floats(0, 5),
        opened=st.floats(0, 5),
        priority=st.integers(-3, 3),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=examples(2))
@given(slots=slots, max_tokens=st.integers(1, 700), token_s=st.sampled_from([0.0, 0.0001, 0.01]))
def test_budget_is_kept_and_used(slots: list[Slot[None]], max_tokens: int, token_s: float) -> None:
    """Guards the bound on a pass, and the pass against being empty or holding a session twice."""
    batch, again_at = schedule(slots, POLICY, profile(token_s=token_s), max_tokens, 10.0)
    assert again_at is None
    total = sum(len(work) for _, work in batch)
    assert 0 < total <= max_tokens
    assert len(sizes(batch)) == len(batch)
    assert all(work.tokens and len(work.draft) <= POLICY.max_guesses for _, work in batch)
    writers = [s for s in slots if s.session.num_pending < PREFILL_TOKENS]
    if not writers:
        everything = sum(s.session.num_pending + min(s.session.likely_depth, POLICY.max_guesses) for s in slots)
        assert total >= min(max_tokens, everything) - POLICY.max_guesses * len(slots)


@given(slots=slots, max_tokens=st.integers(1, 600))
def test_nobody_starves(slots: list[Slot[None]], max_tokens: int) -> None:
    """Guards every session, of whatever length and priority: it gets on while others go on for ever."""
    now, costs = 5.0, profile(token_s=0.001)
    begun = {id(s): s.session.kv_len for s in slots}
    for _ in range(20_000):
        batch, _ = schedule(slots, POLICY, costs, max_tokens, now)
        now += 1.0
        for entry, work in batch:
            entry.since = now
            entry.session.advance(work, Scored([0] * work.num_scored))
        waiting = [s for s in slots if s.session.kv_len == begun[id(s)]]
        if not waiting:
            break
    assert not waiting


def test_writers_come_before_readers() -> None:
    """Guards those who wait for the next token: a long prompt that came first takes what they leave, and no more."""
    reader, writers = slot(30_000), [slot(1, 4, opened=1.0, since=0.9) for _ in range(10)]
    assert picked([reader, *writers]) == [512 - 50] + [5] * 10
    slow = profile(token_s=0.0005)  # 60 tokens cost as much as three passes
    assert picked([reader, *writers], costs=slow) == [MAX_STRETCH * 20] + [5] * 10
    assert picked([reader], costs=slow) == [512]
    crowd = [slot(1, 16, opened=1.0) for _ in range(200)]
    counts = picked([reader, *crowd])
    assert counts[0] == 128  # a quarter is the reader's
    assert set(counts[1:]) <= {1, 2}  # and everybody's text comes before anybody's guesses


def test_short_prompts_pass_long_ones_and_the_first_goes_on() -> None:
    """Guards time to first token both ways: short prompts need not wait for a long one, nor it for all that come after."""
    long, later, short = slot(30_000), slot(20_000, opened=0.1), slot(100, opened=0.2)
    assert picked([long, later, short]) == [256, 156, 100]
    assert picked([long, short]) == [412, 100]
    assert picked([slot(1000, opened=0.1), slot(900)]) == [256, 256]


def test_a_session_that_waits_for_guesses_joins_a_pass() -> None:
    """Guards batches: the pass that another session starts costs it less than the next."""
    waiting, ready = slot(1, since=1.0), slot(1, since=1.0)
    waiting.session.attach(("tiny",), "below")
    waiting.session.guesses.stats.guesses = 30.0  # while one pass runs: it is worth waiting for some
    batch, again_at = schedule([waiting], POLICY, profile(), 512, 1.0)
    assert not batch
    assert again_at is not None
    assert picked([waiting, ready]) == [1, 1]


def test_who_drafts_in_turns_keeps_nobody_else() -> None:
    """Guards sessions without drafts: where tiers take turns, they waited for the guesses of others."""
    waiting, ready, free = slot(1, since=1.0), slot(1, since=1.0), slot(1, since=1.0)
    for entry in (waiting, ready):
        entry.session.attach(("tiny",), "below", in_turns=True)
        entry.least_chance, entry.heard = 0.5, 1.0
    ready.session.guesses.complete = True
    batch, again_at = schedule([waiting, ready], POLICY, profile(), 512, 1.0)
    assert not batch
    assert again_at is not None
    batch, _ = schedule([waiting, ready, free], POLICY, profile(), 512, 1.0)
    assert {id(entry) for entry, _ in batch} == {id(ready), id(free)}
    batch, _ = schedule([waiting, ready, free], POLICY, profile(), 512, again_at)
    assert len(batch) == 3


def test_guesses_are_judged_by_all_that_a_pass_takes() -> None:
    """Guards choices of guesses: where most of a pass is positions held, or what lies between passes, guesses are cheap."""
    costs = ((1, 0.001), (9, 0.009))
    writing, held = slot(1, 4), slot(1000, 4)
    held.session.kv_len = 999
    priced, slowed = Profile(costs, context_s=1e-5), Profile(costs)
    for known in (priced, slowed):
        known.record(9, 0, 0, 0.009)  # otherwise the pass times this size
    assert picked([writing], costs=priced) == [1]
    assert picked([held], costs=priced) == [5]
    slowed.rested(0.01)
    assert picked([writing], costs=slowed) == [5]


@pytest.mark.parametrize("num_sessions", [1, 8, 24])
def test_sizes_timed_too_dear_are_timed_again(num_sessions: int) -> None:
    """Guards prices of guesses: sizes timed while other replicas were starting looked three times dearer, so that no guess was
    scored, and without guesses their prices never changed."""
    costs = Profile([(tokens, 0.01 if tokens <= num_sessions else 0.03 + tokens * 0.0001) for tokens in sorted(GRID)])
    scored = [passed(num_sessions, costs, lambda tokens: 0.01 + tokens * 0.0001) for _ in range(1000)]
    assert sum(scored[-100:]) > 100 * 4 * num_sessions


@pytest.mark.parametrize("num_sessions", [1, 8, 24])
def test_timing_sizes_again_costs_next_to_nothing(num_sessions: int) -> None:
    """Guards "never slower" where guesses do not pay: a pass that times a size again scores guesses at a loss."""

    def cost(tokens: int) -> float:
        return 0.01 * tokens

    costs = Profile([(tokens, cost(tokens)) for tokens in sorted(GRID)])
    tokens = [passed(num_sessions, costs, cost) for _ in range(1500)]
    assert max(tokens) <= num_sessions + max(1, num_sessions // TRIED_SHARE)
    assert num_sessions < sum(tokens) / len(tokens) < 1.016 * num_sessions


@pytest.mark.parametrize("num_sessions", [1, 8, 24])
def test_noise_makes_no_guess_look_cheap(num_sessions: int) -> None:
    """Guards "never slower": every pass of a stale size that noise had made short lowered its price, so guesses that do not pay
    were scored; with 8 sessions passes had 1.11 times their tokens."""
    noise = random.Random(0)

    def cost(tokens: int) -> float:
        return 0.01 * (num_sessions + 0.7 * (tokens - num_sessions))

    costs = Profile([(tokens, cost(tokens)) for tokens in sorted(GRID)])
    tokens = [passed(num_sessions, costs, lambda size: cost(size) * noise.uniform(0.92, 1.08)) for _ in range(3000)]
    assert sum(tokens) / len(tokens) < 1.016 * num_sessions


def passed(num_sessions: int, costs: Profile, cost: Callable[[int], float]) -> int:
    """The tokens of a pass of sessions with four guesses each; ``costs`` learns that it took ``cost`` seconds."""
    total = sum(picked([slot(1, 4) for _ in range(num_sessions)], costs=costs))
    costs.record(total, 0, 0, cost(total))
    return total


def test_those_who_waited_longest_come_first_and_priority_is_a_head_start() -> None:
    """Guards sessions that did not fit into the last pass; lower priorities go first, which is no licence to starve others."""
    recent, old = slot(1, since=0.9), slot(1, since=0.1)
    assert picked([recent, old], max_tokens=1) == [0, 1]
    assert picked([recent, old, slot(500)], max_tokens=1) == [0, 0, 1]
    urgent = slot(1, since=0.9, priority=-1)
    assert picked([old, urgent], max_tokens=1) == [0, 1]
    urgent.since = 0.2 + PRIORITY_S
    assert picked([old, urgent], max_tokens=1, now=20.0) == [1, 0]
    assert rank(slot(1, opened=3.0, priority=2)) == 3.0 + 2 * PRIORITY_S

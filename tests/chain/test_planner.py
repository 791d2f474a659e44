"""Which tiers take part: the laws of `cascade.chain.planner.Planner`, alone and at work in virtual time."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cascade.chain.drafting import Drafting
from cascade.chain.planner import GLANCE, TRIAL, Chain, Planner
from cascade.chain.profile import PassCost
from cascade.chain.session import Session
from cascade.chain.slot import Slot
from cascade.messages import Failed, Message
from cascade.simulation.forecast import Acceptance, Bench, TierCost, Trace
from tests.chain.test_tier import opening

ALLOWED: Chain = ("medium", "tiny")
CHAINS: tuple[Chain, ...] = (ALLOWED, (), ("medium",), ("tiny",))
FULL_S = 0.045


def play(planner: Planner, rates: dict[Chain, float], passes: int, sessions: int = 1) -> list[Chain]:
    """The chain of each of so many passes, where a session gets ``rates`` tokens a second."""
    used = []
    for _ in range(passes):
        chain = planner.chain(ALLOWED, sessions)
        used.append(chain)
        planner.saw(ALLOWED, chain, sessions, sessions, 1000 * sessions, 1000 / rates[chain])
    return used


@given(st.permutations([10.0, 20.0, 30.0, 40.0]), st.sampled_from([1, 3, 16]))
def test_settles_on_the_fastest_chain(rates: list[float], sessions: int) -> None:
    """Guards the choice itself: whatever the order of the chains, the fastest one does nearly all of the work."""
    said = dict(zip(CHAINS, rates, strict=True))
    used = play(Planner(), said, 2000, sessions)
    best = max(said, key=said.__getitem__)
    assert set(used[: len(CHAINS) * TRIAL]) == set(CHAINS)
    assert used[400:].count(best) > 0.95 * len(used[400:])


def test_trials_cost_little() -> None:
    """Guards "never slower": what the slow chains cost for good is a share of all time that was agreed on."""
    rates = {ALLOWED: 1.0, (): 40.0, ("medium",): 2.0, ("tiny",): 39.0}
    planner = Planner()
    play(planner, rates, 200)
    used = play(planner, rates, 20_000)
    assert sum(1 / rates[chain] for chain in used) < 1.03 * len(used) / 40


def test_follows_a_change() -> None:
    """Guards against a plan for ever: a chain that becomes the best one is found."""
    planner = Planner()
    play(planner, {ALLOWED: 50.0, (): 20.0, ("medium",): 30.0, ("tiny",): 10.0}, 500)
    used = play(planner, {ALLOWED: 10.0, (): 20.0, ("medium",): 15.0, ("tiny",): 60.0}, 5000)
    assert used[-100:].count(("tiny",)) >= 100 - 2 * TRIAL


def test_loads_are_told_apart() -> None:
    """Guards requests at night from the plan of the day: many sessions go alone, and one of them does not."""
    planner = Planner()
    play(planner, {ALLOWED: 50.0, (): 20.0, ("medium",): 30.0, ("tiny",): 10.0}, 300, sessions=1)
    play(planner, {ALLOWED: 5.0, (): 20.0, ("medium",): 10.0, ("tiny",): 10.0}, 300, sessions=64)
    assert planner.chain(ALLOWED, 1) == ALLOWED
    assert planner.chain(ALLOWED, 64) == ()
    assert planner.spared(ALLOWED, 64) == "load"
    assert planner.spared(ALLOWED, 1) == "low_acceptance"


def test_a_new_load_asks_one_question() -> None:
    """Guards busy servers: with more sessions than ever before only going alone is tried, not every chain at the worst time."""
    rates = {ALLOWED: 50.0, (): 20.0, ("medium",): 30.0, ("tiny",): 10.0}
    planner = Planner()
    play(planner, rates, 200)
    assert set(play(planner, {chain: rate / 3 for chain, rate in rates.items()}, 60, sessions=16)) == {ALLOWED, ()}
    busy = {ALLOWED: 5.0, (): 20.0, ("medium",): 3.0, ("tiny",): 1.0}
    play(planner, busy, 100, sessions=32)
    assert set(play(planner, {chain: rate / 2 for chain, rate in busy.items()}, 100, sessions=64)) == {()}


def test_sessions_that_have_yet_to_follow_do_not_count_for_the_new_chain() -> None:
    """Guards trials: what comes of sessions that still use another chain says nothing about the one on trial."""
    planner = Planner()
    play(planner, dict.fromkeys(CHAINS, 10.0), TRIAL)
    tried = planner.chain(ALLOWED, 1)
    assert tried != ALLOWED
    for _ in range(10 * TRIAL):
        planner.saw(ALLOWED, ALLOWED, 1, 1, 1, 0.1)
    assert planner.chain(ALLOWED, 1) == tried
    for _ in range(max(GLANCE, TRIAL)):
        planner.saw(ALLOWED, tried, 1, 1, 1, 10.0)
    assert planner.chain(ALLOWED, 1) != tried


@settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    agreement=st.tuples(st.floats(0.2, 0.97), st.floats(0.2, 0.97)),
    medium=st.sampled_from([1 / 15, 1 / 4, 1.0]),
    tiny=st.sampled_from([0.2, 0.9]),
    token_s=st.sampled_from([0.0005, 0.003, 0.02]),
    devices=st.sampled_from([("", "", ""), ("one", "one", ""), ("one", "one", "one")]),
    sessions=st.sampled_from([1, 4]),
)
def test_never_much_slower_than_alone(
    agreement: tuple[float, float], medium: float, tiny: float, token_s: float, devices: tuple[str, str, str], sessions: int
) -> None:
    """Guards the second promise: whatever passes cost and guesses are worth, and though tiers share their devices.

    The time in which the chains are measured first is in it.
    """
    shares = (medium * tiny, medium, 1.0)
    costs = tuple(
        TierCost(name, PassCost(FULL_S * share, token_s * share), 0.0003, device=device)
        for name, share, device in zip(("tiny", "medium", "full"), shares, devices, strict=True)
    )
    bench = Bench(costs, Trace.drawn(Acceptance(agreement), 3000, burst=0.3), 1000, sessions)
    alone = bench.outcome((2,))
    adaptive = bench.outcome((0, 1, 2), adaptive=True)
    assert adaptive.tokens_per_s > 0.85 * alone.tokens_per_s


def test_gains_are_kept() -> None:
    """Guards the first purpose: where three tiers are several times as fast as one, so is a cascade that chooses."""
    costs = (TierCost("tiny", PassCost(0.002)), TierCost("medium", PassCost(0.006)), TierCost("full", PassCost(FULL_S)))
    bench = Bench(costs, Trace.drawn(Acceptance((0.8, 0.9)), 6000), 3000)
    fastest = max(bench.outcome(chosen).tokens_per_s for chosen in [(0, 2), (1, 2), (0, 1, 2)])
    assert fastest > 3 * bench.outcome((2,)).tokens_per_s
    assert bench.outcome((0, 1, 2), adaptive=True).tokens_per_s == pytest.approx(fastest, rel=0.1)


def test_tiers_that_were_left_out_stand_in_for_one_that_died() -> None:
    """Guards degradation: the planner has chosen tiny alone, tiny dies, and medium, which is well, must not stand idle."""
    planner, sent = Planner(), list[Message]()
    rates = {ALLOWED: 10.0, (): 20.0, ("medium",): 10.0, ("tiny",): 50.0}
    play(planner, rates, 200)
    names = (f"s{number}" for number in itertools.count())
    drafting: Drafting[None] = Drafting(lambda tier, message: sent.append(message), lambda: next(names), planner)
    slot = Slot(Session(replace(opening(1, 0.0, 50), chain=ALLOWED, adaptive=True), "full", 2, 32), None, 0.0, 0.0)
    drafting.begin(slot, 1, 0.0)
    assert slot.using == ("tiny",)
    assert drafting.hear(Failed("s0", "died", "tiny"), 1.0) == ("tiny", "died")
    assert slot.using == ALLOWED
    retry_at = drafting.draft(slot, 1.0)
    assert retry_at is not None
    assert drafting.draft(slot, retry_at) is None
    assert slot.using == ("tiny",)
    assert [type(message).__name__ for message in sent] == ["Open", "Close", "Open", "Close", "Open"]

"""Replicas by what they are worth: laws of the decision at one moment, and of its memory and patience."""

import itertools
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from cascade.planner.chains import load_bucket
from cascade.planner.cost import PassCost
from cascade.planner.replicas import Gains, Goal, Layout, TierLoad, choose, devices
from cascade.planner.scaling import Learnt, Pace, Patience, Scaler, Steady, granted

NONE, TINY, MEDIUM, BOTH = frozenset[str](), frozenset({"tiny"}), frozenset({"medium"}), frozenset({"tiny", "medium"})
FULL = TierLoad("full", 1.0, 1, 8, PassCost(0.022, 0.0008, knee=4))
DRAFTS = (TierLoad("tiny", 1.0, 0, 4, PassCost(0.001, 0.0)), TierLoad("medium", 1.0, 0, 4, PassCost(0.005, 0.0)))
GOAL = Goal(max_devices=8)
PACE = Pace(up_delay_s=5, down_delay_s=30, trial_s=20, rest_s=100)


def gaining(tiny: float, medium: float, both: float) -> Gains:
    """The same at every load."""
    return {names: dict.fromkeys(range(11), gain) for names, gain in ((TINY, tiny), (MEDIUM, medium), (BOTH, both))}


gains = st.tuples(*[st.floats(0.5, 3.0)] * 3).map(lambda three: gaining(*three))
costs = st.builds(PassCost, st.floats(0.005, 0.05), st.floats(0, 0.002), st.integers(1, 32))
counts = st.integers(0, 200).map(float)


@st.composite
def applications(draw: st.DrawFn) -> tuple[TierLoad, ...]:
    """Three tiers with bounds of their own."""
    found = []
    for name in ("tiny", "medium", "full"):
        least = draw(st.integers(name == "full", 2)) if draw(st.booleans()) else int(name == "full")
        most, size = draw(st.integers(max(1, least), 8)), draw(st.sampled_from([0.5, 1.0, 2.0, 4.0]))
        found.append(TierLoad(name, size, least, most, draw(costs), replicas=least))
    return tuple(found)


def loaded(tiers: tuple[TierLoad, ...], sessions: float, **more: float) -> tuple[TierLoad, ...]:
    return (*tiers[:-1], replace(tiers[-1], sessions=sessions, **more))


def settled(tiers: tuple[TierLoad, ...], known: Gains, goal: Goal, start: Layout) -> Layout:
    return choose(tiers, known, goal, choose(tiers, known, goal, start))


@given(
    tiers=applications(), known=gains, budget=st.floats(0.5, 32), sessions=counts, waiting=st.floats(0, 1), kv=st.floats(0, 1)
)
def test_bounds_and_budget_hold(
    tiers: tuple[TierLoad, ...], known: Gains, budget: float, sessions: float, waiting: float, kv: float
) -> None:
    """Guards what an operator pays: never more devices than allowed, never fewer replicas than said, and one that answers."""
    smallest = tuple(tier.least for tier in tiers)
    assume(devices(tiers, smallest) <= budget)
    loads = loaded(tiers, sessions, waiting=waiting * sessions, kv_use=kv)
    layout = choose(loads, known, Goal(budget), smallest)
    assert devices(tiers, layout) <= budget + 1e-6
    assert all(tier.least <= count <= tier.most for tier, count in zip(tiers, layout, strict=True))
    assert layout[-1] >= 1
    if not sessions:
        assert layout == smallest


@given(known=gains, sessions=st.lists(counts.filter(bool), min_size=2, max_size=6).map(sorted), cost=costs)
def test_more_sessions_get_no_fewer_full_replicas(known: Gains, sessions: list[float], cost: PassCost) -> None:
    """Guards crowds: with the same gains, a larger one was given less."""
    tiers = (*DRAFTS, replace(FULL, cost=cost))
    for drafts in (gaining(0.5, 0.5, 0.5), known):
        asked = [settled(loaded(tiers, some), drafts, Goal(100), (0, 0, 1)) for some in sessions]
        if len({layout[:-1] for layout in asked}) == 1:  # draft tiers come and go as they pay, in the place of full replicas
            assert [layout[-1] for layout in asked] == sorted(layout[-1] for layout in asked)


@given(known=gains, sessions=st.floats(1, 200), wavers=st.lists(st.floats(0.97, 1.03), min_size=5, max_size=20), cost=costs)
def test_constant_load_settles(known: Gains, sessions: float, wavers: list[float], cost: PassCost) -> None:
    """Guards against flapping: replicas that came and went under a load that only wavers."""
    tiers, steady, layout = (*DRAFTS, replace(FULL, cost=cost)), Steady(), (0, 0, 1)
    seen = []
    for waver in wavers * 2:
        full = steady.follow(loaded(tiers, sessions * waver)[-1])
        layout = choose((*DRAFTS, full), known, GOAL, layout)
        seen.append(layout)
    assert set(seen[1:]) == {layout}


def test_a_load_that_moves_is_followed() -> None:
    """Guards what steadies loads against holding on to one that has crept away, or has ended."""
    steady, sessions = Steady(), 10.0
    for _ in range(40):
        sessions *= 1.02
        held = steady.follow(replace(FULL, sessions=sessions, tokens_s=4.0)).sessions
        assert 0.93 < held / sessions < 1.08
    assert held > 20
    assert steady.follow(replace(FULL, sessions=0.0)).sessions == 0.0


def test_a_draft_tier_is_held_against_another_full_replica() -> None:
    """Guards the choice itself: drafts where they give more than their device with the full model does."""
    few, many = loaded((*DRAFTS, FULL), 2.0), loaded((*DRAFTS, FULL), 60.0)
    paying, poor = gaining(1.1, 2.0, 2.1), gaining(1.02, 1.1, 1.1)
    assert choose(few, paying, GOAL, (0, 0, 1)) == (0, 1, 1)
    assert choose(few, poor, GOAL, (0, 1, 1)) == (0, 0, 1)
    assert choose(many, poor, GOAL, (0, 1, 1))[:-1] == (0, 0)
    assert choose(many, paying, GOAL, (0, 0, 1))[-1] < choose(many, poor, GOAL, (0, 0, 1))[-1]


def test_full_memory_asks_for_replicas() -> None:
    """Guards long contexts: passes were short and sessions waited for memory, on the only replica."""
    tiers = (*DRAFTS, replace(FULL, sessions=6.0, waiting=3.0, kv_use=1.0, replicas=1))
    assert choose(tiers, gaining(1.0, 1.0, 1.0), GOAL, (0, 0, 1))[-1] >= 3


@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0.2, 30)), min_size=5, max_size=30), gains)
def test_devices_in_use_stay_within_the_budget(steps: list[tuple[float, float]], known: Gains) -> None:
    """Guards changes: a full replica was started while the draft tier that makes room for it still served."""
    scaler, now, counts = Scaler(Goal(4), PACE), 0.0, (0, 0, 1)
    tiers = (*DRAFTS, FULL)
    for sessions, seconds in steps:
        now += seconds
        serving = tuple(replace(tier, replicas=count) for tier, count in zip(tiers, counts, strict=True))
        measured = {NONE: 40.0, **{names: 40 * known[names][0] for names in known}}
        asked = scaler.decide(loaded(serving, sessions), {load_bucket(sessions): measured}, now)
        in_use = tuple(max(one, two) for one, two in zip(asked, counts, strict=True))
        assert devices(tiers, in_use) <= 4
        counts = asked if seconds > 3 else tuple(max(pair) for pair in zip(asked, counts, strict=True))


def test_draft_tiers_give_way_before_full_replicas_do() -> None:
    """Guards the order in which room is given."""
    serving = (replace(DRAFTS[0], replicas=2), DRAFTS[1], replace(FULL, replicas=1))
    assert granted(serving, (0, 1, 3), 4) == (0, 0, 2)


def test_short_bursts_move_nothing() -> None:
    """Guards starts that take a minute against a crowd of seconds, and those that serve against a pause."""
    patience = Patience(PACE, (0, 0, 2))
    assert [patience.follow((0, 0, 3), now) for now in (0.0, 4.0)] == [(0, 0, 2)] * 2
    assert patience.follow((0, 0, 2), 4.5) == (0, 0, 2)
    assert [patience.follow((0, 0, 3), now) for now in (5.0, 9.0, 10.0)] == [(0, 0, 2), (0, 0, 2), (0, 0, 3)]
    assert [patience.follow((0, 0, one), 11.0 + 10 * place)[-1] for place, one in enumerate((1, 2, 1, 1))] == [3, 3, 3, 2]


def test_what_does_not_pay_sleeps_and_is_tried_again_later_and_later() -> None:
    """Guards both ends: a tier that never pays took a device for ever, or one that pays by now was never seen again."""
    learnt, now, woken = Learnt(PACE), 0.0, list[float]()
    awake = False
    while now < 2000:
        serving = (replace(DRAFTS[0], replicas=int(awake)), replace(FULL, replicas=1, sessions=4.0))
        learnt.saw(serving, {2: {NONE: 40.0, TINY: 41.0}}, now)
        wanted = learnt.gains.get(TINY, {2: 2.0})[2] > 1.5
        if wanted and not awake:
            woken.append(now)
        awake, now = wanted, now + 1.0
    pauses = [later - earlier for earlier, later in itertools.pairwise(woken)]
    assert pauses[0] >= PACE.rest_s
    assert pauses == sorted(pauses)
    assert 3 <= len(woken) <= 6


def test_nobody_asks_for_a_tier_that_is_there() -> None:
    """Guards devices against requests that name other tiers: without any session below, the tier gains nothing."""
    learnt = Learnt(PACE)
    serving = (replace(DRAFTS[0], replicas=1), replace(FULL, replicas=1, sessions=4.0))
    for now in (0.0, PACE.trial_s):
        learnt.saw(serving, {}, now)
    assert learnt.gains[TINY] == {2: 1.0}


def test_gains_are_those_of_the_load_they_were_measured_at() -> None:
    """Guards crowds that come at once: what two sessions gained was believed for eight, which had not measured it yet."""
    learnt = Learnt(PACE)
    for now, sessions in ((0.0, 2.0), (PACE.trial_s, 2.0), (PACE.trial_s + 1, 8.0)):
        serving = (replace(DRAFTS[0], replicas=1), replace(FULL, replicas=1, sessions=sessions))
        learnt.saw(serving, {1: {NONE: 20.0, TINY: 44.0}}, now)
    assert learnt.gains[TINY] == {1: 2.2}
    learnt.saw(serving, {1: {NONE: 20.0, TINY: 44.0}, 3: {NONE: 10.0, TINY: 11.0}}, now + 1)
    assert learnt.gains[TINY] == {1: 2.2, 3: 1.1}

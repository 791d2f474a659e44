"""The cascade in virtual time: lossless whatever goes wrong, and as fast as it should be."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.toy import ToyModel, full_text
from cascade.messages import Open
from cascade.params import MOST_BRANCHES, SamplingParams
from cascade.planner.cost import PassCost
from cascade.simulation.forecast import Bench, TierCost, prediction_rows
from cascade.simulation.scenario import Death, Faults, Request, Scenario, SimTier
from cascade.simulation.simulate import Stuck, simulate
from cascade.simulation.trace import Acceptance, Trace
from cascade.simulation.virtual import Agenda, Device
from tests.cases import examples, rare

NAMES = ("t0", "t1", "t2", "t3", "t4")
PASS_S = (0.001, 0.002, 0.004, 0.01, 0.03)
AGREEMENTS = (0.6, 0.7, 0.8, 0.9, 1.0)


def toy_tiers(num_tiers: int, hop_s: float = 0.0004) -> tuple[SimTier, ...]:
    """The upper ones of five toy tiers, bottom to top."""
    every = [
        SimTier(name, ToyModel(24, agreement=share), PassCost(base, base / 50), hop_s)
        for name, share, base in zip(NAMES, AGREEMENTS, PASS_S, strict=True)
    ]
    return tuple(every[5 - num_tiers :])


def asked(max_tokens: int = 100, temperature: float = 0.0, seed: int = 3, ends: frozenset[int] = frozenset()) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    return Request((1, 2, seed % 24), params, ends)


def reference(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    """What the full tier alone writes."""
    model = scenario.tiers[-1].model
    assert isinstance(model, ToyModel)
    texts = []
    for request in scenario.requests:
        first = Open("s", request.prompt, len(request.prompt), request.params, request.ends)
        texts.append(tuple(full_text(model, first)[len(request.prompt) :]))
    return tuple(texts)


deaths = st.builds(
    lambda tier, at_s, rest_s: Death(tier, at_s, at_s + rest_s),
    st.sampled_from(NAMES[1:]),
    st.floats(0, 0.4),
    st.floats(0, 0.5),
)
faults = st.builds(
    Faults,
    seed=st.integers(0, 99),
    jitter_s=st.sampled_from([0.0, 0.002, 0.05]),
    loss=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    duplication=st.sampled_from([0.0, 0.5]),
    deaths=st.lists(deaths, max_size=3).map(tuple),
)
requests = st.builds(
    asked,
    max_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 50),
    ends=st.frozensets(st.integers(0, 23), max_size=1),
)


@settings(max_examples=examples(1.3))
@given(
    num_tiers=st.integers(1, 5),
    requests=st.lists(st.tuples(requests, st.floats(0, 0.2)), min_size=1, max_size=4),
    window=st.integers(1, 20),
    lockstep=st.booleans(),
    faults=faults,
    max_pass_tokens=st.sampled_from([1, 3, 512]),
    device=st.sampled_from(["", "one"]),
    adaptive=st.booleans(),
)
def test_lossless_whatever_goes_wrong(
    num_tiers: int,
    requests: list[tuple[Request, float]],
    window: int,
    lockstep: bool,
    faults: Faults,
    max_pass_tokens: int,
    device: str,
    adaptive: bool,
) -> None:
    """Guards the law: delays, repetitions, losses, overtaking, deaths and batch mates never change a text."""
    tiers = tuple(replace(tier, device=device) for tier in toy_tiers(num_tiers))
    alive = {tier.name for tier in tiers}
    faults = replace(faults, deaths=tuple(death for death in faults.deaths if death.tier in alive))
    queue = tuple(replace(request, arrive_s=at) for request, at in requests)
    scenario = Scenario(tiers, queue, window, lockstep, faults, max_pass_tokens, deadline_s=2000, adaptive=adaptive)
    assert simulate(scenario).texts == reference(scenario)


def test_same_scenario_same_outcome() -> None:
    """Guards replay: a failure found by a simulation must be found again."""
    trouble = Faults(5, 0.01, 0.3, 0.3, (Death("t3", 0.2, 0.3),))
    scenario = Scenario(toy_tiers(3), (asked(), asked(seed=4)), faults=trouble)
    assert simulate(scenario) == simulate(scenario)


def test_full_tier_alone_takes_a_pass_a_token() -> None:
    """Guards the baseline of every speed-up: one pass for each token, one hop to the client."""
    [tier] = toy_tiers(1)
    outcome = simulate(Scenario((replace(tier, cost=PassCost(0.03)),), (asked(50),)))
    assert outcome.usage[-1].passes == 50
    assert outcome.elapsed_s == pytest.approx(50 * 0.03 + 2 * 0.0004)


def test_tiers_of_one_device_share_it() -> None:
    """Guards predictions for machines where tiers have no device each: they would promise a speed that nobody gets."""
    tiers = toy_tiers(3)
    apart = simulate(Scenario(tiers, (asked(),)))
    shared = tuple(replace(tier, device="one") for tier in tiers[:2]) + tiers[2:]
    together = simulate(Scenario(shared, (asked(),)))
    assert together.texts == apart.texts
    assert together.elapsed_s > apart.elapsed_s
    assert sum(usage.busy_s for usage in together.usage[:2]) <= together.elapsed_s  # one after another, in effect


def test_a_device_gives_its_jobs_equal_shares() -> None:
    """Guards the shared device itself: a job of 2 s beside one of 1 s ends at 3 s, having waited for half of it."""
    agenda = Agenda()
    device, ends = Device(agenda), []
    device.run(2.0, lambda: ends.append(("long", agenda.now)))
    device.run(1.0, lambda: ends.append(("short", agenda.now)))
    agenda.at(2.5, lambda: device.run(1.0, lambda: ends.append(("late", agenda.now))))
    agenda.run(10, lambda: False)
    assert ends == [("short", 2.0), ("long", pytest.approx(3.5)), ("late", pytest.approx(4.0))]


def test_corrections_find_what_was_prepared() -> None:
    """Guards branches end to end: runner-ups that nobody sent, or answers after them that were thrown away."""
    asks = tuple(asked(temperature=1.0, seed=seed) for seed in range(3))
    top, lines = (simulate(Scenario(toy_tiers(3), asks, branches=count)).edges[0] for count in (MOST_BRANCHES, 0))
    assert top.runner_ups[0] >= top.runner_ups[1] > 0
    assert 0 < top.prefetched <= top.corrected
    assert top.prefetched_tokens > 0
    assert (lines.runner_ups, lines.prefetched, lines.prefetched_tokens) == ((0, 0), 0, 0)


def test_identical_tiers_fill_their_windows() -> None:
    """Guards the pace without corrections: the full tier gets as many tokens a pass as its drafter can make meanwhile."""
    drafter, full = toy_tiers(2)
    same = replace(drafter, model=full.model, cost=PassCost(0.004))
    outcome = simulate(Scenario((same, replace(full, cost=PassCost(0.03))), (asked(400),)))
    assert outcome.tokens_per_pass > 6.5
    assert not any(edge.corrected for edge in outcome.edges)
    lines = simulate(Scenario((same, replace(full, cost=PassCost(0.03))), (asked(400),), branches=0))
    assert all(edge.accepted == edge.proposed for edge in lines.edges)


def test_losing_every_proposal_costs_speed_only() -> None:
    """Guards liveness: a tier whose guesses never arrive is waited for a little and then not at all."""
    quiet = simulate(Scenario(toy_tiers(3), (asked(),), faults=Faults(loss=1.0)))
    assert quiet.usage[-1].passes == 100
    assert quiet.elapsed_s < 100 * 0.03 * 2.2


@pytest.mark.parametrize(
    ("deaths", "slower"),
    [
        ((Death("t3", 0.5, 0.6),), 1.25),  # the next tier of the chain drafts at once, and the better one when it is back
        ((Death("t2", 0.5),), 1.6),  # the middle one decodes alone
        ((Death("t4", 0.5, 0.52), Death("t4", 1.0, 1.3)), 1.6),  # another full replica goes on where the text stands
    ],
)
def test_deaths_cost_little(deaths: tuple[Death, ...], slower: float) -> None:
    """Guards degradation: the text stays, and so does the pace, as far as there is anybody who drafts."""
    scenario = Scenario(toy_tiers(3), (asked(300),))
    outcome, healthy = simulate(replace(scenario, faults=Faults(deaths=deaths))), simulate(scenario)
    assert outcome.texts == healthy.texts == reference(scenario)
    assert outcome.elapsed_s < slower * healthy.elapsed_s
    if deaths[0].tier == "t3":
        pairs = {(edge.drafter, edge.verifier): edge.accepted for edge in outcome.edges}
        assert pairs["t3", "t4"] > pairs["t2", "t4"] > 0


def test_nobody_answers() -> None:
    """Guards against a simulation that never ends: a full tier that stays dead is told by the deadline."""
    with pytest.raises(Stuck, match="0 of 1"):
        simulate(Scenario(toy_tiers(2), (asked(),), faults=Faults(deaths=(Death("t4", 0.1),)), deadline_s=3))


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 0.03), (2, 0.031), (3, 0.032), (5, 0.040), (7, 0.048)])
def test_measured_cost_is_interpolated(tokens: int, seconds: float) -> None:
    """Guards predictions from a measured table: straight lines between its points and after the last one."""
    assert PassCost(points=((1, 0.03), (3, 0.032), (5, 0.04)))(tokens) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("shares", "burst"),
    [(((0.75, 0.85), (0.68, 0.85)), 0.5), (((0.7, 0.9), ()), 0.0), (((0.8, 0.8, 0.9), (0.6, 0.75, 0.9)), 0.0)],
)
def test_drawn_trace_has_the_shares_asked_for(shares: tuple[tuple[float, ...], tuple[float, ...]], burst: float) -> None:
    """Guards predictions: acceptance between neighbours and by the full tier is what was measured, in bursts or not."""
    acceptance = Acceptance(*shares)
    full = len(acceptance.by_next)
    trace = Trace.drawn(acceptance, 20_000, seed=1, burst=burst)
    for tier, (by_next, by_full) in enumerate(acceptance.shares):
        assert trace.accepted(tier, tier + 1) == pytest.approx(by_next, abs=0.015)
        assert trace.accepted(tier, full) == pytest.approx(by_full, abs=0.015)


def test_a_trace_knows_who_agrees() -> None:
    """Guards shares: which tiers say the same at a position, errors that they share included."""
    trace = Trace(((0, 0, 0), (2, 2, 0), (3, 0, 0), (0, 1, 0)))
    assert [trace.accepted(0, 1), trace.accepted(1, 2), trace.accepted(0, 2)] == [0.5, 0.5, 0.5]
    assert trace.only([0, 2]).accepted(0, 1) == 0.5


def test_a_trace_is_accepted_as_it_says() -> None:
    """Guards the reader of a trace: in lockstep with windows of one guess, acceptance is the share of the trace."""
    trace = Trace(tuple((int(p % 5 == 0), 0) for p in range(4000)))
    costs = (TierCost("tiny", PassCost(0.001)), TierCost("full", PassCost(0.01)))
    outcome = Bench(costs, trace, 3000).outcome((0, 1), lockstep=True, window=1)
    edge = outcome.edges[0]
    assert edge.accepted / edge.proposed == pytest.approx(2 / 3, abs=0.01)  # guesses at 1, 3, 5 and again


# t1, t2, t3 in ms; acceptance tiny by medium, medium by full, tiny by full; round trip of a hop in ms; lockstep 1->3, 2->3,
# 3 tiers; async 3 tiers. Computed in advance from formulas and an event simulation that knew nothing of this code.
EXAMPLES = [
    ((2, 6, 30), (0.75, 0.85, 0.65), 0.3, (1.92, 2.02, 2.24), 2.90),
    ((2, 6, 30), (0.75, 0.85, 0.65), 2.0, (1.84, 1.96, 2.04), 2.78),
    ((1.5, 8, 25), (0.7, 0.9, 0.6), 0.5, (1.77, 1.75, 2.17), 2.96),
    ((3, 7, 20), (0.75, 0.8, 0.7), 0.5, (1.68, 1.40, 1.48), 1.93),
    ((1, 6, 40), (0.8, 0.88, 0.7), 0.5, (2.50, 2.50, 3.19), 3.95),
    ((4, 8, 16), (0.8, 0.85, 0.75), 0.5, (1.51, 1.25, 1.34), 1.80),
]


def example(times: tuple[float, float, float], shares: tuple[float, float, float], round_trip: float) -> tuple[Bench, float]:
    """The bench of a worked example, and the tokens per second of its full tier alone."""
    growth = (0.0, 0.02, 0.01)
    costs = tuple(
        TierCost(name, PassCost(ms / 1e3, ms / 1e3 * more), round_trip / 2e3)
        for name, ms, more in zip(("tiny", "medium", "full"), times, growth, strict=True)
    )
    by_medium, by_full, tiny_by_full = shares
    trace = Trace.drawn(Acceptance((by_medium, by_full), (tiny_by_full, by_full)), 8000, seed=2)
    return Bench(costs, trace, 1000), 1e3 / times[-1]


@pytest.mark.parametrize(
    ("times", "shares", "round_trip", "in_lockstep", "at_once"),
    [EXAMPLES[0], *(rare(*one) for one in EXAMPLES[1:])],
)
def test_worked_examples(
    times: tuple[float, float, float],
    shares: tuple[float, float, float],
    round_trip: float,
    in_lockstep: tuple[float, float, float],
    at_once: float,
) -> None:
    """Guards the simulator against drifting from numbers that were derived without it."""
    bench, alone = example(times, shares, round_trip)
    windows = (3, 4, 5)
    for chosen, expected in (((0, 2), in_lockstep[0]), ((1, 2), in_lockstep[1])):
        best = max(bench.outcome(chosen, lockstep=True, window=window).tokens_per_s for window in windows)
        assert best / alone == pytest.approx(expected, rel=0.05)
    lines = bench.outcome((0, 1, 2), branches=0).tokens_per_s
    assert lines / alone == pytest.approx(at_once, rel=0.1)
    assert bench.outcome((0, 1, 2)).tokens_per_s > 1.05 * lines


@pytest.mark.parametrize("number", [0, rare(2)])
def test_three_async_tiers_beat_all_else(number: int) -> None:
    """Guards the reason for all of this: with tiers far enough apart, three that never wait are the fastest choice."""
    bench, _ = example(*EXAMPLES[number][:3])
    rows = prediction_rows(bench.costs, bench.trace, num_tokens=300, lockstep_windows=(3, 5))
    assert len(rows) == 10
    assert {(row.tiers, row.schedule) for row in rows} >= {(("full",), "alone"), (("tiny", "full"), "lockstep")}
    assert (rows[-1].tiers, rows[-1].schedule, rows[-1].branches) == (("tiny", "medium", "full"), "async", MOST_BRANCHES)
    assert rows[-1].speedup > 1.1 * max(row.speedup for row in rows if row.schedule == "lockstep")
    assert next(row for row in rows if row.schedule == "alone").speedup == 1


def test_cheap_drafter_is_waited_for() -> None:
    """Guards the choice to wait: after a correction a drafter thirty times as fast is worth a few of its tokens."""
    costs = (TierCost("tiny", PassCost(0.001)), TierCost("full", PassCost(0.03)))
    bench = Bench(costs, Trace.drawn(Acceptance((0.75,)), 2000), 500)
    eager = tuple(replace(cost, policy=replace(cost.policy, patience=0.0)) for cost in costs)
    assert bench.outcome((0, 1)).tokens_per_s > 1.03 * replace(bench, costs=eager).outcome((0, 1)).tokens_per_s


def test_waiting_session_joins_a_pass() -> None:
    """Guards batches: a session that waits for guesses must not miss the pass that another one starts."""
    costs = (TierCost("tiny", PassCost(0.001)), TierCost("full", PassCost(0.03)))
    bench = Bench(costs, Trace.drawn(Acceptance((0.75,)), 4000), 300)
    four = replace(bench, num_requests=4).outcome((0, 1))
    assert four.tokens_per_s > 3.3 * bench.outcome((0, 1)).tokens_per_s

"""The cascade in virtual time: lossless whatever goes wrong, and as fast as it should be; toys and recorded tiers."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.errors import ConfigError
from cascade.messages import SessionSpec
from cascade.params import MOST_BRANCHES, SamplingParams
from cascade.scorer import RunnerUp
from cascade.simulation import simulate as simulator
from cascade.simulation.recording import RecordedText, RecordedTier, Recording
from cascade.simulation.scenario import Death, Faults, Request, Scenario, SimTier
from cascade.simulation.simulate import Agenda, Device, Stuck, simulate
from cascade.simulation.toy_tier import ABOVE, ToyTier
from cascade.tier.loop import Loop
from cascade.tier.slot import Slot
from tests.books import check_memory
from tests.cases import examples, rare
from tests.drafters.test_drafters import Nonsense
from tests.toys import ToyModel, full_text, pass_cost

NAMES = ("t0", "t1", "t2", "t3", "t4")
PASS_S = (0.001, 0.002, 0.004, 0.01, 0.03)
AGREEMENTS = (0.6, 0.7, 0.8, 0.9, 1.0)
TOYS = {name: ToyModel(24, agreement=share) for name, share in zip(NAMES, AGREEMENTS, strict=True)}


def toy_tiers(num_tiers: int, hop_s: float = 0.0004) -> tuple[SimTier, ...]:
    every = [SimTier(name, TOYS[name], pass_cost(base, base / 50), hop_s) for name, base in zip(NAMES, PASS_S, strict=True)]
    return tuple(every[5 - num_tiers :])


def request_of(max_tokens: int = 40, temperature: float = 0.0, seed: int = 3, ends: frozenset[int] = frozenset()) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    return Request((1, 2, seed % 24), params, ends)


def reference(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    model = scenario.tiers[-1].model
    texts = []
    for request in scenario.requests:
        first = SessionSpec(request.prompt, len(request.prompt), request.params, request.ends)
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
    request_of,
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 50),
    ends=st.frozensets(st.integers(0, 23), max_size=1),
)


class Checked(Loop[str]):
    """A loop that looks at all that it holds whenever something has happened to it."""

    def receive(self, *of: Any) -> None:
        super().receive(*of)
        self.check()

    def advance(self, *of: Any) -> None:
        super().advance(*of)
        self.check()

    def check(self) -> None:
        check_memory(self.kv_admission, self.slots.values())
        for slot in self.slots.values():
            check_slot(slot, TOYS[self._name])


def check_slot(slot: Slot[str], model: ToyModel) -> None:
    """What must hold between any two messages."""
    session = slot.session
    spec, text = session.spec, session.text
    assert spec.prompt_len <= session.committed <= len(text) <= max(spec.prompt_len + spec.params.max_tokens, len(spec.tokens))
    assert 0 <= session.kv_len < len(text)
    if slot.allocation is not None:
        assert slot.cache.tokens[: session.kv_len] == text[: session.kv_len], "stale entries in the cache"
    for branch, fork in slot.forks.items():
        assert fork.store.tokens == branch.tokens[: branch.kv_len - branch.start], "a fork holds its branch"
    for p in range(session.committed, len(text)):
        assert text[p] == model.own(tuple(text[max(0, p - model.order) : p]), p, spec.params), "not its own token"
    edges = [edge for edge in session.edges if edge.verifier == session.tier]
    assert all(edge.accepted <= edge.proposed for edge in edges)
    assert sum(edge.emitted for edge in edges) == sum(edge.passes + edge.accepted for edge in edges)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    device, drafters = draw(st.sampled_from(["", "one"])), draw(st.sampled_from([(), (Nonsense(),)]))
    tiers = tuple(replace(tier, device=device, drafters=drafters) for tier in toy_tiers(draw(st.integers(1, 5))))
    trouble, alive = draw(faults), {tier.name for tier in tiers}
    return Scenario(
        tiers,
        draw(st.lists(st.builds(replace, requests, arrive_s=st.floats(0, 0.2)), min_size=1, max_size=4).map(tuple)),
        window=draw(st.integers(1, 20)),
        faults=replace(trouble, deaths=tuple(death for death in trouble.deaths if death.tier in alive)),
        max_pass_tokens=draw(st.sampled_from([1, 3, 512])),
        deadline_s=2000,
        adaptive=draw(st.booleans()),
        branches=draw(st.sampled_from([0, 1, 3, MOST_BRANCHES])),
    )


@settings(max_examples=examples(1))
@given(scenarios())
def test_lossless_whatever_goes_wrong(scenario: Scenario) -> None:
    """Guards the law: delay, loss, nonsense, deaths and batch mates change no text, no cache and no total, at any time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "Loop", Checked)
        assert simulate(scenario).texts == reference(scenario)


def test_same_scenario_same_outcome() -> None:
    """Guards replay: a failure found by a simulation must be found again."""
    trouble = Faults(5, 0.01, 0.3, 0.3, (Death("t3", 0.1, 0.2),))
    scenario = Scenario(toy_tiers(3), (request_of(), request_of(seed=4)), faults=trouble)
    assert simulate(scenario) == simulate(scenario)


def test_full_tier_alone_takes_a_pass_a_token() -> None:
    """Guards the baseline of every speed-up: one pass for each token, one hop to the client."""
    [tier] = toy_tiers(1)
    outcome = simulate(Scenario((replace(tier, cost=pass_cost(0.03)),), (request_of(50),)))
    assert outcome.passes[-1] == 50
    assert outcome.elapsed_s == pytest.approx(50 * 0.03 + 2 * 0.0004)


def test_tiers_of_one_device_share_it() -> None:
    """Guards predictions for machines where tiers have no device each: they would promise a speed that nobody gets."""
    tiers = toy_tiers(3)
    apart = simulate(Scenario(tiers, (request_of(),)))
    shared = tuple(replace(tier, device="one") for tier in tiers[:2]) + tiers[2:]
    together = simulate(Scenario(shared, (request_of(),)))
    assert together.texts == apart.texts
    assert together.elapsed_s > apart.elapsed_s


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
    asks = tuple(request_of(temperature=1.0, seed=seed) for seed in range(3))
    top, lines = (simulate(Scenario(toy_tiers(3), asks, branches=count)).edges[0] for count in (MOST_BRANCHES, 0))
    assert top.runner_ups[0] >= top.runner_ups[1] > 0
    assert 0 < top.prefetched <= top.corrected
    assert top.prefetched_tokens > 0
    assert (lines.runner_ups, lines.prefetched, lines.prefetched_tokens) == ((0, 0), 0, 0)


def test_identical_tiers_fill_their_windows() -> None:
    """Guards the pace without corrections: the full tier gets as many tokens a pass as its drafter can make meanwhile."""
    drafter, full = toy_tiers(2)
    same = replace(drafter, model=full.model, cost=pass_cost(0.004))
    outcome = simulate(Scenario((same, replace(full, cost=pass_cost(0.03))), (request_of(200),)))
    assert outcome.tokens_per_pass > 6.5
    assert not any(edge.corrected for edge in outcome.edges)
    lines = simulate(Scenario((same, replace(full, cost=pass_cost(0.03))), (request_of(200),), branches=0))
    for edge in lines.edges:
        assert sum(edge.accepted_by_position) == edge.accepted == edge.proposed
        assert list(edge.accepted_by_position) == sorted(edge.accepted_by_position, reverse=True), (
            "no guess without those before"
        )


def test_losing_every_proposal_costs_speed_only() -> None:
    """Guards liveness: a tier whose guesses never arrive is waited for a little and then not at all."""
    quiet = simulate(Scenario(toy_tiers(3), (request_of(),), faults=Faults(loss=1.0)))
    assert quiet.passes[-1] == 40
    assert quiet.elapsed_s < 40 * 0.03 * 2.2


def test_deaths_cost_little() -> None:
    """Guards degradation: the text stays, and so does the pace, as far as there is anybody who drafts."""
    scenario = Scenario(toy_tiers(3), (request_of(300),))
    healthy = simulate(scenario)
    assert healthy.texts == reference(scenario)
    for deaths, slower in (
        ((Death("t3", 0.5, 0.6),), 1.25),  # the next tier of the chain drafts at once, and the better one when it is back
        ((Death("t2", 0.5),), 1.6),  # the middle one decodes alone
        ((Death("t4", 0.5, 0.52), Death("t4", 1.0, 1.3)), 1.6),  # another full replica goes on where the text stands
    ):
        outcome = simulate(replace(scenario, faults=Faults(deaths=deaths)))
        assert outcome.texts == healthy.texts
        assert outcome.elapsed_s < slower * healthy.elapsed_s
        if deaths[0].tier == "t3":
            pairs = {(edge.drafter, edge.verifier): edge.accepted for edge in outcome.edges}
            assert pairs["t3", "t4"] > pairs["t2", "t4"] > 0


def test_nobody_answers() -> None:
    """Guards against a simulation that never ends: a full tier that stays dead is told by the deadline."""
    with pytest.raises(Stuck, match="0 of 1"):
        simulate(Scenario(toy_tiers(2), (request_of(),), faults=Faults(deaths=(Death("t4", 0.1),)), deadline_s=3))


def lockstep_seconds(drafter: SimTier, full: SimTier, request: Request, window: int) -> float:
    """What a pair takes that drafts a window, waits, verifies it and waits."""
    models = drafter.model, full.model
    assert all(isinstance(model, ToyTier) for model in models)
    text, seconds, hop_s = [*request.prompt], drafter.hop_s + 2 * full.hop_s, drafter.hop_s

    def own(model: Any, after: list[int]) -> int:
        return int(model.ranked(tuple(after[-model.order :]), len(after), request.params, 1)[0].token)

    while (left := len(request.prompt) + request.params.max_tokens - len(text)) > 0:
        draft, length = [*text], min(window, left - 1)
        for _ in range(length):
            draft.append(own(drafter.model, draft))
        seconds += length * drafter.cost(1) + full.cost(length + 1) + 2 * hop_s
        text.append(own(full.model, text))
        while len(text) < len(draft) + 1 and text == draft[: len(text)]:
            text.append(own(full.model, text))
    return seconds


def test_three_async_tiers_beat_all_else() -> None:
    """Guards the reason for all of this: with tiers far enough apart, three that never wait are the fastest choice."""
    times, agreement = {"tiny": 0.002, "medium": 0.006, "full": 0.03}, (0.75, 0.85)
    tiers = [
        SimTier(name, ToyTier(64, agreement[level:]), pass_cost(seconds, 0.01 * seconds), 0.00015)
        for level, (name, seconds) in enumerate(times.items())
    ]

    def seconds(*chosen: SimTier, **options: Any) -> float:
        return simulate(Scenario(chosen, (request_of(150),), **options)).elapsed_s

    locked = [lockstep_seconds(drafter, tiers[-1], request_of(150), window) for drafter in tiers[:-1] for window in (3, 5)]
    lines = seconds(*tiers, branches=0)
    assert 150 * times["full"] > 1.5 * max(locked)
    assert min(locked) > 1.1 * lines
    assert lines > 1.05 * seconds(*tiers)


VOCAB = 64
PARAMS = SamplingParams(max_tokens=30, temperature=0, seed=0)
PROMPTS = (tuple(range(20)), tuple(range(30, 58)))


def recorded(seed: int, prompt: tuple[int, ...]) -> RecordedText:
    """Of toys with the noise of another request: texts that the tiers of a recording do not write by themselves."""
    toys = [ToyTier(VOCAB, (0.6, 0.8)[level:]) for level in range(3)]
    spec = SessionSpec(prompt, len(prompt), SamplingParams(max_tokens=30, temperature=0, seed=seed))
    text = full_text(toys[-1], spec)
    places = range(len(prompt), len(text))
    return RecordedText(
        prompt,
        tuple(tuple(tuple(toy.ranked(tuple(text[p - 3 : p]), p, spec.params, 3)) for p in places) for toy in toys),
        category="chat",
    )


RECORDING = Recording(tuple(recorded(100 + number, prompt) for number, prompt in enumerate(PROMPTS)))
TIERS = [RecordedTier(VOCAB, RECORDING.agreement[level:], RECORDING) for level in range(3)]
AGREEMENT = (0.65, 0.82)


@pytest.mark.parametrize("tiers", [[0, 1, 2], *map(rare, ([2], [0, 2], [1, 2]))])
def test_every_cascade_writes_the_recorded_texts(tiers: Sequence[int]) -> None:
    """Guards figures against made-up texts: whatever tiers take part, answers are what the full model wrote."""
    chosen = tuple(SimTier(f"tier-{i}", TIERS[i], pass_cost(PASS_S[i]), 0.3e-3) for i in tiers)
    scenario = Scenario(chosen, tuple(Request(text.prompt, PARAMS) for text in RECORDING.texts))
    assert simulate(scenario).texts == tuple(text.output for text in RECORDING.texts)


def test_tiers_say_what_was_recorded() -> None:
    """Guards agreement: own tokens and runner-ups along a text are the recorded ones, in order, with their gaps."""
    for text, level in itertools.product(RECORDING.texts, range(3)):
        whole = (*text.prompt, *text.output)
        for place, ranks in enumerate(text.ranked[level]):
            position = len(text.prompt) + place
            context = whole[max(0, position - TIERS[level].order) : position]
            assert TIERS[level].ranked(context, position, PARAMS, 3) == list(ranks)
    pairs = [pair for text in RECORDING.texts for pair in zip(text.ranked[0], text.ranked[1], strict=True)]
    assert RECORDING.agreement[0] == sum(lower[0].token == upper[0].token for lower, upper in pairs) / len(pairs)
    assert RECORDING.shared(0, 1) < RECORDING.shared(0, 1, 3) <= 1


def test_files_keep_a_recording(tmp_path: Path) -> None:
    """Guards replicas, which read it: what was saved is what is loaded, and a file that is none is named with what to do."""
    path = tmp_path / "recording.json"
    RECORDING.save(path)
    assert Recording.load(path) == RECORDING
    lengths = {"texts": [{"category": "", "prompt": [1], "said": [[[[1, 0]]], []]}]}
    for broken in (None, {}, {"texts": []}, lengths):
        path.unlink() if broken is None else path.write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match=r"^The recording '.*' cannot be read .* record the tiers again$"):
            Recording.load(path)


def test_texts_that_cannot_be_told_apart_are_refused() -> None:
    """Guards against an answer to one prompt that goes on as that to another one."""
    first = RECORDING.texts[0]
    other = RecordedText(first.prompt, tuple((((RunnerUp(63, 0.0),),) * len(first.output)) for _ in range(3)))
    with pytest.raises(ConfigError, match="Two recorded texts have the same"):
        Recording((first, other)).places(2)


def test_toys_agree_as_often_as_they_should() -> None:
    """Guards what simulations are about: shares of agreement, errors of edges that are unrelated, and right runner-ups."""
    places = [(tuple((place * step) % VOCAB for step in (7, 11, 13)), place) for place in range(3000)]
    toys = (ToyTier(VOCAB, AGREEMENT[level:]) for level in range(3))
    tiny, medium, full = ([toy.ranked(*place, PARAMS, 3) for place in places] for toy in toys)
    for lower, upper, share in ((tiny, medium, AGREEMENT[0]), (medium, full, AGREEMENT[1]), (tiny, full, math.prod(AGREEMENT))):
        agreed = [low[0].token == high[0].token for low, high in zip(lower, upper, strict=True)]
        assert sum(agreed) / len(agreed) == pytest.approx(share, abs=0.02)
    wrong = [(low, high[0].token) for low, high in zip(medium, full, strict=True) if low[0].token != high[0].token]
    for rank, share in enumerate(ABOVE, start=1):
        assert sum(ranked[rank].token == right for ranked, right in wrong) / len(wrong) == pytest.approx(share, abs=0.05)
    for ranked in (*tiny, *medium):
        assert len({candidate.token for candidate in ranked if candidate.token in range(VOCAB)}) == 3
        assert [candidate.gap for candidate in ranked] == sorted(candidate.gap for candidate in ranked)

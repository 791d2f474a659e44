"""Who judges new weights on the way to replicas, and whose answers a router keeps."""

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade.answer import Completion, Stats
from cascade.messages import Edge, Routing, SessionSpec
from cascade.params import SamplingParams
from cascade.settings.config import CascadeConfig
from cascade.settings.router import KeyLimits
from cascade.training.reservoir import Sample
from cascade.training.versions import Versions
from deployments.gateway.admission.access import Account
from deployments.gateway.admission.metrics import RouterMetrics
from deployments.gateway.admission.places import Places
from deployments.ops import collector, learner
from deployments.ops.collector import BATCH_S, BATCH_TOKENS, LEAST_FALL, LONG, RELEASE, WARM, Collector, Drift
from deployments.ops.learner import Canary, Record, Rollout, Weights
from tests import small
from tests.waiting import until

WAIT_S = 60.0


def states(new: tuple[int, int], old: tuple[int, int] | None = None) -> list[Weights]:
    """A canary, and another replica if there is one."""
    others = [] if old is None else [Weights("b", "", *old)]
    return [Weights("a", "000002", *new), *others]


@pytest.mark.parametrize(
    ("before", "after", "seconds", "verdict"),
    [
        (states((0, 0), (0, 0)), states((900, 100), (500, 500)), 30.0, "wait"),
        (states((0, 0), (0, 0)), states((900, 100), (500, 500)), 61.0, "good"),
        (states((0, 0), (0, 0)), states((480, 520), (500, 500)), 61.0, "good"),
        (states((0, 0), (0, 0)), states((300, 700), (500, 500)), 61.0, "bad"),
        (states((9000, 1000)), states((9300, 1700)), 61.0, "bad"),
        (states((9000, 1000)), states((9900, 1100)), 61.0, "good"),
        (states((0, 0), (0, 0)), states((3, 7), (500, 500)), 61.0, "wait"),
        (states((0, 0), (0, 0)), states((3, 7), (500, 500)), 301.0, "good"),
        (states((0, 0), (0, 0)), states((0, 0), (0, 0)), 61.0, "good"),
        (states((0, 0), (0, 0)), [Weights("b", "", 500, 500)], 61.0, "gone"),
    ],
    ids=["early", "better", "chance", "worse", "alone, worse", "alone", "few", "few for long", "idle", "dead"],
)
def test_a_canary_is_believed_when_it_has_seen_enough(
    before: Sequence[Weights], after: Sequence[Weights], seconds: float, verdict: str
) -> None:
    """Guards replicas against weights that are right less often than others at the same time, or than the same one before."""
    canary = Canary("000002", "a", 100.0, {state.replica: state for state in before})
    assert canary.verdict(after, 100.0 + seconds, WAIT_S) == verdict


class Replicas:
    """Replicas of a tier, which take the weights that they are told to."""

    def __init__(self, version: str) -> None:
        self.versions = dict.fromkeys("abc", version)

    async def ask(self, tier: Any, method: str, *args: str, timeout_s: float) -> list[Any]:
        if method == "renew":
            replica, self.versions[replica], _ = args
            return [True]
        return [Weights(*state, 0, 0) for state in self.versions.items()]

    def rollout(self, config: CascadeConfig) -> Rollout:
        return Rollout("tiny", config, None, Record())  # type: ignore[arg-type]  # it is asked here


async def test_weights_are_tried_before_all_take_them_but_not_on_the_way_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards replicas against weights that nobody judged, also if the learner dies meanwhile; and `rollback` against a wait."""
    values = small.config().model_dump(mode="json")
    config = CascadeConfig.parse(values | {"alignment": {"folder": str(tmp_path), "students": ["tiny"], "canary_s": 60.0}})
    versions, replicas = Versions(tmp_path / "tiny"), Replicas("000001")
    monkeypatch.setattr(learner, "ask_all", replicas.ask)
    versions.add(lambda folder: None)
    versions.choose(versions.add(lambda folder: None))
    for _ in range(2):  # learners, of which the first dies
        rollout = replicas.rollout(config)
        for _ in range(5):
            await rollout.step()
        assert sorted(replicas.versions.values()) == ["000001", "000001", "000002"]
    versions.rollback()
    for _ in range(3):
        await rollout.step()
    assert {*replicas.versions.values()} == {"000001"}
    replicas.versions = dict.fromkeys("abc", "000002")
    for _ in range(3):
        await rollout.step()
    assert {*replicas.versions.values()} == {"000001"}


class Away:
    """What a handle of the learner is, for a collector: it may be away."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.taken: list[Sample] = []
        self.drifting: list[str] = []
        self.away = False
        self.take = SimpleNamespace(remote=self._take)

    async def _take(self, router: str, samples: Sequence[Sample], drifting: Sequence[str]) -> dict[str, Any]:
        self.num_calls += 1
        if self.away:
            raise RuntimeError("the actor died")
        self.taken += samples
        self.drifting = [*drifting]
        return {"answers": len(self.taken), "students": {}}


async def offered(
    monkeypatch: pytest.MonkeyPatch, away: Away, answers: Sequence[tuple[tuple[SessionSpec, Routing], Account]]
) -> Collector:
    monkeypatch.setattr(collector, "SEND_S", 0.01)
    metrics = RouterMetrics(Places(1, 1), ("tiny", "full"))
    made = Collector(away, metrics, 5)
    stats = Stats(1, 1, edges=(Edge("tiny", "full", corrected=3),))
    for request, account in answers:
        made.offer(*request, [7, 8], Completion("", (7, 8), "length", 1, stats), account)
    await until(lambda: away.num_calls or not answers)
    return made


def asked_for(number: int, train: bool = True, **changes: Any) -> tuple[SessionSpec, Routing]:
    params = SamplingParams(seed=1, **changes.pop("params", {}))
    return SessionSpec((0, number, 2, 3), 4, params, **changes), Routing(train=train)


async def test_whoever_forbids_it_is_not_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tenants: a salt, the request's own word, the key's, or an adapter keep an answer from everybody's drafters."""
    free, kept_out = Account("alice"), Account("bob", KeyLimits(train=False))
    away = Away()
    answers = [
        (asked_for(1), free),
        (asked_for(2, cache_salt="mine"), free),
        (asked_for(3, train=False), free),
        (asked_for(4, params={"adapter": "law"}), free),
        (asked_for(5), kept_out),
    ]
    made = await offered(monkeypatch, away, answers)
    await made.close()
    assert [(sample.tokens, sample.tenant, sample.corrected) for sample in away.taken] == [((1, 2, 3, 7, 8), "alice", 3)]


async def test_a_learner_that_is_away_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests and memory: what cannot be sent is held, so many at most, and sent when the learner is back.

    Of long texts the router held, and sent, all of what the learner keeps the end of.
    """
    away = Away()
    away.away = True
    made = await offered(monkeypatch, away, [(asked_for(number), Account("alice")) for number in range(600)])
    away.away = False
    await until(lambda: away.taken)
    await made.close()
    assert [sample.tokens[0] for sample in away.taken] == list(range(600 - collector.MOST_HELD, 600))


async def test_a_drafter_that_drifts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rounds that drift begins: the learner is told of the drafter whose acceptance falls, and of no other."""
    away, now = Away(), [0.0]
    monkeypatch.setattr(collector, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    made = await offered(monkeypatch, away, [])

    def answer(right: int, wrong: int) -> None:
        edges = (Edge("tiny", "medium", agreed=right, corrected=wrong), Edge("medium", "full", agreed=180, corrected=20))
        stats = Stats(1, 1, edges=edges)
        now[0] += BATCH_S
        made.offer(*asked_for(1, params={"temperature": 0}), [7], Completion("", (7,), "length", 1, stats), Account("alice"))

    for _ in range(2 * WARM):
        answer(180, 20)
    await until(lambda: away.taken)
    assert away.drifting == []
    for _ in range(WARM):
        answer(40, 160)
    await until(lambda: away.drifting == ["tiny"], lambda: away.drifting)
    await made.close()


# the alarm on drafters whose agreement falls


shares = st.floats(0.0, 1.0)
answers = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.floats(0, 2 * BATCH_S)), max_size=120)


def feed(drift: Drift, shares: list[float], now: float = 0.0, tokens: int = 10 * BATCH_TOKENS) -> list[bool]:
    """Observations of these shares; the alarm after each."""
    alarms = []
    for number, share in enumerate(shares, start=1):
        right = round(share * tokens)
        drift.observe(right, tokens - right, now + number * BATCH_S)
        alarms.append(drift.alarm)
    return alarms


@given(st.floats(0.05, 0.95), st.integers(0, 2**32), st.floats(0.0, 0.08))
def test_chance_is_no_drift(share: float, seed: int, spread: float) -> None:
    """Guards operators' sleep: answers that differ from each other, but not from those before, raise nothing in an hour."""
    chance, drift = random.Random(seed), Drift()
    for number in range(360):
        own = min(1.0, max(0.0, chance.uniform(share - spread, share + spread)))
        right = sum(chance.random() < own for _ in range(BATCH_TOKENS))
        assert not drift.observe(right, BATCH_TOKENS - right, number * BATCH_S)
    assert not drift.alarm


@given(st.floats(0.4, 1.0), st.floats(2.0, 4.0), st.integers(WARM, 500))
def test_a_fall_is_alarmed_and_its_end_too(share: float, falls: float, warm: int) -> None:
    """Guards the alarm: a fall of twice the least is seen within ten observations, and once; so is its end."""
    drift, low = Drift(), max(0.0, share - falls * LEAST_FALL)
    assert not any(feed(drift, [share] * warm))
    fallen = feed(drift, [low] * 12, warm * BATCH_S)
    assert fallen[9]
    assert fallen == sorted(fallen)
    back = feed(drift, [share] * 20, (warm + 12) * BATCH_S)
    assert not back[-1]
    assert back == sorted(back, reverse=True)


@given(answers)
def test_the_alarm_has_two_thresholds(answers: list[tuple[int, int, float]]) -> None:
    """Guards against an alarm that flutters: between half of the bound and the bound nothing changes."""
    drift, now = Drift(), 0.0
    for right, wrong, seconds in answers:
        now += seconds
        before = drift.alarm
        changed = drift.observe(right, wrong, now)
        assert changed == (drift.alarm != before)
        if changed and drift.alarm:
            assert drift.fall > drift.bound
        elif changed:
            assert drift.fall <= RELEASE * drift.bound
        assert drift.bound >= LEAST_FALL


@given(st.lists(shares, min_size=1, max_size=100))
def test_a_drafter_that_gets_better_raises_nothing(shares: list[float]) -> None:
    """Guards the sign: only falls count."""
    assert not any(feed(Drift(), sorted(shares)))


def test_few_tokens_and_short_times_are_no_observation() -> None:
    """Guards busy servers, whose level would be that of the last minute, and idle ones, whose few tokens say nothing."""
    drift = Drift()
    drift.observe(BATCH_TOKENS - 1, 0, 0.0)
    assert math.isnan(drift.level)
    drift.observe(1, 0, 0.0)
    assert drift.level == 1.0
    for _ in range(50):
        drift.observe(0, BATCH_TOKENS, BATCH_S / 2)
    assert drift.recent == 1.0


def test_a_fall_for_good_becomes_the_level() -> None:
    """Guards alarms that would last for ever when requests have become others."""
    drift = Drift()
    feed(drift, [0.9] * 360)
    alarms = feed(drift, [0.6] * 1000, 360 * BATCH_S)
    assert alarms[9]
    assert not alarms[-1]
    assert sum(alarms) > 1 / LONG / 2

"""Who judges new weights on the way to replicas, and whose answers a router keeps."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
from deployments.ops.collector import BATCH_S, WARM, Collector
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

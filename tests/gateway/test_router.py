"""The router where tiers are missing, full, broken or asleep, and what it makes of their messages; without Ray."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cascade.client import AsyncClient, Client
from cascade.errors import ConfigError, InvalidRequest, Unavailable
from cascade.messages import SessionSpec
from cascade.params import SamplingParams, Speculation, Structured
from cascade.scorer import Row
from cascade.settings.config import CascadeConfig
from cascade.v1 import serving_pb2 as pb
from deployments.full_tier import MAX_FRUITLESS, MAX_FRUITLESS_LEAVING, RetryBudget, held_lease_s
from deployments.links import replica_status
from deployments.links.leases import Lease
from deployments.ops.learner import Learner
from deployments.replica import starting
from deployments.router import Router
from deployments.tier import TierReplica
from tests import small
from tests.http.test_http import ask
from tests.in_process import Handle, House, house, serving
from tests.links.net import Net
from tests.tier.test_tier import NAMES, CountingModel
from tests.toys import full_text

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
alone = partial(house, present=("full",))  # the lower tiers have no replica


class Broken(CountingModel):
    """Every pass fails."""

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        raise RuntimeError("out of memory")


def test_no_answer_is_longer_than_the_full_tier_can_hold() -> None:
    """Guards requests without `max_tokens`: they got the whole context, of which a tier's memory held a part, and 503."""
    with alone(model=partial(CountingModel, cache_tokens=300)) as served, Client(served.grpc) as client:
        most = served.router.model.context_len - len(PROMPT)
        assert most < 300
        answer = client.generate(PROMPT, SamplingParams(max_tokens=most, ignore_eos=True))
        assert len(answer.token_ids) == most
        with pytest.raises(InvalidRequest, match=f"maximum context length is {most + len(PROMPT)} tokens"):
            client.generate(PROMPT, SamplingParams(max_tokens=most + 1))


def test_starts_and_serves_without_lower_tiers() -> None:
    """Guards the service against lower tiers that cannot start: they only make it faster."""
    with alone() as served, Client(served.grpc) as client:
        model = served.net.nodes["full"].model
        expected = full_text(model, SessionSpec(tuple(PROMPT), len(PROMPT), PARAMS))[len(PROMPT) :]
        assert list(client.generate(PROMPT, PARAMS).token_ids) == expected
        tiers = [(tier.name, tier.replicas, tier.vocab_size) for tier in client.describe().tiers]
        assert tiers == [("tiny", 0, 0), ("medium", 0, 0), ("full", 1, model.vocab_size)]


class Context:
    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []


async def test_sleeping_tiers_are_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tiers that are scaled to zero: a router's start, Describe and the metrics woke them, and waited for them."""
    values = small.config().model_dump(mode="json")
    for tier in values["tiers"]:
        tier["deployment_config"]["autoscaling_config"] = {"min_replicas": 0, "max_replicas": 2}
    monkeypatch.setattr(replica_status, "count_replicas", dict)
    handles: Any = {name: Handle(Net(), name) for name in NAMES}
    limits = {name: {"context_len": length, "vocab_size": 32} for name, length in (("tiny", 64), ("full", 128))}
    router = Router()
    await router.start(values, handles, limits)
    described = await router.Describe(pb.DescribeRequest(), Context())
    assert described.max_model_len == 64  # whoever runs
    assert [(tier.name, tier.replicas) for tier in described.tiers] == [("tiny", 0), ("medium", 0), ("full", 0)]
    router.admission.metrics.text()
    await router.close()
    assert [handle.num_calls for handle in handles.values()] == [0, 0, 0]


async def test_replicas_that_do_not_start_say_why(caplog: pytest.LogCaptureFixture) -> None:
    """Guards who reads a replica's log: it named an attribute that the replica lacked at its end, and not why that came."""
    with pytest.raises(ConfigError, match="no core"):
        async with starting():
            raise ConfigError("no core")
    assert "no core" in caplog.text
    await Router().close()
    for kind in (TierReplica, Learner):
        await kind.__del__(kind)  # type: ignore[arg-type]  # as good as one whose start has failed


def test_held_leases_leave_room() -> None:
    """Guards requests at other routers: of a full tier that takes few sessions, no place is held for nobody."""
    values = small.config().model_dump(mode="json") | {"router": {"held_lease_s": 0.1}}
    for places, seconds in ((16, 0.1), (15, 0.0)):
        values["tiers"][-1]["deployment_config"]["max_ongoing_requests"] = places
        assert held_lease_s(CascadeConfig.parse(values)) == seconds


def test_full_tier_that_cannot_be_leased_is_unavailable() -> None:
    """Guards clients against waiting for ever when all full replicas refuse; the time without a token bounds it."""
    with alone(stall_timeout_s=0.3) as served, Client(served.grpc, patience_s=0) as client:
        served.net.refused = {"full"}
        with pytest.raises(Unavailable, match=r"no progress for 0\.3 s"):
            client.generate(PROMPT, PARAMS)
        served.net.refused = set()
        assert client.generate(PROMPT, PARAMS).token_ids


def test_a_session_goes_on_where_its_replica_is_not() -> None:
    """Guards requests that name a session: each try met the replica again by which the last one was refused."""
    with alone() as served:
        leases = served.router._full.downlink.leases
        [(name, reachable)] = leases.lessors.items()

        def take(session: str, preferred: Sequence[str], affinity: str) -> Lease:
            if affinity:
                raise RuntimeError("This replica of full is broken")
            return reachable(session, preferred, affinity)

        leases.lessors = {name: take}
        assert ask(served, "/v1/completions", {"prompt": "x", "max_tokens": 4}, x_session_id="mine")[0] == 200


def test_a_router_that_goes_says_so() -> None:
    """Guards who waits after Ctrl-C: the error blamed the full tier, which was going as well, and came after eight tries."""
    with alone() as served, Client(served.grpc, patience_s=0) as client:
        places, leases, asked = served.router.admission.places, served.router._full.downlink.leases, list[object]()

        def take(*of: object) -> Lease:
            asked.append(of)
            places.closed = True
            raise RuntimeError("The deployment is deleted")

        leases.lessors = dict.fromkeys(leases.lessors, take)
        with pytest.raises(Unavailable, match="The server is shutting down"):
            client.generate(PROMPT, PARAMS)
        assert len(asked) == MAX_FRUITLESS_LEAVING + 1
        places.closed = False


def test_request_that_breaks_every_replica_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the full replicas against a request that makes whoever runs it fail, tried again and again."""
    monkeypatch.setattr("deployments.full_tier.PAUSES_S", (0.0,))
    words = f"failed {MAX_FRUITLESS + 1} times"
    with alone(model=Broken) as served, Client(served.grpc, patience_s=0) as client, pytest.raises(Unavailable, match=words):
        client.generate(PROMPT, PARAMS)


def test_failures_with_progress_between_are_not_counted_together() -> None:
    """Guards long answers that outlive many replicas: only failures without a new token count."""
    retry_budget = RetryBudget(20.0)
    for num_tokens in range(1, 10 * MAX_FRUITLESS):
        retry_budget.failed("gone")
        retry_budget.progressed(num_tokens)
    assert retry_budget.fruitless == 0


async def test_cancelled_request_leaves_nothing() -> None:
    """Guards every holding of a request against its client leaving at any moment."""
    with alone(pass_s=0.001) as served:
        async with AsyncClient(served.grpc) as client:
            for milliseconds in (0, 1, 2, 5, 20, 60):
                task = asyncio.create_task(client.generate(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True)))
                await asyncio.sleep(milliseconds / 1000)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        served.settle()


HARD = "(a{1,9999}){1,9999}" * 40  # its first step is easy, those after it are not
WORDS = "structured takes too much work for one token: give something simpler"


served = serving(pass_s=0.003)


def test_grammars_that_take_too_much_work_are_refused_at_once(served: House, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against 503 after eight seconds of sessions that all failed alike, and the requests that share their passes."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    drafted = Speculation(tiers=("tiny", "medium"))
    tiers = [node.tier for node in served.net.nodes.values()]
    with Client(served.grpc) as client:
        expected = client.generate("ab", params, drafted)
    caplog.clear()  # a first answer may be over before drafts come, and the log says so
    with Client(served.grpc) as client, caplog.at_level(logging.INFO):
        stream = client.stream("ab", params, drafted)
        pieces = [next(stream)]
        body = {"prompt": "x", "max_tokens": 50, "structured": {"regex": HARD}, "speculation": {"tiers": ["tiny"]}}
        status, _, answer = ask(served, "/v1/completions", body)
        assert (status, WORDS in answer["error"]["message"]) == (400, True), answer
        with pytest.raises(InvalidRequest, match=WORDS):
            client.generate("x", SamplingParams(max_tokens=50, structured=Structured(regex=HARD)), drafted)
        pieces += stream
    assert "".join(piece.text for piece in pieces) == expected.text
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]
    assert all(tier.stats.failures == 0 and tier.healthy for tier in tiers)
    assert not any(tier._loop._drafting._failures for tier in tiers)
    served.settle()


# sampling parameters of requests that give none: the model's generation config, over every protocol


GIVEN = {"temperature": 0.0, "repetition_penalty": 1.5, "max_new_tokens": 12}
SAME = SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=12)
OWN = SamplingParams(temperature=1, repetition_penalty=1, max_tokens=7, seed=5)
TEXT = "def read(path):"


def test_every_protocol_takes_the_models_defaults_and_a_requests_own_values_win(tmp_path: Path) -> None:
    """Guards against defaults that one protocol knows and another does not, and against defaults in place of what is asked."""
    (tmp_path / "generation_config.json").write_text(json.dumps(GIVEN))
    own = {"temperature": 1, "repetition_penalty": 1, "max_tokens": 7, "seed": 5}
    with house(full={"engine_kwargs": {"generation_config": str(tmp_path)}}) as served:

        def texts(**sampling: Any) -> str:
            return str(ask(served, "/v1/completions", {"prompt": TEXT, **sampling})[2]["choices"][0]["text"])

        with Client(served.grpc) as client:
            assert client.describe().defaults == SAME
            expected = client.generate(TEXT, SAME)
            assert expected.text == client.generate(TEXT).text == texts()
            assert len(expected.token_ids) == 12
            assert client.generate(TEXT, OWN).text == texts(**own) != expected.text
            assert client.generate(TEXT, OWN).stats.completion_tokens == 7
        [model] = ask(served, "/v1/models")[2]["data"]
        assert model["sampling"] == {"temperature": 0.0, "repetition_penalty": 1.5, "max_tokens": 12}
        served.settle()


def test_answers_without_a_limit_fit() -> None:
    """Guards texts where our default is more than the server writes, or the context leaves: that was refused."""
    with house(limits={"max_tokens": 5}) as served, Client(served.grpc) as client:
        status, _, answer = ask(served, "/v1/completions", {"prompt": TEXT, "ignore_eos": True})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        assert client.generate(TEXT).stats.completion_tokens <= 5
        assert client.generate(TEXT, client.describe().defaults).stats.completion_tokens <= 5  # as the command line asks
        full = [40] * (served.router.model.context_len - 2)
        assert client.generate(full).stats.completion_tokens <= 2
        served.settle()

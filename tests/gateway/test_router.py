"""The router without Ray: a real link to a full tier with a toy model, and handles that are none."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from cascade.draft import Draft
from cascade.errors import Aborted, CascadeError, DeadlineExceeded, Unavailable
from cascade.messages import Failed, Proposal
from cascade.scorer import Row
from cascade.settings.config import CascadeConfig
from cascade.simulation.toy import ToyModel, full_text
from cascade.tier.block_manager import BlockManager
from cascade.v1 import serving_pb2 as pb
from deployments import router as module
from deployments.full_tier import MAX_FRUITLESS, Inbox, RetryBudget, SessionFailed, held_lease_s
from deployments.gateway.admission.lifetime import Lifetime
from deployments.gateway.grpc.requests import TextRequest
from deployments.links import replica_status
from deployments.router import Router
from tests import small
from tests.links.net import Net, Node, empty, tidy  # noqa: F401  # fixtures
from tests.waiting import until

PROMPT = [5, 6, 7, 8]


class Method:
    """A method of a handle."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Handle:
    """A Serve handle of the tier ``name``; a tier without a replica never answers."""

    def __init__(self, net: Net, name: str) -> None:
        self._net, self._name = net, name
        self.num_asked = 0
        self.describe = Method(self._describe)
        self.lease = Method(self._lease)

    def options(self, **options: object) -> "Handle":
        return self

    def _describe(self) -> "asyncio.Task[dict[str, Any]]":
        self.num_asked += 1
        return asyncio.create_task(self._state())

    async def _state(self) -> dict[str, Any]:
        while self._name not in self._net.nodes:
            await asyncio.sleep(0.01)
        node = self._net.nodes[self._name]
        model = node.model
        cost = {"pass_cost": [{"tokens": 1, "seconds": 0.25}, {"tokens": 8, "seconds": 0.5}], "context_s": 0.125}
        known = {"context_len": model.context_len, "vocab_size": model.vocab_size}
        known["cache_tokens"] = node.tier.kv_admission.num_tokens
        return {"name": self._name, "model": "toy", **known, **cost}

    def _lease(self, session: str, preferred: Sequence[str], affinity: str) -> Any:
        return self._net.lessor(self._name)(session)


class Context:
    """What a method can tell its caller."""

    code: grpc.StatusCode | None = None
    details = ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


class Broken(ToyModel):
    """Every pass fails."""

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        raise RuntimeError("out of memory")


def config(*, stall_timeout_s: float = 20.0, places: int = 256) -> dict[str, Any]:
    values = small.config().model_dump(mode="json")
    values["tiers"][-1]["deployment_config"]["max_ongoing_requests"] = places
    return values | {"router": {"stall_timeout_s": stall_timeout_s, "held_lease_s": 0.1}}


class Stoppable(Router):
    """Serve awaits the destructor; here nobody does when the garbage is collected."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@contextlib.asynccontextmanager
async def started(net: Net, **options: Any) -> AsyncIterator[Router]:
    router = Stoppable.__new__(Stoppable)
    handles: Any = {name: Handle(net, name) for name in ("tiny", "medium", "full")}
    await Router.__init__(router, config(**options), handles)
    yield router
    await Router.__del__(router)


def request(max_tokens: int = 20, prompt: Sequence[int] = PROMPT) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=max_tokens, temperature=1.0, seed=3, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)


async def refused(call: Callable[[pb.GenerateRequest, Any], Any], asked: pb.GenerateRequest) -> Context:
    """What the client of a failed call is told."""
    context = Context()
    answer = call(asked, context)
    with pytest.raises(CascadeError):
        await (answer if inspect.isawaitable(answer) else anext(answer))
    return context


@pytest.fixture
async def net(empty: Net, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Net]:  # noqa: F811
    """A full tier alone; the lower ones have no replica."""
    monkeypatch.setattr(module, "DESCRIBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(replica_status, "count_replicas", lambda: {"full": 1})
    await empty.add("full", pass_s=0.001)
    yield empty
    await empty.settle()
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_no_answer_is_longer_than_the_full_tier_can_hold(net: Net) -> None:
    """Guards requests without `max_tokens`: they got the whole context, of which a tier's memory held a part, and 503."""
    node = net.nodes["full"]
    node.tier.kv_admission.block_manager = BlockManager(node.model.new_cache, 300)
    async with started(net) as router:
        assert router.model.context_len == 288
        asked = request(288 - len(PROMPT))
        assert len((await router.Complete(asked, Context())).tokens) == 288 - len(PROMPT)
        context = await refused(router.Complete, request(289 - len(PROMPT)))
        assert context.code == grpc.StatusCode.INVALID_ARGUMENT
        assert "maximum context length is 288 tokens" in context.details


async def test_starts_and_serves_without_lower_tiers(net: Net) -> None:
    """Guards the service against lower tiers that cannot start: they only make it faster."""
    async with started(net) as router:
        response = await router.Complete(request(), Context())
        alone = ToyModel()
        spec = await router.model.admit(await TextRequest(request(), router.model).task())
        assert [token.id for token in response.tokens] == full_text(alone, spec)[len(PROMPT) :]
        described = await router.Describe(pb.DescribeRequest(), Context())
        assert [(tier.name, tier.replicas, tier.vocab_size) for tier in described.tiers] == [
            ("tiny", 0, 0),
            ("medium", 0, 0),
            ("full", 1, alone.vocab_size),
        ]


async def test_sleeping_tiers_are_not_woken(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tiers that are scaled to zero: a router's start, Describe and the metrics woke them, and waited for them."""
    values = config()
    for tier in values["tiers"]:
        tier["deployment_config"]["autoscaling_config"] = {"min_replicas": 0, "max_replicas": 2}
    monkeypatch.setattr(replica_status, "count_replicas", dict)
    handles: Any = {name: Handle(net, name) for name in ("tiny", "medium", "full")}
    limits = {name: {"context_len": length, "vocab_size": 32} for name, length in (("tiny", 64), ("full", 128))}
    router = Stoppable.__new__(Stoppable)
    await Router.__init__(router, values, handles, limits)
    described = await router.Describe(pb.DescribeRequest(), Context())
    assert described.max_model_len == 64  # whoever runs
    assert [(tier.name, tier.replicas) for tier in described.tiers] == [("tiny", 0), ("medium", 0), ("full", 0)]
    router.admission.metrics.text()
    await Router.__del__(router)
    assert [handle.num_asked for handle in handles.values()] == [0, 0, 0]


def test_held_leases_leave_room() -> None:
    """Guards requests at other routers: of a full tier that takes few sessions, no place is held for nobody."""
    assert [held_lease_s(CascadeConfig.parse(config(places=places))) for places in (16, 15)] == [0.1, 0.0]


async def test_full_tier_that_cannot_be_leased_is_unavailable(net: Net) -> None:
    """Guards clients against waiting for ever when all full replicas refuse; the time without a token bounds it."""
    async with started(net, stall_timeout_s=0.3) as router:
        net.refused = {"full"}
        context = await refused(router.Complete, request())
        assert context.code is grpc.StatusCode.UNAVAILABLE
        assert "no progress for 0.3 s" in context.details
        net.refused = set()
        await router.Complete(request(), Context())


async def test_request_that_breaks_every_replica_is_given_up(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the full replicas against a request that makes whoever runs it fail, tried again and again."""
    monkeypatch.setattr("deployments.full_tier.PAUSES_S", (0.0,))
    async with started(net) as router:
        node: Node = net.nodes["full"]
        monkeypatch.setattr(node.tier._runner, "_model", Broken())
        context = await refused(router.Complete, request())
        assert context.code is grpc.StatusCode.UNAVAILABLE
        assert f"failed {MAX_FRUITLESS + 1} times" in context.details


async def test_failures_with_progress_between_are_not_counted_together() -> None:
    """Guards long answers that outlive many replicas: only failures without a new token count."""
    retry_budget = RetryBudget(20.0)
    for num_tokens in range(1, 10 * MAX_FRUITLESS):
        retry_budget.failed("gone")
        retry_budget.progressed(num_tokens)
    assert retry_budget.fruitless == 0


async def test_cancelled_request_leaves_nothing(net: Net) -> None:
    """Guards every holding of a request against its client leaving at any moment; the fixture looks for what is left."""
    async with started(net) as router:
        for steps in (0, 1, 2, 5, 20, 60):
            task = asyncio.create_task(router.Complete(request(2000), Context()))
            for _ in range(steps):
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        stream = router.Generate(request(2000), Context())
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: not router._full.inboxes and not router._full.downlink.num_sessions)


async def test_handling_reaches_the_tiers(net: Net) -> None:
    """Guards priority and salt, which nothing in an answer shows."""
    async with started(net) as router:
        asked = request()
        asked.priority, asked.cache_salt = -3, "mine"
        spec = await router.model.admit(await TextRequest(asked, router.model).task())
        assert (spec.priority, spec.cache_salt) == (-3, "mine")


def asked(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), **fields)


UNKNOWN = b"\xf8\x06\x01"  # a field from the future
REFUSED: list[tuple[pb.GenerateRequest, str]] = [  # wrong values of parameters: tests/http/test_http_parameters.py
    (pb.GenerateRequest(), "neither prompt nor token_ids"),
    (pb.GenerateRequest(prompt=""), "empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4_000_000_000])), "4000000000"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 5000)), "4096"),
    (asked(sampling=pb.Sampling(temperature=float("nan"))), "temperature is nan"),
    (asked(sampling=pb.Sampling(min_p=float("inf"))), "min_p is inf"),
    (asked(sampling=pb.Sampling(structured=pb.Structured())), "structured is"),
    (asked(sampling=pb.Sampling(logit_bias={32: 1.0})), "logit_bias is 32: it must be token ids from 0 to 31"),
    (pb.GenerateRequest.FromString(request().SerializeToString() + UNKNOWN), "unknown fields in the request"),
    (pb.GenerateRequest(token_ids=pb.TokenIds.FromString(b"\x0a\x01\x05" + UNKNOWN)), "unknown fields in token_ids"),
    (asked(sampling=pb.Sampling.FromString(UNKNOWN)), "unknown fields in sampling"),
    (asked(speculation=pb.Speculation.FromString(UNKNOWN)), "unknown fields in speculation"),
]


async def test_what_cannot_be_honoured_is_refused(net: Net) -> None:
    """Guards clients against parameters that are ignored, and tiers against those that they cannot serve: one sentence."""
    async with started(net) as router:
        for bad, words in REFUSED:
            for call in (router.Complete, router.Generate):
                context = await refused(call, bad)
                assert context.code is grpc.StatusCode.INVALID_ARGUMENT, words
                assert words in context.details


async def test_newest_proposal_counts_and_failures_come_behind() -> None:
    """Guards tokens that came before a failure, and clients that are slower than the tier: fewer pieces, not a longer queue."""
    inbox = Inbox(RetryBudget(5.0), Lifetime())
    for message in (Proposal("s", 4, Draft((1,), b"\0")), Proposal("s", 4, Draft((1, 2), b"\0\0")), Failed("s", "gone")):
        inbox.put(message)
    assert (await inbox.next()).draft.tokens == (1, 2)
    with pytest.raises(SessionFailed, match="gone"):
        await inbox.next()


async def test_what_ends_the_wait_is_what_is_told() -> None:
    """Guards the reason: a deadline is an error of time, too, and was told as a full tier without progress."""
    with pytest.raises(DeadlineExceeded):
        await Inbox(RetryBudget(20.0), Lifetime.of(0.01)).next()
    with pytest.raises(Unavailable, match=r"no progress for 0\.01 s"):
        await Inbox(RetryBudget(0.01), Lifetime.of(20)).next()
    waiting = asyncio.create_task(Inbox(RetryBudget(20.0), lifetime := Lifetime()).next())
    await asyncio.sleep(0)
    lifetime.abort()
    with pytest.raises(Aborted):
        await waiting

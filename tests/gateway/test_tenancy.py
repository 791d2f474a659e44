"""What a key may ask for and what it gets, at the router's doors: priorities, shares, limits that routers keep together."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from cascade.client import AsyncClient, Client
from cascade.client.responses import KeyInfo
from cascade.errors import Overloaded, PermissionDenied
from cascade.params import Handling, SamplingParams
from cascade.settings.router import KeyLimits
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc
from deployments.gateway.admission import access
from deployments.gateway.admission.access import Account
from deployments.links.siblings import Siblings
from tests.doors import House, house, serving
from tests.http.test_http import ask
from tests.waiting import wait_until

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdefgh", "carol-0123456789abcdef"
SHORT = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=4000, temperature=1.0, seed=1, ignore_eos=True)
OF_BOB = {"min_priority": -5, "weight": 3.0, "max_running": 7, "tokens_per_minute": 100_000}
LIMITS = {"bob": OF_BOB, "carol": {"min_priority": 2}}


keyed = serving(
    env={"TENANT_KEYS": f"alice={ALICE},bob={BOB},carol={CAROL}"}, access={"keys_env": "TENANT_KEYS", "limits": LIMITS}
)


@pytest.mark.parametrize(("key", "name", "soonest"), [(ALICE, "alice", 0), (BOB, "bob", -5), (CAROL, "carol", 2)])
def test_a_key_goes_no_sooner_than_it_may(keyed: House, key: str, name: str, soonest: int) -> None:
    """Guards the others against a key that goes before all of them, over both protocols; what it may ask for is honoured."""
    sentence = f"priority is {soonest - 1}: requests of key {name} may ask for {soonest} and up, lower is served sooner"
    with Client(keyed.grpc, api_key=key) as client:
        for priority in (soonest, soonest + 9):
            assert client.generate("x", SHORT, handling=Handling(priority)).token_ids
        said = [{"role": "user", "content": "x"}]
        for call in (client.generate, lambda _, *args, **options: client.chat(said, *args, **options)):
            with pytest.raises(PermissionDenied, match=sentence):
                call("x", SHORT, handling=Handling(soonest - 1))
    request = pb.GenerateRequest(prompt="x", priority=soonest - 1)
    with grpc.insecure_channel(keyed.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        serving_pb2_grpc.CascadeStub(channel).Complete(request, metadata=(("authorization", f"Bearer {key}"),))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, sentence)
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": said})):
        asked = {**body, "max_tokens": 4, "priority": soonest - 1}
        status, _, answer = ask(keyed, f"/v1/{path}", asked, Authorization=f"Bearer {key}")
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (403, "permission_error", "permission_denied")
        assert answer["error"]["message"] == sentence
        assert ask(keyed, f"/v1/{path}", asked | {"priority": soonest}, Authorization=f"Bearer {key}")[0] == 200


def test_a_key_is_told_its_limits(keyed: House) -> None:
    """Guards clients against finding out by being refused, in both protocols."""
    with Client(keyed.grpc, api_key=BOB) as bob, Client(keyed.grpc, api_key=ALICE) as alice:
        assert bob.describe().key == KeyInfo("bob", -5, 3.0, 7, 100_000)
        assert alice.describe().key == KeyInfo("alice", 0)
    for path in ("/v1/models", f"/v1/models/{keyed.model}"):
        answer = ask(keyed, path, Authorization=f"Bearer {BOB}")[2]
        assert answer.get("data", [answer])[0]["key"] == {"name": "bob", **OF_BOB, "train": True}


def test_without_keys_priorities_are_free(served: House) -> None:
    """Guards open servers: their clients have agreed among themselves."""
    with Client(served.grpc) as client:
        assert client.describe().key == KeyInfo("anonymous")
        assert client.generate("x", SHORT, handling=Handling(-1000)).token_ids


async def crowd(built: House, keys: dict[str, str], num: int) -> list[str]:
    """That many requests of each key, which all wait before one is served; whose they were, in the order of their ends."""
    ended: list[str] = []

    async def ask_as(name: str, client: AsyncClient) -> None:
        await client.generate("x", SamplingParams(max_tokens=12, temperature=1.0, seed=len(ended), ignore_eos=True))
        ended.append(name)

    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(AsyncClient(built.grpc, api_key=key)) for name, key in keys.items()}
        carol = await stack.enter_async_context(AsyncClient(built.grpc, api_key=CAROL))
        first = [carol.stream("x", LONG) for _ in range(2)]  # every turn is taken
        for stream in first:
            await anext(stream)
        asked = [asyncio.create_task(ask_as(name, client)) for name, client in clients.items() for _ in range(num)]
        while built.router.admission.places.num_waiting < len(asked):
            await asyncio.sleep(0.01)
        for stream in first:
            await stream.aclose()
        await asyncio.gather(*asked)
    return ended


def test_keys_share_by_weight_where_requests_wait() -> None:
    """Guards a key against another one's crowd, which came first: three times the weight, three times the tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENANT_KEYS", f"alice={ALICE},bob={BOB},carol={CAROL}")
        keyed = {"keys_env": "TENANT_KEYS", "limits": {"bob": {"weight": 3.0}}}
        with house(pass_s=0.001, max_running=2, max_waiting=80, access=keyed) as built:
            ended = asyncio.run(crowd(built, {"alice": ALICE, "bob": BOB}, 24))
            built.settle()
    shares = [ended[:size].count("bob") / size for size in (16, 24, 32)]
    assert all(0.75 - 2 / 16 <= share <= 0.75 + 2 / 16 for share in shares), shares
    assert len(ended) == 48


def test_priorities_order_a_keys_own_where_they_wait() -> None:
    """Guards urgent requests against those of their own key: the router's queue knew no priorities."""

    async def ask_all(built: House) -> list[int]:
        ended: list[int] = []

        async def ask_one(client: AsyncClient, priority: int) -> None:
            await client.generate("x", SHORT, handling=Handling(priority))
            ended.append(priority)

        async with AsyncClient(built.grpc) as client:
            first = client.stream("x", LONG)
            await anext(first)
            asked = []
            for priority in (0, 3, -3, 0, -9):
                asked.append(asyncio.create_task(ask_one(client, 100 * priority)))
                while built.router.admission.places.num_waiting < len(asked):
                    await asyncio.sleep(0.01)
            await first.aclose()
            await asyncio.gather(*asked)
        return ended

    with house(pass_s=0.001, max_running=1, max_waiting=9) as built:
        assert asyncio.run(ask_all(built)) == [-900, -300, 0, 0, 300]
        built.settle()


class Neighbours(Siblings):
    """Routers of one process that ask each other as Serve would have them: each in its own event loop."""

    def __init__(self, name: str, houses: list[House]) -> None:
        super().__init__()
        self.name = name
        self.dead = False
        self._houses = houses

    async def ask(self, method: str, *args: Any) -> list[Any]:
        answers = []
        for one in self._houses:
            if not (self.dead or one.router._siblings.dead):  # type: ignore[attr-defined]
                asked = asyncio.run_coroutine_threadsafe(getattr(one.router, method)(self.name, *args), one.loop)
                answers.append(await asyncio.wrap_future(asked))
        return [answer for answer in answers if answer is not None]


@contextlib.contextmanager
def pair(**limits: Any) -> Iterator[list[House]]:
    """Two routers that tell each other of key alice, which has these limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENANT_KEYS", f"alice={ALICE}")
        patch.setattr(access, "EXCHANGE_S", 0.02)
        keys = {"keys_env": "TENANT_KEYS", "limits": {"alice": limits}}
        with house(pass_s=0.003, access=keys) as one, house(pass_s=0.003, access=keys) as other:
            houses = [one, other]
            for number, built in enumerate(houses):
                siblings = Neighbours(f"router {number}", houses)
                built.router._siblings = built.router._exchange._others = siblings
            yield houses
            for built in houses:
                built.settle()


def account(built: House) -> Account:
    return built.router.admission.access.account(f"Bearer {ALICE}")


def test_routers_count_answers_together() -> None:
    """Guards a key's limit against as many routers as there are: with two, a key had twice its answers at once."""
    long = pb.GenerateRequest(prompt="x", sampling=pb.Sampling(max_tokens=4000, seed=1, ignore_eos=True))
    with pair(max_running=3) as (one, other), grpc.insecure_channel(one.grpc) as channel:
        calls = [
            serving_pb2_grpc.CascadeStub(channel).Generate(long, metadata=(("authorization", f"Bearer {ALICE}"),))
            for _ in range(2)
        ]
        with Client(other.grpc, api_key=ALICE) as client:
            wait_until(lambda: account(other).num_elsewhere == 2)
            assert client.generate("x", SHORT).token_ids  # the third
            status, _, answer = ask(other, "/v1/completions", {"prompt": "x", "n": 2}, Authorization=f"Bearer {ALICE}")
            assert (status, answer["error"]["code"]) == (429, "overloaded")
            assert answer["error"]["message"] == "Key alice may have 3 answers written at once, and has 2"
            for call in calls:
                call.cancel()
            wait_until(lambda: account(other).num_elsewhere == 0)
            assert ask(other, "/v1/completions", {"prompt": "x", "n": 3}, Authorization=f"Bearer {ALICE}")[0] == 200


def test_routers_count_tokens_together() -> None:
    """Guards a key's rate against routers that each give it the whole."""
    used = SamplingParams(max_tokens=120, temperature=1.0, seed=1, ignore_eos=True)  # a debt of a minute
    with pair(tokens_per_minute=60) as (one, other), Client(one.grpc, api_key=ALICE) as client:
        assert client.generate("x", used).token_ids
        wait_until(lambda: account(other).usage.balance < 0)
        with Client(other.grpc, api_key=ALICE) as there:
            for asked in (client, there):
                with pytest.raises(Overloaded, match="60 tokens a minute"):
                    asked.generate("x", SHORT)


def test_a_dead_router_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a key against places that a router held when it died, and requests against a router that does not answer."""
    monkeypatch.setattr(access, "FORGET_S", 0.3)
    long = pb.GenerateRequest(prompt="x", sampling=pb.Sampling(max_tokens=4000, seed=1, ignore_eos=True))
    with pair(max_running=1) as (one, other), grpc.insecure_channel(one.grpc) as channel:
        call = serving_pb2_grpc.CascadeStub(channel).Generate(long, metadata=(("authorization", f"Bearer {ALICE}"),))
        wait_until(lambda: account(other).num_elsewhere == 1)
        one.router._siblings.dead = True  # type: ignore[attr-defined]
        wait_until(lambda: account(other).num_elsewhere == 0)
        with Client(other.grpc, api_key=ALICE) as client:
            assert client.generate("x", SHORT).token_ids
        call.cancel()


def test_a_router_that_comes_hears_what_has_been_used() -> None:
    """Guards a rate against routers that are new, and against charging twice for what is told twice."""
    old, new = (Account("alice", KeyLimits(tokens_per_minute=600)) for _ in range(2))
    old.charge(500)
    new.receive("old", old.usage)
    old.receive("new", new.usage)
    assert new.usage.balance == pytest.approx(100, abs=5)
    assert old.usage.balance == pytest.approx(100, abs=5)
    new.charge(50)
    old.receive("new", new.usage)
    old.receive("new", new.usage)
    assert old.usage.balance == pytest.approx(50, abs=5)

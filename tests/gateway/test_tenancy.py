"""What a key may ask for and what it gets, at the router: priorities, shares, limits that routers keep together."""

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from cascade.client import AsyncClient, Client
from cascade.client.client import KeyInfo
from cascade.errors import PermissionDenied
from cascade.params import Handling, SamplingParams
from tests.http.test_http import ask
from tests.in_process import House, serving
from tests.waiting import until

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdefgh", "carol-0123456789abcdef"
SHORT = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=4000, temperature=1.0, seed=1, ignore_eos=True)
OF_BOB = {"min_priority": -5, "weight": 3.0, "max_running": 7, "tokens_per_minute": 100_000}


keyed = serving(env={"TENANT_KEYS": f"alice={ALICE},bob={BOB}"}, access={"keys_env": "TENANT_KEYS", "limits": {"bob": OF_BOB}})


@pytest.mark.parametrize(("key", "name", "soonest"), [(ALICE, "alice", 0), (BOB, "bob", -5)])
def test_a_key_goes_no_sooner_than_it_may(keyed: House, key: str, name: str, soonest: int) -> None:
    """Guards the others against a key that goes before all of them, over both protocols; what it may ask for is honoured."""
    sentence = f"priority is {soonest - 1}: requests of key {name} may ask for {soonest} and up, lower is served sooner"
    with Client(keyed.grpc, api_key=key) as client:
        assert client.generate("x", SHORT, handling=Handling(soonest)).token_ids
        messages = [{"role": "user", "content": "x"}]
        for call in (client.generate, lambda _, *args, **options: client.chat(messages, *args, **options)):
            with pytest.raises(PermissionDenied, match=sentence):
                call("x", SHORT, handling=Handling(soonest - 1))
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": messages})):
        request = {**body, "max_tokens": 4, "priority": soonest - 1}
        status, _, answer = ask(keyed, f"/v1/{path}", request, Authorization=f"Bearer {key}")
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (403, "permission_error", "permission_denied")
        assert answer["error"]["message"] == sentence


def test_a_key_is_told_its_limits(keyed: House) -> None:
    """Guards clients against finding out by being refused, in both protocols."""
    with Client(keyed.grpc, api_key=BOB) as bob, Client(keyed.grpc, api_key=ALICE) as alice:
        assert bob.describe().key == KeyInfo("bob", -5, 3.0, 7, 100_000)
        assert alice.describe().key == KeyInfo("alice", 0)
    for path in ("/v1/models", f"/v1/models/{keyed.model}"):
        answer = ask(keyed, path, Authorization=f"Bearer {BOB}")[2]
        assert answer.get("data", [answer])[0]["key"] == {"name": "bob", **OF_BOB, "train": True}


crowded = serving(
    env={"CROWD_KEYS": f"alice={ALICE},bob={BOB},carol={CAROL}"},
    pass_s=0.001,
    max_running=1,
    max_waiting=80,
    access={"keys_env": "CROWD_KEYS", "limits": {"bob": {"weight": 3.0, "min_priority": -1000}}},
)


async def in_order(built: House, requests: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Requests of keys, with priorities, which come in this order and all wait before one is served; in that of their ends."""
    ended, tasks = list[tuple[str, int]](), list[asyncio.Task[None]]()

    async def ask_as(client: AsyncClient, key: str, priority: int) -> None:
        await client.generate("x", SHORT, handling=Handling(priority))
        ended.append((key, priority))

    async with contextlib.AsyncExitStack() as stack:
        keys = {CAROL, *(key for key, _ in requests)}
        clients = {key: await stack.enter_async_context(AsyncClient(built.grpc, api_key=key)) for key in keys}
        first = clients[CAROL].stream("x", LONG)  # has the turn
        await anext(first)
        for key, priority in requests:
            tasks.append(asyncio.create_task(ask_as(clients[key], key, priority)))
            await until(lambda: built.router.admission.places.num_waiting == len(tasks))
        await first.aclose()
        await asyncio.gather(*tasks)
    return ended


def test_keys_share_by_weight_where_requests_wait(crowded: House) -> None:
    """Guards a key against another one's crowd, which came first: three times the weight, three times the tokens."""
    ended = asyncio.run(in_order(crowded, [(ALICE, 0)] * 16 + [(BOB, 0)] * 16))
    shares = [ended[:size].count((BOB, 0)) / size for size in (16, 20)]
    assert all(0.75 - 2 / 16 <= share <= 0.75 + 2 / 16 for share in shares), shares


def test_priorities_order_a_keys_own_where_they_wait(crowded: House) -> None:
    """Guards urgent requests against those of their own key: the router's queue knew no priorities."""
    ended = asyncio.run(in_order(crowded, [(BOB, 100 * priority) for priority in (0, 3, -3, 0, -9)]))
    assert [priority for _, priority in ended] == [-900, -300, 0, 0, 300]

"""Sessions that begin alike meet the same replica: what is remembered, and what Serve's router makes of it.

The whole way is tests/served/test_serve.py's.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade.messages import SessionSpec
from cascade.params import SamplingParams
from cascade.scorer import BLOCK
from deployments.links.affinity import PreferringRouter, Prefixes
from deployments.links.leases import Lease, LeasePool
from tests.links.net import Held

PARAMS = SamplingParams(seed=1)
ONE, OTHER = "10.0.0.1:1", "10.0.0.2:1"


def text(tokens: Sequence[int], salt: str = "", params: SamplingParams = PARAMS) -> SessionSpec:
    return SessionSpec(tuple(tokens), len(tokens), params, cache_salt=salt)


def test_the_longest_beginning_counts() -> None:
    """Guards conversations: their replica is the one that has their history, not one that has the same instructions."""
    instructions, turn = range(4 * BLOCK), range(900, 900 + 4 * BLOCK)
    prefixes = Prefixes()
    prefixes.sent(text(instructions), "", ONE)
    assert prefixes.find(text(instructions)) == (ONE,)
    prefixes.sent(text([*instructions, *turn]), "", OTHER)
    assert prefixes.find(text([*instructions, *turn, 1, 2, 3])) == (OTHER,)
    assert prefixes.find(text([*instructions, 1, 2, 3])) == (OTHER, ONE)  # both know it
    prefixes.forget(OTHER)
    assert prefixes.find(text([*instructions, *turn])) == (ONE,)
    prefixes.forget(ONE)
    assert len(prefixes) == 0


@pytest.mark.parametrize(
    "other",
    [
        text(range(4 * BLOCK), "another tenant"),
        text(range(4 * BLOCK), params=SamplingParams(seed=1, adapter="a")),
        text(range(4 * BLOCK), params=SamplingParams(seed=1, prompt_logprobs=0)),
        text([7, *range(4 * BLOCK)]),
        text(range(BLOCK - 1)),
        text([*range(4 * BLOCK), *range(900, 900 + 40 * BLOCK)]),
    ],
)
def test_what_is_not_shared_attracts_nobody(other: SessionSpec) -> None:
    """Guards tenants, to whom another's prompts tell nothing, and the balance against a template that all prompts share."""
    prefixes = Prefixes()
    prefixes.sent(text(range(4 * BLOCK)), "", ONE)
    assert prefixes.find(other) == ()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12), st.sampled_from([ONE, OTHER])), max_size=60))
def test_memory_is_bounded_and_ends_are_forgotten_first(steps: list[tuple[int, int, str]]) -> None:
    """Guards the router's memory, and beginnings against being forgotten before what is after them."""
    prefixes = Prefixes(most_keys=24)
    for number, blocks, address in steps:
        tokens = text(range(100 * number, 100 * number + blocks * BLOCK))
        prefixes.sent(tokens, "", address)
        assert len(prefixes) <= 24
        assert address in prefixes.find(tokens)


class Router(PreferringRouter):
    """Serve's router for a lease, as far as it is ours."""

    def __init__(self, leases: dict[str, int | None]) -> None:
        self._known = leases
        self.replicas: list[Any] = [SimpleNamespace(replica_id=lease, replica_metadata={"address": lease}) for lease in leases]

    @property
    def curr_replicas(self) -> dict[str, Any]:
        return {replica.replica_id: replica for replica in self.replicas}

    @property
    def replica_queue_len_cache(self) -> dict[str, int | None]:
        return self._known

    def apply_locality_routing(self, pending_request: Any = None) -> set[str]:
        return set(self._known)

    async def ranks(self, *args: object) -> list[list[str]]:
        chosen = await self.choose_replicas(self.replicas, SimpleNamespace(args=args))
        return [[replica.replica_id for replica in rank] for rank in chosen]


async def test_preferred_replicas_come_first_unless_they_are_busier() -> None:
    """Guards affinity, and the balance against it: a popular beginning is read by another replica when its own has too much."""
    assert await Router({"a": 3, "b": 0}).ranks("s", ("a",)) in ([["a"], ["a", "b"]], [["a"], ["b", "a"]])
    assert sorted((await Router({"a": 30, "b": 0}).ranks("s", ("a",)))[0]) == ["a", "b"]
    assert (await Router({"a": None, "b": 0}).ranks("s", ("a",)))[0] == ["a"]
    assert (await Router({"a": 30, "b": 2, "c": 29}).ranks("s", ("a", "b")))[0] == ["a", "b"]
    for args in (("s",), ("s", ()), ("s", ("gone",))):
        assert [sorted(rank) for rank in await Router({"a": 3, "b": 0}).ranks(*args)] == [["a", "b"]]
    assert await Router({}).ranks("s", ("a",)) == []
    assert await Router({"a": 1}).ranks("s", ("a",)) == [["a"], ["a"]]


def test_a_clients_session_stays() -> None:
    """Guards sessions that a client names: where the last request went counts, whatever the texts have in common."""
    prefixes, mine = Prefixes(), text(range(4 * BLOCK))
    prefixes.sent(mine, "", ONE)
    other = text([5])
    assert prefixes.find(mine, "a") == ()
    prefixes.sent(other, "a", OTHER)
    assert prefixes.find(mine, "a") == (OTHER,)
    assert prefixes.find(text([5], "s"), "a") == prefixes.find(other, "b") == ()
    prefixes.sent(other, "a", ONE)
    assert prefixes.find(other, "a") == (ONE,)
    prefixes.forget(ONE)
    assert prefixes.find(other, "a") == ()


async def test_routers_agree_on_the_replica_of_a_session() -> None:
    """Guards sessions whose requests meet different routers: each names the same replica, and few move when one goes."""
    homes: dict[str, str] = {}
    for session in map(str, range(200)):
        [[homes[session]], _] = await Router({"a": 0, "b": 0, "c": 0}).ranks("s", (), session)
        assert (await Router({"c": 2, "a": 1, "b": 3}).ranks("t", (), session))[0] == [homes[session]]
        [[left], _] = await Router({"a": 0, "b": 0}).ranks("s", (), session)
        assert left == homes[session] or homes[session] == "c"
    assert min(list(homes.values()).count(home) for home in "abc") > 40
    assert sorted((await Router(dict.fromkeys("ab", 0) | {homes["1"]: 30}).ranks("s", (), "1"))[0]) != [homes["1"]]
    assert (await Router({"a": 0, "b": 0}).ranks("s", ("b",), "1"))[0] == ["b"]


async def test_a_session_that_was_sent_elsewhere_comes_back() -> None:
    """Guards a session against a router that keeps sending it where it went once, while all others agree on its replica."""
    leases: list[tuple[Sequence[str], str]] = []

    async def given_at_once() -> AsyncIterator[str]:
        yield f"{ONE} secret"

    def choose(session: str, preferred: Sequence[str] = (), affinity: str = "") -> Lease:
        leases.append((tuple(preferred), affinity))
        return Held(given_at_once())

    prefixes, plain = Prefixes(), replace(text(range(4 * BLOCK)), tier="full")
    pool = LeasePool({"full": choose}, prefixes=prefixes)
    for affinity in ("", "a"):
        prefixes.sent(plain, affinity, OTHER)
        await pool.take(plain, affinity)
    assert leases == [((OTHER,), ""), ((), "a")]

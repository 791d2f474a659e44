"""A cascade across Ray nodes, each on a host of its own: links, routers, and nodes that are drained, killed and cut off.

In this order: what a test takes away it brings back, or puts another in its place.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from cascade import Completion, SamplingParams, Speculation
from tests import small
from tests.nodes.deploy import GRPC, HTTP, OWN_GRPC, OWN_HTTP
from tests.nodes.network import Network, obstacle
from tests.nodes.nodes import HEAD, Nodes, family
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif("CASCADE_NODES" not in os.environ, reason="three nodes want a while for themselves: make test-nodes"),
]

RESOURCES = {
    HEAD: {"tiny": 1, "full": 1},
    "drafting": {"medium": 1, "router": 1},
    "judging": {"full": 1, "router": 1},
    "spare": {"full": 1, "router": 1},  # started when one of them is to go
}
LONG = {"max_tokens": 192, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": prompt, "tiers": tiers, "params": {"temperature": temperature, "seed": seed, **LONG}}
    for seed, (prompt, temperature, tiers) in enumerate(
        (
            ("def read(path):\n    with open(path) as file:\n", 0.0, ["tiny", "medium"]),
            ("import os\nimport sys\n\n\ndef main():\n", 0.8, ["tiny", "medium"]),
            ("class Tree:\n    def __init__(self, left, right):\n", 0.8, ["medium"]),
            ("for index, line in enumerate(lines):\n", 1.0, None),
        )
    )
]
WHOLE = {"tiny": 1, "medium": 1, "full": 2}
EDGES = {("tiny", "medium"), ("medium", "full")}
NUM_CLIENTS = 4  # more would leave no processor to replicas that start
FAULT_S = 12.0  # a link that carries nothing is broken after ten


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    with small.cascade() as reference:
        asked = [(request["prompt"], SamplingParams(**request["params"])) for request in REQUESTS]
        return [reference.generate(*each, Speculation("off")) for each in asked]


@pytest.fixture(scope="module")
def nodes(expected: list[Completion]) -> Iterator[Nodes]:
    """Three nodes, a tier on each, two full replicas and two routers on two of them.

    Who may make namespaces is root, and not in every container.
    """
    if why := obstacle():
        pytest.skip(f"needs root, CAP_NET_ADMIN and `ip`: {why}")
    with contextlib.closing(Network()) as network:
        nodes = Nodes(network, RESOURCES)
        nodes.start(HEAD, "drafting", "judging")
        nodes.deploy(family())
        yield nodes


@dataclass
class Crowd:
    nodes: Nodes
    answers: list[dict[str, Any]]

    def answered(self, count: int) -> None:
        """Return when so many more answers have ended."""
        wanted = self.nodes.outside("ended") + count
        wait_until(lambda: self.nodes.outside("ended") >= wanted)


@contextlib.contextmanager
def crowd(nodes: Nodes, expected: Sequence[Completion], routers: Sequence[str] = ()) -> Iterator[Crowd]:
    """Clients, each with an answer under way; after it none has failed, and each text is the full model's."""
    nodes.outside("begin", addresses=routers or nodes.routers, requests=REQUESTS, num_clients=NUM_CLIENTS)
    clients = Crowd(nodes, [])
    try:
        yield clients
    finally:
        clients.answers += nodes.outside("end")
    assert [answer["error"] for answer in clients.answers if answer["error"]] == []
    for answer in clients.answers:
        assert answer["text"] == expected[answer["request"]].text
        assert answer["token_ids"] == list(expected[answer["request"]].token_ids)


def ready(nodes: Nodes) -> None:
    """Wait until two routers answer and all replicas run."""
    wait_until(lambda: [nodes.outside("describe", address=router) for router in nodes.routers].count(WHOLE) == 2)


def drafting(nodes: Nodes) -> None:
    """Wait until both edges accept guesses, whichever router is asked."""
    ready(nodes)
    for name in set(nodes.replicas("router").values()):
        request = {"address": nodes.router(name), "request": REQUESTS[0]}
        wait_until(lambda request=request: accepted(nodes.outside("ask", **request)) == EDGES)


def accepted(answer: dict[str, Any]) -> set[tuple[str, str]]:
    """Edges between tiers on which guesses were right."""
    return {(drafter, verifier) for drafter, verifier, accepted in answer["edges"] if accepted} & EDGES


def judge(nodes: Nodes) -> str:
    """The node beside the head that has a full replica."""
    (name,) = set(nodes.replicas("full").values()) - {HEAD}
    return name


def test_tiers_on_different_nodes_draft_for_each_other(nodes: Nodes, expected: list[Completion]) -> None:
    """Guards links that only work on one machine: tiers lie where their resources are, joined by addresses of nodes."""
    assert set(nodes.replicas("tiny").values()) == {HEAD}
    assert set(nodes.replicas("medium").values()) == {"drafting"}
    assert sorted(nodes.replicas("full").values()) == [HEAD, "judging"]
    assert sorted(nodes.replicas("router").values()) == ["drafting", "judging"]
    (tiny,), (medium,) = nodes.replicas("tiny"), nodes.replicas("medium")
    head, middle, judging = map(nodes.address, (HEAD, "drafting", "judging"))
    full = next(pid for pid, name in nodes.replicas("full").items() if name == "judging")
    with crowd(nodes, expected) as clients:
        wait_until(lambda: (middle, head) in nodes.joined(medium, tiny))
        wait_until(lambda: (judging, middle) in nodes.joined(full, medium))
        clients.answered(2 * len(REQUESTS))
    assert {edge for answer in clients.answers for edge in accepted(answer)} == EDGES
    drafting(nodes)


def test_every_node_has_doors(nodes: Nodes, expected: list[Completion]) -> None:
    """Guards clients who come to any node: both of the router's own servers, and both of Ray Serve's proxies."""
    body = {"prompt": REQUESTS[0]["prompt"], **REQUESTS[0]["params"]}
    for name in nodes.network.hosts:
        place, own = nodes.address(name), "router" in RESOURCES[name]
        for port in (OWN_HTTP, HTTP) if own else (HTTP,):
            answer = nodes.outside("http", url=f"http://{place}:{port}/v1/completions", body=body)
            assert answer["choices"][0]["text"] == expected[0].text, (name, port)
        for port in (OWN_GRPC, GRPC) if own else (GRPC,):
            answer = nodes.outside("ask", address=f"{place}:{port}", request=REQUESTS[0])
            assert answer["text"] == expected[0].text, (name, port)


def test_a_partition_is_a_pause(nodes: Nodes, expected: list[Completion]) -> None:
    """Guards against requests that hang, and tiers that are not joined again, where two nodes did not hear each other."""
    (medium,) = nodes.replicas("medium")
    full = next(pid for pid, name in nodes.replicas("full").items() if name == "judging")
    with crowd(nodes, expected) as clients:
        nodes.network.cut("drafting", "judging")
        time.sleep(FAULT_S)
        clients.answered(NUM_CLIENTS)
        assert not nodes.joined(full, medium)
        nodes.network.heal("drafting", "judging")
        wait_until(lambda: nodes.joined(full, medium))
        clients.answered(NUM_CLIENTS)
    drafting(nodes)


def test_a_killed_drafter_is_done_without(nodes: Nodes, expected: list[Completion]) -> None:
    """Guards requests whose medium tier and whose router die at once, with their whole node; drafting comes back with it."""
    with crowd(nodes, expected) as clients:
        nodes.network.remove("drafting")
        clients.answered(2 * NUM_CLIENTS)
        nodes.start("drafting")
        ready(nodes)
        clients.answered(NUM_CLIENTS)
    drafting(nodes)


def test_a_full_replica_vanishes_with_its_node(nodes: Nodes, expected: list[Completion]) -> None:
    """Guards against machines that lose power, whose connections nobody closes: requests go on at the other full replica."""
    name = judge(nodes)
    with crowd(nodes, expected, [nodes.router("drafting")]) as clients:
        nodes.network.remove(name, silently=True)
        clients.answered(2 * NUM_CLIENTS)
        nodes.start(name)
        ready(nodes)
        clients.answered(NUM_CLIENTS)
    drafting(nodes)


def test_the_head_dies_and_comes_back(nodes: Nodes, expected: list[Completion]) -> None:
    """Guards requests against the loss of Ray's head, with Serve's controller, the tiny tier and a full replica on it."""
    with crowd(nodes, expected) as clients:
        nodes.network.remove(HEAD)
        clients.answered(2 * NUM_CLIENTS)
        nodes.start(HEAD)
        ready(nodes)
        clients.answered(NUM_CLIENTS)
    drafting(nodes)


def test_workers_are_exchanged_one_after_another(nodes: Nodes, expected: list[Completion]) -> None:
    """Guards planned ends of machines: what a drained node holds starts elsewhere, and nobody fails."""
    old = sorted(set(nodes.network.hosts) - {HEAD})
    nodes.start(*({"judging", "spare"} - set(old)))
    with crowd(nodes, expected) as clients:
        for name in old:
            nodes.drain(name)
            wait_until(lambda name=name: name not in {*nodes.replicas("full").values(), *nodes.replicas("router").values()})
            clients.answered(NUM_CLIENTS)
            nodes.network.remove(name)
            nodes.start(name)
            ready(nodes)
    drafting(nodes)

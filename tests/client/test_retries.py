"""Clients go on when servers die: real connections that are torn, in front of a whole server in this process."""

import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cascade.answer import Chunk, Completion
from cascade.client import Client
from cascade.client.connection import FIRST_PAUSE_S, MOST_PAUSE_S, Attempts, Unreached
from cascade.client.rpc import handlers_of
from cascade.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from cascade.params import SamplingParams, Structured
from cascade.v1 import serving_pb2 as pb
from deployments.ops.launch import free_port
from tests.chat.test_turns import CALLS
from tests.client.conftest import PIECES, Canned
from tests.in_process import House, house, serving
from tests.links.net import relay
from tests.talkers import conversing
from tests.waiting import LONG_S, wait_until

PROMPT = "def read(path):\n    with open(path) as file:\n"
served = serving(pass_s=0.001)
parrots = conversing()


@contextlib.asynccontextmanager
async def tearing(house: House) -> AsyncIterator[tuple[str, list[int]]]:
    """An address, and the bytes that came through each connection before it was gone; after it no tier has anything left."""
    lot, rooms = random.Random(1), list[int]()

    def room() -> int:
        rooms.append(lot.randint(600, 2000))
        return rooms[-1]

    async with relay(house.grpc, room) as (address, _):
        yield address, rooms
    house.settle()


def completion(pieces: list[Chunk]) -> Completion:
    """What the last piece brings, which the pieces join to."""
    ended = pieces[-1].completion
    assert "".join(piece.text for piece in pieces) == ended.text
    assert tuple(itertools.chain(*(piece.token_ids for piece in pieces))) == ended.token_ids
    assert b"".join(piece.origins for piece in pieces) == ended.origins
    assert sum((piece.logprobs for piece in pieces), ()) == ended.logprobs
    return ended


def essence(ended: Completion) -> tuple[object, ...]:
    """What may not depend on how it came."""
    stats = ended.stats
    counts = stats.prompt_tokens, stats.completion_tokens
    return ended.text, ended.token_ids, ended.finish_reason, ended.seed, ended.logprobs, ended.prompt, counts


SAMPLED = {
    "unseeded": SamplingParams(max_tokens=90, ignore_eos=True),
    "shaped": SamplingParams(
        max_tokens=60, seed=5, presence_penalty=0.5, repetition_penalty=1.2, min_tokens=55, logprobs=1, prompt_logprobs=1
    ),
    "structured": SamplingParams(max_tokens=80, seed=6, structured=Structured(regex="([a-z]{1,9} ){40,60}")),
}


@pytest.mark.parametrize("name", SAMPLED)
async def test_broken_streams_go_on(connect: Any, served: House, name: str) -> None:
    """Guards answers against the death of a router: none fails, none changes, none is told twice, also without a seed."""
    params = SAMPLED[name]
    async with tearing(served) as (address, rooms), connect(address) as client:
        ended = completion([piece async for piece in client.stream(PROMPT, params)])
    assert len(rooms) > 2
    assert params.seed in (None, ended.seed)
    with Client(served.grpc) as client:
        assert essence(ended) == essence(client.generate(PROMPT, replace(params, seed=ended.seed)))


async def test_broken_turns_go_on(connect: Any, parrots: House) -> None:
    """Guards calls of tools whose stream breaks: one call, with an id and whole arguments."""
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    params = SamplingParams(max_tokens=200, temperature=0, seed=1)
    messages = [{**CALLS, "content": "one two three " * 12 + CALLS["content"]}]
    with Client(parrots.grpc) as client:
        expected = client.chat(messages, params, tools=tools)
    async with tearing(parrots) as (address, rooms), connect(address) as client:
        pieces = [piece async for piece in client.stream_chat(messages, params, tools=tools)]
    assert len(rooms) > 1
    turn = pieces[-1].turn
    assert (turn.content, turn.finish_reason) == (expected.content, "tool_calls")
    [call] = turn.calls
    assert (call.name, call.arguments, bool(call.id)) == ("get_weather", expected.calls[0].arguments, True)
    assert essence(turn.completion) == essence(expected.completion)


async def test_clients_take_turns_among_addresses(connect: Any, served: House) -> None:
    """Guards clusters without a balancer: all servers are asked, and a dead one, at the start or later, costs no answer."""
    params = SamplingParams(max_tokens=60, seed=8, ignore_eos=True)
    nobody = f"127.0.0.1:{free_port()}"
    with house(pass_s=0.001) as other:
        async with connect([nobody, served.grpc, other.grpc]) as client:
            stream = client.stream(PROMPT, params)
            pieces = [await anext(stream)]
            for _ in range(4):
                assert (await client.generate(PROMPT, SamplingParams(max_tokens=4, seed=1))).token_ids
            pieces += [piece async for piece in stream]
        assert b"length" in other.router.admission.metrics.text()
        other.settle()
    async with connect((other.grpc, served.grpc)) as client:  # the first is gone by now
        assert (await client.generate(PROMPT, params)).token_ids == completion(pieces).token_ids


# when it is enough


def test_patience_and_deadlines_end(server: Canned) -> None:
    """Guards against asking for ever: the server's own sentence after the patience, or the deadline if that is sooner."""
    server.status = grpc.StatusCode.UNAVAILABLE
    with Client(server.address, patience_s=0.5) as client:
        with pytest.raises(Unavailable, match=r"^one sentence \(tried for [0-9.]+ s\)$"):
            client.generate("p")
        assert len(server.requests) > 2
        with pytest.raises(Unavailable, match=r"^one sentence \(tried for [0-9.]+ s\)$"):
            list(client.stream("p"))
    num_before = len(server.requests)
    with Client(server.address, timeout=0.5) as client, pytest.raises((Unavailable, DeadlineExceeded)):
        client.generate("p")
    assert len(server.requests) > num_before + 2


def test_a_long_wait_costs_no_patience(server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards who waited long before their server died, or vanished: they were told at once, and no other server was asked."""

    def late(self: Canned, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self._note(request, context)
        if len(self.requests) == 1:
            time.sleep(0.6)
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield from PIECES

    monkeypatch.setattr(Canned, "Generate", late)
    with Client(server.address, patience_s=0.3) as client:
        assert client.generate("p").text == "abc"


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL]
)
def test_what_is_refused_is_not_asked_again(server: Canned, code: grpc.StatusCode) -> None:
    """Guards servers against clients that insist: full ones, too, which say when to come again."""
    server.status = code
    with Client(server.address) as client:
        for call in (lambda: client.generate("p"), lambda: list(client.stream("p"))):
            with pytest.raises((InvalidRequest, Overloaded, Exception), match=r"^one sentence$"):
                call()
    assert len(server.requests) == 2


def test_servers_that_tell_no_seed_are_not_gone_on_with(server: Canned) -> None:
    """Guards texts against servers of before: without a seed the rest would be another text's; half a text is no answer."""
    server.hasty = True
    with Client(server.address) as client:
        with pytest.raises(Unavailable, match="before the text was complete"):
            list(client.stream("p"))
        assert len(server.requests) == 1
        stream = client.stream("p", SamplingParams(seed=3))
        assert [next(stream).token_ids for _ in range(3)] == [(11,)] * 3
        stream.close()
    assert [list(request.resume.token_ids) for request in server.requests[1:]] == [[], [11], [11, 11]]


def test_answers_that_are_whole_are_not_gone_on_with(server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the end of an answer: a connection that breaks after its last piece has nothing more to bring."""

    def breaks(self: Canned, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self._note(request, context)
        yield from PIECES
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    monkeypatch.setattr(Canned, "Generate", breaks)
    with Client(server.address) as client:
        assert completion(list(client.stream("p"))).text == "abc"
    assert len(server.requests) == 1


def test_pauses_grow_and_differ() -> None:
    """Guards the servers that are left against all clients of a dead one at once."""
    attempts, others = Attempts(99, None), Attempts(99, None)
    pauses = [[attempt.failed(Unavailable("gone")) for _ in range(9)] for attempt in (attempts, others)]
    assert pauses[0] != pauses[1]
    for number, pause in [*enumerate(pauses[0]), *enumerate(pauses[1])]:
        most = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2**number)
        assert most / 2 <= pause <= most
    attempts.received()
    assert attempts.failed(Unavailable("gone")) <= FIRST_PAUSE_S


def test_who_lost_an_answer_waits_for_a_full_server() -> None:
    """Guards the crowd that a dead router leaves: those beside it may be full, and say when they are not."""
    with pytest.raises(Overloaded):
        Attempts(99, None).failed(Overloaded("full", 7))
    attempts = Attempts(99, None)
    attempts.failed(Unavailable("gone"))
    assert attempts.failed(Overloaded("full", 7)) > 7
    assert attempts.failed(Unavailable("gone")) < 7


def test_a_new_client_waits_for_a_server_that_restarts() -> None:
    """Guards who comes while a router is away: their requests failed at once, though it was back in seconds."""
    port = free_port()
    with Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(Unreached, match="No server answers"):
            client.describe()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.generate, "p")
            wait_until(lambda: client._servers[0].avoided_until)
            server = grpc.server(ThreadPoolExecutor(2))
            server.add_generic_rpc_handlers((handlers_of(Canned()),))
            server.add_insecure_port(f"127.0.0.1:{port}")
            server.start()
            try:
                assert answer.result(LONG_S).text == "abc"
            finally:
                server.stop(None)


def test_who_runs_out_of_time_is_told_why() -> None:
    """Guards the reason of a failure: a deadline that ended the last of many calls told of itself alone."""
    attempts = Attempts(99, None)
    attempts.failed(Unavailable("the controller does not say"))
    with pytest.raises(Unavailable, match="does not say"):
        attempts.failed(DeadlineExceeded("too late"))
    attempts.received()
    with pytest.raises(DeadlineExceeded, match="too late"):
        attempts.failed(DeadlineExceeded("too late"))

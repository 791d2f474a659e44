"""Routers that are killed while they write: clients go on at another one, and nothing stays on the tiers."""

import asyncio
import os
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait

import psutil
from ray import serve

from cascade import Cascade, Completion, SamplingParams, Speculation
from cascade.client import AsyncClient, Client
from deployments.ops.launch import APPLICATION, Server
from tests.served.test_serve import PROMPT, pages, settle
from tests.waiting import LONG_S, wait_until

CHAINS = (None, ("tiny",), ("tiny", "medium"))
NUM_CLIENTS = 6
NUM_ANSWERS = 2  # of each client, one after the other


def params_of(client: int, turn: int) -> SamplingParams:
    return SamplingParams(max_tokens=240, temperature=0.9, seed=100 * (client % 4) + turn, ignore_eos=True, logprobs=0)


def own_ports(port: int) -> set[int]:
    """Our own ends of connections to routers."""
    return {end.laddr.port for end in psutil.Process().net_connections("tcp") if end.raddr and end.raddr.port == port}


def writers(port: int) -> list[int]:
    """The processes that hold the other ends of our connections."""
    own = own_ports(port)
    ends = [end for end in psutil.net_connections("tcp") if end.laddr.port == port and end.raddr and end.raddr.port in own]
    return [end.pid for end in ends if end.pid is not None]


def num_routers() -> int:
    return int(serve.status().applications[APPLICATION].deployments["router"].replica_states.get("RUNNING", 0))


def resumed(url: str) -> dict[str, float]:
    """Answers that clients went on with, as each of two routers counts them."""
    return {page.router: page.total("resumed_answers_total") for page in pages(url)}


def essence(answer: Completion) -> tuple[object, ...]:
    return answer.text, answer.token_ids, answer.finish_reason, answer.stats.prompt_tokens, answer.stats.completion_tokens


def test_killed_routers_cost_no_answer(server: Server, reference: Cascade) -> None:
    """Guards against failed answers, and other texts, when the process of a router dies under load."""
    wait_until(lambda: num_routers() == 2)
    turns = [(client, turn) for client in range(4) for turn in range(NUM_ANSWERS)]
    answers = reference.generate([PROMPT] * len(turns), [params_of(*turn) for turn in turns], Speculation("off"))
    expected = dict(zip(turns, map(essence, answers), strict=True))
    before, begun = resumed(server.url), set[int]()

    def stream(number: int) -> list[Completion]:
        with Client(server.address, timeout=LONG_S) as client:
            answers = []
            for turn in range(NUM_ANSWERS):
                pieces = []
                for piece in client.stream(PROMPT, params_of(number, turn), Speculation(tiers=CHAINS[number % 3])):
                    pieces.append(piece)
                    begun.add(number)
                ended = pieces[-1].completion
                assert "".join(piece.text for piece in pieces) == ended.text
                assert len(ended.logprobs) == len(ended.token_ids)
                answers.append(ended)
            return answers

    async def whole(number: int) -> list[Completion]:
        async with AsyncClient([server.address, server.address], timeout=LONG_S) as client:
            return [await client.generate(PROMPT, params_of(number, turn)) for turn in range(NUM_ANSWERS)]

    port = int(server.address.rpartition(":")[2])
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        crowd = {n: threads.submit(stream, n) for n in range(NUM_CLIENTS) if n % 4}
        wait_until(lambda: len(begun) == len(crowd))
        victim, open_ = writers(port)[0], own_ports(port)
        crowd |= {n: threads.submit(asyncio.run, whole(n)) for n in range(NUM_CLIENTS) if n % 4 == 0}
        wait_until(lambda: bool(own_ports(port) - open_))  # streams may have ended meanwhile
        os.kill(victim, signal.SIGKILL)
        wait(crowd.values(), LONG_S)
        for number, answers in crowd.items():
            wanted = [expected[number % 4, turn] for turn in range(NUM_ANSWERS)]
            assert [essence(answer) for answer in answers.result(0)] == wanted
    assert not psutil.pid_exists(victim)
    settle()
    wait_until(lambda: num_routers() == 2)
    assert any(count > before.get(router, 0) for router, count in resumed(server.url).items())
    with urllib.request.urlopen(f"{server.url}/health", timeout=LONG_S) as answer:
        assert answer.status == 200

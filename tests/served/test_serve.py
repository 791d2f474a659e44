"""The served system: three tiers in Ray Serve, gRPC in between and in front, on the small models."""

import asyncio
import contextlib
import functools
import os
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from typing import Any

import grpc
import openai
import psutil
import pytest
from openai import OpenAI
from ray import serve
from ray.serve.exceptions import RayServeException

from cascade import Cascade, Completion, InvalidRequest, SamplingParams, Speculation, Structured
from cascade.cli.top import Scrape, scrape
from cascade.client import AsyncClient, Client
from cascade.client.exchange import encode_request
from cascade.client.rpc import stub_of
from cascade.params import Handling
from cascade.settings.config import CascadeConfig
from cascade.v1 import serving_pb2 as pb
from deployments.ops.launch import APPLICATION, Server
from tests import small
from tests.conftest import Cluster
from tests.waiting import LONG_S, wait_until

PROMPT = "def read(path):\n    with open(path) as file:\n"
SHORT = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
CHAINS = (("tiny", "medium"), ("medium",), ("tiny",), ())


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def nothing_left(server: Server) -> Iterator[None]:
    """After all tests nothing may be left on any tier. Held leases take seconds to end, so not after each."""
    yield
    settle()


@functools.cache
def handle(tier: str) -> Any:
    return serve.get_deployment_handle(tier, APPLICATION)


def replicas(tier: str) -> dict[int, dict[str, Any]]:
    """All running replicas of a tier by process id; there is at least one again when this returns."""
    states = dict[int, dict[str, Any]]()

    def all_answered() -> bool:
        states.clear()
        with contextlib.suppress(RayServeException):  # the handle knows of none yet
            answers = handle(tier).broadcast("describe").results(timeout_s=LONG_S, return_exceptions=True)
            states.update((state["pid"], state) for state in answers if isinstance(state, dict))
        running = serve.status().applications[APPLICATION].deployments[tier].replica_states.get("RUNNING", 0)
        return len(states) >= max(1, running)

    wait_until(all_answered, lambda: f"not all replicas of {tier} answer")
    return states


def busy(tiers: Sequence[str]) -> dict[str, int]:
    """The process of a replica of each that has a session, all asked at once: the answer does not wait meanwhile."""
    with ThreadPoolExecutor(len(tiers)) as threads:
        return dict(zip(tiers, threads.map(_busy, tiers), strict=True))


def _busy(tier: str) -> int:
    pids: list[int] = []

    def any_works() -> bool:
        pids[:] = [pid for pid, state in replicas(tier).items() if state["sessions"]]
        return bool(pids)

    wait_until(any_works, lambda: f"no replica of {tier} has a session")
    return pids[0]


def settle() -> None:
    """Wait until no tier has a session, a lease or a session below it."""

    def left() -> list[tuple[Any, ...]]:
        states = [(tier, state) for tier in small.NAMES for state in replicas(tier).values()]
        held = [(tier, state["sessions"], state["leases"], state["drafting"]) for tier, state in states]
        return [session for session in held if any(session[1:])]

    wait_until(lambda: not left(), lambda: f"left behind (tier, sessions, leases, drafting): {left()}", every_s=0.1)


def pages(url: str) -> list[Scrape]:
    by_router: dict[str, Scrape] = {}

    def both() -> bool:
        page = scrape(url)
        by_router[page.router] = page
        return len(by_router) == 2

    wait_until(both)
    return [*by_router.values()]


def alone(reference: Cascade, params: SamplingParams) -> Completion:
    return reference.generate(PROMPT, params, Speculation("off"))


def test_killed_replicas_are_a_pause(client: Client, reference: Cascade) -> None:
    """Guards against an error or another text when the processes of two tiers die in the middle of a request."""
    params = SamplingParams(max_tokens=900, temperature=0.9, seed=7, ignore_eos=True)
    expected = alone(reference, params)
    stream = client.stream(PROMPT, params, Speculation(tiers=("tiny", "medium")))
    chunks = [next(stream)]
    for victim in busy(("medium", "full")).values():
        os.kill(victim, signal.SIGKILL)
        chunks += [next(stream) for _ in range(10)]
    chunks += stream
    completion = chunks[-1].completion
    assert completion.text == expected.text


SHAPE: Any = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {300: 3.0}}
PARAMS = {
    "greedy": SamplingParams(max_tokens=48, temperature=0),
    "top_k": SamplingParams(max_tokens=48, temperature=0.7, seed=1, top_k=40),
    "top_p": SamplingParams(max_tokens=48, temperature=1.5, seed=2, top_p=0.95),
    "min_p": SamplingParams(max_tokens=48, temperature=1.0, seed=3, min_p=0.02),
    "shaped": SamplingParams(max_tokens=48, temperature=0.9, seed=4, min_tokens=40, logprobs=2, **SHAPE),
    "structured": SamplingParams(
        max_tokens=48, temperature=1.1, seed=5, structured=Structured(regex=r"x = \[[0-9]{3}(, [0-9]{3}){5}\]")
    ),
}


@pytest.mark.parametrize("name", PARAMS)
def test_served_text_is_the_full_models(client: Client, reference: Cascade, name: str) -> None:
    """Guards the promise from the client's side: every subset and window gives the full model's own text."""
    tiers, params = CHAINS[[*PARAMS].index(name) % len(CHAINS)], PARAMS[name]
    expected = alone(reference, params)
    served = client.generate(PROMPT, params, Speculation(tiers=tiers, window=3 + 5 * len(tiers)))
    assert (served.text, served.token_ids) == (expected.text, expected.token_ids)
    assert served.finish_reason == expected.finish_reason
    assert len(served.logprobs) == (len(served.token_ids) if params.logprobs is not None else 0)
    for logprob, other in zip(served.logprobs, expected.logprobs, strict=True):
        assert logprob.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [value for _, value in logprob.top] == pytest.approx([value for _, value in other.top], abs=1e-3)
    assert {e.drafter for e in served.stats.edges if e.verifier == "full"} - {""} <= set(tiers)


def test_recovered_tiers_draft_again(client: Client) -> None:
    """Guards against speculation that stays off after a death: with all replicas back, which are told of, the chain works."""

    def whole_chain() -> bool:
        params, every = SamplingParams(max_tokens=64, temperature=0), Speculation(tiers=("tiny", "medium"))
        edges = client.generate(PROMPT, params, every).stats.edges
        accepted = {(edge.drafter, edge.verifier): edge.accepted for edge in edges}
        return accepted.get(("medium", "full"), 0) > 0 and ("tiny", "medium") in accepted

    wait_until(whole_chain)
    wait_until(lambda: [tier.replicas for tier in client.describe().tiers] == [1, 1, 2])
    info = client.describe()
    assert ([tier.name for tier in info.tiers], info.max_model_len) == ([*small.NAMES], 1024)
    assert info.tiers[0].parameters < info.tiers[1].parameters < info.tiers[2].parameters


def test_any_router_aborts_for_all(server: Server, client: Client) -> None:
    """Guards two routers after one port: Abort reached the requests of one of them, 0 of 8; pages say whose they are."""
    sampling = pb.Sampling(max_tokens=900, seed=1, ignore_eos=True)
    own = [("grpc.use_local_subchannel_pool", 1)]  # connections of their own, which the kernel spreads over routers
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(server.address, options=own)) for _ in range(9)]
        *stubs, aborting = map(stub_of, channels)
        request = pb.GenerateRequest(prompt=PROMPT, sampling=sampling)
        calls = [stub.Generate(request, metadata=(("request_id", "ours"),)) for stub in stubs]
        for call in calls:
            next(call)
        assert aborting.Abort(pb.AbortRequest(request_id="ours"), timeout=LONG_S).aborted == 8
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.ABORTED
    wait_until(lambda: sum(page.total("answers_total") for page in pages(server.url)) >= 8)


def test_prompts_that_begin_alike_are_read_once(server: Server, client: Client) -> None:
    """Guards the preference for a replica on its whole way: the router, Serve's router, what replicas say of themselves."""

    def counts() -> tuple[int, int]:
        states = replicas("full").values()
        return sum(state["queried"] for state in states), sum(state["reused"] for state in states)

    before = counts()
    for number in range(16):
        prompt = [*range(1000, 1160), number]
        client.generate(prompt, SHORT)
        client.generate(prompt, SHORT, handling=Handling(cache_salt=f"tenant {number}"))
    queried, reused = (now - then for now, then in zip(counts(), before, strict=True))
    assert queried == 32 * 161
    assert reused >= 12 * 160


def test_a_clients_session_meets_one_replica(server: Server, client: Client) -> None:
    """Guards sessions that clients name, whose requests meet both routers and have nothing in common."""

    def requests_of() -> dict[int, int]:
        return {pid: state["queried"] for pid, state in replicas("full").items()}

    together, every = 0, 0  # tokens of prompts
    own = [("grpc.use_local_subchannel_pool", 1)]  # connections of their own, which the kernel spreads over routers
    for session in ("one", "two", "three"):
        before = requests_of()
        for number in range(8):
            request = encode_request(f"{number} of {session}", SHORT, None)
            with grpc.insecure_channel(server.address, options=own) as channel:
                stub_of(channel).Complete(request, metadata=(("x-session-id", session),))
        grown = [count - before[pid] for pid, count in requests_of().items()]
        together, every = together + max(grown), every + sum(grown)
    assert together >= 0.8 * every > 0


# behind Ray Serve's own proxies, as in a cluster: the same service, gRPC and HTTP


ASKED: Any = {"model": "small-full", "prompt": PROMPT}


def test_both_proxies_give_the_full_models_text(cluster: Cluster, reference: Cascade) -> None:
    """Guards both proxies: text, conversations (without a template the prompt alone) and errors, whole and streamed."""
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=11)
    expected = alone(reference, params).text
    messages = [{"role": "user", "content": PROMPT}]
    with Client(cluster.grpc) as client:
        assert client.generate(PROMPT, params).text == expected
        assert "".join(piece.content for piece in client.stream_chat(messages, params)) == expected
        with pytest.raises(InvalidRequest, match="messages: list should have at least 1 item"):
            client.chat([], params)
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        pieces = client.completions.create(**ASKED, max_tokens=48, temperature=0.8, seed=11, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == expected
        with pytest.raises(openai.BadRequestError, match="empty"):
            client.completions.create(model="small-full", prompt="")
    settle()


def test_clients_that_leave_free_every_tier(cluster: Cluster) -> None:
    """Guards against work for clients that are gone behind proxies that tell late."""
    long: Any = {**ASKED, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        with client.completions.create(**long, stream=True) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(**long)
    with Client(cluster.grpc) as client:
        stream = client.stream(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True))
        next(stream)
        stream.close()
    settle()


# Ray Serve scales a draft tier, of some of the full model's layers, by its sessions: leases are what it counts


SCALED = "scaled"
QUICK = {"upscale_delay_s": 0, "downscale_delay_s": 2, "metrics_interval_s": 0.5, "look_back_period_s": 2}


def num_replicas() -> int:
    states = serve.status().applications[SCALED].deployments["tiny"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def test_a_draft_tier_comes_when_it_is_asked_for_and_goes_when_it_is_not(cluster: Cluster) -> None:
    """Guards scaling to zero, and a tier of the model's own layers in a process of its own: no answer waits or changes."""
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=3, ignore_eos=True)
    values = small.config().model_dump(mode="json")
    full = values["tiers"][-1]
    part = deepcopy(full) | {"name": "tiny"}
    part["engine_kwargs"]["layers"] = ["0-3", 5]
    scaled = {"min_replicas": 0, "max_replicas": 1, "target_ongoing_requests": 4, **QUICK}
    part["deployment_config"] |= {"num_replicas": None, "autoscaling_config": scaled}
    config = CascadeConfig.parse({**values, "tiers": [part, full]})
    with Server.start(config, port=0, name=SCALED) as server, Client(server.address) as client:
        assert num_replicas() == 0
        alone = client.generate(PROMPT, params, Speculation("off"))

        def drafted() -> bool:
            answer = client.generate(PROMPT, params, Speculation(tiers=("tiny",)))
            assert answer.token_ids == alone.token_ids
            return any(edge.drafter == "tiny" and edge.accepted for edge in answer.stats.edges)

        assert not drafted()
        wait_until(drafted, serve.status)
        assert num_replicas() == 1
        wait_until(lambda: not num_replicas(), serve.status)


# routers that are killed while they write: clients go on at another one, and nothing stays on the tiers


DRAFTERS = (None, ("tiny",), ("tiny", "medium"))
NUM_CLIENTS = 6
NUM_ANSWERS = 2  # of each client, one after the other


def params_of(client: int, turn: int) -> SamplingParams:
    return SamplingParams(max_tokens=240, temperature=0.9, seed=100 * (client % 4) + turn, ignore_eos=True, logprobs=0)


def own_ports(port: int) -> set[int]:
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
                for piece in client.stream(PROMPT, params_of(number, turn), Speculation(tiers=DRAFTERS[number % 3])):
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

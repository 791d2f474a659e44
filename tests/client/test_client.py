"""The clients against a server that answers as told: what they ask it, and what they make of its answers."""

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from cascade import Completion, InvalidRequest, SamplingParams, Speculation, Structured
from cascade.client import AsyncClient, Client, ServerInfo
from cascade.client.exchange import encode_request
from cascade.client.wire import decode_handling, decode_sampling, decode_speculation
from cascade.messages import Edge, Logprobs, origin
from cascade.params import Handling
from cascade.v1 import serving_pb2 as pb
from tests.client.canned import Canned
from tests.waiting import LONG_S


def check(completion: Completion | None) -> None:
    """The completion is what the server said, all of it."""
    assert completion is not None
    assert (completion.text, completion.token_ids) == ("abc", (11, 12, 13))
    assert (completion.finish_reason, completion.seed) == ("length", 7)
    assert (completion.stats.prompt_tokens, completion.stats.completion_tokens) == (4, 3)
    assert completion.stats.edges == (Edge("tiny", "full", 2, 3, 1, 3, 0.25, [1]),)
    assert (completion.stats.first_token_s, completion.stats.undrafted) == (0.125, "late")
    assert completion.origins == bytes([origin(0), origin(1, replaced=0), origin(1)])
    assert completion.logprobs == (Logprobs(-0.5, ((11, -0.5), (9, -1.0))), Logprobs(0.0), Logprobs(-2.0, ((8, -0.25),)))


# answers


async def test_answers_arrive_whole(client: Client, async_client: AsyncClient) -> None:
    """Guards against fields that a client forgets, and answers against differing: whole or streamed, of either client."""
    check(client.generate("p"))
    check(await async_client.generate("p"))
    for chunks in (list(client.stream("p")), [chunk async for chunk in async_client.stream([1, 2])]):
        assert [(chunk.text, chunk.token_ids, chunk.ends) for chunk in chunks] == [("a", (11,), (1,)), ("bc", (12, 13), (2, 3))]
        assert chunks[0].completion is None
        assert chunks[1].origins == bytes([origin(1, replaced=0), origin(1)])
        assert chunks[0].logprobs + chunks[1].logprobs == chunks[1].completion.logprobs  # type: ignore[union-attr]
        check(chunks[-1].completion)


async def test_describe(client: Client, async_client: AsyncClient) -> None:
    """Guards against fields in the wrong place."""
    info = client.describe()
    assert isinstance(info, ServerInfo)
    assert (info.max_model_len, info.window, info.version, info.branches) == (64, 16, "1.2.3", 8)
    [tier] = info.tiers
    assert (tier.name, tier.model, tier.replicas, tier.sessions) == ("full", "toy", 2, 3)
    assert (tier.context_len, tier.vocab_size, tier.parameters, tier.device) == (64, 32, 2**40, "cpu")
    assert tier.worth == (("tiny", True, 4, 1.25),)
    assert await async_client.describe() == info


async def test_answers_may_be_large(client: Client, async_client: AsyncClient, server: Canned) -> None:
    """Guards long answers with log-probabilities: more than gRPC's 4 MiB were refused by the client, as overload."""
    server.text = "x" * 5 * 2**20
    assert client.generate("p").text == (await async_client.generate("p")).text == server.text


# requests

STRUCTURED = (
    Structured(json_schema={"type": "integer"}),
    Structured(json_object=True),
    Structured(regex="a+"),
    Structured(choice=("a", "b")),
    Structured(grammar='start: "a"'),
)


def test_requests_say_everything(server: Canned) -> None:
    """Guards against parameters that the client drops or that arrive as others, each kind of structured output among them."""
    shape: dict[str, Any] = {"logit_bias": {7: -1.5, 3: 100}, "min_tokens": 2, "logprobs": 0, "prompt_logprobs": 3}
    penalties = {"presence_penalty": -0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    params = SamplingParams(5, 0.5, 3, 0.25, 0.125, 2**63 - 1, ("x", "y"), (1, 2), True, **penalties, **shape)
    speculation, handling = Speculation(tiers=("tiny",), window=4, branches=2), Handling(-3, "mine")
    with Client(server.address, application="mine") as client:
        client.generate([1, 2**32 - 1], params, speculation, handling)
    [request] = server.requests
    assert server.metadata["application"] == "mine"
    assert list(request.token_ids.ids) == [1, 2**32 - 1]
    said = {kind.name for kind, _ in request.sampling.ListFields()}
    assert (
        said
        == set(pb.Sampling.DESCRIPTOR.fields_by_name) - {"structured"}
        == {one.name for one in fields(params)} - {"structured"}
    )
    decoded = decode_sampling(request.sampling), decode_speculation(request.speculation), decode_handling(request)
    assert decoded == (params, speculation, handling)
    for kind in STRUCTURED:
        params = SamplingParams(structured=kind)
        assert decode_sampling(encode_request("p", params, None).sampling) == params


def test_what_is_not_set_is_not_nought() -> None:
    """Guards values that protobuf has no sign for: no tiers are not all tiers, no seed is not 0, no branches are not as many as
    pay."""
    unset = encode_request("p", None, Speculation())
    assert (unset.speculation.mode, list(unset.speculation.tiers)) == ("auto", [])
    assert not any(unset.speculation.HasField(name) for name in ("window", "branches"))
    assert not unset.sampling.HasField("seed")
    none = encode_request("", SamplingParams(seed=0), Speculation(tiers=(), branches=0))
    assert (none.speculation.mode, none.WhichOneof("input")) == ("off", "prompt")
    assert none.sampling.HasField("seed")
    assert decode_speculation(none.speculation) == Speculation("off", branches=0)
    assert encode_request([], None, None).WhichOneof("input") == "token_ids"


UNSAYABLE = {
    "negative id": ([1, -1], None),
    "id of 33 bits": ([2**32], None),
    "id no integer": ([1.5], None),
    "ids no integers": (["a"], None),
    "bytes": (b"abc", None),
    "nothing": (None, None),
    "a number": (5, None),
    "lone surrogate": ("a\ud800", None),
    "stop id of 33 bits": ([1], SamplingParams(stop_token_ids=(2**32,))),
    "max_tokens of 33 bits": ([1], SamplingParams(max_tokens=2**32)),
}


@pytest.mark.parametrize("kind", UNSAYABLE)
def test_what_cannot_be_said_is_refused(client: Client, server: Canned, kind: str) -> None:
    """Guards users against errors of protobuf, and against a prompt that arrives as another."""
    prompt: Any
    prompt, params = UNSAYABLE[kind]
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        client.generate(prompt, params)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        next(client.stream(prompt, params))
    assert server.requests == []


# weight


@pytest.mark.parametrize(
    ("module", "heavy"), [("cascade", "torch grpc"), ("cascade.client", "torch ray transformers numpy pydantic")]
)
def test_what_needs_no_model_is_light(module: str, heavy: str) -> None:
    """Guards clients, and who needs only a part, against half a minute of imports and a gigabyte of libraries."""
    code = f"import sys, {module}; print(*{{*{heavy.split()}}} & {{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=True)
    assert done.stdout.split() == []

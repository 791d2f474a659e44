"""The clients against a server that answers as told: what they ask it, and what they make of its answers."""

from dataclasses import fields
from typing import Any

import pytest

from cascade import Completion, InvalidRequest, SamplingParams, Speculation, Structured
from cascade.client import Client
from cascade.client.exchange import encode_request
from cascade.client.wire import decode_handling, decode_sampling, decode_speculation
from cascade.messages import Edge, Logprobs, origin
from cascade.params import Handling
from cascade.v1 import serving_pb2 as pb
from tests.client.canned import FINISH, TOKENS, Canned


def check(completion: Completion | None) -> None:
    """The completion is what the server said, all of it."""
    assert (completion.text, completion.token_ids) == ("abc", (11, 12, 13))
    assert (completion.finish_reason, completion.seed) == ("length", 7)
    assert (completion.stats.prompt_tokens, completion.stats.completion_tokens) == (4, 3)
    assert completion.stats.edges == (Edge("tiny", "full", 2, 3, 1, 3, 0.25, [1]),)
    assert (completion.stats.first_token_s, completion.stats.undrafted) == (0.125, "late")
    assert completion.origins == bytes([origin(0), origin(1, replaced=0), origin(1)])
    assert completion.logprobs == (Logprobs(-0.5, ((11, -0.5), (9, -1.0))), Logprobs(0.0), Logprobs(-2.0, ((8, -0.25),)))


# answers


async def test_answers_arrive_whole(connect: Any, server: Canned) -> None:
    """Guards against fields that a client forgets, and answers against differing: whole or streamed, of either client."""
    async with connect(server.address) as client:
        check(await client.generate("p"))
        chunks = [chunk async for chunk in client.stream([1, 2])]
    assert [(chunk.text, chunk.token_ids, chunk.ends) for chunk in chunks] == [("a", (11,), (1,)), ("bc", (12, 13), (2, 3))]
    assert chunks[0].completion is None
    assert chunks[1].origins == bytes([origin(1, replaced=0), origin(1)])
    assert chunks[0].logprobs + chunks[1].logprobs == chunks[1].completion.logprobs
    check(chunks[-1].completion)


async def test_describe(connect: Any, server: Canned) -> None:
    """Guards against fields in the wrong place."""
    async with connect(server.address) as client:
        info = await client.describe()
    assert (info.max_model_len, info.window, info.version, info.branches) == (64, 16, "1.2.3", 8)
    [tier] = info.tiers
    assert (tier.name, tier.model, tier.replicas, tier.sessions) == ("full", "toy", 2, 3)
    assert (tier.context_len, tier.vocab_size, tier.parameters, tier.device) == (64, 32, 2**40, "cpu")
    assert tier.worth == (("tiny", True, 4, 1.25),)


async def test_answers_may_be_large(connect: Any, server: Canned) -> None:
    """Guards long answers with log-probabilities: more than gRPC's 4 MiB were refused by the client, as overload."""
    text = "x" * 5 * 2**20
    server.pieces = [pb.GenerateResponse(text=text, tokens=TOKENS, finish=FINISH)]
    async with connect(server.address) as client:
        assert (await client.generate("p")).text == text


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
    sent = {kind.name for kind, _ in request.sampling.ListFields()}
    assert (
        sent
        == set(pb.Sampling.DESCRIPTOR.fields_by_name) - {"structured"}
        == {field.name for field in fields(params)} - {"structured"}
    )
    decoded = decode_sampling(request.sampling), decode_speculation(request.speculation), decode_handling(request)
    assert decoded == (params, speculation, handling)
    for kind in STRUCTURED:
        params = SamplingParams(structured=kind)
        assert decode_sampling(encode_request("p", params, None).sampling) == params


def test_what_is_not_set_is_not_nought() -> None:
    """Guards values that protobuf has no sign for: no tiers are not all tiers, and no seed is not 0."""
    unset = encode_request("p", None, Speculation())
    assert (unset.speculation.mode, list(unset.speculation.tiers)) == ("auto", [])
    assert not any(unset.speculation.HasField(name) for name in ("window", "branches"))
    assert not unset.sampling.HasField("seed")
    none = encode_request("", SamplingParams(seed=0), Speculation(tiers=(), branches=0))
    assert (none.speculation.mode, none.WhichOneof("input")) == ("off", "prompt")
    assert none.sampling.HasField("seed")
    assert decode_speculation(none.speculation) == Speculation("off", branches=0)
    assert encode_request([], None, None).WhichOneof("input") == "token_ids"


UNSAYABLE: list[tuple[Any, SamplingParams | None]] = [
    ([1, -1], None),
    ([2**32], None),
    ([1.5], None),
    (["a"], None),
    (b"abc", None),
    (None, None),
    (5, None),
    ("a\ud800", None),
    ([1], SamplingParams(stop_token_ids=(2**32,))),
    ([1], SamplingParams(max_tokens=2**32)),
]


@pytest.mark.parametrize(("prompt", "params"), UNSAYABLE)
def test_what_cannot_be_said_is_refused(server: Canned, prompt: Any, params: SamplingParams | None) -> None:
    """Guards users against errors of protobuf, and against a prompt that arrives as another."""
    with Client(server.address) as client:
        for call in (client.generate, lambda *given: next(client.stream(*given))):
            with pytest.raises(InvalidRequest, match="cannot be sent"):
                call(prompt, params)
    assert server.requests == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "type of a part is 'image_url': messages are",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "'function' is missing in a message, a call or a tool"),
    ],
)
def test_messages_that_cannot_be_said_are_named(server: Canned, message: Any, words: str) -> None:
    """Guards the sentence: it was the name of a key in quotes."""
    with Client(server.address) as client, pytest.raises(InvalidRequest, match=words):
        client.chat([message])


# weight

"""Behind Ray Serve's own proxies, as in a cluster: the same service, gRPC and HTTP."""

import grpc
import openai
import pytest
from openai import OpenAI

from cascade import Cascade, InvalidRequest, SamplingParams, Speculation
from cascade.client import Client
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc
from deployments.ops.launch import Server
from tests.conftest import Cluster
from tests.served.test_serve import PROMPT, settle
from tests.waiting import LONG_S

PARAMS = SamplingParams(max_tokens=48, temperature=0.8, seed=11)


@pytest.fixture(scope="module")
def served(cluster: Cluster, server: Server) -> Cluster:
    """The proxies, with an application behind them."""
    return cluster


@pytest.fixture(scope="module")
def expected(reference: Cascade) -> str:
    return reference.generate(PROMPT, PARAMS, Speculation("off")).text


def test_grpc_and_http_give_the_full_models_text(served: Cluster, expected: str) -> None:
    """Guards both proxies: the same text, whole and streamed, and nothing left on any tier."""
    with Client(served.grpc) as client:
        assert client.generate(PROMPT, PARAMS).text == expected
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        pieces = client.completions.create(
            model="small-full", prompt=PROMPT, max_tokens=48, temperature=0.8, seed=11, stream=True
        )
        assert "".join(piece.choices[0].text for piece in pieces) == expected
    settle()


def test_clients_that_leave_free_every_tier(served: Cluster) -> None:
    """Guards against work for clients that are gone behind proxies that tell late."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        with client.completions.create(
            model="small-full", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(
                model="small-full", prompt=PROMPT, max_tokens=900, extra_body={"ignore_eos": True}
            )
    with Client(served.grpc) as client:
        stream = client.stream(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    settle()


def test_conversations_pass_through(served: Cluster, expected: str) -> None:
    """Guards both calls for conversations behind Serve's proxy; a model without a template goes on behind the words."""
    messages = [{"role": "user", "content": PROMPT}]
    with Client(served.grpc) as client:
        assert client.chat(messages, PARAMS).content == expected
        assert "".join(piece.content for piece in client.stream_chat(messages, PARAMS)) == expected
        with pytest.raises(InvalidRequest, match="messages: list should have at least 1 item"):
            client.chat([], PARAMS)
    settle()


def test_errors_have_their_status(served: Cluster) -> None:
    """Guards errors on their way through the proxies: status and sentence, no traceback."""
    with grpc.insecure_channel(served.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        serving_pb2_grpc.CascadeStub(channel).Complete(pb.GenerateRequest(prompt=""), timeout=LONG_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caught.value.details()
    with (
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="empty"),
    ):
        client.completions.create(model="small-full", prompt="")

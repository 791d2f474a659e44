"""Behind Ray Serve's own proxies, as in a cluster: the same service, gRPC and HTTP."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from cascade import Cascade, InvalidRequest, SamplingParams, Speculation
from cascade.client import Client
from deployments.ops.launch import Server
from tests.conftest import Cluster
from tests.served.test_serve import PROMPT, settle

PARAMS = SamplingParams(max_tokens=48, temperature=0.8, seed=11)
ASKED: Any = {"model": "small-full", "prompt": PROMPT}


@pytest.fixture(scope="module")
def served(cluster: Cluster, server: Server) -> Cluster:
    """The proxies, with an application behind them."""
    return cluster


def test_both_proxies_give_the_full_models_text(served: Cluster, reference: Cascade) -> None:
    """Guards both proxies: text, conversations (without a template the prompt alone) and errors, whole and streamed."""
    expected = reference.generate(PROMPT, PARAMS, Speculation("off")).text
    messages = [{"role": "user", "content": PROMPT}]
    with Client(served.grpc) as client:
        assert client.generate(PROMPT, PARAMS).text == expected
        assert "".join(piece.content for piece in client.stream_chat(messages, PARAMS)) == expected
        with pytest.raises(InvalidRequest, match="messages: list should have at least 1 item"):
            client.chat([], PARAMS)
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        pieces = client.completions.create(**ASKED, max_tokens=48, temperature=0.8, seed=11, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == expected
        with pytest.raises(openai.BadRequestError, match="empty"):
            client.completions.create(model="small-full", prompt="")
    settle()


def test_clients_that_leave_free_every_tier(served: Cluster) -> None:
    """Guards against work for clients that are gone behind proxies that tell late."""
    long: Any = {**ASKED, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        with client.completions.create(**long, stream=True) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(**long)
    with Client(served.grpc) as client:
        stream = client.stream(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True))
        next(stream)
        stream.close()
    settle()

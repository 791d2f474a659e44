"""Parameters through the HTTP API: those of the library, by OpenAI's names, and log-probabilities in OpenAI's forms."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from cascade.client import Client
from cascade.params import SamplingParams
from tests.doors import House, house
from tests.router.test_http import MESSAGES, PROMPT, ask

CHOSEN: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {"77": 20.0}},
    "ends": {"min_tokens": 5, "stop_token_ids": [77]},
}


@pytest.fixture(scope="module")
def served() -> Iterator[House]:
    with house() as built:
        yield built
        built.settle()


@pytest.mark.parametrize("name", CHOSEN)
def test_parameters_reach_the_library(served: House, name: str) -> None:
    """Guards every parameter on its way: the text is the one that gRPC clients get with the same."""
    chosen = CHOSEN[name]
    known = chosen | ({"logit_bias": {77: 20.0}} if "logit_bias" in chosen else {})
    with Client(served.grpc) as client:
        text = client.generate(PROMPT, SamplingParams(max_tokens=20, seed=3, **known)).text
    status, _, answer = ask(served, "/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "seed": 3, **chosen})
    assert status == 200, answer
    assert answer["choices"][0]["text"] == text


def test_logprobs_in_both_forms(served: House) -> None:
    """Guards log-probabilities: one a token, cut with the text, whole and in pieces."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": served.model, "max_tokens": 10, "seed": 3}
        choice = client.completions.create(prompt=PROMPT, logprobs=2, **asked).choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == 10
        assert [len(top) for top in choice.logprobs.top_logprobs or ()] == [2] * 10
        pieces = list(client.completions.create(prompt=PROMPT, logprobs=2, stream=True, **asked))
        offsets = [at for piece in pieces for at in (piece.choices[0].logprobs or choice.logprobs).text_offset or ()]
        assert offsets == choice.logprobs.text_offset
        chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **asked).choices[0]
        assert chat.logprobs is not None
        assert [len(entry.top_logprobs) for entry in chat.logprobs.content or ()] == [3] * 10


def test_wrong_parameters_are_refused(served: House) -> None:
    """Guards the sentences: the library's own, as 400."""
    for body, words in (
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "'x'"),
        ({"logit_bias": {"9999": 1}}, "9999"),
        ({"structured": {"regex": "("}}, ""),
        ({"structured": {}}, "structured"),
        ({"logprobs": 21}, "logprobs is 21"),
    ):
        status, _, answer = ask(served, "/v1/completions", {"prompt": "x", "max_tokens": 4, **body})
        assert (status, words in answer["error"]["message"]) == (400, True), answer

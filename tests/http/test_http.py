"""The HTTP API, asked by OpenAI's own client: a whole server with toy tiers in this process."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from cascade.client import Client
from cascade.errors import InvalidRequest
from cascade.messages import origin_level
from cascade.params import SamplingParams, Speculation
from tests.doors import House, serving
from tests.waiting import LONG_S

PROMPT = "def read(path):\n    with open(path) as file:\n"
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a lease?"}]


served = serving()


@pytest.fixture
def client(served: House) -> Iterator[OpenAI]:
    """OpenAI's client; after it nothing may be left anywhere."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    served.settle()


def ask(served: House, path: str, body: Any = None, method: str = "", **headers: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers and content, by hand."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=LONG_S)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        head = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method or ("GET" if body is None else "POST"), path, data, head)
        response = connection.getresponse()
        raw = response.read()
        is_json = (response.getheader("content-type") or "").startswith("application/json")
        return response.status, {k.lower(): v for k, v in response.getheaders()}, json.loads(raw) if is_json else raw
    finally:
        connection.close()


def expected(served: House, params: SamplingParams, prompt: Any = PROMPT) -> str:
    """What gRPC clients get of the full tier alone."""
    with Client(served.grpc) as client:
        return client.generate(prompt, params, Speculation("off")).text


def test_base_models_call_when_told(served: House) -> None:
    """Guards models whose template shows no tools: a named function is enforced; a free choice is refused."""
    asked = {"messages": MESSAGES, "max_tokens": 60, "tools": [STOP], "tool_choice": STOP}
    [call] = ask(served, "/v1/chat/completions", asked)[2]["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("stop", {})
    status, _, answer = ask(served, "/v1/chat/completions", {"messages": MESSAGES, "tools": [STOP]})
    assert (status, "chat template shows no tools" in answer["error"]["message"]) == (400, True)


def test_several_prompts_and_answers(served: House, client: OpenAI) -> None:
    """Guards the text, which is that of gRPC, and `n` and batches: each answer has its own seed and index, whole and streamed.

    A prompt counts once; a streamed answer has the usage of the whole one.
    """
    seeds = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in (7, 8, 9)]
    texts = [expected(served, params, prompt) for prompt in (PROMPT, "import") for params in seeds]
    asked: dict[str, Any] = {"model": served.model, "prompt": [PROMPT, "import"], "n": 3, "max_tokens": 12, "seed": 7}
    answer = client.completions.create(**asked)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    assert {choice.cascade["edges"][0]["verifier"] for choice in answer.choices} == {"full"}  # type: ignore[attr-defined]
    *pieces, last = client.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    streamed, reasons = [""] * 6, [""] * 6
    for piece in pieces:
        [choice] = piece.choices
        streamed[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or ""
    assert (streamed, reasons) == (texts, [choice.finish_reason for choice in answer.choices])
    assert (last.usage, len({piece.id for piece in [*pieces, last]})) == (answer.usage, 1)
    single = client.completions.create(model=served.model, prompt=PROMPT, max_tokens=12)
    assert answer.usage is not None
    assert single.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens + len(served.router.model.tokenizer.encode("import"))


def test_echo_stop_and_token_ids(served: House, client: OpenAI) -> None:
    """Guards echo, stop strings across pieces, and prompts of token ids."""
    ids = served.router.model.tokenizer.encode(PROMPT)
    asked: dict[str, Any] = {"model": served.model, "prompt": ids, "max_tokens": 30, "seed": 1}
    plain = client.completions.create(**asked).choices[0].text
    assert plain == expected(served, SamplingParams(max_tokens=30, seed=1))
    assert client.completions.create(echo=True, **asked).choices[0].text == PROMPT + plain
    streamed = client.completions.create(echo=True, stream=True, **asked)
    assert "".join(piece.choices[0].text for piece in streamed) == PROMPT + plain
    stop = plain[10:13]
    for value in (stop, [stop, "never there"]):
        cut = client.completions.create(stop=value, **asked).choices[0]
        assert (cut.text, cut.finish_reason) == (plain[: plain.find(stop)], "stop")


def test_history_says_who_wrote_what(served: House, client: OpenAI) -> None:
    """Guards what the page draws: the characters and the lowest author of each token, whole and in pieces."""
    extra = {"speculation": {"tiers": ["tiny"]}, "history": True, "ignore_eos": True}
    asked: dict[str, Any] = {"model": served.model, "messages": MESSAGES, "max_tokens": 30, "seed": 4, "extra_body": extra}
    choice: Any = client.chat.completions.create(**asked).choices[0]
    assert {edge["drafter"] for edge in choice.cascade["edges"]} <= {"", "tiny"}
    assert len(choice.cascade["token_ids"]) == len(choice.cascade["origins"]) == len(choice.cascade["ends"]) == 30
    assert choice.cascade["ends"][-1] == len(choice.message.content)
    pieces: list[Any] = [piece.choices[0] for piece in client.chat.completions.create(stream=True, **asked)]
    written = [piece for piece in pieces if piece.delta.content]
    assert all(piece.cascade["ends"][-1] == len(piece.delta.content) for piece in written)
    assert [token for piece in pieces[1:] for token in piece.cascade["token_ids"]] == choice.cascade["token_ids"]
    assert {origin_level(byte) for piece in written for byte in piece.cascade["origins"]} <= {0, 2}
    assert pieces[-1].cascade["seed"] == 4


def test_models_tokenize_health_metrics(served: House, client: OpenAI) -> None:
    """Guards the small routes."""
    assert [model.id for model in client.models.list()] == [served.model]
    assert client.models.retrieve(served.model).id == served.model
    ids = served.router.model.tokenizer.encode(PROMPT)
    status, _, body = ask(served, "/tokenize", {"prompt": PROMPT})
    assert (status, body["tokens"], body["count"]) == (200, ids, len(ids))
    assert ask(served, "/detokenize", {"tokens": ids})[2] == {"prompt": PROMPT}
    assert ask(served, "/tokenize", {"messages": MESSAGES})[2]["count"] > 4
    status, headers, body = ask(served, "/health", Origin="https://page.example")
    assert (status, body) == (200, {"status": "ok"})
    assert "access-control-allow-origin" not in headers  # nobody has said that pages elsewhere may ask
    client.completions.create(model=served.model, prompt=PROMPT, max_tokens=30)
    status, headers, text = ask(served, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b"ray_cascade_num_requests_running 0.0" in text
    assert b'ray_cascade_accepted_tokens_total{drafter="medium",verifier="full"}' in text


def test_client_that_leaves_frees_every_tier(served: House, client: OpenAI) -> None:
    """Guards against work for clients that are gone, streaming and not; `client` looks at every tier."""
    asked: dict[str, Any] = {"model": served.model, "prompt": PROMPT, "max_tokens": 4000, "n": 2}
    extra = {"ignore_eos": True}
    for _ in range(3):
        with client.completions.create(stream=True, extra_body=extra, **asked) as stream:
            next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(extra_body=extra, **asked)
    started = served.net.nodes["full"].tier.stats.own_tokens
    served.settle()
    assert served.net.nodes["full"].tier.stats.own_tokens - started < 2000


def test_request_id_comes_back(served: House, client: OpenAI) -> None:
    """Guards the thread between a client's log and ours. Ids unfit for a header are replaced, since proxies write what they
    like there; over gRPC, where `Abort` names them, they are refused.
    """
    _, headers, answer = ask(served, "/v1/completions", {"prompt": "x", "max_tokens": 1}, X_Request_Id="mine-1")
    assert headers["x-request-id"] == "mine-1"
    assert answer["id"] == "cmpl-mine-1"
    for unfit in ("not fit", "", "x" * 129):
        status, headers, answer = ask(served, "/v1/completions", {"prompt": "x", "max_tokens": 1}, X_Request_Id=unfit)
        assert (status, answer["id"]) == (200, f"cmpl-{headers['x-request-id']}")
        assert headers["x-request-id"] not in ("", unfit)
        with Client(served.grpc) as other:
            other._metadata += (("request_id", unfit),)
            with pytest.raises(InvalidRequest, match="The request id is not 1 to 128"):
                other.generate("x", SamplingParams(max_tokens=1))


def test_kinds_of_work_do_not_wait_for_each_other(served: House) -> None:
    """Guards long prompts and grammars, which waited for look-ups on a slow disk: all shared asyncio's few threads."""
    done = threading.Event()

    async def hold() -> None:
        for _ in range(64):
            asyncio.get_running_loop().run_in_executor(None, done.wait)

    served.call(hold())
    try:
        body = {"prompt": "x = 1; " * 300, "max_tokens": 4, "structured": {"regex": "[a-z]{4}"}, "logprobs": 1}
        assert ask(served, "/v1/completions", body)[0] == 200
    finally:
        done.set()

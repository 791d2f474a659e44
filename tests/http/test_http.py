"""The HTTP API, asked by OpenAI's own client: a whole server with toy tiers in this process."""

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from cascade.client import Client
from cascade.errors import InvalidRequest
from cascade.messages import origin_level
from cascade.params import SamplingParams, Speculation
from deployments.gateway.http.openai import ChatBody, CompletionBody
from tests.in_process import House, house, serving
from tests.waiting import LONG_S, first

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
    request = {"messages": MESSAGES, "max_tokens": 60, "tools": [STOP], "tool_choice": STOP}
    [call] = ask(served, "/v1/chat/completions", request)[2]["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("stop", {})
    status, _, answer = ask(served, "/v1/chat/completions", {"messages": MESSAGES, "tools": [STOP]})
    assert (status, "chat template shows no tools" in answer["error"]["message"]) == (400, True)


def test_several_prompts_and_answers(served: House, client: OpenAI) -> None:
    """Guards `n` and batches: each answer has its own seed and index, whole and streamed, and a prompt counts once."""
    seeds = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in (7, 8, 9)]
    texts = [expected(served, params, prompt) for prompt in (PROMPT, "import") for params in seeds]
    request: dict[str, Any] = {"model": served.model, "prompt": [PROMPT, "import"], "n": 3, "max_tokens": 12, "seed": 7}
    answer = client.completions.create(**request)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    assert {choice.cascade["edges"][0]["verifier"] for choice in answer.choices} == {"full"}
    *pieces, last = client.completions.create(stream=True, stream_options={"include_usage": True}, **request)
    streamed, reasons = [""] * 6, [""] * 6
    for piece in pieces:
        [choice] = piece.choices
        streamed[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or ""
    assert (streamed, reasons) == (texts, [choice.finish_reason for choice in answer.choices])
    assert (last.usage, len({piece.id for piece in [*pieces, last]})) == (answer.usage, 1)
    single = client.completions.create(model=served.model, prompt=PROMPT, max_tokens=12)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens + len(served.router.model.tokenizer.encode("import"))


def test_history_says_who_wrote_what(served: House, client: OpenAI) -> None:
    """Guards what the page draws: the characters and the lowest author of each token, whole and in pieces."""
    extra = {"speculation": {"tiers": ["tiny"]}, "history": True, "ignore_eos": True}
    request: dict[str, Any] = {"model": served.model, "messages": MESSAGES, "max_tokens": 30, "seed": 4, "extra_body": extra}
    choice: Any = client.chat.completions.create(**request).choices[0]
    assert {edge["drafter"] for edge in choice.cascade["edges"]} <= {"", "tiny"}
    assert len(choice.cascade["token_ids"]) == len(choice.cascade["origins"]) == len(choice.cascade["ends"]) == 30
    assert choice.cascade["ends"][-1] == len(choice.message.content)
    pieces: list[Any] = [piece.choices[0] for piece in client.chat.completions.create(stream=True, **request)]
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
    request: dict[str, Any] = {"model": served.model, "prompt": PROMPT, "max_tokens": 4000, "n": 2}
    extra = {"ignore_eos": True}
    for _ in range(3):
        with client.completions.create(stream=True, extra_body=extra, **request) as stream:
            next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(extra_body=extra, **request)
    started = served.net.nodes["full"].tier.stats.own_tokens
    served.settle()
    assert served.net.nodes["full"].tier.stats.own_tokens - started < 2000


def test_request_id_comes_back(served: House, client: OpenAI) -> None:
    """Guards the thread between a client's log and ours; ids unfit for a header are replaced, over gRPC refused."""
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


# parameters, by OpenAI's names


def test_logprobs_of_chats_have_their_own_form(served: House, client: OpenAI) -> None:
    """Guards log-probabilities of chats: one a token, with its bytes and the likeliest others, whole and in pieces."""
    request: dict[str, Any] = {"model": served.model, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "seed": 3}
    choice: Any = client.chat.completions.create(**request, max_tokens=10).choices[0]
    pieces: Any = list(client.chat.completions.create(**request, max_tokens=10, stream=True))
    content = choice.logprobs.content
    logprobs = [piece.choices[0].logprobs for piece in pieces]
    assert [entry for part in logprobs if part is not None for entry in part.content] == content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 10
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == choice.message.content
    assert all(len({top.token for top in entry.top_logprobs}) == 3 for entry in content)


FORMS: list[list[dict[str, Any]]] = [  # the same, in our words and in those of vLLM and OpenAI
    [
        {"structured": {"json_schema": {"enum": ["a", "b"]}}},
        {"structured_outputs": {"json": '{"enum": ["a", "b"]}'}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}},
    ],
    [{"structured": {"choice": ["yes", "no"]}}, {"structured_outputs": {"choice": ["yes", "no"]}}],
    [{"structured": {"grammar": "start: /[ab]{3}/"}}, {"structured_outputs": {"regex": "[ab]{3}"}}],
]


@pytest.mark.parametrize("forms", FORMS, ids=str)
def test_forms_of_texts_have_vllms_names(served: House, forms: list[dict[str, Any]]) -> None:
    """Guards `structured_outputs` and `response_format`, in completions and chats: they are `structured`."""
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answers = [ask(served, path, {**body, "max_tokens": 12, "seed": 3, **form})[2] for form in [*forms, {}]]
        texts = [json.dumps(answer["choices"][0].get("text") or answer["choices"][0]["message"]) for answer in answers]
        assert len(set(texts[:-1])) == 1
        assert texts[-1] != texts[0]


def test_every_piece_may_have_the_usage_so_far(served: House, client: OpenAI) -> None:
    """Guards `continuous_usage_stats`, which GuideLLM sends: counts only grow, and the last one is the answer's usage."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    request: dict[str, Any] = {"model": served.model, "prompt": [PROMPT, "x"], "n": 2, "max_tokens": 20, "seed": 3}
    *pieces, last = client.completions.create(**request, stream=True, stream_options=options)
    counts = [piece.usage.completion_tokens for piece in pieces if piece.usage is not None]
    assert len(counts) == len(pieces) > 2
    assert counts == sorted(counts)
    assert counts[-1] == last.usage.completion_tokens
    assert {piece.usage.prompt_tokens for piece in pieces if piece.usage} == {last.usage.prompt_tokens}


@pytest.mark.usefixtures("always_draft")
def test_drafts_are_summed_up_as_vllm_does(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `metrics.speculative_decoding`, which AIPerf reads: on the body and with the usage, of one answer alone."""
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 3, "speculation": {"tiers": ["tiny", "medium"]}}
    served.draft_in_time(monkeypatch)
    answer = first(lambda: ask(served, "/v1/completions", body)[2], lambda answer: "metrics" in answer)
    edges = [edge for edge in answer["choices"][0]["cascade"]["edges"] if edge["verifier"] == "full" and edge["drafter"]]
    proposed, accepted = (sum(edge[name] for edge in edges) for name in ("proposed", "accepted"))
    steps = sum(edge["passes"] - edge["undrafted_passes"] for edge in edges)
    counts = {"num_spec_steps": steps, "num_draft_tokens": proposed, "num_accepted_tokens": accepted}
    shares = {"mean_acceptance_length": 1 + accepted / steps, "draft_acceptance_rate": accepted / proposed}
    assert answer["metrics"]["speculative_decoding"] == counts | shares
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    first(lambda: ask(served, "/v1/completions", streamed)[2].decode().split("data: ")[-2], lambda piece: '"metrics"' in piece)
    for more in ({"n": 2}, {"speculation": {"mode": "off"}}):
        assert "metrics" not in ask(served, "/v1/completions", {**body, **more})[2]


def test_adapters_of_a_folder_are_found_when_they_are_named(tmp_path: Path) -> None:
    """Guards adapters that come after the start: listed, asked for by either name over HTTP and gRPC; others are unknown."""
    (tmp_path / "notes").mkdir()
    options = {"engine": "vllm", "lora_path": str(tmp_path)}
    with house(full={"engine_kwargs": options}, served_model_name=["gpt", "gpt-2"]) as built:
        request = {"prompt": "x", "max_tokens": 1}
        assert ask(built, "/v1/completions", {**request, "model": "red"})[0] == 404
        assert [model["id"] for model in ask(built, "/v1/models")[2]["data"]] == ["gpt", "gpt-2"]
        for name in ("red", "blue", "green"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_config.json").write_text("{}")
        for name in ("red", "gpt:red"):
            assert ask(built, "/v1/completions", {**request, "model": name})[2]["model"] == "red"
        assert ask(built, "/v1/completions", {**request, "adapter": "blue", "model": "gpt-2"})[2]["model"] == "gpt"
        assert ask(built, "/v1/completions", {**request, "adapter": "blue", "model": "red"})[0] == 400
        with Client(built.grpc) as client:
            client.generate("x", SamplingParams(max_tokens=1, adapter="green"))
            with pytest.raises(InvalidRequest, match="adapter is 'notes'"):
                client.generate("x", SamplingParams(max_tokens=1, adapter="notes"))
        for name in ("notes", "../red", "other:red", "gpt:"):
            assert ask(built, "/v1/completions", {**request, "model": name})[0] == 404
        assert [model["id"] for model in ask(built, "/v1/models")[2]["data"]] == ["gpt", "gpt-2", "blue", "green", "red"]
        assert ask(built, "/v1/models/gpt:red")[2]["parent"] == "gpt"
        built.settle()


# the page of comparison says what is true: fields that work are taken, others are refused with a sentence, routes exist


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "comparison.md").read_text(encoding="utf-8")
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "seed": 3}
TEXT = {"prompt": "x", "max_tokens": 2, "seed": 3}
INERT: dict[str, Any] = {  # values of fields without effect, which are texts where nothing else is said
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"},
    "best_of": 1,
    "include_stop_str_in_output": False,
    **dict.fromkeys(("store", "skip_special_tokens", "spaces_between_special_tokens"), True),
}


def rows(section: str) -> dict[str, str]:
    """What the page says of each name of a section."""
    table = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {name: cells[-1].strip() for cells in lines for name in re.findall(r"`([^`]+)`", cells[0])}


def test_fields_are_taken_or_refused_as_the_page_says(served: House) -> None:
    """Guards newcomers, who send what other servers take: it works or is named, or is refused with a sentence."""
    fields = rows("Request fields")
    assert len(fields) > 100
    for name, support in fields.items():
        assert any(name in names(body) for body in (CompletionBody, ChatBody)) != support.startswith("refused"), name
        if support.startswith("refused"):
            status, _, answer = ask(served, "/v1/completions", {**TEXT, name: 1})
            assert (status, answer["error"]["message"].split()[0]) == (400, name), name
    unset = dict.fromkeys(name for name, support in fields.items() if support.startswith("refused"))
    assert ask(served, "/v1/completions", {**TEXT, **unset})[0] == 200  # clients write out all fields that they know
    inert = {name: INERT.get(name, "x") for name, support in fields.items() if support.startswith("no effect")}
    for path, base, more in (("/v1/completions", TEXT, {}), ("/v1/chat/completions", CHAT, {"reasoning_effort": "low"})):
        given = inert | more
        answers = [ask(served, path, {**base, **fields}) for fields in (given, dict.fromkeys(given), {})]
        assert [status for status, *_ in answers] == [200] * 3
        assert set(re.findall(r"\w+(?=[,\"])", answers[0][1]["warning"])) == {*given}
        assert not any("warning" in headers for _, headers, _ in answers[1:])  # fields of null are none
        choices = [answer["choices"][0] for *_, answer in answers]
        assert len({choice.get("text") or choice["message"]["content"] for choice in choices}) == 1


def names(body: Any) -> set[str]:
    return {*body.model_fields, "structured_outputs"}


def test_fields_that_are_taken_are_on_the_page() -> None:
    """Guards the page against fields that it forgets; our own have no row."""
    ours = {"adapter", "structured", "speculation", "history", "resume", "train"}
    taken = {name for name, support in rows("Request fields").items() if not support.startswith("refused")}
    assert names(CompletionBody) | names(ChatBody) == taken | ours

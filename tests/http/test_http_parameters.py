"""Parameters through the HTTP API: those of the library, by OpenAI's names, and log-probabilities in OpenAI's forms."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from openai import OpenAI

from cascade.client import Client
from cascade.errors import InvalidRequest
from cascade.params import SamplingParams
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc
from tests.doors import House, house, serving
from tests.http.test_http import MESSAGES, PROMPT, ask
from tests.waiting import wait_until

served = serving()


def test_logprobs_of_chats_have_their_own_form(served: House) -> None:
    """Guards log-probabilities of chats: one a token, with its bytes and the likeliest others, whole and in pieces."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": served.model, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "seed": 3}
        choice: Any = client.chat.completions.create(**asked, max_tokens=10).choices[0]
        pieces: Any = list(client.chat.completions.create(**asked, max_tokens=10, stream=True))
    said = choice.logprobs.content
    told = [piece.choices[0].logprobs for piece in pieces]
    assert [entry for one in told if one is not None for entry in one.content] == said
    assert [len(entry.top_logprobs) for entry in said] == [3] * 10
    assert b"".join(bytes(entry.bytes) for entry in said).decode(errors="replace") == choice.message.content
    assert all(len({one.token for one in entry.top_logprobs}) == 3 for entry in said)


def test_parts_of_characters_are_told_apart(served: House) -> None:
    """Guards log-probabilities of a prompt of emojis: several tokens shared the name U+FFFD, and so the lowest value."""
    body = {"prompt": "😀 😃 😄 😁 😆 😅 🤣 😂", "echo": True, "max_tokens": 8, "logprobs": 5, "seed": 3}
    said = ask(served, "/v1/completions", body)[2]["choices"][0]["logprobs"]
    assert "\ufffd" not in "".join(said["tokens"])
    assert {len(top) for top in said["top_logprobs"] if top} <= {5, 6}
    for token, logprob, top in zip(said["tokens"], said["token_logprobs"], said["top_logprobs"], strict=True):
        assert not top or top.get(token, logprob) == logprob


WRONG: list[tuple[dict[str, Any], str]] = [  # over both protocols, whose fields have the same names
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"temperature": -1}, "temperature is -1"),
    ({"top_k": -2}, "top_k is -2"),
    ({"seed": 2**64 - 1}, "seed is"),
    ({"stop": [""]}, "stop"),
    ({"min_tokens": 7, "max_tokens": 6}, "min_tokens is 7"),
    ({"logprobs": 21}, "logprobs is 21"),
    ({"logit_bias": {9999: 1.0}}, "9999"),
    ({"structured": {"regex": "("}}, "structured.regex cannot be compiled"),
    ({"speculation": {"tiers": ["huge"]}}, "huge"),
    ({"speculation": {"mode": "fast"}}, "fast"),
    ({"speculation": {"branches": 33}}, "branches is 33"),
    ({"priority": 5000}, "priority is 5000"),
]
OVER_HTTP: list[tuple[dict[str, Any], str]] = [  # what only JSON can say
    ({"max_tokens": "5"}, "max_tokens is '5'"),
    ({"logit_bias": {"x": 1}}, "'x'"),
    ({"skip_special_tokens": False}, "skip_special_tokens is False"),
    ({"structured": {"regex": "a"}, "response_format": {"type": "json_object"}}, "give one"),
    ({"structured": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "structured_outputs is not a known field"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not a known field"),
]


@pytest.mark.parametrize(("body", "words"), WRONG + OVER_HTTP, ids=str)
def test_wrong_parameters_are_refused(served: House, body: dict[str, Any], words: str) -> None:
    """Guards clients against parameters that are ignored: 400 or INVALID_ARGUMENT, and a sentence that names the value."""
    status, _, answer = ask(served, "/v1/completions", {"prompt": "x", "max_tokens": 4, **body})
    assert (status, words in answer["error"]["message"]) == (400, True), answer
    if (body, words) in OVER_HTTP or body.get("top_k"):
        return
    whole = {name: body[name] for name in ("speculation", "priority") if name in body}
    asked = pb.GenerateRequest(
        prompt="x", sampling={"max_tokens": 4} | {k: v for k, v in body.items() if k not in whole}, **whole
    )
    with grpc.insecure_channel(served.grpc) as channel:
        stub = serving_pb2_grpc.CascadeStub(channel)
        for call in (lambda: stub.Complete(asked), lambda: list(stub.Generate(asked))):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert (caught.value.code(), words in caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_fields_without_effect_are_named(served: House) -> None:
    """Guards clients of OpenAI and vLLM, whose requests were refused for fields that change nothing; those of null are none."""
    asked, ignored = {"prompt": PROMPT, "max_tokens": 8, "seed": 3}, {"user": "u-1", "metadata": {"run": "7"}, "best_of": 1}
    status, headers, answer = ask(served, "/v1/completions", {**asked, **ignored})
    assert (status, headers["warning"]) == (200, '299 - "No effect here: user, metadata, best_of"')
    for more in ({}, dict.fromkeys(ignored)):
        status, headers, plain = ask(served, "/v1/completions", {**asked, **more})
        assert (status, headers.get("warning")) == (200, None)
        assert plain["choices"][0]["text"] == answer["choices"][0]["text"]


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


def test_every_piece_may_have_the_usage_so_far(served: House) -> None:
    """Guards `continuous_usage_stats`, which GuideLLM sends: counts only grow, and the last one is the answer's usage."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        asked: dict[str, Any] = {"model": served.model, "prompt": [PROMPT, "x"], "n": 2, "max_tokens": 20, "seed": 3}
        *pieces, last = client.completions.create(**asked, stream=True, stream_options=options)
    counts = [piece.usage.completion_tokens for piece in pieces if piece.usage is not None]
    assert len(counts) == len(pieces) > 2
    assert counts == sorted(counts)
    assert last.usage is not None
    assert counts[-1] == last.usage.completion_tokens
    assert {piece.usage.prompt_tokens for piece in pieces if piece.usage} == {last.usage.prompt_tokens}


@pytest.mark.usefixtures("always_draft")
def test_drafts_are_summed_up_as_vllm_does(served: House) -> None:
    """Guards `metrics.speculative_decoding`, which AIPerf reads: on the body and with the usage, of one answer alone."""
    asked = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "speculation": {"tiers": ["tiny", "medium"]}}
    answers: list[dict[str, Any]] = []

    def drafted(**options: Any) -> bool:  # guesses may come too late on a busy machine
        _, _, answer = ask(served, "/v1/completions", {**asked, **options})
        answers.append(json.loads(answer.decode().split("data: ")[-2]) if options else answer)
        return "metrics" in answers[-1]

    wait_until(drafted)
    answer = answers[-1]
    metrics = answer["metrics"]["speculative_decoding"]
    edges = [edge for edge in answer["choices"][0]["cascade"]["edges"] if edge["verifier"] == "full" and edge["drafter"]]
    proposed, accepted = (sum(edge[name] for edge in edges) for name in ("proposed", "accepted"))
    steps = sum(edge["passes"] - edge["undrafted_passes"] for edge in edges)
    assert metrics == {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / proposed,
        "num_spec_steps": steps,
        "num_draft_tokens": proposed,
        "num_accepted_tokens": accepted,
    }
    wait_until(lambda: drafted(stream=True, stream_options={"include_usage": True}))
    assert answers[-1]["metrics"]["speculative_decoding"].keys() == metrics.keys()
    for more in ({"n": 2}, {"speculation": {"mode": "off"}}):
        assert "metrics" not in ask(served, "/v1/completions", {**asked, **more})[2]


def test_adapters_of_a_folder_are_found_when_they_are_named(tmp_path: Path) -> None:
    """Guards adapters that come after the start: listed, asked for by either name over HTTP and gRPC; others are unknown."""
    (tmp_path / "notes").mkdir()
    with house(
        full={"engine_kwargs": {"engine": "vllm", "lora_path": str(tmp_path)}}, served_model_name=["gpt", "gpt-2"]
    ) as built:
        asked = {"prompt": "x", "max_tokens": 1}
        assert ask(built, "/v1/completions", {**asked, "model": "red"})[0] == 404
        assert [model["id"] for model in ask(built, "/v1/models")[2]["data"]] == ["gpt", "gpt-2"]
        for name in ("red", "blue", "green"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_config.json").write_text("{}")
        assert [ask(built, "/v1/completions", {**asked, "model": name})[2]["model"] for name in ("red", "gpt:red")] == [
            "red"
        ] * 2
        assert ask(built, "/v1/completions", {**asked, "adapter": "blue", "model": "gpt-2"})[2]["model"] == "gpt"
        assert ask(built, "/v1/completions", {**asked, "adapter": "blue", "model": "red"})[0] == 400
        with Client(built.grpc) as client:
            client.generate("x", SamplingParams(max_tokens=1, adapter="green"))
            with pytest.raises(InvalidRequest, match="adapter is 'notes'"):
                client.generate("x", SamplingParams(max_tokens=1, adapter="notes"))
        for name in ("notes", "../red", "other:red", "gpt:"):
            assert ask(built, "/v1/completions", {**asked, "model": name})[0] == 404
        assert [model["id"] for model in ask(built, "/v1/models")[2]["data"]] == ["gpt", "gpt-2", "blue", "green", "red"]
        assert ask(built, "/v1/models/gpt:red")[2]["parent"] == "gpt"
        built.settle()

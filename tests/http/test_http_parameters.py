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

served = serving()


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


WRONG: list[tuple[dict[str, Any], str]] = [  # over both protocols, whose fields have the same names
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 2**31}, "2147483648"),
    ({"temperature": -1}, "temperature is -1"),
    ({"top_k": -2}, "top_k is -2"),
    ({"top_p": 0}, "top_p is 0"),
    ({"min_p": 2}, "min_p is 2"),
    ({"seed": 2**64 - 1}, "seed is"),
    ({"stop": [""]}, "stop"),
    ({"min_tokens": 7, "max_tokens": 6}, "min_tokens is 7"),
    ({"presence_penalty": 3}, "presence_penalty is 3"),
    ({"logprobs": 21}, "logprobs is 21"),
    ({"logit_bias": {9999: 1.0}}, "9999"),
    ({"stop_token_ids": [9999]}, "stop_token_ids is 9999"),
    ({"structured": {"regex": "("}}, "structured.regex cannot be compiled"),
    ({"structured": {"json_schema": "{"}}, "structured.json_schema"),
    ({"speculation": {"tiers": ["huge"]}}, "huge"),
    ({"speculation": {"mode": "fast"}}, "fast"),
    ({"speculation": {"schedule": "later"}}, "later"),
    ({"speculation": {"branches": 33}}, "branches is 33"),
    ({"speculation": {"rule": "typical"}}, "typical"),
    ({"speculation": {"window": 0}}, "window is 0"),
    ({"priority": 5000}, "priority is 5000"),
]
OVER_HTTP: list[tuple[dict[str, Any], str]] = [  # what only JSON can say
    ({"structured": {}}, "structured is"),
    ({"max_tokens": "5"}, "max_tokens is '5'"),
    ({"logit_bias": {"x": 1}}, "'x'"),
    ({"skip_special_tokens": False}, "skip_special_tokens is False"),
    ({"best_of": 2}, "best_of is 2"),
    ({"structured": {"regex": "a"}, "guided_regex": "a"}, "give one"),
    ({"structured": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "structured_outputs is not a known field"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "give one"),
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


def test_top_k_may_be_switched_off_as_in_vllm(served: House) -> None:
    """Guards `top_k: -1`, which keeps all tokens."""
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    asked = {"prompt": PROMPT, "max_tokens": 12, "seed": 3}
    texts = [ask(served, "/v1/completions", {**asked, "top_k": top_k})[2]["choices"][0]["text"] for top_k in (-1, 0)]
    assert texts[0] == texts[1]


FORMS: dict[str, list[dict[str, Any]]] = {  # the same, in our words and in those of vLLM and OpenAI
    "json": [
        {"structured": {"json_schema": {"enum": ["a", "b"]}}},
        {"structured_outputs": {"json": {"enum": ["a", "b"]}}},
        {"guided_json": '{"enum": ["a", "b"]}'},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}},
    ],
    "regex": [{"structured": {"regex": "[ab]{3}"}}, {"structured_outputs": {"regex": "[ab]{3}"}}, {"guided_regex": "[ab]{3}"}],
    "choice": [
        {"structured": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"], "guided_decoding_backend": "auto"},
    ],
    "grammar": [{"structured": {"grammar": 'start: "a" "b"*'}}, {"guided_grammar": 'start: "a" "b"*'}],
}


@pytest.mark.parametrize("kind", FORMS)
def test_forms_of_texts_have_vllms_names(served: House, kind: str) -> None:
    """Guards `structured_outputs`, `guided_*` and `response_format`, in completions and chats: they are `structured`."""
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        texts = set()
        for form in FORMS[kind]:
            status, _, answer = ask(served, path, {**body, "max_tokens": 12, "seed": 3, **form})
            assert status == 200, answer
            choice = answer["choices"][0]
            texts.add(choice["text"] if "text" in choice else choice["message"]["content"])
        assert len(texts) == 1
        status, _, answer = ask(served, path, {**body, "max_tokens": 12, "seed": 3})
        assert texts != {str(answer["choices"][0].get("text") or answer["choices"][0].get("message", {}).get("content"))}


def test_every_piece_may_tell_the_tokens_so_far(served: House) -> None:
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


def test_drafts_are_reported_as_vllm_does(served: House) -> None:
    """Guards `metrics.speculative_decoding`, which AIPerf reads: on the body and with the usage, of one answer alone."""
    asked = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "speculation": {"schedule": "lockstep"}}
    _, _, answer = ask(served, "/v1/completions", asked)
    told = answer["metrics"]["speculative_decoding"]
    edges = answer["choices"][0]["cascade"]["edges"]
    counts = [
        sum(edge[name] for edge in edges if edge["verifier"] == "full" and edge["drafter"]) for name in ("proposed", "accepted")
    ]
    assert [told["num_draft_tokens"], told["num_accepted_tokens"]] == counts
    assert told["draft_acceptance_rate"] == counts[1] / counts[0]
    assert told["mean_acceptance_length"] == 1 + counts[1] / told["num_spec_steps"]
    assert sum(told["acceptance_histogram"].values()) == told["num_spec_steps"]
    assert all(0 <= int(number) <= told["num_spec_tokens"] for number in told["acceptance_histogram"])
    _, _, raw = ask(served, "/v1/completions", {**asked, "stream": True, "stream_options": {"include_usage": True}})
    last = json.loads(raw.decode().split("data: ")[-2])
    assert last["metrics"]["speculative_decoding"].keys() == told.keys()
    for more in ({"n": 2}, {"speculation": {"mode": "off"}}):
        assert "metrics" not in ask(served, "/v1/completions", {**asked, **more})[2]


def test_adapters_of_a_folder_are_found_when_they_are_named(tmp_path: Path) -> None:
    """Guards adapters that come after the start: listed, asked for by either name over HTTP and gRPC; others are unknown."""
    (tmp_path / "notes").mkdir()
    with house(full={"engine_kwargs": {"lora_path": str(tmp_path)}}, served_model_name=["gpt"]) as built:
        asked = {"prompt": "x", "max_tokens": 1}
        assert ask(built, "/v1/completions", {**asked, "model": "red"})[0] == 404
        assert [model["id"] for model in ask(built, "/v1/models")[2]["data"]] == ["gpt"]
        for name in ("red", "blue", "green"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_config.json").write_text("{}")
        assert [ask(built, "/v1/completions", {**asked, "model": name})[2]["model"] for name in ("red", "gpt:red")] == [
            "red"
        ] * 2
        assert ask(built, "/v1/completions", {**asked, "adapter": "blue"})[2]["model"] == "gpt"
        with Client(built.grpc) as client:
            client.generate("x", SamplingParams(max_tokens=1, adapter="green"))
            with pytest.raises(InvalidRequest, match="adapter is 'notes'"):
                client.generate("x", SamplingParams(max_tokens=1, adapter="notes"))
        for name in ("notes", "../red", "other:red", "gpt:"):
            assert ask(built, "/v1/completions", {**asked, "model": name})[0] == 404
        assert [model["id"] for model in ask(built, "/v1/models")[2]["data"]] == ["gpt", "blue", "green", "red"]
        assert ask(built, "/v1/models/gpt:red")[2]["parent"] == "gpt"
        built.settle()


def test_models_have_names_of_ones_choice() -> None:
    """Guards `router.served_model_name` and adapters: each name is listed and may be asked for, others are unknown."""
    adapters = {"engine_kwargs": {"lora_modules": {"red": "red/adapter"}}}
    with house(full=adapters, served_model_name=["gpt", "gpt-2"]) as built:
        listed = ask(built, "/v1/models")[2]["data"]
        assert [(model["id"], model["parent"]) for model in listed] == [("gpt", None), ("gpt-2", None), ("red", "gpt")]
        said = {
            name: ask(built, "/v1/completions", {"prompt": "x", "model": name, "max_tokens": 2}) for name in ("gpt-2", "red")
        }
        assert [(status, answer["model"]) for status, _, answer in said.values()] == [(200, "gpt"), (200, "red")]
        assert ask(built, "/v1/models/red")[2]["id"] == "red"
        assert ask(built, "/v1/completions", {"prompt": "x", "model": "small-full"})[0] == 404
        assert ask(built, "/v1/completions", {"prompt": "x", "model": "red", "adapter": "blue"})[0] == 400
        assert ask(built, "/v1/completions", {"prompt": "x", "model": "gpt:red", "max_tokens": 1})[2]["model"] == "red"
        assert ask(built, "/v1/completions", {"prompt": "x", "model": "other:red"})[0] == 404
        built.settle()

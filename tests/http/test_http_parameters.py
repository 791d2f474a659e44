"""Parameters through the HTTP API: those of the library, by OpenAI's names, and log-probabilities in OpenAI's forms."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from cascade.client import Client
from cascade.errors import InvalidRequest
from cascade.params import SamplingParams
from tests.doors import House, house, serving
from tests.http.test_http import MESSAGES, PROMPT, ask
from tests.waiting import first

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
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 3, "speculation": {"tiers": ["tiny", "medium"]}}
    answer = first(lambda: ask(served, "/v1/completions", body)[2], lambda answer: "metrics" in answer)
    edges = [edge for edge in answer["choices"][0]["cascade"]["edges"] if edge["verifier"] == "full" and edge["drafter"]]
    proposed, accepted = (sum(edge[name] for edge in edges) for name in ("proposed", "accepted"))
    steps = sum(edge["passes"] - edge["undrafted_passes"] for edge in edges)
    metrics = answer["metrics"]["speculative_decoding"]
    assert metrics == {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / proposed,
        "num_spec_steps": steps,
        "num_draft_tokens": proposed,
        "num_accepted_tokens": accepted,
    }
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    last = first(
        lambda: json.loads(ask(served, "/v1/completions", streamed)[2].decode().split("data: ")[-2]),
        lambda piece: "metrics" in piece,
    )
    assert last["metrics"]["speculative_decoding"].keys() == metrics.keys()
    for more in ({"n": 2}, {"speculation": {"mode": "off"}}):
        assert "metrics" not in ask(served, "/v1/completions", {**body, **more})[2]


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

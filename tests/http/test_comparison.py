"""The page of comparison says what is true: fields that work are taken, others are refused with a sentence, routes exist."""

import re
from pathlib import Path
from typing import Any

from cascade.cli.serve import serve
from deployments.gateway.http.messages import MessagesBody
from deployments.gateway.http.openai import ChatBody, CompletionBody
from deployments.gateway.http.responses import ResponsesBody
from deployments.ops.metrics.series import SERIES
from tests.doors import House, serving
from tests.http.test_http import ask

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "comparison.md").read_text(encoding="utf-8")
FUNCTION = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "seed": 3}
TEXT = {"prompt": "x", "max_tokens": 2, "seed": 3}
VALUES: dict[str, Any] = {  # a value that each field is tried with, with what else it needs
    "messages": {"messages": CHAT["messages"]},
    "prompt": {"prompt": "y"},
    "stop": {"stop": ["a"]},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "logit_bias": {"logit_bias": {"5": 1.0}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 1},
    "response_format": {"response_format": {"type": "json_object"}},
    "tools": {"tools": [FUNCTION], "tool_choice": "none"},
    "tool_choice": {"tools": [FUNCTION], "tool_choice": "required"},
    "parallel_tool_calls": {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False},
    "reasoning_effort": {"reasoning_effort": "low"},
    "chat_template_kwargs": {"chat_template_kwargs": {}},
    "continue_final_message": {
        "messages": [*CHAT["messages"], {"role": "assistant", "content": "y"}],  # type: ignore[misc]
        "continue_final_message": True,
    },
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "cache_salt": {"cache_salt": "s"},
    "guided_json": {"guided_json": {"type": "object"}},
    "guided_regex": {"guided_regex": "a"},
    "guided_choice": {"guided_choice": ["a"]},
    "guided_grammar": {"guided_grammar": 'start: "a"'},
    "metadata": {"metadata": {"a": "b"}},
    "modalities": {"modalities": ["text"]},
    "prompt_cache_options": {"prompt_cache_options": {}},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    **{name: {name: True} for name in ("echo", "store", "skip_special_tokens", "spaces_between_special_tokens")},
    **{name: {name: True} for name in ("ignore_eos", "add_generation_prompt", "include_reasoning", "separate_reasoning")},
    **{
        name: {name: False}
        for name in ("use_beam_search", "include_stop_str_in_output", "return_tokens_as_token_ids", "return_token_ids")
    },
    **{name: {name: 0.5} for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")},
    **{name: {name: 1} for name in ("n", "seed", "top_k", "min_tokens", "priority", "best_of", "max_tokens")},
    **{name: {name: "x"} for name in ("user", "service_tier", "safety_identifier", "prompt_cache_key")},
    **{name: {name: "x"} for name in ("prompt_cache_retention", "guided_decoding_backend")},
    "max_completion_tokens": {"max_completion_tokens": 2},
    "stop_token_ids": {"stop_token_ids": [5]},
    "repetition_penalty": {"repetition_penalty": 1.1},
}


def rows(section: str) -> dict[str, str]:
    """What the page says of each name of a section."""
    table = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {name: cells[-1].strip() for cells in lines for name in re.findall(r"`([^`]+)`", cells[0])}


served = serving()


def test_fields_are_taken_or_refused_as_the_page_says(served: House) -> None:
    """Guards newcomers, who send what other servers take: it works or is named, or is refused with a sentence."""
    fields = rows("Request fields")
    assert len(fields) > 100
    for name, said in fields.items():
        kinds = [(path, body, base) for path, body, base in BODIES if name in names(body)]
        if said.startswith("refused"):
            assert not kinds, name
            status, _, answer = ask(served, "/v1/completions", {**TEXT, name: 1})
            assert (status, answer["error"]["message"].split()[0]) == (400, name), name
            continue
        assert kinds, name
        for path, _, base in kinds:
            value = {"model": {"model": served.model}, "logprobs": {"logprobs": "chat" in path or 1}}.get(name) or VALUES[name]
            base = {key: kept for key, kept in base.items() if (key, name) != ("max_tokens", "max_completion_tokens")}
            status, headers, answer = ask(served, path, {**base, **value})
            assert status == 200, (name, answer)
            assert (name in headers.get("warning", "")) == (said.startswith("no effect") or name == "reasoning_effort"), name


def names(body: Any) -> set[str]:
    """Of all fields that a request may have."""
    return {*body.model_fields, "structured_outputs"}


BODIES: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("/v1/completions", CompletionBody, TEXT),
    ("/v1/chat/completions", ChatBody, CHAT),
)
OTHERS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("/v1/responses", ResponsesBody, {"input": "x", "max_output_tokens": 2}),
    ("/v1/messages", MessagesBody, CHAT),
)


def test_fields_of_other_apis_are_taken_or_refused_as_the_page_says(served: House) -> None:
    """Guards agents, whose requests have the fields of OpenAI's and Anthropic's newer APIs."""
    for name, said in rows("Fields of responses and messages").items():
        kinds = [path for path, body, _ in OTHERS if name in names(body) | {"stop_sequences"}]
        for path, _, base in OTHERS:
            if said.startswith("refused"):
                status, _, answer = ask(served, path, {**base, name: 1})
                assert (status, answer["error"]["message"].split()[0]) == (400, name), (name, path)
        assert kinds or said.startswith("refused"), name
    nothing = {"/v1/responses": {"max_tool_calls": 1}, "/v1/messages": {"cache_control": {"type": "ephemeral"}}}
    for path, _, base in OTHERS:
        status, headers, _ = ask(served, path, {**base, **nothing[path]})
        assert (status, headers["warning"]) == (200, f'299 - "No effect here: {", ".join(nothing[path])}"')


def test_fields_that_are_taken_are_on_the_page() -> None:
    """Guards the page against fields that it forgets; our own have no row."""
    ours = {"adapter", "structured", "speculation", "history", "watch", "resume", "train"}
    assert (
        names(CompletionBody) | names(ChatBody)
        == {name for name, said in rows("Request fields").items() if not said.startswith("refused")} | ours
    )


def test_routes_options_and_series_exist(served: House) -> None:
    """Guards the other tables."""
    schema = ask(served, "/openapi.json")[2]["paths"]
    known = {*schema, "/metrics"}
    for route, said in rows("Routes").items():
        assert (route in known) == said.startswith("works"), route
    options = {flag for parameter in serve.params for flag in parameter.opts}
    for option, said in rows("Server options").items():
        assert (option in options) == said.startswith("works"), option
    same = {f"vllm:{one.vllm}" for one in SERIES.values()}
    for series, said in rows("Metrics").items():
        if series.startswith("vllm:") and not said.startswith("not ours"):
            assert series in same or series.removesuffix("_total") in same | {"vllm:spec_decode_num_drafts"}, series

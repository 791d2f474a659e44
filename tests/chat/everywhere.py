"""A turn of a conversation, asked for in every way: over HTTP and gRPC, whole and in pieces, with drafts and without."""

import json
from typing import Any

from openai import OpenAI

from cascade.client import Client
from cascade.client.chat import Turn, TurnPiece
from cascade.params import SamplingParams, Speculation
from tests.http.test_http import ask
from tests.in_process import House

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
TOOLS: Any = [WEATHER, STOP]
SAID = {  # a call in the format of each family
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
    "mistral11": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3}',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}',
}
MOST = 120  # tokens of an answer, unless a test says otherwise


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def params(sampling: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MOST, "temperature": 0.0, "seed": 3, **sampling})


def body(messages: Any, options: Any, sampling: dict[str, Any]) -> dict[str, Any]:
    """The same over HTTP."""
    fields = {"temperature": 0.0, "seed": 3, "max_tokens": MOST, **sampling}
    if (structured := fields.get("structured")) is not None:
        value = getattr(structured, structured.kind)
        fields["structured"] = {structured.kind: json.loads(value) if structured.kind == "json_schema" else value}
    return {"messages": messages, **options, **fields, "history": True}


def everywhere(house: House, messages: Any, sampling: dict[str, Any], **options: Any) -> Turn:
    """A turn that all ways to ask for it agree on."""
    given = body(messages, options, sampling)
    status, _, answer = ask(house, "/v1/chat/completions", given)
    assert status == 200, answer
    with OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as openai:
        streamed: Any = {"model": house.model, "messages": [], "stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = openai.chat.completions.create(**streamed, extra_body=given)
    with Client(house.grpc) as client:
        turn = client.chat(messages, params(sampling), Speculation("off"), **options)
        drafted = Speculation(tiers=("tiny", "medium"))
        check_pieces(list(client.stream_chat(messages, params(sampling), drafted, **options)), turn)
    [choice], usage, stats = answer["choices"], answer["usage"], turn.completion.stats
    message, (content, calls, reason) = choice["message"], joined(pieces)
    thoughts = "".join(getattr(piece.choices[0].delta, "reasoning_content", None) or "" for piece in pieces)
    assert message.get("reasoning") == message.get("reasoning_content")
    assert (message.get("reasoning", ""), message["content"] or "", choice["finish_reason"]) == (thoughts, content, reason)
    assert (turn.reasoning_content or "", turn.content or "", turn.finish_reason) == (thoughts, content, reason)
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert made == [(call.name, call.arguments) for call in turn.calls] == [tuple(call[1:]) for call in calls]
    assert last.usage.completion_tokens == usage["completion_tokens"] == stats.completion_tokens
    assert usage["prompt_tokens"] == stats.prompt_tokens
    assert usage.get("completion_tokens_details", {}).get("reasoning_tokens") == turn.reasoning_tokens
    assert choice["cascade"]["token_ids"] == list(turn.completion.token_ids)
    return turn


def joined(pieces: list[Any]) -> tuple[str, list[list[Any]], str]:
    """Content, calls (id, name, arguments) and the reason of an answer that OpenAI's client streamed."""
    content, calls = "", []
    assert pieces[0].choices[0].delta.role == "assistant"
    for piece in pieces:
        delta = piece.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                assert call.type == "function"
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
    return content, calls, pieces[-1].choices[0].finish_reason


def check_pieces(pieces: list[TurnPiece], turn: Turn) -> None:
    """Joined, the pieces of a streamed turn are the whole one."""
    last = pieces[-1].turn
    for name in ("content", "reasoning_content", "finish_reason", "reasoning_tokens"):
        assert getattr(last, name) == getattr(turn, name)
    assert [(call.name, call.arguments) for call in last.calls] == [(call.name, call.arguments) for call in turn.calls]
    assert (last.completion.text, last.completion.token_ids) == (turn.completion.text, turn.completion.token_ids)
    assert "".join(piece.content for piece in pieces) == (turn.content or "")
    assert "".join(piece.reasoning_content for piece in pieces) == (turn.reasoning_content or "")
    assert "".join(piece.chunk.text for piece in pieces) == turn.completion.text
    assert [call.index for piece in pieces for call in piece.calls if call.id] == list(range(len(turn.calls)))

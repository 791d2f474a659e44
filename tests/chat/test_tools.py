"""Tools of chats, asked by OpenAI's own client: shown to the model, called, enforced, or refused with one sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from cascade.engine.tokenizer import Tokenizer
from deployments.gateway.chat.assistant import Assistant
from deployments.gateway.chat.calls import FORMATS
from tests.cases import rare
from tests.doors import House
from tests.http.test_http import ask
from tests.talkers import talker, talking
from tests.waiting import wait_until

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
SAID = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
    "mistral11": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3}',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}',
}
FAMILIES = [  # format of calls, whether its marks are tokens
    pytest.param(("hermes", True), id="hermes-tokens"),
    pytest.param(("hermes", False), id="hermes-spelled", marks=pytest.mark.slow),
    pytest.param(("mistral", True), id="mistral", marks=pytest.mark.slow),
    pytest.param(("mistral11", True), id="mistral11", marks=pytest.mark.slow),
    pytest.param(("llama3", True), id="llama3"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, str]]:
    """Parrots with the tokenizers of every family, and the format of their calls."""
    name, marks = request.param
    with talking(tmp_path_factory.mktemp(name), name, marks=marks, pass_s=0.001) as built:
        yield built, name


def create(house: House, said: str, **asked: Any) -> tuple[Any, list[Any]]:
    """The choice of a whole answer, and the pieces of the same one streamed."""
    messages: Any = [{"role": "user", "content": said}]
    with OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        full: dict[str, Any] = {"model": house.model, "messages": messages, "seed": 3, "max_tokens": 200} | asked
        full.setdefault("extra_body", {}).setdefault("speculation", {"tiers": ["tiny", "medium"]})  # whether they pay or not
        whole = client.chat.completions.create(**full)
        pieces = list(client.chat.completions.create(stream=True, **full))
    return whole.choices[0], pieces


def joined(pieces: list[Any]) -> tuple[str, list[list[Any]], str]:
    """Content, calls (id, name, arguments) and the reason of a streamed answer, as clients put them together."""
    content, calls = "", []
    for piece in pieces:
        delta = piece.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                assert call.type == "function"
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
    return content, calls, pieces[-1].choices[0].finish_reason


@pytest.mark.usefixtures("always_draft")
def test_free_choice_is_read(served: tuple[House, str]) -> None:
    """Guards `auto`: what the model says is read, whole and streamed, with words before it; drafts are used."""
    house, name = served
    before = "" if name == "llama3" else "I look it up."
    drafted = {"speculation": {"tiers": ["tiny", "medium"]}}
    choice, pieces = create(house, before + SAID[name], tools=TOOLS, temperature=0, extra_body=drafted)
    assert (choice.message.content or "") == before
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 3}
    assert choice.finish_reason == "tool_calls"
    content, calls, reason = joined(pieces)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert (content, reason) == (before, "tool_calls")
    assert [one[1:] for one in calls] == [[call.function.name, call.function.arguments]]
    assert len([1 for piece in pieces if piece.choices[0].delta.tool_calls]) > 1
    again = lambda: create(house, before + SAID[name], tools=TOOLS, temperature=0, extra_body=drafted)[0]  # noqa: E731
    wait_until(lambda: again().cascade["edges"][0]["accepted"])


@pytest.mark.parametrize("temperature", [rare(0), 1])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_calls_are_enforced(served: tuple[House, str], choice: Any, temperature: float) -> None:
    """Guards `required` and named functions: a model that wants to say something else calls, with arguments of the schema.

    The text is that of the full tier alone, with and without drafts.
    """
    house, _ = served
    extra: dict[str, Any] = {"logit_bias": {"11": 0.5}}
    asked = {"tools": TOOLS, "tool_choice": choice, "temperature": temperature, "seed": 8}
    one, pieces = create(house, "Rome, 3 days?", **asked, extra_body=extra)
    calls = [(call.function.name, call.function.arguments) for call in one.message.tool_calls]
    assert one.finish_reason == "tool_calls"
    assert not one.message.content
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), CITY if name == "get_weather" else {"maxProperties": 0})
    assert choice == "required" or [name for name, _ in calls] == ["get_weather"]
    content, streamed, reason = joined(pieces)
    assert (content, [tuple(call[1:]) for call in streamed], reason) == ("", calls, "tool_calls")
    body = {"messages": [{"role": "user", "content": "Rome, 3 days?"}], "max_tokens": 200, **asked, **extra}
    alone = ask(house, "/v1/chat/completions", body | {"speculation": {"mode": "off"}})[2]["choices"][0]["message"]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in alone["tool_calls"]] == calls


def test_strict_functions_are_held_to_their_schema(served: tuple[House, str]) -> None:
    """Guards `strict` with a free choice: words are free, a call is not; without it the model's own arguments stand."""
    house, name = served
    wrong = SAID[name].replace('"days": 3', '"days": 77')
    loose, _ = create(house, wrong, tools=[WEATHER], temperature=0)
    assert json.loads(loose.message.tool_calls[0].function.arguments)["days"] == 77
    tools: Any = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}, STOP]
    strict, pieces = create(house, wrong, tools=tools, temperature=0)
    [call] = strict.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    assert joined(pieces)[1][0][2] == call.function.arguments
    if name == "llama3":  # Guards against a special token before the call, which made words of it that nobody held to anything
        tagged, _ = create(house, "<|python_tag|>" + wrong, tools=tools, temperature=0)
        [call] = tagged.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), CITY)
    said = "No call at all: 5 < 6 {x}."
    words, _ = create(house, said, tools=tools, temperature=0)
    assert (words.message.content, words.finish_reason) == (said, "stop")


def test_one_call_or_several(served: tuple[House, str]) -> None:
    """Guards `parallel_tool_calls`: false leaves one call, also where the model would make two."""
    house, name = served
    first = SAID[name]
    two = {
        "hermes": f"{first}\n{first}",
        "mistral": first[:-1] + ", " + first[first.index("{") :],
        "mistral11": first + first,
        "llama3": f"{first}; {first}",
    }[name]
    several, _ = create(house, two, tools=TOOLS, temperature=0)
    assert len(several.message.tool_calls) == 2
    assert len({call.id for call in several.message.tool_calls}) == 2
    single, pieces = create(house, two, tools=TOOLS, temperature=0, parallel_tool_calls=False)
    assert len(single.message.tool_calls) == len(joined(pieces)[1]) == 1


def test_results_go_back_to_the_model(served: tuple[House, str]) -> None:
    """Guards conversations with calls and results: OpenAI's own message goes back as it came, and the template shows all."""
    house, name = served
    choice, _ = create(house, SAID[name], tools=TOOLS, temperature=0)
    call = choice.message.tool_calls[0]
    turn = choice.message.model_dump()  # with fields that are null or empty
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    messages = [{"role": "user", "content": "Weather?"}, turn, result, {"role": "user", "content": "Thanks."}]
    answer = ask(house, "/v1/chat/completions", {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 20})[2]
    assert answer["choices"][0]["message"]["content"] == "Thanks."
    prompt = house.router.model.tokenizer.decode(
        ask(house, "/tokenize", {"messages": messages})[2]["tokens"], skip_special_tokens=False
    )
    assert f"{call.id}: Sunny." in prompt
    assert '"city": "Rome"' in prompt


@pytest.mark.parametrize("name", [*FORMATS, "strange", None])
def test_formats_are_found_out(tmp_path: Path, name: str | None) -> None:
    """Guards detection: the template is asked to write a call; what is not known is not guessed."""
    tokenizer = Tokenizer.from_pretrained(talker(tmp_path, name))
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    assistants = [Assistant(model, told) for told in (None, "mistral")]
    assert [one.format for one in assistants] == [FORMATS.get(name or ""), FORMATS["mistral"]]
    assert assistants[0].template.shows_tools == (name is not None)

"""Tools of chats: shown to the model, called, enforced, over every protocol and in every family's format."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from cascade.client import Client
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import Speculation, Structured
from deployments.gateway.chat.assistant import Assistant
from deployments.gateway.chat.calls import FORMATS
from tests.cases import rare
from tests.chat.test_turns import SAID, STOP, STRICT, TOOLS, WEATHER, everywhere, params, user
from tests.in_process import House
from tests.talkers import talker, talking
from tests.waiting import first

CITY = WEATHER["function"]["parameters"]
FAMILIES = [  # format of calls, whether its marks are tokens
    pytest.param(("hermes", True), id="hermes-tokens"),
    rare(("hermes", False), id="hermes-spelled"),
    rare(("mistral", True), id="mistral"),
    rare(("mistral11", True), id="mistral11"),
    pytest.param(("llama3", True), id="llama3"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: Any) -> Iterator[tuple[House, str]]:
    """Parrots with the tokenizers of every family, and the format of their calls."""
    name, marks = request.param
    with talking(name, marks=marks, pass_s=0.001) as built:
        yield built, name


def test_free_choice_is_read(served: tuple[House, str]) -> None:
    """Guards `auto`: what the model says is read, with words before it; nothing is read where no tool may be called."""
    house, name = served
    before = "" if name == "llama3" else "I look it up."
    turn = everywhere(house, user(before + SAID[name]), {}, tools=TOOLS)
    assert ((turn.content or ""), turn.finish_reason) == (before, "tool_calls")
    [call] = turn.calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome", "days": 3})
    turn = everywhere(house, user("Well: 5 < 6 {x}."), {}, tools=TOOLS)
    assert (turn.content, turn.finish_reason) == ("Well: 5 < 6 {x}.", "stop")
    assert everywhere(house, user(SAID[name]), {}, tools=TOOLS, tool_choice="none").calls == ()


@pytest.mark.usefixtures("always_draft")
def test_drafts_of_calls_are_used(served: tuple[House, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards speed where tools are shown: the full tier accepts guesses of a call."""
    house, name = served
    drafted = Speculation(tiers=("tiny", "medium"))
    house.draft_in_time(monkeypatch)
    with Client(house.grpc) as client:
        first(lambda: client.chat(user(SAID[name]), params({}), drafted, tools=TOOLS).completion.stats.drafted.accepted, bool)


@pytest.mark.parametrize("temperature", [rare(0.0), 1.0])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_calls_are_enforced(served: tuple[House, str], choice: Any, temperature: float) -> None:
    """Guards `required` and named functions: a model that wants to say something else calls, with arguments of the schema."""
    house, _ = served
    sampling = {"temperature": temperature, "seed": 9, "logit_bias": {11: 0.5}}
    turn = everywhere(house, user("Rome, 3 days?"), sampling, tools=TOOLS, tool_choice=choice)
    assert (turn.content, turn.finish_reason) == (None, "tool_calls")
    for call in turn.calls:
        jsonschema.validate(json.loads(call.arguments), CITY if call.name == "get_weather" else {"maxProperties": 0})
    assert choice == "required" or [call.name for call in turn.calls] == ["get_weather"]


def test_strict_functions_are_held_to_their_schema(served: tuple[House, str]) -> None:
    """Guards `strict` with a free choice: words are free, a call is not; without it the model's own arguments stand.

    Guards against a special token before the call, which made words of it that nobody held to anything.
    """
    house, name = served
    wrong = SAID[name].replace('"days": 3', '"days": 77')
    [call] = everywhere(house, user(wrong), {}, tools=[WEATHER]).calls
    assert json.loads(call.arguments)["days"] == 77
    for mark in ("", "<|python_tag|>") if name == "llama3" else ("",):
        [call] = everywhere(house, user(mark + wrong), {}, tools=[STRICT, STOP]).calls
        jsonschema.validate(json.loads(call.arguments), CITY)
    turn = everywhere(house, user("No call at all: 5 < 6 {x}."), {}, tools=[STRICT, STOP])
    assert (turn.content, turn.finish_reason) == ("No call at all: 5 < 6 {x}.", "stop")


def test_one_call_or_several(served: tuple[House, str]) -> None:
    """Guards `parallel_tool_calls`: false leaves one call, also where the model would make two."""
    house, name = served
    call = SAID[name]
    two = {
        "hermes": f"{call}\n{call}",
        "mistral": call[:-1] + ", " + call[call.index("{") :],
        "mistral11": call + call,
        "llama3": f"{call}; {call}",
    }[name]
    several = everywhere(house, user(two), {}, tools=TOOLS)
    assert len({call.id for call in several.calls}) == 2
    assert len(everywhere(house, user(two), {}, tools=TOOLS, parallel_tool_calls=False).calls) == 1


FORM = Structured(json_schema={"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})


@pytest.mark.parametrize("tool", [WEATHER, STRICT], ids=["free", "strict"])
def test_texts_of_a_form_leave_room_for_calls(served: tuple[House, str], tool: Any) -> None:
    """Guards agents that ask for JSON and have tools: the grammar of the text forbade every call, and nobody said so."""
    house, name = served
    if name == "llama3":  # a call begins there as the text does
        with Client(house.grpc) as client, pytest.raises(InvalidRequest, match="cannot both be enforced: leave one out"):
            client.chat(user("x"), params({"structured": FORM}), tools=[tool])
        return
    turn = everywhere(house, user(SAID[name]), {"structured": FORM}, tools=[tool])
    assert (turn.content, [json.loads(call.arguments) for call in turn.calls]) == (None, [{"city": "Rome", "days": 3}])
    turn = everywhere(house, user('{"a": 1}'), {"structured": FORM}, tools=[tool])
    assert (turn.content, turn.calls, turn.finish_reason) == ('{"a": 1}', (), "stop")
    turn = everywhere(house, user("Well."), {"structured": FORM}, tools=[tool])
    assert turn.calls or (turn.content or "").startswith("{")


@pytest.mark.parametrize("name", [*FORMATS, "strange", None])
def test_formats_are_found_out(name: str | None) -> None:
    """Guards detection: the template is asked to write a call; what is not known is not guessed."""
    tokenizer = Tokenizer.from_pretrained(talker(name))
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    assistants = [Assistant(model, given) for given in (None, "mistral")]
    assert [assistant.format for assistant in assistants] == [FORMATS.get(name or ""), FORMATS["mistral"]]
    assert assistants[0].template.shows_tools == (name is not None)

"""Reading calls of tools out of what models write: every format, piece by piece, and what is no call."""

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade.answer import Chunk, Completion, Stats
from deployments.gateway.chat.calls import FORMATS, CallParser
from deployments.gateway.chat.reader import TurnReader
from deployments.gateway.http.openai import ChatBody
from deployments.gateway.http.reply import CompletionReply, Echo
from tests.cases import examples

NAMES = frozenset({"get_weather", "add"})
PARIS = '{"city": "Paris }\\" {", "days": [1, {"a": "\\\\"}]}'
END = Completion("", (), "stop", 1, Stats(1, 1))
ONE = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>\n'
LISTED = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "a]b"}, {"name": "add", "arguments": {}}]'
NAMED = '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS] {"b": "}"} '
FIRST, EMPTY = '{"name": "add", "parameters": {"a": 1}}', '{"name": "add", "parameters": {}}'
SECOND = '{"type": "function", "name": "add", "parameters": {"a": 2}}'
BOTH = [("add", {"a": 1}), ("add", {"a": 2})]
CALLED: dict[str, tuple[str, str, str, list[tuple[str, Any]]]] = {  # format, text, content, calls
    "one": ("hermes", ONE, "", [("get_weather", json.loads(PARIS))]),
    "words before, two calls": ("hermes", f"I look.\n\n{TWO}", "I look.", [("add", {}), ("add", {"a": 1})]),
    "an end that is missing": ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "", [("add", {})]),
    "list": ("mistral", LISTED, "", [("add", {"a": 1}), ("add", {})]),
    "a bare name": ("mistral11", f"I look. {NAMED}", "I look.", [("add", {"a": 1}), ("get_weather", {"b": "}"})]),
    "a line for each": ("llama3", f"{FIRST}\n{SECOND}", "", BOTH),
    "two in a row": ("llama3", f"{FIRST}; {SECOND}\n", "", BOTH),
    "words behind a call": ("llama3", f"{EMPTY} and {EMPTY}", f" and {EMPTY}", [("add", {})]),
}
WORDS = {  # format, text that is no call
    "unknown function": ("hermes", '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'),
    "no JSON": ("hermes", "so <tool_call> add(1)  "),
    "half a mark": ("hermes", "1 <tool_ca"),
    "no list": ("mistral", "[TOOL_CALLS]add{}"),
    "a name without arguments": ("llama3", '{"name": "add"}'),
    "JSON that is an answer": ("llama3", '{"name": "Bob", "age": 3}'),
    "words, then JSON": ("llama3", f"So {EMPTY}"),
}
CALLED |= {name: (form, text, text, []) for name, (form, text) in WORDS.items()}


def chunks(text: str, cuts: list[int]) -> list[Chunk]:
    """``text`` in pieces; the last one says that it has ended."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)] or [""]
    return [Chunk(p, (), (), b"", END if i == len(pieces) - 1 else None) for i, p in enumerate(pieces)]


def reader(name: str, hidden: dict[int, str] | None = None) -> TurnReader:
    return TurnReader(CallParser(FORMATS[name], NAMES), hidden or {})


def message(name: str, pieces: list[Chunk]) -> dict[str, Any]:
    """The choice of a whole answer, to which its pieces must add up."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}]})
    in_pieces, arguments = reader(name), dict[int, str]()
    reply = CompletionReply(body, "1", "m", [Echo()], 0, reader=lambda: reader(name))
    choice: dict[str, Any] = reply.whole([(0, piece) for piece in pieces])["choices"][0]
    deltas = [in_pieces.take(piece) for piece in pieces]
    for call in itertools.chain.from_iterable(delta.calls for delta in deltas):
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    whole = choice["message"]
    assert "".join(delta.content for delta in deltas) == (whole["content"] or "")
    assert [*arguments.values()] == [call["function"]["arguments"] for call in whole.get("tool_calls", ())]
    assert in_pieces.finish_reason(END) == choice["finish_reason"]
    return choice


@pytest.mark.parametrize("name", CALLED)
def test_calls_are_read(name: str) -> None:
    """Guards every format, whole and in any pieces: words stay words, arguments are the model's own."""
    form, text, content, calls = CALLED[name]

    @given(st.lists(st.integers(0, 200), max_size=12))
    def run(cuts: list[int]) -> None:
        choice = message(form, chunks(text, cuts))
        message_ = choice["message"]
        assert (message_["content"] or "") == content
        got = message_.get("tool_calls", [])
        assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in got] == calls
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        assert len({call["id"] for call in got}) == len(calls)

    run()


def test_arguments_come_as_they_are_written() -> None:
    """Guards streaming: a name as soon as it is known, arguments piece by piece, nothing of the marks."""
    parser = reader("hermes")
    deltas = [parser.take(chunk) for chunk in chunks(ONE, list(range(len(ONE))))]
    calls = [call.streamed for delta in deltas for call in delta.calls]
    assert not any(delta.content for delta in deltas)
    assert set(calls[0]) == {"index", "id", "type", "function"}
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == PARIS
    assert len(calls) > len(PARIS) / 2


@pytest.mark.parametrize("form", FORMATS)
def test_cut_calls_are_not_finished(form: str) -> None:
    """Guards `finish_reason`: text that was cut within a call does not pass for one, and the rest of it is not lost."""
    begin = FORMATS[form].begin + ("[" if FORMATS[form].listed else "")
    call = f"add{named}" if (named := FORMATS[form].named) else f'{{"name": "add", "{FORMATS[form].key}": '
    text = f'{begin}{call}{{"a": [1, 2'
    choice = message(form, chunks(text, []))
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": [1, 2'


def test_hidden_marks_are_put_back() -> None:
    """Guards marks that are special tokens: decoding leaves them out of the text."""
    text = 'I see [{"name": "add", "arguments": {}}]'
    chunk = Chunk(text, (5, 9, 7), (5, 5, len(text)), b"\0\0\0", END)
    delta = reader("mistral", {9: "[TOOL_CALLS]"}).take(chunk)
    assert (delta.content, delta.calls[0].name, delta.calls[0].arguments) == ("I see", "add", "{}")
    assert len(delta.calls[0].id) == 9


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_breaks_a_reader(form: str) -> None:
    """Guards against models that write nonsense: no error, and without a call nothing is lost."""
    dice = random.Random(1)
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", *'[]{}"\\,; \n:']
    words = [*marks, '"name"', '"arguments"', '"parameters"', '"add"', '"x"', "add", "{}", '{"name": "add", ']
    for _ in range(examples(10)):
        text = "".join(dice.choices(words, k=dice.randrange(20)))
        pieces = chunks(text, [dice.randrange(100) for _ in range(4)])
        message_ = message(form, pieces)["message"]
        if not message_.get("tool_calls"):
            assert message_["content"] == text
        assert message_ == message(form, chunks(text, []))["message"] or message_.get("tool_calls")

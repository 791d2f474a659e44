"""Thoughts of models that think out loud are told apart from what they say, over both protocols, whole and in pieces."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai import OpenAI

from cascade.answer import Chunk, Completion, Stats
from cascade.client import Client
from cascade.client.chat import Turn
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import InvalidRequest
from cascade.params import Speculation, Structured
from deployments.gateway.chat.calls import CallParser
from deployments.gateway.chat.delta import Delta
from deployments.gateway.chat.formats import FORMATS
from deployments.gateway.chat.reader import TurnReader
from deployments.gateway.chat.template import ChatTemplate
from deployments.gateway.chat.thoughts import CLOSE, OPEN, ThoughtSplitter
from tests import small
from tests.chat.test_tools import SAID, STOP, TOOLS, WEATHER
from tests.chat.test_turns import params
from tests.doors import House
from tests.http.test_http import ask
from tests.talkers import parrots, thinker

END = Completion("", (), "stop", 1, Stats(1, 1))
PIECES = st.lists(st.sampled_from([OPEN, CLOSE, "<", "th", "ink", ">", "</", "<thi", "nk>", "a", " ", "\n", "é"]), max_size=14)


def split(text: str, within: bool, cuts: list[int]) -> tuple[str, str]:
    """Thoughts and words of a text that comes in pieces."""
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    splitter, thoughts, words = ThoughtSplitter(within), "", ""
    for begin, end in [*pairwise(places), (len(text), len(text))]:
        more = splitter.take(text[begin:end], begin == len(text))
        thoughts, words = thoughts + more[0], words + more[1]
    return thoughts, words


@given(PIECES.map("".join), st.booleans(), st.lists(st.integers(0, 99), max_size=20))
@example("a<think>b</think>c", False, list(range(20)))
@example("b</thi</think>c<think>d", True, list(range(30)))
@example("<thin", False, [2])
def test_nothing_is_lost(text: str, within: bool, cuts: list[int]) -> None:
    """Guards losslessness: words before, thoughts and words after them, with their tags, are the text, however it is cut."""
    before, opening, rest = ("", "", text) if within else text.partition(OPEN)
    inside, closing, behind = rest.partition(CLOSE) if within or opening else ("", "", "")
    assert before + opening + inside + closing + behind == text
    assert split(text, within, cuts) == (inside, before + behind)


def heard(reader: TurnReader, chunks: list[Chunk]) -> Delta:
    said = Delta()
    for chunk in chunks:
        said.add(reader.take(chunk))
    return said


def test_tags_that_are_special_tokens_are_seen() -> None:
    """Guards tokenizers whose tags are special tokens, which decoding leaves out: thoughts were words there."""
    hidden = {7: OPEN, 8: CLOSE}
    chunks = [
        Chunk("hm", (7, 1), (0, 2), b"\0\0"),
        Chunk("so", (2, 8, 3), (0, 0, 2), b"\0\0\0"),
        Chunk("!", (4,), (1,), b"\0", END),
    ]
    reader = TurnReader(None, hidden, ThoughtSplitter(False))
    assert heard(reader, chunks) == Delta("so!", {}, "hm")
    assert reader.num_thought_tokens == 4


def test_words_are_not_held_for_calls() -> None:
    """Guards answers without tools: text that looks like a call, or like the begin of one, is text."""
    text = '<think>{"name": "stop"}</think>' + SAID["llama3"] + SAID["hermes"] + "  <tool_"
    reader = TurnReader(None, {}, ThoughtSplitter(False))
    delta = reader.take(Chunk(text, (1,), (len(text),), b"\0"))
    assert delta.body["content"] == text.removeprefix('<think>{"name": "stop"}</think>')
    assert (delta.thoughts, delta.calls) == ('{"name": "stop"}', {})


def test_calls_in_thoughts_are_thoughts() -> None:
    """Guards calls that the model only thinks of: nobody is called."""
    text = SAID["hermes"] + "</think>\n" + SAID["hermes"]
    reader = TurnReader(CallParser(FORMATS["hermes"], frozenset({"get_weather"})), {}, ThoughtSplitter(True))
    delta = reader.take(Chunk(text, (1,), (len(text),), b"\0", END))
    assert (delta.thoughts, delta.content, len(delta.calls)) == (SAID["hermes"], "", 1)


TAGS = ["special", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("token", "spelled"))]


@pytest.fixture(scope="module", params=TAGS)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Parrots that think out loud, with tags that are tokens, special tokens, or spelled."""
    with parrots(thinker(tmp_path_factory.mktemp("thinks"), request.param), pass_s=0.001) as built:
        yield built


def says(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def joined(pieces: list[Any]) -> tuple[str, str, str, int]:
    """Thoughts, content, the reason and the number of thought tokens of a streamed answer, as clients put them together."""
    deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    reason = next(piece.choices[0].finish_reason for piece in reversed(pieces) if piece.choices)
    details = pieces[-1].usage.completion_tokens_details
    return thoughts, "".join(delta.content or "" for delta in deltas), reason, details.reasoning_tokens if details else -1


def everywhere(house: House, content: str, sampling: dict[str, Any], **options: Any) -> tuple[str, Turn]:
    """What a turn thinks, and the turn, which all ways to ask for it must agree on."""
    body: dict[str, Any] = {"messages": says(content), "temperature": 0.0, "seed": 3, "max_tokens": 300, **sampling, **options}
    if "structured" in sampling:
        value = getattr(sampling["structured"], sampling["structured"].kind)
        kind = sampling["structured"].kind
        body["structured"] = {kind: json.loads(value) if kind == "json_schema" else value}
    status, _, answer = ask(house, "/v1/chat/completions", body)
    assert status == 200, answer
    [choice], usage = answer["choices"], answer["usage"]
    message = choice["message"]
    with OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as openai:
        given: Any = {"model": house.model, "stream": True, "stream_options": {"include_usage": True}, "extra_body": body}
        streamed = joined(list(openai.chat.completions.create(**given | {"messages": body["messages"]})))
    with Client(house.grpc) as client:
        turn = client.chat(says(content), params(sampling), Speculation("off"), **options)
        pieces = list(client.stream_chat(says(content), params(sampling), Speculation(tiers=("tiny", "medium")), **options))
    last = pieces[-1].turn
    assert last is not None
    thoughts, words = message.get("reasoning_content", ""), message["content"] or ""
    num_tokens = usage.get("completion_tokens_details", {"reasoning_tokens": -1})["reasoning_tokens"]
    assert message.get("reasoning", "") == thoughts
    assert streamed == (thoughts, words, choice["finish_reason"], num_tokens)
    for one in (turn, last):
        assert (one.reasoning_content or "", one.content or "", one.finish_reason) == streamed[:3]
        assert (-1 if one.reasoning_tokens is None else one.reasoning_tokens) == num_tokens
        assert one.completion.text == turn.completion.text
        assert one.completion.token_ids == turn.completion.token_ids
    assert ("".join(p.reasoning_content for p in pieces), "".join(p.content for p in pieces)) == (thoughts, words)
    assert [(call.name, call.arguments) for call in turn.calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return thoughts, turn


THOUGHT = "<think>\nfirst one, then two\n</think>\n\nHere it is."
OPENED: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
CLOSED: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}
TURNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {  # said, sampling, options, what is heard
    "written tags": (THOUGHT, {}, {}, ("\nfirst one, then two\n", "\n\nHere it is.", "stop")),
    "opened by the prompt": (THOUGHT, {}, OPENED, ("first one, then two\n", "\n\nHere it is.", "stop")),
    "words before": ("Well. <think>hm</think> Yes.", {}, {}, ("hm", "Well.  Yes.", "stop")),
    "no thoughts": ("Here it is.", {}, {}, ("", "Here it is.", "stop")),
    "none wanted": (
        "<think>\n</think>\nThe tags are <think> and </think>.",
        {},
        CLOSED,
        ("", "The tags are <think> and </think>.", "stop"),
    ),
    "two": ("<think>a</think>b<think>c</think>", {}, {}, ("a", "b<think>c</think>", "stop")),
    "cut": (THOUGHT, {"max_tokens": 6}, {}, ("", "", "length")),
    "stopped": (THOUGHT, {"stop": ("two",)}, {}, ("\nfirst one, then ", "", "stop")),
    "a call behind": (
        THOUGHT + SAID["hermes"],
        {},
        {"tools": TOOLS},
        ("\nfirst one, then two\n", "\n\nHere it is.", "tool_calls"),
    ),
    "left out": (THOUGHT, {}, {"include_reasoning": False}, ("", "\n\nHere it is.", "stop")),
    "not separate": (THOUGHT, {}, {"separate_reasoning": False}, ("", THOUGHT, "stop")),
    "not separate, with calls": (
        THOUGHT + SAID["hermes"],
        {},
        {"tools": TOOLS, "separate_reasoning": False},
        ("", THOUGHT, "tool_calls"),
    ),
}


def _special(house: House) -> bool:
    return any(one.content == OPEN and one.special for one in house.router.tokenizer.backend.added_tokens_decoder.values())


UNREAD = ("none wanted", "not separate", "not separate, with calls")  # where special tokens are left out, as in any text


@pytest.mark.parametrize("name", TURNS)
def test_thoughts_are_told_apart(served: House, name: str) -> None:
    """Guards what clients show: thoughts came as words, with their tags."""
    said, sampling, options, (thoughts, words, reason) = TURNS[name]
    heard, turn = everywhere(served, said, sampling, **options)
    assert turn.finish_reason == reason
    if name == "cut":
        assert turn.content == ""
        assert THOUGHT.removeprefix(OPEN).startswith(heard)
        assert (turn.reasoning_tokens, turn.completion.stats.completion_tokens) == (6, 6)
        return
    if name in UNREAD and _special(served):
        words = words.replace(OPEN, "").replace(CLOSE, "")
    assert (heard, turn.content or "") == (thoughts, words)
    assert turn.reasoning_tokens is None if name in UNREAD else (turn.reasoning_tokens or 0) > 0 or name == "no thoughts"


def test_thoughts_go_back(served: House) -> None:
    """Guards turns that are sent back as they came, from any server: the template writes the thoughts."""
    with Client(served.grpc) as client:
        turn = client.chat(says(THOUGHT), params({}))
        assert turn.message == {"role": "assistant", "content": turn.content, "reasoning_content": "\nfirst one, then two\n"}
        again = [*says(THOUGHT), turn.message | {"reasoning": turn.reasoning_content}, *says("Thanks.")]
        lengths = {client.chat(again, params({})).completion.stats.prompt_tokens}
    for names in ({"reasoning_content"}, {"reasoning"}, {"reasoning", "reasoning_content"}):
        back = {"role": "assistant", "content": turn.content} | dict.fromkeys(names, turn.reasoning_content)
        ids = ask(served, "/tokenize", {"messages": [*says(THOUGHT), back, *says("Thanks.")]})[2]["tokens"]
        assert f"<|assistant|>{THOUGHT}<|end|>" in served.router.tokenizer.backend.decode(ids).replace(
            "<think>\n\n", "<think>\n"
        )
        lengths.add(len(ids))
    assert len(lengths) == 1


@pytest.mark.parametrize("begun", ["<think>\nfirst", "<think>\nfirst one, then two\n</think>\n\nHere"])
def test_begun_thoughts_go_on(served: House, begun: str) -> None:
    """Guards `continue_final_message`: the words that are given say whether the thoughts go on or are over."""
    messages = [*says(THOUGHT), {"role": "assistant", "content": begun}]
    with Client(served.grpc) as client:
        turn = client.chat(messages, params({}), continue_final_message=True)
    rest = THOUGHT.removeprefix(begun)
    expected = tuple(rest.split(CLOSE)) if CLOSE in rest else (None, rest)
    assert (turn.reasoning_content, turn.content) == expected


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "both off": ({"include_reasoning": False, "separate_reasoning": False}, "are both false: leave one out"),
    "a user's": ({"messages": [says("x")[0] | {"reasoning_content": "y"}]}, "messages.0: reasoning_content is given with"),
    "a grammar": (OPENED | {"structured": Structured(grammar='start: "a"')}, "structured.grammar is given and the prompt has"),
    "no regex": (OPENED | {"structured": Structured(regex="(")}, "structured.regex cannot be compiled"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_alike(served: House, name: str) -> None:
    """Guards what would be held to something inside of thoughts, and switches that contradict."""
    changes, words = BAD[name]
    asked: dict[str, Any] = {"messages": says("x"), **changes}
    structured = asked.pop("structured", None)
    sent = asked | ({"structured": {structured.kind: getattr(structured, structured.kind)}} if structured else {})
    status, _, answer = ask(served, "/v1/chat/completions", sent)
    assert status == 400
    assert words in answer["error"]["message"]
    with Client(served.grpc) as client, pytest.raises(InvalidRequest) as caught:
        client.chat(asked.pop("messages"), params({"structured": structured}), **asked)
    assert str(caught.value) == answer["error"]["message"].replace("The body", "The request")


def test_names_that_differ_are_refused(served: House) -> None:
    """Guards thoughts under two names that are not the same thoughts."""
    messages = [*says("x"), {"role": "assistant", "content": "y", "reasoning_content": "a", "reasoning": "b"}, *says("z")]
    assert (
        "reasoning_content and reasoning differ"
        in ask(served, "/v1/chat/completions", {"messages": messages})[2]["error"]["message"]
    )
    with Client(served.grpc) as client, pytest.raises(InvalidRequest, match="reasoning_content and reasoning differ"):
        client.chat(messages)


def test_what_is_enforced_is_no_thought(served: House) -> None:
    """Guards enforced texts: a grammar leaves no room for thoughts, so a tag in them is what it is in the text."""
    spelled = OPEN not in served.router.tokenizer.backend.get_vocab()
    text = "<think>a</think>b" if spelled else "a </b"
    for options in ({}, CLOSED, OPENED | {"separate_reasoning": False}):
        heard, turn = everywhere(served, "x", {"structured": Structured(choice=(text,))}, **options)
        assert (heard, turn.content, turn.reasoning_tokens) == ("", text, None)
        heard, turn = everywhere(served, "x", {}, tools=[STOP], tool_choice="required", **options)
        assert (heard, turn.content, turn.finish_reason) == ("", None, "tool_calls")


ENFORCED: dict[str, tuple[Structured, str]] = {  # what it is, what the model wants to say after its thoughts
    "schema": (Structured(json_schema={"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}), '{"a": 1}'),
    "object": (Structured(json_object=True), '{"b": "</x>"}'),
    "regex": (Structured(regex="a/\\/[é\n]+"), "a//é\n"),
    "choice": (Structured(choice=('é\n"/', "no")), 'é\n"/'),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_thoughts_come_before_what_is_enforced(served: House, name: str) -> None:
    """Guards thoughts that the prompt has begun: what is enforced began inside of them, and was a thought."""
    structured, said = ENFORCED[name]
    heard, turn = everywhere(served, f"<think>\nfirst one, then two\n</think>\n\n{said}", {"structured": structured}, **OPENED)
    assert (heard, turn.content, turn.finish_reason) == ("first one, then two\n", "\n\n" + said, "stop")
    heard, turn = everywhere(served, f"<think>\nhm</think>no {said}", {"structured": structured, "max_tokens": 40}, **OPENED)
    assert heard == "hm"
    assert not (turn.content or "").startswith("no ")


def test_thoughts_come_before_enforced_calls(served: House) -> None:
    """Guards `required` in the same place: whatever the model wants to say after its thoughts, it calls."""
    for said in ("Hello.", SAID["hermes"]):
        heard, turn = everywhere(
            served,
            "<think>\nhm</think>\n" + said,
            {},
            tools=[STOP],
            tool_choice="required",
            parallel_tool_calls=False,
            **OPENED,
        )
        assert (heard, turn.content, [call.name for call in turn.calls]) == ("hm", None, ["stop"])
        assert turn.finish_reason == "tool_calls"


def test_thoughts_come_before_strict_calls(served: House) -> None:
    """Guards `strict` with `auto`, where words stay free: thoughts are such words."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    heard, turn = everywhere(served, THOUGHT + SAID["hermes"], {}, tools=[strict], **OPENED)
    assert (heard, turn.content, turn.finish_reason) == ("first one, then two\n", "\n\nHere it is.", "tool_calls")
    assert [json.loads(call.arguments) for call in turn.calls] == [{"city": "Rome", "days": 3}]


@pytest.mark.parametrize(
    ("template", "thinks"),
    [(None, False), ("{{ '</think>' }}", False), ("{{ '<think>' }}", False), ({"default": "", "rag": "<think></think>"}, True)],
)
def test_only_templates_that_name_both_tags_think(template: Any, thinks: bool) -> None:
    """Guards all other models: a text with tags in it is a text there, and nothing is read."""
    tokenizer = Tokenizer.from_pretrained(small.paths()[-1])
    tokenizer.backend.chat_template = template
    assert ChatTemplate(tokenizer).thinks == thinks

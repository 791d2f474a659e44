"""Thoughts of models that think out loud are told apart from what they say, over both protocols, whole and in pieces."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cascade.chat.template import CLOSE, OPEN
from cascade.client import Client
from cascade.params import Structured
from deployments.gateway.chat.reader import ThoughtSplitter
from tests.chat.test_turns import SAID, STOP, STRICT, TOOLS, everywhere, params, user
from tests.http.test_http import ask
from tests.in_process import House
from tests.talkers import conversing

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


served = conversing("special")


THOUGHT = "<think>\nfirst one, then two\n</think>\n\nHere it is."
OPENED: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
CLOSED: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}
ENFORCED_CALL: dict[str, Any] = {"tools": [STOP], "tool_choice": "required", "parallel_tool_calls": False, **OPENED}
TURNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {  # said, sampling, options, what is heard
    "written tags": (THOUGHT, {}, {}, ("\nfirst one, then two\n", "\n\nHere it is.", "stop")),
    "opened by the prompt": (THOUGHT, {}, OPENED, ("first one, then two\n", "\n\nHere it is.", "stop")),
    "words before": ("Well. <think>hm</think> Yes.", {}, {}, ("hm", "Well.  Yes.", "stop")),
    "a call in thoughts": (f"<think>{SAID['hermes']}</think>So.", {}, {"tools": TOOLS}, (SAID["hermes"], "So.", "stop")),
    "no thoughts": ("Here it is.", {}, {}, ("", "Here it is.", "stop")),
    "none wanted": ("<think>\n</think>\nThe tags are <think> and </think>.", {}, CLOSED, ("", "The tags are  and .", "stop")),
    "cut": (THOUGHT, {"max_tokens": 6}, {}, ("", "", "length")),
    "stopped": (THOUGHT, {"stop": ("two",)}, {}, ("\nfirst one, then ", "", "stop")),
    "a call": (THOUGHT + SAID["hermes"], {}, {"tools": TOOLS}, ("\nfirst one, then two\n", "\n\nHere it is.", "tool_calls")),
    "a strict call": (
        THOUGHT + SAID["hermes"],
        {},
        {"tools": [STRICT], **OPENED},
        ("first one, then two\n", "\n\nHere it is.", "tool_calls"),
    ),
    "an enforced call": ("<think>\nhm</think>\nHello.", {}, ENFORCED_CALL, ("hm", "", "tool_calls")),
    "left out": (THOUGHT, {}, {"include_reasoning": False}, ("", "\n\nHere it is.", "stop")),
    "not separate": (THOUGHT, {}, {"separate_reasoning": False}, ("", "\nfirst one, then two\n\n\nHere it is.", "stop")),
}


UNREAD = ("none wanted", "not separate")  # where special tokens are left out, as in any text


@pytest.mark.parametrize("name", TURNS)
def test_thoughts_are_told_apart(served: House, name: str) -> None:
    """Guards thoughts that came as words with their tags, and calls that were only thought of and were made."""
    prompt, sampling, options, (thoughts, words, reason) = TURNS[name]
    turn = everywhere(served, user(prompt), sampling, **options)
    heard = turn.reasoning_content or ""
    assert turn.finish_reason == reason
    if name == "cut":
        assert turn.content == ""
        assert THOUGHT.removeprefix(OPEN).startswith(heard)
        assert (turn.reasoning_tokens, turn.completion.stats.completion_tokens) == (6, 6)
        return
    assert (heard, turn.content or "") == (thoughts, words)
    assert turn.reasoning_tokens is None if name in UNREAD else (turn.reasoning_tokens or 0) > 0 or name == "no thoughts"
    if name == "a strict call":
        assert [json.loads(call.arguments) for call in turn.calls] == [{"city": "Rome", "days": 3}]
    if name == "written tags":  # which are tokens of the thoughts, too
        thinking = prompt.partition(CLOSE)[0] + CLOSE
        assert turn.reasoning_tokens == len(served.router.model.tokenizer.encode_part(thinking))


def test_thoughts_go_back(served: House) -> None:
    """Guards turns that are sent back as they came, from any server: the template writes the thoughts."""
    with Client(served.grpc) as client:
        turn = client.chat(user(THOUGHT), params({}))
        assert turn.message == {"role": "assistant", "content": turn.content, "reasoning_content": "\nfirst one, then two\n"}
        again = [*user(THOUGHT), turn.message | {"reasoning": turn.reasoning_content}, *user("Thanks.")]
        lengths = {client.chat(again, params({})).completion.stats.prompt_tokens}
    for names in ({"reasoning_content"}, {"reasoning"}, {"reasoning", "reasoning_content"}):
        back = {"role": "assistant", "content": turn.content} | dict.fromkeys(names, turn.reasoning_content)
        ids = ask(served, "/tokenize", {"messages": [*user(THOUGHT), back, *user("Thanks.")]})[2]["tokens"]
        assert f"<|assistant|>{THOUGHT}<|end|>" in served.router.model.tokenizer.decode(ids, skip_special_tokens=False).replace(
            "<think>\n\n", "<think>\n"
        )
        lengths.add(len(ids))
    assert len(lengths) == 1


@pytest.mark.parametrize("begun", ["<think>\nfirst", "<think>\nfirst one, then two\n</think>\n\nHere"])
def test_begun_thoughts_go_on(served: House, begun: str) -> None:
    """Guards `continue_final_message`: the words that are given say whether the thoughts go on or are over."""
    messages = [*user(THOUGHT), {"role": "assistant", "content": begun}]
    with Client(served.grpc) as client:
        turn = client.chat(messages, params({}), continue_final_message=True)
    rest = THOUGHT.removeprefix(begun)
    expected = tuple(rest.split(CLOSE)) if CLOSE in rest else (None, rest)
    assert (turn.reasoning_content, turn.content) == expected


def test_what_is_enforced_is_no_thought(served: House) -> None:
    """Guards enforced texts: a grammar leaves no room for thoughts, so a tag in them is what it is in the text."""
    text = "a </b"
    for options in ({}, OPENED | {"separate_reasoning": False}):
        turn = everywhere(served, user("x"), {"structured": Structured(choice=(text,))}, **options)
        assert (turn.reasoning_content or "", turn.content, turn.reasoning_tokens) == ("", text, None)
        turn = everywhere(served, user("x"), {}, tools=[STOP], tool_choice="required", **options)
        assert (turn.reasoning_content or "", turn.content, turn.finish_reason) == ("", None, "tool_calls")


ENFORCED: dict[str, tuple[Structured, str]] = {  # what it is, what the model wants to say after its thoughts
    "schema": (Structured(json_schema={"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}), '{"a": 1}'),
    "object": (Structured(json_object=True), '{"b": "</x>"}'),
    "regex": (Structured(regex="a/\\/[é\n]+"), "a//é\n"),
    "choice": (Structured(choice=('é\n"/', "no")), 'é\n"/'),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_thoughts_come_before_what_is_enforced(served: House, name: str) -> None:
    """Guards thoughts that the prompt has begun: what is enforced began inside of them, and was a thought."""
    structured, prompt = ENFORCED[name]
    turn = everywhere(served, user(f"<think>\nfirst one, then two\n</think>\n\n{prompt}"), {"structured": structured}, **OPENED)
    assert (turn.reasoning_content or "", turn.content, turn.finish_reason) == (
        "first one, then two\n",
        "\n\n" + prompt,
        "stop",
    )
    turn = everywhere(served, user(f"<think>\nhm</think>no {prompt}"), {"structured": structured, "max_tokens": 40}, **OPENED)
    assert turn.reasoning_content == "hm"
    assert not (turn.content or "").startswith("no ")

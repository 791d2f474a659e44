"""What a chat template leaves out of a conversation, which it may do without a word."""

import json
from collections.abc import Callable, Sequence
from typing import Any

MessageDict = dict[str, Any]
Render = Callable[[Sequence[MessageDict], Sequence[MessageDict] | None], str | None]  # a prompt, if the template gives one
MARK = "probe_{}_{}_{}."  # the full stop: no mark begins another one


def omission(messages: Sequence[MessageDict], tools: Sequence[MessageDict] | None, render: Render) -> str | None:
    """A sentence about the first tool, call or words that do not get into the prompt; ``None`` if all do.

    The template writes the conversation once more, with a mark in place of each of them. It may leave out the assistant's
    thoughts and its words beside calls, as those of many models do with earlier turns. A template that takes the messages,
    but not the marks, says nothing either way.
    """
    marked_tools = (
        None
        if tools is None
        else [
            tool | {"function": tool["function"] | {"name": MARK.format("tool", index, 0)}} for index, tool in enumerate(tools)
        ]
    )
    text = render([_marked(message, index) for index, message in enumerate(messages)], marked_tools)
    if text is None:
        return None
    for index in range(len(tools or ())):
        if MARK.format("tool", index, 0) not in text:
            return f"The model's chat template leaves out tools.{index}: give no tools, or say in a message what may be called"
    return next((lost for index, message in enumerate(messages) if (lost := _lost(text, message, index)) is not None), None)


def _lost(text: str, message: MessageDict, index: int) -> str | None:
    """A sentence about what is missing of one message."""
    for place, words in enumerate(_words(message)):
        if words.strip() and MARK.format("words", index, place) not in text:
            where = f"messages.{index}, where {message['role']!r} says {words.strip()[:40]!r}"
            return f"The model's chat template leaves out {where}: say it with another role, or at another place"
    for place in range(len(message.get("tool_calls", ()))):
        if MARK.format("call", index, place) not in text:
            remedy = "send each call in a message of its own, with its result behind it" if place else "say it in words"
            return f"The model's chat template leaves out messages.{index}.tool_calls.{place}: {remedy}"
    return None


def _words(message: MessageDict) -> list[str]:
    """What must not get lost of a content, part by part."""
    content = message.get("content", "")
    if "tool_calls" in message:
        return []
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _marked(message: MessageDict, index: int) -> MessageDict:
    """The message with marks in place of words and calls."""
    if "tool_calls" in message:
        calls = [_called(call, MARK.format("call", index, place)) for place, call in enumerate(message["tool_calls"])]
        return message | {"tool_calls": calls}
    marks = [MARK.format("words", index, place) if words.strip() else words for place, words in enumerate(_words(message))]
    content = message.get("content", "")
    if isinstance(content, str):
        return message | {"content": marks[0]} if content else message
    return message | {"content": [part | {"text": mark} for part, mark in zip(content, marks, strict=True)]}


def _called(call: MessageDict, mark: str) -> MessageDict:
    """The call with the mark as name and argument; there are templates that write one of both."""
    as_object = not isinstance(call["function"]["arguments"], str)
    arguments = {"a": mark}
    return call | {"function": {"name": mark, "arguments": arguments if as_object else json.dumps(arguments)}}

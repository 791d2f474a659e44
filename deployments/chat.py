"""From a conversation to a prompt."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from cascade.errors import InvalidRequest
from cascade.tokenizer import Tokenizer

Turn = dict[str, Any]
PROBE_ID = "probe1234"  # some templates want nine letters and digits
PROBE_NAME = "probe_tool"
PROBE_SAYING = "probe_saying"
PROBE_RESULT = "probe_result"
PROBE_TOOL: Turn = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
QUESTION: Turn = {"role": "user", "content": "probe_question"}
CALL: Turn = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": PROBE_ID, "type": "function", "function": {"name": PROBE_NAME, "arguments": {"a": 1}}}],
}
RESULT: Turn = {"role": "tool", "content": PROBE_RESULT, "tool_call_id": PROBE_ID, "name": PROBE_NAME}


class ChatTemplate:
    """The tokenizer's own template, and what it makes of tools: told by letting it write some.

    Base models have none: there the contents follow each other, a blank line in between, without roles, and the model goes on
    behind the last one; calls are JSON.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Turn], tools: Sequence[Turn] | None = None) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn; raises `InvalidRequest`."""
        backend = self._tokenizer.backend
        if backend.chat_template is None:
            return self._tokenizer.encode("\n\n".join(map(_contents, messages)))
        if any("tool_calls" in turn for turn in messages) and PROBE_NAME not in self.written_call:
            raise InvalidRequest("messages have tool_calls: the model's chat template does not write them")
        if any(turn["role"] == "tool" for turn in messages) and not self._writes_results:
            raise InvalidRequest("messages have the role 'tool': the model's chat template does not write it")
        try:
            text = self._render(messages, tools, prompts=True)
        except TemplateError as error:
            raise InvalidRequest(f"The model's chat template does not take these messages: {error}") from None
        ids: list[int] = backend.encode(text, add_special_tokens=False)
        return ids

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the model reads which tools there are."""
        return PROBE_NAME in self._probe([QUESTION], prompts=True)

    @cached_property
    def written_call(self) -> str:
        """What stands where the assistant's words would, if it calls a tool; "" if nothing does."""
        said = self._probe([QUESTION, {"role": "assistant", "content": PROBE_SAYING}])
        before = said.partition(PROBE_SAYING)[0].rstrip()
        called = self._probe([QUESTION, CALL]) or self._probe([QUESTION, CALL, RESULT])
        return called[len(before) :].strip() if called.startswith(before) else called

    @cached_property
    def _writes_results(self) -> bool:
        return PROBE_RESULT in self._probe([QUESTION, CALL, RESULT], prompts=True)

    def _probe(self, messages: Sequence[Turn], *, prompts: bool = False) -> str:
        if self._tokenizer.backend.chat_template is None:
            return ""
        try:
            return self._render(messages, [PROBE_TOOL], prompts=prompts)
        except Exception:  # a template says no as it likes
            return ""

    def _render(self, messages: Sequence[Turn], tools: Sequence[Turn] | None, *, prompts: bool) -> str:
        shown: Any = None if tools is None else list(tools)
        backend = self._tokenizer.backend
        text = backend.apply_chat_template(list(messages), tools=shown, tokenize=False, add_generation_prompt=prompts)
        assert isinstance(text, str)
        return text


def _contents(turn: Turn) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
    return "\n".join([turn["content"], *calls] if turn["content"] else calls)

"""Messages and a tool that no client sends: what a chat template makes of them says what it takes."""

from typing import Any

PROBE_ID = "probe1234"  # some templates want nine letters and digits
PROBE_NAME = "probe_tool"
PROBE_WORDS = "probe_words"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
QUESTION: dict[str, Any] = {"role": "user", "content": "probe_question"}
RESULT: dict[str, Any] = {"role": "tool", "content": "probe_result", "tool_call_id": PROBE_ID, "name": PROBE_NAME}


def probe_call(as_object: bool) -> dict[str, Any]:
    """A call of the probe's tool, its arguments an object or JSON in a text."""
    function = {"name": PROBE_NAME, "arguments": {"a": 1} if as_object else '{"a": 1}'}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": PROBE_ID, "type": "function", "function": function}]}


def saying(role: str, *, in_parts: bool = False) -> dict[str, Any]:
    """A message of this role that says the probe's words."""
    content: Any = [{"type": "text", "text": PROBE_WORDS}] if in_parts else PROBE_WORDS
    return {"role": role, "content": content} | ({"tool_call_id": PROBE_ID, "name": PROBE_NAME} if role == "tool" else {})

"""What a piece of an answer adds to a message: thoughts, words, and pieces of calls."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Delta:
    """What a piece of text adds to a message."""

    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index, in OpenAI's form of streamed calls
    thoughts: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.calls or self.thoughts)

    @property
    def whole_content(self) -> str | None:
        """The content of a whole message: none at all if it only calls."""
        return self.content or (None if self.calls else "")

    def add(self, piece: "Delta") -> None:
        self.content += piece.content
        self.thoughts += piece.thoughts
        for index, call in piece.calls.items():
            if index in self.calls:
                self.calls[index]["function"]["arguments"] += call["function"]["arguments"]
            else:
                self.calls[index] = call

    def begin_call(self, index: int, id: str, name: str) -> None:
        self.calls[index] = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}

    def add_arguments(self, index: int, text: str) -> None:
        """A piece of the call's arguments, as the model wrote it."""
        if text:
            call = self.calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
            call["function"]["arguments"] += text

    @property
    def reasoning(self) -> dict[str, str]:
        """Thoughts under both names: clients of DeepSeek and SGLang read the one, those of vLLM and OpenRouter the other."""
        return {"reasoning_content": self.thoughts, "reasoning": self.thoughts} if self.thoughts else {}

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI streams it."""
        content = {"content": self.content} if self.content else {}
        return self.reasoning | content | ({"tool_calls": list(self.calls.values())} if self.calls else {})

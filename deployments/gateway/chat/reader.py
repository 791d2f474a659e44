"""Separates a streamed answer into thoughts, words, and calls of tools."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from cascade.answer import Chunk, Completion, overlap
from cascade.chat.template import CLOSE, OPEN
from deployments.gateway.chat.calls import CallParser, Delta

TAIL = 32  # last tokens of a prompt that are searched for a tag, enough for any spelling


class ThoughtSplitter:
    """Separates the thoughts of one answer, which come once; later tags count as words.

    ``within``: the prompt has opened the thoughts. Blanks stay in place: thoughts, tags and words, joined, are the text.
    """

    def __init__(self, within: bool) -> None:
        self._tags = [CLOSE] if within else [OPEN, CLOSE]  # tags that are still to come
        self._held = ""  # text that may begin a tag

    @property
    def within(self) -> bool:
        """Whether the text so far ends within thoughts."""
        return self._tags == [CLOSE]

    def take(self, text: str, ended: bool) -> tuple[str, str]:
        """Thoughts and words in one more piece."""
        self._held += text
        thoughts = words = ""
        while True:
            tag = self._tags[0] if self._tags else ""
            before, reached, rest = self._held.partition(tag) if tag else (self._held, "", "")
            if not reached:
                certain = len(before) - (0 if ended else overlap(before, tag))
                before, rest = before[:certain], before[certain:]
            if self.within:
                thoughts += before
            else:
                words += before
            self._held = rest
            if not reached:
                return thoughts, words
            del self._tags[0]


def opened(text: str) -> bool | None:
    """Whether ``text`` ends within thoughts; ``None`` if it ends after them."""
    opening, closing = text.rfind(OPEN), text.rfind(CLOSE)
    if closing > opening:
        return None
    return opening >= 0


def prompted(text: str) -> bool | None:
    """`opened` for a prompt, whose end may open or close the thoughts of the assistant's turn."""
    end = text.rstrip()
    return True if end.endswith(OPEN) else None if end.endswith(CLOSE) else False


class TurnReader:
    """Reads one answer: calls with a ``parser``, thoughts with a ``splitter``; without both the whole answer is words.

    ``hidden`` are texts, by id, of special tokens that the two need and decoding leaves out. Calls within thoughts are
    thoughts. Without ``show_thoughts`` thoughts are counted, but left out.
    """

    def __init__(
        self,
        parser: CallParser | None = None,
        hidden: Mapping[int, str] = MappingProxyType({}),
        splitter: ThoughtSplitter | None = None,
        show_thoughts: bool = True,
    ) -> None:
        self._parser = parser
        self._hidden = hidden
        self._splitter = splitter
        self._show_thoughts = show_thoughts
        self._num_thought_tokens = 0

    @property
    def plain(self) -> bool:
        """Whether the whole text is words."""
        return self._parser is None and self._splitter is None

    @property
    def num_thought_tokens(self) -> int | None:
        """Tokens of the thoughts so far, tags included; ``None`` if thoughts are not separated."""
        return None if self._splitter is None else self._num_thought_tokens

    def take(self, chunk: Chunk) -> Delta:
        """Thoughts, words and calls in the next piece of the answer."""
        ended = chunk.completion is not None
        thoughts, words = ("", chunk.text) if self.plain else self._split(chunk, ended)
        delta = Delta(words) if self._parser is None else self._parser.take(words, ended)
        delta.thoughts = thoughts if self._show_thoughts else ""
        return delta

    def finish_reason(self, completion: Completion) -> str:
        """Why the answer ended: `tool_calls` if it stopped after a whole call."""
        called = self._parser is not None and self._parser.finished and completion.finish_reason == "stop"
        return "tool_calls" if called else completion.finish_reason

    def _split(self, chunk: Chunk, ended: bool) -> tuple[str, str]:
        if self._splitter is None:
            return "", "".join(self._spelled(chunk))
        thoughts = words = ""
        for number, text in enumerate(self._spelled(chunk)):
            within = self._splitter.within
            more = self._splitter.take(text, False)
            thoughts, words = thoughts + more[0], words + more[1]
            self._num_thought_tokens += number < len(chunk.token_ids) and (within or self._splitter.within)
        more = self._splitter.take("", ended)
        return thoughts + more[0], words + more[1]

    def _spelled(self, chunk: Chunk) -> Iterator[str]:
        """The text of each token, also of hidden ones, and the text after them."""
        at = 0
        for token, end in zip(chunk.token_ids, chunk.ends, strict=True):
            yield chunk.text[at:end] + self._hidden.get(token, "")
            at = end
        yield chunk.text[at:]

"""An answer taken apart as it comes: thoughts, words, and calls of tools."""

from collections.abc import Iterable, Mapping, Sequence

from cascade.answer import Chunk, Completion
from deployments.gateway.chat.calls import CallParser
from deployments.gateway.chat.delta import Delta
from deployments.gateway.chat.thoughts import ThoughtSplitter


class TurnReader:
    """Reads one answer. Calls are read with a ``parser``, thoughts with a ``splitter``; calls in thoughts are thoughts.

    ``hidden`` are texts of special tokens that one of both needs, and that decoding leaves out. Thoughts are left out of what
    is read if they are not ``told``.
    """

    def __init__(
        self, parser: CallParser | None, hidden: Mapping[int, str], splitter: ThoughtSplitter | None = None, told: bool = True
    ) -> None:
        self._parser = parser
        self._hidden = hidden
        self._splitter = splitter
        self._told = told
        self._begins: list[int] = []  # of tokens, in characters with what is hidden; only if thoughts are told apart
        self._num_chars = 0

    @property
    def called(self) -> bool:
        return self._parser is not None and self._parser.finished

    @property
    def num_thought_tokens(self) -> int | None:
        """Tokens so far that begin within the thoughts, tags included; ``None`` if thoughts are not told apart."""
        return None if self._splitter is None else sum(map(self._splitter.holds, self._begins))

    def take(self, chunk: Chunk) -> Delta:
        """What the next piece of the answer adds."""
        ended, thoughts, words = chunk.completion is not None, "", self._spelled(chunk)
        if self._splitter is not None:
            thoughts, words = self._splitter.take(words, ended)
        delta = Delta(words) if self._parser is None else self._parser.take(words, ended)
        delta.thoughts = thoughts if self._told else ""
        return delta

    def _spelled(self, chunk: Chunk) -> str:
        """The text of a piece with the texts of hidden tokens in their places."""
        if not self._hidden and not self._splitter:
            return chunk.text
        parts, at = [], 0
        for token, end in zip(chunk.token_ids, chunk.ends, strict=True):
            self._begins += [self._num_chars] if self._splitter else []
            parts.append(chunk.text[at:end] + self._hidden.get(token, ""))
            self._num_chars += len(parts[-1])
            at = end
        self._num_chars += len(chunk.text) - at
        return "".join(parts) + chunk.text[at:]


def read(chunks: Iterable[Chunk], completion: Completion, reader: TurnReader | None) -> tuple[Delta, str]:
    """What a whole answer says, and why it ended; without a reader it is words."""
    if reader is None:
        return Delta(completion.text), completion.finish_reason
    said = Delta()
    for chunk in chunks:
        said.add(reader.take(chunk))
    return said, finish_reason(completion, reader)


def ending(chunks: Sequence[Chunk]) -> Completion:
    """What the last piece of an answer brings."""
    completion = chunks[-1].completion
    assert completion is not None, "the last piece brings the completion"
    return completion


def finish_reason(completion: Completion, reader: TurnReader | None) -> str:
    """Why an answer ended: `tool_calls` if it stopped after a whole call."""
    called = reader is not None and reader.called and completion.finish_reason == "stop"
    return "tool_calls" if called else completion.finish_reason

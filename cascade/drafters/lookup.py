"""Prompt lookup: a text often repeats what it has said, so it may go on as it did behind the same few tokens before.

As `prompt_lookup_num_tokens` of Transformers and the n-gram drafter of vLLM (Saxena 2023, "Prompt Lookup Decoding"), but found
in an index that grows with the text instead of by a search through all of it.
"""

from collections.abc import Sequence

from cascade.chain.session import Session
from cascade.messages import Close, Commit, Link, Message, Open
from cascade.scorer import Scored

NGRAM = 3  # tokens that must be the same
ANY_TOKEN = 2**62  # size of a vocabulary that has all token ids: those of the tier above


class Lookup:
    """The bottom of a chain, beside the tier above it: answers at once, in the thread of the one who posts."""

    def __init__(self, name: str = "lookup", level: int = 0) -> None:
        self._name = name
        self._level = level
        self._texts: dict[str, _Text] = {}  # by session

    def post(self, messages: Sequence[Message], up: Link | None = None) -> None:
        """Take messages from above; Opens come with the link that takes their session's proposals."""
        for message in messages:
            if isinstance(message, Open):
                assert up is not None
                self._texts[message.session] = _Text(Session(message, self._name, self._level, ANY_TOKEN), up)
            elif isinstance(message, Close):
                self._texts.pop(message.session, None)
            if isinstance(message, Open | Commit) and (text := self._texts.get(message.session)) is not None:
                self._answer(text, message)

    def _answer(self, text: "_Text", message: Open | Commit) -> None:
        session = text.session
        if isinstance(message, Commit):
            session.commit(message.start, message.tokens)
            text.forget(message.start)
        text.guess()
        if (proposal := session.proposal()) is not None:
            text.up.send([proposal])


class _Text:
    """A session and where its n-grams were last."""

    def __init__(self, session: Session, up: Link) -> None:
        self.session = session
        self.up = up
        self._places: dict[tuple[int, ...], int] = {}  # of the token behind each n-gram, the latest
        self._end = NGRAM  # of what is in the index

    def forget(self, start: int) -> None:
        """The text from ``start`` on may be another one than before; entries that are wrong now are found out by comparing."""
        self._end = max(NGRAM, min(self._end, start))

    def guess(self) -> None:
        """Let the session's own tokens be those that came behind the same n-gram before."""
        session, text = self.session, self.session.text
        self._learn()
        while not session.stalled:
            place = self._places.get(tuple(text[-NGRAM:]), len(text))
            tokens = text[place : place + session.room + 1]
            if not tokens or text[place - NGRAM : place] != text[-NGRAM:]:
                return
            session.advance(session.work(len(text)), Scored(tokens[:1], tokens[1:]))

    def _learn(self) -> None:
        """Take what is committed into the index, but for an n-gram that nothing follows yet."""
        text, committed = self.session.text, self.session.committed
        for place in range(self._end, committed):
            self._places[tuple(text[place - NGRAM : place])] = place
        self._end = max(self._end, committed)

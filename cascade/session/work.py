"""A session's part of a pass, before it is known where its keys and values lie."""

from dataclasses import dataclass

from cascade.draft import NO_DRAFT, Draft
from cascade.session.branches import Branch


@dataclass(frozen=True, slots=True)
class Work:
    """One row of a pass: score ``tokens`` from position ``start``, and the draft after them."""

    start: int
    tokens: list[int]
    num_own: int  # own tokens wanted after the last of tokens: 1, or 0 for a prefill chunk that does not end the text
    draft: Draft = NO_DRAFT
    branch: Branch | None = None  # whose tokens these are; None for the session's text
    drafters: tuple[str, ...] = ()  # of each node of the draft, see `cascade.session.guesses.Pool`

    def __len__(self) -> int:
        """Positions that the pass reads."""
        return len(self.tokens) + len(self.draft)

    @property
    def num_read(self) -> int:
        """Tokens of the text that are only read: no own token is wanted after them."""
        return len(self.tokens) - self.num_own

    @property
    def num_scored(self) -> int:
        """Own tokens that the pass gives."""
        return self.num_own + len(self.draft)

    def pieces(self, size: int) -> "list[Work]":
        """The same row as several, one after another: at most ``size`` tokens that are only read, then those with own ones."""
        read = self.num_read
        parts = [Work(self.start + i, self.tokens[i : min(i + size, read)], 0) for i in range(0, read, size)]
        last = Work(self.start + read, self.tokens[read:], self.num_own, self.draft, drafters=self.drafters)
        return [*parts, last] if self.num_own else parts

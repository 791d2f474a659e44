"""Guesses from own tokens after rejected guesses, and from n-grams of them; needs no model and no corpus.

A window of guesses follows a text. A pass that scores it gives an own token after each of its tokens, and these are the window
of the next pass (Jacobi decoding, Santilli et al., arXiv 2305.10427). Tokens that follow each other from pass to pass are
n-grams, which each tenant's pool keeps; an n-gram that begins with the text's last token is a guess, too (lookahead decoding,
Fu et al., arXiv 2402.02057). A window is seldom right: it pays where a pass of many tokens costs as much as one of a few.
"""

from collections import OrderedDict
from collections.abc import Sequence

from cascade.draft import NO_DRAFT, Draft
from cascade.drafters.matching import MAX_TENANTS
from cascade.messages import origin
from cascade.scorer import Guesser, Scored

WINDOW = 7  # tokens after a text that passes refine
GRAM = 4  # tokens of an n-gram
MAX_GRAMS = 2**14  # n-grams of a tenant at most
REFINED, POOLED = 1, 2  # confidences of tokens of the window, and of n-grams

Pool = OrderedDict[int, tuple[int, ...]]  # by first token: the other tokens of the latest n-gram


class Lookahead:
    """A window for each text, and a pool for each tenant."""

    name = "lookahead"

    def __init__(self, level: int = 0) -> None:
        self.level = level
        self.pools: OrderedDict[str, Pool] = OrderedDict()

    def begin(self, tenant: str) -> "Window":
        pool = self.pools.setdefault(tenant, OrderedDict())
        self.pools.move_to_end(tenant)
        if len(self.pools) > MAX_TENANTS:
            self.pools.popitem(last=False)
        return Window(self.level, pool)


class Window(Guesser):
    def __init__(self, level: int, pool: Pool) -> None:
        self._origin = bytes([origin(level)])
        self._pool = pool
        self._tokens: list[int] = []  # after the text
        self._trails: list[tuple[int, ...]] = []  # for each of these, the tokens before it in earlier passes

    def observe(self, last: int, draft: Draft, scored: Scored) -> None:
        """Make a new window of the own tokens after the old one's, as far as they lie after the new text."""
        own, new = scored.own, draft.walk(scored.own)[0]
        tokens, trails = [], []
        for depth, node in enumerate(draft.find(self._tokens)):
            if 1 + node >= len(own):
                break
            gram = (*self._trails[depth], self._tokens[depth], own[1 + node])
            self._keep(gram)
            if depth >= len(new) - 1:
                tokens.append(own[1 + node])
                trails.append(gram[:-1][2 - GRAM :])
        self._tokens, self._trails = tokens, trails

    def _keep(self, gram: tuple[int, ...]) -> None:
        first, *after = gram
        if len(after) > 1 or first not in self._pool:
            self._pool[first] = tuple(after)
            self._pool.move_to_end(first)
        if len(self._pool) > MAX_GRAMS:
            self._pool.popitem(last=False)

    def cut(self) -> None:
        self._tokens, self._trails = [], []

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """The n-gram that begins with the last token, and beside it the window, whose new places repeat the text's end."""
        if most <= 0:
            return NO_DRAFT
        missing = WINDOW - len(self._tokens)
        self._tokens += text[len(text) - missing :] if missing > 0 else ()
        self._trails += [()] * (len(self._tokens) - len(self._trails))
        window = self._line(self._tokens[:most], REFINED)
        line = self._line(self._pool.get(text[-1], ())[:most], POOLED)
        return line.union(window)[0]

    def _line(self, tokens: Sequence[int], confidence: int) -> Draft:
        return Draft(tuple(tokens), self._origin * len(tokens), bytes([confidence]) * len(tokens))

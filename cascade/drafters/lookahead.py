"""A window of guesses that each pass makes better, and n-grams of what it said there: lookahead decoding (arXiv 2402.02057).

The window is a line after the text. Own tokens after its nodes, be these right or wrong, take the place of its guesses in the
next pass (Jacobi iteration, arXiv 2305.10427). A chain of tokens each of which a pass has said after the one before is an
n-gram; it is a guess wherever its first token comes again. N-grams of the text itself are kept, too.

Nodes of the window are seldom right, and count for what they are: their chances are learnt by how far they are settled, so
that they are scored where a pass has room for them at no cost. What is not scored is offered ever more seldom.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cascade.draft import NO_DRAFT, Draft
from cascade.drafters.tenants import Tenants
from cascade.scorer import Guesser, Scored

GRAM = 5  # tokens of an n-gram
BESIDE = 3  # n-grams that are kept of those that begin with the same token
MAX_KNOWN = 2**13  # first tokens of a tenant's n-grams
WINDOW = 8  # guesses
READ = 2**11  # last tokens of a new text whose n-grams are kept
MOST_SEEN = 15
LONGEST_PAUSE = 64  # passes in which guesses are not offered that were not scored

TAKEN, SAID, SETTLED = 1, 2, 4  # kinds of a window's guesses: from anywhere, from one pass, the same from two
SEEN = 8  # kind of an n-gram that came once; then 16, 32 and 64

Gram = tuple[int, ...]


class Guess(NamedTuple):
    """At one position of a window."""

    chain: Gram  # tokens that passes said one after another, the guess being the last one; at most `GRAM`
    kind: int


class Lookahead:
    """N-grams, by tenant."""

    name = "lookahead"

    def __init__(self, level: int = 0) -> None:
        self.level = level
        self.tenants = Tenants(Grams)

    def begin(self, tenant: str) -> "Looker":
        return Looker(self.level, self.tenants.of(tenant))


class Grams:
    """What came after the first token of n-grams and how often, the latest first."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[tuple[Gram, int], ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def saw(self, gram: Gram) -> None:
        """An n-gram came, maybe again."""
        first, rest = gram[0], gram[1:]
        known = self._known.pop(first, ())
        if known and known[0][0] == rest:
            self._known[first] = ((rest, min(MOST_SEEN, known[0][1] + 1)), *known[1:])
            return
        times = next((times for other, times in known if other == rest), 0)
        others = [one for one in known if one[0] != rest]
        self._known[first] = ((rest, min(MOST_SEEN, times + 1)), *others[: BESIDE - 1])
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def behind(self, token: int) -> Sequence[tuple[Gram, int]]:
        """What n-grams that begin with a token go on with, and how often they came."""
        return self._known.get(token, ())


class Looker(Guesser):
    """One text."""

    def __init__(self, level: int, grams: Grams) -> None:
        self._origin = bytes([level << 1])
        self._grams = grams
        self._window: list[Guess] = []
        self._start = 0  # position of the window
        self._offered = False  # with the last guess
        self._once: list[int] = []  # first tokens of n-grams that came once, offered with the last guess
        self._windows, self._grams_once = Rest(), Rest()

    def observe(self, last: int, draft: Draft, scored: Scored) -> None:
        """Own tokens after the window are its next guesses, each a position further."""
        if self._once:
            self._grams_once.told(any(token in draft.tokens for token in self._once))
            self._once = []
        if self._offered:
            self._offered = False
            self._take(draft, scored)

    def _take(self, draft: Draft, scored: Scored) -> None:
        old, window = self._window, self._window[:1]
        tokens, own, at = draft.tokens, scored.own, -1
        for node in range(min(len(tokens), len(own) - 1)):
            place = len(window)
            if draft.parent(node) == at and tokens[node] == old[place - 1].chain[-1]:
                at, said = node, own[1 + node]
                same = place < len(old) and old[place].chain[-1] == said
                window.append(Guess((*old[place - 1].chain[1 - GRAM :], said), SETTLED if same else SAID))
                if place == len(old):
                    break
        for guess in window[1:]:
            if len(guess.chain) == GRAM:
                self._grams.saw(guess.chain)
        self._windows.told(len(window) > 1)
        self._window = window + old[len(window) :]

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """N-grams that begin with the last token, and the window."""
        end = len(text)
        for place in range(max(since, end - READ, GRAM - 1), end):
            self._grams.saw(tuple(text[place + 1 - GRAM : place + 1]))
        if most <= 0:
            return NO_DRAFT
        tree = Tree(self._origin)
        once = self._grams_once.over()
        for line, times in self._grams.behind(text[-1]):
            if times > 1 or once:
                tree.add((token, SEEN << times.bit_length() - 1) for token in line[:most])
            if times == 1 and once:
                self._once.append(line[0])
        self._offered = self._windows.over()
        if self._offered:
            self._move(text)
            tree.add((chain[-1], kind) for chain, kind in self._window[:most])
        return tree.draft()

    def cut(self) -> None:
        """What was guessed was guessed after another text."""
        self._window, self._once, self._offered = [], [], False

    def _move(self, text: Sequence[int]) -> None:
        """Let the window begin after the text. Guesses that are missing are any of its tokens, to begin with."""
        end = len(text)
        gone = end - self._start
        window = self._window[gone:] if 0 <= gone <= len(self._window) else []
        missing = range(end + len(window), end + WINDOW)
        self._window = window[:WINDOW] + [Guess((text[7919 * place % end],), TAKEN) for place in missing]
        self._start = end


class Rest:
    """Of guesses that no pass scores: twice as long each time."""

    def __init__(self) -> None:
        self._left = 0  # guesses without them
        self._missed = 0  # times in a row

    def over(self) -> bool:
        """Whether they are offered with this guess."""
        self._left -= 1
        return self._left < 0

    def told(self, scored: bool) -> None:
        """Those that were offered were scored, or not."""
        self._missed = 0 if scored else self._missed + 1
        self._left = min(LONGEST_PAUSE, 2**self._missed) - 1


class Tree:
    """Lines after a text, as one draft: what two of them begin with stands there once, as the first one says it."""

    def __init__(self, origin: bytes) -> None:
        self._origin = origin
        self._places: dict[tuple[int, int], int] = {}  # nodes by parent and token
        self._kinds = bytearray()

    def add(self, line: Iterable[tuple[int, int]]) -> None:
        """Tokens and their kinds."""
        at = -1
        for token, kind in line:
            at = self._places.setdefault((at, token), len(self._kinds))
            if at == len(self._kinds):
                self._kinds.append(kind)

    def draft(self) -> Draft:
        if not self._kinds:
            return NO_DRAFT
        parents, tokens = zip(*self._places, strict=True)
        return Draft(tokens, self._origin * len(tokens), bytes(self._kinds), parents)

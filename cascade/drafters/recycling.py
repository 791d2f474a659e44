"""What came after a token before may come after it again: token recycling (Luo et al., arXiv 2408.08696).

Own tokens after guesses that were wrong are kept, too: a pass has computed them, and nothing else is done with them.
"""

from collections import OrderedDict
from collections.abc import Sequence

from cascade.draft import NO_DRAFT, Draft
from cascade.drafters.tenants import Tenants
from cascade.scorer import Guesser, Scored

NEXT = 3  # tokens that are known after each
MAX_KNOWN = 2**15  # tokens of a tenant after which some are known
DEPTH = 5  # of a guess
BROAD = 2  # levels of the tree on which runner-ups are offered
MOST_SEEN = 127


class Recycling:
    """Tokens after tokens, by tenant."""

    name = "recycling"

    def __init__(self, level: int = 0) -> None:
        self.level = level
        self.tenants = Tenants(Followers)

    def begin(self, tenant: str) -> "Recycler":
        return Recycler(self.level, self.tenants.of(tenant))


class Followers:
    """The last tokens after each token, the latest first, and how often that one came in a row."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[int, tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def saw(self, token: int, next_: int) -> None:
        """``next_`` came after ``token``."""
        times, others = self._known.pop(token, (0, ()))
        if others and others[0] == next_:
            times = min(MOST_SEEN, times + 1)
        else:
            times, others = 1, (next_, *(other for other in others if other != next_))[:NEXT]
        self._known[token] = times, others
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def of(self, token: int) -> tuple[int, tuple[int, ...]]:
        return self._known.get(token, (0, ()))


class Recycler(Guesser):
    """One text."""

    def __init__(self, level: int, followers: Followers) -> None:
        self._origin = bytes([level << 1])
        self._followers = followers

    def observe(self, last: int, draft: Draft, scored: Scored) -> None:
        for token, own in zip((last, *draft.tokens), scored.own, strict=False):
            self._followers.saw(token, own)

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """A tree after the last token: first a line of the latest followers, then others beside its first tokens."""
        line: list[tuple[int, int, int]] = []  # token, confidence, parent
        others: list[tuple[int, int, int]] = []
        token = text[-1]
        for depth in range(min(most, DEPTH)):
            times, followers = self._followers.of(token)
            if not followers:
                break
            if depth < BROAD:
                others += [(other, 1, depth - 1) for other in followers[1:]]
            token = followers[0]
            line.append((token, max(1, times), depth - 1))
        nodes = line + others
        if not nodes:
            return NO_DRAFT
        tokens, confidences, parents = zip(*nodes, strict=True)
        return Draft(tokens, self._origin * len(nodes), bytes(confidences), parents)

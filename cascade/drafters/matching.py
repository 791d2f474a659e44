"""Drafters that read texts: after the same few tokens a text may go on as it, or another one, did before.

``suffix`` finds the longest end of a text in the text itself, as `prompt_lookup_num_tokens` of Transformers and the n-gram
drafter of vLLM do (Saxena 2023, "Prompt Lookup Decoding"), and in the last texts of the same tenant (SuffixDecoding, arXiv
2411.04975); ``corpus`` in the text itself and in one that the configuration names (REST, arXiv 2311.08252).
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from cascade.draft import NO_DRAFT, Draft
from cascade.drafters.matches import BESIDE, GRAM, Match, Matches
from cascade.messages import origin
from cascade.scorer import Guesser

MAX_HELD = 2**16  # tokens of a tenant's texts
MAX_TENANTS = 16  # tenants whose texts are kept: the most recent ones
MOST_OF_TEXT = 2**13  # last tokens of a text that are kept for others


class Suffix:
    """Looks in the text and in the last texts of its tenant."""

    name = "suffix"

    def __init__(self, level: int = 0) -> None:
        self.level = level
        self.tenants: OrderedDict[str, Matches] = OrderedDict()

    def begin(self, tenant: str) -> "Matcher":
        if tenant not in self.tenants:
            self.tenants[tenant] = Matches(MAX_HELD)
        self.tenants.move_to_end(tenant)
        if len(self.tenants) > MAX_TENANTS:
            self.tenants.popitem(last=False)
        return Matcher(self.level, self.tenants[tenant], keeps=True)


class Corpus:
    """Looks in the text and in ``tokens`` that are given."""

    name = "corpus"

    def __init__(self, level: int, tokens: Sequence[int]) -> None:
        self.level = level
        self._given = Matches()
        self._given.extend(list(tokens))

    def begin(self, tenant: str) -> "Matcher":
        return Matcher(self.level, self._given)


class Matcher(Guesser):
    """Looks in its own text and in ``others``; with ``keeps`` its text is added to them at its end."""

    def __init__(self, level: int, others: Matches, *, keeps: bool = False) -> None:
        self._origin = bytes([origin(level)])
        self.own = Matches()
        self._others = others
        self._keeps = keeps

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """The continuation of the longest match, and beside it the first tokens of another one."""
        own, others = self.own, self._others
        start, most = min(since, len(own)), max(0, most)
        matches = own.follow(start, text[start:], most)
        if len(others):
            matches += others.find(own, most)
            matches.sort(key=lambda match: -match[0])  # stable: of equals the text's own goes first
        return self._draft(matches)

    def close(self, text: Sequence[int]) -> None:
        if self._keeps:
            self._others.extend(list(text[-MOST_OF_TEXT:]))

    def _draft(self, matches: Sequence[Match]) -> Draft:
        """A tree of the matches, the longest as its trunk. A match that another one contradicts counts less."""
        if not matches:
            return NO_DRAFT
        same, trunk = matches[0]
        other = next(((size, tokens) for size, tokens in matches[1:] if tokens[0] != trunk[0]), None)
        confidence = kind(same, other[0] if other else 0)
        if other is None:
            return Draft(tuple(trunk), self._origin * len(trunk), bytes([confidence]) * len(trunk))
        size, tokens = other
        beside = tokens[:BESIDE]
        nodes = len(trunk)
        return Draft(
            (*trunk, *beside),
            self._origin * (nodes + len(beside)),
            bytes([confidence]) * nodes + bytes([kind(size, 0)]) * len(beside),
            _two_lines(nodes, len(beside)),
        )


@lru_cache
def _two_lines(trunk: int, beside: int) -> tuple[int, ...]:
    """Parents of a line of so many nodes and of another one beside it."""
    return (*range(-1, trunk - 1), -1, *range(trunk, trunk + beside - 1))


def kind(same: int, contradicted: int) -> int:
    """The confidence of a match of ``same`` tokens, beside one of ``contradicted`` with another continuation."""
    ladder = max(0, (same - GRAM + 1).bit_length() - (contradicted * 2 >= same))  # 1, 2, 3..6, ...
    return 1 << min(7, ladder)

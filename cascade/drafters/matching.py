"""Drafters that read texts: after the same few tokens a text may continue as it, or another one, did before.

``suffix`` searches for the longest end of a text in the text itself, as `prompt_lookup_num_tokens` of Transformers and the
n-gram drafter of vLLM do (Saxena 2023, "Prompt Lookup Decoding"), and in the last texts of the same tenant (SuffixDecoding,
arXiv 2411.04975). ``corpus`` searches in the text itself, and in one that the configuration names (REST, arXiv 2311.08252).
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from cascade.draft import NO_DRAFT, Draft
from cascade.drafters.matches import GRAM, HEAD, Matches, Search, follow
from cascade.messages import origin
from cascade.scorer import Guesser, Query

MAX_HELD = 2**16  # tokens of a tenant's texts that are kept
MAX_TENANTS = 16  # tenants whose texts are kept: the most recent ones
MOST_OF_TEXT = 2**13  # last tokens of a text that are kept for others


class Suffix:
    """Searches in the text and in the last texts of its tenant."""

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
    """Searches in the text and in the given ``tokens``."""

    name = "corpus"

    def __init__(self, level: int, tokens: Sequence[int]) -> None:
        self.level = level
        self._given = Matches()
        self._given.extend(list(tokens))

    def begin(self, tenant: str) -> "Matcher":
        return Matcher(self.level, self._given)


class Matcher(Guesser):
    """Searches in its own text and in ``others``; with ``keeps`` its text is added to these when it ends."""

    def __init__(self, level: int, others: Matches, *, keeps: bool = False) -> None:
        self._level = level
        self.own = Matches()
        self._others = others
        self._keeps = keeps

    @classmethod
    def guess_all(cls, queries: Sequence[Query]) -> list[Draft]:
        """The continuation of the longest match as a trunk, and beside it the first tokens of another match."""
        searches: list[Search] = []
        for guesser, text, since, most in queries:
            start = min(since, guesser.own.size)
            searches.append((guesser.own, start, text[start:], most, guesser._others))
        drafts: list[Draft] = []
        for (guesser, *_), result in zip(queries, follow(searches), strict=True):
            trunk, beside, same, same_beside = result[:HEAD]
            shape = _shape(guesser._level, trunk, beside, same, same_beside)
            drafts.append(Draft(tuple(result[HEAD : HEAD + trunk + beside]), *shape) if trunk else NO_DRAFT)
        return drafts

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        return self.guess_all([(self, text, since, most)])[0]

    def close(self, text: Sequence[int]) -> None:
        if self._keeps:
            self._others.extend(list(text[-MOST_OF_TEXT:]))


@lru_cache(2**12)
def _shape(level: int, trunk: int, beside: int, same: int, same_beside: int) -> tuple[bytes, bytes, tuple[int, ...]]:
    """Origins, confidences and parents of a trunk after a match of ``same`` tokens, and of another line beside it."""
    origins = bytes([origin(level)]) * (trunk + beside)
    confidences = bytes([kind(same, same_beside)]) * trunk + bytes([kind(same_beside, 0)]) * beside
    return origins, confidences, (*range(-1, trunk - 1), -1, *range(trunk, trunk + beside - 1)) if beside else ()


def kind(same: int, contradicted: int) -> int:
    """The confidence of a match of ``same`` tokens, where one of ``contradicted`` tokens continues differently."""
    ladder = max(0, (same - GRAM + 1).bit_length() - (contradicted * 2 >= same))  # 1, 2, 3..6, ...
    return 1 << min(7, ladder)

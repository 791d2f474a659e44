"""Places where a text stood before are found, whatever was cut meanwhile, fast and in little memory."""

import struct
from itertools import cycle, islice, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade.drafters.matches import BESIDE, GRAM, LONGEST, TRIES, Matches, follow

MOST_AFTER = 9
Match = tuple[int, list[int]]  # its length, and the tokens after it
few = st.lists(st.integers(0, 3), max_size=12)
steps = st.lists(st.tuples(st.integers(0, 40), few), max_size=12)  # keep so many tokens, then more


def best(text: list[int], others: list[int]) -> list[int]:
    """What `follow` says, by comparing all places that are looked at."""
    if len(text) < GRAM:
        return [0, 0, 0, 0]
    query = text[-LONGEST:]
    matches = sorted(longest(text, query, repeats=True) + longest(others, query), key=lambda match: -match[0])
    same, trunk = next(iter(matches), (0, []))
    same_beside, beside = next((match for match in matches if match[1][0] != trunk[0]), (0, []))
    return [len(trunk), len(beside[:BESIDE]), same, same_beside, *trunk, *beside[:BESIDE]]


def longest(tokens: list[int], query: list[int], *, repeats: bool = False) -> list[Match]:
    """The two longest matches of the end of a query; tokens after them may be ``repeats`` of a period."""
    grams = [p for p in range(len(tokens) - 1, 0, -1) if tokens[p - 1 : p + 1] == query[-GRAM:]][:TRIES]
    places = [place for place in grams if place + 1 < len(tokens)]
    best = max(places, key=lambda place: same(tokens, place, query), default=-1)  # of equals the first, which is the latest
    rest = [place for place in places if tokens[place + 1] != tokens[best + 1]]
    other = max(rest, key=lambda place: same(tokens, place, query), default=-1)
    return [
        (same(tokens, place, query), list(islice(cycle(after) if repeats else after, most)))
        for place, most in ((best, MOST_AFTER), (other, BESIDE))
        if (after := tokens[place + 1 :]) and place >= 0
    ]


def same(tokens: list[int], place: int, query: list[int]) -> int:
    """How many tokens up to a place are those that a query ends with; `GRAM` - 1 for no place."""
    if place < 0:
        return GRAM - 1
    pairs = zip(tokens[place::-1], query[::-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def of(tokens: list[int]) -> Matches:
    matches = Matches()
    matches.extend(tokens)
    return matches


@given(st.lists(steps, min_size=1, max_size=3), st.lists(st.integers(0, 3), max_size=40))
def test_the_longest_matches_are_found_after_any_cut(changes: list[list[tuple[int, list[int]]]], others: list[int]) -> None:
    """Guards chains against places of texts that were cut: what is found in several texts at once, and in another beside them,
    is what a search through all of it finds; a text that grows takes nothing of its neighbours."""
    matches, texts, held = [Matches() for _ in changes], [list[int]() for _ in changes], of(others)
    for step in zip(*changes, strict=False):
        searches = [
            (mine, min(kept, len(text)), more, MOST_AFTER, held)
            for mine, text, (kept, more) in zip(matches, texts, step, strict=True)
        ]
        results = follow(searches)
        texts = [text[:kept] + more for text, (kept, more) in zip(texts, step, strict=True)]
        for mine, text, result in zip(matches, texts, results, strict=True):
            assert mine.tokens.tolist() == text
            assert result[: 4 + result[0] + result[1]] == best(text, others)


def test_memory_is_bounded() -> None:
    """Guards long texts, and many of them: at most 64 bytes a token, and no more tokens than the limit."""
    matches = Matches()
    for size in (300, 1, 5000, 1, 100_000, 1):
        matches.extend(list(range(size)))
        assert matches.nbytes <= 64 * max(256, matches.size)
    held = Matches(limit=1000)
    for text in range(50):
        held.extend([text] * 90)
        assert held.size <= 1000
    assert held.tokens[-90:].tolist() == [49] * 90
    [result] = follow([(Matches(), 0, [48, 48], 1, held)])
    assert result[:6] == [1, 1, GRAM, GRAM, 49, 48]
    held.extend(list(range(5000)))
    assert held.tokens.tolist()[-500:] == list(range(4500, 5000)), "of a text that is too long its end is held"


def test_a_search_that_raises_leaves_others_as_they_were() -> None:
    """Guards companions: texts before one that cannot be read were said to be up to date, and were not."""
    text, others = Matches(), Matches()
    with pytest.raises(struct.error):
        follow([(text, 0, [1, 2, 3, 1, 2], MOST_AFTER, others), (Matches(), 0, [None], 4, others)])  # type: ignore[list-item]
    assert follow([(text, 0, [1, 2, 3, 1, 2], MOST_AFTER, others)])[0][:13] == best([1, 2, 3, 1, 2], [])
    assert text.tokens.tolist() == [1, 2, 3, 1, 2]

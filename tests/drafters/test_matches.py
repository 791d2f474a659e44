"""Places where a text stood before are found, whatever was cut meanwhile, fast and in little memory."""

from itertools import cycle, islice, takewhile

from hypothesis import given
from hypothesis import strategies as st

from cascade.drafters.matches import BESIDE, GRAM, LONGEST, TRIES, Match, Matches

MOST_AFTER = 9
few = st.lists(st.integers(0, 3), max_size=12)
steps = st.lists(st.tuples(st.integers(0, 40), few), max_size=12)  # keep so many tokens, then more


def longest(tokens: list[int], query: list[int], *, repeats: bool = False) -> list[Match]:
    """By comparing all places that are looked at: what `Matches.find` says, or `Matches.follow`, which ``repeats``."""
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


@given(steps)
def test_the_longest_match_is_found_after_any_cut(changes: list[tuple[int, list[int]]]) -> None:
    """Guards chains against places of a text that was cut: what is found is what a search through all of it finds."""
    matches, text = Matches(), list[int]()
    for kept, more in changes:
        found = matches.follow(min(kept, len(text)), more, MOST_AFTER)
        text = text[:kept] + more
        assert matches.tokens.tolist() == text
        if len(text) >= GRAM:
            assert found == longest(text, text[-LONGEST:], repeats=True)
            assert matches.find(matches, MOST_AFTER) == longest(text, text[-LONGEST:])
        if len(more) >= GRAM:
            assert matches.find(of(more), MOST_AFTER) == longest(text, more)


def test_memory_is_bounded() -> None:
    """Guards long texts, and many of them: at most 64 bytes a token, and no more tokens than the limit."""
    matches = Matches()
    for size in (300, 1, 5000, 1, 100_000, 1):
        matches.extend(list(range(size)))
        assert matches.nbytes <= 64 * max(256, len(matches))
    held = Matches(limit=1000)
    for text in range(50):
        held.extend([text] * 90)
        assert len(held) <= 1000
    assert held.tokens[-90:].tolist() == [49] * 90
    assert held.find(of([48, 48]), 1) == [(GRAM, [49]), (GRAM, [48])]
    held.extend(list(range(5000)))
    assert held.tokens.tolist()[-500:] == list(range(4500, 5000)), "of a text that is too long its end is held"

"""Drafters inside a tier: they make repetitions cheap, keep tenants apart, and change no text."""

import random
import struct
from collections.abc import Callable, Sequence
from itertools import cycle, islice, takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade.draft import NO_DRAFT, Draft
from cascade.drafters import DrafterSpec, make
from cascade.drafters.in_pass import MOST_STEPS, TRY, InPass
from cascade.drafters.lookahead import Lookahead
from cascade.drafters.matches import BESIDE, GRAM, LONGEST, TRIES, Matches, follow
from cascade.drafters.matching import MAX_TENANTS, Corpus, Suffix, kind
from cascade.messages import origin
from cascade.params import SamplingParams
from cascade.planner.cost import Profile
from cascade.scorer import UNREAD, Drafter, Guesser, RunnerUp, Scored
from cascade.tier.tier import Tier
from tests.test_draft import path_of
from tests.tier.test_tier import alone, answered, loop_of, opening, running, written
from tests.toys import ToyModel

INSIDE = ("suffix", "lookahead")
PERIOD = (3, 1, 4, 1, 5, 9, 2, 6)


class Parrot(ToyModel):
    """Says `PERIOD` over and over, whatever it hears, but for every 29th position."""

    def ranked(self, context: tuple[int, ...], position: int, params: SamplingParams, count: int) -> list[RunnerUp]:
        return [RunnerUp(parrot(position), 0.0)]


class Fickle(ToyModel):
    """Says the same four tokens again and again, and another one after them each time."""

    def ranked(self, context: tuple[int, ...], position: int, params: SamplingParams, count: int) -> list[RunnerUp]:
        return [RunnerUp((1, 2, 3, 4, random.Random(position).randrange(5, 30))[position % 5], 0.0)]


def parrot(position: int) -> int:
    return PERIOD[position % len(PERIOD)] if position % 29 else 7


class Nonsense(Guesser):
    """Guesses trees of anything, some of it no token at all."""

    name, level = "nonsense", 0

    def __init__(self) -> None:
        self._random = random.Random(1)

    def begin(self, tenant: str) -> Guesser:
        return self

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        size = self._random.randrange(20)
        tokens = tuple(self._random.randrange(-1, 40) for _ in range(size))
        return Draft(tokens, bytes(size), bytes(size), tuple(self._random.randrange(-1, node) for node in range(size)))


class Broken(Nonsense):
    """Raises in one of its methods, whenever that is called."""

    name, level = "broken", 0

    def __init__(self, method: str) -> None:
        super().__init__()
        self.times = 0
        setattr(self, method, self._raise)

    def _raise(self, *args: object) -> Any:
        self.times += 1
        raise ValueError("a drafter's fault")


def drafters(*kinds: str) -> list[Drafter]:
    return make([DrafterSpec(kind) for kind in kinds], kinds, None)


@pytest.mark.parametrize("method", ["begin", "guess", "observe", "cut", "close"])
def test_a_drafter_that_raises_harms_no_session(method: str) -> None:
    """Guards the loop of a tier: one exception in a drafter ended it, and failed every session."""
    broken = Broken(method)
    models = ToyModel(agreement=0.5), ToyModel(pass_s=0.002)
    below, top = (Tier(name, level, models[level], drafters=[broken]) for level, name in enumerate(("tiny", "full")))
    for tiers in running([below, top]):
        openings = [opening(seed, 1.0, 40, chain=("tiny",), drafters=("broken",)) for seed in range(3)]
        _, inbox = written(top, *openings)
        assert not inbox.failures
        assert not top._loop._drafting._failures
        assert all(tier.healthy for tier in tiers)
    assert 0 < broken.times <= 2 * (len(openings) + 1)  # at each tier once for each session, and for all of a pass


class Partial(Nonsense):
    """Raises where a text has a token, and guesses 5 after others."""

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        if 13 in text:
            raise ValueError("this text's fault")
        return Draft((5,), bytes(1))


def test_a_text_that_a_drafter_raises_for_takes_it_from_nobody_else() -> None:
    """Guards companions: one text's exception left all sessions of the pass without the drafter to the end of their answers."""
    loop = loop_of("full", 1, drafters=[Partial()])
    for token in (1, 13, 2):
        loop.receive(opening(tokens=(token, token), prompt_len=2, chain=(), drafters=("nonsense",)), [], 0.0)
    batch, _ = loop.schedule(512, 0.0)
    loop.advance(batch, [Scored([7]) for _ in batch], 1.0)
    batch, _ = loop.schedule(512, 1.0)
    assert [len(slot.drafters) for slot in loop.slots.values()] == [1, 0, 1]
    assert [slot.session.guesses.pool.draft.tokens for slot in loop.slots.values()] == [(5,), (), (5,)]


@pytest.mark.parametrize("chosen", [("suffix",), ()])
def test_a_text_that_repeats_itself_takes_few_passes(chosen: tuple[str, ...]) -> None:
    """Guards the speed that drafters inside are for, and requests that do not name them, in which they take no part."""
    with alone(Parrot(), drafters=drafters(*INSIDE)) as tier:
        first = opening(0, 0.0, 200, chain=(), drafters=chosen)
        [answer], _ = answered(tier, first)
    assert answer.tokens == [parrot(p) for p in range(first.spec.prompt_len, first.spec.prompt_len + 200)]
    assert tier.stats.passes < 200 / 2.5 or not chosen
    assert {edge.drafter for edge in answer.edges} == {"", *chosen}


class Priced(Profile):
    """Prices that the load of this machine does not change."""

    def rested(self, seconds: float) -> None:
        pass

    def record(self, num_tokens: int, num_read: int, context: int, seconds: float) -> None:
        pass


def test_guesses_that_are_seldom_right_are_compared_and_not_scored() -> None:
    """Guards "never slower": where tokens of a pass cost, what was wrong time and again was scored again."""
    profile = Priced([(1, 1e-4), (2, 1.5e-4), (16, 8e-4)])
    with alone(Fickle(), profile=profile, drafters=drafters("suffix")) as tier:
        [answer], _ = answered(tier, opening(0, 0.0, 600, chain=(), drafters=("suffix",)))
    [edge] = [edge for edge in answer.edges if edge.drafter == "suffix"]
    assert edge.accepted > 200
    assert edge.accepted > 0.6 * edge.proposed


def test_a_text_goes_on_as_it_did_before() -> None:
    """Guards guesses: the latest continuation first, a period of any length, and nothing of before a correction."""
    guesser, text = Suffix().begin(""), [1, 2, 3, 4, 5, 1, 2, 9]
    guesser.guess(text, 0, 8)
    text[7:] = [3, 1, 2]
    assert guesser.guess(text, 7, 4).trunk.tokens == (3, 1, 2, 3)
    assert 9 not in guesser.guess(text, len(text), 8).tokens
    assert Suffix().begin("").guess([7, 1, 2, 1, 2], 0, 6).trunk.tokens == (1, 2, 1, 2, 1, 2)
    assert Corpus(0, [5, 6, 7, 8]).begin("").guess([5, 6], 0, 6).tokens == (7, 8)
    draft = Suffix().begin("").guess([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], 0, 4)
    assert [draft.tokens[node] for node in draft.children(-1)] == [5, 3]


def test_tenants_never_hear_of_each_other() -> None:
    """Guards secrets: what one tenant's texts say is no guess for another's."""
    drafter, secret = Suffix(), [1, 2, 3, 4, 5, 6, 7, 8]
    first = drafter.begin("a")
    first.guess(secret, 0, 4)
    first.close(secret)
    assert drafter.begin("a").guess([1, 2, 3], 0, 4).tokens[:4] == (4, 5, 6, 7)
    assert drafter.begin("b").guess([1, 2, 3], 0, 4) == NO_DRAFT
    for tenant in range(3 * MAX_TENANTS):
        drafter.begin(str(tenant))
    assert len(drafter.tenants) == MAX_TENANTS, "those who came last are remembered"


def test_longer_matches_are_more_certain() -> None:
    """Guards confidences: one that is contradicted counts less, and none is that of a guess of which nobody says anything."""
    kinds = [kind(same, 0) for same in range(2, 65)]
    assert kinds == sorted(kinds)
    assert all(0 < kind(same, same) < kind(same, 0) <= 255 for same in range(2, 65))


def test_a_pass_is_asked_for_as_many_guesses_as_were_right() -> None:
    """Guards heads that are slow: each guess is a step of its own, and a text whose guesses are never right gives up."""
    asker = InPass("eagle3", 2).begin("")
    assert asker.wants == MOST_STEPS
    for _ in range(60):
        asker.observe(1, Draft((3, 4, 5), bytes(3)), Scored([3, 4, 6], draft=Draft((3, 4, 7), bytes(3))))
        assert asker.guess([1, 2], 1, 8).origins == bytes([origin(2)] * 3)
    assert asker.wants == 3
    asker.cut()
    assert asker.guess([1, 2], 0, 8) == NO_DRAFT, "the text goes on otherwise"
    for _ in range(60):
        asker.observe(1, NO_DRAFT, Scored([3], draft=Draft((3,), bytes(1))))  # right, but not scored: it does not pay
    assert asker.wants == UNREAD


def test_texts_give_up_where_others_have() -> None:
    """Guards busy servers: a head that does not pay is not read by every new text, and comes back once it does."""
    drafter = InPass("eagle3", 0)
    for _ in range(400):
        asker = drafter.begin("")
        for _ in range(3):
            asker.observe(1, Draft((5,), bytes(1)), Scored([4, 1], draft=Draft((5,), bytes(1))))
    assert sum(drafter.begin("").wants != UNREAD for _ in range(10 * TRY)) == 10
    for _ in range(20 * TRY):
        asker = drafter.begin("")
        for _ in range(20 if asker.wants != UNREAD else 0):
            asker.observe(1, Draft((4, 5), bytes(2)), Scored([4, 5, 1], draft=Draft((4, 5), bytes(2))))
    assert drafter.begin("").wants > 1


def test_a_window_refines_itself_and_leaves_n_grams() -> None:
    """Guards Jacobi's positions and the pool, which is each tenant's own; a text that was cut leaves no window."""

    def play(drafter: Lookahead, tenant: str, own: Callable[[Sequence[int]], int], size: int = 200) -> int:
        guesser, text, passes = drafter.begin(tenant), [5, 6, 7], 0
        while len(text) < size:
            draft = guesser.guess(text, 0, 16)
            own_tokens = [own(text), *(own([*text, *path_of(draft, node)]) for node in range(len(draft)))]
            guesser.observe(text[-1], draft, Scored(own_tokens))
            text += draft.walk(own_tokens)[0]
            passes += 1
        return passes

    assert play(Lookahead(), "", lambda text: random.Random(len(text)).randrange(100)) < 60
    drafter = Lookahead()
    first = play(drafter, "a", lambda text: (7 * text[-1] + 3) % 53)
    assert first < 100
    assert play(drafter, "a", lambda text: (7 * text[-1] + 3) % 53) < first
    assert play(drafter, "b", lambda text: (7 * text[-1] + 3) % 53) == first
    window = Lookahead().begin("")
    draft = window.guess([1, 2], 0, 16)
    window.observe(2, draft, Scored([9, *range(20, 20 + len(draft))]))
    window.cut()
    assert not {*window.guess([1, 2, 8], 0, 16).tokens} & {*range(21, 30)}
    for tenant in range(3 * MAX_TENANTS):
        drafter.begin(str(tenant))
    assert len(drafter.pools) == MAX_TENANTS


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
    """Guards chains against places of texts that were cut: what is found is what a search through all of it finds."""
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
        follow([(text, 0, [1, 2, 3, 1, 2], MOST_AFTER, others), (Matches(), 0, [None], 4, others)])
    assert follow([(text, 0, [1, 2, 3, 1, 2], MOST_AFTER, others)])[0][:13] == best([1, 2, 3, 1, 2], [])
    assert text.tokens.tolist() == [1, 2, 3, 1, 2]

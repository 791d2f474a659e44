"""Rules for accepting guesses: by enumeration each leaves the verifier's text as it is, and accepts as often as is said."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import permutations, product
from math import prod
from typing import TypeAlias

import pytest
import torch

from benchmarks.rules import RULES, Drafts, Judged, block, coupled, ratio, runner_up
from cascade.draft import Draft

TOKENS = range(3)
N = 3  # tokens of a draft
Text: TypeAlias = tuple[int, ...]
Point: TypeAlias = tuple[Fraction, ...]


def model(seed: int, *, holes: bool = False) -> Callable[[Text], tuple[Fraction, ...]]:
    """A model of three tokens: what follows a text has rational probabilities, some 0 if it has ``holes``."""

    def after(text: Text) -> tuple[Fraction, ...]:
        noise = torch.Generator().manual_seed(seed + sum((token + 1) * 7**place for place, token in enumerate(text)))
        weights = torch.randint(0 if holes else 1, 9, (3,), generator=noise).tolist()
        weights[sum(text) % 3] += 2
        return tuple(Fraction(weight, sum(weights)) for weight in weights)

    return after


PAIRS = {
    "unlike": (model(1), model(2)),
    "the same": (model(3), model(3)),
    "never drafted": (model(4), model(5, holes=True)),
    "never said": (model(6, holes=True), model(7)),
}
each_pair = pytest.mark.parametrize("pair", PAIRS)


def chance(after: Callable[[Text], Sequence[Fraction]], text: Text) -> Fraction:
    chance_of_text = Fraction(1)
    for place, token in enumerate(text):
        chance_of_text *= after(text[:place])[token]
    return chance_of_text


def drafts(pair: str, tokens: Text, runner_ups: Text = (0,) * N) -> Drafts:
    p, q = PAIRS[pair]
    laws = [[[float(value) for value in of(tokens[:place])] for place in range(count)] for of, count in ((p, N + 1), (q, N))]
    return Drafts(*(torch.tensor(law, dtype=torch.float64) for law in laws), torch.tensor(tokens), torch.tensor(runner_ups))


@each_pair
@pytest.mark.parametrize("rule", [ratio, block])
def test_texts_are_the_verifiers(rule: Callable[[Drafts], Judged], pair: str) -> None:
    """Guards against rules that change a text: over all drafts it has the probability that the verifier alone gives it."""
    p, q = PAIRS[pair]
    texts = dict.fromkeys(product(TOKENS, repeat=N + 1), 0.0)
    for tokens in product(TOKENS, repeat=N):
        if not (drafted := float(chance(q, tokens))):
            continue
        given = drafts(pair, tokens)
        reached, weights = rule(given)
        for kept, stops in enumerate((torch.cat([torch.ones(1), reached]) - torch.cat([reached, torch.zeros(1)])).tolist()):
            law = given.p[kept] if kept == N else (weights[kept] * given.p[kept] - given.q[kept]).clamp(min=0)
            for text in texts:
                if text[:kept] == tokens[:kept] and stops > 1e-15:
                    rest = float(prod(p(text[:place])[text[place]] for place in range(kept + 1, N + 1)))
                    texts[text] += drafted * stops * (law[text[kept]] / law.sum()).item() * rest
    for text, total in texts.items():
        assert total == pytest.approx(float(chance(p, text)), abs=1e-12)


@each_pair
def test_a_block_accepts_no_less(pair: str) -> None:
    """Guards the formulas of both: block verification is the best of such rules (Sun et al.)."""
    expected = {"ratio": 0.0, "block": 0.0}
    for tokens in product(TOKENS, repeat=N):
        if drafted := float(chance(PAIRS[pair][1], tokens)):
            for name in expected:
                expected[name] += drafted * RULES[name](drafts(pair, tokens))[1].item()
    assert expected["block"] >= expected["ratio"] - 1e-12
    assert pair != "unlike" or expected["block"] > expected["ratio"] + 1e-3


# Shared noise: who wins depends on how exponential clocks relate, which is a point of a triangle, all equally likely.


def cut(area: list[Point], side: Callable[[Point], Fraction]) -> list[Point]:
    """The part of a convex polygon where a linear function is not negative."""
    corners: list[Point] = []
    for corner, following in zip(area, area[1:] + area[:1], strict=True):
        here, there = side(corner), side(following)
        if here >= 0:
            corners.append(corner)
        if here * there < 0:
            at = here / (here - there)
            corners.append(tuple(a + at * (b - a) for a, b in zip(corner, following, strict=True)))
    return corners


def share(area: Sequence[Point]) -> Fraction:
    """Of the whole triangle."""
    return sum((a[0] * b[1] - b[0] * a[1] for a, b in zip(area, [*area[1:], *area[:1]], strict=True)), Fraction(0))


TRIANGLE: list[Point] = [tuple(Fraction(place == token) for token in TOKENS) for place in TOKENS]


def first(area: list[Point], law: Sequence[Fraction], token: int, among: Sequence[int] = TOKENS) -> list[Point]:
    """Where ``token`` is drawn ``among`` some: its clock over its probability is the least."""
    for other in among:
        if other != token and area:
            area = cut(area, lambda point, other=other: law[token] * point[other] - law[other] * point[token])
    return area if law[token] else []


def orders(law: Sequence[Fraction]) -> Iterator[tuple[int, int, list[Point]]]:
    """What a drafter may draw first and second, and where it does."""
    for token, second, last in permutations(TOKENS):
        yield token, second, first(first(TRIANGLE, law, token), law, second, (second, last))


@each_pair
def test_shared_noise_draws_as_is_said(pair: str) -> None:
    """Guards the two integrals over noise: how often the verifier draws what the drafter draws first, and second."""
    p, q = (of(()) for of in PAIRS[pair])
    for token, second, area in orders(q):
        both = share(area)
        if not both:
            continue
        given = drafts(pair, (token, 0, 0), (second, 0, 0))
        assert float(share(first(area, p, second)) / both) == pytest.approx(runner_up(given)[0].item(), abs=1e-12)
    for token in TOKENS:
        if q[token]:
            same = share(first(first(TRIANGLE, q, token), p, token)) / q[token]
            assert float(same) == pytest.approx(coupled(drafts(pair, (token, 0, 0)))[0].item(), abs=1e-12)
        assert share(first(TRIANGLE, p, token)) == p[token]


@each_pair
def test_texts_with_runner_ups_are_the_verifiers(pair: str) -> None:
    """Guards the server's rule: over all noise a text has exactly the verifier's probability."""
    p, q = PAIRS[pair]
    texts: dict[Text, Fraction] = dict.fromkeys(product(TOKENS, repeat=2), Fraction(0))
    accepted = expected = Fraction(0)
    for (drafted, beside, area), own in product(orders(q(())), TOKENS):
        if not (here := share(first(area, p(()), own))):
            continue
        for later, beside_two, under in orders(q((drafted,))):
            for after_one, after_beside in product(TOKENS, repeat=2):
                there = share(first(first(under, p((drafted,)), after_one), p((beside,)), after_beside))
                draft = Draft((drafted, later, beside, beside_two), bytes(4), bytes(4), (-1, 0, -1, 0))
                new, _ = draft.walk([own, after_one, 0, after_beside, 0])
                accepted += here * there * (len(new) - 1)
                if len(new) == 1:  # the text goes on by itself
                    for token in TOKENS:
                        texts[own, token] += here * there * p((own,))[token]
                else:
                    texts[new[0], new[1]] += here * there
    for text, total in texts.items():
        assert total == chance(p, text)
    for (drafted, beside, area), (later, beside_two) in product(orders(q(())), permutations(TOKENS, 2)):
        under = next(region for token, second, region in orders(q((drafted,))) if (token, second) == (later, beside_two))
        if weight := share(area) * share(under):
            given = drafts(pair, (drafted, later, 0), (beside, beside_two, 0))
            short = Drafts(given.p[:3], given.q[:2], given.tokens[:2], given.runner_ups[:2])
            expected += weight * Fraction(RULES["coupled, runner-ups"](short)[1].item())
    assert float(accepted) == pytest.approx(float(expected), abs=1e-12)

"""Rules of acceptance: exactly on small vocabularies, and with the noise that serves them on many texts."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from cascade.draft import Dist, Draft
from cascade.engine.sampling.acceptance import RULES, judge
from cascade.engine.sampling.drawing import judged, own_tokens
from cascade.engine.sampling.own_tokens import _mix, keyed_gumbel
from cascade.params import SamplingParams
from cascade.scorer import Draw, Row
from cascade.session import rounds
from cascade.splitmix import GOLDEN, signed
from tests.engine.sampling.test_sampling import ALPHA, p_value

Text: TypeAlias = tuple[int, ...]
Table: TypeAlias = dict[Text, Tensor]  # what is likely after each text
SURE = 1e-12  # of sums of probabilities in float64


def table(vocab_size: int, depth: int, seed: int, *, sparse: bool = False) -> Table:
    """Random distributions after all texts of up to ``depth`` tokens; ``sparse`` ones leave tokens out."""
    made = torch.Generator().manual_seed(seed)
    texts = [text for size in range(depth + 1) for text in itertools.product(range(vocab_size), repeat=size)]
    weights = torch.rand(len(texts), vocab_size, dtype=torch.float64, generator=made) ** 2
    if sparse:
        weights[:, 1:] *= torch.rand(len(texts), vocab_size - 1, generator=made) < 0.6
    return dict(zip(texts, (weights + 1e-300) / weights.sum(-1, keepdim=True), strict=True))


class Outcome(NamedTuple):
    """What a rule makes of a verifier and a drafter."""

    law: dict[Text, float]  # of whole texts
    said: dict[Text, float]  # of accepted guesses and the own token after them
    accepted: float  # guesses on average


def lines(q: Table, size: int, end: int | None, text: Text = (), share: float = 1.0) -> Iterator[tuple[Text, float]]:
    """Every line of guesses with its probability; an ending token ends it."""
    if len(text) == size or end in text:
        yield text, share
        return
    for token, chance in enumerate(q[text].tolist()):
        if chance:
            yield from lines(q, size, end, (*text, token), share * chance)


def law_of(p: Table, size: int, end: int | None, starts: dict[Text, float]) -> dict[Text, float]:
    """Texts of ``size`` tokens that go on by ``p`` after some beginnings, each with its probability."""
    found: dict[Text, float] = defaultdict(float)
    for start, share in starts.items():
        behind = {text[len(start) :]: dist for text, dist in p.items() if text[: len(start)] == start}
        for text, chance in lines(behind, 0 if end in start else size - len(start), end):
            found[start + text] += share * chance
    return found


def enumerated(name: str, p: Table, q: Table, size: int, end: int | None = None) -> Outcome:
    """What a rule makes of every line and of every outcome of its lots."""
    starts: dict[Text, float] = defaultdict(float)
    accepted = 0.0
    for line, share in lines(q, size, end):
        n = len(line)
        given, drawn = torch.stack([p[line[:i]] for i in range(n + 1)]), torch.stack([q[line[:i]] for i in range(n)])
        x = torch.tensor(line)
        chances = RULES[name].weigh(given, drawn, x).chances.tolist()
        for passed in itertools.product((True, False), repeat=n):
            chance = share * math.prod(c if one else 1 - c for c, one in zip(chances, passed, strict=True))
            if chance <= 0:
                continue
            lots = torch.tensor([0.0 if one else 1.0 for one in passed], dtype=torch.float64)
            count, [rest] = judge(RULES[name], given, drawn, x, lots)
            accepted += chance * int(count)
            if int(count) == n and end in line:
                starts[line] += chance
                continue
            assert int(count) == n or not rest[line[int(count)]], "a correction is no guess"
            for token, part in enumerate((rest / rest.sum()).tolist()):
                starts[(*line[: int(count)], token)] += chance * part
    starts = {text: share for text, share in starts.items() if share}
    return Outcome(law_of(p, size + 1, end, starts), starts, accepted)


def distance(one: dict[Text, float], other: dict[Text, float]) -> float:
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other}) / 2


CASES = [(size, end, kind) for size in (1, 2, 3) for end in (None, 1) for kind in ("dense", "sparse", "same")]


def tables(size: int, kind: str, vocab_size: int = 3) -> tuple[Table, Table]:
    p = table(vocab_size, size, 10 * size, sparse=kind == "sparse")
    return p, (p if kind == "same" else table(vocab_size, size, 10 * size + 1, sparse=kind == "sparse"))


@pytest.mark.parametrize(("size", "end", "kind"), CASES)
def test_the_law_is_exact(size: int, end: int | None, kind: str) -> None:
    """Guards every sign of the rules: all lines, all outcomes, and lines that end early.

    Guards their point, too: one guess is accepted as often as can be, and blocks no less than single ones.
    """
    p, q = tables(size, kind)
    accepted = {}
    for name in RULES:
        outcome = enumerated(name, p, q, size, end)
        assert distance(outcome.law, law_of(p, size + 1, end, {(): 1.0})) < SURE
        accepted[name] = outcome.accepted
    if kind == "same":
        whole = sum(len(line) * share for line, share in lines(q, size, end))
        assert list(accepted.values()) == pytest.approx([whole, whole], abs=SURE)
    if size == 1:
        assert accepted["ratio"] == pytest.approx(1 - float((p[()] - q[()]).abs().sum()) / 2, abs=SURE)
    assert accepted["block"] >= accepted["ratio"] - SURE


def after(one: Table, size: int) -> Tensor:
    """What is likely after each text of ``size`` tokens, in their order."""
    return torch.stack([dist.float() for text, dist in one.items() if len(text) == size])


def behind(keys: Tensor, tokens: Tensor) -> Tensor:
    """Keys ``[N]`` after ``tokens``, as `cascade.session.rounds` has them."""
    return _mix(keys + (tokens + 1) * signed(GOLDEN))


@pytest.mark.parametrize("name", RULES)
def test_the_noise_draws_what_the_rule_says(name: str) -> None:
    """Guards noise and keys: a verifier with its drafter's noise, or short keys, says other things."""
    assert int(behind(torch.tensor([rounds.first_key(7, 1)]), torch.tensor([5]))) == rounds.next_key(rounds.first_key(7, 1), 5)
    size, number = 2, 50_000
    p, q = tables(size, "dense")
    ids, texts = torch.arange(len(p[()])), torch.zeros(number, dtype=torch.long)
    verifier, drafter = (torch.tensor([rounds.first_key(seed, hop) for seed in range(number)]) for hop in (0, 1))
    given, drawn, guesses, keys = [after(p, 0)[texts]], [], [], [verifier]
    for place in range(size):
        drawn.append(after(q, place)[texts])
        guesses.append((drawn[-1].log() + keyed_gumbel(drafter, ids)).argmax(-1))
        drafter, texts = behind(drafter, guesses[-1]), len(ids) * texts + guesses[-1]
        given.append(after(p, place + 1)[texts])
        keys.append(behind(keys[-1], guesses[-1]))
    x = torch.stack(guesses, 1)
    line = torch.func.vmap(lambda *each: judged(RULES[name], *each))
    own = line(torch.stack(given, 1), torch.stack(drawn, 1), x, torch.stack(keys, 1))
    counts = (own[:, :-1] == x).long().cumprod(-1).sum(-1)
    said = Counter(tuple(line[: count + 1]) for line, count in zip(own.tolist(), counts.tolist(), strict=True))
    expected = enumerated(name, p, q, size).said
    assert said.keys() <= expected.keys()
    observed = torch.tensor([float(said[text]) for text in expected])
    assert p_value(observed, torch.tensor(list(expected.values())).float() * number) > ALPHA


# rows


def test_a_guess_that_a_grammar_cannot_follow_is_judged() -> None:
    """Guards the last own token that is known: were it a sample, guesses would be dropped for what they say."""
    logits, params = torch.tensor([[0.0, 1.0, -torch.inf]]), SamplingParams(seed=0)
    drawn = Dist(torch.tensor([1, 2]), torch.tensor([0.9, 0.1]))
    for key in range(200):
        row = Row(None, 0, [0], 1, params, draft=Draft((2, 1), bytes(2), dists=(drawn, drawn)), draw=Draw([key, 0, 0], "ratio"))
        own, _ = own_tokens(logits, row, row.draw)  # type: ignore[arg-type]
        assert own.tolist() == [0], "the only token that full says more often than its drafter"


@pytest.mark.parametrize("likeliest", [0, 2])
def test_what_a_token_was_drawn_from_is_told(likeliest: int) -> None:
    """Guards the distributions: what is said is what was drawn from, after filters, and nothing else is ever drawn."""
    logits = torch.tensor([[0.0, 1.0, 0.5, 3.0], [2.0, 0.0, 0.0, 0.0]])
    keys = [rounds.first_key(seed, 0) for seed in range(2)]
    row = Row(None, 0, [0, 0], 2, SamplingParams(temperature=0.5, top_k=3, seed=0))
    own, dists = own_tokens(logits, row, Draw(keys, "coupled", likeliest))
    for token, dist, scores in zip(own.tolist(), dists, logits, strict=True):
        ids, probs = dist.listed
        assert token in ids
        assert sum(probs) == pytest.approx(1)
        best = scores.topk(likeliest or 3).indices.tolist() if likeliest else ids
        assert set(ids) <= set(best)
        expected = (scores[ids] / 0.5).softmax(-1).tolist()
        assert probs == pytest.approx(expected)

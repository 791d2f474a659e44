"""Rules of acceptance: exactly on small vocabularies, and with the noise that serves them on many texts."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from cascade.draft import Dist, Draft
from cascade.engine.model import Model
from cascade.engine.sampling.acceptance import RULES, judge
from cascade.engine.sampling.drawing import judged, own_tokens
from cascade.engine.sampling.own_tokens import _mix, keyed_gumbel
from cascade.params import SamplingParams
from cascade.scorer import Draw, Row
from cascade.session import rounds
from cascade.splitmix import GOLDEN, signed
from tests import small

Text: TypeAlias = tuple[int, ...]
Table: TypeAlias = dict[Text, Tensor]  # what is likely after each text
UNLIKELY_Z = 3.72  # beyond which one case in ten thousand of a normal law is
PROMPT = range(40, 60)
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
    """A law, and how many guesses are accepted on average."""

    law: dict[Text, float]
    accepted: float


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
    return Outcome(law_of(p, size + 1, end, {text: share for text, share in starts.items() if share}), accepted)


def distance(one: dict[Text, float], other: dict[Text, float]) -> float:
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other}) / 2


CASES = [(size, end, kind) for size in (1, 2, 3) for end in (None, 1) for kind in ("dense", "sparse", "same")]


def tables(size: int, kind: str, vocab_size: int = 3) -> tuple[Table, Table]:
    p = table(vocab_size, size, 10 * size, sparse=kind == "sparse")
    return p, (p if kind == "same" else table(vocab_size, size, 10 * size + 1, sparse=kind == "sparse"))


@pytest.mark.parametrize(("size", "end", "kind"), CASES)
@pytest.mark.parametrize("name", RULES)
def test_the_law_is_exact(name: str, size: int, end: int | None, kind: str) -> None:
    """Guards every sign of the rules: all lines, all outcomes, and lines that end early."""
    p, q = tables(size, kind)
    outcome = enumerated(name, p, q, size, end)
    assert distance(outcome.law, law_of(p, size + 1, end, {(): 1.0})) < SURE
    if kind == "same":
        assert outcome.accepted == pytest.approx(sum(len(line) * share for line, share in lines(q, size, end)), abs=SURE)


@pytest.mark.parametrize(("size", "end", "kind"), CASES)
def test_how_much_is_accepted(size: int, end: int | None, kind: str) -> None:
    """Guards the point of the rules: one guess is accepted as often as can be, and blocks no less than single ones."""
    p, q = tables(size, kind)
    shares = {name: enumerated(name, p, q, size, end).accepted for name in RULES}
    if size == 1:
        assert shares["ratio"] == pytest.approx(1 - float((p[()] - q[()]).abs().sum()) / 2, abs=SURE)
    assert shares["block"] >= shares["ratio"] - SURE


# with the noise that serves them


def behind(keys: Tensor, tokens: Tensor) -> Tensor:
    """Keys ``[N]`` after ``tokens``, as `cascade.session.rounds` has them."""
    return _mix(keys + (tokens + 1) * signed(GOLDEN))


class Sampler:
    """Many texts of three tokens at once, in rounds of up to two guesses."""

    size = 3

    def __init__(self, p: Table, q: Table) -> None:
        self.vocab_size = len(p[()])
        self.p, self.q = self._packed(p), self._packed(q)

    def _packed(self, one: Table) -> Tensor:
        dense = torch.zeros((self.vocab_size + 1) ** self.size, self.vocab_size)
        for text, dist in one.items():
            dense[sum((token + 1) * (self.vocab_size + 1) ** place for place, token in enumerate(text))] = dist.float()
        return dense

    def texts(self, name: str, number: int) -> Tensor:
        """Outputs ``[number, 3]``."""
        keys = [torch.tensor([rounds.first_key(seed, hop) for seed in range(number)]) for hop in (0, 1)]
        text = torch.zeros(number, self.size, dtype=torch.long)
        written = torch.zeros(number, dtype=torch.long)
        for begin in range(self.size):
            active = (written == begin).nonzero()[:, 0]
            text[active], grown = self._round(name, begin, text[active], [key[active] for key in keys])
            written[active] += grown
        return text

    def _round(self, name: str, begin: int, text: Tensor, keys: list[Tensor]) -> tuple[Tensor, Tensor]:
        """One round after ``begin`` tokens: the texts, and how many tokens each has more."""
        places = (self.vocab_size + 1) ** torch.arange(self.size)
        for place in range(begin):
            keys = [behind(key, text[:, place]) for key in keys]
        drafter, verifiers, dists = keys[1], [keys[0]], []
        for place in range(begin, self.size - 1):
            dists.append(self.q[((text[:, :place] + 1) * places[:place]).sum(-1)])
            text[:, place] = (dists[-1].log() + keyed_gumbel(drafter, torch.arange(self.vocab_size))).argmax(-1)
            drafter, verifier = behind(drafter, text[:, place]), behind(verifiers[-1], text[:, place])
            verifiers.append(verifier)
        x = text[:, begin : self.size - 1]
        p = torch.stack([self.p[((text[:, :end] + 1) * places[:end]).sum(-1)] for end in range(begin, self.size)], 1)
        if not dists:
            own = (p[:, 0].log() + keyed_gumbel(verifiers[0], torch.arange(self.vocab_size))).argmax(-1)[:, None]
        else:
            line = torch.func.vmap(lambda *each: judged(RULES[name], *each))
            own = line(p, torch.stack(dists, 1), x, torch.stack(verifiers, 1))
        right = (own[:, :-1] == x).long().cumprod(-1).sum(-1)
        text[:, begin:] = own
        return text, right + 1


def surprise(texts: Tensor, p: Table) -> float:
    """How unlikely counts are under a law: chi-square's statistic as one of a normal law (Wilson and Hilferty 1931)."""
    law, size = law_of(p, texts.shape[1], None, {(): 1.0}), len(p[()])
    counts = torch.bincount((texts * size ** torch.arange(texts.shape[1])).sum(-1), minlength=size ** texts.shape[1])
    cells = [(int(counts[sum(t * size**i for i, t in enumerate(text))]), share * len(texts)) for text, share in law.items()]
    seen = [cell for cell in cells if cell[1] >= 5]
    rest = len(texts) - sum(count for count, _ in seen), len(texts) - sum(mean for _, mean in seen)
    df = len(seen) - (rest[1] < 5)
    chi = sum((count - mean) ** 2 / mean for count, mean in [*seen, *([rest] if rest[1] >= 5 else [])])
    return ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@pytest.mark.parametrize("name", RULES)
def test_the_law_of_many_texts(name: str) -> None:
    """Guards noise and keys, over several rounds: a verifier with its drafter's noise, or short keys, breaks it."""
    p, q = table(6, 2, 3), table(6, 2, 4)
    assert surprise(Sampler(p, q).texts(name, 100_000), p) < UNLIKELY_Z


def test_keys_are_those_of_sessions() -> None:
    """Guards the tests above: their keys are the served ones."""
    key, token = rounds.first_key(7, 1), 5
    assert int(behind(torch.tensor([key]), torch.tensor([token]))) == rounds.next_key(key, token)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_the_law_of_the_embedded_family(name: str) -> None:
    """Guards the rules on distributions of real models, each shaped by the request: medium drafts for full."""
    p, q = embedded(SamplingParams(temperature=1.0, top_k=4, seed=0))
    assert surprise(Sampler(p, q).texts(name, 200_000), p) < UNLIKELY_Z


def embedded(params: SamplingParams) -> tuple[Table, Table]:
    """What full and medium say after a prompt, and after up to two of the tokens that either may say, as small token ids."""
    models = [Model.from_pretrained(path, dtype="float32") for path in small.paths()[:0:-1]]
    found: tuple[Table, Table] = ({}, {})
    ids: list[int] = []  # by small token id
    texts: list[Text] = [()]
    for _ in range(3):
        for text, (model, dists) in itertools.product(texts, zip(models, found, strict=True)):
            row = Row(model.new_cache(), 0, [*PROMPT, *(ids[token] for token in text)], 1, params, draw=Draw([1], "coupled", 4))
            [scored] = model.run([row])
            [dist] = scored.dists
            dists[text] = torch.zeros(model.vocab_size, dtype=torch.float64).index_add_(0, dist.ids, dist.probs.double())
            ids += [token for token in dist.ids.tolist() if token not in ids]
        said = [(text, token) for text in texts for token, id in enumerate(ids) if any(dists[text][id] > 0 for dists in found)]
        texts = [(*text, token) for text, token in said]
    p, q = ({text: dist[ids] for text, dist in dists.items()} for dists in found)
    return p, q


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

"""Rules of acceptance: exactly on small vocabularies, and with the noise that serves them on many texts."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from cascade.chain import rounds
from cascade.chain.rounds import offered
from cascade.draft import Dist, Draft
from cascade.engine import acceptance
from cascade.engine.acceptance import RULES, judge, siblings
from cascade.engine.drawing import judged, judged_tree, others, own_tokens
from cascade.engine.model import Model
from cascade.engine.sampling import GOLDEN, _mix, _signed, keyed_gumbel, keyed_uniform
from cascade.messages import RUNNER_UPS
from cascade.params import SamplingParams
from cascade.scorer import Draw, Row, Sibling
from tests import small

Text: TypeAlias = tuple[int, ...]
Table: TypeAlias = dict[Text, Tensor]  # what is likely behind each text
UNLIKELY_Z = 3.72  # beyond which one case in ten thousand of a normal law is
PROMPT = range(40, 60)
SURE = 1e-12  # of sums of probabilities in float64


def table(vocab_size: int, depth: int, seed: int, *, sparse: bool = False) -> Table:
    """Random distributions behind all texts of up to ``depth`` tokens; ``sparse`` ones leave tokens out."""
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
    """Texts of ``size`` tokens that go on by ``p`` behind some beginnings, each with its probability."""
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


# trees


Offer: TypeAlias = Callable[[list[list[Sibling]]], list[tuple[float, int, int]]]
Tried: TypeAlias = tuple[list[float], Tensor]


class Combs:
    """Lines of guesses with siblings beside them: every draw of drafter and verifier, as `cascade.chain.rounds` offers them."""

    def __init__(self, p: Table, q: Table, size: int, room: int, offer: Offer = offered) -> None:
        self.p, self.q, self.size, self.room, self.offer = p, q, size, room, offer
        self.tried: dict[tuple[Text, Text], Tried] = {}

    def outcome(self) -> Outcome:
        starts: dict[Text, float] = defaultdict(float)
        accepted = 0.0
        for line, share in lines(self.q, self.size, None):
            families = [list(self._siblings(line[:place], token)) for place, token in enumerate(line)]
            for drawn in itertools.product(*families):
                chance = share * math.prod(part for _, part in drawn)
                heads = self._heads(line, [tokens for tokens, _ in drawn])
                for start, part, right in self._walked(line, heads):
                    starts[start] += chance * part
                    accepted += chance * part * right
        return Outcome(law_of(self.p, self.size + 1, None, starts), accepted)

    def _siblings(self, before: Text, token: int) -> Iterator[tuple[Text, float]]:
        """Up to two beside a token, without replacement, each with the probability to be drawn."""
        yield from _perms(self.q[before].tolist(), (token,), RUNNER_UPS)

    def _heads(self, line: Text, beside: list[Text]) -> list[Text]:
        """Of all siblings those that are offered, by place."""
        known = []
        for place, tokens in enumerate(beside):
            mass = self.q[line[:place]]
            gone = [float(mass[[line[place], *tokens[:rank]]].sum()) for rank in range(len(tokens))]
            known.append([Sibling(token, 1 - part) for token, part in zip(tokens, gone, strict=True)])
        heads = sorted(self.offer(known), reverse=True, key=lambda head: head[0])[: self.room]
        return [
            tuple(beside[place][rank] for at, rank in sorted((a, r) for _, a, r in heads) if at == place)
            for place in range(len(line))
        ]

    def _walked(self, line: Text, heads: list[Text]) -> Iterator[tuple[Text, float, int]]:
        """Texts that verdicts may lead to, with their probability and how many guesses are right."""
        reach = 1.0
        for place, token in enumerate(line):
            before = line[:place]
            chances, rest = self._try(before, (token, *heads[place]))
            failed = reach
            for guess, chance in zip((token, *heads[place]), chances, strict=True):
                if guess != token and failed * chance > 0:
                    yield (*before, guess), failed * chance, place + 1
                failed *= 1 - chance
            if failed > 0:
                for instead, part in enumerate((rest / rest.sum()).tolist()):
                    assert not part or instead not in (token, *heads[place]), "a correction is none of the siblings"
                    if part:
                        yield (*before, instead), failed * part, place
            reach *= chances[0]
        if reach > 0:
            yield line, reach, len(line)

    def _try(self, before: Text, guesses: Text) -> Tried:
        if (before, guesses) not in self.tried:
            chances, rest = siblings(self.p[before][None], self.q[before][None], torch.tensor([guesses]))
            self.tried[before, guesses] = chances[0].tolist(), rest[0]
        return self.tried[before, guesses]


def _perms(weights: Sequence[float], taken: Text, most: int) -> Iterator[tuple[Text, float]]:
    """Draws without replacement beside those that are ``taken``, as many as there are up to ``most``."""
    left = {token: weight for token, weight in enumerate(weights) if weight > 0 and token not in taken}
    if not most or not left:
        yield (), 1.0
        return
    total = sum(left.values())
    for token, weight in left.items():
        for rest, share in _perms(weights, (*taken, token), most - 1):
            yield (token, *rest), weight / total * share


COMBS = [(kind, room) for kind in ("dense", "sparse", "same") for room in (1, 2, 4)]


@pytest.mark.parametrize(("kind", "room"), COMBS)
def test_the_law_of_trees_is_exact(kind: str, room: int) -> None:
    """Guards recursive rejection, and what is offered: every line, sibling and verdict; none accepts less than lines."""
    p, q = tables(2, kind, 4)
    outcome = Combs(p, q, 2, room).outcome()
    assert distance(outcome.law, law_of(p, 3, None, {(): 1.0})) < SURE
    line = enumerated("ratio", p, q, 2).accepted
    assert outcome.accepted == pytest.approx(line, abs=SURE) if kind == "same" else outcome.accepted > line + 0.01


def test_siblings_that_are_offered_for_what_they_say_would_break_the_law() -> None:
    """Guards the choice of siblings: to take those alone that are good guesses is biased, and the test above tells."""

    def likely(beside: list[list[Sibling]]) -> list[tuple[float, int, int]]:
        return [(1.0, place, 0) for place, few in enumerate(beside) if few and few[0].token > 1]

    p, q = tables(2, "dense", 4)
    assert distance(Combs(p, q, 2, 4, likely).outcome().law, law_of(p, 3, None, {(): 1.0})) > 0.005


def test_siblings_from_all_of_q_would_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards q without what was rejected, renormalised: the test above tells."""
    turns = itertools.cycle((True, False))  # p, then q
    shared = acceptance._shared
    monkeypatch.setattr(acceptance, "_shared", lambda weights: shared(weights) if next(turns) else weights)
    p, q = tables(2, "dense", 4)
    assert distance(Combs(p, q, 2, 4).outcome().law, law_of(p, 3, None, {(): 1.0})) > 0.005


def test_the_law_behind_siblings_is_exact() -> None:
    """Guards trees of any shape: three children of the text and two of each of these, none twice in a family."""
    p, q = tables(2, "dense", 4)
    law: dict[Text, float] = defaultdict(float)
    for text, share in one_level(p, q, (), 3).items():
        for token, part in (one_level(p, q, text, 2) if share[1] else {}).items():
            law[token] += share[1] * part[0]
        for token, part in enumerate(p[text].tolist()):
            law[*text, token] += (share[0] - share[1]) * part
    assert distance(law, law_of(p, 2, None, {(): 1.0})) < SURE


def one_level(p: Table, q: Table, before: Text, number: int) -> dict[Text, tuple[float, float]]:
    """Texts with one token more behind ``number`` siblings: their probability, and the part of it that was accepted."""
    found: dict[Text, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for guesses, share in _perms(q[before].tolist(), (), number):
        chances, rest = siblings(p[before][None], q[before][None], torch.tensor([guesses]))
        for guess, chance in zip(guesses, chances[0].tolist(), strict=True):
            said = found[*before, guess]
            found[*before, guess] = said[0] + share * chance, said[1] + share * chance
            share *= 1 - chance
        for token, part in enumerate((rest[0] / rest[0].sum()).tolist() if share > 0 else ()):
            said = found[*before, token]
            found[*before, token] = said[0] + share * part, said[1]
    return found


# with the noise that serves them


Next: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def behind(keys: Tensor, tokens: Tensor) -> Tensor:
    """Keys ``[N]`` behind ``tokens``, as `cascade.chain.rounds` has them."""
    return _mix(keys + (tokens + 1) * _signed(GOLDEN))


def ignore(keys: Tensor, tokens: Tensor) -> Tensor:
    return _mix(keys)


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

    def texts(self, name: str, number: int, *, own: int = 1, go_on: Next = behind) -> Tensor:
        """Outputs ``[number, 3]``; ``own`` is 0 if verifiers use their drafters' noise."""
        keys = [torch.tensor([rounds._first(seed, hop) for seed in range(number)]) for hop in (0, own)]
        text = torch.zeros(number, self.size, dtype=torch.long)
        written = torch.zeros(number, dtype=torch.long)
        for begin in range(self.size):
            active = (written == begin).nonzero()[:, 0]
            text[active], grown = self._round(name, begin, text[active], [key[active] for key in keys], go_on)
            written[active] += grown
        return text

    def _round(self, name: str, begin: int, text: Tensor, keys: list[Tensor], go_on: Next) -> tuple[Tensor, Tensor]:
        """One round behind ``begin`` tokens: the texts, and how many tokens each has more."""
        places = (self.vocab_size + 1) ** torch.arange(self.size)
        for place in range(begin):
            keys = [go_on(key, text[:, place]) for key in keys]
        drafter, verifiers, dists = keys[1], [keys[0]], []
        for place in range(begin, self.size - 1):
            dists.append(self.q[((text[:, :place] + 1) * places[:place]).sum(-1)])
            text[:, place] = (dists[-1].log() + keyed_gumbel(drafter, torch.arange(self.vocab_size))).argmax(-1)
            drafter, verifier = go_on(drafter, text[:, place]), go_on(verifiers[-1], text[:, place])
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


class TreeSampler(Sampler):
    """The same with siblings beside each guess."""

    def __init__(self, p: Table, q: Table, most: int = 2) -> None:
        super().__init__(p, q)
        self.most = most

    def _round(self, name: str, begin: int, text: Tensor, keys: list[Tensor], go_on: Next) -> tuple[Tensor, Tensor]:
        ids, places = torch.arange(self.vocab_size), (self.vocab_size + 1) ** torch.arange(self.size)
        for place in range(begin):
            keys = [go_on(key, text[:, place]) for key in keys]
        drafter, verifier = keys[1], keys[0]
        p, q, x, nodes = [], [], [], []  # of the line's places
        for place in range(begin, self.size):
            behind_it = ((text[:, :place] + 1) * places[:place]).sum(-1)
            p.append(self.p[behind_it])
            nodes.append(verifier)
            if place < self.size - 1:
                q.append(self.q[behind_it])
                text[:, place] = (q[-1].log() + keyed_gumbel(drafter, ids)).argmax(-1)
                beside, _ = others(ids.expand_as(q[-1]), q[-1], text[:, place], drafter, self.most)
                x.append(torch.cat([text[:, place, None], beside], 1))
                drafter, verifier = go_on(drafter, text[:, place]), go_on(verifier, text[:, place])
        return self._judge(begin, text.clone(), p, q, x, nodes, go_on)

    def _judge(
        self,
        begin: int,
        text: Tensor,
        p: list[Tensor],
        q: list[Tensor],
        x: list[Tensor],
        nodes: list[Tensor],
        go_on: Next,
    ) -> tuple[Tensor, Tensor]:
        """Places are those of the line, then siblings by the line's places."""
        size, places = len(q), (self.vocab_size + 1) ** torch.arange(self.size)
        ways = [[1 + at, *(size + 1 + self.most * at + rank for rank in range(self.most)), at] for at in range(size)]
        for at, rank in itertools.product(range(size), range(1, 1 + self.most)):
            token, before = x[at][:, rank], text[:, : begin + at]
            p.append(self.p[((torch.cat([before, token[:, None]], 1) + 1) * places[: begin + at + 1]).sum(-1)])
            nodes.append(go_on(nodes[at], token))
        if not size:
            own = (p[0].log() + keyed_gumbel(nodes[0], torch.arange(self.vocab_size))).argmax(-1)[:, None]
            return torch.cat([text[:, :begin], own, text[:, begin + 1 :]], 1), torch.ones(len(text), dtype=torch.long)
        q += [torch.zeros_like(q[0])] * (len(p) - size)
        x += [torch.full_like(x[0], -1)] * (len(p) - size)
        ways += [[place] * (2 + self.most) for place in range(size, len(p))]
        tree = torch.func.vmap(lambda *each: judged_tree(*each[:3], torch.tensor(ways), each[3], size))
        own = tree(*(torch.stack(each, 1) for each in (p, q, x, nodes)))
        at, grown = torch.zeros(len(text), dtype=torch.long), torch.zeros(len(text), dtype=torch.long)
        going = torch.ones(len(text), dtype=torch.bool)
        for place in range(begin, self.size):
            said = own.gather(1, at[:, None])
            text[going, place] = said[going, 0]
            grown += going
            same = torch.stack(x, 1)[torch.arange(len(text)), at] == said
            going = going & same.any(-1)
            at = torch.where(going, torch.tensor(ways)[at, same.long().argmax(-1)], at)
        return text, grown


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


@pytest.fixture(scope="module")
def toy() -> tuple[Sampler, Table]:
    p, q = table(6, 2, 3), table(6, 2, 4)
    return Sampler(p, q), p


@pytest.mark.parametrize("name", RULES)
def test_the_law_of_many_texts(toy: tuple[Sampler, Table], name: str) -> None:
    """Guards noise and keys, over several rounds."""
    sampler, p = toy
    assert surprise(sampler.texts(name, 100_000), p) < UNLIKELY_Z


@pytest.mark.parametrize("name", RULES)
def test_shared_noise_would_break_the_law(toy: tuple[Sampler, Table], name: str) -> None:
    """Guards against a verifier that draws with the noise of its drafter: another engine did, and the test above would tell."""
    sampler, p = toy
    assert surprise(sampler.texts(name, 100_000, own=0), p) > 2 * UNLIKELY_Z


def test_noise_of_positions_alone_would_break_the_law_of_blocks(toy: tuple[Sampler, Table]) -> None:
    """Guards keys against being shorter: a block's verdict depends on guesses that are drawn again behind a correction."""
    sampler, p = toy
    assert surprise(sampler.texts("block", 100_000, go_on=ignore), p) > 1.5 * UNLIKELY_Z


@pytest.fixture(scope="module")
def trees() -> tuple[TreeSampler, Table]:
    p, q = table(6, 2, 3), table(6, 2, 4)
    return TreeSampler(p, q), p


def test_the_law_of_many_trees(trees: tuple[TreeSampler, Table]) -> None:
    """Guards noise and keys of trees, over several rounds."""
    sampler, p = trees
    assert surprise(sampler.texts("ratio", 100_000), p) < UNLIKELY_Z


def test_shared_noise_would_break_the_law_of_trees() -> None:
    """Guards against a verifier that draws with the noise of its drafter: with one sibling each; more leave little to draw."""
    p, q = table(6, 2, 3), table(6, 2, 4)
    assert surprise(TreeSampler(p, q, 1).texts("ratio", 100_000, own=0), p) > 2 * UNLIKELY_Z


def test_one_lot_for_all_siblings_would_break_the_law(
    trees: tuple[TreeSampler, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards lots of siblings against being the same: the test above would tell."""
    monkeypatch.setattr("cascade.engine.drawing.keyed_uniform", lambda keys, number=0: keyed_uniform(keys))
    sampler, p = trees
    assert surprise(sampler.texts("ratio", 100_000), p) > 2 * UNLIKELY_Z


def test_siblings_are_drawn_without_replacement() -> None:
    """Guards what the rule takes them for: none twice, none without a chance, each as likely as what is left of q says."""
    keys = torch.tensor([rounds._first(seed, 1) for seed in range(20_000)])
    probs = torch.tensor([0.5, 0.3, 0.2]).expand(len(keys), -1)
    ids = torch.arange(3).expand_as(probs)
    own = (probs.log() + keyed_gumbel(keys, ids)).argmax(-1)
    tokens, left = others(ids, probs, own, keys, 3)
    assert (tokens[:, -1] == -1).all(), "there are no more than three tokens"
    assert (torch.cat([own[:, None], tokens[:, :2]], 1).sort(-1).values == torch.arange(3)).all(), "none twice"
    assert torch.allclose(left[:, 0], 1 - probs[0][own])
    share = (tokens[own == 0, 0] == 1).float().mean()
    assert float(share) == pytest.approx(0.6, abs=0.02)


def test_a_line_is_judged_as_a_tree(toy: tuple[Sampler, Table]) -> None:
    """Guards the two ways to the same verdict: lines, and trees that have one child each."""
    p, q = (each.float() for each in (torch.rand(4, 6).softmax(-1), torch.rand(3, 6).softmax(-1)))
    x = torch.tensor([2, 0, 5])
    for seed in range(50):
        keys = torch.tensor([rounds._first(seed, place) for place in range(4)])
        line = judged(RULES["ratio"], p, q, x, keys)
        ways = torch.tensor([[1, 0], [2, 1], [3, 2], [3, 3]])
        tree = judged_tree(p, torch.cat([q, q[:1]]), torch.tensor([[2], [0], [5], [-1]]), ways, keys, 3)
        right = int((line[:-1] == x).long().cumprod(0).sum())
        assert line[: right + 1].tolist() == tree[: right + 1].tolist()


def test_keys_are_those_of_sessions() -> None:
    """Guards the tests above: their keys are the served ones."""
    key, token = rounds._first(7, 1), 5
    assert int(behind(torch.tensor([key]), torch.tensor([token]))) == rounds._next(key, token)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_the_law_of_the_embedded_family(name: str) -> None:
    """Guards the rules on distributions of real models, each shaped by the request: medium drafts for full."""
    p, q = embedded(SamplingParams(temperature=1.0, top_k=4, seed=0))
    assert surprise(Sampler(p, q).texts(name, 200_000), p) < UNLIKELY_Z
    if name == "ratio":
        assert surprise(TreeSampler(p, q).texts(name, 200_000), p) < UNLIKELY_Z


def embedded(params: SamplingParams) -> tuple[Table, Table]:
    """What full and medium say behind a prompt, and behind up to two of the tokens that either may say, as small token ids."""
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
    keys = [rounds._first(seed, 0) for seed in range(2)]
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

"""Heads in the pass of a model: what their papers say they guess, whatever happened to the stores before, and no other text."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cascade import SamplingParams
from cascade.draft import NO_DRAFT, Draft
from cascade.drafters import DrafterSpec
from cascade.engine.heads.eagle import Eagle
from cascade.engine.heads.loading import load_head
from cascade.engine.heads.reader import Guesses, Text
from cascade.engine.model import Model
from cascade.engine.network.attention import Span
from cascade.engine.network.contiguous import Contiguous
from cascade.scorer import Row, Scored, gap_byte
from tests.architectures import CONTEXT, SERVED, VOCAB, build
from tests.cases import crossed, rare
from tests.forks import Piece, check_forks, tokens
from tests.heads import Made, Paper, make

GREEDY = SamplingParams(temperature=0.0, seed=0)
WARM = SamplingParams(temperature=0.8, seed=7)
LAYERS = 6
WAYS = ("native", "contiguous")
STYLES = ("eagle", "eagle3", "eagle3-specforge", "eagle3-speculators")
EACH = ("eagle", "eagle3")  # the others keep what one of these does in stores
IN_WAYS = crossed({style: style for style in EACH}, {way: way for way in WAYS})

pytestmark = pytest.mark.usefixtures("one_thread")


def attention(way: str) -> Contiguous | None:
    return Contiguous() if way == "contiguous" else None


@cache
def folder_of(base: Path, style: str) -> tuple[Made, str]:
    made = make(style, base / style)
    return made, made.write()


def head_of(base: Path, style: str, network: PreTrainedModel) -> Eagle:
    return load_head(DrafterSpec("head", folder_of(base, style)[1]), network)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def deep(name: str) -> PreTrainedModel:
    """A model of that architecture with as many layers as heads of different kinds want to read."""
    own = SERVED[name]
    layers = {"n_layer" if "n_embd" in own else "num_hidden_layers": LAYERS}
    kinds = {key: own[key] * (LAYERS // len(own[key])) for key in ("layer_types", "no_rope_layers") if key in own}
    return build(name, **layers, **kinds)


def drafting(base: Path, style: str, way: str = "native", name: str = "llama", cache_tokens: int = 4096) -> Model:
    """A model with a head."""
    network = deep(name)
    head = head_of(base, style, network)
    return Model(network, attention=attention(way), cache_tokens=cache_tokens, num_threads=1, head=head)


@cache
def served(base: Path, style: str, way: str, name: str = "llama") -> tuple[Model, Any]:
    """A model with a head, and what the head's paper says."""
    plain = deep(name)
    plain.set_attn_implementation("eager")
    return drafting(base, style, way, name), Paper(folder_of(base, style)[0], plain)


@dataclass
class Session:
    """A text at a model with a head, driven at random; its guesses are held against those made from nothing."""

    model: Model
    paper: Any  # `Paper`, or what is like it
    params: SamplingParams
    rng: random.Random
    text: list[int]
    held: int = 0  # positions of the text in the store
    store: Any = None
    row: Row | None = None

    def __post_init__(self) -> None:
        self.store = self.model.new_cache()

    def next(self) -> Row:
        """A chunk, or the text's end with a draft that may be a tree, from where the store ends or before."""
        rng = self.rng
        if rng.random() < 0.2 and len(self.text) > 4:  # another text from somewhere on
            cut = rng.randint(2, len(self.text) - 1)
            self.text[cut:] = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
            self.held = min(self.held, cut)
        if rng.random() < 0.2 and self.held > 1:  # on in another store, which takes over a prefix
            source, self.store, self.held = self.store, self.model.new_cache(), rng.randint(1, self.held)
            self.store.reserve(self.held)
            self.store.reuse(source, self.held)
            source.free()
        start = self.held if rng.random() < 0.7 else rng.randint(0, self.held)
        unread = self.text[start:]
        if len(unread) > 1 and rng.random() < 0.4:
            self.row = Row(self.store, start, unread[: rng.randint(1, len(unread) - 1)], 0, self.params, guesses=2)
        else:
            self.row = Row(self.store, start, unread, 1, self.params, draft=self._draft(), guesses=rng.randint(0, 5))
        return self.row

    def _draft(self) -> Draft:
        """Right as far as some length, as a line or with branches."""
        rng, right = self.rng, []
        for _ in range(rng.randint(0, 3)):
            [scored] = self.model.run([Row(store := self.model.new_cache(), 0, [*self.text, *right], 1, self.params)])
            right.append(scored.own[0])
            store.free()
        said = [*right, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 2)))]
        if not said or rng.random() < 0.5 or len(self.text) > 60:
            return Draft(tuple(said), bytes(len(said)))
        wrong = (said[0] + 1) % VOCAB  # a tree whose trunk is wrong
        return Draft((wrong, *said), bytes(1 + len(said)), b"", (-1, -1, *range(1, len(said))))

    def check(self, scored: Scored) -> None:
        row = self.row
        assert row is not None
        if not row.num_own:
            assert scored.draft == NO_DRAFT
            self.held = row.start + len(row.tokens)
            return
        self.text += row.draft.walk(scored.own)[0]
        self.held = len(self.text) - 1
        assert len(scored.draft.trunk) == row.guesses
        if row.guesses:
            assert list(scored.draft.trunk.tokens) == self.paper.guesses(self.text, row.guesses, self.params)


CASES = [*((style, "native") for style in EACH), ("eagle3", "contiguous")]  # formulas of the others are held below
CASES += [rare(style, way) for style in STYLES for way in WAYS if (style, way) not in CASES]


@pytest.mark.parametrize(("style", "way"), CASES)
def test_guesses_are_those_of_the_paper_under_any_schedule(base: Path, style: str, way: str) -> None:
    """Guards what heads keep of a text: chunks, wrong drafts, trees, rollbacks, prefixes of others and companions change no
    guess."""
    model, paper = served(base, style, way)
    rng = random.Random(0)
    texts = [(GREEDY, 2), (WARM, 9), (GREEDY, 20)]
    sessions = [Session(model, paper, params, rng, [rng.randrange(VOCAB) for _ in range(size)]) for params, size in texts]
    for _ in range(12):
        chosen = rng.sample(sessions, rng.randint(1, 3))
        for session, scored in zip(chosen, model.run([session.next() for session in chosen]), strict=True):
            session.check(scored)
    for session in sessions:
        session.store.free()


FORMULAS = [*((style, "llama") for style in STYLES), ("eagle3", "qwen3")]
FORMULAS += [rare("eagle3", name) for name in ("gemma2", "gpt2", "mixtral", "opt", "phi3")]


@pytest.mark.parametrize(("style", "name"), FORMULAS)
def test_logits_are_those_of_the_paper(base: Path, style: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the formulas: a norm left out or another hidden state would show in few guesses of a tiny model only."""
    model, paper = served(base, style, "native", name)
    assert model.reader is not None
    seen: list[Tensor] = []
    all_logits = model.reader.head.all_logits

    def noted(out: Tensor) -> Tensor:
        logits = all_logits(out)
        seen.extend(logits)
        return logits

    monkeypatch.setattr(model.reader.head, "all_logits", noted)
    text, store = [(37 * place + 11) % VOCAB for place in range(30)], model.new_cache()
    model.run([Row(store, 0, text[:13], 0, GREEDY)])
    [scored] = model.run([Row(store, 13, text[13:], 1, GREEDY, guesses=3)])
    assert list(scored.draft.trunk.tokens) == paper.guesses([*text, *scored.own], 3, GREEDY)
    torch.testing.assert_close(torch.stack(seen), torch.stack(paper.logits), rtol=1e-3, atol=1e-3)
    store.free()


@pytest.mark.parametrize(("style", "way"), IN_WAYS)
def test_joined_branches_are_guessed_behind(base: Path, style: str, way: str) -> None:
    """Guards branches that were written for a while: all that a head keeps of them comes along, but for the one entry before
    the fork, which is another text's where that went on otherwise."""
    model, paper = served(base, style, way)
    text, branch = [(29 * place + 3) % VOCAB for place in range(21)], [50, 4]
    for same in (True, False):
        store = model.new_cache()
        model.run([Row(store, 0, [*text, branch[0] if same else 8, 30], 1, GREEDY)])
        fork = store.fork(len(text))
        written = list(branch)
        model.run([Row(fork, len(text), written[:1], 0, GREEDY)])  # a chunk
        [scored] = model.run([Row(fork, len(text), written, 1, GREEDY, guesses=4)])
        assert scored.draft == NO_DRAFT
        written += scored.own
        [scored] = model.run([Row(fork, len(text) + 2, written[2:], 1, GREEDY)])
        store.join(fork)
        written += scored.own
        [scored] = model.run([Row(store, len(text) + 3, written[3:], 1, GREEDY, guesses=4)])
        guesses = list(scored.draft.trunk.tokens)
        expected = paper.guesses([*text, *written, *scored.own], 4, GREEDY)
        assert len(guesses) == len(expected)
        assert guesses == expected or not same
        store.free()


def test_what_is_kept_follows_forks(base: Path) -> None:
    """Guards states in stores under any schedule of forks and joins, as keys and values are guarded."""
    sizes = {"head_dim": 32, "intermediate_size": 64}  # of which PyTorch's functions leave no rests, which they round otherwise
    network = build("llama", num_hidden_layers=LAYERS, **sizes)
    head = head_of(base, "eagle3", network)
    model = Model(network, cache_tokens=4096, num_threads=1, head=head)

    def score(pieces: Sequence[Piece]) -> list[Tensor]:
        assert model.reader is not None
        model.logits([Row(piece.store, piece.start, tokens(piece, VOCAB), 0, GREEDY) for piece in pieces])
        ends = [piece.start + len(piece.picks) for piece in pieces]
        states = [model.reader.states([Span(piece.store, 0, end, 0)]) for piece, end in zip(pieces, ends, strict=True)]
        return [state[piece.start :].clone() for state, piece in zip(states, pieces, strict=True)]

    for seed in range(4):
        check_forks(random.Random(seed), model.new_cache, score, 90)


def test_full_stores_are_not_written_behind(base: Path) -> None:
    """Guards memory: guesses at the end of a store take a fork for a moment."""
    model = drafting(base, "eagle3", cache_tokens=CONTEXT)
    store = model.new_cache()
    text = [(31 * place + 2) % VOCAB for place in range(CONTEXT - 1)]
    store.reserve(len(text))
    before = store.capacity
    [scored] = model.run([Row(store, 0, text, 1, GREEDY, guesses=6)])
    assert store.capacity == before
    assert list(scored.draft.trunk.tokens) == served(base, "eagle3", "native")[1].guesses([*text, *scored.own], 6, GREEDY)
    store.free()


def test_own_tokens_are_those_without_a_head(base: Path) -> None:
    """Guards the text: the bits of logits, in chunks and after drafts, do not know of a head, nor of guesses after the text."""
    model, alone = served(base, "eagle3", "native")[0], Model(deep("llama"), num_threads=1)
    stores = model.new_cache(), alone.new_cache()
    for start, text, own in ((0, range(3, 40), 1), (37, range(5, 12), 4), (20, range(9, 13), 2)):
        rows = [Row(store, start, list(text), own, WARM, guesses=3, runner_ups=1) for store in stores]
        assert torch.equal(model.logits(rows[:1]), alone.logits(rows[1:]))
        [found], [expected] = model.run(rows[:1]), alone.run(rows[1:])
        assert (found.own, found.runner_ups) == (expected.own, expected.runner_ups)


@pytest.mark.parametrize(("style", "name"), [("eagle3", "gemma2"), rare("eagle", "llama")])
def test_sixteen_bits(base: Path, style: str, name: str) -> None:
    """Guards other dtypes: a head is as wide as its model, whatever stores hold."""
    network = deep(name).to(torch.bfloat16)
    model = Model(network, num_threads=1, head=head_of(base, style, network))
    store = model.new_cache()
    [scored] = model.run([Row(store, 0, [4, 5, 6], 1, WARM, guesses=3)])
    assert len(scored.draft.trunk) == 3


def test_runner_ups_of_first_guesses_are_offered() -> None:
    """Guards confidences and the second branch: bytes of gaps, as the tiers below send them; impossible tokens are no guess."""
    logits = torch.tensor([[0.0, 3.0, 2.5, -torch.inf], [5.0, 0.0, 0.0, 0.0]])
    guesses = Guesses([Text(None, 2, [1, 2], 2, GREEDY), Text(None, 0, [3], 1, GREEDY), Text(None, 0, [4], 0, GREEDY)])
    assert guesses.choose([0, 1], logits).tolist() == [1, 0]
    guesses.choose([0], logits[1:])
    line = Draft((1, 0, 2), bytes(3), bytes([gap_byte(0.5), gap_byte(5.0), gap_byte(0.5)]), (-1, 0, -1))
    assert guesses.drafts() == [line, Draft((0,), bytes(1), bytes([gap_byte(5.0)])), NO_DRAFT]
    alone = Guesses([Text(None, 0, [3], 1, GREEDY)])
    alone.choose([0], torch.tensor([[-torch.inf, 0.0]]))
    assert alone.drafts()[0].confidences == bytes([255])

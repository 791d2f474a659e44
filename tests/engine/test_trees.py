"""Passes that score trees: each node as if its path were the text, and a store that goes on with the path that was right."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cascade import SamplingParams, Structured
from cascade.draft import Draft
from cascade.engine.grammar import Grammars
from cascade.engine.model import Model
from cascade.engine.network.attention import Contiguous
from cascade.engine.network.published import Published
from cascade.engine.sampling.state import SequenceState
from cascade.engine.tokenizer import Tokenizer
from cascade.engine.trees import MAX_READ_AGAIN, Tree, run_trees
from cascade.engine.vllm.blocks import RESERVED, Blocks, PagedCache
from cascade.messages import Logprobs, SessionSpec
from cascade.scorer import BLOCK, MAX_FORKED, Row, Scored
from tests import small
from tests.architectures import VOCAB, build
from tests.cases import examples, rare
from tests.test_draft import path_of

GREEDY = SamplingParams(temperature=0.0, seed=0)
ENDS = frozenset({3, 11})


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def model_of(name: str, attention: str, seed: int = 0) -> Model:
    """A small model: "native", which is chosen on a CPU, or "contiguous"."""
    # sizes of which PyTorch's functions leave no rests, which they round otherwise
    sizes = {"head_dim": 32, "intermediate_size": 64} if name == "llama" else {}
    network = build(name, seed, **sizes)
    return Model(network if attention == "native" else Published(network, attention=Contiguous), cache_tokens=4096)


@dataclass
class Session:
    """A text at one model that is written by passes over trees, and what passes over its paths alone say."""

    model: Model
    params: SamplingParams
    text: list[int]
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    constraint: Callable[[], Any] = lambda: None
    exact: bool = False  # to the bit
    alone: dict[tuple[int, ...], tuple[Scored, tuple[Logprobs, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store, self.held, self.prompt_len = self.model.new_cache(), 0, len(self.text)
        self.state = self.new_state(self.text)

    def new_state(self, text: Sequence[int]) -> SequenceState | None:
        spec = SessionSpec(tuple(text), self.prompt_len, self.params, ENDS)
        return SequenceState(spec, text, self.constraint()) if self.params.shaped else None

    def expected(self, path: Sequence[int]) -> tuple[Scored, tuple[Logprobs, ...]]:
        """What a pass over the text with a path says, with a store and a history of its own."""
        text = (*self.text, *path)
        if text not in self.alone:
            state, store = self.new_state(text), self.model.new_cache()
            [scored] = self.model.run([Row(store, 0, text, 1, self.params, state, runner_ups=2)])
            store.free()
            self.alone[text] = scored, state.logprobs(len(text), 1) if state is not None else ()
        return self.alone[text]

    def guess(self, parents: Sequence[int]) -> Draft:
        """A tree of this shape, often right."""
        draft = Draft((), b"", b"", ())
        for parent in parents:
            taken = {draft.tokens[child] for child in draft.children(parent)}
            right = self.expected(path_of(draft, parent))[0].own[0]
            wrong = self.rng.choice([token for token in range(5, 60) if token not in taken])
            token = right if right not in taken and self.rng.random() < 0.7 else wrong
            draft = tree((*draft.tokens, token), parents[: len(draft) + 1])
        return draft

    def row(self, draft: Draft, runner_ups: int = 0) -> Row:
        tokens = self.text[self.held :]
        return Row(self.store, self.held, tokens, 1, self.params, self.state, draft=draft, runner_ups=runner_ups)

    def check(self, draft: Draft, scored: Scored, most: int | None = None) -> None:
        """Hold a pass against those of its paths, of which the first ``most`` are known, and go on with the text."""
        assert len(scored.own) == 1 + (len(draft) if most is None else most)
        for node, own in enumerate(scored.own, -1):
            alone, _ = self.expected(path_of(draft, node))
            assert own == alone.own[0]
            if scored.runner_ups:  # mixtures keep their bits only nearly
                ups, expected = scored.runner_ups[node + 1], alone.runner_ups[0]
                assert [up.token for up in ups] == [up.token for up in expected]
                assert [up.gap for up in ups] == pytest.approx([up.gap for up in expected], abs=1e-3)
        new, _ = draft.walk(scored.own)
        if self.state is not None and self.params.logprobs is not None:
            wanted = [self.expected(new[:i])[1][0] for i in range(len(new))]
            for mine, theirs in zip(self.state.logprobs(len(self.text), len(new)), wanted, strict=True):
                assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
                values, others = ([each.logprob, *(value for _, value in each.top)] for each in (mine, theirs))
                assert values == pytest.approx(others, abs=1e-4)
        self.text += new
        self.held = len(self.text) - 1
        fresh = self.model.new_cache()
        rows = [Row(self.store, self.held, self.text[self.held :], 1, GREEDY), Row(fresh, 0, self.text, 1, GREEDY)]
        kept, recomputed = (self.model.logits([row]) for row in rows)  # own tokens of such small models hardly look back
        tolerance = 0.0 if self.exact else 1e-5
        torch.testing.assert_close(kept, recomputed, rtol=tolerance, atol=tolerance)
        fresh.free()

    def play(self, draft: Draft, most: int | None = None) -> Scored:
        [scored] = self.model.run([self.row(draft)])
        self.check(draft, scored, most)
        return scored


def tree(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    return Draft(tuple(tokens), bytes(len(tokens)), b"", tuple(parents))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Parents of up to 12 nodes: any tree, and often one whose nodes stand after the last."""
    parents: list[int] = []
    for node in range(draw(st.integers(0, 12))):
        parents.append(node - 1 if draw(st.booleans()) else draw(st.integers(-1, node - 1)))
    return tuple(parents)


NAMES = [
    ("llama", "native"),
    ("gemma2", "contiguous"),
    ("deepseek_v3", "native"),
    rare("llama", "contiguous"),
    rare("gemma2", "native"),
    rare("gpt_oss", "contiguous"),
    rare("mixtral", "native"),
]


PLAIN = [GREEDY, SamplingParams(temperature=0.8, seed=4), SamplingParams(temperature=0.8, seed=5, top_p=0.8, top_k=9)]
SHAPED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 99),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 7: 2.0}]),
    min_tokens=st.sampled_from([0, 5]),
    logprobs=st.sampled_from([None, 2]),
)


@pytest.mark.parametrize(("name", "attention"), NAMES)
@settings(max_examples=examples(0.2))
@given(
    trees=st.lists(st.tuples(shapes(), shapes(), shapes()), min_size=2, max_size=2),
    params=st.tuples(*[st.sampled_from(PLAIN) | SHAPED] * 3),
    seed=st.integers(0, 999),
)
def test_nodes_say_what_their_paths_say(name: str, attention: str, trees: Any, params: Any, seed: int) -> None:
    """Guards branches that see each other, the trunk or companions, penalties that count beside a path, and stale stores."""
    model = model_of(name, attention)
    texts = [[(7 * seed + 5 * place + number) % VOCAB for place in range(size)] for number, size in enumerate((3, 8, 5))]
    exact = (name, attention) == ("llama", "native")  # PyTorch's attention rounds by the number of rows
    sessions = [Session(model, own, text, random.Random(seed), exact=exact) for own, text in zip(params, texts, strict=True)]
    for shape in trees:
        drafts = [session.guess(parents) for session, parents in zip(sessions, shape, strict=True)]
        rows = [session.row(draft, 2) for session, draft in zip(sessions, drafts, strict=True)]
        for session, draft, scored in zip(sessions, drafts, model.run(rows), strict=True):
            session.check(draft, scored)
    for session in sessions:
        session.store.free()


@dataclass
class Short:
    """A grammar of even tokens, which cannot tell what comes after the guess 9."""

    def rewind(self, num_tokens: int) -> None: ...

    def allowed(self, output: Sequence[int], guesses: Sequence[int], vocab_size: int) -> Any:
        rows = list(guesses).index(9) + 1 if 9 in guesses else 1 + len(guesses)
        return (torch.arange(vocab_size) % 2 == 0).expand(rows, -1).clone().numpy()


def test_a_grammar_that_cannot_follow_a_branch_cuts_there() -> None:
    """Guards how much is known: of each line by itself, and of the tree up to its first node that is not."""
    params = SamplingParams(temperature=0.0, seed=1, structured=Structured(regex="a"))
    session = Session(model_of("llama", "native"), params, [4, 6, 2], constraint=Short)
    for stops, num_known in ((2, 2), (0, 0), (1, 1), (None, 4)):
        right = session.expected(())[0].own[0]
        tokens = [10 if right != 10 else 12, 6, right, 6]
        if stops is not None:
            tokens[stops] = 9
        assert all(token % 2 == 0 for token in session.play(tree(tokens, (-1, 0, -1, 2)), num_known).own)


def test_grammars_follow_branches() -> None:
    """Guards a grammar that is led along one branch and then asked about another: every node has its own mask."""
    tokenizer = Tokenizer.from_pretrained(small.paths()[-1])
    grammars, structured = Grammars(tokenizer), Structured(regex="[a-z0-9]{4,9}")
    model = Model(build("llama", vocab_size=small.VOCAB))
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=3, structured=structured, logprobs=1)
        session = Session(model, params, tokenizer.encode("x = "), constraint=lambda: grammars.matcher(structured))
        for parents in ((-1, 0, -1, 2, 0), (-1, -1, -1, 2), (-1, 0, 1, 0, 3)):
            session.play(session.guess(parents))


STAR = tree((5, 6, 7, 8, 9), (-1, 0, -1, 2, 0))


@pytest.mark.parametrize("attention", ["native", "contiguous"])
def test_forks_are_gone_however_a_pass_ends(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: branches that nobody follows, and those of passes that fail; the row may be scored again."""
    model = model_of("llama", attention)
    session, forks, logits = Session(model, GREEDY, [1, 2, 3]), list[Any](), model.logits
    fork = type(session.store).fork
    monkeypatch.setattr(type(session.store), "fork", lambda store, place: forks.append(fork(store, place)) or forks[-1])

    def fails(rows: Sequence[Row]) -> Tensor:
        logits(rows)
        raise RuntimeError("no more")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(model, "logits", fails)
            with pytest.raises(RuntimeError, match="no more"):
                session.play(STAR)
        session.play(session.guess([STAR.parent(node) for node in range(len(STAR))]))
    assert len(forks) == 8
    assert not any(fork.nbytes for fork in forks)
    session.store.free()


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0, seed=0, presence_penalty=1.0)], ids=["plain", "shaped"]
)
def test_long_texts_are_not_read_again(params: SamplingParams) -> None:
    """Guards prompts with a tree after them: branches share what was read, or are left out where they would read it again."""
    for size in (MAX_READ_AGAIN, MAX_READ_AGAIN + 1, 3 * BLOCK):
        session = Session(model_of("llama", "native"), params, list(range(20, 20 + size)))
        grown = Tree(session.row(STAR), shares_pass=True)
        lines = grown.grow()
        grown.free()
        num_again = sum(len(line.row.input_ids) for line in lines) - size - len(STAR)
        assert num_again <= (len(lines) - 1) * MAX_READ_AGAIN + 2
        assert num_again == 0 or params.shaped
        session.play(session.guess([STAR.parent(node) for node in range(len(STAR))]))


def test_no_branch_is_longer_than_a_fork() -> None:
    """Guards what forks promise: a node further away is not known, nor what stands after it in the order of nodes."""
    size = MAX_FORKED + 5
    session = Session(model_of("llama", "native"), GREEDY, [1, 2])
    session.play(tree(range(10, 11 + size), (-1, -1, *range(1, size))), 1 + MAX_FORKED)


def test_of_a_tree_with_other_own_tokens_the_trunk_is_scored() -> None:
    """Guards rows that want several own tokens, or none, before their draft: a branch has no place for those."""
    model = model_of("llama", "native")
    for num_own in (0, 2):
        rows = [Row(model.new_cache(), 0, [1, 2, 3], num_own, GREEDY, draft=draft) for draft in (STAR, STAR.first(2))]
        whole, trunk = model.run([rows[0]]), model.run([rows[1]])
        assert whole == trunk
        assert len(whole[0].own) == num_own + 2


@pytest.mark.parametrize("spare", [0, 1, 20])
def test_a_tree_takes_no_more_memory_than_its_depth(spare: int) -> None:
    """Guards passes where kept prefixes fill the memory: a store reserved a position for each node of a tree."""
    blocks = Blocks(RESERVED - 1 + 1 + spare, BLOCK)
    store = PagedCache(blocks)
    store.reserve(BLOCK)
    draft = tree(range(20, 29), (-1, 0, 1, -1, -1, -1, 0, 0, 0))
    row = Row(store, BLOCK - 4, [7], 1, GREEDY, draft=draft)
    [scored] = run_trees([row], lambda rows, _: [Scored([5] * line.num_scored) for line in rows], shares_pass=False)
    assert len(scored.own) == {0: 4, 1: 5, 20: 10}[spare]
    assert blocks.num_free == spare

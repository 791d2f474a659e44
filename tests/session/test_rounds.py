"""Rules that keep the law of a text: sampled through real sessions, passes and messages, against the full model's own law."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks.toy import ToyModel
from cascade.draft import Dist, Draft
from cascade.messages import COUPLED, Close, Commit, Edge, Failed, Message, Open, Proposal, Rules
from cascade.params import Rule, SamplingParams
from cascade.planner.acceptance import Calibration
from cascade.planner.choice import Policy
from cascade.planner.cost import Profile
from cascade.scorer import Scored
from cascade.session.guesses import Hint
from cascade.session.session import Session
from cascade.tier.kv_admission import KVAdmission
from cascade.tier.loop import Limits, Loop
from cascade.tier.runner import Runner
from cascade.tier.scheduler import LOCKSTEP_PATIENCE_S
from tests.cases import rare

VOCAB = 6
END = 5
TEMPERATURE = 4.0
LENGTH = 3  # tokens of a text
WINDOW = 2
PROMPT = (1,)
UNLIKELY_Z = 3.72  # beyond which one case in ten thousand of a normal law is
FEW, MANY = 300, 4_000  # texts
MANY_TEXTS = (pytest.mark.slow, pytest.mark.timeout(3600))

RATIO, BLOCK = Rules("ratio"), Rules("block")
SETUPS = {  # tiers, and rules at the full one
    "ratio": (2, RATIO),
    "block": (2, BLOCK),
    "block over coupled": (3, BLOCK),
    "two likeliest": (2, Rules("block", draft_top_k=2)),
}


def models(num_tiers: int) -> list[ToyModel]:
    """Bottom to top. They differ in every context."""
    return [ToyModel(VOCAB, 2, seed) for seed in (5, 3, 1)[3 - num_tiers :]]


def params(seed: int, max_tokens: int = LENGTH) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, seed=seed)


def opening(seed: int, rules: Rules, num_tiers: int, **changes: object) -> Open:
    chain = tuple(str(level) for level in reversed(range(num_tiers - 1)))
    ends, name = frozenset([END]), str(num_tiers - 1)
    first = Open("s", PROMPT, len(PROMPT), params(seed), ends, name, chain, 64, WINDOW, lockstep=True, rules=rules)
    return replace(first, **changes)  # type: ignore[arg-type]


class Stack:
    """Tiers whose messages arrive at once and whose passes take no time."""

    def __init__(self, models: Sequence[ToyModel]) -> None:
        self.now = 0.0
        self.text: list[int] = []
        self.edges: tuple[Edge, ...] = ()
        self.deaf = False  # nothing that the tiers below say arrives
        self.top = len(models) - 1
        self.loops = [self._loop(level, model) for level, model in enumerate(models)]
        self.runners = [Runner(str(level), model, 512, Profile()) for level, model in enumerate(models)]
        self._names = itertools.count()
        self._post: deque[tuple[int, int, Message]] = deque()  # whom for, from whom

    def _loop(self, level: int, model: ToyModel) -> Loop[int]:
        return Loop(
            str(level),
            level,
            Limits(model.vocab_size, model.context_len, Policy()),
            KVAdmission(model.new_cache, 1 << 20),
            Profile(),
            send_up=lambda up, message: self._up(up, level, message),
            send_down=lambda tier, message: self._post.append((int(tier), level, message)),
            mint=lambda: f"{level}-{next(self._names)}",
        )

    def _up(self, up: int, level: int, message: Message) -> None:
        if up <= self.top:
            if not self.deaf:
                self._post.append((up, level, message))
            return
        assert isinstance(message, Proposal), message
        self.edges = message.edges
        if new := message.draft.tokens[len(self.text) - message.start :]:
            self._post.append((level, up, Commit(message.session, len(self.text), new)))
            self.text += new

    def _deliver(self) -> None:
        while self._post:
            level, sender, message = self._post.popleft()
            self.loops[level].receive(message, sender, self.now)

    def turn(self, level: int) -> None:
        """A pass of a tier, if it has work."""
        self._deliver()
        batch, _ = self.loops[level].schedule(512, self.now)
        if batch:
            self.loops[level].advance(batch, self.runners[level].run(batch), self.now)
        self._deliver()

    def open(self, first: Open) -> None:
        self.text = list(first.tokens)
        self._post.append((self.top, self.top + 1, first))
        self._deliver()

    def write(self, first: Open) -> list[int]:
        """The output."""
        self.open(first)
        while not self.over(first):
            for level in range(len(self.loops)):
                self.turn(level)
        return self.close(first)

    def close(self, first: Open) -> list[int]:
        self._post.append((self.top, self.top + 1, Close(first.session)))
        self._deliver()
        assert not any(loop.slots for loop in self.loops)
        return self.text[first.prompt_len :]

    def over(self, first: Open) -> bool:
        output = self.text[first.prompt_len :]
        return len(output) >= first.params.max_tokens or any(token in first.ends for token in output)

    def lose(self, first: Open) -> None:
        """The tier below the full one dies."""
        session = self.loops[-1].slots[first.session].session
        if session.drafter:
            self._post.append((self.top, self.top - 1, Failed(session.drafter_session, "it is gone")))


def law(model: ToyModel) -> dict[tuple[int, ...], float]:
    """Probability of each output."""
    found: dict[tuple[int, ...], float] = {}
    growing = {(): 1.0}
    while growing:
        text, share = growing.popitem()
        if len(text) == LENGTH or END in text:
            found[text] = share
            continue
        logits = torch.tensor(model.logits((*PROMPT, *text)[-model.order :]), dtype=torch.float64)
        growing |= {(*text, token): share * p for token, p in enumerate((logits / TEMPERATURE).softmax(-1).tolist())}
    return found


def surprise(outputs: Sequence[Sequence[int]], expected: dict[tuple[int, ...], float]) -> float:
    """How unlikely counts are under a law: chi-square's statistic as one of a normal law (Wilson and Hilferty 1931)."""
    counts, total = Counter(map(tuple, outputs)), len(outputs)
    assert set(counts) <= set(expected)
    cells = [(counts[text], share * total) for text, share in expected.items() if share * total >= 5]
    rest = total - sum(mean for _, mean in cells), total - sum(count for count, _ in cells)
    cells += [(rest[1], rest[0])] if rest[0] >= 1 else []
    df = len(cells) - 1
    chi = sum((count - mean) ** 2 / mean for count, mean in cells)
    return ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@pytest.mark.parametrize(
    ("setup", "number"),
    [("ratio", FEW), ("block over coupled", FEW), *(pytest.param(setup, MANY, marks=MANY_TEXTS) for setup in SETUPS)],
)
def test_the_law_is_the_full_models(setup: str, number: int) -> None:
    """Guards the promise of these rules through everything that carries them: joint law of all tokens, ends among them."""
    num_tiers, rules = SETUPS[setup]
    stack = Stack(models(num_tiers))
    outputs = [stack.write(opening(seed, rules, num_tiers)) for seed in range(number)]
    assert surprise(outputs, law(models(num_tiers)[-1])) < UNLIKELY_Z


# what else may happen


@pytest.mark.parametrize("setup", SETUPS)
def test_the_same_seed_gives_the_same_text(setup: str) -> None:
    """Guards reproducibility: nothing but the seed and the drafts decides, however often a session was opened."""
    num_tiers, rules = SETUPS[setup]
    stack = Stack(models(num_tiers))
    for seed in range(3):
        first = opening(seed, rules, num_tiers, params=params(seed, 12), ends=frozenset())
        assert stack.write(first) == stack.write(first) == Stack(models(num_tiers)).write(first)


@pytest.mark.parametrize(("name", "rules"), [("deaf", BLOCK), ("lost", RATIO), rare("lost", BLOCK)])
def test_rounds_without_guesses_are_gone_alone(name: str, rules: Rules) -> None:
    """Guards the law, and progress, where guesses come too late or the tier below dies in mid-answer, whatever it has drawn."""
    outputs = []
    for seed in range(FEW):
        stack, first = Stack(models(2)), opening(seed, rules, 2)
        stack.open(first)
        for turn in itertools.count():
            if stack.over(first):
                break
            if name == "lost" and turn == 1:
                stack.lose(first)
            stack.deaf = name == "deaf" and turn in (1, 2)
            stack.now += LOCKSTEP_PATIENCE_S / 4
            for level in range(2):
                stack.turn(level)
        outputs.append(stack.close(first))
    assert surprise(outputs, law(models(2)[-1])) < UNLIKELY_Z


def test_rounds_are_whole_or_nothing() -> None:
    """Guards guesses that happen to be there: whether they are may depend on what they say."""
    first = opening(1, RATIO, 2, params=params(1, 12), draft_window=3)
    session = Session(first, "1", 1, VOCAB)
    below = session.attach("0", "below", ())
    assert (below.rules, below.rules.wants_q, below.lockstep, below.in_rounds) == (RATIO.below(), True, False, True)
    assert not below.ends
    guess = Draft((0, 1, 0, 1), bytes(4), dists=(Dist((0, 1), (0.5, 0.5)),) * 4)
    ended = Draft((0, END), bytes(2), dists=guess.dists[:2])
    session.propose(Proposal("below", 1, ended))
    assert (session.window_full, session.candidates()) == (False, []), "who drafts does not stop at an end"
    session.propose(Proposal("below", 1, guess.first(2)))
    assert (session.window_full, session.candidates()) == (False, [])
    session.propose(Proposal("below", 1, guess.first(3)))
    assert [node for _, node in session.candidates()] == [0, 1, 2]
    assert len(session.work(100).draft.dists) == 3
    session.propose(Proposal("below", 1, guess.first(1)))  # late
    assert len(session.guesses.draft.dists) == len(session.guesses.draft) == 3
    session.detach()
    assert not session.candidates(), "nobody waits for them"
    again = replace(first, tokens=(1,) * 9, prompt_len=9)
    reading = Session(again, "1", 1, VOCAB)
    reading.attach("0", "below", ())
    reading.propose(Proposal("below", 9, guess.first(3)))
    assert not reading.candidates(), "the first pass waits for nobody"


def test_a_window_longer_than_any_draft_is_full() -> None:
    """Guards lockstep with windows beyond what a session holds: each round would wait until its patience is at an end."""
    first = opening(1, COUPLED, 2, params=params(1, 300), ends=frozenset(), draft_window=100)
    session = Session(first, "1", 1, VOCAB)
    session.attach("0", "below", ())
    session.propose(Proposal("below", 1, Draft((0,) * 100, bytes(100))))
    assert session.window_full


def test_a_drafter_proposes_whole_rounds() -> None:
    """Guards the wire: parts of a round are of no use to the tier above, and each token costs its distribution."""
    rules = RATIO.below()
    session = Session(opening(1, rules, 1, params=params(1, 12), window=3), "0", 0, VOCAB)
    dist = Dist((0,), (1.0,))
    for size in range(3):
        assert session.proposal() is None
        session.advance(session.work(100), Scored([size % 2], dists=(dist,)))
    proposal = session.proposal()
    assert proposal is not None
    assert proposal.draft.dists == (dist,) * 3
    assert session.stalled
    session.commit(1, (0, 0))
    assert session.text == [*PROMPT, 0, 0]
    for _ in range(3):  # by a model that says nothing
        session.advance(session.work(100), Scored([0]))
    proposal = session.proposal()
    assert proposal is not None
    assert (proposal.draft.tokens, proposal.draft.dists) == ((0, 0, 0), ())


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_guesses_that_nobody_drew_are_compared(rule: Rule) -> None:
    """Guards drafters without distributions, for whose guesses nobody waits: own tokens are samples."""
    first = opening(1, Rules(rule), 1, params=params(1, 12), draft_window=8)
    session = Session(first, "0", 0, VOCAB)
    session.hint([Hint("lookup", Calibration(), Draft((0, 1, END, 1), bytes(4)))])
    assert [node for _, node in session.candidates()] == [0, 1, 2]
    work = session.work(100)
    draw = session.rounds.draw(work) if session.rounds is not None else None
    assert draw is not None
    assert (len({*draw.keys}), draw.rule, draw.draft_top_k) == (4, rule, None)
    session.advance(work, Scored([0, 1, END, 0]))
    assert session.text == [*PROMPT, 0, 1, END]
    assert session.done

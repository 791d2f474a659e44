"""Rules that keep the law of a text: sampled through real sessions, passes and messages, against the full model's own law."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks.toy import ToyModel
from cascade.draft import Dist, Draft
from cascade.messages import COUPLED, Open, Proposal, Rules
from cascade.params import Rule, SamplingParams
from cascade.planner.acceptance import Calibration
from cascade.planner.cost import PassCost
from cascade.scorer import Scored
from cascade.session.guesses import Hint
from cascade.session.session import Session
from cascade.simulation.scenario import NO_FAULTS, Death, Faults, Outcome, Request, Scenario, SimTier
from cascade.simulation.simulate import simulate

VOCAB = 6
END = 5
TEMPERATURE = 4.0
LENGTH = 3  # tokens of a text
WINDOW = 2
PROMPT = (1,)
UNLIKELY_Z = 3.72  # beyond which one case in ten thousand of a normal law is
FEW, MANY = 300, 4_000  # texts
APART_S = 20.0  # from text to text: more than any tier that has died is left out
LATE = Faults(loss=0.4)
DEATHS = Faults(deaths=tuple(Death("0", number * APART_S + 0.0035, number * APART_S + 0.004) for number in range(FEW)))
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


def simulated(setup: str, number: int, faults: Faults = NO_FAULTS, max_tokens: int = LENGTH) -> Outcome:
    """So many texts, one after another; a pass of any tier takes a millisecond."""
    num_tiers, rules = SETUPS[setup]
    tiers = tuple(SimTier(str(level), model, PassCost(0.001)) for level, model in enumerate(models(num_tiers)))
    ends = frozenset([END]) if max_tokens == LENGTH else frozenset[int]()
    asked = tuple(Request(PROMPT, params(seed, max_tokens), ends, seed * APART_S) for seed in range(number))
    return simulate(Scenario(tiers, asked, WINDOW, lockstep=True, faults=faults, rules=rules))


@pytest.mark.parametrize(
    ("setup", "number", "faults"),
    [
        ("ratio", FEW, NO_FAULTS),
        ("block over coupled", FEW, NO_FAULTS),
        ("block", FEW, LATE),
        ("ratio", FEW, DEATHS),
        *(pytest.param(setup, MANY, faults, marks=MANY_TEXTS) for setup in SETUPS for faults in (NO_FAULTS, LATE)),
    ],
)
def test_the_law_is_the_full_models(setup: str, number: int, faults: Faults) -> None:
    """Guards the promise of these rules through everything that carries them: joint law of all tokens, ends among them.

    Guesses that come too late, or a drafter that dies in mid-answer, change nothing, whatever it has drawn.
    """
    outcome, top = simulated(setup, number, faults), SETUPS[setup][0] - 1
    assert surprise(outcome.texts, law(models(SETUPS[setup][0])[-1])) < UNLIKELY_Z
    edges = [edge for edge in outcome.edges if edge.verifier == str(top)]
    assert 0 < sum(edge.accepted for edge in edges) < sum(edge.proposed for edge in edges)
    assert any(edge.undrafted_passes for edge in edges)


@pytest.mark.parametrize("setup", SETUPS)
def test_the_same_seed_gives_the_same_text(setup: str) -> None:
    """Guards reproducibility: nothing but the seed and the drafts decides, whenever a session was opened."""
    texts = simulated(setup, 4, max_tokens=12).texts
    assert texts == simulated(setup, 4, Faults(jitter_s=0.01), max_tokens=12).texts


# what else may happen


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


def test_a_drafter_draws_from_noise_of_its_own() -> None:
    """Guards the law where few texts do not show it: guesses that are drawn from the noise of those who judge them."""
    above = Session(opening(1, RATIO, 2), "1", 1, VOCAB)
    below = Session(above.attach("0", "below", ()), "0", 0, VOCAB)
    [one, other] = (session.rounds.draw(session.work(9)) for session in (above, below) if session.rounds is not None)
    assert one is not None
    assert other is not None
    assert {*one.keys}.isdisjoint(other.keys)


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

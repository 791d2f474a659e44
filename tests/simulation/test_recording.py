"""Simulated tiers: toys that agree as often as they are said to, and those that say what was recorded."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from cascade.errors import ConfigError
from cascade.messages import SessionSpec
from cascade.params import SamplingParams
from cascade.scorer import RunnerUp
from cascade.simulation.recording import RecordedText, RecordedTier, Recording
from cascade.simulation.scenario import Request, Scenario, SimTier
from cascade.simulation.simulate import simulate
from cascade.simulation.toy_tier import ABOVE, ToyTier
from tests.cases import rare
from tests.toys import full_text, pass_cost

VOCAB = 64
PARAMS = SamplingParams(max_tokens=30, temperature=0, seed=0)
PASS_S = (1.3e-3, 4e-3, 25e-3)
PROMPTS = (tuple(range(20)), tuple(range(30, 58)))


def recorded(seed: int, prompt: tuple[int, ...]) -> RecordedText:
    """Of toys with the noise of another request: texts that the tiers of a recording do not write by themselves."""
    toys = [ToyTier(VOCAB, (0.6, 0.8)[level:]) for level in range(3)]
    spec = SessionSpec(prompt, len(prompt), SamplingParams(max_tokens=30, temperature=0, seed=seed))
    text = full_text(toys[-1], spec)
    places = range(len(prompt), len(text))
    return RecordedText(
        prompt,
        tuple(tuple(tuple(toy.ranked(tuple(text[p - 3 : p]), p, spec.params, 3)) for p in places) for toy in toys),
        category="chat",
    )


RECORDING = Recording(tuple(recorded(100 + number, prompt) for number, prompt in enumerate(PROMPTS)))
TIERS = [RecordedTier(VOCAB, RECORDING.agreement[level:], RECORDING) for level in range(3)]
AGREEMENT = (0.65, 0.82)
TOYS = [ToyTier(VOCAB, AGREEMENT[level:]) for level in range(3)]  # bottom to top


@pytest.mark.parametrize("tiers", [[0, 1, 2], *map(rare, ([2], [0, 2], [1, 2]))])
def test_every_cascade_writes_the_recorded_texts(tiers: Sequence[int]) -> None:
    """Guards figures against made-up texts: whatever tiers take part, answers are what the full model wrote."""
    chosen = tuple(SimTier(f"tier-{i}", TIERS[i], pass_cost(PASS_S[i]), 0.3e-3) for i in tiers)
    scenario = Scenario(chosen, tuple(Request(text.prompt, PARAMS) for text in RECORDING.texts))
    assert simulate(scenario).texts == tuple(text.output for text in RECORDING.texts)


def test_tiers_say_what_was_recorded() -> None:
    """Guards agreement: own tokens and runner-ups along a text are the recorded ones, in order, with their gaps."""
    for text, level in itertools.product(RECORDING.texts, range(3)):
        whole = (*text.prompt, *text.output)
        for place, ranks in enumerate(text.ranked[level]):
            position = len(text.prompt) + place
            context = whole[max(0, position - TIERS[level].order) : position]
            assert TIERS[level].ranked(context, position, PARAMS, 3) == list(ranks)
    pairs = [pair for text in RECORDING.texts for pair in zip(text.ranked[0], text.ranked[1], strict=True)]
    assert RECORDING.agreement[0] == sum(lower[0].token == upper[0].token for lower, upper in pairs) / len(pairs)
    assert RECORDING.shared(0, 1) < RECORDING.shared(0, 1, 3) <= 1


def test_files_keep_a_recording(tmp_path: Path) -> None:
    """Guards replicas, which read it: what was saved is what is loaded, and a file that is none is named with what to do."""
    path = tmp_path / "recording.json"
    RECORDING.save(path)
    assert Recording.load(path) == RECORDING
    lengths = {"texts": [{"category": "", "prompt": [1], "said": [[[[1, 0]]], []]}]}
    for broken in (None, {}, {"texts": []}, lengths):
        path.unlink() if broken is None else path.write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match=r"^The recording '.*' cannot be read .* record the tiers again$"):
            Recording.load(path)


def test_texts_that_cannot_be_told_apart_are_refused() -> None:
    """Guards against an answer to one prompt that goes on as that to another one."""
    first = RECORDING.texts[0]
    other = RecordedText(first.prompt, tuple((((RunnerUp(63, 0.0),),) * len(first.output)) for _ in range(3)))
    with pytest.raises(ConfigError, match="Two recorded texts have the same"):
        Recording((first, other)).places(2)


def test_toys_agree_as_often_as_they_should() -> None:
    """Guards what simulations are about: shares of agreement, errors of edges that are unrelated, and right runner-ups."""
    places = [(tuple((place * step) % VOCAB for step in (7, 11, 13)), place) for place in range(3000)]
    tiny, medium, full = ([toy.ranked(*place, PARAMS, 3) for place in places] for toy in TOYS)
    for lower, upper, share in ((tiny, medium, AGREEMENT[0]), (medium, full, AGREEMENT[1]), (tiny, full, math.prod(AGREEMENT))):
        agreed = [low[0].token == high[0].token for low, high in zip(lower, upper, strict=True)]
        assert sum(agreed) / len(agreed) == pytest.approx(share, abs=0.02)
    wrong = [(low, high[0].token) for low, high in zip(medium, full, strict=True) if low[0].token != high[0].token]
    for rank, share in enumerate(ABOVE, start=1):
        assert sum(ranked[rank].token == right for ranked, right in wrong) / len(wrong) == pytest.approx(share, abs=0.05)
    for ranked in (*tiny, *medium):
        assert len({candidate.token for candidate in ranked if candidate.token in range(VOCAB)}) == 3
        assert [candidate.gap for candidate in ranked] == sorted(candidate.gap for candidate in ranked)

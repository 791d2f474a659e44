"""PipeSpec's own measurements of Llama 1B, 8B and 70B on HumanEval, and the simulator fed with them.

Its raw files (`pipespec.json` says where they are) tell how many tokens each pass gave and how long it took. So it is known of
nearly every token of every answer whether those of 1B and 8B were 70B's, along the same answers. From that a `Recording` is
made. A draft whose verdict is missing is right as often as after a right one. Where both are wrong they are the same: so 1B
agrees with 8B in 0.94 of positions, as it was measured. Runner-ups were not published: they are right as often as those of
the family that ships (`cascade.simulation.toy_tier`).

PipeSpec has no planner. Its asynchronous passes take all guesses at hand, and wait until there are `REFILL`. `Eager` does that
in the simulator, whose planner is told that passes of any size cost the same. In lockstep nothing overlaps: a loop counts.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import eq
from pathlib import Path
from typing import Any

from cascade.draft import num_same
from cascade.params import SamplingParams
from cascade.planner.acceptance import DraftStats
from cascade.planner.choice import Policy
from cascade.planner.cost import Profile
from cascade.scorer import RunnerUp
from cascade.simulation.plan import PAUSE_S
from cascade.simulation.recording import RecordedText, RecordedTier, Recording
from cascade.simulation.scenario import Request, Scenario, SimTier
from cascade.simulation.simulate import simulate
from cascade.simulation.toy_tier import draws_of, with_runner_ups
from cascade.splitmix import mix

NAMES = ("1B", "8B", "70B")
FULL = NAMES[-1]
VOCAB = 64  # of the toys
PROMPT = 170  # tokens: what HumanEval's prompts are long
LOOKAHEAD = 7  # drafts of a window in lockstep
REFILL = 4  # drafts that an asynchronous pass waits for: after each correction its passes give at most five tokens
MOST = 100  # drafts of a pass
HOP_S = 0.1e-3  # processes of one machine that look at each other's memory every 0.1 ms
CHAINS: Mapping[str, tuple[str, ...]] = {" → ".join(chain): chain for chain in (("1B", FULL), ("8B", FULL), NAMES)}


@dataclass(frozen=True, slots=True)
class Data:
    """What was measured: milliseconds a token by mode; of passes by model and tokens; and which drafts were right.

    ``right[model][answer]`` has a character for each token: 1, 0, or ? where that is not known.
    """

    token_ms: Mapping[str, float]
    pass_ms: Mapping[str, Mapping[str, float]]
    right: Mapping[str, Sequence[str]]

    @classmethod
    def load(cls) -> "Data":
        figures = json.loads((Path(__file__).parent / "pipespec.json").read_text(encoding="utf-8"))
        return cls(figures["token_ms"], figures["pass_ms"], figures["right"])

    def cost(self, model: str) -> Profile:
        return Profile([(int(tokens), ms / 1e3) for tokens, ms in self.pass_ms[model].items()])

    def verdicts(self) -> dict[str, list[list[bool]]]:
        """Whether drafts were right, for each model and answer, unknown positions drawn."""
        draw = random.Random(0)
        verdicts = {}
        for model, answers in self.right.items():
            pairs = [pair for answer in answers for pair in pairwise(answer)]
            after_right = [now == "1" for before, now in pairs if before == "1" and now != "?"]
            share = sum(after_right) / len(after_right)
            verdicts[model] = [
                [mark == "1" or (mark == "?" and draw.random() < share) for mark in answer] for answer in answers
            ]
        return verdicts


def recording(data: Data) -> Recording:
    """The answers, in tokens of `VOCAB`, and what each model says along them."""
    verdicts = data.verdicts()
    tiny_right, medium_right = ([mark for answer in verdicts[model] for mark in answer] for model in NAMES[:-1])
    # how often 1B says what 8B says, and that what 70B says
    shares = sum(map(eq, tiny_right, medium_right)) / len(medium_right), sum(medium_right) / len(medium_right)
    texts = []
    for number, right in enumerate(zip(*(verdicts[model] for model in NAMES[:-1]), strict=True)):
        prompt = tuple(mix(number * PROMPT + place) % VOCAB for place in range(PROMPT))
        places = []
        for position, (tiny, medium) in enumerate(zip(*right, strict=True)):
            key = mix(mix(number + 1) ^ position)
            full = (RunnerUp(key % VOCAB, 0.0),)
            wrong = (full[0].token + 1 + mix(key) % (VOCAB - 1)) % VOCAB  # both say it where both are wrong
            above = with_runner_ups(full[0].token if medium else wrong, full, shares[1], draws_of(key, 1), VOCAB)
            below = with_runner_ups(full[0].token if tiny else wrong, above, shares[0], draws_of(key, 2), VOCAB)
            places.append((below, above, full))
        texts.append(RecordedText(prompt, tuple(zip(*places, strict=True))))
    return Recording(tuple(texts))


class Eager(Policy):
    """Takes what is there, and waits for `REFILL` drafts after a correction."""

    def waits_for(self, stats: DraftStats, room: int) -> int:
        return min(room, REFILL)


def tiers(data: Data, texts: Recording) -> list[SimTier]:
    """As PipeSpec runs them."""
    policy, shares = Eager(patience=10.0, max_guesses=MOST), texts.agreement
    return [
        SimTier(name, RecordedTier(VOCAB, shares[level:], texts), data.cost(name).predict, HOP_S, policy, timed=(1,))
        for level, name in enumerate(NAMES)
    ]


def asynchronous(data: Data, texts: Recording, chain: Sequence[str]) -> float:
    """Milliseconds a token of a chain of tiers, prompts included, as the simulator has it."""
    chosen = tuple(tier for tier in tiers(data, texts) if tier.name in chain)
    requests = tuple(
        Request(text.prompt, SamplingParams(max_tokens=len(text.output), temperature=0, seed=0), arrive_s=PAUSE_S * number)
        for number, text in enumerate(texts.texts)
    )
    outcome = simulate(Scenario(chosen, requests, window=MOST, branches=0))
    took = sum(end - request.arrive_s for end, request in zip(outcome.finish_s, requests, strict=True))
    return 1e3 * took / len(outcome.token_s)


def lockstep(data: Data, texts: Recording, chain: Sequence[str]) -> float:
    """Milliseconds a token where every tier waits for the others, prompts included."""
    costs = {name: data.cost(name) for name in chain}
    took, tokens = 0.0, 0
    for text in texts.texts:
        own = {name: [at[0].token for at in text.ranked[NAMES.index(name)]] for name in chain}
        size = len(text.output)
        took += sum(cost.predict(PROMPT) for cost in costs.values())
        place, missed = 1, False  # reading the prompt gave the first token
        while place < size:
            window, seconds = _window(own, costs, chain[:-1], place, size)
            if missed:  # PipeSpec's drafts do not hear of a token that follows a window all right, and say their own
                seconds += costs[chain[-2]].predict(1)
                window = window if own[chain[-2]][place - 1] == text.output[place - 1] else []
            took += seconds + costs[FULL].predict(1 + len(window))
            same = num_same(window, text.output[place:])
            missed = bool(window) and same == len(window)
            place += 1 + same
        tokens += size
    return 1e3 * took / tokens


def _window(
    own: Mapping[str, Sequence[int]], costs: Mapping[str, Profile], names: Sequence[str], place: int, size: int
) -> tuple[list[int], float]:
    """Guesses of drafts of these ``names`` after ``place`` tokens, at most `LOOKAHEAD`, and the seconds that they take.

    Each draft verifies the guesses of the one below, and then goes on alone.
    """
    window: list[int] = []
    seconds = 0.0
    for level, name in enumerate(names):
        drafts = list(own[name][place : min(size, place + LOOKAHEAD)])
        given = min(len(drafts), num_same(window, drafts) + 1) if level else 0
        seconds += costs[name].predict(1 + len(window)) if level else 0.0
        seconds += (len(drafts) - given) * costs[name].predict(1)
        window = drafts
    return window, seconds


def compared(data: Data, texts: Recording) -> Iterator[tuple[str, float, float]]:
    """Each of its seven modes: measured and predicted milliseconds a token."""
    yield "alone", data.token_ms["alone"], asynchronous(data, texts, (FULL,))
    for name, chain in CHAINS.items():
        yield f"lockstep {name}", data.token_ms[f"lockstep {name}"], lockstep(data, texts, chain)
    for name, chain in CHAINS.items():
        yield f"asynchronous {name}", data.token_ms[f"asynchronous {name}"], asynchronous(data, texts, chain)


def figures(data: Data, texts: Recording) -> dict[str, Any]:
    """By mode: milliseconds a token, and predicted over measured."""
    return {
        name: {"measured_ms": measured, "predicted_ms": round(predicted, 2), "ratio": round(predicted / measured, 3)}
        for name, measured, predicted in compared(data, texts)
    }

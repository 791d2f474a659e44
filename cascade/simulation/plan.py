"""What a cascade would give on devices that are not at hand: speeds that the simulator predicts, mode by mode.

The simulator runs the real loops, sessions and planner. Given are what passes cost and how often tiers agree: measured texts (a
`Recording`), or shares alone. With shares alone a lower tier is taken to be right only where the tier above it is, errors are
independent of each other, and runner-ups are right as often as measured on the family that ships (`ToyTier`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cascade.errors import ConfigError
from cascade.params import SamplingParams
from cascade.planner.cost import Profile
from cascade.simulation.recording import RecordedTier, Recording
from cascade.simulation.scenario import Request, Scenario, SimTier
from cascade.simulation.simulate import simulate
from cascade.simulation.toy_tier import Agreement, ToyTier

HOP_S = 0.3e-3  # one way between replicas: a gRPC stream within a node, measured
PAUSE_S = 1e5  # virtual seconds from one round of requests to the next
VOCAB = 64  # the toys' vocabulary
ALONE, PLANNER = "alone", "planner"  # modes beside those named by their tiers


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests of one size; recorded texts bring their own."""

    loads: tuple[int, ...] = (1, 8)  # requests at once
    prompt_tokens: int = 256
    tokens: int = 96  # tokens of an answer
    answers: int = 8  # answers that count, at least; the round before them, in which the planner learns, does not


@dataclass(frozen=True, slots=True)
class Prediction:
    """Tokens per second of all requests together, by mode, at ``load`` requests at once."""

    load: int
    speeds: Mapping[str, float]

    def over_alone(self, mode: str) -> float:
        return self.speeds[mode] / self.speeds[ALONE]

    @property
    def best(self) -> str:
        """The fixed mode with most tokens per second."""
        return max((mode for mode in self.speeds if mode != PLANNER), key=lambda mode: self.speeds[mode])


def chained(agreement: Sequence[float]) -> Agreement:
    """Shares of own tokens that each lower tier has in common with the *next*, from those with the *full* one, bottom to top.

    Raises `ConfigError` if a share is not above 0 and at most 1, or a tier agrees more often than the one above it.
    """
    for share in agreement:
        if not 0 < share <= 1:
            raise ConfigError(f"An agreement is {share:g}: it must be above 0 and at most 1")
    for lower, upper in pairwise(agreement):
        if lower > upper:
            raise ConfigError(
                f"A tier agrees with the full one in {lower:g} of tokens and the tier above it in {upper:g}: "
                "leave out the one above"
            )
    return tuple(lower / upper for lower, upper in pairwise((*agreement, 1.0)))


def toy_tiers(names: Sequence[str], costs: Sequence[Profile], agreement: Sequence[float]) -> tuple[SimTier, ...]:
    """Tiers, bottom to top, that agree with the full one in the shares ``agreement``, one for each tier below it."""
    shares = chained(agreement)
    return tuple(
        SimTier(name, ToyTier(VOCAB, shares[level:]), cost.predict, HOP_S)
        for level, (name, cost) in enumerate(zip(names, costs, strict=True))
    )


def recorded_tiers(names: Sequence[str], costs: Sequence[Profile], recording: Recording, vocab: int) -> tuple[SimTier, ...]:
    """Tiers, bottom to top, that say what was recorded of them along the recorded texts."""
    shares = recording.agreement
    return tuple(
        SimTier(name, RecordedTier(vocab, shares[level:], recording), cost.predict, HOP_S)
        for level, (name, cost) in enumerate(zip(names, costs, strict=True))
    )


def modes(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The lower tiers of each mode, bottom to top: none, each alone, all of them, and all for the planner to choose from."""
    *lower, full = names
    chains = dict.fromkeys([*((name,) for name in lower), tuple(lower)]) if lower else {}
    return {ALONE: ()} | {" → ".join((*chain, full)): chain for chain in chains} | ({PLANNER: tuple(lower)} if lower else {})


def predict(tiers: Sequence[SimTier], asked: Asked, recording: Recording | None = None) -> Iterator[Prediction]:
    """The speed of every mode at each load; the same inputs give the same figures."""
    names = [tier.name for tier in tiers]
    for load in asked.loads:
        requests = _requests(asked, load, recording)
        speeds = {}
        for mode, chain in modes(names).items():
            chosen = (*(tier for tier in tiers[:-1] if tier.name in chain), tiers[-1])
            outcome = simulate(Scenario(chosen, requests, adaptive=mode == PLANNER))
            speeds[mode] = _speed(outcome.token_s, outcome.finish_s, [request.arrive_s for request in requests])
        yield Prediction(load, speeds)


def timelines(tiers: Sequence[SimTier], recording: Recording, *, drafts: bool) -> list[tuple[float, ...]]:
    """When each token of each recorded text comes, asked one after the other: seconds from its request on.

    With ``drafts`` the planner chooses who drafts; an answer before the first lets it learn. Without, the full tier is alone.
    """
    requests = _requests(Asked(), 1, recording)
    outcome = simulate(Scenario(tuple(tiers) if drafts else (tiers[-1],), requests, adaptive=drafts))
    begins = [request.arrive_s for request in requests]
    rounds = [[time - begin for time in outcome.token_s if 0 <= time - begin < PAUSE_S] for begin in begins]
    return [tuple(rounds[number or len(recording.texts)]) for number in range(len(recording.texts))]


def _requests(asked: Asked, load: int, recording: Recording | None) -> tuple[Request, ...]:
    """Rounds of ``load`` requests at once; of recorded texts so many rounds that each is asked once at least."""
    if recording is None:
        return tuple(
            Request(
                tuple((seed * 7 + place * 11) % VOCAB for place in range(asked.prompt_tokens)),
                SamplingParams(max_tokens=asked.tokens, temperature=0, seed=seed),
                arrive_s=PAUSE_S * (seed // load),
            )
            for seed in range(load * (1 + -(-asked.answers // load)))
        )
    texts = recording.texts
    numbers = range(load * (1 + -(-len(texts) // load)))
    chosen = [texts[number % len(texts)] for number in numbers]
    return tuple(
        Request(
            text.prompt, SamplingParams(max_tokens=len(text.output), temperature=0, seed=0), arrive_s=PAUSE_S * (number // load)
        )
        for number, text in zip(numbers, chosen, strict=True)
    )


def _speed(token_s: Sequence[float], finish_s: Sequence[float], arrive_s: Sequence[float]) -> float:
    """Tokens per second from each round's first token to its first finished answer, while all its requests are there.

    The first round does not count.
    """
    tokens, seconds = 0, 0.0
    for begin in sorted(set(arrive_s))[1:]:
        end = min(finish for finish, arrived in zip(finish_s, arrive_s, strict=True) if arrived == begin)
        times = [time for time in token_s if begin < time <= end]
        first = min(times)
        tokens += sum(time > first for time in times)
        seconds += end - first
    return tokens / seconds if seconds else 0.0

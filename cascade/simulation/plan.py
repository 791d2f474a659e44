"""Predicts the speed of a cascade on devices that are not at hand, mode by mode.

The simulator runs the real loops, sessions and planner. Its inputs are pass times and how often tiers agree: measured texts (a
`Recording`), or only shares. With only shares, a lower tier is right only where the tier above it is, errors are independent,
and runner-ups are right as often as measured on the family that ships (`ToyTier`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from cascade.errors import ConfigError
from cascade.params import SamplingParams
from cascade.planner.cost import Profile
from cascade.scorer import Drafter
from cascade.simulation.recording import RecordedTier, Recording
from cascade.simulation.scenario import Outcome, Request, Scenario, SimTier
from cascade.simulation.simulate import simulate
from cascade.simulation.toy_tier import Agreement, ToyTier

HOP_S = 0.3e-3  # one way between replicas, as measured for a gRPC stream within a node
PAUSE_S = 1e5  # virtual seconds from one round of requests to the next
VOCAB = 64  # vocabulary of toy tiers
ALONE, PLANNER = "alone", "planner"  # modes that are not named by their tiers


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one size; recorded texts have sizes of their own."""

    loads: tuple[int, ...] = (1, 8)  # requests at once
    prompt_tokens: int = 256
    tokens: int = 96  # tokens of an answer
    answers: int = 8  # answers that count, at least; the planner learns in a round before them


@dataclass(frozen=True, slots=True)
class Prediction:
    """Total tokens per second and prepared corrections of each mode, at ``load`` requests at once."""

    load: int
    speeds: Mapping[str, float]
    prepared: Mapping[str, float]  # share of the full tier's corrections after which a guess was ready

    def over_alone(self, mode: str) -> float:
        return self.speeds[mode] / self.speeds[ALONE]

    @property
    def best(self) -> str:
        """The fixed mode with most tokens per second."""
        return max((mode for mode in self.speeds if mode != PLANNER), key=lambda mode: self.speeds[mode])


def chained(agreement: Sequence[float]) -> Agreement:
    """Agreement of each lower tier with the *next* one, from its agreement with the *full* one; bottom to top.

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
    """Toy tiers, bottom to top; each lower one agrees with the full one in its share of ``agreement``."""
    return _tiers(names, costs, chained(agreement), partial(ToyTier, VOCAB))


def recorded_tiers(
    names: Sequence[str], costs: Sequence[Profile], recording: Recording, vocab: int, drafters: Sequence[Drafter] = ()
) -> tuple[SimTier, ...]:
    """Tiers, bottom to top, that repeat the recorded own tokens along the recorded texts; the top one has ``drafters``."""
    *lower, full = _tiers(names, costs, recording.agreement, partial(RecordedTier, vocab, recording=recording))
    return (*lower, replace(full, drafters=tuple(drafters)))


def _tiers(
    names: Sequence[str], costs: Sequence[Profile], agreement: Agreement, model: Callable[[Agreement], ToyTier]
) -> tuple[SimTier, ...]:
    pairs = enumerate(zip(names, costs, strict=True))
    return tuple(SimTier(name, model(agreement[level:]), cost.predict, HOP_S) for level, (name, cost) in pairs)


def modes(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The lower tiers of each mode, bottom to top: none, each by itself, all, and all for the planner to choose from."""
    *lower, full = names
    chains = dict.fromkeys([*((name,) for name in lower), tuple(lower)]) if lower else {}
    return {ALONE: ()} | {" → ".join((*chain, full)): chain for chain in chains} | ({PLANNER: tuple(lower)} if lower else {})


def predict(tiers: Sequence[SimTier], traffic: Traffic, recording: Recording | None = None) -> Iterator[Prediction]:
    """Predict the speed of every mode at each load. The same inputs give the same figures."""
    names = [tier.name for tier in tiers]
    for load in traffic.loads:
        requests = _requests(traffic, load, recording)
        speeds, prepared = {}, {}
        for mode, chain in modes(names).items():
            chosen = (*(tier for tier in tiers[:-1] if tier.name in chain), tiers[-1])
            outcome = simulate(Scenario(chosen, requests, adaptive=mode == PLANNER))
            speeds[mode] = _speed(outcome, requests)
            if chain:
                edges = [edge for edge in outcome.edges if edge.verifier == names[-1]]
                corrected = sum(edge.corrected for edge in edges)
                prepared[mode] = sum(edge.prefetched for edge in edges) / corrected if corrected else 0.0
        yield Prediction(load, speeds, prepared)


def timelines(tiers: Sequence[SimTier], recording: Recording, *, drafts: bool) -> list[tuple[float, ...]]:
    """When each token of each recorded text comes, in seconds after its request; requests come one after the other.

    With ``drafts`` the planner chooses the drafters and tiers that draft, after one answer for learning. Without, none does. No
    request reuses anything of another.
    """
    requests = [replace(request, cache_salt=str(at)) for at, request in enumerate(_requests(Traffic(), 1, recording))]
    chosen = tuple(tiers) if drafts else (replace(tiers[-1], drafters=()),)
    outcome = simulate(Scenario(chosen, tuple(requests), adaptive=drafts))
    pairs = zip(requests, outcome.times, strict=True)
    answers = [tuple(time - request.arrive_s for time in times) for request, times in pairs]
    return [answers[-1], *answers[1:-1]]


def _requests(traffic: Traffic, load: int, recording: Recording | None) -> tuple[Request, ...]:
    """Rounds of ``load`` requests at once; after the first round each recorded text comes at least once."""
    texts = () if recording is None else recording.texts
    requests = []
    for number in range(load * (1 + -(-(len(texts) or traffic.answers) // load))):
        if texts:
            prompt, tokens, seed = (text := texts[number % len(texts)]).prompt, len(text.output), 0
        else:
            prompt = tuple((number * 7 + place * 11) % VOCAB for place in range(traffic.prompt_tokens))
            tokens, seed = traffic.tokens, number
        params = SamplingParams(max_tokens=tokens, temperature=0, seed=seed)
        requests.append(Request(prompt, params, arrive_s=PAUSE_S * (number // load)))
    return tuple(requests)


def _speed(outcome: Outcome, requests: Sequence[Request]) -> float:
    """Tokens per second from each round's first token to its first finished answer, while all its requests are there.

    The first round does not count.
    """
    rounds: dict[float, list[tuple[float, ...]]] = {}
    for request, times in zip(requests, outcome.times, strict=True):
        rounds.setdefault(request.arrive_s, []).append(times)
    tokens, seconds = 0, 0.0
    for answers in [*rounds.values()][1:]:
        first, end = min(times[0] for times in answers), min(times[-1] for times in answers)
        tokens += sum(first < time <= end for times in answers for time in times)
        seconds += end - first
    return tokens / seconds if seconds else 0.0

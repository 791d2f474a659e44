"""How fast a cascade would be, from measured pass costs, hop delays and acceptance: every choice of tiers, simulated.

The simulator runs the real sessions; own tokens come from a `Trace`, which says at each position of a text which tiers agree.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cascade.params import DEFAULT_WINDOW, MOST_BRANCHES, SamplingParams
from cascade.planner.choice import Policy
from cascade.simulation.scenario import DEFAULT_POLICY, Outcome, Request, Scenario, SimTier
from cascade.simulation.simulate import simulate
from cascade.simulation.trace import Acceptance, Trace, TraceModel

Schedule: TypeAlias = Literal["alone", "lockstep", "async"]
LOCKSTEP_WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True, slots=True)
class TierCost:
    """A tier that may take part."""

    name: str
    cost: Callable[[int], float]  # seconds of a pass that scores so many tokens, such as a `PassCost`
    hop_s: float = 0.0  # one way to the tier above
    policy: Policy = DEFAULT_POLICY
    device: str = ""  # see `cascade.simulation.scenario.SimTier`


@dataclass(frozen=True, slots=True)
class Prediction:
    """One way to serve, simulated."""

    tiers: tuple[str, ...]  # bottom to top
    schedule: Schedule
    window: int  # tokens a lower tier may run ahead; 0 for the full tier alone
    branches: int  # that a lower tier may offer and prepare; 0 for lines
    tokens_per_s: float
    speedup: float  # over the full tier alone
    tokens_per_pass: float  # of the full tier
    busy: tuple[float, ...]  # share of the time that each tier was in a pass
    bubble_s: float  # mean time from a correction by the full tier to its next pass


def prediction_rows(
    costs: Sequence[TierCost],
    acceptance: Acceptance | Trace,
    *,
    window: int = DEFAULT_WINDOW,
    branches: int = MOST_BRANCHES,
    lockstep_windows: Sequence[int] = LOCKSTEP_WINDOWS,
    num_tokens: int = 1000,
    num_requests: int = 1,
    seed: int = 0,
) -> list[Prediction]:
    """Every choice among the lower tiers, in lockstep with its best window and async with ``window``; fastest last.

    Async ones guess lines, and beside these trees with ``branches``, if that is not 0.

    ``costs`` go bottom to top, the last is the full tier. All choices write the same text of ``num_tokens`` tokens per request,
    so their differences are less noisy than their values. ``num_requests`` of them run at once and share the passes.
    """
    trace = acceptance if isinstance(acceptance, Trace) else Trace.drawn(acceptance, 4 * num_tokens, seed)
    bench = Bench(tuple(costs), trace, num_tokens, num_requests)
    full = len(costs) - 1
    alone = bench.outcome((full,))

    def row(chosen: Sequence[int], schedule: Schedule, window: int, branches: int) -> Prediction:
        served = bench.outcome(chosen, lockstep=schedule == "lockstep", window=window, branches=branches)
        return Prediction(
            tuple(costs[i].name for i in chosen),
            schedule,
            window,
            branches,
            served.tokens_per_s,
            served.tokens_per_s / alone.tokens_per_s,
            served.tokens_per_pass,
            tuple(usage.busy_s / served.elapsed_s for usage in served.usage),
            served.usage[-1].mean_bubble_s,
        )

    rows = [row((full,), "alone", 0, 0)]
    for lower in itertools.chain.from_iterable(itertools.combinations(range(full), size) for size in range(1, full + 1)):
        chosen = (*lower, full)
        rows.append(max((row(chosen, "lockstep", w, 0) for w in lockstep_windows), key=lambda one: one.speedup))
        rows += [row(chosen, "async", window, most) for most in ((0, branches) if branches else (0,))]
    return sorted(rows, key=lambda one: one.speedup)


@dataclass(frozen=True, slots=True)
class Bench:
    """Requests that every choice of tiers has to serve."""

    costs: tuple[TierCost, ...]
    trace: Trace
    num_tokens: int  # per request
    num_requests: int = 1

    def outcome(
        self,
        chosen: Sequence[int],
        *,
        lockstep: bool = False,
        window: int = DEFAULT_WINDOW,
        branches: int = MOST_BRANCHES,
        adaptive: bool = False,
    ) -> Outcome:
        """Serve with the tiers ``chosen``, by index, bottom to top; if ``adaptive``, with those of them that pay."""
        trace = self.trace.only(chosen)
        picked = [self.costs[i] for i in chosen]
        tiers = tuple(SimTier(c.name, TraceModel(trace, i), c.cost, c.hop_s, c.policy, c.device) for i, c in enumerate(picked))
        params = [SamplingParams(max_tokens=self.num_tokens, temperature=0, seed=i) for i in range(self.num_requests)]
        requests = tuple(Request(params=one) for one in params)
        window = max(1, window)
        return simulate(Scenario(tiers, requests, window=window, lockstep=lockstep, branches=branches, adaptive=adaptive))

"""Device-hours of replicas chosen by what they are worth, against the cheapest static layout, over made-up hours of requests.

    make bench-autoscale

Everything here is simulated (`benchmarks.fleet`, `benchmarks.arrivals`). The static layout is the one of
fewest devices whose 95th percentile of the time per token is the one that is asked for; the other one may take as many
devices, has to start each replica first, and is asked for more speed until it is no later than the static one. Gains by draft
tiers and load are those that real sessions have in the discrete-event simulator, with the same passes; `--gains` measures
them again. The last line is one JSON document.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from rich.table import Table

from benchmarks.arrivals import Arrival, bursty, nightly, rising
from benchmarks.document import console, finish, parsed, parser, stamp, timed
from benchmarks.fleet import Course, Fleet, run, static
from cascade.planner.cost import PassCost
from cascade.planner.replicas import Goal, Layout, TierLoad, devices
from cascade.planner.scaling import Pace, Scaler
from cascade.simulation.forecast import Bench, TierCost
from cascade.simulation.trace import Acceptance, Trace

HOP_S = 0.3e-3
CODE = Acceptance((0.78, 0.9))  # of tiny by medium, of medium by full
TINY = PassCost(points=((1, 0.0015), (64, 0.0016), (256, 0.0025), (512, 0.004)))
MEDIUM = PassCost(points=((1, 0.005), (64, 0.0055), (256, 0.009), (512, 0.015)))
FULL = PassCost(points=((1, 0.022), (8, 0.026), (16, 0.036), (32, 0.058), (64, 0.104)))
LOADS = (1, 2, 4, 8, 16, 32)
GAINS = {  # by `measure_gains`
    frozenset({"tiny"}): ((1, 1.54), (2, 1.48), (4, 1.35), (8, 1.10), (16, 1.01), (32, 1.0)),
    frozenset({"medium"}): ((1, 2.59), (2, 2.43), (4, 2.00), (8, 1.26), (16, 1.12), (32, 1.04)),
    frozenset({"tiny", "medium"}): ((1, 2.90), (2, 2.57), (4, 2.05), (8, 1.28), (16, 1.12), (32, 1.04)),
}
MOST_FULL, MOST_DRAFT = 12, 4
TOKENS = 300.0  # of an answer, on average
SHARE = 0.95  # of requests, that are judged
# times a session's time per token alone: what scalers are asked for, a mean, until that share of requests is as soon as static
GOALS = (1.35, 1.2, 1.1)
LATER = 1.05  # times the static layout's time per token that is no later
HOUR_S = 3600.0
TRACES: dict[str, tuple[Callable[..., list[Arrival]], float, float]] = {  # requests a second at the most, hours
    "rising": (rising, 12.0, 2.0),
    "bursty": (bursty, 6.0, 6.0),
    "nightly": (nightly, 8.0, 24.0),
}


def measure_gains() -> dict[str, list[tuple[int, float]]]:
    """Tokens/s of so many sessions with draft tiers over those without, with real sessions in virtual time."""
    costs = (TierCost("tiny", TINY, HOP_S), TierCost("medium", MEDIUM, HOP_S), TierCost("full", FULL, HOP_S))
    trace = Trace.drawn(CODE, 4000, 0)
    found: dict[str, list[tuple[int, float]]] = {}
    for load in LOADS:
        bench = Bench(costs, trace, 60, load)
        alone = bench.outcome((2,)).tokens_per_s
        for chosen in ((0, 2), (1, 2), (0, 1, 2)):
            gain = bench.outcome(chosen, branches=0).tokens_per_s / alone
            found.setdefault("+".join(costs[place].name for place in chosen[:-1]), []).append((load, round(gain, 2)))
    return found


def fleet(start_s: float) -> Fleet:
    tiers = (
        TierLoad("tiny", 1.0, 0, MOST_DRAFT, TINY),
        TierLoad("medium", 1.0, 0, MOST_DRAFT, MEDIUM),
        TierLoad("full", 1.0, 1, MOST_FULL, FULL),
    )
    return Fleet(tiers, GAINS, start_s)


def cheapest(there: Fleet, trace: Sequence[Arrival], token_s: float) -> tuple[Layout, Course]:
    """The static layout of fewest devices that keeps the time per token; of equals the fastest."""
    best: tuple[float, float, Layout, Course] | None = None
    for drafts in ((0, 0), (0, 1), (1, 1)):
        for full in range(1, MOST_FULL + 1):
            layout = (*drafts, full)
            size = devices(there.tiers, layout)
            if best is not None and size > best[0]:
                break
            if not _keeps_up(there, trace, layout):
                continue
            course = run(there, trace, static(layout), layout)
            late = course.quantile(SHARE)
            if late <= token_s:
                best = min((one for one in (best, (size, late, layout, course)) if one is not None), key=itemgetter(0, 1))
                break
    assert best is not None, "no static layout keeps the time per token"
    return best[2], best[3]


def _keeps_up(there: Fleet, trace: Sequence[Arrival], layout: Layout) -> bool:
    """Whether it can write all tokens in the time there is: else it need not be simulated."""
    return layout[-1] * 64 / there.tiers[-1].cost(64) >= sum(one.tokens for one in trace) / trace[-1].at_s


def compare(trace: Sequence[Arrival], there: Fleet, slowdown: float) -> dict[str, Any]:
    """The cheapest static layout, and as many devices for a scaler that has to keep the same time per token.

    Of its goals the first that keeps it, or else the one that comes nearest.
    """
    layout, fixed = cheapest(there, trace, slowdown * FULL(1))
    late = fixed.quantile(SHARE)
    goal, scaled = asked(there, trace, devices(there.tiers, layout), LATER * late)
    return {
        "requests": len(trace),
        "goal": goal,
        "static": "/".join(map(str, layout)),
        "device_hours": [round(fixed.device_hours, 1), round(scaled.device_hours, 1)],
        "saved": round(1 - scaled.device_hours / fixed.device_hours, 3),
        "p95_token_ms": [round(1e3 * late, 1), round(1e3 * scaled.quantile(SHARE), 1)],
        "p95_ratio": round(scaled.quantile(SHARE) / late, 3),
        "p50_ratio": round(scaled.quantile(0.5) / fixed.quantile(0.5), 3),
        "most_devices": scaled.most_devices,
        "changes": scaled.changes,
    }


def asked(there: Fleet, trace: Sequence[Arrival], budget: float, latest_s: float) -> tuple[float, Course]:
    """What a scaler is asked for, and what comes of it."""
    best: tuple[float, Course] | None = None
    for goal in GOALS:
        course = run(there, trace, Scaler(Goal(budget, goal), Pace()), (0, 1, there.tiers[-1].least))
        if best is None or course.quantile(SHARE) < best[1].quantile(SHARE):
            best = goal, course
        if course.quantile(SHARE) <= latest_s:
            return goal, course
    assert best is not None
    return best


def table(found: dict[str, Any]) -> Table:
    columns = ("requests", "goal", "static", "device-hours", "saved", "p95 ms a token", "ratio", "p50 ratio", "changes")
    result = Table(*columns, title="Scaled / static")
    for name, one in found.items():
        hours, late = ("{1} / {0}".format(*one[key]) for key in ("device_hours", "p95_token_ms"))
        ratios = (f"{one['saved']:.0%}", late, one["p95_ratio"], one["p50_ratio"], one["changes"])
        result.add_row(f"{name}, {one['requests']}", *map(str, (one["goal"], one["static"], hours, *ratios)))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser("autoscale", "Replicas by what they are worth, simulated.", tuple(TRACES), quick=False)
    made.add_argument("--start", type=float, default=60.0, help="seconds that a replica takes to start")
    made.add_argument("--gains", action="store_true", help="measure the gains of draft tiers, and nothing else")
    chosen = parsed(made, arguments)
    if chosen.gains:
        print(json.dumps(measure_gains()))
        return
    found = {}
    for name in chosen.only or TRACES:
        make, most, hours = TRACES[name]
        trace = make(most, hours * HOUR_S, TOKENS)
        found[name] = timed(name, partial(compare, trace, fleet(chosen.start), Goal(1).slowdown))
    console.print(table(found))
    line = {"start_s": chosen.start, "traces": found}
    finish(line | stamp("simulated"), line, chosen.results)


if __name__ == "__main__":
    main()

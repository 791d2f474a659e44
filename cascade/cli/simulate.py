"""`cascade simulate`: the speed-up of tiers that nobody has at hand."""

import click

from cascade.cli import screen
from cascade.cli.screen import console
from cascade.params import DEFAULT_WINDOW, MAX_BRANCHES, MOST_BRANCHES


@click.command()
@click.option("--tier", "tiers", multiple=True, metavar="NAME=MS", help="Milliseconds of one pass; bottom to top; repeat.")
@click.option("--accept", multiple=True, type=float, metavar="SHARE", help="Acceptance of each edge; bottom to top; repeat.")
@click.option("--accept-full", multiple=True, type=float, metavar="SHARE", help="The same by the full tier. Product of edges.")
@click.option("--growth", default=0.025, show_default=True, help="What each further token of a pass adds, as a share of it.")
@click.option("--hop", default=0.4, show_default=True, help="Milliseconds from a tier to the next, one way.")
@click.option("--shared", default="", metavar="NAMES", help="Tiers that share one device, such as tiny,medium.")
@click.option(
    "--window", default=DEFAULT_WINDOW, show_default=True, help="Tokens a tier may run ahead of the tier above, async."
)
@click.option(
    "--branches",
    type=click.IntRange(0, MAX_BRANCHES),
    default=MOST_BRANCHES,
    show_default=True,
    help="Branches beside its text that a tier may write, async; 0: lines alone.",
)
@click.option("--requests", default=1, show_default=True, help="Requests at once.")
def simulate(
    tiers: tuple[str, ...],
    accept: tuple[float, ...],
    accept_full: tuple[float, ...],
    growth: float,
    hop: float,
    shared: str,
    window: int,
    branches: int,
    requests: int,
) -> None:
    """Predict the speed-up over the full model alone, of every choice of tiers: lockstep, async with lines, async with trees.

    Runs the real sessions in virtual time. A tier's runner-ups are drawn: how close they come, and how often one of them is the
    right token, are the shares that the demonstration family was measured with.

    The defaults are three tiers such as 1 B, 8 B and 70 B models:

    \b
    cascade simulate --tier tiny=2 --tier medium=6 --tier full=30 --accept 0.75 --accept 0.85
    """
    from cascade.planner.cost import PassCost
    from cascade.simulation.forecast import TierCost, prediction_rows
    from cascade.simulation.trace import Acceptance

    pairs = [_tier_cost(tier) for tier in tiers or ("tiny=2", "medium=6", "full=30")]
    shares = accept or ((0.75, 0.85) if not tiers else ())
    if len(shares) != len(pairs) - 1 or len(accept_full) not in (0, len(shares)):
        raise click.UsageError(f"{len(pairs)} tiers have {len(pairs) - 1} edges: give --accept once for each")
    if not all(0 <= share <= 1 for share in (*shares, *accept_full)):
        raise click.UsageError("--accept and --accept-full are shares from 0 to 1")
    together = set(filter(None, shared.split(",")))
    if unknown := together - {name for name, _ in pairs}:
        raise click.BadParameter(f"{unknown.pop()!r} is no tier: give names of --tier", param_hint="--shared")
    costs = [
        TierCost(name, PassCost(ms / 1e3, growth * ms / 1e3), hop / 1e3, device="shared" if name in together else name)
        for name, ms in pairs
    ]
    with console.status("Simulating"):
        acceptance = Acceptance(shares, accept_full)
        rows = prediction_rows(costs, acceptance, window=window, branches=branches, num_requests=requests)
    console.print(screen.predictions(rows))


def _tier_cost(text: str) -> tuple[str, float]:
    name, _, ms = text.partition("=")
    try:
        cost = float(ms)
    except ValueError:
        cost = 0.0
    if not name or not 0 < cost < float("inf"):
        raise click.BadParameter(f"{text!r}: it must be NAME=MILLISECONDS, such as full=30", param_hint="--tier")
    return name, cost

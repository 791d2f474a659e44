"""How often a runner-up is what the verifier says: what guess trees have to gain, on each edge of the family.

    make bench-trees

Along what the full model writes, in float32, with the noise that a served request has. What trees give where every tier has a
device is in `benchmarks.cluster`. The last line is one JSON document.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from rich.table import Table

from benchmarks.cluster.recorded import record
from benchmarks.document import console, finish, parsed, parser, stamp, timed
from benchmarks.turns import Size, at
from cascade import family
from cascade.engine.threads import apart
from cascade.messages import RUNNER_UPS

SIZE, QUICK = Size(prompts=2, tokens=96), Size(tokens=8, temperatures=(0.7,))
EDGES = {f"{family.NAMES[i]} → {family.NAMES[j]}": (i, j) for i, j in combinations(range(len(family.NAMES)), 2)}


def acceptance(size: Size) -> dict[str, dict[str, list[float]]]:
    """By temperature and edge the share of positions at which the verifier's own token is the drafter's; with one runner-up;
    with two."""
    found: dict[str, dict[str, list[float]]] = {}
    for temperature in size.temperatures:
        recording = record(size.prompts, size.tokens, temperature)
        found[at(temperature)] = {
            name: [round(recording.shared(*edge, most), 4) for most in range(1, 2 + RUNNER_UPS)] for name, edge in EDGES.items()
        }
    return found


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    shares = Table("edge", *found, title="The verifier's token is the drafter's, a runner-up, the second")
    for edge in EDGES:
        shares.add_row(edge, *("  ".join(f"{share:.3f}" for share in edges[edge]) for edges in found.values()))
    return shares


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("trees", "What runner-ups add to guesses."), arguments)
    size = QUICK if chosen.quick else SIZE
    # apart: this thread must not compute, see `cascade.engine.threads.apart`
    found = timed("Acceptance", lambda: apart(lambda: acceptance(size)))
    console.print(table(found))
    finish({"acceptance": found} | stamp(), {"acceptance": found}, chosen.results)


if __name__ == "__main__":
    main()

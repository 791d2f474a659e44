"""How often the verifier's own token is the drafter's, and how often it is at least one of the drafter's runner-ups.

Every figure is a share of positions of what the full model writes after built-in prompts, in float32, with the noise that a
served request has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from rich.table import Table

from benchmarks.cluster.recorded import record
from benchmarks.turns import at
from cascade import family
from cascade.messages import RUNNER_UPS

TEMPERATURES = (0.0, 0.7, 1.0)
EDGES = {f"{family.NAMES[i]} → {family.NAMES[j]}": (i, j) for i, j in combinations(range(len(family.NAMES)), 2)}
TOP = " → ".join(family.NAMES[-2:])  # the edge whose corrections cost most

Shares = dict[str, list[float]]  # by edge: of own tokens, with one runner-up, with two


@dataclass(frozen=True, slots=True)
class Size:
    """How much text is judged."""

    prompts: int = 2  # of each category
    tokens: int = 96  # of an answer


def measure(size: Size) -> dict[str, Shares]:
    """Shares by temperature."""
    found: dict[str, Shares] = {}
    for temperature in TEMPERATURES:
        recording = record(size.prompts, size.tokens, temperature)
        found[at(temperature)] = {
            name: [round(recording.shared(*edge, most), 4) for most in range(1, 2 + RUNNER_UPS)] for name, edge in EDGES.items()
        }
    return found


def headline(found: Mapping[str, Shares]) -> dict[str, float]:
    """With both runner-ups, of the top edge."""
    return {temperature: edges[TOP][-1] for temperature, edges in found.items()}


def table(found: Mapping[str, Shares]) -> Table:
    title = "The verifier's own token is the drafter's (lines), or its runner-up, or the second (trees)"
    result = Table("edge", *found, title=title)
    for edge in EDGES:
        result.add_row(edge, *("  ".join(f"{share:.3f}" for share in edges[edge]) for edges in found.values()))
    return result

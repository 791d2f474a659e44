"""What is measured beside each other, and what it took."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from cascade.messages import Edge
from cascade.params import Handling, Speculation


def stranger() -> Handling:
    """A request that nothing is known of: no keys and values of its prompt, and no texts like its own."""
    return Handling(cache_salt=uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to serve a request."""

    name: str
    speculation: Speculation


class EdgeTotals(dict[tuple[str, str], Edge]):
    """What happened on each edge in all requests, by drafter and verifier."""

    def add(self, edges: Iterable[Edge]) -> None:
        """Count the edges of a request, or of other totals."""
        for edge in edges:
            key = (edge.drafter, edge.verifier)
            self[key] = self[key] + edge if key in self else edge

    @property
    def full_passes(self) -> int:
        """Passes of the full tier, each counted once for every request in it."""
        full = next(iter(self.values())).verifier if self else ""  # a request's first edges are the full tier's
        return sum(edge.passes for edge in self.values() if edge.verifier == full)

"""Totals of a session's edge and of the edges below it, over every drafter that it ever had."""

from collections.abc import Sequence

from cascade.draft import Draft
from cascade.messages import MAX_POSITIONS, MAX_RANKS, Edge, add_edges


class EdgeTotals:
    """Totals of the edge whose verifier is ``tier``, and of the edges below it."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._drafter = ""  # the tier below, "" for none
        self._by_drafter: dict[str, Edge] = {}
        self.current = self._edge("")  # the edge to the tier below
        self._below: tuple[Edge, ...] = ()  # the latest totals that the tier below has sent for its own edges
        self._below_past: dict[tuple[str, str], Edge] = {}  # the same, from tiers that drafted earlier

    def passed(self, draft: Draft, num_scored: int, path: Sequence[int], num_new: int, drafters: Sequence[str] = ()) -> None:
        """A pass scored the first nodes of a draft, accepted those of ``path``, and gave ``num_new`` tokens.

        ``drafters`` names for each node the drafter inside the tier that guessed it, "" for the tier below; it is empty if the
        tier below guessed all. The pass counts on the edge of the tier below, or without one on that of a drafter inside.
        """
        current = whose = self.current
        if not num_scored:
            current.undrafted_passes += 1
        else:
            names = drafters[:num_scored]
            if names and not self._drafter and "" not in names:
                whose = self._inner(min(names))
            depths, ranks = draft.depths, draft.ranks
            edges = {name: self._inner(name) for name in {*names}}
            for node in range(num_scored):
                edge = edges[names[node]] if names else current
                edge.proposed += 1
                _count(edge.proposed_by_position, depths[node], MAX_POSITIONS)
                _count(edge.proposed_by_rank, ranks[node], MAX_RANKS)
            for node in path:
                edge = edges[names[node]] if names else current
                edge.accepted += 1
                _count(edge.accepted_by_position, depths[node], MAX_POSITIONS)
                _count(edge.accepted_by_rank, ranks[node], MAX_RANKS)
        whose.passes += 1
        whose.emitted += num_new

    def _edge(self, drafter: str) -> Edge:
        if drafter not in self._by_drafter:
            self._by_drafter[drafter] = Edge(drafter, self._tier)
        return self._by_drafter[drafter]

    def _inner(self, drafter: str) -> Edge:
        """The edge to a drafter inside the tier; "" is the tier below."""
        return self._edge(drafter) if drafter else self.current

    def prepared(self, num_tokens: int) -> None:
        """The drafter had prepared ``num_tokens`` tokens after a correction before the correction arrived."""
        self.current.prefetched += 1
        self.current.prefetched_tokens += num_tokens

    def receive(self, edges: tuple[Edge, ...]) -> None:
        """Take the totals of the tier below; totals that are older than the present ones are ignored."""
        if edges and sum(edge.passes for edge in edges) > sum(edge.passes for edge in self._below):
            self._below = edges

    def change_drafter(self, drafter: str) -> None:
        """Count for another tier below from now on, or for none."""
        self._below_past = add_edges(self._below_past, self._below)
        self._drafter, self._below = drafter, ()
        self.current = self._edge(drafter)

    @property
    def all(self) -> tuple[Edge, ...]:
        """Totals per edge, this tier's first. Edges on which nothing happened are left out."""
        nothing = Edge("", self._tier)
        own = (edge + nothing for edge in self._by_drafter.values() if edge.passes or edge.proposed or edge.waited_s)
        return (*own, *add_edges(self._below_past, self._below).values())


def _count(counts: list[int], place: int, most: int) -> None:
    """Add one at a place, if it is among the first ``most``."""
    if place < most:
        if place >= len(counts):
            counts += [0] * (place + 1 - len(counts))
        counts[place] += 1

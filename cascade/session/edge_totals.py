"""What a session counts of its edge, and what it has heard of those below, over every drafter that it ever had."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cascade.draft import Draft
from cascade.messages import MAX_POSITIONS, MAX_RANKS, Edge


@dataclass(slots=True)
class EdgeTotals:
    """Totals of the edge to the verifier ``tier`` and of those below it."""

    tier: str
    below: tuple[Edge, ...] = ()  # of the edges below that one
    _edge: Edge = field(init=False)  # of the current drafter, without the four counters below
    agreed: int = 0  # tokens of the current drafter that the verifier said too
    _undrafted: int = 0  # passes that scored no guess
    _emitted: int = 0  # own tokens of these
    _waited_s: float = 0.0
    _past: dict[tuple[str, str], Edge] = field(default_factory=dict)  # before the last change of drafter

    def __post_init__(self) -> None:
        self._edge = Edge("", self.tier)

    @property
    def edge(self) -> Edge:
        if self._undrafted or self._waited_s or self.agreed:
            self._edge += Edge(
                self._edge.drafter,
                self.tier,
                self._undrafted,
                emitted=self._emitted,
                waited_s=self._waited_s,
                undrafted_passes=self._undrafted,
                agreed=self.agreed,
            )
            self._undrafted, self._emitted, self._waited_s, self.agreed = 0, 0, 0.0, 0
        return self._edge

    def passed(self, draft: Draft, num_scored: int, path: Sequence[int], num_new: int, drafters: Sequence[str] = ()) -> None:
        """A pass scored the first nodes of a draft, found those of ``path`` right, and gave ``num_new`` tokens.

        ``drafters`` names the drafter inside the tier that guessed a node, "" for the tier below; empty if that guessed all.
        The pass itself counts for the tier below, as do guesses of one that was left; for a drafter here if there is neither.
        """
        if not num_scored:
            self._undrafted += 1
            self._emitted += num_new
            return
        names, ranks, depths = drafters or ("",) * num_scored, draft.ranks, draft.depths
        guessed = {*names[:num_scored]}
        pass_of = "" if self._edge.drafter or "" in guessed else min(guessed)
        for name in sorted({pass_of, *guessed}):
            nodes, right = ([node for node in some if names[node] == name] for some in (range(num_scored), path))
            part = Edge(
                name or self._edge.drafter,
                self.tier,
                int(name == pass_of),
                len(nodes),
                len(right),
                num_new if name == pass_of else 0,
                accepted_by_position=_counted([depths[node] for node in right], MAX_POSITIONS),
                proposed_by_position=_counted([depths[node] for node in nodes], MAX_POSITIONS),
                accepted_by_rank=_counted([ranks[node] for node in right], MAX_RANKS),
                proposed_by_rank=_counted([ranks[node] for node in nodes], MAX_RANKS),
            )
            if name:
                _add(self._past, part)
            else:
                self._edge += part

    def corrected(self) -> None:
        """The verifier says another token than the drafter did."""
        self._edge += Edge(self._edge.drafter, self.tier, corrected=1)

    def prepared(self, num_tokens: int) -> None:
        """The drafter had written so many tokens after a correction before it heard of it."""
        self._edge += Edge(self._edge.drafter, self.tier, prefetched=1, prefetched_tokens=num_tokens)

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def heard(self, edges: tuple[Edge, ...]) -> None:
        """The drafter tells totals of its own, unless it was overtaken by itself."""
        if sum(edge.passes for edge in edges) > sum(edge.passes for edge in self.below):
            self.below = edges

    def change_drafter(self, drafter: str) -> None:
        """Another drafter from now on, or none."""
        for edge in (self.edge, *self.below):
            _add(self._past, edge)
        self._edge, self.below = Edge(drafter, self.tier), ()

    @property
    def all(self) -> tuple[Edge, ...]:
        """Totals per edge, this tier's first."""
        totals = dict(self._past)
        for edge in (self.edge, *self.below):
            _add(totals, edge)
        return tuple(totals.values())


def _counted(values: Sequence[int], size: int) -> tuple[int, ...]:
    """How many are 0, 1, ...; those beyond the last count as nothing."""
    if not values:
        return ()
    counts = [0] * min(size, max(values) + 1)
    for value in values:
        if value < size:
            counts[value] += 1
    return tuple(counts)


def _add(totals: dict[tuple[str, str], Edge], edge: Edge) -> None:
    """Add to the totals, leaving out edges on which nothing happened."""
    if edge.passes or edge.proposed or edge.waited_s:
        key = (edge.drafter, edge.verifier)
        totals[key] = totals[key] + edge if key in totals else edge

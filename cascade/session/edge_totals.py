"""What a session counts of its edge, and what it has heard of those below, over every drafter that it ever had."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from cascade.draft import Draft
from cascade.messages import MAX_POSITIONS, MAX_RANKS, Edge, add_edges


@dataclass(slots=True)
class Counts:
    """The numbers of an `Edge` under its names, counted in place."""

    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    waited_s: float = 0.0
    corrected: int = 0
    prefetched: int = 0
    prefetched_tokens: int = 0
    undrafted_passes: int = 0
    agreed: int = 0
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_POSITIONS)
    proposed_by_position: list[int] = field(default_factory=lambda: [0] * MAX_POSITIONS)
    accepted_by_rank: list[int] = field(default_factory=lambda: [0] * MAX_RANKS)
    proposed_by_rank: list[int] = field(default_factory=lambda: [0] * MAX_RANKS)

    def edge(self, drafter: str, verifier: str) -> Edge:
        counts: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        lists = {name: _trimmed(value) for name, value in counts.items() if isinstance(value, list)}
        return Edge(drafter, verifier, **counts | lists)


def _trimmed(counts: list[int]) -> tuple[int, ...]:
    """Up to the last that is not 0."""
    size = len(counts)
    while size and not counts[size - 1]:
        size -= 1
    return tuple(counts[:size])


Passed: TypeAlias = tuple[Draft, int, Sequence[int], int, Sequence[str]]  # what `EdgeTotals.passed` is told


class EdgeTotals:
    """Totals of the edge to the verifier ``tier`` and of those below it."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._drafter = ""  # the tier below, "" for none
        self._by_drafter: defaultdict[str, Counts] = defaultdict(Counts)
        self.current = self._by_drafter[""]  # the tier below's
        self._below: tuple[Edge, ...] = ()  # what the tier below has told of the edges below it
        self._below_past: dict[tuple[str, str], Edge] = {}  # the same of tiers that drafted before
        self._passed: list[Passed] = []  # not counted yet

    def passed(self, draft: Draft, num_scored: int, path: Sequence[int], num_new: int, drafters: Sequence[str] = ()) -> None:
        """A pass scored the first nodes of a draft, accepted those of ``path``, and gave ``num_new`` tokens. See `settle`.

        ``drafters`` names the drafter inside the tier that guessed a node, "" for the tier below; empty if that guessed all.
        The pass itself counts for the tier below; without one for a drafter inside, if there is any.
        """
        self._passed.append((draft, num_scored, path, num_new, drafters))

    def settle(self) -> None:
        """Count the passes since the last call."""
        for passed in self._passed:
            self._count(*passed)
        self._passed.clear()

    def _count(self, draft: Draft, num_scored: int, path: Sequence[int], num_new: int, drafters: Sequence[str]) -> None:
        current = whose = self.current
        if not num_scored:
            current.undrafted_passes += 1
        else:
            names = drafters[:num_scored]
            if names and not self._drafter and "" not in names:
                whose = self._of(min(names))
            depths, ranks = draft.depths, draft.ranks
            for node in range(num_scored):
                counts = self._of(names[node]) if names else current
                counts.proposed += 1
                _count(counts.proposed_by_position, depths[node])
                _count(counts.proposed_by_rank, ranks[node])
            for node in path:
                counts = self._of(names[node]) if names else current
                counts.accepted += 1
                _count(counts.accepted_by_position, depths[node])
                _count(counts.accepted_by_rank, ranks[node])
        whose.passes += 1
        whose.emitted += num_new

    def _of(self, drafter: str) -> Counts:
        """Those of a drafter inside the tier; "" is the tier below."""
        return self._by_drafter[drafter] if drafter else self.current

    def prepared(self, num_tokens: int) -> None:
        """The drafter had written so many tokens after a correction before it heard of it."""
        self.current.prefetched += 1
        self.current.prefetched_tokens += num_tokens

    def heard(self, edges: tuple[Edge, ...]) -> None:
        """The tier below tells its totals; older ones, which were overtaken, are ignored."""
        if edges and sum(edge.passes for edge in edges) > sum(edge.passes for edge in self._below):
            self._below = edges

    def change_drafter(self, drafter: str) -> None:
        """Another tier below from now on, or none."""
        self.settle()
        self._below_past = add_edges(self._below_past, self._below)
        self._drafter, self._below = drafter, ()
        self.current = self._by_drafter[drafter]

    @property
    def all(self) -> tuple[Edge, ...]:
        """Totals per edge, this tier's first. Edges on which nothing happened are left out."""
        self.settle()
        own = (
            counts.edge(drafter, self._tier)
            for drafter, counts in self._by_drafter.items()
            if counts.passes or counts.proposed or counts.waited_s
        )
        return (*own, *add_edges(self._below_past, self._below).values())


def _count(counts: list[int], at: int) -> None:
    """One more there; what is beyond the last counts as nothing."""
    if at < len(counts):
        counts[at] += 1

"""The guesses after a session's text, by the tier below and by drafters inside the tier, and how good they were so far.

Totals are of the session's edge and of the edges below it, over every drafter that it ever had.
"""

from collections.abc import Sequence, Set
from functools import lru_cache
from typing import NamedTuple

from cascade.draft import NO_DRAFT, Draft, num_same
from cascade.messages import MAX_POSITIONS, MAX_RANKS, Edge, Proposal, add_edges
from cascade.planner.acceptance import Calibration, DraftStats

MAX_NODES = 64  # nodes of a draft at most


class Hint(NamedTuple):
    """What one drafter inside the tier guesses."""

    drafter: str
    calibration: Calibration  # how likely its guesses are right
    draft: Draft


class Pool(NamedTuple):
    """All guesses after a text as one tree, the nodes of the tier below first."""

    draft: Draft
    chances: tuple[float, ...]  # for each node, the chance that the text takes its path
    drafters: tuple[str, ...] = ()  # for each node the drafter inside the tier if only that guesses it; empty without hints


def pooled(draft: Draft, calibration: Calibration, hints: Sequence[Hint]) -> Pool:
    """The union of a draft and hints. A node that several drafters guess gets the best of their chances."""
    if not hints:
        return Pool(draft, calibration.chances(draft))
    if not draft.tokens and len(hints) == 1:
        [hint] = hints
        return Pool(hint.draft, hint.calibration.chances(hint.draft), (hint.drafter,) * len(hint.draft.tokens))
    chances = [*calibration.chances(draft)]
    drafters = [""] * len(draft)
    for hint in hints:
        draft, places = draft.union(hint.draft)
        for chance, place in zip(hint.calibration.chances(hint.draft), places, strict=True):
            if place < len(chances):
                chances[place] = max(chances[place], chance)
            else:
                chances.append(chance)
                drafters.append(hint.drafter)
    return Pool(draft, tuple(chances), tuple(drafters))


def usable_nodes(pool: Pool, depth: int, ends: Set[int], most: int) -> tuple[Sequence[int], Sequence[float]]:
    """The likeliest ``most`` nodes, less than ``depth`` deep, that a pass can use, in ascending order; and their chances.

    A node never comes without its parent. An ending token is compared but never read, since nothing comes after it.
    """
    draft, chances, _ = pool
    tokens = draft.tokens
    if draft.is_line:
        size = max(0, min(len(tokens), depth, most))
        if not ends.isdisjoint(tokens[:size]):
            size = next(node for node in range(size) if tokens[node] in ends)
        return range(size), chances[:size]
    nodes: Sequence[int] = range(len(tokens))
    if depth < len(tokens) or not ends.isdisjoint(tokens):
        depths, usable = draft.depths, {-1}
        for node in nodes:
            if depths[node] < depth and draft.parents[node] in usable and tokens[node] not in ends:
                usable.add(node)
        nodes = sorted(usable)[1:]
        chances = tuple([chances[node] for node in nodes])
    if len(nodes) > most:
        places, chances = _likeliest(chances, max(0, most))
        nodes = places if isinstance(nodes, range) else [nodes[place] for place in places]
    return nodes, chances


@lru_cache(2**10)  # many drafts of a pass are equal
def _likeliest(chances: tuple[float, ...], most: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Places of the greatest chances, in ascending order, and the chances; of equal ones the first, so parents come along."""
    places = sorted(sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:most])
    return tuple(places), tuple([chances[place] for place in places])


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


class Guesses:
    """Guesses of token ids below ``vocab_size``, at most ``window`` positions ahead; ``totals`` counts how many are right."""

    def __init__(self, vocab_size: int, window: int, totals: EdgeTotals) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._totals = totals
        self.draft = NO_DRAFT  # the tier below's
        self.hints: tuple[Hint, ...] = ()  # what drafters inside the tier guess
        self.stats = DraftStats()  # the tier below's
        self.calibration = Calibration()  # how likely its guesses are right
        self.complete = False  # the tier below drafts no more until the next commit
        self._unprepared: int | None = None  # position of a correction after which there is no guess yet
        self._pool: tuple[Draft, tuple[Hint, ...], Pool] | None = None  # the latest pool, and what it was made of
        self._unlearnt: list[tuple[Calibration, Draft, Sequence[int]]] = []  # guesses, and how the text continued

    @property
    def pool(self) -> Pool:
        latest = self._pool
        if latest is None or latest[0] is not self.draft or latest[1] is not self.hints:
            latest = self._pool = self.draft, self.hints, pooled(self.draft, self.calibration, self.hints)
        return latest[2]

    def change_drafter(self) -> None:
        """Another tier drafts from now on, or none."""
        self.stats, self._unprepared, self.complete = DraftStats(), None, False

    def advance(self, start: int, new: Sequence[int], path: Sequence[int]) -> None:
        """The text continues with ``new`` at ``start``: count which guesses were right, and keep the guesses after them.

        ``path`` are the nodes of the draft with the same tokens, as far as there are any.
        """
        draft, self._unprepared, self.complete = self.draft, None, False
        for hint in self.hints:
            self._unlearnt.append((hint.calibration, hint.draft, new))
        self.hints = ()
        if not draft.tokens:
            self.stats.passed(0, 0, len(new))
            return
        self._unlearnt.append((self.calibration, draft, new))
        trunk = draft.trunk.tokens
        num_right = num_same(trunk, new)
        self.stats.passed(len(trunk), num_right, len(new))
        self._totals.current.agreed += num_right
        if num_right < min(len(trunk), len(new)):  # the tier below was wrong there
            self._totals.current.corrected += 1
            if len(path) > num_right and (num_prepared := draft.below(path[num_right]).height):
                self._totals.prepared(num_prepared)
            else:
                self._unprepared = start + num_right
        self.draft = draft.below(path[-1]) if len(path) == len(new) else NO_DRAFT

    def settle(self) -> None:
        """Learn which guesses were right since the last call."""
        for calibration, draft, new in self._unlearnt:
            calibration.learn(draft, new, draft.find(new))
        self._unlearnt.clear()

    def cut(self, rest: Sequence[int] | None) -> None:
        """The tier above has changed the text. If it only extended the text, it did so by ``rest``; else that is ``None``."""
        path = self.draft.find(rest) if rest is not None else []
        self.draft = self.draft.below(path[-1]) if rest and len(path) == len(rest) else NO_DRAFT
        self.hints, self.complete = (), False
        self.stats.interrupt()

    def receive(self, proposal: Proposal, text: Sequence[int]) -> None:
        """Take guesses from below; ignored if they do not continue ``text``. Where they contradict older ones, they win."""
        if not 0 <= len(text) - proposal.start < len(proposal.draft):
            return
        behind = text[proposal.start :]
        path = proposal.draft.find(behind)
        if len(path) < len(behind):
            return
        rest = proposal.draft.below(path[-1] if path else -1)
        self.complete = proposal.rests
        if self._unprepared is not None and proposal.start <= self._unprepared and rest:
            self._totals.prepared(rest.height)
            self._unprepared = None
        fresh = rest.fitting(self._vocab_size, self._window, MAX_NODES)
        new, old = fresh.trunk.tokens, self.draft.trunk.tokens
        agrees = new[: len(old)] == old[: len(new)]
        self.draft = fresh.union(self.draft)[0].first(MAX_NODES) if agrees else fresh

    def hint(self, hints: Sequence[Hint]) -> None:
        """Replace the guesses of drafters inside the tier by those after the present text."""
        self.hints = ()
        for hint in hints:
            if (draft := hint.draft.fitting(self._vocab_size, MAX_NODES, MAX_NODES)).tokens:
                self.hints += (hint if draft is hint.draft else hint._replace(draft=draft),)

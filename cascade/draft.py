"""Guesses after a text, as tiers and drafters exchange them."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress, count
from operator import ne


def num_same(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning of two texts."""
    size = min(len(first), len(second))
    if tuple(first[:size]) == tuple(second[:size]):
        return size
    return next(compress(count(), map(ne, first, second)), size)


@dataclass(slots=True, unsafe_hash=True)
class Draft:
    """Guesses after a text: a tree of tokens with its root at the text's end. A line is a tree with one branch.

    Every node comes after its parent, so the first nodes are a draft, too. Likelier children of a node come first: the
    drafter's own token, then its runner-ups. A draft is never changed. It is not frozen, because every session makes some for
    every pass, and frozen ones take twice as long.
    """

    tokens: tuple[int, ...] = ()  # one a node
    origins: bytes = b""  # one a node, see `origin`
    confidences: bytes = b""  # one a node: its gap, see `cascade.planner.acceptance`, 0 if unknown; or empty
    parents: tuple[int, ...] = ()  # the parent of each node, -1 for the text; empty for a line, whose parents are -1, 0, 1, ...

    trunk_size: int = field(init=False, repr=False, compare=False)  # length of the line that the first nodes form

    def __post_init__(self) -> None:
        size = self.trunk_size = len(self.tokens)
        assert len(self.origins) == size
        assert len(self.confidences) in (0, size)
        if self.parents:
            assert len(self.parents) == size
            self.trunk_size = _trunk_size(self.parents)
            if self.trunk_size == size:
                self.parents = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_line(self) -> bool:
        return not self.parents

    def parent(self, node: int) -> int:
        return self.parents[node] if self.parents else node - 1

    def children(self, node: int) -> Iterable[int]:
        """Children of ``node``; -1 is the text."""
        if not self.parents:
            return (node + 1,) if node + 1 < len(self.tokens) else ()
        return (child for child in range(node + 1, len(self.parents)) if self.parents[child] == node)

    @property
    def ranks(self) -> Sequence[int]:
        """For each node, how many of its siblings come before it."""
        trunk = self.trunk_size
        ranks = bytearray(trunk)
        siblings: dict[int, int] = {}  # by node: the index of its latest child outside the trunk
        for parent in self.parents[trunk:]:
            siblings[parent] = siblings.get(parent, -1) + 1
            ranks.append(siblings[parent] + (parent + 1 < trunk))
        return ranks

    @property
    def depths(self) -> Sequence[int]:
        """For each node, how many nodes lie between the text and it."""
        if not self.parents:
            return range(len(self.tokens))
        depths = list(range(self.trunk_size))
        for parent in self.parents[self.trunk_size :]:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def height(self) -> int:
        """Length of the longest path."""
        return len(self.tokens) if not self.parents else max(self.depths) + 1

    def walk(self, own: Sequence[int], ends: Set[int] = frozenset()) -> tuple[list[int], Sequence[int]]:
        """Follow own tokens through the tree; returns the new tokens of the text, and the nodes with these tokens.

        ``own[0]`` is the own token after the text and ``own[1 + node]`` the one after a node, as far as nodes are scored. There
        may be no node for the last new token. An ending token (``ends``) is the last new token.
        """
        same = num_same(self.tokens[: self.trunk_size], own)
        new = list(own[: same + 1])
        if not ends.isdisjoint(new):
            del new[1 + next(place for place, token in enumerate(new) if token in ends) :]
            same = min(same, len(new))
        if not self.parents or len(new) == same:
            return new, range(same)
        path: list[int] = []
        node = self._child(same - 1, new[same])
        while node is not None:
            path.append(node)
            if new[-1] in ends or node + 1 >= len(own):
                break
            new.append(own[node + 1])
            node = self._child(node, new[-1])
        return new, [*range(same), *path] if path else range(same)

    def find(self, tokens: Sequence[int]) -> Sequence[int]:
        """The path whose tokens are ``tokens``, as far as there is one."""
        same = num_same(self.tokens[: self.trunk_size], tokens)
        if not self.parents or same == len(tokens) or (node := self._child(same - 1, tokens[same])) is None:
            return range(same)
        path = [*range(same), node]
        for token in tokens[same + 1 :]:
            if (node := self._child(node, token)) is None:
                break
            path.append(node)
        return path

    @property
    def trunk(self) -> "Draft":
        """The line that the first nodes form, each the parent of the next."""
        return self.first(self.trunk_size)

    def first(self, size: int) -> "Draft":
        if size >= len(self.tokens):
            return self
        if not size:
            return NO_DRAFT
        parents = self.parents[:size] if size > self.trunk_size else ()
        return Draft(self.tokens[:size], self.origins[:size], self.confidences[:size], parents)

    def pick(self, nodes: Sequence[int]) -> "Draft":
        """The draft of only ``nodes``, which are in ascending order and include their parents."""
        size = len(nodes)
        if size == 0 or nodes[-1] == size - 1:
            return self.first(size)
        trunk = bisect_left(nodes, self.trunk_size)  # how many of them are in the trunk
        rest = nodes[trunk:]
        places = {node: place for place, node in enumerate(rest, trunk)}
        return Draft(
            self.tokens[:trunk] + tuple([self.tokens[node] for node in rest]),
            self.origins[:trunk] + bytes([self.origins[node] for node in rest]),
            self.confidences[:trunk] + bytes([self.confidences[node] for node in rest]) if self.confidences else b"",
            self.parents[:trunk] + tuple([places.get(parent, parent) for parent in map(self.parents.__getitem__, rest)]),
        )

    def fitting(self, vocab_size: int, depth: int, size: int) -> "Draft":
        """The part of the first ``size`` nodes and ``depth`` levels whose paths have only ids below ``vocab_size``."""
        tokens = self.tokens
        fits = len(tokens) <= size and (len(tokens) <= depth or self.height <= depth)
        if fits and (not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size):
            return self
        if self.is_line:
            tokens = tokens[:depth]
            return self.first(next((node for node, token in enumerate(tokens) if not 0 <= token < vocab_size), len(tokens)))
        depths, kept = self.depths, {-1}
        for node in range(min(size, len(self))):
            if self.parents[node] in kept and depths[node] < depth and 0 <= self.tokens[node] < vocab_size:
                kept.add(node)
        return self.pick(sorted(kept)[1:])

    def below(self, node: int) -> "Draft":
        """The guesses after ``node``; -1 is the text."""
        if node < 0:
            return self
        if not self.parents:
            rest = node + 1
            if rest == len(self.tokens):
                return NO_DRAFT
            return Draft(self.tokens[rest:], self.origins[rest:], self.confidences[rest:])
        places = {node: -1}
        for child in range(node + 1, len(self.tokens)):
            if self.parents[child] in places:
                places[child] = len(places) - 1
        nodes = list(places)[1:]
        return Draft(
            tuple([self.tokens[child] for child in nodes]),
            bytes([self.origins[child] for child in nodes]),
            bytes([self.confidences[child] for child in nodes]) if self.confidences else b"",
            tuple([places[self.parents[child]] for child in nodes]),
        )

    def union(self, other: "Draft") -> tuple["Draft", Sequence[int]]:
        """Both trees in one, this one's nodes first; and for each node of ``other`` its node in the union.

        Nodes of both have this one's origins and confidences.
        """
        if not self.tokens:
            return other, range(len(other))
        if self.is_line and other.is_line and self.tokens[: len(other.tokens)] == other.tokens:
            return self, range(len(other))
        places = {(self.parent(node), token): node for node, token in enumerate(self.tokens)}
        tokens, origins, parents = list(self.tokens), bytearray(self.origins), [self.parent(i) for i in range(len(self))]
        confidences = bytearray(self.confidences or bytes(len(self)))
        there = {-1: -1}  # by node of the other draft: its place in the union
        for node, token in enumerate(other.tokens):
            at = there[other.parent(node)]
            if (at, token) not in places:
                places[at, token] = len(tokens)
                tokens.append(token)
                origins.append(other.origins[node])
                confidences.append(other.confidences[node] if other.confidences else 0)
                parents.append(at)
            there[node] = places[at, token]
        sent = bytes(confidences) if self.confidences or other.confidences else b""
        return Draft(tuple(tokens), bytes(origins), sent, tuple(parents)), list(there.values())[1:]

    def _child(self, node: int, token: int) -> int | None:
        """The child of ``node`` outside the trunk that is ``token``, if there is one."""
        for child in range(max(node + 1, self.trunk_size), len(self.parents)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None


@lru_cache(2**12)  # many trees have the same shape
def _trunk_size(parents: tuple[int, ...]) -> int:
    return next(compress(count(), map(ne, parents, count(-1))), len(parents))


NO_DRAFT = Draft()

"""Scores drafts that are trees in passes that support only lines: each branch is a row over a fork of its session's store.

A tree is split into lines: the first child of a node continues its line, each other child begins a new one. The *trunk*, the
line that begins at the text, is a row over the store itself. Another line is a row over a fork. It rereads tokens between the
fork and its first node:

- if forks see what the store's row writes in the same pass: none, or the nodes of the branch that it leaves;
- if own tokens depend on the path (`SamplingParams.shaped`): also the last token of the text, so that it is an ordinary row;
- if stores are tables of blocks: all tokens of the session's row, since the last block of a fork is its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cascade.draft import Draft
from cascade.engine.sampling.state import report
from cascade.errors import ModelError
from cascade.scorer import MAX_FORKED, Row, RunnerUp, Scored

MAX_READ_AGAIN = 8  # tokens that a branch may reread; with more, such as a prompt, only the trunk is scored


class Line(NamedTuple):
    """A row of the pass, and the nodes after which its last own tokens come; -1 is the text."""

    row: Row
    nodes: Sequence[int]


class Tree:
    """One row of a pass as lines. `free` must be called at the end, also after errors."""

    def __init__(self, row: Row, *, shares_pass: bool) -> None:
        """``shares_pass``: forks see what their store's row writes in the same pass."""
        self.lines: list[Line] = []
        self.followed = 0  # the line whose nodes own tokens accept furthest
        self.reported: list[Sequence[int]] = []  # own tokens by line; empty for lines that are not followed
        self._row = row
        self._shares_pass = shares_pass
        self._again = len(row.tokens) if not shares_pass else int(row.state is not None)  # tokens that branches reread
        self._forks: dict[int, Any] = {}  # by line
        self._depths = {-1: 0}  # the depth of each of the trunk's nodes

    def grow(self) -> list[Line]:
        """Make the lines and their forks; nodes without memory for a fork are left out."""
        row = self._row
        if row.draft.is_line:
            self.lines.append(Line(row, ()))
            return self.lines
        trunk, *branches = self._split()
        self._depths |= {node: depth for depth, node in enumerate(trunk, 1)}
        self.lines.append(Line(replace(row, draft=self._draft(trunk)), (-1, *trunk)))
        for nodes in branches:
            try:
                self.lines.append(self._branch(nodes))
            except ModelError:
                break
        return self.lines

    def gather(self, scored: Sequence[Scored]) -> Scored:
        """Join the results of the lines in the order of the tree's nodes. Afterwards the store holds the path of own tokens."""
        row = self._row
        if row.draft.is_line or row.num_own != 1:
            self.reported = [scored[0].own]
            return scored[0]
        results: dict[int, tuple[int, Sequence[RunnerUp]]] = {}
        for line, result in zip(self.lines, scored, strict=True):
            pairs = list(zip(result.own, result.runner_ups or [()] * len(result.own), strict=True))
            results.update(zip(line.nodes, pairs[line.row.num_scored - len(line.nodes) :], strict=False))
        nodes = list(takewhile(results.__contains__, range(-1, len(row.draft))))
        others = [results[node][1] for node in nodes] if row.runner_ups else ()
        whole = Scored([results[node][0] for node in nodes], runner_ups=others)
        self._follow(whole.own)
        self.reported = [()] * len(self.lines)
        self.reported[self.followed] = scored[self.followed].own
        return whole

    def free(self) -> None:
        """Free the forks that own tokens do not follow."""
        for fork in self._forks.values():
            fork.free()
        self._forks.clear()

    def _split(self) -> list[list[int]]:
        """Nodes by line, the trunk first, up to the first node that would make a branch too long."""
        draft = self._row.draft
        lines: list[list[int]] = [[]]
        ends, read = {-1: 0}, {-1: self._again}  # lines by their last nodes; tokens of a branch's row up to a node
        forks = self._row.num_own == 1 and self._again <= MAX_READ_AGAIN
        for node in range(len(draft)):
            parent = draft.parent(node)
            line = ends.pop(parent, len(lines))
            read[node] = read[parent] + 1 if line or self._again else 0
            if line and (not forks or read[node] > MAX_FORKED):
                break
            if line == len(lines):
                lines.append([])
            lines[line].append(node)
            ends[node] = line
        return lines

    def _branch(self, nodes: Sequence[int]) -> Line:
        row, again = self._row, self._again
        path, at = [], nodes[-1]
        while at >= 0 and (again or at not in self._depths):
            path.append(at)
            at = row.draft.parent(at)
        draft = self._draft(path[::-1])
        start = row.start + len(row.tokens) + self._depths[at] - again
        fork = self._forks[len(self.lines)] = row.cache.fork(start)
        if not self._shares_pass:
            fork.reserve(start + again + len(draft))  # now, while the branch can still be left out
        tokens = row.tokens[len(row.tokens) - again :]
        alike: dict[str, Any] = {"runner_ups": row.runner_ups, "guesses": min(0, row.guesses)}
        if row.state is None:
            fed = Row(fork, start, [*tokens, *draft.tokens], len(nodes), row.params, **alike)
        else:
            fed = Row(fork, start, tokens, 1, row.params, row.state, draft=draft, **alike)
        return Line(fed, nodes)

    def _draft(self, path: Sequence[int]) -> Draft:
        return Draft(tuple(self._row.draft.tokens[node] for node in path), bytes(len(path)))

    def _follow(self, own: Sequence[int]) -> None:
        """Move the accepted branch's keys and values into the session's store."""
        new, path = self._row.draft.walk(own)
        last = path[len(new) - 2] if len(new) > 1 else -1  # the last new token is not in a store yet
        self.followed = next(place for place, line in enumerate(self.lines) if last in line.nodes)
        if self.followed:
            self._row.cache.join(self._forks.pop(self.followed))


@torch.inference_mode()
def run_trees(rows: Sequence[Row], run: Callable[..., list[Scored]], *, shares_pass: bool) -> list[Scored]:
    """Score rows whose drafts are trees with ``run``, which takes lines: a row for each branch.

    ``run`` takes a function like `report`, too; log-probabilities are those of the line that own tokens follow. With
    ``shares_pass`` branches are rows of the same pass as what they branch from.
    """
    trees = [Tree(row, shares_pass=shares_pass) for row in rows]
    if not shares_pass:
        for row in rows:  # before forks take the memory that is left; a store itself holds one path, as tiers count it
            row.cache.prepare(row.start, row.start + len(row.tokens) + row.draft.height)
    seen: list[tuple[Tensor, Sequence[Row]]] = []
    try:
        lines = [line.row for tree in trees for line in tree.grow()]
        results = iter(run(lines, lambda logits, rows, own: seen.append((logits, rows))))
        scored = [tree.gather(list(islice(results, len(tree.lines)))) for tree in trees]
    finally:
        for tree in trees:
            tree.free()
    own = [tokens for tree in trees for tokens in tree.reported]
    for logits, seen_rows in seen:
        report(logits, seen_rows, own)
    return scored

"""Stores that fork and join under any schedule, against a store for each text: what any way to hold keys and values must keep.

Texts are told by picks: which of `TEXTS` texts the token at each position is of.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cascade.scorer import MAX_FORKED

TEXTS = 5  # forks go on with one of them, as their base may, or wrongly with the last
WRONG = TEXTS - 1


class Piece(NamedTuple):
    """A row of a pass."""

    store: Any
    start: int
    picks: Sequence[int]  # from ``start`` on


Score = Callable[[Sequence[Piece]], Sequence[Tensor]]  # a pass: what is said of each piece, by position


@dataclass
class Branch:
    """A store, and the text that is written to it."""

    store: Any
    picks: list[int]
    expected: Tensor  # of the whole text
    position: int = 0  # of its first own token
    end: int = 0  # of what it holds and is right

    def piece(self, rng: random.Random, sizes: Sequence[int], least: int, most: int) -> tuple[Piece, Tensor] | None:
        """Its next row, from ``least`` on or after all, with a wrong end, and what has to be said; it ends before ``most``."""
        start = self.end if rng.random() < 0.7 else rng.randint(min(least, self.end), self.end)
        size = min(rng.choice(sizes), most - start)
        if size < 1:
            return None
        self.end = start + size
        wrong = rng.randint(0, min(3, most - self.end))
        return Piece(self.store, start, self.picks[start : self.end] + [WRONG] * wrong), self.expected[start : self.end]


@dataclass
class Session:
    """One base and its forks, driven at random."""

    rng: random.Random
    new_store: Callable[[], Any]
    score: Score
    length: int
    base: Branch = field(init=False)
    forks: list[Branch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base = self._branch(self.new_store(), [0] * self.length)

    def _branch(self, store: Any, picks: list[int], position: int = 0) -> Branch:
        """With what a fresh store says of the same text."""
        fresh = self.new_store()
        (expected,) = self.score([Piece(fresh, 0, picks)])
        fresh.free()
        return Branch(store, picks, expected, position, position)

    def check_pass(self) -> None:
        """The base's row and those of some forks, of which some are new, in any order."""
        rng, base = self.rng, self.base
        before = base.end
        forked = max((fork.position for fork in self.forks), default=0)
        pieces = [base.piece(rng, (0, 1, 2, 9, 30), max(forked, before - 9), self.length)]
        if base.end > 1 and len(self.forks) < 4:
            self._fork(rng.randint(max(1, before - 20), base.end))
        for fork in self.forks:
            if rng.random() < 0.8:
                most = min(self.length, fork.position + MAX_FORKED)
                pieces.append(fork.piece(rng, (1, 2, 5, 12), fork.position, most))
        if not (rows := [piece for piece in pieces if piece]):
            return
        rng.shuffle(rows)
        for scores, (piece, wanted) in zip(self.score([piece for piece, _ in rows]), rows, strict=True):
            assert torch.equal(scores[: len(wanted)], wanted), piece

    def _fork(self, position: int) -> None:
        picks = self.base.picks[:position] + [self.rng.randrange(1, WRONG)] * (self.length - position)
        self.forks.append(self._branch(self.base.store.fork(position), picks, position))

    def join(self) -> None:
        """Let the base go on with a fork: those after its position are void."""
        written = [fork for fork in self.forks if fork.end > fork.position]
        if not written:
            return
        chosen = self.rng.choice(written)
        self.base.store.join(chosen.store)
        assert chosen.store.nbytes == 0
        self.base.picks, self.base.expected, self.base.end = chosen.picks, chosen.expected, chosen.end
        self.forks.remove(chosen)
        self.drop([fork for fork in self.forks if fork.position > chosen.position])

    def drop(self, forks: Sequence[Branch]) -> None:
        """Free these."""
        for fork in forks:
            self.forks.remove(fork)
            fork.store.free()
            assert fork.store.nbytes == 0


def check_forks(rng: random.Random, new_store: Callable[[], Any], score: Score, length: int, passes: int = 12) -> None:
    """Rows over a store and its forks say what those over a store for each text say; joined ones are as if recomputed."""
    session = Session(rng, new_store, score, length)
    for _ in range(passes):
        session.check_pass()
        if rng.random() < 0.3:
            session.join()
        elif len(session.forks) == 4:
            session.drop(rng.sample(session.forks, 2))
    session.drop(list(session.forks))
    session.check_pass()
    session.drop(list(session.forks))
    session.base.store.free()
    assert session.base.store.nbytes == 0

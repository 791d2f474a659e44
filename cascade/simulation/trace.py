"""What the tiers of a simulated cascade say at each position of a text, and a model that says it.

`Trace.drawn` makes it up from an acceptance per edge. Real agreement comes in bursts: independent draws overrate short windows
and underrate long ones.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cascade.scorer import Row, RunnerUp, Scored
from cascade.splitmix import GOLDEN

STRIDE = 7919  # positions between the parts of a trace that requests of neighbouring seeds read
WRONG, FADE = 0.62, 0.95  # see `Closeness`
# chance that a tier's first runner-up, and its second, is what the next tier says, if that is another token
ABOVE = (0.58, 0.18)
BELOW = (0.68, 0.17)  # the same of what the tier below says
CLOSE = (0.5, 0.13)  # the same of the next tier's own runner-up, if both say the same
_NOBODY = 1 << 20  # what no tier says
_LOT_BITS = 40


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of own tokens, on the true text, that a tier has in common with another; tiers go bottom to top.

    ``by_next[i]`` is with the tier above tier ``i``, ``by_full[i]`` with the full one; their last entries are the same number.
    Where ``by_full`` is not given it is the product of the edges in between, which is what unrelated errors give: measured
    pairs lie within 0.05 of it. Tiers that are no neighbours and not the full one follow: a tier depends on those above
    only through the next one.
    """

    by_next: tuple[float, ...]
    by_full: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert not self.by_full or len(self.by_full) == len(self.by_next)
        assert all(0 <= share <= 1 for share in (*self.by_next, *self.by_full))

    @property
    def shares(self) -> tuple[tuple[float, float], ...]:
        """Of each lower tier: acceptance by the next, by the full one."""
        product = tuple(itertools.accumulate(reversed(self.by_next), lambda a, b: a * b))[::-1]
        return tuple(zip(self.by_next, self.by_full or product, strict=True))


@dataclass(frozen=True, slots=True)
class Trace:
    """What each tier says at each position of the true text.

    ``says[p][i]`` stands for the token of tier ``i``, bottom to top: 0 for the full tier's, equal numbers for equal tokens.
    """

    says: tuple[tuple[int, ...], ...]
    beside: tuple[tuple[tuple[RunnerUp, ...], ...], ...] = ()  # likewise, what each of them nearly said, if that is known

    @classmethod
    def drawn(cls, acceptance: Acceptance, length: int, seed: int = 0, burst: float = 0.0) -> "Trace":
        """Made up: with probability ``burst`` a position is like the one before, else an independent draw."""
        lots = random.Random(seed)
        says: list[tuple[int, ...]] = []
        for _ in range(length):
            repeat = says and lots.random() < burst
            says.append(says[-1] if repeat else _draw(acceptance, lots.random))
        closeness = [Closeness.of(share) for share in acceptance.by_next]
        return cls(tuple(says), tuple(_close(at, closeness, lots.random) for at in says))

    def only(self, tiers: Sequence[int]) -> "Trace":
        """The same text for some of the tiers, by index, the last being the full one."""
        says = tuple(tuple(at[i] for i in tiers) for at in self.says)
        return Trace(says, tuple(tuple(at[i] for i in tiers) for at in self.beside))

    def accepted(self, drafter: int, verifier: int) -> float:
        """Share of positions where two tiers say the same."""
        return sum(at[drafter] == at[verifier] for at in self.says) / len(self.says)


@dataclass(frozen=True, slots=True)
class Closeness:
    """How close the perturbed logits of a tier's likeliest tokens are where it agrees with the next one, and where not.

    Of an own token of gap ``g`` the chance to be wrong is `WRONG` ``* exp(-`` `FADE` ``* g)``: so it was measured on the
    demonstration family, at any temperature. Gaps fall off with a scale that gives the tier's share of wrong ones.
    """

    scale: float  # nats

    @classmethod
    def of(cls, accepted: float) -> "Closeness":
        return cls(max(0.01, (WRONG / max(1e-3, 1 - accepted) - 1) / FADE))

    def beside(self, said: int, above: int, close: int, below: int, lot: Callable[[], float]) -> tuple[RunnerUp, ...]:
        """The runner-ups of a token; the next tier says ``above`` and nearly said ``close``, the one below says ``below``."""
        gap = self.gap(lot(), right=said == above)
        far = gap - math.log(1 - lot()) * self.scale
        found: list[int | None] = [None, None]
        wanted = ((above, ABOVE) if said != above else (close, CLOSE), (below, BELOW))
        for token, (first, second) in wanted:
            draw = lot()
            place = 0 if draw < first else 1 if draw < first + second else 2
            if token != said and place < 2 and found[place] is None and token not in found:
                found[place] = token
        return tuple(
            RunnerUp(_NOBODY + 2 * said + place if token is None else token, away)
            for place, (token, away) in enumerate(zip(found, (gap, far), strict=True))
        )

    def gap(self, lot: float, *, right: bool) -> float:
        """Of a token of which it is known whether the next tier says the same."""
        return _gap(self.scale, lot, right)


@lru_cache(1 << 14)  # a toy draws few different lots, and finding a gap takes longer than all else that it does
def _gap(scale: float, lot: float, right: bool) -> float:
    wrong_rate = 1 / scale + FADE
    if not right:
        return -math.log(1 - lot) / wrong_rate
    wrong = WRONG / (scale * wrong_rate)
    low, high = 0.0, 60.0 * scale
    for _ in range(30):
        gap = (low + high) / 2
        below = 1 - math.exp(-gap / scale) - wrong * (1 - math.exp(-gap * wrong_rate))
        low, high = (gap, high) if below < lot * (1 - wrong) else (low, gap)
    return low


def _close(says: Sequence[int], closeness: Sequence[Closeness], lot: Callable[[], float]) -> tuple[tuple[RunnerUp, ...], ...]:
    """The runner-ups of all tiers at one position; the full tier's are of no interest."""
    found: list[tuple[RunnerUp, ...]] = [()]
    for i in reversed(range(len(closeness))):
        close = found[0][0].token if found[0] else says[i]
        found.insert(0, closeness[i].beside(says[i], says[i + 1], close, says[i - 1] if i else says[i], lot))
    return tuple(found)


def _draw(acceptance: Acceptance, lot: Callable[[], float]) -> tuple[int, ...]:
    """One position. Of all ways to meet the shares of a tier, the next and the full one, the one in the middle."""
    says = [0]
    above = 1.0  # acceptance of the tier above by the full one
    for level, (by_next, by_full) in reversed(list(enumerate(acceptance.shares))):
        least = max(0.0, by_next + above - 1, by_full + above - 1, (by_next + above + by_full - 1) / 2)
        both = (min(least, by_next, above, by_full) + min(by_next, above, by_full)) / 2  # right, like the tier above
        draw = lot()
        if not says[0]:
            right, same = both / above, 0.0
        else:
            right, same = (by_full - both) / (1 - above), (by_next - both) / (1 - above)
        says.insert(0, 0 if draw < right else says[0] if draw < right + same else 1 + level)
        above = by_full
    return tuple(says)


class TraceModel:
    """The tier ``index`` of a trace as a model: it says what the trace says, and goes on by chance after a wrong token.

    There it agrees with the tier above as often as on the text. True tokens are even and wrong ones odd, so that the last
    token tells whether a text is the true one. A request reads from a place given by its seed.
    """

    vocab_size = 2**62
    context_len = cache_tokens = 2**31
    block = 16

    def __init__(self, trace: Trace, index: int) -> None:
        self._says = trace.says
        self._beside = trace.beside
        self._index = index
        tiers = range(len(trace.says[0]) - 1)
        self._alike = [trace.accepted(i, i + 1) for i in tiers]  # per edge
        self._close = [Closeness.of(share) for share in self._alike]

    def new_cache(self) -> "TraceModel":
        return self  # needs to know nothing but the last token

    def fork(self, position: int) -> "TraceModel":
        return self

    def free(self, *_: Any, **__: Any) -> None:
        """Nothing is kept."""

    reserve = reuse = join = free

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        """Own tokens of each row, see `cascade.scorer.Scorer`."""
        return [self._score(row) for row in rows]

    def _score(self, row: Row) -> Scored:
        seed = row.params.seed or 0
        begin = row.start + len(row.tokens) - row.num_own + 1
        last = [*row.tokens[len(row.tokens) - row.num_own :], *row.draft.tokens]
        places = [*range(begin, begin + row.num_own), *(begin + row.num_own + depth for depth in row.draft.depths)]
        pairs = list(zip(last, places, strict=True))
        own = [self._own(token, place, seed, self._index) for token, place in pairs]
        if not row.runner_ups or self._index == len(self._alike):  # those of the full tier are of no interest
            return Scored(own)
        beside = [self._runner_ups(*pair, seed, said)[: row.runner_ups] for pair, said in zip(pairs, own, strict=True)]
        return Scored(own, runner_ups=beside)

    def _own(self, last: int, position: int, seed: int, index: int) -> int:
        if last % 2:
            return self._astray(last, position, index)
        says = self._says[(position + STRIDE * seed) % len(self._says)][index]
        return _wrong(position, says) if says else 2 * position

    def _astray(self, last: int, position: int, index: int) -> int:
        token = _wrong(last, position)
        for level in range(len(self._alike) - 1, index - 1, -1):
            if _lot(last, position, level) >= self._alike[level]:
                token = _wrong(last, position, level)
        return token

    def _runner_ups(self, last: int, position: int, seed: int, said: int) -> tuple[RunnerUp, ...]:
        if last % 2:
            above = self._astray(last, position, self._index + 1)
            below = self._astray(last, position, self._index - 1) if self._index else said
            lots = iter(_lot(last, position, self._index, number) for number in range(4))
            return self._close[self._index].beside(said, above, said, below, lambda: next(lots))
        beside = self._beside[(position + STRIDE * seed) % len(self._beside)][self._index] if self._beside else ()
        return tuple(RunnerUp(_wrong(position, one) if one else 2 * position, gap) for one, gap in beside)


def _hash(*key: int) -> int:
    """The same in every process: Python salts the hashes of strings, not of integers."""
    value: int = hash(key) * GOLDEN % 2**64
    value = (value ^ value >> 29) * GOLDEN % 2**64
    return value >> 64 - _LOT_BITS


def _lot(*key: int) -> float:
    return float(_hash(*key) / 2**_LOT_BITS)


def _wrong(*key: int) -> int:
    return 2 * _hash(*key) + 1

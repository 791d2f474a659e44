"""Tiers of a toy cascade, which agree as often as they are said to: fakes, for benchmarks of clusters and for tests."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

from cascade.params import SamplingParams
from cascade.scorer import RunnerUp
from cascade.simulation.toy import ToyModel, fold, uniform
from cascade.splitmix import mix

Agreement: TypeAlias = tuple[float, ...]  # shares of own tokens that a tier has in common with the next, from one tier upwards

LEAST_TOKENS = 8  # the smallest vocabulary: a tier says one token, nearly says two more, and each tier above may say others
LOTS = 4096  # different ones
CACHED = 1 << 16  # contexts and positions remembered
# measured on the demonstration family, at any temperature: an own token of gap g is wrong with chance WRONG * exp(-FADE * g)
WRONG, FADE = 0.62, 0.95
# chance that a tier's first runner-up, and its second, is what the next tier says, if that is another token
ABOVE = (0.58, 0.18)
CLOSE = (0.5, 0.13)  # the same of the next tier's own runner-up, if both say the same


class ToyTier(ToyModel):
    """A tier that agrees with the next one in the share ``agreement[0]`` of all contexts, that one with its next by the rest.

    The full tier, of no ``agreement``, says what is drawn by the last ``order`` tokens of its cache, the position and the
    request's seed, at any temperature; a tier below says the same as the next one or another token, by a lot of the same. So
    each tier depends on those above through the next one alone. Runner-ups are as close and as often right as measured.
    Sampling parameters beside the seed are not known: a row with a state fails.
    """

    def __init__(
        self,
        vocab_size: int,
        agreement: Agreement = (),
        *,
        order: int = 3,
        context_len: int = 4096,
        cache_tokens: int = 1 << 20,
    ) -> None:
        assert vocab_size >= LEAST_TOKENS
        assert all(0 <= share <= 1 for share in agreement)
        super().__init__(vocab_size, order, context_len=context_len, cache_tokens=cache_tokens)
        self._agreement = agreement

    def ranked(self, context: tuple[int, ...], position: int, params: SamplingParams, count: int) -> list[RunnerUp]:
        """The own token at ``position`` after ``context``, and at most two runner-ups, each with its gap to the first."""
        key = mix(fold(context, params.seed or 0) ^ position)
        return list(_said(key, self.vocab_size, self._agreement)[:count])

    def logits(self, context: tuple[int, ...]) -> tuple[float, ...]:
        raise NotImplementedError("a toy tier has no logits: it honours a request's seed alone")


@lru_cache(CACHED)
def _said(key: int, vocab_size: int, agreement: Agreement) -> tuple[RunnerUp, ...]:
    """What a tier says and nearly says at the place ``key``; the full tier nearly says nothing."""
    if not agreement:
        return (RunnerUp(mix(key) % vocab_size, 0.0),)
    above, depth = _said(key, vocab_size, agreement[1:]), len(agreement)
    lots, token = lots_of(key, depth), above[0].token
    if next(lots) >= agreement[0]:
        token = (token + 1 + int(next(lots) * (vocab_size - 1))) % vocab_size
    return nearly(token, above, agreement[0], lots, vocab_size)


def nearly(said: int, above: Sequence[RunnerUp], agreed: float, lots: Iterator[float], vocab_size: int) -> tuple[RunnerUp, ...]:
    """The own token ``said`` of a tier and two runner-ups, with gaps, where the next tier says and nearly says ``above``.

    They are drawn by ``lots``, as they are of a tier that agrees with the next one in the share ``agreed``.
    """
    next_ = above[0].token
    gap = _gap(scale := _scale(agreed), (int(100 * next(lots)) + 0.5) / 100, said == next_)
    gaps = gap, gap - math.log(1 - next(lots)) * scale
    close = above[1].token if len(above) > 1 else said
    token, (first, second) = (next_, ABOVE) if said != next_ else (close, CLOSE)
    lot = next(lots)
    others = (other % vocab_size for other in range(said + 1, said + vocab_size))
    tokens = list(itertools.islice((other for other in others if other not in (next_, token)), 2))
    if token != said and lot < first + second:
        tokens[0 if lot < first else 1] = token
    return (RunnerUp(said, 0.0), *map(RunnerUp, tokens, gaps))


def _scale(agreed: float) -> float:
    """Of the gaps in nats, which fall off exponentially, of a tier that agrees so often with the next."""
    return max(0.01, (WRONG / max(1e-3, 1 - agreed) - 1) / FADE)


@lru_cache(CACHED)  # finding a gap among a hundred lots takes longer than all else
def _gap(scale: float, lot: float, right: bool) -> float:
    """Of a token of which it is known whether the next tier says the same."""
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


def lots_of(key: int, depth: int) -> Iterator[float]:
    """Numbers from 0 to 1, of `LOTS`, for the tier ``depth`` below the full one."""
    for number in itertools.count():
        yield (int(LOTS * uniform(mix(key ^ mix(depth)), number)) + 0.5) / LOTS

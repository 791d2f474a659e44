"""Toy tiers that agree in given shares, for plans, benchmarks of clusters, and tests."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from cascade.params import SamplingParams
from cascade.scorer import BLOCK, Row, RunnerUp, Runs, Scored
from cascade.splitmix import GOLDEN, mix

Agreement: TypeAlias = tuple[float, ...]  # how often a tier agrees with the next one, that one with its next, ...

LEAST_TOKENS = 8  # the smallest vocabulary: room for an own token and two runner-ups, different on each tier
DRAWS = 4096  # different random numbers
CACHED = 1 << 16  # contexts and positions that are cached
# measured on the demonstration family, at any temperature: an own token of gap g is wrong with chance WRONG * exp(-FADE * g)
WRONG, FADE = 0.62, 0.95
# if a tier's own token is wrong: chances that its first and its second runner-up is the next tier's own token
ABOVE = (0.58, 0.18)
CLOSE = (0.5, 0.13)  # if it is right: chances that they are the next tier's first runner-up


class TokenStore:
    """Tokens by position, in place of keys and values; see `cascade.scorer.Store`."""

    block = BLOCK

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        self.tokens[start : start + len(tokens)] = tokens

    def before(self, position: int, count: int) -> list[int]:
        """The last ``count`` tokens before a position, or fewer at the beginning."""
        return self.tokens[max(0, position - count) : position]

    def reserve(self, positions: int) -> None:
        """Does nothing: there is room for any number."""

    def reuse(self, source: "TokenStore", positions: int) -> None:
        self.write(0, source.tokens[:positions])

    def fork(self, position: int) -> "TokenStore":
        return TokenStore(self.tokens[:position])

    def join(self, fork: "TokenStore") -> None:
        self.tokens = fork.tokens

    def free(self) -> None:
        self.tokens = []


class ToyTier(Runs):
    """A tier that agrees with the next one in the share ``agreement[0]`` of contexts; the rest holds for the tiers above.

    Own tokens of the full tier, which has no ``agreement``, come from a generator keyed by the last ``order`` tokens of its
    store, the position and the request's seed, at any temperature. A lower tier has the own token of the next one or another,
    drawn in the same way. So it depends on the tiers above only through the next one. Runner-ups are as close and as often
    right as measured. Other sampling parameters are not supported: a row with a state fails.
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
        self.vocab_size, self.order = vocab_size, order
        self.context_len, self.cache_tokens = context_len, cache_tokens
        self._agreement = agreement

    def new_cache(self) -> Any:
        return TokenStore()

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        """See `cascade.scorer.Scorer`."""
        return rows

    def collect(self, launched: Sequence[Row]) -> list[Scored]:
        """Own tokens of each row."""
        return [self._score(row) for row in launched]

    def _score(self, row: Row) -> Scored:
        """Score a row; its store then holds the row's tokens and the path that own tokens take."""
        end, draft = row.start + len(row.tokens), row.draft
        row.cache.write(row.start, row.tokens)
        before = row.cache.before(end, self.order + row.num_own)
        positions = [end - row.num_own + 1 + place for place in range(row.num_own)]
        contexts = [tuple(before[: len(before) - (end - position)][-self.order :]) for position in positions]
        for node, depth in enumerate(draft.depths):
            positions.append(end + depth + 1)
            contexts.append((*contexts[row.num_own + draft.parent(node)], draft.tokens[node])[-self.order :])
        scored = self._own(row, contexts, positions)
        row.cache.write(end, draft.tokens if draft.is_line else [draft.tokens[node] for node in draft.walk(scored.own)[1]])
        return scored

    def _own(self, row: Row, contexts: Sequence[tuple[int, ...]], positions: Sequence[int]) -> Scored:
        """Own tokens of a row at ``positions``, each after its context."""
        assert row.state is None, "a toy tier honours a request's seed alone"
        ranked = [self.ranked(*place, row.params, 1 + row.runner_ups) for place in zip(contexts, positions, strict=True)]
        others = [tuple(near[1:]) for near in ranked] if row.runner_ups else ()
        return Scored([near[0].token for near in ranked], runner_ups=others)

    def ranked(self, context: tuple[int, ...], position: int, params: SamplingParams, count: int) -> list[RunnerUp]:
        """The own token at ``position`` after ``context``, and at most two runner-ups, each with its gap to the first."""
        key = mix(fold(context, params.seed or 0) ^ position)
        return list(_ranked(key, self.vocab_size, self._agreement)[:count])


@lru_cache(CACHED)
def _ranked(key: int, vocab_size: int, agreement: Agreement) -> tuple[RunnerUp, ...]:
    """The own token of a tier and its runner-ups at the place ``key``; the full tier has no runner-ups."""
    if not agreement:
        return (RunnerUp(mix(key) % vocab_size, 0.0),)
    above, depth = _ranked(key, vocab_size, agreement[1:]), len(agreement)
    draws, token = draws_of(key, depth), above[0].token
    if next(draws) >= agreement[0]:
        token = (token + 1 + int(next(draws) * (vocab_size - 1))) % vocab_size
    return with_runner_ups(token, above, agreement[0], draws, vocab_size)


def with_runner_ups(
    own: int, above: Sequence[RunnerUp], agreed: float, draws: Iterator[float], vocab_size: int
) -> tuple[RunnerUp, ...]:
    """The ``own`` token of a tier and two runner-ups, with gaps, where the next tier has ``above``.

    The tier agrees with the next one in the share ``agreed``; ``draws`` are the random numbers.
    """
    next_ = above[0].token
    scale = max(0.01, (WRONG / max(1e-3, 1 - agreed) - 1) / FADE)  # scale of gaps in nats, which are distributed exponentially
    gap = _gap(scale, (int(100 * next(draws)) + 0.5) / 100, own == next_)
    gaps = gap, gap - math.log(1 - next(draws)) * scale
    close = above[1].token if len(above) > 1 else own
    token, (first, second) = (next_, ABOVE) if own != next_ else (close, CLOSE)
    draw = next(draws)
    others = (other % vocab_size for other in range(own + 1, own + vocab_size))
    tokens = list(itertools.islice((other for other in others if other not in (next_, token)), 2))
    if token != own and draw < first + second:
        tokens[0 if draw < first else 1] = token
    return (RunnerUp(own, 0.0), *map(RunnerUp, tokens, gaps))


@lru_cache(CACHED)  # finding a gap for one of a hundred draws takes longer than all else
def _gap(scale: float, draw: float, right: bool) -> float:
    """The gap, at the quantile ``draw``, of a token with which the next tier agrees, or does not."""
    wrong_rate = 1 / scale + FADE
    if not right:
        return -math.log(1 - draw) / wrong_rate
    wrong = WRONG / (scale * wrong_rate)
    low, high = 0.0, 60.0 * scale
    for _ in range(30):
        gap = (low + high) / 2
        below = 1 - math.exp(-gap / scale) - wrong * (1 - math.exp(-gap * wrong_rate))
        low, high = (gap, high) if below < draw * (1 - wrong) else (low, gap)
    return low


def draws_of(key: int, depth: int) -> Iterator[float]:
    """Random numbers from 0 to 1 (`DRAWS` different ones) for the tier ``depth`` below the full one."""
    for number in itertools.count():
        yield (int(DRAWS * uniform(mix(key ^ mix(depth)), number)) + 0.5) / DRAWS


def fold(tokens: tuple[int, ...], seed: int) -> int:
    """A key of 64 bits for tokens and a seed."""
    key = mix(seed + GOLDEN)
    for token in tokens:
        key = mix(key ^ (token + 1) * GOLDEN)
    return key


def uniform(key: int, index: int) -> float:
    """The number ``index`` of a key, strictly between 0 and 1."""
    return ((mix(key + (index + 1) * GOLDEN) >> 11) + 0.5) * 2.0**-53

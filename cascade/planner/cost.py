"""What a pass of a tier costs: timed over a small grid at start, and kept current from the passes that follow."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from cascade.params import SamplingParams
from cascade.scorer import Row, Scorer

GRID = (1, 16, 4, 64, 8, 2, 32, 256, 3, 6, 12, 24, 128, 512)  # tokens of a pass: of a slow model, the first of them tell most
SCORED = 16  # of them at most, own tokens are wanted; the others are a prompt's
CONTEXT = 512  # positions before those of a pass, where time is taken a second time
BUDGET_S = 0.6  # for all of it
ROUNDS = 5
GLANCE_TOKENS, GLANCE_S = 64, 0.3  # of a program that has just been started, and is waited for
RATE = 0.05  # weight of the latest pass in the points beside it, and in those that no pass of their own has told of lately
STALE = 0.98  # share of what a point knows of its own passes that is left after a pass of another size
SMOOTHING = 0.1  # weight of the latest pass in mean costs
CHUNK = 32  # positions to catch up with that make a session one that reads
FIRST_PASS_S = 0.01  # cost of a pass before one was timed
OUTLIER = 2.0  # a pass counts as so many times too slow or too fast at most: machines pause
PARAMS = SamplingParams(temperature=0, seed=0)


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds that a pass takes: ``base_s + token_s * max(0, tokens - knee)``, or measured points ``(tokens, seconds)``.

    Between measured points it is a straight line, before the first the same as there, after the last it goes on as steep. The
    number of tokens may be a mean.
    """

    base_s: float = 0.0
    token_s: float = 0.0
    knee: int = 1  # tokens that cost no more than one
    points: tuple[tuple[int, float], ...] = ()  # of increasing tokens

    def __call__(self, num_tokens: float) -> float:
        if not self.points:
            return self.base_s + self.token_s * max(0, num_tokens - self.knee)
        return _between([tokens for tokens, _ in self.points], [seconds for _, seconds in self.points], num_tokens)


class Profile:
    """Seconds of a pass that scores so many tokens, of sessions that hold so many positions together.

    Straight lines between measured numbers of tokens, plus a price for each position held; and what passes took lately. Safe to
    read from any thread.
    """

    def __init__(self, points: Sequence[tuple[int, float]] = ((1, FIRST_PASS_S),), context_s: float = 0.0) -> None:
        """``points`` are numbers of tokens, increasing, and seconds without context; ``context_s`` is for each position."""
        assert points, "at least one pass was timed"
        self._tokens = [tokens for tokens, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self._fresh = [0.0] * len(points)  # 1: a pass of this size has just told what it takes
        self.context_s = context_s
        self.pass_s = self.predict(1)  # mean of late passes that read nothing but the latest tokens
        self.token_s = 0.0  # what each token of a text that is read adds to such a pass; 0 until one was read
        self.between_s = 0.0  # from the end of a pass to the start of the next, where nobody waits for anything

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Tokens and seconds."""
        return tuple(zip(self._tokens, self._seconds, strict=True))

    def cost(self, context: int = 0) -> PassCost:
        """For the simulator: passes of sessions that hold ``context`` positions together."""
        return PassCost(points=tuple((tokens, seconds + self.context_s * context) for tokens, seconds in self.points))

    def predict(self, num_tokens: int, context: int = 0) -> float:
        """Seconds of a pass."""
        return _between(self._tokens, self._seconds, num_tokens) + self.context_s * context

    def turn(self, num_tokens: int, context: int = 0) -> float:
        """Seconds from the end of a pass to the end of the next one."""
        return self.between_s + self.predict(num_tokens, context)

    def rested(self, seconds: float) -> None:
        """A pass began so long after the one before it, for which nobody waited."""
        least = min(seconds, OUTLIER * self.between_s) if self.between_s else seconds
        self.between_s += SMOOTHING * (least - self.between_s) if self.between_s else seconds

    def record(self, num_tokens: int, num_read: int, context: int, seconds: float) -> None:
        """A pass of ``num_tokens`` after ``context`` positions took so long; it caught up with ``num_read`` tokens of texts."""
        if not num_read:
            self.pass_s += SMOOTHING * (seconds - self.pass_s)
        elif num_read >= CHUNK:
            token_s = max(0.0, seconds - self.pass_s) / num_read
            self.token_s += (SMOOTHING if self.token_s else 1.0) * (token_s - self.token_s)
        self._correct(num_tokens, context, seconds)

    def _correct(self, num_tokens: int, context: int, seconds: float) -> None:
        """Move the points beside a number of tokens towards what a pass of so many took.

        Points that have not been seen lately move along: what slows or speeds up one pass does so to all. Else a size that
        looked dear at the start, when others were starting too, would stay so and never be tried.
        """
        expected = self.predict(num_tokens, context)
        ratio = min(OUTLIER, max(1 / OUTLIER, seconds / expected)) if expected > 0 else 1.0
        after = bisect_right(self._tokens, num_tokens)
        beside = [place for place in (after - 1, after) if 0 <= place < len(self._tokens)]
        if after and self._tokens[after - 1] == num_tokens:
            beside = [after - 1]
        for place in range(len(self._seconds)):
            self._fresh[place] = 1.0 if place in beside else STALE * self._fresh[place]
            moved = RATE if place in beside else RATE * (1 - self._fresh[place])
            self._seconds[place] *= 1 + moved * (ratio - 1)


def _between(tokens: Sequence[int], seconds: Sequence[float], num_tokens: float) -> float:
    """On straight lines between points, before the first the same as there, after the last as steep as before it."""
    if len(tokens) == 1 or num_tokens <= tokens[0]:
        return seconds[0]
    upper = min(bisect_left(tokens, num_tokens), len(tokens) - 1)
    n0, s0 = tokens[upper - 1], seconds[upper - 1]
    return s0 + (seconds[upper] - s0) * (num_tokens - n0) / (tokens[upper] - n0)


def measure(model: Scorer, *, max_tokens: int = GRID[-1], budget_s: float = BUDGET_S) -> Profile:
    """Time passes of ``model``: rounds over the grid until ``budget_s`` is over; the best time counts.

    A model so slow that the budget ends within the first round is timed at fewer sizes, two at least.
    """
    end = time.perf_counter() + budget_s
    room = model.context_len - 1
    context = max(1, min(CONTEXT, room // 2))
    grid = [tokens for tokens in GRID if tokens <= min(max_tokens, room - context)] or [1]
    best: dict[tuple[int, int], float] = {}
    _time(model, grid[0], 1)  # the first pass of a process is no measure
    for _ in range(ROUNDS):
        for tokens in grid:
            if len(best) > 1 and time.perf_counter() > end:
                return _fit(best, context)
            best[tokens, 1] = min(best.get((tokens, 1), float("inf")), _time(model, tokens, 1))
        best[1, context] = min(best.get((1, context), float("inf")), _time(model, 1, context))
    return _fit(best, context)


def glance(model: Scorer) -> Profile:
    """Time the sizes that guesses make of a pass, quickly: without that a tier believes its guesses to cost nothing."""
    return measure(model, max_tokens=GLANCE_TOKENS, budget_s=GLANCE_S)


def _fit(best: dict[tuple[int, int], float], context: int) -> Profile:
    context_s = 0.0
    if (1, context) in best and context > 1:
        context_s = max(0.0, best[1, context] - best[1, 1]) / (context - 1)
    return Profile(sorted((tokens, seconds) for (tokens, held), seconds in best.items() if held == 1), context_s)


def _time(model: Scorer, num_tokens: int, context: int) -> float:
    """Seconds of a pass that scores ``num_tokens`` after ``context`` positions."""
    tokens = [place % model.vocab_size for place in range(context + num_tokens)]
    cache = model.new_cache()
    try:
        model.run([Row(cache, 0, tokens[:context], 0, PARAMS)])
        row = Row(cache, context, tokens[context:], min(num_tokens, SCORED), PARAMS)
        model.run([row])  # the first pass after a long one finds weights in no cache
        begin = time.perf_counter()
        model.run([row])
        return time.perf_counter() - begin
    finally:
        cache.free()

"""Runs the passes of a tier, measures what they cost, and recovers when one fails."""

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from cascade.errors import InvalidRequest
from cascade.params import SamplingParams
from cascade.planner.cost import Profile
from cascade.scorer import Row, Scored, Scorer
from cascade.session.session import Work
from cascade.tier.loop import Result
from cascade.tier.scheduler import Batch
from cascade.tier.slot import Slot

log = logging.getLogger(__name__)

GRACE_S = 20.0  # the least deadline of every step of a loop, since machines may pause
FACTOR = 30.0  # the deadline of a pass over its predicted time, which a loaded machine or a first run exceeds
SMALL_PASS = 4  # tokens below which a failed pass is not blamed on short memory
MAX_PASS_FAILURES = 3  # consecutive failures of the model after which the tier is unhealthy
GREEDY = SamplingParams(temperature=0, seed=0)  # for rows that belong to no request
# tokens of timed passes, the most telling sizes first: slow models time only these
GRID = (1, 16, 4, 64, 8, 12, 2, 32, 24, 6, 3, 128, 256, 512)
MAX_SCORED = 128  # own tokens of a timed pass at most: logits of more might not fit into memory
CONTEXT = 512  # positions before a pass that is timed a second time
ROUNDS = 5


@dataclass(slots=True)
class TierStats:
    """Totals since the tier started; seconds are wall-clock."""

    passes: int = 0
    tokens: int = 0  # positions scored
    own_tokens: int = 0
    busy_s: float = 0.0  # time in passes
    failures: int = 0  # passes that failed


class Watchdog:
    """Whether a loop hangs: on a device that no longer responds, a pass neither ends nor fails.

    The loop's thread reports when a step begins; any other thread may ask whether the step takes too long.
    """

    def __init__(self) -> None:
        self._deadline = float("inf")  # on the clock of `time.monotonic`

    def begin(self, expected_s: float = 0.0) -> None:
        """A step begins, which should take ``expected_s``."""
        self._deadline = time.monotonic() + max(GRACE_S, FACTOR * expected_s)

    def rest(self) -> None:
        self._deadline = float("inf")

    @property
    def hangs(self) -> bool:
        """Whether the step is long overdue. If it ends after all, the loop no longer hangs."""
        return time.monotonic() > self._deadline


@dataclass(slots=True)
class Flight:
    batch: Batch[Any]
    begin: float  # on the clock of `time.monotonic`
    num_tokens: int = 0
    num_own: int = 0  # own tokens that it gives
    num_read: int = 0  # tokens that are only read
    context: int = 0  # positions before its rows
    launched: Any = None  # argument of the model's `collect`
    error: Exception | None = None  # why it could not begin


class Runner:
    """Runs passes of ``model``, of at most ``max_tokens`` tokens, for the tier named ``tier``; keeps ``profile`` current."""

    def __init__(self, tier: str, model: Scorer, max_tokens: int, profile: Profile) -> None:
        self.stats = TierStats()
        self.max_tokens = max_tokens  # fewer for a while after a pass that was too large for the memory
        self._tier = tier
        self._model = model
        self._max_tokens = max_tokens
        self._profile = profile
        self._ended: float | None = None  # when the last pass ended; None if there was no work after it
        self.watchdog = Watchdog()
        self._broken = 0  # consecutive failures of the model

    @property
    def healthy(self) -> bool:
        return self._broken < MAX_PASS_FAILURES

    def launch(self, batch: Batch[Any]) -> Flight:
        if self._ended is not None:
            self._profile.rested(time.monotonic() - self._ended)
        return self._launch(batch)

    def collect(self, flight: Flight) -> list[Result]:
        """Wait for a pass: the result of each row, or why it has none."""
        results, batch = self._collect(flight), flight.batch
        if results is None:
            results = [self._rescue(*row) for row in batch]  # scoring a row twice is harmless
            self._broken = 0 if any(results) or self._scores_canary() else self._broken + 1
            scored = all(isinstance(result, Scored) for result in results)
            if len(batch) > 1 and scored:  # rows succeed one by one: together they were too large
                self._shrink(sum(len(work) for _, work in batch) // 2)
        else:
            self._broken = 0
        self._ended = time.monotonic()
        return results

    def rest(self) -> None:
        """There is nothing to run: the time until the next pass does not count as the tier's own work."""
        self._ended = None

    def _rescue(self, slot: Slot[Any], work: Work) -> Result:
        """Score a row whose pass failed: alone, then in ever smaller pieces, in case memory is short."""
        results = self._score([(slot, work)])
        size = len(work) // 2 if work.branch is None else 0
        while results is None and size >= SMALL_PASS and work.num_read:
            for piece in work.pieces(size):
                results = self._score([(slot, piece)])
                if results is None:
                    break
            else:
                self._shrink(size)
            size //= 2
        return None if results is None else results[0]

    def _shrink(self, num_tokens: int) -> None:
        """Run smaller passes for a while, since those of more tokens failed."""
        self.max_tokens = max(SMALL_PASS, min(self.max_tokens, num_tokens))
        log.warning("Passes of tier %s are too large for its memory: they take %d tokens now", self._tier, self.max_tokens)

    def _score(self, batch: Batch[Any]) -> list[Result] | None:
        """One pass; None if it failed, unless the request of its only row is to blame."""
        return self._collect(self._launch(batch))

    def _launch(self, batch: Batch[Any]) -> Flight:
        self.watchdog.begin()
        flight = Flight(batch, time.monotonic())
        try:
            flight.launched = self._model.launch([row_of(slot, work) for slot, work in batch])
        except Exception as error:
            flight.error = error
        flight.num_own = sum([work.num_own + len(work.draft.tokens) for _, work in batch])
        flight.num_read = sum([len(work.tokens) - work.num_own for _, work in batch])
        flight.num_tokens = flight.num_own + flight.num_read
        flight.context = sum([work.start for _, work in batch])
        self.watchdog.begin(self._profile.predict(flight.num_tokens, flight.context))
        return flight

    def _collect(self, flight: Flight) -> list[Result] | None:
        num_rows = len(flight.batch)
        try:
            if flight.error is not None:
                raise flight.error
            scored = self._model.collect(flight.launched)
        except InvalidRequest as error:
            log.info("A request is at fault for a failed pass of tier %s with %d rows: %s", self._tier, num_rows, error)
            return [error] if num_rows == 1 else None
        except Exception:
            log.exception("A pass of tier %s failed with %d rows", self._tier, num_rows)
            self.stats.failures += 1
            return None
        stats, seconds = self.stats, time.monotonic() - flight.begin
        self._profile.record(flight.num_tokens, flight.num_read, flight.context, seconds)
        stats.passes += 1
        stats.tokens += flight.num_tokens
        stats.own_tokens += flight.num_own
        stats.busy_s += seconds
        if flight.num_tokens >= self.max_tokens:
            self.max_tokens = min(self._max_tokens, self.max_tokens + 1)
        return list(scored)

    def _scores_canary(self) -> bool:
        """Whether the model still scores a row that is known to be good."""
        cache = self._model.new_cache()
        self.watchdog.begin(self._profile.predict(1))
        try:
            self._model.collect(self._model.launch([Row(cache, 0, (0,), 1, GREEDY)]))
        except Exception:
            log.exception("The model of tier %s is broken", self._tier)
            return False
        finally:
            cache.free()
        return True


def row_of(slot: Slot[Any], work: Work) -> Row:
    session, cache, state = slot.session, slot.cache, slot.state
    params, num_own, runner_ups = session.spec.params, work.num_own, session.runner_ups
    guesses = slot.model_guesses if num_own else min(0, slot.model_guesses)
    if work.branch is not None:
        fork = slot.forks[work.branch]
        cache, state, guesses = fork.store, fork.state, min(0, guesses)
    elif session.scoring_prompt:  # logits of all positions are needed for log-probabilities; own tokens are ignored
        params = SamplingParams(temperature=0, seed=0, adapter=params.adapter, logprobs=params.prompt_logprobs)
        num_own, runner_ups, guesses = len(work.tokens), 0, min(0, guesses)
    return Row(cache, work.start, work.tokens, num_own, params, state, work.draft, runner_ups, guesses)


def measure(model: Scorer, *, max_tokens: int = GRID[-1], budget_s: float = 0.6) -> Profile:
    """Time passes of ``model``: rounds over the grid until ``budget_s`` have passed; the best times count.

    If the budget ends within the first round, fewer sizes are timed, at least two.
    """
    end = time.perf_counter() + budget_s
    room = model.context_len - 1
    context = max(1, min(CONTEXT, room // 2))
    grid = [tokens for tokens in GRID if tokens <= min(max_tokens, room - context)] or [1]
    best: dict[tuple[int, int], float] = {}  # by tokens and positions before them
    _time(model, grid[0], 1)  # the first pass of a process is slow
    for shape in [*((tokens, 1) for tokens in grid), (1, context)] * ROUNDS:
        if shape != (1, context) and len(best) > 1 and time.perf_counter() > end:
            break
        best[shape] = min(best.get(shape, math.inf), _time(model, *shape))
    if max(best)[0] > MAX_SCORED:  # add the cost of logits that were not computed
        logits_s = max(0.0, best[MAX_SCORED, 1] - _time(model, MAX_SCORED, 1, num_own=1)) / (MAX_SCORED - 1)
        for tokens in [tokens for tokens, held in best if tokens > MAX_SCORED and held == 1]:
            best[tokens, 1] += logits_s * (tokens - MAX_SCORED)
    context_s = max(0.0, best[1, context] - best[1, 1]) / (context - 1) if (1, context) in best and context > 1 else 0.0
    return Profile(sorted((tokens, seconds) for (tokens, held), seconds in best.items() if held == 1), context_s)


def _time(model: Scorer, num_tokens: int, context: int, num_own: int = MAX_SCORED) -> float:
    """Seconds of a pass of ``num_tokens`` after ``context`` positions that gives at most ``num_own`` own tokens."""
    tokens = [place % model.vocab_size for place in range(context + num_tokens)]
    cache = model.new_cache()
    try:
        model.collect(model.launch([Row(cache, 0, tokens[:context], 0, GREEDY)]))
        row = Row(cache, context, tokens[context:], min(num_tokens, num_own), GREEDY)
        model.collect(model.launch([row]))  # repeated, since caches are cold after a long pass
        begin = time.perf_counter()
        model.collect(model.launch([row]))
        return time.perf_counter() - begin
    finally:
        cache.free()

"""Runs the passes of a tier: what they cost, and what is done when one fails."""

import logging
import time
from dataclasses import dataclass
from typing import Any

from cascade.errors import InvalidRequest
from cascade.params import SamplingParams
from cascade.planner.cost import FIRST_PASS_S, Profile
from cascade.scorer import Row, Scored, Scorer
from cascade.session.work import Work
from cascade.tier.loop import Result
from cascade.tier.scheduler import Batch
from cascade.tier.slot import Slot
from cascade.tier.watchdog import Watchdog

log = logging.getLogger(__name__)

SMALL_PASS = 4  # tokens below which a failed pass is not for want of memory
MAX_PASS_FAILURES = 3  # times that the model may break one after another before the tier calls itself unhealthy
CANARY = SamplingParams(temperature=0, seed=0)  # of the row that tells a broken model from a bad row


@dataclass(slots=True)
class TierStats:
    """Totals since the tier started; seconds are wall-clock."""

    passes: int = 0
    tokens: int = 0  # positions scored
    own_tokens: int = 0
    busy_s: float = 0.0  # in passes
    pass_s: float = FIRST_PASS_S  # recent mean cost of a decoding pass
    failures: int = 0  # passes that raised
    asked: int = 0  # positions of the texts with which sessions came
    reused: int = 0  # of these, positions whose keys and values another session had left
    preempted: int = 0  # times that a session lost its place in memory


class Runner:
    """Runs passes of ``model`` for the tier named ``tier``, of at most ``max_tokens`` tokens; keeps ``profile`` current."""

    def __init__(self, tier: str, model: Scorer, max_tokens: int, profile: Profile) -> None:
        self.stats = TierStats(pass_s=profile.pass_s)
        self.max_tokens = max_tokens  # fewer for a while after a pass that was too large for the memory
        self._tier = tier
        self._model = model
        self._max_tokens = max_tokens
        self._profile = profile
        self._ended: float | None = None  # when the last pass did, while nobody has waited since
        self.watchdog = Watchdog()
        self._broken = 0  # failures one after another

    @property
    def healthy(self) -> bool:
        return self._broken < MAX_PASS_FAILURES

    def run(self, batch: Batch[Any]) -> list[Result]:
        """What a pass says of each row, or why it says nothing."""
        if self._ended is not None:
            self._profile.rested(time.monotonic() - self._ended)
        results = self._score(batch)
        if results is None:
            # a row that breaks its pass must not harm the others; scoring a row twice gives the same
            results = [self._rescue(*row) for row in batch]
            self._broken = 0 if any(results) or self._scores_canary() else self._broken + 1
            if len(batch) > 1 and all(isinstance(one, Scored) for one in results):  # no row is bad: together they were too many
                self._shrink(sum(len(work) for _, work in batch) // 2)
        self._ended = time.monotonic()
        return results

    def rest(self) -> None:
        """There is nothing to run: what passes until the next pass is waited."""
        self._ended = None

    def _rescue(self, slot: Slot[Any], work: Work) -> Result:
        """Scores a row whose pass failed: by itself, then in smaller and smaller pieces, in case memory is short."""
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
        """Passes of more tokens failed: smaller ones for a while."""
        self.max_tokens = max(SMALL_PASS, min(self.max_tokens, num_tokens))
        log.warning("Passes of tier %s are too large for its memory: they take %d tokens now", self._tier, self.max_tokens)

    def _score(self, batch: Batch[Any]) -> list[Result] | None:
        """One pass, None if it fails for another reason than the fault of its only row."""
        rows = [row_of(slot, work) for slot, work in batch]
        works = [work for _, work in batch]
        num_tokens, context = sum(map(len, works)), sum(work.start for work in works)
        self.watchdog.begin(self._profile.predict(num_tokens, context))
        begin = time.monotonic()
        try:
            scored = self._model.run(rows)
        except InvalidRequest as error:
            log.info("A request is at fault for a failed pass of tier %s with %d rows: %s", self._tier, len(rows), error)
            return [error] if len(batch) == 1 else None
        except Exception:
            log.exception("A pass of tier %s failed with %d rows", self._tier, len(rows))
            self.stats.failures += 1
            return None
        seconds, stats = time.monotonic() - begin, self.stats
        self._profile.record(num_tokens, sum(work.num_read for work in works), context, seconds)
        stats.passes += 1
        stats.tokens += num_tokens
        stats.own_tokens += sum(work.num_scored for work in works)
        stats.busy_s += seconds
        stats.pass_s = self._profile.pass_s
        if num_tokens >= self.max_tokens:
            self.max_tokens = min(self._max_tokens, self.max_tokens + 1)
        return list(scored)

    def _scores_canary(self) -> bool:
        """Whether the model still scores a row that nothing can be wrong with."""
        cache = self._model.new_cache()
        self.watchdog.begin(self._profile.predict(1))
        try:
            self._model.run([Row(cache, 0, (0,), 1, CANARY)])
        except Exception:
            log.exception("The model of tier %s is broken", self._tier)
            return False
        finally:
            cache.free()
        return True


def row_of(slot: Slot[Any], work: Work) -> Row:
    session, guesses = slot.session, slot.model_guesses
    params, num_own = session.opening.params, work.num_own
    if work.branch is not None or session.scoring_prompt or not num_own:
        guesses = min(0, guesses)
    if work.branch is not None:
        fork = slot.forks[work.branch]
        return Row(
            fork.store, work.start, work.tokens, num_own, params, fork.state, runner_ups=session.runner_ups, guesses=guesses
        )
    if session.scoring_prompt:  # logits of all its positions: own tokens are not looked at, log-probabilities are
        params = SamplingParams(temperature=0, seed=0, adapter=params.adapter, logprobs=params.prompt_logprobs)
        return Row(slot.cache, work.start, work.tokens, len(work.tokens), params, slot.state, guesses=guesses)
    draw = session.rounds.draw(work) if session.rounds is not None else None
    return Row(
        slot.cache, work.start, work.tokens, num_own, params, slot.state, work.draft, session.runner_ups, guesses, draw=draw
    )

"""Runner of a tier's model: what they cost, and what is done when one fails."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cascade.chain.profile import Profile
from cascade.chain.scheduler import Costs
from cascade.chain.session import Work
from cascade.chain.slot import Slot
from cascade.errors import InvalidRequest
from cascade.params import SamplingParams
from cascade.scorer import Row, Scorer

log = logging.getLogger(__name__)

# own tokens of a row; None if it cannot be scored, an error if that is the request's own fault
Own: TypeAlias = list[int] | InvalidRequest | None

SMALL_PASS = 4  # tokens below which a failed pass is not for want of memory
MAX_PASS_FAILURES = 3  # times that the model may break one after another before the tier calls itself unhealthy
FIRST_PASS_S = 0.01  # cost of a pass before one was timed
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
    reused: int = 0  # positions whose keys and values another session had left
    preempted: int = 0  # times that a session lost its place in memory


class Runner:
    """Runner of ``model`` for the tier named ``tier``, of at most ``max_tokens`` tokens; ``profile`` is kept current."""

    def __init__(self, tier: str, model: Scorer, max_tokens: int, profile: Profile | None) -> None:
        self.stats = TierStats() if profile is None else TierStats(pass_s=profile.predict(1))
        self.costs = Costs(self.stats.pass_s)
        self.max_tokens = max_tokens  # fewer for a while after a pass that was too large for the memory
        self._tier = tier
        self._model = model
        self._most_tokens = max_tokens
        self._profile = profile
        self._broken = 0  # failures one after another

    @property
    def healthy(self) -> bool:
        """The model works."""
        return self._broken < MAX_PASS_FAILURES

    def run(self, batch: list[tuple[Slot, Work]]) -> list[Own]:
        """Own tokens of each row, or why it has none."""
        now = time.monotonic()
        for slot, work in batch:
            if work.num_own:
                slot.session.waited(now - slot.since)
        own = self._score(batch)
        if own is None:
            # a row that breaks its pass must not harm the others; scoring a row twice gives the same
            own = [self._rescue(*row) for row in batch]
            self._broken = 0 if any(own) or self._sings() else self._broken + 1
            if len(batch) > 1 and all(isinstance(one, list) for one in own):  # no row is bad: together they were too many
                self._shrink(sum(len(work.tokens) for _, work in batch) // 2)
        return own

    def _rescue(self, slot: Slot, work: Work) -> Own:
        """Own tokens of a row whose pass failed: by itself, then in smaller and smaller pieces, in case memory is short."""
        own = self._score([(slot, work)])
        size = len(work.tokens) // 2
        while own is None and size >= SMALL_PASS and work.num_own < len(work.tokens):
            for piece in work.pieces(size):
                own = self._score([(slot, piece)])
                if own is None:
                    break
            else:
                self._shrink(size)
            size //= 2
        return None if own is None else own[0]

    def _shrink(self, num_tokens: int) -> None:
        """Runner of more tokens failed: smaller ones for a while."""
        self.max_tokens = max(SMALL_PASS, min(self.max_tokens, num_tokens))
        log.warning("Runner of tier %s are too large for its memory: they take %d tokens now", self._tier, self.max_tokens)

    def _score(self, batch: list[tuple[Slot, Work]]) -> list[Own] | None:
        """One pass, None if it fails for another reason than the fault of its only row."""
        rows = [_row(slot, work) for slot, work in batch]
        begin = time.monotonic()
        try:
            own = [
                _known(row, tokens) if w.num_own else []
                for row, tokens, (_, w) in zip(rows, self._model.run(rows), batch, strict=True)
            ]
        except InvalidRequest as error:
            log.info("A request is at fault for a failed pass of tier %s with %d rows: %s", self._tier, len(rows), error)
            return [error] if len(batch) == 1 else None
        except Exception:
            log.exception("A pass of tier %s failed with %d rows", self._tier, len(rows))
            self.stats.failures += 1
            return None
        self._account(batch, own, time.monotonic() - begin)
        if sum(len(row.tokens) for row in rows) >= self.max_tokens:
            self.max_tokens = min(self._most_tokens, self.max_tokens + 1)
        return list(own)

    def _sings(self) -> bool:
        """Whether the model still scores a row that nothing can be wrong with: a canary."""
        cache = self._model.new_cache()
        try:
            self._model.run([Row(cache, 0, (0,), 1, CANARY)])
        except Exception:
            log.exception("The model of tier %s is broken", self._tier)
            return False
        finally:
            cache.free()
        return True

    def _account(self, batch: list[tuple[Slot, Work]], own: Sequence[Sequence[int]], seconds: float) -> None:
        num_tokens = sum(len(work.tokens) for _, work in batch)
        extra = [max(0, len(tokens) - work.num_own) for (_, work), tokens in zip(batch, own, strict=True)]
        passes = 1 + max(extra)  # in one launch
        stats = self.stats
        stats.passes += passes
        stats.tokens += num_tokens + sum(extra)
        stats.own_tokens += sum(work.num_own for _, work in batch) + sum(extra)
        stats.busy_s += seconds
        seconds /= passes
        self.costs.saw([work for _, work in batch], seconds)
        stats.pass_s = self.costs.pass_s
        if self._profile is not None:
            self._profile.saw(num_tokens, sum(work.start for _, work in batch), seconds)


def _known(row: Row, tokens: list[int]) -> list[int]:
    """Without those of positions behind guesses that the grammar did not follow to the end."""
    return tokens if row.state is None else tokens[: row.state.num_known]


def _row(slot: Slot, work: Work) -> Row:
    params = slot.session.opening.params
    if slot.session.scoring_prompt:  # logits of all its positions: own tokens are not looked at, log-probabilities are
        of_prompt = SamplingParams(temperature=0, seed=0, adapter=params.adapter, logprobs=params.prompt_logprobs)
        return Row(slot.cache, work.start, work.tokens, len(work.tokens), of_prompt, slot.state)
    return Row(slot.cache, work.start, work.tokens, work.num_own, params, slot.state, slot.ahead(work))

"""A model on a device that is not there: a fake, for measuring whole clusters on machines without such devices."""

import logging
import time
from collections.abc import Callable, Sequence

from cascade.planner.cost import Profile
from cascade.scorer import Row, Scored, Scorer, Store

log = logging.getLogger(__name__)


class Emulated:
    """Scores as ``model`` does, in the time that a device takes for which passes cost what ``cost`` says.

    A pass ends when the device would have ended it, not sooner: what is left of its time after the model's own pass is slept.
    Where the model takes longer than the device, the pass is *late*, and its time that of this machine. Beside a `Scorer`'s it
    has what a replica tells of a model.
    """

    device = "emulated"
    healthy = True

    def __init__(
        self,
        model: Scorer,
        cost: Profile,
        *,
        num_parameters: int = 0,
        dtype: str = "toy",
        same_bits: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """``cost`` is for tokens of a pass and positions held, and stays as it is; ``clock`` and ``sleep`` are in seconds."""
        self._model = model
        self._cost = cost
        self.vocab_size, self.context_len, self.cache_tokens = model.vocab_size, model.context_len, model.cache_tokens
        self.num_parameters = num_parameters
        self.dtype = dtype
        self.same_bits = same_bits
        self._clock = clock
        self._sleep = sleep
        self.passes = 0
        self.late = 0  # passes that took longer than the device takes

    @property
    def summary(self) -> str:
        """One line about it, for a log."""
        return f"a FAKE: {self.dtype} on a device that is not there, whose shortest pass takes {self._cost.predict(1):.4f} s"

    @property
    def profile(self) -> Profile:
        """What timing its passes would find."""
        return Profile(self._cost.points, self._cost.context_s)

    def new_cache(self) -> Store:
        return self._model.new_cache()

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        """Own tokens of each row, see `cascade.scorer.Scorer`, not before the device has them."""
        end = self._clock() + self.seconds(rows)
        scored = self._model.run(rows)
        left = end - self._clock()
        self.passes += 1
        if left > 0:
            self._sleep(left)
            return scored
        if not self.late:
            log.warning("A pass of %d rows ended %.4f s later than the device's would have: stretch time", len(rows), -left)
        self.late += 1
        return scored

    def renew(self, source: str) -> None:
        """Go on with other weights, which the device has at once; see `cascade.engine.model.Model.renew`."""
        self._model.renew(source)  # type: ignore[attr-defined]  # a toy has no weights, and no student is one

    def seconds(self, rows: Sequence[Row]) -> float:
        """That the device takes for a pass."""
        return self._cost.predict(sum(len(row.input_ids) for row in rows), sum(row.start for row in rows))

    def close(self) -> None:
        """There is nothing outside this process."""

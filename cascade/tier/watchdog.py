"""Whether a tier's loop hangs: a pass on a device that no longer answers neither ends nor fails."""

import time

GRACE_S = 20.0  # that every step has, however short it was measured to be: machines pause
FACTOR = 30.0  # times what a pass is predicted to take; under load, and at its first run, it takes more


class Watchdog:
    """The loop says what it begins, in its own thread; any other may look whether that takes too long."""

    def __init__(self) -> None:
        self._deadline = float("inf")  # of `time.monotonic`

    def begin(self, expected_s: float = 0.0) -> None:
        """The next step is expected to take so long."""
        self._deadline = time.monotonic() + max(GRACE_S, FACTOR * expected_s)

    def rest(self) -> None:
        self._deadline = float("inf")

    @property
    def hangs(self) -> bool:
        """The step has not ended, long after its time. One that ends after all is forgiven."""
        return time.monotonic() > self._deadline

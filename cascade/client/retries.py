"""How a client goes on with a request whose server is gone: when it asks again, and how long. Does no I/O."""

import random
import time
from dataclasses import dataclass, field

from cascade.errors import CascadeError, DeadlineExceeded, Overloaded, Unavailable

FIRST_PAUSE_S = 0.05  # doubled with every failure, and cut by up to a half: clients of a dead server do not come all at once
MOST_PAUSE_S = 2.0


class Unreached(Unavailable):
    """Nobody answers at the address."""


@dataclass(slots=True)
class Attempts:
    """The calls by which one request is made, within its deadline and its client's patience.

    ``patience_s``: seconds that may pass without a message from any server. ``unproven``: no server has ever answered this
    client, so that its addresses may be wrong: each of ``num_servers`` is asked once.
    """

    patience_s: float
    timeout_s: float | None
    num_servers: int = 1
    unproven: bool = False
    _begin: float = field(default_factory=time.monotonic)
    _heard: float = field(default_factory=time.monotonic)  # when the last message came
    _num_calls: int = 0  # that failed
    _num_in_vain: int = 0  # of them, since the last message
    _reason: CascadeError | None = None  # why the first of these failed

    @property
    def left_s(self) -> float | None:
        """Until the request's deadline, if it has one."""
        return None if self.timeout_s is None else max(0.0, self._begin + self.timeout_s - time.monotonic())

    def heard(self) -> None:
        self._heard, self._num_in_vain, self.unproven, self._reason = time.monotonic(), 0, False, None

    def failed(self, error: CascadeError) -> float:
        """The pause in seconds before the request is sent again; raises ``error`` if that is of no use, or comes too late.

        Where the deadline ends a call after others have failed, what is raised is why they did.
        """
        self._num_calls += 1
        self._num_in_vain += 1
        longest_s: float = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._num_in_vain - 1))
        pause_s = random.uniform(0.5, 1.0) * longest_s
        if isinstance(error, Overloaded):
            pause_s += error.retry_after_s
        end = self._heard + self.patience_s
        if self.timeout_s is not None:
            end = min(end, self._begin + self.timeout_s)
        self._reason = self._reason or error
        self.unproven &= isinstance(error, Unreached)  # a server that ends a call, or cannot take it, was there
        if not self._may_go_better(error) or time.monotonic() + pause_s > end:
            raise (self._reason if isinstance(error, DeadlineExceeded) else error) from None
        return pause_s

    def _may_go_better(self, error: CascadeError) -> bool:
        """Whether another call may go better: a full server is waited for only by requests that lost theirs."""
        if isinstance(error, Unreached) and self.unproven:
            return self._num_calls < self.num_servers
        return isinstance(error, Unavailable) or (isinstance(error, Overloaded) and self._num_calls > 1)

"""How long a client may take nothing of its answer."""

import asyncio
from types import TracebackType


class Patience:
    """A context around each write to one client: raises `TimeoutError` if the client takes nothing for ``timeout_s``.

    All writes share one timer, because a timer for each would take longer than most writes. Belongs to one event loop.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None  # the task that writes
        self._since: float | None = None  # when the write began that has not ended
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._since, self._task = self._loop.time(), asyncio.current_task()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._since = None
        if self._over and self._task is not None:
            self._over = False
            if not self._task.uncancel() and kind is asyncio.CancelledError:  # else somebody else cancels it, too
                raise TimeoutError from error

    def close(self) -> None:
        """There is no more to write."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._since is None or self._task is None:
            return
        left_s = self._since + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._over = True
            self._task.cancel()

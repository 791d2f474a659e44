"""Sessions of a replica that Serve stops go on at another one, as soon as there is one."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

MISSED = 2.0  # of the time between health checks, after which they are missed
SURE = 2  # answers in a row that say that this replica is out of use


class Handover:
    """Calls ``leave`` once Serve routes to others of ``running`` replicas, and no longer to ``me``.

    Serve (2.60) tells a replica nothing when it is to stop: it waits until its requests, leases here, have ended, and kills it
    when ``graceful_shutdown_timeout_s`` is over. But it stops to check its health, ``period_s`` apart before: that is when the
    others are asked for. While there are none, sessions have nowhere to go, and stay.
    """

    def __init__(
        self, me: str, running: Callable[[], Awaitable[list[str]]], leave: Callable[[], object], period_s: float
    ) -> None:
        self._me = me
        self._running = running
        self._leave = leave
        self._gap_s = period_s  # the longest lately
        self._checked = time.monotonic()

    def check(self) -> None:
        """Serve checks this replica's health."""
        now = time.monotonic()
        self._gap_s, self._checked = max(now - self._checked, 0.9 * self._gap_s), now

    async def watch(self) -> None:
        """Return when the sessions have been handed on."""
        found = 0
        while found < SURE:
            await asyncio.sleep(self._gap_s / 4)
            missed = time.monotonic() - self._checked > MISSED * self._gap_s
            found = found + 1 if missed and await self._replaced() else 0
        log.info("This replica is being stopped: its sessions go on at others")
        self._leave()

    async def _replaced(self) -> bool:
        running = await self._running()
        return bool(running) and self._me not in running

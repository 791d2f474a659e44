"""What routers tell each other of their keys, so that a key's limits hold for all of them together.

A router tells what its keys hold and have used to all others, and hears the same of them, in one broadcast, at most every
`EXCHANGE_S` and only while that changes or answers run. No request waits for it: between two exchanges a router knows what it
has heard. So beyond a limit go at most those answers that other routers have admitted since, and no router admits more than the
limit by itself. What a router held that has not been heard of for `FORGET_S` is forgotten: it is gone, and its answers with it.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from deployments.admission.access import Access, Usage

EXCHANGE_S = 0.25

Usages: TypeAlias = Mapping[str, Usage]  # by the name of the key


class Others(Protocol):
    """The other routers; see `deployments.links.siblings.Siblings`."""

    me: str

    async def ask(self, method: str, *args: Any) -> list[Any]: ...


class Exchange:
    """Tells other routers of the keys of ``access`` that have limits, and hears of theirs. Belongs to a running event loop."""

    def __init__(self, access: Access, others: Others) -> None:
        self._access = access
        self._others = others
        self._told: dict[str, tuple[int, int]] = {}  # answers and tokens, by key
        self._task = asyncio.create_task(self._run()) if access.limited else None

    async def close(self) -> None:
        """Tell nothing more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def heard(self, router: str, usages: Usages) -> tuple[str, Usages] | None:
        """Another router tells of its keys, and is told of those here; ``None`` if it is this one."""
        if router == self._others.me:
            return None
        self._access.heard(router, usages)
        return self._others.me, self._access.usages()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_S)
            usages = self._access.usages()
            counts = {name: (usage.running, usage.charged) for name, usage in usages.items()}
            if counts != self._told or any(running for running, _ in counts.values()):
                self._told = counts
                for router, theirs in await self._others.ask("exchange_limits", usages):
                    self._access.heard(router, theirs)

"""Tiers that are scaled to zero: nobody who would like to draft with them wakes them, and nobody waits for them."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence

from cascade.errors import Unavailable
from deployments.links.held_lease import Lease, Lessor
from deployments.links.replica_status import ReplicaStatus

LOOK_S = 1.0  # between two looks at what runs


class Awake:
    """Leases on tiers of which those in ``sleepers`` may have no replica: then they are refused at once.

    A lease that waits would make Ray Serve start a replica, whatever its policy says. Made in a running event loop.
    """

    def __init__(self, lessors: Mapping[str, Lessor], sleepers: Collection[str]) -> None:
        self._status = ReplicaStatus()
        self._asleep: set[str] = set()
        self._sleepers = {*sleepers} & {*lessors}
        self._lessors = lessors
        self._looking = asyncio.create_task(self._look()) if self._sleepers else None

    @property
    def lessors(self) -> dict[str, Lessor]:
        """Those that wake nobody."""
        return {name: self._gate(name, take) if name in self._sleepers else take for name, take in self._lessors.items()}

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def _gate(self, name: str, take: Lessor) -> Lessor:
        def lease(session: str, preferred: Sequence[str] = ()) -> Lease:
            if name in self._asleep:
                raise Unavailable(f"tier {name} sleeps")
            return take(session, preferred)

        return lease

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):  # then what was known holds
                replicas = await self._status.replicas()
                self._asleep = {name for name in self._sleepers if not replicas.get(name)}
            await asyncio.sleep(LOOK_S)

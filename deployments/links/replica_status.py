"""The running replicas of each deployment, and how one of a tier describes itself."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cascade.errors import Unavailable
from cascade.settings.config import CascadeConfig, TierConfig

log = logging.getLogger(__name__)

COUNT_TIMEOUT_S = 2.0
COUNT_S = 10.0  # between two counts for metrics; Ray reports as often


class Tiers:
    """The tiers, bottom to top, as a router sees them.

    A tier that is scaled to zero is not asked while it has no replica: Serve would start one for the question. ``limits`` are
    context and vocabulary by tier, as the builder of the application read them; without those of the full tier it is asked.
    """

    def __init__(
        self, config: CascadeConfig, handles: Mapping[str, DeploymentHandle], limits: Mapping[str, Mapping[str, int]]
    ) -> None:
        self._config = config
        self._handles = handles
        self._limits = dict(limits)
        self._counting: asyncio.Task[dict[str, int]] | None = None

    async def start(self) -> None:
        """Wait for the full tier, however long it takes to start, unless it may have no replica."""
        full = self._config.tiers[-1]
        if full.name not in self._limits or not may_be_zero(full):
            state = await self._handles[full.name].describe.remote()
            self._limits[full.name] = {
                "context_len": min(state["context_len"], state["cache_tokens"]),  # what its memory cannot hold is no context
                "vocab_size": state["vocab_size"],
            }

    def limit(self, name: str) -> int:
        """The least ``context_len`` or ``vocab_size`` of all tiers."""
        return min(limits[name] for limits in self._limits.values())

    async def replicas(self) -> dict[str, int]:
        """Running replicas of each tier; raises `Unavailable`.

        One count at a time: Serve's controller is asked in a thread, which hangs as long as the controller.
        """
        if self._counting is None or self._counting.done():
            self._counting = asyncio.create_task(asyncio.to_thread(lambda: count_replicas()))
            self._counting.add_done_callback(lambda count: count.cancelled() or count.exception())  # nobody may be waiting
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                replicas = await asyncio.shield(self._counting)
        except Exception as error:  # whatever Ray raises: its controller is not there
            log.info("Ray Serve does not say what runs: %s", error)
            raise Unavailable("Ray Serve's controller does not say what runs: try again later") from None
        return {name: replicas.get(handle.deployment_name, 0) for name, handle in self._handles.items()}

    async def count(self, report: Callable[[str, int], object]) -> None:
        """Report the running replicas of each tier now and then, until cancelled."""
        while True:
            with contextlib.suppress(Unavailable):  # the last count stays
                for name, replicas in (await self.replicas()).items():
                    report(name, replicas)
            await asyncio.sleep(COUNT_S)

    async def states(self, timeout_s: float) -> dict[str, tuple[int, dict[str, Any] | None]]:
        """Running replicas of each tier, and how one of them describes itself; raises `Unavailable`."""
        replicas = await self.replicas()
        running = [name for name in self._handles if replicas[name]]
        states = await asyncio.gather(*(describe(self._handles[name], timeout_s) for name in running))
        described = dict(zip(running, states, strict=True))
        return {name: (replicas[name], described.get(name)) for name in self._handles}


def may_be_zero(tier: TierConfig) -> bool:
    scaling = tier.deployment_config.autoscaling_config
    return scaling is not None and scaling.get("min_replicas") == 0


async def describe(handle: DeploymentHandle, timeout_s: float) -> dict[str, Any] | None:
    """How a replica of a tier describes itself; ``None`` if none answers in time."""
    response = handle.describe.remote()
    try:
        async with asyncio.timeout(timeout_s):
            state: dict[str, Any] = await response
    except Exception as error:  # whatever Ray raises: there is no such replica
        log.info("A tier does not answer: %s", error)
        response.cancel()
        return None
    return state


def count_replicas() -> dict[str, int]:
    """Running replicas of each deployment of this application."""
    application = serve.get_replica_context().app_name
    deployments = serve.status().applications[application].deployments
    return {name: sum(n for state, n in d.replica_states.items() if state == "RUNNING") for name, d in deployments.items()}

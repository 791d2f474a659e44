"""What runs: the replicas of each deployment, as Ray Serve counts them, and what one of a tier says of itself."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cascade.errors import Unavailable
from cascade.settings.config import CascadeConfig, TierConfig

log = logging.getLogger(__name__)

COUNT_TIMEOUT_S = 2.0


class ReplicaStatus:
    """Counts replicas, one count at a time: Serve's controller is asked in a thread, which hangs as long as the controller."""

    def __init__(self) -> None:
        self._counting: asyncio.Task[dict[str, int]] | None = None

    async def replicas(self) -> dict[str, int]:
        """Running replicas by deployment, as the present count finds them; raises `Unavailable`."""
        if self._counting is None or self._counting.done():
            self._counting = asyncio.create_task(asyncio.to_thread(lambda: count_replicas()))
            self._counting.add_done_callback(lambda count: count.cancelled() or count.exception())  # nobody may be waiting
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                return await asyncio.shield(self._counting)
        except Exception as error:  # whatever Ray raises: its controller is not there
            log.info("Ray Serve does not say what runs: %s", error)
            raise Unavailable("Ray Serve's controller does not say what runs: try again later") from None


class Tiers:
    """What is known of the tiers, bottom to top.

    A tier that is scaled to zero is not asked while it has no replica: Serve would start one for the question. ``limits`` are
    context and vocabulary by tier, as the builder of the application read them; a tier without is not looked at, but the full
    one, which then says it itself.
    """

    def __init__(
        self, config: CascadeConfig, handles: Mapping[str, DeploymentHandle], limits: Mapping[str, Mapping[str, int]]
    ) -> None:
        self._config = config
        self._handles = handles
        self._limits = dict(limits)
        self._status = ReplicaStatus()

    async def start(self) -> None:
        """Wait for the full tier, however long it takes to start, unless it may have no replica."""
        full = self._config.tiers[-1]
        if full.name not in self._limits or not may_be_zero(full):
            state = await self._handles[full.name].describe.remote()
            self._limits[full.name] = {name: state[name] for name in ("context_len", "vocab_size")}

    def limit(self, name: str) -> int:
        """``context_len`` or ``vocab_size`` that all tiers take."""
        return min(limits[name] for limits in self._limits.values())

    @property
    def full(self) -> TierConfig:
        return self._config.tiers[-1]

    async def replicas(self) -> dict[str, int]:
        """Those of each tier that run; raises `Unavailable`."""
        replicas = await self._status.replicas()
        return {name: replicas.get(name, 0) for name in self._handles}

    async def num_drafters(self, timeout_s: float) -> int | None:
        """How many tiers below the full one answer within the time; ``None`` if nobody can be asked."""
        always = [tier.name for tier in self._config.tiers[:-1] if not may_be_zero(tier)]
        answers = await asyncio.gather(*(ask(self._handles[name], timeout_s) for name in always))
        return len([answer for answer in answers if answer is not None]) if always else None

    async def states(self, timeout_s: float) -> dict[str, tuple[int, dict[str, Any] | None]]:
        """Replicas of each tier, and what one of them says of itself; raises `Unavailable`."""
        replicas = await self._status.replicas()
        running = [name for name in self._handles if replicas.get(name)]
        said = dict(zip(running, await asyncio.gather(*(ask(self._handles[name], timeout_s) for name in running)), strict=True))
        return {name: (replicas.get(name, 0), said.get(name)) for name in self._handles}


def may_be_zero(tier: TierConfig) -> bool:
    scaling = tier.deployment_config.autoscaling_config
    return scaling is not None and scaling.get("min_replicas") == 0


async def ask(handle: DeploymentHandle, timeout_s: float) -> dict[str, Any] | None:
    """What a tier says of itself; ``None`` if no replica answers in time."""
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

"""What runs: the replicas of each deployment, as Ray Serve counts them, and what one of a tier says of itself."""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cascade.errors import Unavailable

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

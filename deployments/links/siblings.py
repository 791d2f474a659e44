"""The other replicas of a deployment: clients of one port reach any of several routers, and some questions are for all."""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.replica import context, replica_name

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
AGAIN_S = 0.05  # between two tries while Serve has not told yet which routers there are


class Siblings:
    """Asks all replicas of this one's deployment that Serve routes to; outside of Ray Serve there are none."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle | None = None
        here = context()
        self.name = replica_name()
        self._deployment = None if here is None else (here.deployment, here.app_name)

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """What ``method`` of each replica returns, which is told first who asks; ``None`` and those without answer left out."""
        if self._deployment is None:
            return []
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if self._handle is None:  # Serve's controller is asked, which may take a while
                    self._handle = await asyncio.to_thread(serve.get_deployment_handle, *self._deployment)
                answers = await self._answers(self._handle, method, args)
        except Exception as error:  # whatever Ray raises, or the time is over
            log.warning("The other replicas cannot be asked: %s", error or type(error).__name__)
            return []
        return [answer for answer in answers if answer is not None and not isinstance(answer, BaseException)]

    async def _answers(self, handle: DeploymentHandle, method: str, args: tuple[Any, ...]) -> list[Any]:
        while True:
            try:
                return await handle.broadcast(method, self.name, *args).results_async(return_exceptions=True)
            except RayServeException:  # none is known yet
                await asyncio.sleep(AGAIN_S)

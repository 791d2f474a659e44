"""Calls to all replicas of a deployment, such as the routers that share this one's ports."""

import asyncio
import contextlib
import logging
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.replica import context, replica_name

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
AGAIN_S = 0.05  # seconds between two tries until Serve has sent the list of replicas


async def ask_all(handle: DeploymentHandle, method: str, *args: Any, timeout_s: float) -> list[Any]:
    """Results of ``method`` at each replica to which Serve routes; without failed ones, and empty after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            answers = await _answers(handle, method, args)
    except Exception as error:  # an error of Ray, or the timeout
        log.info("Replicas do not %s: %s", method, error or type(error).__name__)
        return []
    for answer in answers:
        if isinstance(answer, BaseException):
            log.warning("A replica does not %s: %s", method, " ".join(str(answer).split())[-300:])
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _answers(handle: DeploymentHandle, method: str, args: tuple[Any, ...]) -> list[Any]:
    while True:
        try:
            answers: list[Any] = await handle.broadcast(method, *args).results_async(return_exceptions=True)
            return answers
        except RayServeException:  # no replica is known yet
            await asyncio.sleep(AGAIN_S)


class Siblings:
    """Calls all replicas of this one's deployment; there are none outside of Ray Serve."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle | None = None
        here = context()
        self.name = replica_name()
        self._deployment = None if here is None else (here.deployment, here.app_name)

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """Results of ``method`` of each replica, except ``None``; its first argument is the caller's name."""
        if self._handle is None and self._deployment is not None:
            with contextlib.suppress(Exception):  # Ray may raise anything if Serve's controller is gone
                async with asyncio.timeout(TIMEOUT_S):
                    self._handle = await asyncio.to_thread(serve.get_deployment_handle, *self._deployment)
        if self._handle is None:
            return []
        answers = await ask_all(self._handle, method, self.name, *args, timeout_s=TIMEOUT_S)
        return [answer for answer in answers if answer is not None]

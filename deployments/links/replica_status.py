"""The running replicas of each deployment, what a replica of a tier says of itself, and calls to all replicas of one."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cascade.errors import Unavailable
from cascade.settings.config import CascadeConfig, TierConfig
from deployments.replica import context, replica_name

T = TypeVar("T")
log = logging.getLogger(__name__)

COUNT_TIMEOUT_S = 2.0
COUNT_S = 10.0  # seconds between two counts for metrics; Ray reports as often
SIBLINGS_TIMEOUT_S = 2.0
AGAIN_S = 0.05  # seconds between two tries until Serve has sent the list of replicas


class Controller(Generic[T]):
    """A ``question`` to Serve's controller. Only one is asked at a time, since its thread hangs as long as the controller."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._question = question
        self._asking: asyncio.Task[T] | None = None

    async def ask(self, timeout_s: float) -> T:
        """The answer; raises `TimeoutError`, or any error of Ray."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(asyncio.to_thread(self._question))
            self._asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())  # no error unread
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._asking)


class Tiers:
    """The tiers, bottom to top, as a router sees them.

    A tier without a replica is not called, since Serve would start one for the call. ``limits`` are context and vocabulary by
    tier, as read when the application was built; without those of the full tier, a replica is asked.
    """

    def __init__(
        self, config: CascadeConfig, handles: Mapping[str, DeploymentHandle], limits: Mapping[str, Mapping[str, int]]
    ) -> None:
        self._config = config
        self._handles = handles
        self._limits = dict(limits)
        self._count = Controller(lambda: count_replicas())

    async def start(self) -> None:
        """Wait for the full tier, however long it takes to start, unless it may have no replica."""
        full = self._config.tiers[-1]
        if full.name not in self._limits or not may_be_zero(full):
            state = await self._handles[full.name].describe.remote()
            self._limits[full.name] = {
                "context_len": min(state["context_len"], state["cache_tokens"]),  # limited by the memory of the replica
                "vocab_size": state["vocab_size"],
            }

    def limit(self, name: str) -> int:
        """The smallest ``context_len`` or ``vocab_size`` of all tiers."""
        return min(limits[name] for limits in self._limits.values())

    async def replicas(self) -> dict[str, int]:
        """Running replicas of each tier; raises `Unavailable`."""
        try:
            replicas = await self._count.ask(COUNT_TIMEOUT_S)
        except Exception as error:  # Ray may raise anything if its controller is gone
            log.info("Ray Serve does not say what runs: %s", error)
            raise Unavailable("Ray Serve's controller does not say what runs: try again later") from None
        return {name: replicas.get(handle.deployment_name, 0) for name, handle in self._handles.items()}

    async def count(self, report: Callable[[str, int], object]) -> None:
        """Report the running replicas of each tier now and then, until cancelled."""
        while True:
            with contextlib.suppress(Unavailable):  # keeps the last count
                for name, replicas in (await self.replicas()).items():
                    report(name, replicas)
            await asyncio.sleep(COUNT_S)

    async def states(self, timeout_s: float) -> dict[str, tuple[int, dict[str, Any] | None]]:
        """Running replicas of each tier, and the self-description of one; raises `Unavailable`."""
        replicas = await self.replicas()
        running = [name for name in self._handles if replicas[name]]
        states = await asyncio.gather(*(describe(self._handles[name], timeout_s) for name in running))
        described = dict(zip(running, states, strict=True))
        return {name: (replicas[name], described.get(name)) for name in self._handles}


def may_be_zero(tier: TierConfig) -> bool:
    scaling = tier.deployment_config.autoscaling_config
    return scaling is not None and scaling.get("min_replicas") == 0


async def describe(handle: DeploymentHandle, timeout_s: float) -> dict[str, Any] | None:
    """The self-description of a replica of a tier; ``None`` if none answers in time."""
    response = handle.describe.remote()
    try:
        async with asyncio.timeout(timeout_s):
            state: dict[str, Any] = await response
    except Exception as error:  # Ray may raise anything if there is no replica
        log.info("A tier does not answer: %s", error)
        response.cancel()
        return None
    return state


def count_replicas() -> dict[str, int]:
    """Running replicas of each deployment of this application."""
    application = serve.get_replica_context().app_name
    deployments = serve.status().applications[application].deployments
    return {name: sum(n for state, n in d.replica_states.items() if state == "RUNNING") for name, d in deployments.items()}


def own_handle() -> DeploymentHandle | None:
    """A handle of this replica's deployment; ``None`` outside of Ray Serve."""
    here = context()
    return None if here is None else serve.get_deployment_handle(here.deployment, here.app_name)


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
    """Calls all replicas of this one's deployment, such as the routers of its ports; there are none outside of Ray Serve."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle | None = None
        self._find = Controller(own_handle)
        self.name = replica_name()

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """Results of ``method`` of each replica, except ``None``; its first argument is the caller's name."""
        if self._handle is None:
            with contextlib.suppress(Exception):  # Ray may raise anything if Serve's controller is gone
                self._handle = await self._find.ask(SIBLINGS_TIMEOUT_S)
        if self._handle is None:
            return []
        answers = await ask_all(self._handle, method, self.name, *args, timeout_s=SIBLINGS_TIMEOUT_S)
        return [answer for answer in answers if answer is not None]

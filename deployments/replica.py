"""What replicas of routers and tiers share under Ray Serve: name and logs."""

import contextlib
import gc
import logging
from collections.abc import AsyncIterator

from ray import serve
from ray.serve.context import ReplicaContext
from ray.serve.exceptions import RayServeException

OURS = ("cascade", "deployments")
SERVES = "ray.serve"


def context() -> ReplicaContext | None:
    """Ray Serve's context of the replica in this process; ``None`` outside of one."""
    try:
        return serve.get_replica_context()
    except RayServeException:
        return None


def replica_name() -> str:
    """Serve's name of the replica in this process; empty outside of one."""
    here = context()
    return "" if here is None else str(here.replica_tag)


def join_serves() -> None:
    """In a replica, send the logs of this package to Ray Serve's logger."""
    if context() is not None:
        for name in OURS:  # Serve sets its logger up anew when the configuration changes
            logging.getLogger(name).parent = logging.getLogger(SERVES)


@contextlib.asynccontextmanager
async def starting() -> AsyncIterator[None]:
    """Collect no garbage while a replica starts, nor ever what its start has left.

    There is none while libraries are imported, and to look for it takes a sixth of the time. Later, to look at all that stays
    would take a third of a second.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()

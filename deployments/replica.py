"""Shared by replicas of routers and tiers under Ray Serve: context, name, logs, startup."""

import contextlib
import gc
import logging
from collections.abc import AsyncIterator

from ray import serve
from ray.serve.context import ReplicaContext
from ray.serve.exceptions import RayServeException

log = logging.getLogger(__name__)

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
    """In a replica, send logs of this package to Ray Serve's logger."""
    if context() is not None:
        for name in OURS:  # read each time, since Serve recreates its logger when the configuration changes
            logging.getLogger(name).parent = logging.getLogger(SERVES)


@contextlib.asynccontextmanager
async def starting() -> AsyncIterator[None]:
    """Log to Ray Serve's logger, also why a replica does not start, which else only Serve's controller says.

    Disables the garbage collector meanwhile, and freezes all objects that exist then.
    Imports leave no garbage, and collecting would take a sixth of the start. Later, scanning these objects would take a third
    of a second each time.
    """
    join_serves()
    gc.disable()
    try:
        yield
        gc.freeze()
    except Exception:
        log.exception("This replica does not start")
        raise
    finally:
        gc.enable()

"""Shared by replicas of routers and tiers under Ray Serve: context, name, logs, startup, and versions of packages."""

import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from ray import serve
from ray.serve.context import ReplicaContext
from ray.serve.exceptions import RayServeException

from cascade.errors import ConfigError

log = logging.getLogger(__name__)

OURS = ("cascade", "deployments")
SERVES = "ray.serve"
# packages on which texts or messages between nodes depend; Ray itself checks Ray and Python
PACKAGES = ("cascade-serve", "torch", "transformers", "tokenizers", "llguidance", "vllm")


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


def packages() -> dict[str, str]:
    """Versions of `PACKAGES` that are installed here, without build tags such as ``+cu130``."""
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name).partition("+")[0]
    return installed


def check_alike(expected: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a package's version differs from that where the application was built."""
    here = packages()
    for name in here.keys() & expected.keys():
        if here[name] != expected[name]:
            raise ConfigError(
                f"This node has {name} {here[name]}, and the application was built with {expected[name]}, of which texts may "
                "differ: install what cluster/constraints.txt names on every node, or set verify to false"
            )

"""What replicas of routers and tiers share under Ray Serve: their name, their logs, a configuration that may change."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ray import serve
from ray.serve.context import ReplicaContext
from ray.serve.exceptions import RayServeException

from cascade.errors import ConfigError
from cascade.settings.live import changed

T = TypeVar("T")
log = logging.getLogger(__name__)

OURS = ("cascade", "deployments")
SERVES = "ray.serve"


def context() -> ReplicaContext | None:
    """What Ray Serve says of the replica in this process; ``None`` outside of one."""
    try:
        return serve.get_replica_context()
    except RayServeException:
        return None


def replica_name() -> str:
    """Serve's name of the replica in this process; empty outside of one."""
    here = context()
    return "" if here is None else str(here.replica_tag)


def join_serves() -> None:
    """Hand what this package logs to Ray Serve's logger, in a replica; elsewhere whoever runs the process decides."""
    if context() is not None:
        for name in OURS:  # Serve sets its logger up anew when the configuration changes
            logging.getLogger(name).parent = logging.getLogger(SERVES)


class LiveConfig(Generic[T]):
    """The configuration ``values`` of a replica, read by ``parse``, of which ``paths`` may change while it runs."""

    def __init__(self, values: Mapping[str, Any], paths: Sequence[str], parse: Callable[[Mapping[str, Any]], T]) -> None:
        self._values = values
        self._paths = paths
        self._parse = parse
        self._started = False

    def update(self, user_config: Mapping[str, Any], apply: Callable[[T], object]) -> None:
        """Apply what Serve says; raises `ConfigError` if that is wrong, but only when the replica starts.

        Later it goes on as it was, and logs why: Serve would replace a replica that raises, and the next one, too.
        """
        try:
            apply(self._parse(changed(self._values, user_config, self._paths)))
        except ConfigError as error:
            if not self._started:
                raise
            log.error("This replica goes on as it was configured before: %s", error)
        self._started = True

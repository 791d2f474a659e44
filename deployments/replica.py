"""What replicas of routers and tiers share under Ray Serve: a configuration that may change while they run, and its logs."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ray import serve
from ray.serve.exceptions import RayServeException

from cascade.errors import ConfigError
from cascade.settings.live import changed

T = TypeVar("T")
log = logging.getLogger(__name__)

OURS = ("cascade", "deployments")
SERVES = "ray.serve"


def join_serves() -> None:
    """Hand what this package logs to Ray Serve's logger, in a replica; elsewhere whoever runs the process decides."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return
    for name in OURS:
        logging.getLogger(name).parent = logging.getLogger(SERVES)  # which Serve sets up anew when the configuration changes


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

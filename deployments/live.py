"""What Ray Serve tells running replicas: a changed configuration that needs no new ones."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from cascade.errors import ConfigError
from cascade.settings.live import changed

T = TypeVar("T")
log = logging.getLogger(__name__)


class LiveConfig(Generic[T]):
    """The configuration ``values`` of a replica, read by ``parse``, of which ``paths`` may change while it runs."""

    def __init__(self, values: Mapping[str, Any], paths: Sequence[str], parse: Callable[[Mapping[str, Any]], T]) -> None:
        self._values = values
        self._paths = paths
        self._parse = parse
        self._started = False

    def take(self, user_config: Mapping[str, Any], apply: Callable[[T], object]) -> None:
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

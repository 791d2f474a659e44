"""Our log records in Ray Serve's files, where its `logging_config` decides on level and form."""

import logging

from ray import serve
from ray.serve.exceptions import RayServeException

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

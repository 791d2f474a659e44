"""The servicer function for Ray Serve's gRPC proxies; `SERVICER` is its name for ``grpc_servicer_functions``."""

from typing import Any

import grpc

from cascade.client.rpc import handlers_of
from deployments.ray_compat import patch_proxies

SERVICER = "deployments.gateway.grpc.ingress.add_CascadeServicer_to_server"


def add_CascadeServicer_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Add the service; called in the proxy's process."""
    patch_proxies()
    server.add_generic_rpc_handlers((handlers_of(servicer),))

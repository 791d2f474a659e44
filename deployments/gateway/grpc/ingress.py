"""What Ray Serve's gRPC proxies call to serve the protocol: `SERVICER` is its name for ``grpc_servicer_functions``."""

import grpc

from cascade.v1 import serving_pb2_grpc
from deployments.ray_compat import patch_proxies

SERVICER = "deployments.gateway.grpc.ingress.add_CascadeServicer_to_server"


def add_CascadeServicer_to_server(servicer: serving_pb2_grpc.CascadeServicer, server: grpc.aio.Server) -> None:
    """Add the service; called in the proxy's process."""
    patch_proxies()
    serving_pb2_grpc.add_CascadeServicer_to_server(servicer, server)

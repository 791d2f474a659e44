"""Puts a cascade on a cluster: `python -m tests.nodes.deploy` on a node of it."""

import json
import sys

HTTP, GRPC = 8000, 9000  # of Ray Serve's proxies
OWN_HTTP, OWN_GRPC = 8100, 9100  # of the routers


def deploy() -> None:
    """Put the cascade that standard input describes on the cluster, and return when it serves."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions

    from deployments.app import build
    from deployments.gateway.grpc.ingress import SERVICER
    from deployments.ops.launch import APPLICATION, QUIET

    application = build(json.load(sys.stdin))
    ray.init(address="auto", log_to_driver=False)
    serve.start(
        proxy_location=ProxyLocation.EveryNode,
        http_options=HTTPOptions(host="0.0.0.0", port=HTTP),
        grpc_options=gRPCOptions(port=GRPC, grpc_servicer_functions=[SERVICER]),
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    serve.run(application, name=APPLICATION, route_prefix="/", logging_config=QUIET)


if __name__ == "__main__":
    deploy()

"""Leases through Ray Serve. In a module of its own: the router takes them, too, and need not know what a tier imports."""

from ray.serve.handle import DeploymentHandle

from deployments.links.held_lease import Lessor


def lessor(handle: DeploymentHandle) -> Lessor:
    """Takes leases on the replicas behind ``handle``."""
    streaming = handle.options(stream=True)
    return lambda session, preferred=(): streaming.lease.remote(session, preferred)

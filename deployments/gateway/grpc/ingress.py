"""What Ray Serve's gRPC proxies call to serve the protocol: `SERVICER` is its name for ``grpc_servicer_functions``."""

import asyncio
from typing import Any

import grpc
from ray.exceptions import RayActorError
from ray.serve._private import proxy
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from cascade.v1 import serving_pb2_grpc

SERVICER = "deployments.gateway.grpc.ingress.add_CascadeServicer_to_server"


def add_CascadeServicer_to_server(servicer: serving_pb2_grpc.CascadeServicer, server: grpc.aio.Server) -> None:
    """Add the service; called in the proxy's process."""
    patch_proxies()
    serving_pb2_grpc.add_CascadeServicer_to_server(servicer, server)


def patch_proxies() -> None:
    """Let the proxy cancel a request whose client leaves during a write, and say in plain words that a router is gone.

    The proxy of Ray 2.60 notices such a client only while it waits for the next piece: one request in five went on to its end.
    It also told clients of actors. Ray has no public way to change either; without the private class the proxy does as before.
    """
    original = getattr(proxy, "ProxyResponseGenerator", None)
    if isinstance(original, type) and not issubclass(original, _EndsWithItsCall):
        proxy.ProxyResponseGenerator = type("ProxyResponseGenerator", (_EndsWithItsCall, original), {})


class RouterGone(DeploymentUnavailableError):  # type: ignore[misc]  # Ray is not typed
    """An error that the proxy reports as UNAVAILABLE, or 503."""

    def __init__(self) -> None:
        super().__init__(DeploymentID("router"))

    @property
    def message(self) -> str:
        return "The router that wrote the answer is gone: ask again"


class _EndsWithItsCall:
    """Mixed into the proxy's answers: ends the request with the call in whose task it was made."""

    _response: Any
    _done: bool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        call = asyncio.current_task()
        if call is not None:
            call.add_done_callback(self._end)

    async def __anext__(self) -> Any:
        try:
            return await super().__anext__()  # type: ignore[misc]  # of the proxy's class
        except RayActorError as error:
            raise RouterGone from error

    def _end(self, call: "asyncio.Task[Any]") -> None:
        if not self._done and not self._response.cancelled():
            self._response.cancel()

"""What Ray Serve's gRPC proxies run to know our service: the name to give as ``grpc_servicer_functions``."""

import asyncio
from typing import Any

import grpc
from ray.serve._private import proxy

from cascade.v1 import serving_pb2_grpc

SERVICER = "deployments.grpc.ingress.add_CascadeServicer_to_server"


def add_CascadeServicer_to_server(servicer: serving_pb2_grpc.CascadeServicer, server: grpc.aio.Server) -> None:
    """Add the service; called in the proxy's process."""
    heed_cancels()
    serving_pb2_grpc.add_CascadeServicer_to_server(servicer, server)


def heed_cancels() -> None:
    """Let the proxy cancel a request whose client leaves while a piece of the answer is being written to it.

    The proxy of Ray 2.60 notices only while it waits for the next piece, so that the requests of one client in five went on to
    their end. Ray has no public way to tell it; where the private class is missing the proxy does as before.
    """
    original = getattr(proxy, "ProxyResponseGenerator", None)
    if isinstance(original, type) and not issubclass(original, _Ending):
        proxy.ProxyResponseGenerator = type("ProxyResponseGenerator", (_Ending, original), {})


class _Ending:
    """Mixed into the proxy's answers: the request ends with the call in whose task it was made."""

    _response: Any
    _done: bool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        call = asyncio.current_task()
        if call is not None:
            call.add_done_callback(self._end)

    def _end(self, call: "asyncio.Task[Any]") -> None:
        if not self._done and not self._response.cancelled():
            self._response.cancel()

"""Calls and handlers of a gRPC service, made from its descriptor, so that only messages need generated code."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from cascade.v1 import link_pb2, serving_pb2

CASCADE: ServiceDescriptor = serving_pb2.DESCRIPTOR.services_by_name["Cascade"]
LINK: ServiceDescriptor = link_pb2.DESCRIPTOR.services_by_name["Link"]


def stub_of(channel: Any, service: ServiceDescriptor = CASCADE, *, streamed: bool = False) -> Any:
    """The calls of a service over a channel of `grpc` or `grpc.aio`, by the names of its methods.

    ``streamed``: calls with a single response give a stream of one message, which is the same on the wire.
    """
    calls = {}
    for method in service.methods:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        path = f"/{service.full_name}/{method.name}"
        kind = "unary_stream" if streamed else _kind(method)
        calls[method.name] = getattr(channel, kind)(path, request.SerializeToString, response.FromString)
    return SimpleNamespace(**calls)


def handlers_of(
    servicer: Any, service: ServiceDescriptor = CASCADE, parse: Callable[..., Any] = lambda kind, data: kind.FromString(data)
) -> "grpc.GenericRpcHandler[Any, Any]":
    """A handler that answers the calls of a service by the methods of ``servicer`` with the same names.

    Calls without a method are unimplemented. ``parse`` reads requests.
    """
    made = {}
    for method in [method for method in service.methods if hasattr(servicer, method.name)]:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        handler = getattr(grpc, f"{_kind(method)}_rpc_method_handler")
        made[method.name] = handler(getattr(servicer, method.name), partial(parse, request), response.SerializeToString)
    return grpc.method_handlers_generic_handler(service.full_name, made)


def _kind(method: MethodDescriptor) -> str:
    """gRPC's name for the kind of a method, such as ``unary_stream``."""
    return "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))

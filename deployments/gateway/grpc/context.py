"""A gRPC request beside its message: its metadata, its deadline, and the status it gets when it fails."""

import contextlib
from collections.abc import Callable, Iterator

import grpc
from ray.serve.grpc_util import RayServegRPCContext

from deployments.gateway.admission.status import refusal


@contextlib.contextmanager
def reported(context: RayServegRPCContext, count: Callable[[str], object]) -> Iterator[None]:
    """Report what fails in here to the client, by its gRPC status and its sentence, and to ``count``, by its code."""
    try:
        yield
    except Exception as error:
        refused = refusal(error)
        count(refused.kind.code)
        context.set_code(grpc.StatusCode[refused.kind.grpc])
        context.set_details(refused.message)
        context.set_trailing_metadata(refused.metadata)
        raise


def metadata(context: RayServegRPCContext) -> dict[str, str]:
    """What a gRPC request says beside its message; of a repeated key the first value, and no binary ones."""
    said: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            said.setdefault(key, value)
    return said


def remaining_s(context: RayServegRPCContext) -> float | None:
    """Until the client's deadline. Ray Serve's proxy does not say; it cancels the request then."""
    remaining = getattr(context, "time_remaining", None)
    return None if remaining is None else remaining()

"""All uses of Ray Serve's private interfaces, with reasons.

`tests/test_ray_compat.py` checks that the installed Ray still needs each: if a test fails, the workaround can go. Tried with
Ray 2.60.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import ray
from pydantic import PrivateAttr
from ray.exceptions import RayActorError
from ray.serve import Deployment
from ray.serve._private.common import DeploymentID
from ray.serve._private.config import DeploymentConfig
from ray.serve.exceptions import DeploymentUnavailableError


class Versioned(DeploymentConfig):  # type: ignore[misc]  # Ray is not typed
    """Serve's configuration of a deployment, with a version of its own."""

    _own: str = PrivateAttr("")

    def to_proto(self) -> Any:
        """The message to Serve's controller."""
        proto = super().to_proto()
        proto.version = self._own
        return proto


def versioned(deployment: Deployment, fixed: Mapping[str, Any]) -> Deployment:
    """``deployment``, whose replicas are replaced when ``fixed``, JSON values, or their environment changes.

    Serve replaces replicas when the version of their deployment changes, and has no public way to set it. By default all
    deployments of an application have one version, made from the whole ``args``: any change would replace all tiers and
    routers.
    """
    plain = deployment._deployment_config
    config = Versioned.model_construct(plain.model_fields_set, **dict(plain))
    # this task, in which Serve builds the application, has the application's environment
    environment = dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}
    parts = {"fixed": fixed, "package": version("cascade-serve"), "runtime_env": environment}
    config._own = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    deployment._deployment_config = config
    return deployment


def patch_proxies() -> None:
    """Let Serve's proxy cancel a request whose client leaves during a write, and report a dead router in plain words.

    By itself the proxy notices such a client only while it waits for the next piece, so one request in five ran to its end; and
    its errors name actors. If the private class is gone, nothing is changed.
    """
    from ray.serve._private import proxy  # imported only in proxies, since it imports their servers

    original = getattr(proxy, "ProxyResponseGenerator", None)
    if isinstance(original, type) and not issubclass(original, _EndsWithItsCall):
        proxy.ProxyResponseGenerator = type("ProxyResponseGenerator", (_EndsWithItsCall, original), {})


class RouterGone(DeploymentUnavailableError):  # type: ignore[misc]  # Ray is not typed
    """An error that the proxy reports as UNAVAILABLE, or 503."""

    def __init__(self) -> None:
        super().__init__(DeploymentID("router"))

    @property
    def message(self) -> str:
        return "The router of the answer has died: send the request again"


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
            return await super().__anext__()  # type: ignore[misc]  # the proxy's class has it
        except RayActorError as error:
            raise RouterGone from error

    def _end(self, call: "asyncio.Task[Any]") -> None:
        if not self._done and not self._response.cancelled():
            self._response.cancel()

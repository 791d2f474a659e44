"""What is done to Ray Serve behind its public interfaces: all of it, and why.

`tests/test_ray_compat.py` shows for the Ray that is installed that each is still needed: one that fails may go. Tried with Ray
2.60.
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
        """What goes to Serve's controller."""
        proto = super().to_proto()
        proto.version = self._own
        return proto


def versioned(deployment: Deployment, fixed: Mapping[str, Any]) -> Deployment:
    """``deployment``, whose replicas are replaced when ``fixed``, JSON values, or their environment changes.

    Serve replaces replicas when the version of their deployment changes, and has no public way to set it: it gives all
    deployments of an application one version, made of the whole ``args``, and one changed word replaces every tier and router.
    """
    plain = deployment._deployment_config
    config = Versioned.model_construct(plain.model_fields_set, **dict(plain))
    # the application's environment is that of the task in which Serve builds it
    environment = dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}
    parts = {"fixed": fixed, "package": version("cascade-serve"), "runtime_env": environment}
    config._own = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    deployment._deployment_config = config
    return deployment


def patch_proxies() -> None:
    """Let Serve's proxy cancel a request whose client leaves during a write, and say in plain words that a router is gone.

    It notices such a client only while it waits for the next piece: one request in five went on to its end. It also told
    clients of actors. Without the private class the proxy does as before.
    """
    from ray.serve._private import proxy  # only proxies need it, and it imports their servers

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
            return await super().__anext__()  # type: ignore[misc]  # the proxy's class has it
        except RayActorError as error:
            raise RouterGone from error

    def _end(self, call: "asyncio.Task[Any]") -> None:
        if not self._done and not self._response.cancelled():
            self._response.cancel()

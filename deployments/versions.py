"""Versions of deployments, and of packages.

Serve replaces replicas when the version of their deployment changes. By itself it gives all deployments of an application one
version, made of the whole ``args``: one changed word would replace every tier and router.
"""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from pydantic import PrivateAttr
from ray.serve import Deployment
from ray.serve._private.config import DeploymentConfig

from cascade.errors import ConfigError

# what texts, or messages between nodes, may depend on; Ray looks at itself and at Python
PACKAGES = ("cascade-serve", "torch", "transformers", "tokenizers", "llguidance", "vllm")


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

    Serve (2.60) has no public way to set a version.
    """
    plain = deployment._deployment_config
    config = Versioned.model_construct(plain.model_fields_set, **dict(plain))
    # the application's environment is that of the task in which Serve builds it
    environment = dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}
    parts = {"fixed": fixed, "package": version("cascade-serve"), "runtime_env": environment}
    config._own = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    deployment._deployment_config = config
    return deployment


def packages() -> dict[str, str]:
    """Versions of `PACKAGES` that are installed here, without the build, such as ``+cu130``."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def check_alike(expected: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a package has another version here than where the application was built."""
    here = packages()
    for name in here.keys() & expected.keys():
        if here[name] != expected[name]:
            raise ConfigError(
                f"This node has {name} {here[name]}, and the application was built with {expected[name]}, of which texts may "
                "differ: install what cluster/constraints.txt names on every node, or set verify to false"
            )

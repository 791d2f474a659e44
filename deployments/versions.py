"""A version for each deployment, and versions of packages.

Ray Serve gives all deployments of an application one, made of its whole ``args``.

Replicas are replaced when the version of their deployment changes. So one changed word would replace every tier and router.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from pydantic import PrivateAttr
from ray.serve import Deployment
from ray.serve._private.config import DeploymentConfig

from cascade.errors import ConfigError
from cascade.settings.live import digest

# what texts, or messages between nodes, may depend on; Ray looks at itself and at Python
PACKAGES = ("cascade-serve", "torch", "transformers", "tokenizers", "llguidance", "vllm")


class Versioned(DeploymentConfig):  # type: ignore[misc]  # Ray is not typed
    """Serve's own, which tells the controller its own version, whatever the application's is."""

    _own: str = PrivateAttr("")

    def to_proto(self) -> Any:
        """What the controller is told."""
        proto = super().to_proto()
        proto.version = self._own
        return proto


def versioned(deployment: Deployment, fixed: Mapping[str, Any]) -> Deployment:
    """``deployment``, whose replicas stay as long as ``fixed``, JSON values, and what they run in stay.

    Serve has no public way to say a version (2.60); without this, every deployment is replaced with every change.
    """
    plain = deployment._deployment_config
    config = Versioned.model_construct(plain.model_fields_set, **dict(plain))
    # the application's environment is that of the task in which Serve builds it
    environment = dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}
    config._own = digest({"fixed": fixed, "package": version("cascade-serve"), "runtime_env": environment})
    deployment._deployment_config = config
    return deployment


def packages() -> dict[str, str]:
    """Versions of `PACKAGES` that are installed here, without what tells builds apart, such as ``+cu130``."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def check_alike(expected: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a package here is another than where the application was built, of those that both have."""
    here = packages()
    for name in here.keys() & expected.keys():
        if here[name] != expected[name]:
            raise ConfigError(
                f"This node has {name} {here[name]}, and the application was built with {expected[name]}, of which texts may "
                "differ: install what cluster/constraints.txt names on every node, or set verify to false"
            )

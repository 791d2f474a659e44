"""What the tiers ask of a cluster, and whether it has that: Ray Serve waits without a word for what is not there."""

from collections.abc import Mapping
from typing import Any

from cascade.config import CascadeConfig, DeploymentConfig
from deployments.app import tier_options

ROUNDING = 1e-6  # shares are decimal fractions, whose sums are not: 3 x 0.2 + 0.3 + 0.1 is more than 1
NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # Ray's options and the resources they mean


def shortage(config: CascadeConfig, there: Mapping[str, float]) -> str | None:
    """One sentence if the replicas to start with ask for more of anything than is ``there``, by Ray's names of resources."""
    asked: dict[str, dict[str, float]] = {}
    for tier in config.tiers:
        for name, amount in _of_replica(tier_options(tier)).items():
            asked.setdefault(name, {})[tier.name] = amount * _num_replicas(tier.deployment_config)
    for name, tiers in asked.items():
        total, has = sum(tiers.values()), there.get(name, 0.0)
        if total > has + ROUNDING:
            parts = ", ".join(f"{tier} {amount:g}" for tier, amount in tiers.items() if amount)
            return (
                f"The tiers ask for {total:g} {name} ({parts}) and Ray has {has:g} of it: "
                "change their ray_actor_options, accelerator_type or num_replicas, or add machines"
            )
    return None


def _of_replica(options: Mapping[str, Any]) -> dict[str, float]:
    """Resources that one replica takes, with its placement group."""
    bundles = options.get("placement_group_bundles")
    if bundles is not None:
        return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for bundle in bundles for name in bundle}
    actor = {"num_cpus": 1} | options["ray_actor_options"]
    amounts = {resource: float(actor.get(option) or 0.0) for option, resource in NAMES.items()}
    kind = actor.get("accelerator_type")
    return amounts | dict(actor.get("resources") or {}) | ({f"accelerator_type:{kind}": 0.001} if kind else {})


def _num_replicas(config: DeploymentConfig) -> int:
    """That there are at the start."""
    scaling = config.autoscaling_config
    if scaling is not None:
        first = scaling.get("initial_replicas")
        return int(scaling.get("min_replicas", 1) if first is None else first)
    return config.num_replicas if isinstance(config.num_replicas, int) else 1

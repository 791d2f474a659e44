"""What the replicas of a configuration ask of a cluster, and whether Ray's autoscaler finds nodes for them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer, get_nodes_for

from cascade.settings.config import CascadeConfig, TierConfig
from cascade.settings.deployment import resources

NodeTypes = Mapping[str, Mapping[str, Any]]  # as Ray's autoscaler has them: resources and max_workers by name


def num_replicas(tier: TierConfig, bound: str) -> int:
    """Of a tier at the fewest (``min_replicas``) or the most (``max_replicas``)."""
    deployment = tier.deployment_config
    return int((deployment.autoscaling_config or {}).get(bound, deployment.num_replicas or 1))


def demands(config: CascadeConfig, bound: str) -> list[dict[str, float]]:
    """Resources of each replica of each tier, and of each router."""
    tiers = [tier.resources for tier in config.tiers for _ in range(num_replicas(tier, bound))]
    router = config.router.deployment_config
    return [*tiers, *[resources(router.ray_actor_options)] * router.num_replicas]


def nodes_for(node_types: NodeTypes, head: str, asks: list[dict[str, float]]) -> tuple[dict[str, int], list[dict[str, float]]]:
    """How many nodes of each type the autoscaler would start for ``asks``, and what it finds none for."""
    types = {name: {"max_workers": 0, **kind} for name, kind in node_types.items()}
    room = 1 + sum(kind["max_workers"] for kind in types.values())  # with the head
    scorer = partial(_default_utilization_scorer, node_availability_summary=NodeAvailabilitySummary({}))
    started, without = get_nodes_for(types, {}, head, room, asks, scorer)
    return dict(started), without


def fits(kind: Mapping[str, Any], demand: Mapping[str, float]) -> bool:
    return all(kind["resources"].get(name, 0.0) >= amount for name, amount in demand.items())


def assert_apart(node_types: NodeTypes, config: CascadeConfig) -> None:
    """No tier below can take the place of the full one, whoever comes first, and no router one with a GPU."""
    *lower, full = (tier.resources for tier in config.tiers)
    router = resources(config.router.deployment_config.ray_actor_options)
    for kind in node_types.values():
        assert not (fits(kind, router) and "GPU" in kind["resources"])
        assert not fits(kind, full) or not any(fits(kind, demand) for demand in lower)

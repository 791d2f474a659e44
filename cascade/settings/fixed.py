"""Decides which replicas a change of the configuration replaces.

Ray Serve replaces the replicas of a deployment when its version changes. The version is a digest of the values that are
*fixed*.
"""

from typing import Any

from cascade.settings.config import CascadeConfig, TierConfig

# Ray Serve compares these parts of a tier itself: changes of ray_actor_options replace replicas, others do not
COMPARED_BY_SERVE = ("deployment_config", "accelerator_type", "placement_group_config")
# the full tier's engine_kwargs that routers read
READ_BY_ROUTERS = {"revision", "trust_remote_code", "lora_modules", "lora_path", "generation_config"}


def fixed_of_tier(config: CascadeConfig, tier: TierConfig) -> dict[str, Any]:
    """Values whose change replaces the replicas of ``tier``."""
    names = config.names
    below = names[: names.index(tier.name)]
    exclude: dict[str, Any] = {**dict.fromkeys(COMPARED_BY_SERVE, True), "engine_kwargs": {"generation_config"}}
    return config.model_dump(mode="json", include={"link_tls", "link_ports"}) | {
        "tier": tier.model_dump(mode="json", exclude=exclude),
        "lower": below,
        "top": tier is config.tiers[-1],
        "drafters": config.drafters,
    }


def fixed_of_router(config: CascadeConfig) -> dict[str, Any]:
    """Values whose change replaces the routers; of tiers little more than their names."""
    values = config.model_dump(mode="json", exclude={"tiers": True, "verify": True, "router": {"deployment_config"}})
    full = config.tiers[-1]
    values["tiers"] = [(tier.name, tier.model_loading_config.model_id) for tier in config.tiers]
    values["full"] = {
        **full.model_loading_config.model_dump(mode="json"),
        **full.engine_kwargs.model_dump(mode="json", include=READ_BY_ROUTERS),
        "max_ongoing_requests": full.deployment_config.max_ongoing_requests,  # whether leases are held ahead
    }
    scaling = {tier.name: tier.deployment_config.autoscaling_config or {} for tier in config.tiers}
    values["asleep"] = [name for name, bounds in scaling.items() if bounds.get("min_replicas") == 0]  # may have no replica
    values["drafters"] = config.drafters
    return values

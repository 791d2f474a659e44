"""What changes while replicas run, and what replaces them.

Ray Serve replaces the replicas of a deployment when its version changes, which is a digest of what is *fixed* of its
configuration. Running routers are told the fields marked `Live`. A tier's replicas are told nothing.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from cascade.errors import ConfigError
from cascade.settings.config import CascadeConfig, TierConfig
from cascade.settings.section import Section

# Ray Serve compares these parts of a tier itself: it replaces replicas for ray_actor_options, for others it does not
COMPARED_BY_SERVE = ("deployment_config", "accelerator_type", "placement_group_config")
# routers read these of the full tier's engine_kwargs
READ_BY_ROUTERS = {"revision", "trust_remote_code", "lora_modules", "lora_path", "generation_config"}


def _live_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("live"):
            yield prefix + name
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _live_paths(field.annotation, f"{prefix}{name}.")


LIVE = tuple(_live_paths(CascadeConfig))
"""Dotted paths of all fields that are marked `Live`."""


def live(config: CascadeConfig) -> dict[str, Any]:
    """What stands at the paths of `LIVE`, as JSON values."""
    values = config.model_dump(mode="json")
    return {path: reduce(getitem, path.split("."), values) for path in LIVE}


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as JSON values, with ``changes`` as `live` gives them; raises `ConfigError` if others are among them."""
    result = copy.deepcopy(dict(values))
    for path, value in changes.items():
        if path not in LIVE:
            raise ConfigError(f"user_config has {path!r}, which no running router changes: it takes {', '.join(LIVE)}")
        section, name = _parent(result, path)
        section[name] = value
    return result


def fixed_of_tier(config: CascadeConfig, tier: TierConfig) -> dict[str, Any]:
    """What replaces the replicas of ``tier`` when it changes."""
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
    """What replaces the routers when it changes; of tiers that is little more than their names."""
    values = config.model_dump(mode="json", exclude={"tiers": True, "verify": True, "router": {"deployment_config"}})
    for path in LIVE:
        section, name = _parent(values, path)
        del section[name]
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


def _parent(values: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds the field at a dotted ``path``, and the name of the field."""
    *sections, name = path.split(".")
    return reduce(lambda section, part: section.setdefault(part, {}), sections, values), name

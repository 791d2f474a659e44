"""What changes while replicas run, and what a change replaces them for.

A deployment's version is a digest of `fixed` parts: a replica is replaced when they change. What is left out of them either is
told to running replicas, `live`, or is nothing that they read.
"""

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from cascade.errors import ConfigError
from cascade.settings.config import CascadeConfig, TierConfig
from cascade.settings.section import Section, sentence

OF_ROUTERS = (
    "window",
    "router.stall_timeout_s",
    "router.max_running",
    "router.max_waiting",
    "router.held_lease_s",
    "router.access.limits",
    "router.access.default_limits",
    "router.access.log",
    "router.limits.max_prompt_chars",
    "router.limits.max_prompts",
    "router.limits.max_n",
    "router.limits.max_tokens",
)
OF_TIERS = ("engine_kwargs.patience", "engine_kwargs.max_guesses")

# which Ray Serve compares itself: it replaces replicas for those that need it, such as ray_actor_options, and for no others
SERVES = ("deployment_config", "accelerator_type", "placement_group_config")
# of a tier's engine_kwargs, and of its model, what routers read when they start; they must read nothing else of them later
READ_OF_ENGINES = ("revision", "trust_remote_code", "lora_modules", "lora_path")
READ_OF_MODELS = ("model_id", "model_source")


def live(section: Section, paths: Iterable[str]) -> dict[str, Any]:
    """Of a configuration, what stands at the dotted ``paths``, as JSON values."""
    return section.model_dump(mode="json", include=_tree(paths))


def fixed_of_tier(tier: TierConfig) -> dict[str, Any]:
    """What a replica of ``tier`` cannot change while it runs."""
    return tier.model_dump(mode="json", exclude=_tree((*OF_TIERS, *SERVES)))


def fixed_of_router(config: CascadeConfig) -> dict[str, Any]:
    """What a router cannot change while it runs: of tiers whose drafts it never sees, little more than their names."""
    values = config.model_dump(mode="json", exclude=_tree((*OF_ROUTERS, "router.deployment_config", "verify", "tiers")))
    full = config.tiers[-1]
    # a lease is held ahead, and a tier that may sleep not looked at, by these
    serves = {"max_ongoing_requests": full.deployment_config.max_ongoing_requests}
    asleep = [tier.name for tier in config.tiers if (tier.deployment_config.autoscaling_config or {}).get("min_replicas") == 0]
    tiers = [_seen_by_router(tier, is_full=tier is full) for tier in config.tiers]
    return values | {"tiers": tiers, "drafters": config.drafters, "full": serves, "asleep": asleep}


def tier_of(values: Mapping[str, Any]) -> TierConfig:
    try:
        return TierConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"Tier {values['name']}: {sentence(error)}") from None


def changed(values: Mapping[str, Any], changes: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """``values`` with ``changes`` at some of ``paths``; raises `ConfigError` for others."""
    result = copy.deepcopy(dict(values))
    for path, value in _leaves(changes, paths):
        if path not in paths:
            raise ConfigError(f"user_config has {path!r}, which no running replica changes: it takes {', '.join(paths)}")
        *sections, key = path.split(".")
        part = result
        for section in sections:
            part = part.setdefault(section, {})
        part[key] = value
    return result


def digest(parts: Mapping[str, Any]) -> str:
    """A name for JSON values: the same for the same ones."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _seen_by_router(tier: TierConfig, *, is_full: bool) -> dict[str, Any]:
    engines, models = (READ_OF_ENGINES, READ_OF_MODELS) if is_full else ((), READ_OF_MODELS[:1])
    return tier.model_dump(mode="json", exclude={*SERVES, "engine_kwargs", "model_loading_config"}) | {
        "engine_kwargs": tier.engine_kwargs.model_dump(mode="json", include={*engines}),
        "model_loading_config": tier.model_loading_config.model_dump(mode="json", include={*models}),
    }


def _tree(paths: Iterable[str]) -> dict[str, Any]:
    """Dotted paths as pydantic takes them."""
    tree: dict[str, Any] = {}
    for path in paths:
        *sections, key = path.split(".")
        part = tree
        for section in sections:
            part = part.setdefault(section, {})
        part[key] = True
    return tree


def _leaves(changes: Any, paths: Sequence[str], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted places of what a mapping says, no deeper than ``paths`` go."""
    for key, value in changes.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and any(known.startswith(f"{path}.") for known in paths):
            yield from _leaves(value, paths, f"{path}.")
        else:
            yield path, value

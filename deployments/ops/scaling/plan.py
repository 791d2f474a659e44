"""Ray Serve's options for tiers that are scaled together.

Serve takes a policy for a whole application only from its own YAML, never from `serve.run`. So each tier's deployment gets a
policy, and these share a `cascade.planner.scaling.Scaler` in Serve's controller (`deployments.ops.scaling.board`).
"""

from collections.abc import Mapping

from cascade.errors import ConfigError
from cascade.settings.config import CascadeConfig, TierConfig

POLICY = "deployments.ops.scaling.policy:TierPolicy"
METRICS_S = 2.0  # between two reports of a replica; Serve's own is 10 s
LOOK_BACK_S = 10.0  # over which reports are averaged
ROUNDING = 1e-9


def scaled(config: CascadeConfig, devices: Mapping[str, float]) -> CascadeConfig:
    """``config`` whose deployments say themselves how they are scaled, together if it asks for that.

    ``devices`` are those of a replica of each tier.

    Raises `ConfigError` if the least replicas do not fit into the budget.
    """
    chosen = config.autoscaling
    if chosen is None:
        return config
    bounds = {
        tier.name: _bounds(tier, chosen.max_devices, devices[tier.name], tier is config.tiers[-1]) for tier in config.tiers
    }
    first = _first(bounds, devices, chosen.max_devices)
    known = [{"name": name, "devices": devices[name], "least": least, "most": most} for name, (least, most) in bounds.items()]
    shared = {"tiers": known, "autoscaling": chosen.model_dump(mode="json")}
    tiers = []
    for tier in config.tiers:
        least, most = bounds[tier.name]
        scaling = {
            "min_replicas": least,
            "max_replicas": most,
            "initial_replicas": first[tier.name],
            "upscale_delay_s": 0.0,  # delays are those of the layout as a whole
            "downscale_delay_s": 0.0,
            "metrics_interval_s": METRICS_S,
            "look_back_period_s": LOOK_BACK_S,
            "policy": {"policy_function": POLICY, "policy_kwargs": {"tier": tier.name, **shared}},
        }
        deployment = tier.deployment_config.model_copy(update={"autoscaling_config": scaling})
        tiers.append(tier.model_copy(update={"deployment_config": deployment}))
    return config.model_copy(update={"tiers": tuple(tiers), "autoscaling": None})


def scaled_to_zero(config: CascadeConfig) -> list[str]:
    """Draft tiers that may have no replica: the policy starts one, not whoever asks for a lease."""
    return [tier.name for tier in config.tiers[:-1] if config.autoscaling is not None and not _least(tier, full=False)]


def _bounds(tier: TierConfig, max_devices: float, devices: float, full: bool) -> tuple[int, int]:
    """Least and most replicas."""
    room = int(max_devices / devices + ROUNDING)
    least = _least(tier, full=full)
    most = (tier.deployment_config.autoscaling_config or {}).get("max_replicas", max(room, least, 1))
    if least > most:
        raise ConfigError(f"min_replicas of tier {tier.name} is {least}, more than its max_replicas of {most}: lower it")
    return least, max(1, min(most, max(room, least)))


def _least(tier: TierConfig, *, full: bool) -> int:
    return int((tier.deployment_config.autoscaling_config or {}).get("min_replicas", 1 if full else 0))


def _first(bounds: Mapping[str, tuple[int, int]], devices: Mapping[str, float], max_devices: float) -> dict[str, int]:
    """Replicas to start with: the least, at least one full one, and one of each draft tier for which there is room."""
    full = list(bounds)[-1]
    first = {name: max(least, 1) if name == full else least for name, (least, _) in bounds.items()}
    taken = sum(devices[name] * count for name, count in first.items())
    if taken > max_devices + ROUNDING:
        parts = ", ".join(f"{name} {devices[name] * count:g}" for name, count in first.items() if count)
        raise ConfigError(
            f"autoscaling.max_devices is {max_devices:g}, and the least replicas take {taken:g} ({parts}): "
            "raise it, or lower min_replicas"
        )
    for name in list(bounds)[:-1]:
        if not first[name] and taken + devices[name] <= max_devices + ROUNDING:
            first[name], taken = 1, taken + devices[name]
    return first

"""Builds the Ray Serve application of a configuration. The only place that binds deployments.

serve run deployments.app:build config=my.yaml
serve deploy cluster/serve/demo.yaml
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from cascade.errors import ConfigError
from cascade.settings.config import CascadeConfig, TierConfig, fixed_of_router, fixed_of_tier
from cascade.settings.deployment import RouterDeploymentConfig, resources
from cascade.settings.llm_configs import load_config
from cascade.settings.section import did_you_mean, sentence
from deployments.ray_compat import versioned
from deployments.replica import packages

ROUNDING = 1e-6  # sums of decimal shares are not exact: 3 x 0.2 + 0.3 + 0.1 is more than 1
LEARNER_END_S = 5.0  # seconds that a learner has to end
LEARNER_LOOK_S = 2.0  # seconds between two health checks of the learner
SURGE_PERCENT = 20  # Ray Serve rounds this up to whole replicas

SECTIONS = {"autoscaling_config": AutoscalingConfig, "request_router_config": RequestRouterConfig}

ENVIRONMENT = {
    # run user code in the replica's own event loop, which saves a thread switch; read when Serve is imported
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # pages of 2 MB make passes on a CPU 5 to 15 % faster, since these read all weights
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

PREFERRING = {"request_router_config": {"request_router_class": "deployments.links.affinity.PreferringRouter"}}


def build(args: CascadeConfig | Mapping[str, Any] | None = None) -> Application:
    """The application of a configuration, a mapping, or ``{"config": path}``; by default of the demonstration family.

    Raises `ConfigError` if the configuration is wrong or its tiers do not belong together.
    """
    config = parse(args)
    return bind(config, verified(config))


def bind_models(configs: Mapping[str, CascadeConfig], options: Mapping[str, Any]) -> Application:
    """One application of several cascades, by model name; ``options`` are Serve's for their common ingress.

    Names of other deployments begin with the name of their model. Raises the errors of `build`.
    """
    from deployments.router import ModelsReplica

    routers = {name: _router(config, verified(config), f"{name.replace('/', '--')}:") for name, config in configs.items()}
    arguments = {name: arguments for name, (arguments, _) in routers.items()}
    fixed = {name: fixed for name, (_, fixed) in routers.items()}
    options = RouterDeploymentConfig().model_dump(exclude_none=True) | dict(options)
    return _bind_ingress(ModelsReplica, "models", options, fixed, arguments)


def verified(config: CascadeConfig) -> dict[str, dict[str, int]]:
    """Verify the models of a configuration, unless it says not to; returns their limits for `bind`. Raises `ConfigError`."""
    from cascade.settings.check import limits, verify  # imports PyTorch

    if config.verify:
        verify(config)
    return limits(config)


def bind(config: CascadeConfig, limits: Mapping[str, Mapping[str, int]]) -> Application:
    """The application of a configuration; ``limits`` of its models are those of `cascade.settings.check.limits`."""
    from deployments.router import RouterReplica

    arguments, fixed = _router(config, limits)
    options = config.router.deployment_config.model_dump(exclude_none=True)
    return _bind_ingress(RouterReplica, "router", options, fixed, *arguments)


def _router(
    config: CascadeConfig, limits: Mapping[str, Mapping[str, int]], prefix: str = ""
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments of a router, including the deployments below it (named with ``prefix``), and its fixed values."""
    handles: dict[str, Any] = {}
    for tier in config.tiers:
        handles[tier.name] = _bind_tier(config, tier, dict(handles), prefix)
    learner = () if config.alignment is None else (_bind_learner(config, handles, prefix),)
    access = config.router.access
    if os.environ.get(access.keys_env):  # so that routers on nodes without the keys refuse to start
        router = config.router.model_copy(update={"access": access.model_copy(update={"required": True})})
        config = config.model_copy(update={"router": router})
    values = config.model_dump(mode="json")
    return (values, handles, dict(limits), *learner), {"router": fixed_of_router(config), "limits": limits}


def _bind_ingress(kind: type, name: str, options: Mapping[str, Any], fixed: Mapping[str, Any], *arguments: Any) -> Application:
    actor = {"num_cpus": 0} | _environment(options["ray_actor_options"] or {})
    options = {"name": name, **options, "ray_actor_options": actor}
    return _deployment(serve.ingress()(kind), options, name, fixed).bind(*arguments)


def _bind_learner(config: CascadeConfig, tiers: dict[str, Any], prefix: str) -> Any:
    from deployments.ops.learner import Learner

    assert config.alignment is not None
    values = config.model_dump(mode="json")
    actor: dict[str, Any] = {"num_cpus": 1, **config.alignment.ray_actor_options}
    num_workers = config.alignment.num_workers
    if num_workers > 1:  # Ray Train gives resources to the workers; the learner only waits
        try:
            import ray.train  # noqa: F401
        except ImportError:
            raise ConfigError(f"alignment.num_workers is {num_workers}: `pip install '.[train]'`, or leave it out") from None
        actor = {name: value for name, value in actor.items() if name == "runtime_env"} | {"num_cpus": 0}
    looks = {"health_check_period_s": LEARNER_LOOK_S, "graceful_shutdown_timeout_s": LEARNER_END_S}
    options = {"name": f"{prefix}learner", "ray_actor_options": _environment(actor), **looks}
    fixed = {"learner": {name: values[name] for name in ("tiers", "alignment")}}
    return _deployment(Learner, options, "alignment", fixed).bind(values, tiers)


def _bind_tier(config: CascadeConfig, tier: TierConfig, lower: dict[str, Any], prefix: str) -> Any:
    from deployments.tier import TierReplica

    preferring = PREFERRING if config.affine and tier is config.tiers[-1] else {}
    # in an update, new replicas start before old ones stop if the cluster has room for one more now; otherwise old ones stop
    # first, since Serve would wait for room for ever
    free = ray.available_resources() if ray.is_initialized() else {}
    room = all(free.get(name, 0.0) + ROUNDING >= amount for name, amount in tier.resources.items())
    surging = {"max_surge_percent": SURGE_PERCENT if room else 0}
    options = preferring | surging | tier_options(tier) | {"name": prefix + tier.name}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    shared = [other.name for other in config.tiers if other.name in lower and shares_processors(tier, other, nodes)]
    versions = packages() if config.verify else {}
    fixed = fixed_of_tier(config, tier) | {"packages": versions}
    values = config.model_dump(mode="json")
    return _deployment(TierReplica, options, f"tier {tier.name}", fixed).bind(values, tier.name, lower, shared, versions)


def parse(args: CascadeConfig | Mapping[str, Any] | None) -> CascadeConfig:
    if isinstance(args, CascadeConfig):
        return args
    if args is None or args == {}:
        return CascadeConfig.demo()
    if isinstance(args, Mapping) and "config" in args:
        path = args["config"]
        if not isinstance(path, str | Path):
            raise ConfigError(f"config is {path!r}: it must be the path of a YAML file")
        if len(args) > 1:
            raise ConfigError("config is a path: give it alone, or give the keys of the configuration without it")
        return load_config(Path(path))
    return CascadeConfig.parse(args)


def tier_options(tier: TierConfig) -> dict[str, Any]:
    """Ray Serve's options for the deployment of a tier."""
    options = tier.deployment_config.model_dump(exclude_none=True)
    if tier.placement_group_config is not None:
        group = tier.placement_group_config.model_dump(exclude_none=True)
        options |= {f"placement_group_{name}": value for name, value in group.items()}
    return {"name": tier.name, **options, "ray_actor_options": _environment(tier.actor_options)}


def _deployment(kind: type, options: Mapping[str, Any], owner: str, fixed: Mapping[str, Any]) -> Deployment:
    """A deployment whose replicas are replaced when ``fixed`` (JSON values) changes.

    Raises `ConfigError`, which names ``owner``, if Ray Serve does not take its options.
    """
    for section, schema in SECTIONS.items():
        unknown = set(options.get(section, ())) - set(schema.model_fields)
        if unknown:  # Ray Serve would ignore them
            near = did_you_mean(min(unknown), schema.model_fields) or ": correct its spelling or remove it"
            raise ConfigError(f"{section} of {owner} has the unknown key {min(unknown)!r}{near}")
    try:
        with warnings.catch_warnings():  # the alternative that Serve names is an environment variable for all deployments
            warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
            return versioned(serve.deployment(kind, **options), fixed)
    except (ValueError, TypeError, ImportError, AttributeError) as error:  # the last two for class names
        reason = sentence(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
        raise ConfigError(f"Ray Serve does not take the deployment_config of {owner}: {reason}") from None


def _environment(actor: Mapping[str, Any]) -> dict[str, Any]:
    """Actor options with `ENVIRONMENT`, which the user's own variables override."""
    given = actor.get("runtime_env") or {}
    return {**actor, "runtime_env": {**given, "env_vars": ENVIRONMENT | (given.get("env_vars") or {})}}


def shortage(config: CascadeConfig, there: Mapping[str, float]) -> str | None:
    """One sentence if the initial replicas need more of a Ray resource than is ``there``."""
    wanted: dict[str, dict[str, float]] = {}
    for tier in config.tiers:
        for name, amount in tier.resources.items():
            wanted.setdefault(name, {})[tier.name] = amount * tier.deployment_config.num_at_start
    if config.alignment is not None:
        for name, amount in resources(config.alignment.ray_actor_options).items():
            wanted.setdefault(name, {})["learner"] = amount * config.alignment.num_workers
    for name, tiers in wanted.items():
        total, has = sum(tiers.values()), there.get(name, 0.0)
        if total > has + ROUNDING:
            parts = ", ".join(f"{tier} {amount:g}" for tier, amount in tiers.items() if amount)
            return (
                f"The tiers ask for {total:g} {name} ({parts}) and Ray has {has:g} of it: "
                "change their ray_actor_options, accelerator_type or num_replicas, or add machines"
            )
    return None


def shares_processors(tier: TierConfig, other: TierConfig, nodes: Sequence[Mapping[str, float]] = ()) -> bool:
    """Whether replicas of both tiers may compute on the same processors. ``nodes`` are Ray's resources by node.

    Two tiers on GPUs may if both fit one GPU; two on CPUs if both fit one node, or if one fits no node yet, so that its place
    is unknown. A tier with an engine of the user's own never does.
    """
    if tier.engine_kwargs.plugin or other.engine_kwargs.plugin:
        return False
    first, second = tier.resources, other.resources
    on_gpus = [amounts.get("GPU", 0.0) for amounts in (first, second)]
    if any(on_gpus):
        return all(on_gpus) and sum(on_gpus) <= 1 + ROUNDING
    both = {name: first.get(name, 0.0) + second.get(name, 0.0) for name in first | second}
    return _fits(both, nodes) or not (_fits(first, nodes) and _fits(second, nodes))


def _fits(amounts: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> bool:
    return any(all(node.get(name, 0.0) + ROUNDING >= amount for name, amount in amounts.items()) for node in nodes)

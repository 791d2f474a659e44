"""Options of Ray Serve deployments, and how many replicas each may have."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic takes Python's own only from 3.12 on

from cascade.settings.section import NUMERIC, Count, Number, Seconds, Section, Whole

RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # Ray's names, by the options that ask for them


@with_config(ConfigDict(extra="allow"))
class RuntimeEnv(TypedDict, total=False):
    """Ray's runtime environment, as far as this package reads it."""

    env_vars: dict[str, str] | None


@with_config(ConfigDict(extra="allow"))
class ActorOptions(TypedDict, total=False):
    """Ray's options of a replica, as far as this package reads them."""

    num_cpus: Number | None
    num_gpus: Number | None
    resources: dict[str, Number] | None
    runtime_env: RuntimeEnv | None


@with_config(ConfigDict(extra="allow"))
class Scaling(TypedDict, total=False):
    """Ray Serve's options of autoscaling, as far as this package reads them."""

    min_replicas: Whole
    initial_replicas: Whole | None
    max_replicas: Whole


class DeploymentConfig(Section):
    """Options of the Ray Serve deployment, passed on unchanged.

    `user_config` is not available, and cascade sets `name`; `placement_group_config` of a tier replaces `placement_group_*`.
    """

    num_replicas: Count | Literal["auto"] | None = None  # fixed number, or `auto`; 1 by default
    autoscaling_config: Scaling | None = None  # Ray Serve's; ongoing requests are sessions
    ray_actor_options: ActorOptions = Field(default_factory=ActorOptions)  # `num_gpus`, `num_cpus`, `resources`, `runtime_env`
    max_ongoing_requests: Count = 256  # sessions of a replica at the same time
    max_queued_requests: Annotated[int, Field(ge=-1), NUMERIC] = -1  # calls that may wait for a replica; -1: any number
    max_replicas_per_node: Count | None = None  # replicas on one node at most
    health_check_period_s: Seconds = 2.0  # seconds between two health checks
    health_check_timeout_s: Seconds = 30.0  # seconds until a health check has failed
    # seconds that sessions have to end when a replica stops
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0), NUMERIC] = 20.0
    graceful_shutdown_wait_loop_s: Seconds = 0.2  # seconds between two checks whether they have ended
    # percent of replicas that an update starts before it stops old ones; by default 20 if one more fits, else 0
    max_surge_percent: Annotated[int, Field(ge=0, le=100), NUMERIC] | None = None
    # share of replicas that an update replaces at a time
    rolling_update_percentage: Annotated[float, Field(gt=0, le=1), NUMERIC] | None = None
    logging_config: dict[str, Any] | None = None  # Ray Serve's
    request_router_config: dict[str, Any] | None = None  # Ray Serve's
    backpressure_config: dict[str, Any] | None = None  # Ray Serve's

    @property
    def num_at_start(self) -> int:
        """Replicas at the start."""
        if (scaling := self.autoscaling_config) is not None:
            first = scaling.get("initial_replicas")
            return scaling.get("min_replicas", 1) if first is None else first
        return self.num_replicas if isinstance(self.num_replicas, int) else 1

    @property
    def several(self) -> bool:
        """Whether there may be more than one replica."""
        if self.autoscaling_config is not None:
            return self.autoscaling_config.get("max_replicas", 1) > 1
        return self.num_replicas not in (None, 1)


class RouterDeploymentConfig(DeploymentConfig):
    """`DeploymentConfig` of the router, with other defaults."""

    max_queued_requests: Annotated[int, Field(ge=-1), NUMERIC] = 256  # calls that may wait for a router
    health_check_period_s: Seconds = 0.5  # seconds between two health checks
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0), NUMERIC] = 60.0  # seconds that running answers have to end
    # percent of routers that an update starts before it stops old ones
    max_surge_percent: Annotated[int, Field(ge=0, le=100), NUMERIC] | None = 100


def resources(actor: Mapping[str, Any], bundles: Sequence[Mapping[str, float]] | None = None) -> dict[str, float]:
    """Ray's resources of a replica: those of its ``ray_actor_options``, or of the ``bundles`` of its placement group."""
    if bundles is not None:
        return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for bundle in bundles for name in bundle}
    actor = {"num_cpus": 1} | dict(actor)
    amounts = {resource: float(actor.get(option) or 0.0) for option, resource in RESOURCES.items()}
    kind = actor.get("accelerator_type")
    return amounts | dict(actor.get("resources") or {}) | ({f"accelerator_type:{kind}": 0.001} if kind else {})

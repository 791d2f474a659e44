"""Options of Ray Serve deployments, and how many replicas each may have."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cascade.settings.section import Count, Seconds, Section


class DeploymentConfig(Section):
    """Options of the Ray Serve deployment, passed on as they are.

    `name` and `user_config` are set by cascade; in place of `placement_group_*` a tier has `placement_group_config`.
    """

    num_replicas: Count | Literal["auto"] | None = None  # fixed number, or `auto`; 1 by default
    autoscaling_config: dict[str, Any] | None = None  # Ray Serve's; ongoing requests are sessions
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)  # `num_gpus`, `num_cpus`, `resources`, `runtime_env`
    max_ongoing_requests: Count = 256  # sessions of a replica at once
    max_queued_requests: Annotated[int, Field(ge=-1)] = -1  # calls that wait for a replica; -1: any number
    max_replicas_per_node: Count | None = None  # replicas on one node at most
    health_check_period_s: Seconds = 2.0  # seconds between two health checks
    health_check_timeout_s: Seconds = 30.0  # seconds until a health check has failed
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 20.0  # seconds for sessions to end when it stops
    graceful_shutdown_wait_loop_s: Seconds = 0.2  # seconds between two looks at them
    # percent of replicas that start before old ones go; by default as many as there is room for
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    # share of replicas that an update replaces at a time
    rolling_update_percentage: Annotated[float, Field(gt=0, le=1)] | None = None
    logging_config: dict[str, Any] | None = None  # Ray Serve's
    request_router_config: dict[str, Any] | None = None  # Ray Serve's
    backpressure_config: dict[str, Any] | None = None  # Ray Serve's

    @property
    def several(self) -> bool:
        """Whether there may be more than one replica."""
        if self.autoscaling_config is not None:
            return int(self.autoscaling_config.get("max_replicas", 1)) > 1
        return self.num_replicas not in (None, 1)


class RouterDeploymentConfig(DeploymentConfig):
    """The same for the router, with other defaults."""

    max_queued_requests: Annotated[int, Field(ge=-1)] = 256  # calls that wait for a router
    health_check_period_s: Seconds = 0.5  # seconds between two health checks
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 60.0  # seconds for running answers to end
    # percent; new ones start first
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = 100

"""Options of Ray Serve deployments."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cascade.settings.section import Section


class DeploymentConfig(Section):
    """Options of the Ray Serve deployment, handed on as they are."""

    num_replicas: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    autoscaling_config: dict[str, Any] | None = None
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 256
    max_queued_requests: Annotated[int, Field(ge=-1)] = -1
    max_replicas_per_node: Annotated[int, Field(ge=1)] | None = None
    health_check_period_s: Annotated[float, Field(gt=0)] = 2.0
    health_check_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 20.0
    graceful_shutdown_wait_loop_s: Annotated[float, Field(gt=0)] = 0.2
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = 0  # replicas that start before old ones go, where there is room

    @property
    def several(self) -> bool:
        """Whether there may be more than one replica."""
        if self.autoscaling_config is not None:
            return int(self.autoscaling_config.get("max_replicas", 1)) > 1
        return self.num_replicas not in (None, 1)


class RouterDeploymentConfig(DeploymentConfig):
    """The same for the router, which refuses what it cannot take."""

    max_queued_requests: Annotated[int, Field(ge=-1)] = 256
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 60.0  # for what it writes to end; behind it Serve kills it
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = 100  # takes no GPU

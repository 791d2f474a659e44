"""Options of Ray Serve deployments."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cascade.settings.section import Section

REFUSED = {  # what Serve knows and a cascade does not hand on, and what to do
    "name": "a deployment is named as its tier is: remove it",
    "user_config": "it is made of the configuration, and tells running replicas what changes in it: change that itself",
    "placement_group_bundles": "write placement_group_config of the tier, with its key bundles",
    "placement_group_strategy": "write placement_group_config of the tier, with its key strategy",
    "placement_group_bundle_label_selector": "write placement_group_config of the tier, with its key bundle_label_selector",
    "gang_scheduling_config": "replicas need not start together: remove it",
    "deployment_actors": "a cascade has no actors beside its replicas: remove it",
}


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
    # replicas that start before old ones go, in an update: if not given, where there is room, see docs/updates.md
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    rolling_update_percentage: Annotated[float, Field(gt=0, le=1)] | None = None  # share of the replicas replaced at a time
    logging_config: dict[str, Any] | None = None  # the application's if not given
    request_router_config: dict[str, Any] | None = None  # which replica a lease is taken on, or a request goes to
    backpressure_config: dict[str, Any] | None = None  # of Serve's HTTP proxies, when max_queued_requests is reached

    @model_validator(mode="before")
    @classmethod
    def _handed_on(cls, values: Any) -> Any:
        refused = next((name for name in REFUSED if name in values), None) if isinstance(values, Mapping) else None
        if refused:
            raise ValueError(f"{refused} cannot be given here: {REFUSED[refused]}")
        return values

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
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = 100  # takes no GPU

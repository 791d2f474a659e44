"""Options of Ray Serve deployments, and how many replicas each may have."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cascade.planner.replicas import Goal
from cascade.planner.scaling import Pace
from cascade.settings.section import Section

PACE = Pace()
BOUNDS = ("min_replicas", "max_replicas")  # that a tier may have in its autoscaling_config
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
    # replicas that start before old ones go, in an update: if not given, where there is room, see docs/howto/update.md
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
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 60.0  # for what it writes to end; after it Serve kills it
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = 100  # takes no GPU


class AutoscalingConfig(Section):
    """How many devices all tiers may take together, and what for; see `cascade.planner.replicas` and `cascade.planner.scaling`.

    autoscaling: {max_devices: 8}
    """

    max_devices: Annotated[float, Field(gt=0)]  # GPUs; of a tier without any, replicas
    slowdown: Annotated[float, Field(ge=1.1)] = 1.5  # times the time per token of a session that has a full replica to itself
    worth: Annotated[float, Field(ge=0, le=1)] = 0.5  # of what a device gives on average, the least that one more must add
    up_delay_s: Annotated[float, Field(ge=0)] = PACE.up_delay_s
    down_delay_s: Annotated[float, Field(ge=0)] = PACE.down_delay_s
    trial_s: Annotated[float, Field(gt=0)] = PACE.trial_s
    rest_s: Annotated[float, Field(gt=0)] = PACE.rest_s

    @property
    def goal(self) -> Goal:
        return Goal(self.max_devices, self.slowdown, self.worth)

    @property
    def pace(self) -> Pace:
        return Pace(self.up_delay_s, self.down_delay_s, self.trial_s, self.rest_s)


def scaling_problems(deployments: Mapping[str, DeploymentConfig]) -> Iterator[str]:
    """A sentence for each thing that tiers say themselves and ``autoscaling`` is to choose."""
    for name, deployment in deployments.items():
        if deployment.num_replicas is not None:
            yield (
                f"num_replicas of tier {name!r} is {deployment.num_replicas!r}, and autoscaling chooses it: remove one of "
                "them, or give the tier bounds in its autoscaling_config"
            )
        for key, value in (deployment.autoscaling_config or {}).items():
            if key not in BOUNDS:
                yield f"autoscaling_config of tier {name!r} has {key!r}: with autoscaling it takes {' and '.join(BOUNDS)} alone"
            elif type(value) is not int or value < (key == BOUNDS[1]):
                yield f"{key} of tier {name!r} is {value!r}: it must be a whole number, and max_replicas at least 1"

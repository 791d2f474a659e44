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

    num_replicas: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None  # fixed number, or `auto`; 1 by default
    autoscaling_config: dict[str, Any] | None = None  # Ray Serve's, by ongoing requests, which are sessions here
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)  # `num_gpus`, `num_cpus`, `resources`, `runtime_env`
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 256  # sessions of a replica at once
    max_queued_requests: Annotated[int, Field(ge=-1)] = -1  # calls that wait for a replica; -1: any number
    max_replicas_per_node: Annotated[int, Field(ge=1)] | None = None  # replicas on one node at most
    health_check_period_s: Annotated[float, Field(gt=0)] = 2.0  # seconds between two health checks
    health_check_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # seconds after which a health check has failed
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 20.0  # seconds that a replica has to hand its sessions on
    graceful_shutdown_wait_loop_s: Annotated[float, Field(gt=0)] = 0.2  # seconds between two looks whether it is done
    # percent of replicas that start before old ones go, in an update; by default as many as there is room for
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    # share of the replicas that an update replaces at a time
    rolling_update_percentage: Annotated[float, Field(gt=0, le=1)] | None = None
    logging_config: dict[str, Any] | None = None  # Ray Serve's; the application's by default
    request_router_config: dict[str, Any] | None = None  # Ray Serve's: how a replica is chosen
    backpressure_config: dict[str, Any] | None = None  # Ray Serve's: what its HTTP proxies answer when the queue is full

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

    max_queued_requests: Annotated[int, Field(ge=-1)] = 256  # calls that wait for a router
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 60.0  # seconds that its running answers have to end
    # percent; a router takes no GPU, so new ones start first
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = 100


class AutoscalingConfig(Section):
    """How many devices all tiers may take together, and what for.

    autoscaling: {max_devices: 8}
    """

    max_devices: Annotated[float, Field(gt=0)]  # GPUs of all tiers together; a replica without one counts as one
    slowdown: Annotated[float, Field(ge=1.1)] = 1.5  # time per token to aim at, as a multiple of a lone session's
    # share by which sessions must become faster for each share of devices that a draft tier adds
    worth: Annotated[float, Field(ge=0, le=1)] = 0.5
    up_delay_s: Annotated[float, Field(ge=0)] = PACE.up_delay_s  # seconds of need before full replicas are added
    down_delay_s: Annotated[float, Field(ge=0)] = PACE.down_delay_s  # the same for any other change
    trial_s: Annotated[float, Field(gt=0)] = PACE.trial_s  # seconds that a draft tier serves before it is judged
    rest_s: Annotated[float, Field(gt=0)] = PACE.rest_s  # seconds until one that did not pay is tried again, doubled each time

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

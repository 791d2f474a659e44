"""Replicas by what they are worth: the section ``autoscaling``.

autoscaling: {max_devices: 8}
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from cascade.chain.layout import Goal
from cascade.chain.scaling import Pace
from cascade.settings.deployment import DeploymentConfig
from cascade.settings.section import Section

PACE = Pace()
BOUNDS = ("min_replicas", "max_replicas")  # that a tier may have in its autoscaling_config


class AutoscalingConfig(Section):
    """How many devices all tiers may take together, and what for; see `cascade.chain.layout` and `cascade.chain.scaling`."""

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


def scaling_problem(deployments: Mapping[str, DeploymentConfig]) -> str | None:
    """One sentence if tiers say themselves what ``autoscaling`` is to choose."""
    for name, deployment in deployments.items():
        if deployment.num_replicas is not None:
            return (
                f"num_replicas of tier {name!r} is {deployment.num_replicas!r}, and autoscaling chooses it: remove one of "
                "them, or give the tier bounds in its autoscaling_config"
            )
        for key, value in (deployment.autoscaling_config or {}).items():
            if key not in BOUNDS:
                return (
                    f"autoscaling_config of tier {name!r} has {key!r}: with autoscaling it takes {' and '.join(BOUNDS)} alone"
                )
            if type(value) is not int or value < (key == BOUNDS[1]):
                return f"{key} of tier {name!r} is {value!r}: it must be a whole number, and max_replicas at least 1"
    return None

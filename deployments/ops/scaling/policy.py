"""The autoscaling policy that Ray Serve's controller runs for each tier, ten times a second."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.config import AutoscalingContext

from deployments.ops.scaling import board as boards


class TierPolicy:
    """Of one tier; all of an application decide together."""

    def __init__(self, tier: str, tiers: Sequence[Mapping[str, Any]], autoscaling: Mapping[str, Any]) -> None:
        self._place = [one["name"] for one in tiers].index(tier)
        self._tiers = tiers
        self._autoscaling = autoscaling

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now = time.monotonic()
        board = boards.board(context.app_name or "", self._tiers, self._autoscaling, now)
        return board.target(self._place, context, now), {}

"""What a replica reports of its load to Ray Serve's controller."""

import time

from cascade.planner.chains import load_bucket
from cascade.planner.cost import Profile
from cascade.tier.tier import Tier
from deployments.ops.scaling.board import COST, SPEED

SIZES = (1, 8, 32, 128)  # sessions of the passes whose cost is told


class LoadReport:
    """Numbers by name, since the last report."""

    def __init__(self, tier: Tier, profile: Profile) -> None:
        self._tier = tier
        self._profile = profile
        self._busy_s, self._written, self._at = 0.0, 0, time.monotonic()

    def since_last(self) -> dict[str, float]:
        """``busy`` is the share of wall time in passes, ``kv_use`` that of positions that sessions hold."""
        load, busy_s, now = self._tier.load(), self._tier.stats.busy_s, time.monotonic()
        seconds = max(1e-3, now - self._at)
        busy, tokens_s = (busy_s - self._busy_s) / seconds, (load.written - self._written) / seconds
        self._busy_s, self._written, self._at = busy_s, load.written, now
        return {
            "busy": min(1.0, busy),
            "tokens_s": tokens_s,
            "sessions": float(load.sessions),
            "waiting": float(load.waiting),
            "kv_use": load.kv_use,
            **{f"{COST}{size}": self._profile.predict(size) for size in SIZES},
            **{f"{SPEED}{load_bucket(load.sessions)}:{','.join(chain)}": speed for chain, speed in load.speeds.items()},
        }

"""What replicas report to Serve's controller of their load, and the layout of all tiers that follows from it there.

A module of its own: Serve pickles the policy's module by value, once for each deployment, and this one by name.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray.serve.config import AutoscalingContext

from cascade.planner.chains import load_bucket
from cascade.planner.cost import PassCost, Profile
from cascade.planner.replicas import Layout, Speeds, TierLoad
from cascade.planner.scaling import Scaler
from cascade.settings.deployment import AutoscalingConfig

if TYPE_CHECKING:  # the controller imports no models
    from cascade.tier.tier import Tier

log = logging.getLogger("ray.serve")

COST = "pass_s_"  # begins the names of what a pass of so many sessions takes, seconds
SPEED = "speed:"  # the same of tokens/s of a session, by the crowd that there was, and by who drafts
DECIDE_S = 1.0  # between two decisions
STALE_S = 30.0  # a board that nobody has looked at for so long is of an application that is gone
SIZES = (1, 8, 32, 128)  # sessions of the passes whose cost is reported
FLAT = PassCost(base_s=1.0)  # of a tier that has not said yet what its passes cost


@dataclass(slots=True)
class Board:
    """Of one application: what its tiers have and do."""

    tiers: Sequence[Mapping[str, Any]]  # name, devices, least, most; bottom to top
    autoscaling: Mapping[str, Any]
    loads: dict[str, TierLoad] = field(default_factory=dict)
    speeds: Speeds = field(default_factory=dict)  # as the full tier measures them
    layout: Layout = ()
    read_at: dict[str, float] = field(default_factory=dict)
    decided_at: float = 0.0
    scaler: Scaler = field(init=False)

    def __post_init__(self) -> None:
        config = AutoscalingConfig.model_validate(self.autoscaling)
        self.scaler = Scaler(config.goal, config.pace)

    def target(self, place: int, context: AutoscalingContext, now: float) -> int:
        """Take what Serve knows of the tier in this place; how many replicas it shall have."""
        name = self.tiers[place]["name"]
        if now - self.read_at.get(name, 0.0) >= DECIDE_S:
            self.read_at[name] = now
            self._read(place, context)
        ready = len(self.loads) == len(self.tiers) and self.loads[self.tiers[-1]["name"]].cost is not FLAT
        if ready and now - self.decided_at >= DECIDE_S:
            self.decided_at = now
            self._decide(now)
        return self.layout[place] if self.layout else context.target_num_replicas

    def _read(self, place: int, context: AutoscalingContext) -> None:
        said = context.aggregated_metrics or {}
        spec = self.tiers[place]
        before = self.loads.get(spec["name"])
        queued = context.total_queued_requests or 0.0
        sizes = sorted(int(name.removeprefix(COST)) for name in said if name.startswith(COST))
        points = tuple((size, _mean(said[f"{COST}{size}"])) for size in sizes)
        self.loads[spec["name"]] = TierLoad(
            **spec,
            cost=PassCost(points=points) if points else before.cost if before is not None else FLAT,
            replicas=context.current_num_replicas,
            sessions=sum(said.get("sessions", {}).values()) + queued,
            waiting=sum(said.get("waiting", {}).values()) + queued,
            tokens_s=sum(said.get("tokens_s", {}).values()),
            busy=_mean(said.get("busy", {})) if said.get("busy") else 1.0,
            kv_use=_mean(said.get("kv_use", {})),
        )
        if place == len(self.tiers) - 1:
            self.speeds = _speeds({name: _mean(values) for name, values in said.items() if name.startswith(SPEED)})

    def _decide(self, now: float) -> None:
        loads = [self.loads[spec["name"]] for spec in self.tiers]
        layout = self.scaler.decide(loads, self.speeds, now)
        if layout != self.layout:
            named = ", ".join(f"{load.name} {count}" for load, count in zip(loads, layout, strict=True))
            log.info("Autoscaling asks for %s: %.1f sessions, busy %.2f", named, loads[-1].sessions, loads[-1].busy)
        self.layout = layout


_boards: dict[str, Board] = {}


def board(application: str, tiers: Sequence[Mapping[str, Any]], autoscaling: Mapping[str, Any], now: float) -> Board:
    """That of an application; a new one if its configuration has changed, or it was gone for a while."""
    found = _boards.get(application)
    fresh = found is not None and now - max(found.read_at.values(), default=now) < STALE_S
    if found is None or not fresh or (found.tiers, found.autoscaling) != (tiers, autoscaling):
        found = _boards[application] = Board(tiers, autoscaling)
    return found


def _mean(values: Mapping[Any, float]) -> float:
    return sum(values.values()) / len(values) if values else 0.0


def _speeds(said: Mapping[str, float]) -> Speeds:
    """Of names such as ``speed:1:medium,tiny``."""
    speeds: dict[int, dict[frozenset[str], float]] = {}
    for name, speed in said.items():
        load, _, chain = name.removeprefix(SPEED).partition(":")
        speeds.setdefault(int(load), {})[frozenset(filter(None, chain.split(",")))] = speed
    return speeds


class LoadReport:
    """Numbers by name that a replica reports, each time since the last report."""

    def __init__(self, tier: "Tier", profile: Profile) -> None:
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

"""Autoscaling under Ray Serve, without Ray: options of deployments, what the controller reads, who is woken."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ray.serve.config import AutoscalingContext

from benchmarks.toy import ToyModel
from cascade.errors import ConfigError, Unavailable
from cascade.planner.cost import Profile
from cascade.tier.tier import Tier
from deployments import app
from deployments.links import replica_status
from deployments.links.leases import LeasePool
from deployments.ops.scaling import board as boards
from deployments.ops.scaling.board import LoadReport
from deployments.ops.scaling.policy import TierPolicy
from tests import small
from tests.tier.test_tier import opening
from tests.waiting import LONG_S

TWO_GPUS = {"ray_actor_options": {"num_gpus": 2}}


def config(max_devices: float = 6, **deployments: Any) -> dict[str, Any]:
    values = small.config().model_dump(mode="json")
    for tier in values["tiers"]:
        tier["deployment_config"] = deployments.get(tier["name"], {})
    return values | {"autoscaling": {"max_devices": max_devices, "trial_s": 5, "down_delay_s": 20}}


def options(values: dict[str, Any]) -> dict[str, Any]:
    """Scaling of each deployment, and what its replicas are told."""
    handles = app.build(values)._bound_deployment.init_args[1]
    return {name: handle._bound_deployment for name, handle in handles.items()}


def test_tiers_are_scaled_together() -> None:
    """Guards the start: bounds in devices, one replica of each tier where there is room, and delays that are not Serve's."""
    found = options(config(7, full=TWO_GPUS, medium={"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}))
    scaling = {name: one._deployment_config.autoscaling_config for name, one in found.items()}
    assert [(one.min_replicas, one.initial_replicas, one.max_replicas) for one in scaling.values()] == [
        (0, 1, 7),
        (1, 1, 2),
        (1, 1, 3),
    ]
    assert all(one.upscale_delay_s == one.downscale_delay_s == 0 for one in scaling.values())
    assert all(one.policy.policy_function == "deployments.ops.scaling.policy:TierPolicy" for one in scaling.values())
    assert found["full"].init_kwargs["scaled_to_zero"] == ["tiny"], "medium always has a replica"
    assert options(config(3, full=TWO_GPUS))["medium"]._deployment_config.autoscaling_config.initial_replicas == 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (config(0), r"autoscaling\.max_devices is 0"),
        (config(full={"num_replicas": 2}), r"num_replicas of tier 'full' is 2, and autoscaling chooses it"),
        (
            config(tiny={"autoscaling_config": {"upscale_delay_s": 1}}),
            r"tier 'tiny' has 'upscale_delay_s'.*min_replicas and max_repl",
        ),
        (config(tiny={"autoscaling_config": {"max_replicas": 0}}), r"max_replicas of tier 'tiny' is 0"),
        (config(1, full=TWO_GPUS), r"max_devices is 1, and the least replicas take 2 \(full 2\): raise it"),
        (config(9, tiny={"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}), r"min_replicas of tier tiny is 3"),
        ({**config(), "autoscaling": {"max_devices": 4, "slowdown": 0.5}}, r"slowdown is 0\.5"),
        ({**config(), "autoscaling": {"max_device": 4}}, r"max_device"),
    ],
)
def test_wrong_values_are_sentences(values: dict[str, Any], said: str) -> None:
    """Guards operators against budgets that nothing fits into, and options that would be ignored."""
    with pytest.raises(ConfigError, match=said):
        app.build(values)


class Controller:
    """What Serve's controller knows of each tier; replicas are there as soon as they are asked for."""

    def __init__(self, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(boards, "_boards", {})
        scaling = {name: one._deployment_config.autoscaling_config for name, one in options(values).items()}
        self.policies = {name: TierPolicy(**one.policy.policy_kwargs) for name, one in scaling.items()}
        self.replicas = {name: one.initial_replicas for name, one in scaling.items()}
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def run(self, seconds: float, said: Callable[[str], dict[str, float]], queued: float = 0.0) -> list[dict[str, int]]:
        """The layouts, a second apart; ``said`` is what a replica of a tier reports."""
        seen = []
        for _ in range(int(seconds)):
            self.now += 1.0
            for name, policy in self.policies.items():
                self.replicas[name], state = policy(self._context(name, said(name), queued * (name == "full")))
                assert state == {}
            seen.append(dict(self.replicas))
        return seen

    def _context(self, name: str, said: dict[str, float], queued: float) -> AutoscalingContext:
        count = self.replicas[name]
        metrics: Any = (
            {key: {f"{name}-{place}": value for place in range(count)} for key, value in said.items()} if count else {}
        )
        known: dict[str, Any] = dict.fromkeys(
            ("last_scale_up_time", "last_scale_down_time", "current_time", "config", "raw_metrics")
        )
        return AutoscalingContext(
            deployment_id=name,  # type: ignore[arg-type]
            deployment_name=name,
            app_name="cascade",
            current_num_replicas=count,
            target_num_replicas=count,
            running_replicas=[],
            total_num_requests=queued,
            total_queued_requests=queued,
            aggregated_metrics=metrics,
            capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=9,
            policy_state={},
            **known,
        )


COST = {"pass_s_1": 0.02, "pass_s_8": 0.028, "pass_s_32": 0.06}


def test_replicas_follow_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way from reports to replicas: a tier that pays for few, none that does for a crowd, nobody; and the budget."""
    controller = Controller(config(6), monkeypatch)

    def busy(sessions: float, tokens_s: float, load: int, *speeds: float) -> Callable[[str], dict[str, float]]:
        """What replicas report: the full tier's speeds alone, with tiny, with medium, with both, at one bucket of load."""

        def said(name: str) -> dict[str, float]:
            chains = ("", "tiny", "medium", "medium,tiny")
            measured = {f"speed:{load}:{chain}": speed for chain, speed in zip(chains, speeds, strict=True)}
            each = {"busy": 0.9, "sessions": sessions / max(1, controller.replicas[name]), "tokens_s": tokens_s}
            return {**COST, **each, **(measured if name == "full" else {})}

        return said

    few = controller.run(120, busy(2.0, 180.0, 1, 40.0, 42.0, 90.0, 91.0))
    assert few[-1] == {"tiny": 0, "medium": 1, "full": 1}
    assert len({tuple(layout.values()) for layout in few[40:]}) == 1, "nothing moves while nothing changes"
    crowd = controller.run(60, busy(60.0, 900.0, 4, 20.0, 20.0, 21.0, 19.0))
    assert all(sum(layout.values()) <= 6 for layout in crowd)
    assert crowd[-1] == {"tiny": 0, "medium": 0, "full": 6}
    idle = controller.run(60, lambda name: {**COST, "busy": 0.0, "sessions": 0.0, "tokens_s": 0.0})
    assert idle[-1] == {"tiny": 0, "medium": 0, "full": 1}
    assert len({tuple(layout.values()) for layout in idle[30:]}) == 1


def test_nothing_is_decided_before_replicas_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start: requests that wait while the first replica loads its weights are no crowd."""
    controller = Controller(config(6), monkeypatch)
    assert controller.run(20, lambda name: {}, queued=50.0)[-1] == {"tiny": 1, "medium": 1, "full": 1}


def test_a_replica_reports_what_it_does() -> None:
    """Guards the reports: Serve drops all of them if one is no number."""
    tier = Tier("full", 0, ToyModel())
    said = LoadReport(tier, Profile(((1, 0.02), (64, 0.03)))).since_last()
    assert said["pass_s_1"] == 0.02
    assert [said[name] for name in ("busy", "sessions", "waiting", "kv_use", "tokens_s")] == [0.0] * 5
    assert all(type(value) is float for value in said.values())


async def test_tiers_at_zero_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards scaling to zero: a lease that waits for a replica makes Serve start one, whatever the policy says."""
    there = {"tiny": 0, "medium": 0}
    monkeypatch.setattr(replica_status, "count_replicas", lambda: dict(there))

    async def given() -> AsyncIterator[str]:
        yield "address secret"

    lessors: Any = dict.fromkeys(there, lambda name, preferred=(), affinity="": given())
    pool = LeasePool(lessors, timeout_s=1, scaled_to_zero=["tiny"])

    async def refused() -> bool:
        try:
            await pool.take(opening(tier="tiny"))
        except Unavailable:
            return True
        return False

    try:
        async with asyncio.timeout(LONG_S):
            while not await refused():
                await asyncio.sleep(0.01)
            await pool.take(opening(tier="medium"))  # Serve may start one
            there["tiny"] = 1
            while await refused():
                await asyncio.sleep(0.01)
    finally:
        await pool.close()

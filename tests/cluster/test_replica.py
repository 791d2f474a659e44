"""A replica of a tier as Ray Serve uses it, in this process: told of changes, checked, leased, replaced, stopped."""

import pytest

from benchmarks.cluster.devices import Setup
from cascade.settings.config import CascadeConfig
from deployments import tier
from deployments.tier import TierReplica
from tests.waiting import until

PERIOD_S = 0.02


class Replica(TierReplica):
    """Stopped by the test, not when it is collected."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def config() -> CascadeConfig:
    """Of toys, whose health is checked often."""
    values = Setup(stretch=1.0).values
    values["tiers"][0]["deployment_config"]["health_check_period_s"] = PERIOD_S
    return CascadeConfig.parse(values)


async def test_a_replica_heeds_what_it_is_told_and_hands_on(config: CascadeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the shim between Serve and the tier: a policy that reaches no pass, sessions that are never handed on."""
    running = ["me", "other"]

    class Serves:
        """Which replicas Serve routes to; it asks each of them, as Serve does."""

        name = "me"

        async def ask(self, method: str) -> list[str]:
            answered = await getattr(replica, method)("me")
            return [answered if name == "me" else name for name in running]

    monkeypatch.setattr(tier, "Siblings", Serves)
    monkeypatch.setattr(tier.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    replica = Replica.__new__(Replica)
    await TierReplica.__init__(replica, config.tiers[0].model_dump(mode="json"), 0, {})
    try:
        policy = replica._tier._loop._limits.policy
        await replica.reconfigure({"engine_kwargs": {"patience": 0.25, "max_guesses": 3}})
        await replica.reconfigure({"engine_kwargs": {"patience": -1.0}})  # logged
        changed = replica._tier._loop._limits.policy
        assert (changed.patience, changed.max_guesses) == (0.25, 3)
        assert changed != policy
        replica.check_health()
        lease = replica.lease("x")
        assert (await anext(aiter(lease))).startswith("127.0.0.1:")
        assert (await replica.describe())["leases"] == 1
        running.remove("me")
        await until(replica._watching.done)
        assert await anext(aiter(lease), None) is None
        assert (await replica.describe())["leases"] == 0
    finally:
        await TierReplica.__del__(replica)
    assert not replica._tier.healthy

"""A router that is told of another configuration while it runs; without Ray."""

import asyncio

import pytest

from cascade.client import Client
from cascade.errors import ConfigError, InvalidRequest, Overloaded
from cascade.params import SamplingParams
from cascade.settings.router import AccessConfig, KeyLimits
from deployments.gateway.admission.access import Access
from deployments.gateway.admission.places import Places
from tests.doors import House
from tests.gateway.test_admission import Crowd


def test_a_running_router_heeds_what_it_is_told(served: House) -> None:
    """Guards limits that are lowered in a hurry: nothing is restarted, and what is wrong changes nothing."""
    router = served.router
    with Client(served.grpc) as client:
        told = {"window": 9, "router": {"limits": {"max_tokens": 8}, "max_running": 3, "held_lease_s": 0.0}}
        served.call(router.reconfigure(told))
        assert client.describe().window == 9
        assert len(client.generate("x", SamplingParams(max_tokens=8, seed=1, ignore_eos=True)).token_ids) == 8
        with pytest.raises(InvalidRequest, match="writes at most 8"):
            client.generate("x", SamplingParams(max_tokens=9))
        served.call(router.reconfigure({"window": 0}))  # logged
        served.call(router.reconfigure({"router": {"access": {"limits": {"nobody": {"max_running": 1}}}}}))
        assert client.describe().window == 9
        served.call(router.reconfigure({}))  # what is not said is as it was at the start
        assert client.describe().window != 9
        client.generate("x", SamplingParams(max_tokens=9))


async def test_places_become_fewer_and_more() -> None:
    """Guards limits while answers are written: nobody is thrown out, and no turn too many is given or lost."""
    crowd = Crowd(places := Places(4, 9))
    for number in range(2):
        await crowd.come(number)
    places.resize(1, 9)
    await crowd.come(2)
    await crowd.come(3)
    assert crowd.served == [0, 1]
    await crowd.leave(0)
    await asyncio.sleep(0)
    assert crowd.served == [0, 1]
    await crowd.leave(1)
    await asyncio.sleep(0)
    assert crowd.served == [0, 1, 2]
    places.resize(2, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert crowd.served == [0, 1, 2, 3]
    await crowd.come(4)
    await crowd.come(5)
    with pytest.raises(Overloaded):
        await crowd.tasks[5]
    for number in (2, 3, 4):
        await crowd.leave(number)
    assert (places.num_admitted, places.num_running) == (0, 0)


def test_keys_get_other_limits() -> None:
    """Guards a key that is limited later against owing what it used when it had no limit."""
    access = Access({"alice": "alice-0123456789abcdef"}, AccessConfig())
    account = access.account("Bearer alice-0123456789abcdef")
    account.charge(10_000)
    access.limit(AccessConfig(limits={"alice": KeyLimits(tokens_per_minute=100, max_running=1)}))
    with account.admitted(1), pytest.raises(Overloaded, match="may have 1 answers"), account.admitted(1):
        pass
    account.charge(101)
    with pytest.raises(Overloaded, match="100 tokens a minute"), account.admitted(1):
        pass
    with pytest.raises(ConfigError, match="names 'bob'"):
        access.limit(AccessConfig(limits={"bob": KeyLimits()}))
    access.limit(AccessConfig())
    with account.admitted(5):
        pass

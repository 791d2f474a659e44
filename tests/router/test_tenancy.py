"""What a key may ask for and what it gets, at the router's doors: priorities, shares, limits that routers keep together."""

from collections.abc import Iterator

import grpc
import pytest

from cascade.client import Client
from cascade.client.responses import KeyInfo
from cascade.errors import PermissionDenied
from cascade.params import Handling, SamplingParams
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc
from tests.doors import House, house
from tests.router.test_http import ask

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdefgh", "carol-0123456789abcdef"
SHORT = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
LIMITS = {"bob": {"min_priority": -5, "weight": 3.0, "max_running": 7, "tokens_per_minute": 100_000}, "carol": {"min_priority": 2}}


@pytest.fixture(scope="module")
def keyed() -> Iterator[House]:
    """A server with three keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENANT_KEYS", f"alice={ALICE},bob={BOB},carol={CAROL}")
        with house(access={"keys_env": "TENANT_KEYS", "limits": LIMITS}) as built:
            yield built
            built.settle()


@pytest.mark.parametrize(("key", "name", "soonest"), [(ALICE, "alice", 0), (BOB, "bob", -5), (CAROL, "carol", 2)])
def test_a_key_goes_no_sooner_than_it_may(keyed: House, key: str, name: str, soonest: int) -> None:
    """Guards the others against a key that goes before all of them, over both protocols; what it may ask for is honoured."""
    sentence = f"priority is {soonest - 1}: requests of key {name} may ask for {soonest} and up, lower is served sooner"
    with Client(keyed.grpc, api_key=key) as client:
        for priority in (soonest, soonest + 9):
            assert client.generate("x", SHORT, handling=Handling(priority)).token_ids
        said = [{"role": "user", "content": "x"}]
        for call in (client.generate, lambda _, *args, **options: client.chat(said, *args, **options)):
            with pytest.raises(PermissionDenied, match=sentence):
                call("x", SHORT, handling=Handling(soonest - 1))
    request = pb.GenerateRequest(prompt="x", priority=soonest - 1)
    with grpc.insecure_channel(keyed.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        serving_pb2_grpc.CascadeStub(channel).Complete(request, metadata=(("authorization", f"Bearer {key}"),))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, sentence)
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": said})):
        asked = {**body, "max_tokens": 4, "priority": soonest - 1}
        status, _, answer = ask(keyed, f"/v1/{path}", asked, Authorization=f"Bearer {key}")
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (403, "permission_error", "permission_denied")
        assert answer["error"]["message"] == sentence
        assert ask(keyed, f"/v1/{path}", asked | {"priority": soonest}, Authorization=f"Bearer {key}")[0] == 200


def test_a_key_is_told_its_limits(keyed: House) -> None:
    """Guards clients against finding out by being refused, in both protocols."""
    with Client(keyed.grpc, api_key=BOB) as bob, Client(keyed.grpc, api_key=ALICE) as alice:
        assert bob.describe().key == KeyInfo("bob", -5, 3.0, 7, 100_000)
        assert alice.describe().key == KeyInfo("alice", 0)
    for path in ("/v1/models", f"/v1/models/{keyed.model}"):
        answer = ask(keyed, path, Authorization=f"Bearer {BOB}")[2]
        assert answer.get("data", [answer])[0]["key"] == {"name": "bob", **LIMITS["bob"]}


def test_without_keys_priorities_are_free() -> None:
    """Guards open servers: their clients have agreed among themselves."""
    with house() as built, Client(built.grpc) as client:
        assert client.describe().key == KeyInfo("anonymous")
        assert client.generate("x", SHORT, handling=Handling(-1000)).token_ids
        built.settle()

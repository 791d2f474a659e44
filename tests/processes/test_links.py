"""Links between processes, both ends of them in this one: nothing waits, nothing is lost in silence, nothing is left."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cascade.chain.local_links import LocalDownlink
from cascade.chain.tier import Tier
from cascade.draft import NO_DRAFT, Draft
from cascade.messages import Close, Commit, Edge, Failed, Link, Logprobs, Message, Open, Proposal
from cascade.params import SamplingParams, Structured
from cascade.processes.channel import Channel
from cascade.processes.links import Downlink, Uplink
from cascade.simulation.toy import ToyModel, full_text
from tests.chain.test_tier import NAMES, opening, settle, text_of

STRUCTURED = Structured(json_schema={"type": "object", "properties": {"a": {"enum": [1, "b"]}}})
PARAMS = SamplingParams(seed=7, temperature=0.5, logit_bias={3: 1.5}, logprobs=2, structured=STRUCTURED, max_tokens=9)
EVERY_KIND: tuple[Message, ...] = (
    Open("a", (1, 2, 3), 2, PARAMS, frozenset({4}), "tiny", ("x", "y"), 9, 8, True, True, -3, "salt", True),
    Commit("a", 3, (5, 6)),
    Close("a"),
    Proposal(
        "a", 2, Draft((1, 2), b"\0\1", b"\7\7", (-1, -1)), (Edge("", "tiny", 3, 0, 0, 3, 0.5, (1,)),), (Logprobs(-1.0),), "x"
    ),
    Failed("a", "no", "tiny", True),
)


class Ear:
    """What a channel's other end said."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.ended = threading.Event()

    def hear(self, messages: Sequence[Message]) -> None:
        self.heard += messages


def wait_until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Guards threads and descriptors of every test here."""
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    wait_until(lambda: threading.active_count() <= threads)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def pair() -> tuple[tuple[Channel, Ear], tuple[Channel, Ear]]:
    ends, ears = socket.socketpair(), (Ear(), Ear())
    channels = [Channel(end, ear.hear, ear.ended.set) for end, ear in zip(ends, ears, strict=True)]
    return (channels[0], ears[0]), (channels[1], ears[1])


def test_messages_arrive_as_they_are() -> None:
    """Guards fields that get lost on the way, and those of a proposal that comparing leaves out."""
    (one, _), (other, ear) = pair()
    one.start()
    other.start()
    one.send(EVERY_KIND)
    wait_until(lambda: len(ear.heard) == len(EVERY_KIND))
    assert repr(ear.heard) == repr(list(EVERY_KIND))
    one.close()
    assert ear.ended.wait(20)
    other.close()


def test_sending_never_waits() -> None:
    """Guards the tier's loop against a process that does not read: what the socket cannot take is kept, in order."""
    (one, _), (other, ear) = pair()
    one.start()
    batches = [[Commit(str(number), number, tuple(range(2000)))] for number in range(400)]
    sender = threading.Thread(target=lambda: [one.send(batch) for batch in batches], daemon=True)
    sender.start()
    sender.join(20)
    assert not sender.is_alive()
    other.start()
    wait_until(lambda: len(ear.heard) == len(batches))
    assert ear.heard == [message for batch in batches for message in batch]
    one.send([Close("last")])
    wait_until(lambda: ear.heard[-1] == Close("last"))
    one.close()
    other.close()


@pytest.mark.parametrize("full", [False, True])
def test_an_end_that_is_gone_is_told_once(full: bool) -> None:
    """Guards against sessions that hang, and errors in the tier's loop, when the other process dies, with a full socket too."""
    (one, ear), (other, _) = pair()
    one.start()
    for number in range(400 if full else 0):
        one.send([Commit(str(number), number, tuple(range(2000)))])
    other._sock.close()
    assert ear.ended.wait(20)
    one.send([Close("a")])
    one.close()


class Recorder:
    """A drafter that answers nothing."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def post(self, messages: Sequence[Message], up: Link | None = None) -> None:
        self.heard += messages


def test_a_lost_tier_fails_its_sessions_and_those_that_follow() -> None:
    """Guards drafting: it waited for guesses of a tier that was gone or never there, or failed the wrong sessions."""
    heard: list[Message] = []
    link = Downlink(heard.extend)
    drafters, uplinks = {"tiny": Recorder(), "small": Recorder()}, {}
    for name, drafter in drafters.items():
        above, below = socket.socketpair()
        link.attach(name, above)
        uplinks[name] = Uplink(below, drafter, ended=lambda _: None)
    tiny, closed, small, nobody = (opening(tier=name) for name in ("tiny", "tiny", "small", "other"))
    link.send([tiny, closed, Close(closed.session), small, nobody])
    assert [(m.session, m.tier) for m in heard if isinstance(m, Failed)] == [(nobody.session, "other")]
    wait_until(lambda: len(drafters["tiny"].heard) == 3 and drafters["small"].heard == [small])
    heard.clear()
    uplinks["tiny"].close()
    wait_until(lambda: heard)
    link.send([Commit(tiny.session, 1, (1,)), again := opening(tier="tiny")])
    assert [(m.session, m.tier, m.fault) for m in heard if isinstance(m, Failed)] == [
        (tiny.session, "tiny", False),
        (again.session, "tiny", False),
    ]
    wait_until(lambda: drafters["tiny"].heard[-1] == Close(tiny.session))
    link.close()
    wait_until(lambda: drafters["small"].heard == [small, Close(small.session)])


def test_a_lost_tier_comes_back() -> None:
    """Guards a process that was started again: sessions went to the link of the one before."""
    heard: list[Message] = []
    link = Downlink(heard.extend)
    for drafter in (Recorder(), Recorder()):
        above, below = socket.socketpair()
        link.attach("tiny", above)
        uplink = Uplink(below, drafter, ended=lambda _: None)
        link.send([asked := opening(tier="tiny")])
        wait_until(lambda drafter=drafter, asked=asked: drafter.heard == [asked])
        uplink.send([Proposal(asked.session, 5, NO_DRAFT)])
        wait_until(lambda: isinstance(heard[-1], Proposal) if heard else False)
        uplink.close()
        wait_until(lambda: isinstance(heard[-1], Failed))
    link.close()


@pytest.fixture
def tiers() -> Iterator[list[Tier]]:
    """Toy tiers, each pair of them joined as those of different processes are."""
    models = [ToyModel(agreement=0.6, pass_s=0.0002), ToyModel(agreement=0.8, pass_s=0.001), ToyModel(pass_s=0.004)]
    tiers = [Tier(name, level, model) for level, (name, model) in enumerate(zip(NAMES, models, strict=True))]
    links = [Downlink(tier.post) for tier in tiers]
    for level, (tier, link) in enumerate(zip(tiers, links, strict=True)):
        tier.below = LocalDownlink(tier, {}, link) if level else None
        for lower in tiers[:level]:
            above, below = socket.socketpair()
            link.attach(lower.name, above)
            Uplink(below, lower, ended=lambda _: None)
        tier.start()
    yield tiers
    settle(tiers)
    for tier, link in zip(reversed(tiers), reversed(links), strict=True):
        link.close()
        tier.close()


@pytest.mark.parametrize("chain", [("medium", "tiny"), ("tiny",), ("medium",)])
def test_chains_over_links_give_the_full_models_text(tiers: list[Tier], chain: tuple[str, ...]) -> None:
    """Guards the whole way, and that drafts are used: whichever tiers take part, over sockets as in memory."""
    request = opening(seed=3, chain=chain)
    text, answer = text_of(tiers[-1], request)
    assert text == full_text(ToyModel(), request)
    assert sum(edge.accepted for edge in answer._edges if edge.drafter == chain[0]) > 0

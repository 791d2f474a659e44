"""Who is served, who waits, who is refused: places, turns, deadlines, aborts, keys and their limits; no network."""

import asyncio
import base64
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade.errors import Aborted, ConfigError, DeadlineExceeded, InvalidRequest, Overloaded, Unauthenticated
from cascade.settings.router import AccessConfig, KeyLimits
from deployments.gateway.admission.access import Access, Account
from deployments.gateway.admission.places import FairQueue, Lifetime, Places, Ticket

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdefgh"
KEYS = f"alice={ALICE}\n# a comment\nbob = {BOB}"


class Crowd:
    """Answers that hold their turn until they are told to end."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.served: list[int] = []
        self._ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.lifetimes: dict[int, Lifetime] = {}

    async def come(self, number: int, lifetime: Lifetime | None = None) -> None:
        self._ends[number], self.lifetimes[number] = asyncio.Event(), lifetime or Lifetime()
        self.tasks[number] = asyncio.create_task(self._answer(number))
        await asyncio.sleep(0)

    async def leave(self, number: int) -> None:
        self._ends[number].set()
        await asyncio.wait([self.tasks[number]])

    async def _answer(self, number: int) -> None:
        with self._places.admitted(1):
            async with self._places.turn(self.lifetimes[number]):
                self.served.append(number)
                await self._ends[number].wait()


@given(st.lists(st.tuples(st.sampled_from(["come", "leave", "cancel", "abort"]), st.integers(0, 9)), max_size=40))
def test_places_are_never_lost(steps: list[tuple[str, int]]) -> None:
    """Guards the count of turns against every order of coming, leaving, cancelling and aborting."""

    async def run() -> None:
        crowd, number = Crowd(places := Places(2, 3)), 0
        for verb, pick in steps:
            living = [n for n, task in crowd.tasks.items() if not task.done()]
            if verb == "come":
                await crowd.come(number)
                number += 1
            elif living:
                ticket = living[pick % len(living)]
                if verb == "leave":
                    crowd._ends[ticket].set()
                elif verb == "cancel":
                    crowd.tasks[ticket].cancel()
                else:
                    crowd.lifetimes[ticket].abort()
            assert 0 <= places.num_running <= 2
            assert places.num_admitted <= 5
            if verb != "come":
                for _ in range(pick % 3):
                    await asyncio.sleep(0)
        for end in crowd._ends.values():
            end.set()
        await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)
        assert (places.num_admitted, places.num_running) == (0, 0)
        for again in range(2):  # both turns are there for whoever comes next
            await crowd.come(number + again)
        assert crowd.served[-2:] == [number, number + 1]
        for again in range(2):
            await crowd.leave(number + again)

    asyncio.run(run())


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("first", ["turn", "end"])
@pytest.mark.parametrize("end", ["abort", "cancel"])
async def test_a_turn_that_comes_with_the_end_goes_to_the_next(end: str, first: str, steps: int) -> None:
    """Guards turns handed to a request in the very moment in which it is aborted or cancelled: they were gone for good."""
    crowd = Crowd(places := Places(1, 2))
    await crowd.come(0)
    await crowd.come(1, lifetime := Lifetime())
    await crowd.come(2)
    verbs = [crowd._ends[0].set, lifetime.abort if end == "abort" else crowd.tasks[1].cancel]
    for verb in verbs if first == "turn" else verbs[::-1]:
        verb()
        for _ in range(steps):
            await asyncio.sleep(0)
    for number in (0, 1, 2):
        await crowd.leave(number)
    assert crowd.served[-1] == 2
    assert (places.num_admitted, places.num_running) == (0, 0)
    await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)


async def test_waits_end_with_the_request() -> None:
    """Guards aborts and deadlines while another replica is looked for: they were heard of up to two seconds later."""

    never, lifetime = asyncio.Event().wait, Lifetime()
    waiting = [asyncio.create_task(lifetime.wait(never)) for _ in range(2)]
    await asyncio.sleep(0)
    lifetime.abort()
    lifetime.abort()
    for task in waiting:
        with pytest.raises(Aborted):
            await task
    with pytest.raises(Aborted):
        await lifetime.wait(never)
    with pytest.raises(DeadlineExceeded):
        await Lifetime(time.monotonic() + 0.01).wait(never)
    assert not lifetime.wakers


async def test_a_cancel_is_no_abort() -> None:
    """Guards tasks that are cancelled while their request ends, too: who cancels them waits for just that."""
    lifetime = Lifetime()
    for both in (False, True):
        task = asyncio.create_task(lifetime.wait(asyncio.Event().wait))
        await asyncio.sleep(0)
        task.cancel()
        if both:
            lifetime.abort()
        with pytest.raises(asyncio.CancelledError):
            await task


def load(monkeypatch: pytest.MonkeyPatch, text: str, **config: object) -> Access:
    monkeypatch.setenv("CASCADE_API_KEYS", text)
    return Access(AccessConfig.model_validate(config))


def test_keys_come_from_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the two sources of keys, and the ways they are sent: browsers and scrapers send a key as a password."""
    path = tmp_path / "keys"
    path.write_text("carol=carol-0123456789abcdef\n")
    access = load(monkeypatch, KEYS, keys_file=str(path))
    for name, key in (("alice", ALICE), ("bob", BOB), ("carol", "carol-0123456789abcdef")):
        assert access.account(f"Bearer {key}").name == access.account(f"bearer  {key}").name == name
    password = base64.b64encode(f"anybody:{ALICE}".encode()).decode()
    assert access.account(f"Basic {password}").name == "alice"
    wrong = [None, "", "Bearer", "Bearer ", f"Bearer {ALICE[:-1]}", "Bearer \udc80ä", f"Basic {ALICE}", "Basic \udc80"]
    for sent in (*wrong, f"Basic {password[:-8]}", f"Basic {base64.b64encode(ALICE.encode()).decode()}"):
        with pytest.raises(Unauthenticated):
            access.account(sent)


def test_keys_are_exchanged_while_routers_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards keys that are withdrawn, which a router knew until it was started again; a broken file withdraws none."""
    monkeypatch.setattr("deployments.gateway.admission.access.LOOK_S", 0.0)
    path, new = tmp_path / "keys", "bob-abcdefgh0123456789"
    path.write_text(f"carol=carol-0123456789abcdef\nbob={BOB}\n")
    access = load(monkeypatch, "", keys_file=str(path), limits={"bob": {"max_running": 1}})
    bob = access.account(f"Bearer {BOB}")
    with bob.admitted(1):
        path.write_text(f"bob={new}\n")
        assert access.account(f"Bearer {new}") is bob  # with what is being written for it
    for gone in ("carol-0123456789abcdef", BOB):
        with pytest.raises(Unauthenticated):
            access.account(f"Bearer {gone}")
    for broken in (lambda: path.write_text("bob"), path.unlink):
        broken()
        assert access.account(f"Bearer {new}") is bob
    path.write_text("dave=dave-0123456789abcdef\n")
    assert access.account("Bearer dave-0123456789abcdef").name == "dave"
    with pytest.raises(Unauthenticated):  # though the configuration has limits for it
        access.account(f"Bearer {new}")


def test_wrong_keys_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that is open, or closed to somebody, by a slip of the pen; no sentence shows a key."""
    for text, config, words in (
        ("alice", {}, "entry 1 is not NAME=KEY"),
        ("alice=short", {}, "'alice' has 5 characters"),
        ("alice=schlüssel-0123456789", {}, "'alice' is not printable ASCII"),
        (f"{KEYS},alice=another-0123456789", {}, "entry 4 repeats"),
        ("", {"required": True}, "There are no API keys where this router runs"),
        ("", {"keys_file": "/nowhere/keys"}, "cannot be read"),
        ("", {"keys_file": "/dev/null"}, "has no keys"),
        (KEYS, {"limits": {"dave": {"max_running": 1}}}, "'dave'"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            load(monkeypatch, text, **config)
        assert "0123456789" not in str(caught.value)
    assert load(monkeypatch, "").account(None).name == "anonymous"
    monkeypatch.setenv("CASCADE_REQUIRE_KEYS", "1")
    with pytest.raises(ConfigError, match="There are no API keys where this router runs"):
        load(monkeypatch, "")
    monkeypatch.setenv("CASCADE_REQUIRE_KEYS", "true")
    with pytest.raises(ConfigError, match="CASCADE_REQUIRE_KEYS is 'true': it must be 1"):
        load(monkeypatch, "")


def test_limits_are_each_keys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the other keys against one that asks too much, and clients that try for ever where no room is enough."""
    access = load(monkeypatch, KEYS, limits={"alice": {"tokens_per_minute": 100, "max_running": 1}})
    alice, bob = access.account(f"Bearer {ALICE}"), access.account(f"Bearer {BOB}")
    with alice.admitted(1), bob.admitted(3), pytest.raises(Overloaded, match="alice may have 1 answers"):
        alice.admitted(1).__enter__()
    with pytest.raises(InvalidRequest, match="asks for 3 answers at once: key alice may have 1; send fewer"):
        alice.admitted(3).__enter__()
    alice.charge(101)
    with pytest.raises(Overloaded, match="100 tokens a minute"):
        alice.admitted(1).__enter__()


def test_tokens_per_minute_are_a_debt_that_time_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the rate: the sentence says when to come again, and then the request is taken."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    account = Account("alice", KeyLimits(tokens_per_minute=600))
    with account.admitted(1):
        account.charge(600 + 99)
    with pytest.raises(Overloaded, match="600 tokens a minute") as caught:
        account.admitted(1).__enter__()
    assert caught.value.retry_after_s == pytest.approx(10)
    now += caught.value.retry_after_s
    with account.admitted(1):
        pass


# shares of the tokens where requests wait


COST = st.integers(1, 200)
WEIGHT = st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0])


def join(queue: FairQueue, name: str, weight: float, cost: int) -> Ticket:
    """An answer whose tokens are known: all are read."""
    return queue.join(name, weight, cost, 0)


@given(st.data())
def test_running_answers_and_wrong_guesses_change_no_share(data: st.DataObject) -> None:
    """Guards the ratio where many answers run at once and end long before they may: by an answer for each turn, of each key."""
    seed, turns = data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 6))
    weights = {"one": data.draw(WEIGHT), "other": data.draw(WEIGHT)}
    chance, queue, served = random.Random(seed), FairQueue(), Counter[str]()
    names: dict[Ticket, str] = {}
    running: list[Ticket] = []
    for name in [*weights] * 300:
        names[queue.join(name, weights[name], chance.randint(1, 50), 400)] = name
    for _ in range(200):
        while len(running) < turns:
            ticket = queue.next()
            running.append(ticket)
        ended = running.pop(chance.randrange(len(running)))
        ended.written = chance.randint(0, 100)
        served[names[ended]] += ended.read + ended.written
        queue.settle(ended)
    bound = sum((turns + 1) * 450 / weight for weight in weights.values())
    assert abs(served["one"] / weights["one"] - served["other"] / weights["other"]) <= bound


@given(st.integers(1, 40), st.integers(0, 30), COST, WEIGHT)
def test_absence_gives_no_credit(away: int, before: int, cost: int, weight: float) -> None:
    """Guards those who stayed against a key that comes back with a crowd: it gets its share from then on, and no arrears."""
    queue = FairQueue()
    for _ in range(before):
        join(queue, "back", 1.0, cost)
        join(queue, "stays", 1.0, cost)
    for _ in range(2 * before):
        queue.next()
    for _ in range(away):
        join(queue, "stays", 1.0, cost)
        queue.next()
    for _ in range(100):
        join(queue, "back", 1.0, cost)
        join(queue, "stays", 1.0, cost)
    turns = [queue.next() for _ in range(20)]
    assert 9 <= sum(ticket is not None and ticket.flow is queue._flows["back"] for ticket in turns) <= 11


@given(st.lists(st.tuples(st.integers(0, 3), COST, st.integers(0, 3)), min_size=1, max_size=80))
def test_nobody_starves(steps: list[tuple[int, int, int]]) -> None:
    """Guards one request among others that never end to come: it waits at most for its own tokens, at every other's share."""
    queue, weights = FairQueue(), [0.1, 1.0, 3.0, 10.0]
    for name, cost, _ in steps:
        join(queue, str(name), weights[name], cost)
        queue.next()
    mine = join(queue, "mine", 1.0, 10)
    for _ in range(2000):
        for name, weight in enumerate(weights):
            join(queue, str(name), weight, 100)
        if queue.next() is mine:
            return
    pytest.fail("it was never its turn")


@given(st.lists(st.tuples(st.sampled_from(["join", "next", "leave", "settle", "undo"]), st.integers(0, 2), COST), max_size=80))
def test_books_balance(steps: list[tuple[str, int, int]]) -> None:
    """Guards order within a key, and tags against credit: corrections never take a key below where it began."""
    queue, waiting, running = FairQueue(), list[Ticket](), list[Ticket]()
    for verb, name, cost in steps:
        if verb == "join":
            waiting.append(queue.join(str(name), name + 1.0, cost, 50, rank=float(cost % 3)))
        elif verb == "next":
            ticket = queue.next()
            assert (ticket is None) == (not waiting)
            if ticket is not None:
                assert ticket is min(
                    (place for place in waiting if place.flow is ticket.flow), key=lambda place: (place.rank, place.number)
                )
                waiting.remove(ticket)
                running.append(ticket)
        elif verb == "leave" and waiting:
            queue.leave(waiting.pop(cost % len(waiting)))
        elif running:
            ended = running.pop(cost % len(running))
            ended.written = cost % 51
            queue.settle(ended) if verb == "settle" else queue.undo(ended)
        for flow in queue._flows.values():
            assert flow.tag >= flow.start

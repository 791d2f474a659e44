"""Shares of the tokens where requests wait: who is next, and what keys of some weights get; no network."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.gateway.admission.fair_queue import FairQueue, Ticket

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
            assert ticket is not None
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
                    (one for one in waiting if one.flow is ticket.flow), key=lambda one: (one.rank, one.number)
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

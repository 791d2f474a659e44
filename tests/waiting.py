"""Waiting for what has to come: for as long as a busy machine may need, and no longer than that."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

LONG_S = 240.0  # more than a busy machine needs to start replicas: every test gives up then, and none before


def wait_until(condition: Callable[[], object], state: Callable[[], object] = str, *, every_s: float = 0.01) -> None:
    """Return once ``condition`` holds; fail with what ``state`` says after `LONG_S`."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(every_s)


def first(make: Callable[[], T], good: Callable[[T], object]) -> T:
    """What ``make`` gives as soon as it is ``good``: on a busy machine, guesses may come too late for a short answer."""
    made: list[T] = []

    def is_good() -> object:
        made.append(make())
        return good(made[-1])

    wait_until(is_good)
    return made[-1]


async def until(condition: Callable[[], object | Awaitable[object]], state: Callable[[], object] = str) -> None:
    """`wait_until` in an event loop; what ``condition`` gives may be awaited."""
    deadline = time.monotonic() + LONG_S
    while True:
        held = condition()
        if await held if isinstance(held, Awaitable) else held:
            return
        assert time.monotonic() < deadline, state()
        await asyncio.sleep(0.005)

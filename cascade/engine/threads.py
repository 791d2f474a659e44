"""Chooses the number of CPU threads for a pass when a model is loaded.

Threads synchronise several hundred times in a pass. In a small pass that may cost more than the computation in between. Then
more threads make it slower, and take cores from the other tiers.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Self, TypeVar

import torch

SIZES = (1, 8, 32, 128)  # tokens of the passes that are timed; larger ones take all threads
ROUNDS = 5
BUDGET_S = 0.25  # seconds for all rounds of a size; at least one round runs
GAIN = 1.1  # more threads must be faster by this factor
LONG_S = 0.1  # computing time of a thread from which a pass gets all threads, far above the cost of synchronising


T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that ends with it; returns or raises the same.

    OpenMP keeps helper threads for each thread that has computed. If there are more of them than cores, all sleep whenever they
    wait for each other. So helpers left by a thread that only loaded a model would slow every pass of the tier's own thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, name="apart", daemon=True).start()  # a daemon, so that Ctrl-C does not wait while a model loads
    return outcome.result()


class Pace:
    """Lets the calling thread rest between steps of background work, so that it takes only a share of a core."""

    def __init__(self, share: float) -> None:
        self._rests = 1 / share - 1  # rest for each unit of work
        self._begin = time.thread_time()

    def rest(self) -> None:
        """Sleep in proportion to the time that this thread has computed since it last slept."""
        time.sleep(self._rests * (time.thread_time() - self._begin))
        self._begin = time.thread_time()


class Threads:
    """The number of threads of passes, by their number of tokens.

    PyTorch's setting belongs to the calling thread, and is restored after each pass. (A thread that computes for the first time
    while a pass runs starts with the number of that pass.)
    """

    def __init__(self, limit: int, steps: Sequence[tuple[int, int]] = ()) -> None:
        """``steps`` are pairs of tokens, increasing, and threads of passes up to that size; ``limit`` is for larger ones."""
        self.limit = limit
        self.steps = tuple(steps)

    @classmethod
    def find(cls, run: Callable[[int], object], limit: int, clock: Callable[[], float] = time.perf_counter) -> Self:
        """Time passes ``run(num_tokens)`` with 1, 2, 4, ... and ``limit`` threads: the fewest that are not slower.

        Larger and larger passes are tried until one gets all threads. The best times are compared: the choice holds for the
        model's life, and a program that is busy for a moment slows several threads far more than one.
        """
        counts = [*(1 << bit for bit in range((limit - 1).bit_length())), limit]
        steps: list[tuple[int, int]] = []
        for num_tokens in SIZES if limit > 1 else ():
            if min(_time(partial(run, num_tokens), [1], clock, rounds=2)[1]) > LONG_S * limit:
                break
            timed = _time(partial(run, num_tokens), counts, clock)
            best = {count: min(seconds) for count, seconds in timed.items()}
            fewest = next(n for n in counts if all(best[n] <= GAIN * best[more] for more in counts if more > n))
            if fewest == limit:
                break
            steps.append((num_tokens, fewest))
            counts = [count for count in counts if count >= fewest]  # a larger pass never gets fewer threads
        return cls(limit, steps)

    def __str__(self) -> str:
        """Such as ``1 thread up to 8 tokens, 2 beyond``."""
        parts = [f"{count} up to {tokens} tokens" for tokens, count in self.steps]
        return ", ".join([*parts, f"{self.limit}{' beyond' if parts else ''}"])

    def count(self, num_tokens: int) -> int:
        place = bisect_left(self.steps, (num_tokens, 0))
        return self.steps[place][1] if place < len(self.steps) else self.limit


@contextmanager
def limited(count: int) -> Iterator[None]:
    """Let the calling thread compute with ``count`` threads."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time(
    run: Callable[[], object], counts: Sequence[int], clock: Callable[[], float], rounds: int = ROUNDS
) -> dict[int, list[float]]:
    """Seconds of passes by number of threads, in at least one round and as many as the budget allows."""
    timed: dict[int, list[float]] = {count: [] for count in counts}
    end = clock() + BUDGET_S
    for turn in range(rounds):
        for count in counts:
            if turn and clock() > end:
                break
            with limited(count):
                run()  # starts the threads
                begin = clock()
                run()
                timed[count].append(clock() - begin)
    return timed

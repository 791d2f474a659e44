"""How many CPU threads a pass is worth, found out when a model is loaded.

Threads have to meet several hundred times in a pass. What a small pass computes in between may be less than the meeting costs:
then more threads make it slower, and take cores from the other tiers.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Thread
from typing import Self, TypeVar

import torch

SIZES = (1, 8, 32, 128)  # tokens of the passes that are timed; larger ones take all threads
ROUNDS = 5
BUDGET_S = 0.25  # seconds for all rounds of a size, if one round takes no longer
GAIN = 1.1  # times faster at least that more threads must be
LONG_S = 0.1  # what a thread computes in a pass that is worth all threads: far longer than they take to meet


T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """Return or raise what ``work`` does, run in a thread that ends with it.

    OpenMP keeps helpers for each thread that has computed. Where these are more than the cores, all of them sleep whenever they
    wait for each other, and every pass of the tier's own thread pays for helpers that a thread which loaded its model has left.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, name="apart", daemon=True).start()  # a daemon: Ctrl-C does not wait for a model to load
    return outcome.result()


class Pace:
    """For work that is in no hurry: the calling thread rests between steps, so that it takes only a share of a core."""

    def __init__(self, share: float) -> None:
        self._rests = 1 / share - 1  # rests for each unit of work
        self._begin = time.thread_time()

    def rest(self) -> None:
        """Sleep in proportion to what this thread has computed since it last slept."""
        time.sleep(self._rests * (time.thread_time() - self._begin))
        self._begin = time.thread_time()


class Threads:
    """The threads of passes by their number of tokens.

    PyTorch's setting belongs to the calling thread, and is put back after each pass. (A thread that computes for the first time
    while a pass runs begins with that pass's number.)
    """

    def __init__(self, limit: int, steps: Sequence[tuple[int, int]] = ()) -> None:
        """``limit`` for all passes, or for those that are larger than all ``steps``: tokens, increasing, and threads."""
        self.limit = limit
        self.steps = tuple(steps)

    @classmethod
    def find(cls, run: Callable[[int], object], limit: int, clock: Callable[[], float] = time.perf_counter) -> Self:
        """Time passes ``run(num_tokens)`` with 1, 2, 4, ... and ``limit`` threads: the fewest that are not slower.

        Sizes go up until all threads are worth it. The best times are compared: the choice holds for the model's life, and a
        program that is busy beside it for a moment slows several threads far more than one.
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
            counts = [count for count in counts if count >= fewest]  # a larger pass is not worth fewer
        return cls(limit, steps)

    def __str__(self) -> str:
        """Such as ``1 thread up to 8 tokens, 2 beyond``."""
        parts = [f"{count} up to {tokens} tokens" for tokens, count in self.steps]
        return ", ".join([*parts, f"{self.limit}{' beyond' if parts else ''}"])

    def count(self, num_tokens: int) -> int:
        place = bisect_left(self.steps, (num_tokens, 0))
        return self.steps[place][1] if place < len(self.steps) else self.limit

    def use(self, num_tokens: int) -> AbstractContextManager[None]:
        """Give the calling thread what a pass is worth."""
        return limited(self.count(num_tokens))


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
    """Seconds of passes by number of threads: at least one round, and no more than the budget allows."""
    timed: dict[int, list[float]] = {count: [] for count in counts}
    end = clock() + BUDGET_S
    for turn in range(rounds):
        for count in counts:
            if turn and clock() > end:
                break
            with limited(count):
                run()  # threads that were not there are made now
                begin = clock()
                run()
                timed[count].append(clock() - begin)
    return timed

"""The tiers of a cascade that live in processes of their own: all but the full one, which stays with the caller."""

import os
import socket
import sys
import threading
from collections.abc import Sequence
from itertools import combinations

import torch

from cascade.chain.policy import Policy
from cascade.chain.tier import Tier
from cascade.messages import Link
from cascade.processes.child import TierSpec
from cascade.processes.links import Downlink
from cascade.processes.tier_process import TierProcess


def pay(num_tiers: int, device: torch.device, policy: Policy) -> bool:
    """Whether lower tiers are better off in processes of their own: tiers share a GPU best from one process.

    A policy of another class cannot be counted on to exist there.
    """
    able = hasattr(os, "fork") and bool(sys.executable)  # not so where Python is part of another program
    return able and num_tiers > 1 and device.type == "cpu" and num_cores() > 1 and type(policy) is Policy


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LowerTiers:
    """A process for each of ``specs``, bottom to top, which begin to load at once; nothing is left of them behind `close`.

    Each pair of tiers is joined directly. A tier that dies is missed until its process is back; the others go on.
    """

    def __init__(self, specs: Sequence[TierSpec]) -> None:
        self._lock = threading.Lock()  # of who is joined to whom
        self._downlink: Downlink | None = None  # of the full tier
        self._joined: set[TierProcess] = set()
        self.processes: list[TierProcess] = []
        crowded = num_cores() <= 1 + len(specs)
        try:
            for spec in specs:
                num_threads = 1 if crowded else torch.get_num_threads()
                self.processes.append(TierProcess(spec, num_threads=num_threads, returned=self._join_again))
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Bottom to top."""
        return tuple(process.spec.name for process in self.processes)

    @property
    def vocab_size(self) -> int:
        """That all have."""
        return min(process.facts.vocab_size for process in self.processes)

    @property
    def context_len(self) -> int:
        """That all have."""
        return min(process.facts.context_len for process in self.processes)

    def wait(self) -> None:
        """Return when all may be used; raises what was raised where one was loaded.

        One after the other times its passes and counts the memory that is left: together they would disturb each other.
        """
        for process in self.processes:
            process.wait_for_weights()
        for process in self.processes:
            process.wait_until_ready()

    def join(self, full: Tier) -> Link:
        """The link by which ``full`` reaches them, from now on."""
        with self._lock:
            self._downlink = Downlink(full.post)
            for process in self.processes:
                self._join(process)
        for process in self.processes:
            process.watch()
        return self._downlink

    def close(self) -> None:
        """End all processes and break all links."""
        for process in self.processes:
            process.close()
        if self._downlink is not None:
            self._downlink.close()

    def _join_again(self, process: TierProcess) -> None:
        with self._lock:
            self._joined.discard(process)
            self._join(process)

    def _join(self, process: TierProcess) -> None:
        """Links to all that are there; the one to the full tier last, so that whoever hears from that one has all others."""
        self._joined.add(process)
        present = [other for other in self.processes if other in self._joined and other.ready]
        for lower, upper in combinations(present, 2):
            if process in (lower, upper):
                above, below = socket.socketpair()
                lower.attach_above(below)
                upper.attach_below(lower.spec.name, above)
        assert self._downlink is not None
        above, below = socket.socketpair()
        process.attach_above(below)
        self._downlink.attach(process.spec.name, above)

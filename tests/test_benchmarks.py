"""What benchmarks are made of still works: they run rarely, and for minutes."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks import cascade, hop
from cascade.params import DEFAULT_WINDOW


def test_hops_can_be_measured() -> None:
    """Guards the price of a message against links that have changed: a benchmark would fail behind its longest part."""
    with ProcessPoolExecutor(1, get_context("spawn")) as worker:  # whose tier ends with it
        hop_s, message_s = asyncio.run(hop.measure(*worker.submit(hop.serve).result()))
    assert message_s > 0
    assert 0 < hop_s < 1


def test_lockstep_pairs_are_no_strawmen() -> None:
    """Guards the strongest baseline: every drafter with windows on both sides of its best one."""
    modes = [mode.speculation for mode in cascade.lockstep_pairs()]
    assert {mode.tiers for mode in modes} == {("tiny",), ("medium",)}
    assert all(mode.schedule == "lockstep" for mode in modes)
    assert max(mode.window or 0 for mode in modes) >= DEFAULT_WINDOW // 2

"""Threads for work that would block the event loop of a router, with a pool for each kind, so that no kind waits for another.

Look-ups on disks and networks use asyncio's own threads.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TEXT = ThreadPoolExecutor(2, "text")  # tokenizes and decodes long texts, tenths of a second at most
LONG = 2000  # characters or tokens from which a text is processed in these threads
GRAMMARS = ThreadPoolExecutor(2, "grammars")  # compiles grammars, which may take seconds


async def in_thread(pool: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run ``work`` in a thread of ``pool``."""
    return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **options))


async def reading(length: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run ``work`` on a text of this length; in a thread if the text is long, so that other requests continue."""
    return work(*args, **options) if length < LONG else await in_thread(TEXT, work, *args, **options)

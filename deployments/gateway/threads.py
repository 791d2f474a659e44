"""Threads for what would hold up the event loop of a router, a few for each kind of work, so that none waits for another kind.

Look-ups, which wait for disks and networks, have asyncio's own threads.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TEXT = ThreadPoolExecutor(2, "text")  # tokenizes and decodes long texts, tenths of a second at most
LONG = 2000  # characters or tokens from which a text is left to them
GRAMMARS = ThreadPoolExecutor(2, "grammars")  # compiles grammars, which may take seconds


async def in_thread(pool: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What ``work`` returns, done in a thread of ``pool``."""
    return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **options))


async def reading(length: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What ``work`` on a text of this length returns; a long one is left to a thread, so that other requests go on."""
    return work(*args, **options) if length < LONG else await in_thread(TEXT, work, *args, **options)

"""What a lower tier costs the core it runs on: a pass, and a message at either end of a link.

A real tier serves a real link from a process of its own; this process, on the same core, is the tier above and keeps all that
it proposes. Seconds are of the processor: who else runs on that core takes none of them. But caches are as cold as they are in
the benchmark, where the full model reads all its weights in every pass, and a pass is seldom followed by another of its kind.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import reference
from cascade.chain.tier import Tier
from cascade.messages import Commit, Message, Open, Proposal
from cascade.params import SamplingParams
from deployments.links.downlink import Downlink
from deployments.links.uplink import LinkServer

NAME = "lower"
PROMPT = tuple(range(5, 105))
KEPT = 6  # tokens that are committed at once, as many as a pass of the full tier gives
NUM_TOKENS = 384
NUM_ROUNDS = 12  # of lockstep

Judge: TypeAlias = Callable[[], Awaitable[Any]]  # a pass of the tier above

_served: list[tuple[Tier, LinkServer]] = []  # of the worker


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a core."""

    pass_s: float  # one token, and all that the tier's loop does around it
    message_s: float  # at one end


@dataclass(frozen=True, slots=True)
class Used:
    """What a worker has used so far, seconds of its processor."""

    loop_s: float  # the tier's thread
    rest_s: float  # all others: the event loop and gRPC
    passes: int


def serve(source: str, dtype: str) -> str:
    """In a worker: serve a tier with this model; the ticket for its link."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    model = reference.scorer(source, dtype)

    async def start() -> str:
        tier = Tier(NAME, 0, model)
        tier.start()
        server = LinkServer(tier)
        await server.start("127.0.0.1")
        for session in range(8):
            server.leases.add(str(session))
        _served.append((tier, server))
        return f"{server.address} {server.secret}"

    return asyncio.run_coroutine_threadsafe(start(), loop).result()


def used() -> Used:
    """In a worker, of the tier that it serves."""
    tier, _ = _served[-1]
    [thread] = [thread for thread in threading.enumerate() if thread.name == f"tier-{NAME}"]
    seconds = {int(task.name): processor_s(task) for task in Path("/proc/self/task").iterdir()}
    loop_s = seconds[thread.native_id or 0]
    return Used(loop_s, sum(seconds.values()) - loop_s, tier.stats.passes)


def processor_s(task: Path) -> float:
    """Seconds that the thread of this folder of /proc has worked."""
    return int((task / "schedstat").read_text().split()[0]) / 1e9


class Held:
    """A lease on a replica that nobody else wants."""

    def __init__(self, ticket: str) -> None:
        self._ticket = ticket

    async def __aiter__(self) -> AsyncIterator[str]:
        yield self._ticket

    def cancel(self) -> None:
        """There is nothing to let go of."""


async def verify(ticket: str, session: str, num_tokens: int, window: int, judge: Judge | None) -> int:
    """Be the tier above for so many tokens, in lockstep with ``judge`` if it is given; the number of messages both ways."""
    heard: asyncio.Queue[Message] = asyncio.Queue()

    def deliver(messages: Sequence[Message]) -> None:
        for message in messages:
            heard.put_nowait(message)

    downlink = Downlink({NAME: lambda session, preferred=(): Held(ticket)}, deliver)
    params = SamplingParams(max_tokens=num_tokens + window, temperature=0, seed=0)
    downlink.put([Open(session, PROMPT, len(PROMPT), params, tier=NAME, window=window, lockstep=judge is not None)])
    committed, text, messages = len(PROMPT), list(PROMPT), 1
    at_once = KEPT if judge is None else window
    while committed < len(PROMPT) + num_tokens:
        message = await heard.get()
        assert isinstance(message, Proposal), f"the session goes on: {message}"
        messages += 1
        text[message.start :] = message.draft.tokens
        if len(text) - committed >= at_once:
            if judge is not None:
                await judge()
            downlink.put([Commit(session, committed, tuple(text[committed : committed + at_once]))])
            committed += at_once
            messages += 1
    await downlink.close()
    return messages


async def price(worker: ProcessPoolExecutor, ticket: str, session: str, window: int, judge: Judge | None = None) -> Price:
    """Of the tier behind ``ticket``, in ``worker``, by the session of that name: 0 to 7, each once."""
    num_tokens = NUM_TOKENS if judge is None else NUM_ROUNDS * window
    before, begin = worker.submit(used).result(), time.process_time()
    messages = await verify(ticket, session, num_tokens, window, judge)
    here = time.process_time() - begin
    after = worker.submit(used).result()
    there = after.rest_s - before.rest_s
    return Price((after.loop_s - before.loop_s) / (after.passes - before.passes), (here + there) / (2 * messages))

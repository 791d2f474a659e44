"""The pieces of several answers in one stream, which some API's `Reply` writes."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from cascade.answer import Chunk
from deployments.gateway.admission.status import Refusal, refusal

Pieces = AsyncGenerator[tuple[int, Chunk], None]  # with the index of their answer


class Reply(Protocol):
    """How one API writes the answers to one request, whole or as server-sent events, which may be none."""

    def whole(self, pieces: Sequence[tuple[int, Chunk]]) -> dict[str, Any]: ...

    def piece(self, index: int, chunk: Chunk) -> bytes: ...

    def end(self) -> bytes: ...

    def failed(self, refused: Refusal) -> bytes: ...


async def merged(sources: Sequence[AsyncGenerator[Chunk, None]]) -> Pieces:
    """The pieces of all answers as they come, with the index of their answer. One that fails ends them all."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(1)  # a client that does not read stalls them all
    tasks = [asyncio.create_task(_feed(queue, index, source)) for index, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gathered(reply: Reply, pieces: Pieces) -> dict[str, Any]:
    """The whole answer."""
    async with contextlib.aclosing(pieces):
        return reply.whole([piece async for piece in pieces])


async def streamed(reply: Reply, pieces: Pieces) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. What fails after the first one is an event too."""
    told = False
    try:
        async with contextlib.aclosing(pieces):
            async for index, chunk in pieces:
                if events := reply.piece(index, chunk):
                    told = True
                    yield events
    except Exception as error:
        if not told:
            raise
        yield reply.failed(refusal(error))
        return
    if end := reply.end():
        yield end


async def _feed(
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]], index: int, source: AsyncGenerator[Chunk, None]
) -> None:
    try:
        async with contextlib.aclosing(source) as chunks:
            async for chunk in chunks:
                await queue.put((index, chunk))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))

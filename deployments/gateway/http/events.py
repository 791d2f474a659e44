"""Streaming: pieces of several answers in one stream, server-sent events, and work that ends when the client leaves.

`fastapi.sse` is not used: it sends the status before the first piece, so a request could no longer be refused with 429 or 503;
the same path could not give whole answers; and a piece costs four times as much (docs/log.md).
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic_core import from_json, to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cascade.answer import Chunk
from cascade.errors import CascadeError
from deployments.gateway.admission.admission import refusal

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[int, Chunk], None]  # pieces, each with the index of its answer


def event(content: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = b"event: %s\n" % name.encode() if name else b""
    return b"%sdata: %s\n\n" % (head, to_json(content, ensure_ascii=True))  # for clients that also split at Unicode line breaks


def warned(fields: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The `Warning` header for ``fields`` of a request, by what became of them; empty if there are none."""
    warnings = [f'299 - "{what}: {", ".join(names)}"' for what, names in fields.items() if names]
    return {"warning": ", ".join(warnings)} if warnings else {}


def finite(value: Any) -> Any:
    """``value`` with null for NaN and infinities, which Python reads but JSON does not have."""
    return from_json(to_json(value, inf_nan_mode="null"))


class ClientLeft(Exception):
    """The client closed the connection, or stopped reading."""


class Events(Response):
    """A response of server-sent events. It ends, and closes ``events``, as soon as the client leaves."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], first: bytes, held: contextlib.ExitStack, headers: Mapping[str, str]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store", **headers})
        del self.headers["content-length"]
        self._events = events
        self._first = first
        self._held = held  # closed at the end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await attended(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for content in self._events:
                await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; cancels it and raises `ClientLeft` when the client leaves."""
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for part in (task, leaving):
            part.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply(ABC):
    """Writes the answers to one request in the form of an API."""

    @abstractmethod
    def whole(self, pieces: Sequence[tuple[int, Chunk]]) -> dict[str, Any]:
        """The answers at once."""

    @abstractmethod
    def piece(self, index: int, chunk: Chunk) -> bytes:
        """The server-sent events of the next piece of an answer; may be empty."""

    @abstractmethod
    def failed(self, error: CascadeError) -> bytes:
        """The event that ends a stream that failed."""

    def end(self) -> bytes:
        """The events after the last piece."""
        return b""

    def resume(self, delivered: Sequence[Chunk]) -> None:
        """The client already has ``delivered``, one piece for each answer."""
        raise NotImplementedError


async def merged(sources: Sequence[AsyncGenerator[Chunk, None]]) -> Pieces:
    """The pieces of all answers as they come, each with the index of its answer. If one answer fails, all end."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(1)  # a client that does not read stalls all

    async def feed(index: int, source: AsyncGenerator[Chunk, None]) -> None:
        last = None
        try:
            async with contextlib.aclosing(source) as chunks:
                async for chunk in chunks:
                    await queue.put((index, chunk))
        except Exception as error:
            last = error
        await queue.put((index, last))

    tasks = [asyncio.create_task(feed(index, source)) for index, source in enumerate(sources)]
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


async def unwritten(source: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """An answer of one token without this token, which only carries the log-probabilities of the prompt."""
    async with contextlib.aclosing(source) as chunks:
        async for chunk in chunks:
            end = chunk.completion
            if end is not None:
                stats = replace(end.stats, completion_tokens=0)
                end = replace(end, text="", token_ids=(), finish_reason="length", logprobs=(), origins=b"", stats=stats)
            yield replace(chunk, text="", token_ids=(), ends=(), origins=b"", logprobs=(), completion=end)


async def gathered(reply: Reply, pieces: Pieces) -> dict[str, Any]:
    """The whole answer."""
    async with contextlib.aclosing(pieces):
        return reply.whole([piece async for piece in pieces])


async def streamed(reply: Reply, pieces: Pieces) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. A failure after the first event becomes an event, too."""
    begun = False
    try:
        async with contextlib.aclosing(pieces):
            async for index, chunk in pieces:
                if events := reply.piece(index, chunk):
                    begun = True
                    yield events
    except Exception as error:
        if not begun:
            raise
        yield reply.failed(refusal(error))
        return
    if end := reply.end():
        yield end

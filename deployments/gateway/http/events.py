"""Server-sent events, and answers that end with whoever waits for them.

By hand, since `fastapi.sse` streams what a path operation yields: the status is sent before the first piece is there, so that
a request could no longer be refused with 429 or 503; the same path could not give whole answers; and a piece costs four
times as much (docs/log.md).
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic_core import from_json, to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


def event(content: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


def finite(value: Any) -> Any:
    """``value`` with null for numbers that JSON does not have, which clients and models may write nevertheless."""
    return from_json(to_json(value, inf_nan_mode="null"))


class ClientLeft(Exception):
    """Nobody is there to be answered."""


class Events(Response):
    """A response of server-sent events; ends, and closes ``events``, as soon as the client leaves."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], first: bytes, held: contextlib.ExitStack, headers: Mapping[str, str]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store", **headers})
        del self.headers["content-length"]
        self._events = events
        self._first = first
        self._held = held  # let go at the end

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
    """What ``work`` returns; ends it and raises `ClientLeft` when the client leaves."""
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

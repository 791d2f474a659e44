"""Clients of a served cascade. They need neither torch nor Ray; answers are those of the library.

>>> with Client("127.0.0.1:9000") as client:
...     print(client.generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0)).text)

What the two clients share is in `cascade.client.connection` and `cascade.client.exchange`; here one waits, the other awaits.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, ClassVar, Self, Unpack

import grpc

from cascade.answer import Chunk, Completion
from cascade.client.chat import ChatOptions, Messages, Turn, TurnPiece
from cascade.client.connection import Connection
from cascade.client.exchange import Exchange, Prompt, Whole, chat_exchange, text_exchange
from cascade.client.responses import Piece, ServerInfo, read_server_info
from cascade.errors import Unavailable
from cascade.params import Handling, SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb

DESCRIBE_TIMEOUT_S = 30.0


class Client(Connection):
    """Talks to the server at ``address``, or in turn to those at several; ``application`` names the Serve application if
    there are several.

    ``api_key`` is for servers that ask for one; if ``None`` it is that of the environment variable ``CASCADE_API_KEY``, and ""
    sends none. ``timeout`` is the deadline of each request, in seconds. A request whose server is gone is sent again, also to
    another one, and a stream goes on where it broke off, with the same text, until no server has sent anything for
    ``patience_s`` (0: never again). An address that begins with ``grpcs://`` is one of TLS; ``authority`` is then a file of
    certificates (PEM) to trust instead of the public ones, or of those that ``GRPC_DEFAULT_SSL_ROOTS_FILE_PATH`` names.
    Arguments that cannot be used raise `ConfigError`; what a server refuses, or cannot finish, raises the other errors of
    `cascade.errors`.
    """

    _channels: ClassVar[Any] = grpc

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
    ) -> Completion:
        """The whole text after ``prompt``, a string or token ids."""
        return self._whole(text_exchange(prompt, params, speculation, handling))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
    ) -> Iterator[Chunk]:
        """The text piece by piece; closing the iterator ends the request on the server."""
        return self._pieces(text_exchange(prompt, params, speculation, handling))

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> Turn:
        """The assistant's whole next turn after ``messages``, which are as OpenAI's clients have them.

        Without ``params`` it may be as long as the context has room for.
        """
        return self._whole(chat_exchange(messages, params, speculation, handling, options))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[TurnPiece]:
        """The assistant's next turn piece by piece; closing the iterator ends the request on the server."""
        return self._pieces(chat_exchange(messages, params, speculation, handling, options))

    def describe(self) -> ServerInfo:
        """What is served."""
        return read_server_info(self._ask("Describe", pb.DescribeRequest(), DESCRIBE_TIMEOUT_S))

    def close(self) -> None:
        self._closed = True
        for door in self._doors:
            door.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _whole(self, exchange: Exchange[Whole, Any]) -> Whole:
        return exchange.read(self._ask(exchange.unary, exchange.encode()))

    def _ask(self, rpc: str, request: Any, timeout_s: float | None = None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            door = self._door()
            try:
                response = self._begin(door, rpc, request, attempts)
                self._heard(door, attempts)
                return response
            except grpc.RpcError as error:
                pause_s = self._failed(error, door, attempts)
            time.sleep(pause_s)

    def _pieces(self, exchange: Exchange[Any, Piece]) -> Iterator[Piece]:
        builder, request, attempts = exchange.builder(), exchange.encode(), self._attempts()
        while True:
            door = self._door()
            call = self._begin(door, exchange.streaming, request, attempts)
            try:
                for response in call:
                    self._heard(door, attempts)
                    yield builder.add(response)
                builder.check()
                return
            except (grpc.RpcError, Unavailable) as error:
                if builder.complete:
                    return
                pause_s = self._failed(error, door, attempts, again=builder.resume(request))
            finally:
                call.cancel()
            time.sleep(pause_s)


class AsyncClient(Connection):
    """`Client` for an event loop."""

    _channels: ClassVar[Any] = grpc.aio

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
    ) -> Completion:
        """The whole text after ``prompt``, a string or token ids."""
        return await self._whole(text_exchange(prompt, params, speculation, handling))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
    ) -> AsyncIterator[Chunk]:
        """The text piece by piece; closing the iterator ends the request on the server."""
        return self._pieces(text_exchange(prompt, params, speculation, handling))

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> Turn:
        """The assistant's whole next turn after ``messages``, which are as OpenAI's clients have them.

        Without ``params`` it may be as long as the context has room for.
        """
        return await self._whole(chat_exchange(messages, params, speculation, handling, options))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[TurnPiece]:
        """The assistant's next turn piece by piece; closing the iterator ends the request on the server."""
        return self._pieces(chat_exchange(messages, params, speculation, handling, options))

    async def describe(self) -> ServerInfo:
        """What is served."""
        return read_server_info(await self._ask("Describe", pb.DescribeRequest(), DESCRIBE_TIMEOUT_S))

    async def close(self) -> None:
        self._closed = True
        for door in self._doors:
            await door.channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _whole(self, exchange: Exchange[Whole, Any]) -> Whole:
        return exchange.read(await self._ask(exchange.unary, exchange.encode()))

    async def _ask(self, rpc: str, request: Any, timeout_s: float | None = None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            door = self._door()
            try:
                response = await self._begin(door, rpc, request, attempts)
                self._heard(door, attempts)
                return response
            except grpc.RpcError as error:
                pause_s = self._failed(error, door, attempts)
            await asyncio.sleep(pause_s)

    async def _pieces(self, exchange: Exchange[Any, Piece]) -> AsyncIterator[Piece]:
        builder, request, attempts = exchange.builder(), exchange.encode(), self._attempts()
        while True:
            door = self._door()
            call = self._begin(door, exchange.streaming, request, attempts)
            try:
                async for response in call:
                    self._heard(door, attempts)
                    yield builder.add(response)
                builder.check()
                return
            except (grpc.RpcError, Unavailable) as error:
                if builder.complete:
                    return
                pause_s = self._failed(error, door, attempts, again=builder.resume(request))
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)

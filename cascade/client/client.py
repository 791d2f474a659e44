"""Clients of a served cascade. They need neither torch nor Ray; answers are those of the library.

>>> with Client("127.0.0.1:9000") as client:
...     print(client.generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0)).text)

What the two clients share is in `cascade.client.connection` and `cascade.client.exchange`; here one waits, the other awaits.
"""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, ClassVar, Self, Unpack

import grpc

from cascade.answer import Chunk, Completion
from cascade.client.chat import ChatOptions, Messages, Turn, TurnPiece
from cascade.client.connection import Connection, errors
from cascade.client.exchange import Exchange, Piece, Prompt, Whole, chat_exchange, text_exchange
from cascade.client.responses import ServerInfo, read_server_info
from cascade.params import Handling, SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb

DESCRIBE_TIMEOUT_S = 30.0


class Client(Connection):
    """Talks to the server at ``address``; ``application`` names the Serve application if there are several.

    ``api_key`` is for servers that ask for one, ``timeout_s`` the deadline of each request. An address that begins with
    ``grpcs://`` is one of TLS; ``authority`` is then a file of certificates (PEM) to trust instead of the public ones, or of
    those that ``GRPC_DEFAULT_SSL_ROOTS_FILE_PATH`` names. Arguments that cannot be used raise `ConfigError`; what a server
    refuses, or cannot finish, raises the other errors of `cascade.errors`.
    """

    _channels: ClassVar[Any] = grpc

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
    ) -> Completion:
        """The whole text behind ``prompt``, a string or token ids."""
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
        """The assistant's whole next turn behind ``messages``, which are as OpenAI's clients have them.

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
        with errors():
            return read_server_info(self._begin("Describe", pb.DescribeRequest(), DESCRIBE_TIMEOUT_S))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _whole(self, exchange: Exchange[Whole, Any]) -> Whole:
        with errors():
            return exchange.read(self._begin(exchange.unary, exchange.encode()))

    def _pieces(self, exchange: Exchange[Any, Piece]) -> Iterator[Piece]:
        builder = exchange.builder()
        with errors():
            call = self._begin(exchange.streaming, exchange.encode())
            try:
                for response in call:
                    yield builder.take(response)
                builder.check()
            finally:
                call.cancel()


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
        """The whole text behind ``prompt``, a string or token ids."""
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
        """The assistant's whole next turn behind ``messages``, which are as OpenAI's clients have them.

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
        with errors():
            return read_server_info(await self._begin("Describe", pb.DescribeRequest(), DESCRIBE_TIMEOUT_S))

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _whole(self, exchange: Exchange[Whole, Any]) -> Whole:
        with errors():
            return exchange.read(await self._begin(exchange.unary, exchange.encode()))

    async def _pieces(self, exchange: Exchange[Any, Piece]) -> AsyncIterator[Piece]:
        builder = exchange.builder()
        with errors():
            call = self._begin(exchange.streaming, exchange.encode())
            try:
                async for response in call:
                    yield builder.take(response)
                builder.check()
            finally:
                call.cancel()

"""Clients of a served cascade. They need neither torch nor Ray; answers are those of the library.

>>> with Client("127.0.0.1:9000") as client:
...     print(client.generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0)).text)
"""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import grpc

from cascade.answer import Chunk, Completion
from cascade.client.chat import ChatOptions, Said, Turn, TurnPiece, TurnPieces, encode_chat, turn_of
from cascade.client.received import Pieces, ServerInfo, completion_of, server_info
from cascade.client.wire import encode_sampling, encode_speculation
from cascade.errors import (
    Aborted,
    CascadeError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from cascade.params import Handling, SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc

Prompt: TypeAlias = str | Sequence[int]
SECURE = "grpcs://"  # before the address of a server that speaks TLS
RETRY_AFTER = "retry-after"  # gRPC trailing metadata and HTTP header, seconds
UNREACHED = ("failed to connect", "errors resolving", "DNS resolution failed")  # as gRPC begins
OPTIONS = [("grpc.max_receive_message_length", -1)]  # log-probabilities of a long text are more than gRPC's 4 MiB

ERRORS: dict[grpc.StatusCode, type[CascadeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: ModelError,
}


class Client:
    """Talks to the server at ``address``; ``application`` names the Serve application if there are several.

    ``api_key`` is for servers that ask for one, ``timeout_s`` the deadline of each request. An address that begins with
    ``grpcs://`` is one of TLS; ``authority`` is then a file of certificates (PEM) to trust instead of the public ones, or of
    those that ``GRPC_DEFAULT_SSL_ROOTS_FILE_PATH`` names. Errors of the server are those of `cascade.errors`.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        application: str | None = None,
        timeout_s: float | None = None,
        authority: str | None = None,
    ) -> None:
        self._metadata = _metadata(application, api_key)
        target, credentials = _target(address, authority)
        self._channel = (
            grpc.secure_channel(target, credentials, OPTIONS) if credentials else grpc.insecure_channel(target, OPTIONS)
        )
        self._stub = serving_pb2_grpc.CascadeStub(self._channel)
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
    ) -> Completion:
        """The whole text behind ``prompt``, a string or token ids."""
        with errors():
            request = encode_request(prompt, params, speculation, handling)
            response = self._stub.Complete(request, timeout=self._timeout_s, metadata=self._metadata)
            return completion_of(response.text, response.tokens, response.finish, response.prompt)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
    ) -> Iterator[Chunk]:
        """The text piece by piece; closing the iterator ends the request on the server."""
        pieces = Pieces()
        with errors():
            request = encode_request(prompt, params, speculation, handling)
            call = self._stub.Generate(request, timeout=self._timeout_s, metadata=self._metadata)
            try:
                for response in call:
                    yield pieces.take(response)
                pieces.check()
            finally:
                call.cancel()

    def chat(
        self,
        messages: Said,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> Turn:
        """The assistant's whole next turn behind ``messages``, which are as OpenAI's clients have them.

        Without ``params`` it may be as long as the context has room for.
        """
        with errors():
            request = encode_chat(messages, params, speculation, handling, options)
            return turn_of(self._stub.CompleteChat(request, timeout=self._timeout_s, metadata=self._metadata))

    def stream_chat(
        self,
        messages: Said,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[TurnPiece]:
        """The assistant's next turn piece by piece; closing the iterator ends the request on the server."""
        pieces = TurnPieces()
        with errors():
            request = encode_chat(messages, params, speculation, handling, options)
            call = self._stub.Chat(request, timeout=self._timeout_s, metadata=self._metadata)
            try:
                for response in call:
                    yield pieces.take(response)
                pieces.check()
            finally:
                call.cancel()

    def describe(self) -> ServerInfo:
        """What is served."""
        with errors():
            return server_info(self._stub.Describe(pb.DescribeRequest(), timeout=30, metadata=self._metadata))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """`Client` for an event loop."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        application: str | None = None,
        timeout_s: float | None = None,
        authority: str | None = None,
    ) -> None:
        self._metadata = _metadata(application, api_key)
        target, credentials = _target(address, authority)
        self._channel = (
            grpc.aio.secure_channel(target, credentials, OPTIONS) if credentials else grpc.aio.insecure_channel(target, OPTIONS)
        )
        self._stub = serving_pb2_grpc.CascadeStub(self._channel)
        self._timeout_s = timeout_s

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
    ) -> Completion:
        """The whole text behind ``prompt``, a string or token ids."""
        with errors():
            request = encode_request(prompt, params, speculation, handling)
            response = await self._stub.Complete(request, timeout=self._timeout_s, metadata=self._metadata)
            return completion_of(response.text, response.tokens, response.finish, response.prompt)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
    ) -> AsyncIterator[Chunk]:
        """The text piece by piece; closing the iterator ends the request on the server."""
        pieces = Pieces()
        with errors():
            request = encode_request(prompt, params, speculation, handling)
            call = self._stub.Generate(request, timeout=self._timeout_s, metadata=self._metadata)
            try:
                async for response in call:
                    yield pieces.take(response)
                pieces.check()
            finally:
                call.cancel()

    async def chat(
        self,
        messages: Said,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> Turn:
        """The assistant's whole next turn behind ``messages``, which are as OpenAI's clients have them.

        Without ``params`` it may be as long as the context has room for.
        """
        with errors():
            request = encode_chat(messages, params, speculation, handling, options)
            return turn_of(await self._stub.CompleteChat(request, timeout=self._timeout_s, metadata=self._metadata))

    async def stream_chat(
        self,
        messages: Said,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[TurnPiece]:
        """The assistant's next turn piece by piece; closing the iterator ends the request on the server."""
        pieces = TurnPieces()
        with errors():
            request = encode_chat(messages, params, speculation, handling, options)
            call = self._stub.Chat(request, timeout=self._timeout_s, metadata=self._metadata)
            try:
                async for response in call:
                    yield pieces.take(response)
                pieces.check()
            finally:
                call.cancel()

    async def describe(self) -> ServerInfo:
        """What is served."""
        with errors():
            return server_info(await self._stub.Describe(pb.DescribeRequest(), timeout=30, metadata=self._metadata))

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Raise the library's errors instead of gRPC's."""
    try:
        yield
    except grpc.RpcError as error:
        code = error.code()
        if code is grpc.StatusCode.CANCELLED:
            raise
        kind, sentence = ERRORS.get(code, CascadeError), error.details() or str(code)
        if kind is Overloaded:
            raise Overloaded(sentence, _retry_after_s(error)) from None
        if sentence.startswith(UNREACHED):
            sentence = f"No server answers at the client's address ({sentence}): start one, or mend the address"
        raise kind(sentence) from None


def _retry_after_s(error: grpc.RpcError) -> float:
    """When the server says that another try may be worth it; a second if it does not say."""
    pairs: Any = error.trailing_metadata() or ()
    try:
        return float(dict(pairs).get(RETRY_AFTER, 1))
    except ValueError:
        return 1.0


def encode_request(
    prompt: Prompt, params: SamplingParams | None, speculation: Speculation | None, handling: Handling | None = None
) -> pb.GenerateRequest:
    """The request on the wire; raises `InvalidRequest` for what the protocol cannot say."""
    params, speculation, handling = params or SamplingParams(), speculation or Speculation(), handling or Handling()
    try:
        if prompt is None or isinstance(prompt, bytes):  # protobuf would take them for token ids
            raise TypeError(f"a prompt is a string or token ids, not {type(prompt).__name__}")
        return pb.GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else pb.TokenIds(ids=prompt),
            sampling=encode_sampling(params),
            speculation=encode_speculation(speculation),
            priority=handling.priority,
            cache_salt=handling.cache_salt,
            watch=handling.watch,
        )
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidRequest(f"The request cannot be sent: {error}") from None


def _target(address: str, authority: str | None) -> tuple[str, grpc.ChannelCredentials | None]:
    """What to connect to, and whom to trust there if it speaks TLS; raises `ConfigError`."""
    if not address.startswith(SECURE):
        if authority is not None:
            raise ConfigError(f"authority is given and address is {address!r}: begin it with {SECURE} for TLS")
        if address.startswith(("http://", "https://", "grpc://")):
            raise ConfigError(f"address is {address!r}: give HOST:PORT of the server's gRPC door, or {SECURE}HOST:PORT for TLS")
        return address, None
    try:
        roots = None if authority is None else Path(authority).read_bytes()
    except OSError as error:
        raise ConfigError(f"authority is {authority!r}, which cannot be read: {error.strerror or error}") from None
    return address.removeprefix(SECURE), grpc.ssl_channel_credentials(roots)


def _metadata(application: str | None, api_key: str | None) -> tuple[tuple[str, str], ...]:
    for name, value in (("api_key", api_key), ("application", application)):
        if value and not (value.isascii() and value.isprintable()):
            raise ConfigError(f"{name} has characters that are not printable ASCII, which no call can carry: mend it")
    keyed = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    return (("application", application), *keyed) if application else keyed

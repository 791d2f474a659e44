"""Clients of a served cascade, with the interface of the library. They need neither PyTorch nor Ray.

>>> with Client("127.0.0.1:9000") as client:
...     print(client.generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0)).text)
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar, Unpack

import grpc

from cascade.answer import Chunk, Completion
from cascade.client.chat import ChatExchange, ChatOptions, Messages, Turn, TurnPiece, encode_chat
from cascade.client.connection import CLOSED, Connection
from cascade.client.exchange import Exchange, Params, Piece, Prompt, TextExchange, encode_request
from cascade.client.wire import decode_sampling, values
from cascade.errors import Unavailable
from cascade.params import Handling, SamplingParams, Speculation
from cascade.planner.chains import Worth
from cascade.v1 import serving_pb2 as pb


@dataclass(frozen=True, slots=True)
class TierInfo:
    """One tier of a server; ``sessions`` counts those of the replica that answered."""

    name: str
    model: str
    replicas: int
    sessions: int
    context_len: int
    vocab_size: int
    parameters: int
    device: str
    pass_cost: tuple[tuple[int, float], ...] = ()  # tokens and seconds, the points of `cascade.planner.cost.Profile`
    context_s: float = 0.0  # seconds that each position held by the sessions of a pass adds to the pass
    worth: tuple[Worth, ...] = ()  # the gain from tiers below, as measured by the replica that answered
    dtype: str = ""  # dtype of the weights
    engine: str = ""  # engine that runs its passes: "cascade" or "vllm"
    same_bits: bool | None = None  # whether a text's logits have the same bits in every pass; None if unknown


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """Limits of the requests of one API key; ``None`` means no limit."""

    name: str = ""  # the key's name; empty if unknown
    min_priority: int | None = None  # lowest allowed priority; lower is served sooner
    weight: float = 1.0  # share of the tokens, relative to other keys, while requests wait
    max_running: int | None = None  # answers at the same time
    tokens_per_minute: int | None = None  # tokens of prompts and answers together
    train: bool = True  # drafters may learn from its answers, where the server lets them


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Description of a server; ``tiers`` are listed bottom to top."""

    tiers: tuple[TierInfo, ...]
    max_model_len: int  # longest prompt and output together, tokens
    window: int  # tokens that a tier may run ahead by default
    version: str  # cascade's version
    drafters: tuple[str, ...] = ()  # drafters inside tiers; their levels come before those of the tiers
    branches: int = 0  # branches that a tier may offer and prepare by default
    key: KeyInfo = KeyInfo()  # limits of the caller's key
    defaults: SamplingParams = field(default_factory=SamplingParams)  # sampling parameters of requests that give none


class Description(Exchange[ServerInfo, ServerInfo]):
    """A call of `Describe`."""

    rpc = "Describe"
    timeout_s = 30.0
    probing = True

    def add(self, response: pb.DescribeResponse) -> ServerInfo:
        tiers = []
        for tier in response.tiers:
            cost = tuple((point.tokens, point.seconds) for point in tier.pass_cost)
            worth = tuple(Worth(**values(each)) for each in tier.worth)
            tiers.append(TierInfo(**values(tier) | {"pass_cost": cost, "worth": worth}))
        decoded = {
            "tiers": tuple(tiers),
            "key": KeyInfo(**values(response.key)),
            "defaults": decode_sampling(response.defaults),
        }
        self.whole = ServerInfo(**values(response) | decoded)
        return self.whole


T = TypeVar("T")
Later: TypeAlias = Coroutine[Any, Any, T]
# results of calls: values for `Client`, awaitables and asynchronous iterators of them for `AsyncClient`
Text = TypeVar("Text")
Texts = TypeVar("Texts")
Reply = TypeVar("Reply")
ReplyPieces = TypeVar("ReplyPieces")
Info = TypeVar("Info")


class Calls(Connection, ABC, Generic[Text, Texts, Reply, ReplyPieces, Info]):
    """The methods of both clients."""

    def generate(
        self, prompt: Prompt, params: Params = None, speculation: Speculation | None = None, handling: Handling | None = None
    ) -> Text:
        """The whole text after ``prompt``, a string or token ids."""
        return self._whole(TextExchange(encode_request(prompt, params, speculation, handling)))

    def stream(
        self, prompt: Prompt, params: Params = None, speculation: Speculation | None = None, handling: Handling | None = None
    ) -> Texts:
        """The text piece by piece; closing the iterator ends the request on the server."""
        return self._pieces(TextExchange(encode_request(prompt, params, speculation, handling)))

    def chat(
        self,
        messages: Messages,
        params: Params = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> Reply:
        """The assistant's whole next turn after ``messages``, in OpenAI's form.

        By default it may fill the context.
        """
        return self._whole(ChatExchange(encode_chat(messages, params, speculation, handling, options)))

    def stream_chat(
        self,
        messages: Messages,
        params: Params = None,
        speculation: Speculation | None = None,
        handling: Handling | None = None,
        **options: Unpack[ChatOptions],
    ) -> ReplyPieces:
        """The assistant's next turn piece by piece; closing the iterator ends the request on the server."""
        return self._pieces(ChatExchange(encode_chat(messages, params, speculation, handling, options)))

    def describe(self) -> Info:
        """Describe the server. Fails at once if no server has ever answered this client."""
        return self._whole(Description(pb.DescribeRequest()))

    @abstractmethod
    def _whole(self, exchange: Exchange[Any, Any]) -> Any: ...

    @abstractmethod
    def _pieces(self, exchange: Exchange[Any, Any]) -> Any: ...


class Client(Calls[Completion, Iterator[Chunk], Turn, Iterator[TurnPiece], ServerInfo]):
    """Calls the server at ``address``; with several addresses, each in turn.

    - ``api_key``: by default the one in the environment variable ``CASCADE_API_KEY``; "" sends none.
    - ``application``: name of the Serve application, if there are several.
    - ``timeout``: deadline of each request, seconds.
    - ``authority``: PEM file of certificates to trust at an address ``grpcs://HOST:PORT``; by default public authorities, or
      those in the file ``GRPC_DEFAULT_SSL_ROOTS_FILE_PATH``.
    - ``patience_s``: if a server is gone, its requests are sent again, also to other servers, and streams continue where they
      broke off, until that has failed for this many seconds.

    Wrong arguments raise `ConfigError`. Requests that a server refuses or cannot finish raise the other errors of
    `cascade.errors`.
    """

    _channels: ClassVar[Any] = grpc

    def close(self) -> None:
        self._closed = True
        for server in self._servers:
            server.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _whole(self, exchange: Exchange[T, Any]) -> T | None:
        for _ in self._pieces(exchange):
            pass
        return exchange.whole

    def _pieces(self, exchange: Exchange[Any, Piece]) -> Iterator[Piece]:
        attempts = self._attempts(exchange)
        while True:
            server = self._next_server()
            call = self._call(server, exchange, attempts)
            try:
                for response in call:
                    self._received(server, attempts)
                    yield exchange.add(response)
                exchange.check()
                return
            except (grpc.RpcError, Unavailable) as error:
                if exchange.whole is not None:
                    return
                pause_s = self._failed(error, server, attempts, again=exchange.resume())
            finally:
                call.cancel()
            time.sleep(pause_s)


class AsyncClient(Calls[Later[Completion], AsyncIterator[Chunk], Later[Turn], AsyncIterator[TurnPiece], Later[ServerInfo]]):
    """`Client` for an event loop."""

    _channels: ClassVar[Any] = grpc.aio

    async def close(self) -> None:
        self._closed = True
        for server in self._servers:
            await server.channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _whole(self, exchange: Exchange[T, Any]) -> T | None:
        async for _ in self._pieces(exchange):
            pass
        return exchange.whole

    async def _pieces(self, exchange: Exchange[Any, Piece]) -> AsyncIterator[Piece]:
        attempts = self._attempts(exchange)
        while True:
            server = self._next_server()
            call = self._call(server, exchange, attempts)
            try:
                async for response in call:
                    self._received(server, attempts)
                    yield exchange.add(response)
                exchange.check()
                return
            except (grpc.RpcError, Unavailable) as error:
                if exchange.whole is not None:
                    return
                pause_s = self._failed(error, server, attempts, again=exchange.resume())
            except asyncio.CancelledError:  # also of calls whose client was closed
                task = asyncio.current_task()
                if self._closed and task is not None and not task.cancelling():
                    raise Unavailable(CLOSED) from None
                raise
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)

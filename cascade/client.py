"""Clients of a served cascade. They need neither torch nor Ray; answers are those of the library.

>>> with Client("127.0.0.1:9000") as client:
...     print(client.generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0)).text)
"""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, get_args

import grpc

from cascade.answer import Chunk, Completion, FinishReason, PromptToken, Stats, Undrafted
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
from cascade.handling import Handling
from cascade.messages import Edge, Logprobs, origin
from cascade.params import SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc
from cascade.wire import decode_lane, encode_sampling

Prompt: TypeAlias = str | Sequence[int]
SECURE = "grpcs://"  # before the address of a server that speaks TLS
REASONS: tuple[Undrafted, ...] = get_args(Undrafted)

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


@dataclass(frozen=True, slots=True)
class TierInfo:
    """One tier of a server; ``sessions`` are those of the replica that answered."""

    name: str
    model: str
    replicas: int
    sessions: int
    context_len: int
    vocab_size: int
    parameters: int
    device: str
    pass_cost: tuple[tuple[int, float], ...] = ()  # tokens, seconds; the points of a `cascade.scenario.PassCost`
    context_s: float = 0.0  # added to a pass for each position that its sessions hold


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server serves; tiers bottom to top."""

    tiers: tuple[TierInfo, ...]
    max_model_len: int
    window: int
    version: str


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
        target, credentials = _target(address, authority)
        self._channel = grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
        self._stub = serving_pb2_grpc.CascadeStub(self._channel)
        self._metadata = _metadata(application, api_key)
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
            return _completion(response.text, response.tokens, response.finish, response.prompt)

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

    def describe(self) -> ServerInfo:
        """What is served."""
        with errors():
            return _server_info(self._stub.Describe(pb.DescribeRequest(), timeout=30, metadata=self._metadata))

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
        target, credentials = _target(address, authority)
        self._channel = grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
        self._stub = serving_pb2_grpc.CascadeStub(self._channel)
        self._metadata = _metadata(application, api_key)
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
            return _completion(response.text, response.tokens, response.finish, response.prompt)

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

    async def describe(self) -> ServerInfo:
        """What is served."""
        with errors():
            return _server_info(await self._stub.Describe(pb.DescribeRequest(), timeout=30, metadata=self._metadata))

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Pieces:
    """Turns responses of a stream into chunks, the last of which brings the completion."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._tokens: list[pb.Token] = []
        self._prompt: list[pb.PromptToken] = []
        self._complete = False

    def check(self) -> None:
        """Raise `Unavailable` if the stream has ended before its text."""
        if not self._complete:
            raise Unavailable("The server ended the stream before the text was complete")

    def take(self, response: pb.GenerateResponse) -> Chunk:
        """One more response."""
        self._text.append(response.text)
        self._tokens += response.tokens
        self._prompt += response.prompt
        completion = None
        if response.HasField("finish"):
            completion = _completion("".join(self._text), self._tokens, response.finish, self._prompt)
            self._complete = True
        ids = tuple(token.id for token in response.tokens)
        ends = tuple(token.end for token in response.tokens)
        origins, logprobs = _origins(response.tokens), _logprobs(response.tokens)
        prompt, lanes = _prompt(response.prompt), tuple(map(decode_lane, response.lanes))
        return Chunk(response.text, ids, ends, origins, completion, logprobs=logprobs, prompt=prompt, lanes=lanes)


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Raise the library's errors instead of gRPC's."""
    try:
        yield
    except grpc.RpcError as error:
        code = error.code()
        if code is grpc.StatusCode.CANCELLED:
            raise
        raise ERRORS.get(code, CascadeError)(error.details() or str(code)) from None


def encode_request(
    prompt: Prompt, params: SamplingParams | None, speculation: Speculation | None, handling: Handling | None = None
) -> pb.GenerateRequest:
    """The request on the wire; raises `InvalidRequest` for what the protocol cannot say."""
    params, speculation, handling = params or SamplingParams(), speculation or Speculation(), handling or Handling()
    mode = "off" if speculation.tiers == () else speculation.mode
    try:
        if prompt is None or isinstance(prompt, bytes):  # protobuf would take them for token ids
            raise TypeError(f"a prompt is a string or token ids, not {type(prompt).__name__}")
        return pb.GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else pb.TokenIds(ids=prompt),
            sampling=encode_sampling(params),
            speculation=pb.Speculation(
                mode=mode, tiers=speculation.tiers or (), window=speculation.window, schedule=speculation.schedule
            ),
            priority=handling.priority,
            cache_salt=handling.cache_salt,
            watch=handling.watch,
        )
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidRequest(f"The request cannot be sent: {error}") from None


def _completion(text: str, tokens: Sequence[pb.Token], finish: pb.Finish, prompt: Sequence[pb.PromptToken]) -> Completion:
    edges = tuple(map(_edge, finish.edges))
    reason: FinishReason = "length" if finish.reason == "length" else "stop"
    first_token_s = finish.first_token_s if finish.HasField("first_token_s") else None
    why = next((why for why in REASONS if why == finish.undrafted), None)  # a newer server may know more
    stats = Stats(finish.prompt_tokens, finish.completion_tokens, edges, first_token_s, why)
    ids, origins, logprobs = tuple(token.id for token in tokens), _origins(tokens), _logprobs(tokens)
    return Completion(text, ids, reason, finish.seed, stats, origins, logprobs=logprobs, prompt=_prompt(prompt))


def _edge(e: pb.Edge) -> Edge:
    positions = tuple(e.accepted_by_position)
    return Edge(e.drafter, e.verifier, e.passes, e.proposed, e.accepted, e.emitted, e.waited_s, positions)


def _origins(tokens: Sequence[pb.Token]) -> bytes:
    return bytes(origin(token.level, token.corrected) for token in tokens)


def _prompt(tokens: Sequence[pb.PromptToken]) -> tuple[PromptToken, ...]:
    return tuple(
        PromptToken(one.id, one.logprob if one.HasField("logprob") else None, tuple((top.id, top.logprob) for top in one.top))
        for one in tokens
    )


def _logprobs(tokens: Sequence[pb.Token]) -> tuple[Logprobs, ...]:
    """One a token if the request asked for them."""
    said = [token for token in tokens if token.HasField("logprob")]
    return tuple(Logprobs(token.logprob, tuple((top.id, top.logprob) for top in token.top)) for token in said)


def _server_info(response: pb.DescribeResponse) -> ServerInfo:
    tiers = tuple(
        TierInfo(
            t.name,
            t.model,
            t.replicas,
            t.sessions,
            t.context_len,
            t.vocab_size,
            t.parameters,
            t.device,
            tuple((point.tokens, point.seconds) for point in t.pass_cost),
            t.context_s,
        )
        for t in response.tiers
    )
    return ServerInfo(tiers, response.max_model_len, response.window, response.version)


def _target(address: str, authority: str | None) -> tuple[str, grpc.ChannelCredentials | None]:
    """What to connect to, and whom to trust there if it speaks TLS; raises `ConfigError`."""
    if not address.startswith(SECURE):
        if authority is not None:
            raise ConfigError(f"authority is given and address is {address!r}: begin it with {SECURE} for TLS")
        return address, None
    try:
        roots = None if authority is None else Path(authority).read_bytes()
    except OSError as error:
        raise ConfigError(f"authority is {authority!r}, which cannot be read: {error.strerror or error}") from None
    return address.removeprefix(SECURE), grpc.ssl_channel_credentials(roots)


def _metadata(application: str | None, api_key: str | None) -> tuple[tuple[str, str], ...]:
    keyed = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    return (("application", application), *keyed) if application else keyed

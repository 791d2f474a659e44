"""One request and the reading of its answer. Does no I/O, so that `Client` and `AsyncClient` share it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from cascade.answer import Chunk, Completion, PromptToken, Stats
from cascade.client.wire import decode_edge, encode_sampling, encode_speculation
from cascade.errors import InvalidRequest, Unavailable
from cascade.messages import Logprobs, origin
from cascade.params import Handling, SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb

Prompt: TypeAlias = str | Sequence[int]
Whole = TypeVar("Whole")
Piece = TypeVar("Piece")


class Exchange(ABC, Generic[Whole, Piece]):
    """A ``request``, which the RPC ``unary`` answers at once and the RPC ``streaming`` in pieces."""

    unary: ClassVar[str]
    streaming: ClassVar[str]

    def __init__(self, request: Any) -> None:
        self.request = request
        self.complete = False  # the last piece has come
        self._text: list[str] = []
        self._tokens: list[pb.Token] = []
        self._prompt: list[pb.PromptToken] = []

    @abstractmethod
    def read(self, response: Any) -> Whole:
        """The answer that a response of ``unary`` brings."""

    @abstractmethod
    def add(self, response: Any) -> Piece:
        """What the next response of ``streaming`` brings."""

    def check(self) -> None:
        """Raise `Unavailable` if the stream has ended before its text."""
        if not self.complete:
            raise Unavailable("The server ended the stream before the text was complete")

    def resume(self) -> bool:
        """Let the request go on after the tokens that came; False if the server did not say by which seed."""
        if self._tokens:
            self.request.resume.token_ids[:] = [token.id for token in self._tokens]
        return not self._tokens or self.request.sampling.HasField("seed")

    def _chunk(self, response: pb.GenerateResponse | pb.ChatResponse, text: str) -> Chunk:
        """The next response as a piece of the model's ``text``; the last one brings the completion."""
        seed = optional(response, "seed")
        if seed is not None:
            self.request.sampling.seed = seed
        self._text.append(text)
        self._tokens += response.tokens
        self._prompt += response.prompt
        self.complete = response.HasField("finish")
        completion = None
        if self.complete:
            completion = read_completion("".join(self._text), self._tokens, response.finish, self._prompt)
        return Chunk(
            text,
            token_ids=tuple(token.id for token in response.tokens),
            ends=tuple(token.end for token in response.tokens),
            origins=_origins(response.tokens),
            completion=completion,
            logprobs=_logprobs(response.tokens),
            prompt=_prompt_tokens(response.prompt),
            seed=seed,
        )


class TextExchange(Exchange[Completion, Chunk]):
    """A prompt to go on with; its request is that of `encode_request`."""

    unary, streaming = "Complete", "Generate"

    def read(self, response: pb.CompleteResponse) -> Completion:
        return read_completion(response.text, response.tokens, response.finish, response.prompt)

    def add(self, response: pb.GenerateResponse) -> Chunk:
        return self._chunk(response, response.text)


def encode_request(
    prompt: Prompt, params: SamplingParams | None, speculation: Speculation | None, handling: Handling | None = None
) -> pb.GenerateRequest:
    """The request on the wire; raises `InvalidRequest` for what the protocol cannot carry."""
    try:
        if prompt is None or isinstance(prompt, bytes):  # protobuf would take them for token ids
            raise TypeError(f"a prompt is a string or token ids, not {type(prompt).__name__}")
        return pb.GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else pb.TokenIds(ids=prompt),
            **encode_options(params, speculation, handling),
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"The request cannot be sent: {error}") from None


def encode_options(params: SamplingParams | None, speculation: Speculation | None, handling: Handling | None) -> dict[str, Any]:
    """Fields that requests of all kinds have; raises `ValueError` for what the protocol cannot carry."""
    return {
        "sampling": None if params is None else encode_sampling(params),
        "speculation": encode_speculation(speculation or Speculation()),
        **asdict(handling or Handling()),
    }


def read_completion(text: str, tokens: Sequence[pb.Token], finish: pb.Finish, prompt: Sequence[pb.PromptToken]) -> Completion:
    stats = Stats(
        finish.prompt_tokens,
        finish.completion_tokens,
        edges=tuple(map(decode_edge, finish.edges)),
        first_token_s=optional(finish, "first_token_s"),
        undrafted=optional(finish, "undrafted"),
        cached_tokens=finish.cached_tokens,
    )
    return Completion(
        text,
        token_ids=tuple(token.id for token in tokens),
        finish_reason="length" if finish.reason == "length" else "stop",
        seed=finish.seed,
        stats=stats,
        origins=_origins(tokens),
        logprobs=_logprobs(tokens),
        prompt=_prompt_tokens(prompt),
        stop_string=optional(finish, "stop_string"),
    )


def optional(message: Any, name: str) -> Any:
    """An optional field; ``None`` if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def _origins(tokens: Sequence[pb.Token]) -> bytes:
    return bytes(origin(token.level, optional(token, "replaced")) for token in tokens)


def _prompt_tokens(tokens: Sequence[pb.PromptToken]) -> tuple[PromptToken, ...]:
    return tuple(PromptToken(token.id, optional(token, "logprob"), _likeliest(token.top)) for token in tokens)


def _logprobs(tokens: Sequence[pb.Token]) -> tuple[Logprobs, ...]:
    """One for each token if the request asked for them, else none."""
    return tuple(Logprobs(token.logprob, _likeliest(token.top)) for token in tokens if token.HasField("logprob"))


def _likeliest(tokens: Sequence[pb.TopToken]) -> tuple[tuple[int, float], ...]:
    return tuple((token.id, token.logprob) for token in tokens)

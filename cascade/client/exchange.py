"""A request and its answer, without I/O, for `Client` and `AsyncClient` alike."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from cascade.answer import Chunk, Completion, PromptToken, Stats, joined
from cascade.client.wire import decode_edge, encode_sampling, encode_speculation, message
from cascade.errors import InvalidRequest, Unavailable
from cascade.messages import Logprobs, origin
from cascade.params import Handling, SamplingParams, Speculation, checked
from cascade.v1 import serving_pb2 as pb

Prompt: TypeAlias = str | Sequence[int]
Params: TypeAlias = SamplingParams | None
Whole = TypeVar("Whole")
Piece = TypeVar("Piece")


class Exchange(ABC, Generic[Whole, Piece]):
    """A ``request`` that the method ``rpc`` answers in pieces."""

    rpc: ClassVar[str]
    timeout_s: ClassVar[float | None] = None  # deadline; by default the client's
    probing: ClassVar[bool] = False  # fails at once if no server has ever answered the client

    def __init__(self, request: Any) -> None:
        self.request = request
        self.whole: Whole | None = None  # the answer, after its last piece
        self._chunks: list[Chunk] = []

    @abstractmethod
    def add(self, response: Any) -> Piece:
        """The piece in the next response."""

    def check(self) -> None:
        """Raise `Unavailable` if the stream has ended before the text was complete."""
        if self.whole is None:
            raise Unavailable("The server ended the stream before the text was complete")

    def resume(self) -> bool:
        """Let the request continue after the tokens that came; False if the server has not sent the seed."""
        if self._chunks:
            self.request.resume.token_ids[:] = [token for chunk in self._chunks for token in chunk.token_ids]
        return not self._chunks or self.request.sampling.HasField("seed")

    def _chunk(self, response: pb.GenerateResponse | pb.ChatResponse, text: str) -> Chunk:
        """The next response as a piece of the model's ``text``; the last one brings the completion."""
        tokens = response.tokens
        chunk = Chunk(
            text,
            token_ids=tuple(token.id for token in tokens),
            ends=tuple(token.end for token in tokens),
            origins=bytes(origin(token.level, optional(token, "replaced")) for token in tokens),
            logprobs=tuple(Logprobs(token.logprob, _likeliest(token.top)) for token in tokens if token.HasField("logprob")),
            prompt=tuple(PromptToken(token.id, optional(token, "logprob"), _likeliest(token.top)) for token in response.prompt),
            seed=optional(response, "seed"),
        )
        if chunk.seed is not None:
            self.request.sampling.seed = chunk.seed
        self._chunks.append(chunk)
        return replace(chunk, completion=self._completion(response.finish)) if response.HasField("finish") else chunk

    def _completion(self, finish: pb.Finish) -> Completion:
        answer = joined(self._chunks)
        stats = Stats(
            finish.prompt_tokens,
            finish.completion_tokens,
            edges=tuple(map(decode_edge, finish.edges)),
            first_token_s=optional(finish, "first_token_s"),
            undrafted=optional(finish, "undrafted"),
            cached_tokens=finish.cached_tokens,
        )
        return Completion(
            answer.text,
            answer.token_ids,
            finish_reason="length" if finish.reason == "length" else "stop",
            seed=finish.seed,
            stats=stats,
            origins=answer.origins,
            logprobs=answer.logprobs,
            prompt=answer.prompt,
            stop_string=optional(finish, "stop_string"),
        )


class TextExchange(Exchange[Completion, Chunk]):
    """A prompt and its answer; the request is that of `encode_request`."""

    rpc = "Generate"

    def add(self, response: pb.GenerateResponse) -> Chunk:
        chunk = self._chunk(response, response.text)
        self.whole = chunk.completion
        return chunk


def encode_request(
    prompt: Prompt, params: SamplingParams | None, speculation: Speculation | None, handling: Handling | None = None
) -> pb.GenerateRequest:
    """The request as a message; raises `InvalidRequest` for values that the protocol cannot carry."""
    try:
        if prompt is None or isinstance(prompt, bytes):  # protobuf would read them as token ids
            raise TypeError(f"a prompt is a string or token ids, not {type(prompt).__name__}")
        return message(
            pb.GenerateRequest,
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else {"ids": prompt},
            **encode_options(params, speculation, handling),
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"The request cannot be sent: {error}") from None


def encode_options(params: SamplingParams | None, speculation: Speculation | None, handling: Handling | None) -> dict[str, Any]:
    """Fields of all kinds of requests; raises `ValueError` for values that the protocol cannot carry."""
    return {
        "sampling": None if params is None else encode_sampling(checked("params", params, SamplingParams)),
        "speculation": encode_speculation(checked("speculation", speculation, Speculation)),
        **asdict(checked("handling", handling, Handling)),
    }


def optional(message: Any, name: str) -> Any:
    """An optional field; ``None`` if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def _likeliest(tokens: Sequence[pb.TopToken]) -> tuple[tuple[int, float], ...]:
    return tuple((token.id, token.logprob) for token in tokens)

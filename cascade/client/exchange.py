"""What a client asks and how it reads the answer. Does no I/O, so that `Client` and `AsyncClient` share it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from cascade.answer import Chunk, Completion
from cascade.client.chat import ChatOptions, Messages, Turn, TurnBuilder, TurnPiece, encode_chat, read_turn
from cascade.client.responses import Builder, CompletionBuilder, Piece, read_completion
from cascade.client.wire import encode_sampling, encode_speculation
from cascade.errors import InvalidRequest
from cascade.params import Handling, SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb

Prompt: TypeAlias = str | Sequence[int]
Whole = TypeVar("Whole")


@dataclass(frozen=True, slots=True)
class Exchange(Generic[Whole, Piece]):
    """One request, and how it is answered: whole by the RPC ``unary``, or in pieces by the RPC ``streaming``."""

    encode: Callable[[], Any]  # the request on the wire; raises `InvalidRequest`
    unary: str
    read: Callable[[Any], Whole]
    streaming: str
    builder: Callable[[], Builder[Piece]]


def text_exchange(
    prompt: Prompt, params: SamplingParams | None, speculation: Speculation | None, handling: Handling | None
) -> Exchange[Completion, Chunk]:
    """A prompt to go on with."""
    encode = partial(encode_request, prompt, params, speculation, handling)
    return Exchange(encode, "Complete", read_completion, "Generate", CompletionBuilder)


def chat_exchange(
    messages: Messages,
    params: SamplingParams | None,
    speculation: Speculation | None,
    handling: Handling | None,
    options: ChatOptions,
) -> Exchange[Turn, TurnPiece]:
    """A conversation to go on with."""
    encode = partial(encode_chat, messages, params, speculation, handling, options)
    return Exchange(encode, "CompleteChat", read_turn, "Chat", TurnBuilder)


def encode_request(
    prompt: Prompt, params: SamplingParams | None, speculation: Speculation | None, handling: Handling | None = None
) -> pb.GenerateRequest:
    """The request on the wire; raises `InvalidRequest` for what the protocol cannot say."""
    try:
        if prompt is None or isinstance(prompt, bytes):  # protobuf would take them for token ids
            raise TypeError(f"a prompt is a string or token ids, not {type(prompt).__name__}")
        return pb.GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else pb.TokenIds(ids=prompt),
            sampling=encode_sampling(params or SamplingParams()),
            speculation=encode_speculation(speculation or Speculation()),
            **asdict(handling or Handling()),
        )
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidRequest(f"The request cannot be sent: {error}") from None

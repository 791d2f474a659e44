"""Who answers: a server, or models in this process."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cascade.answer import Chunk
from cascade.cli.screen import console
from cascade.errors import InvalidRequest
from cascade.params import Handling, SamplingParams, Speculation

if TYPE_CHECKING:  # one needs PyTorch, the other gRPC, and both start slowly
    from cascade.client import Client
    from cascade.local import Cascade

Message: TypeAlias = Mapping[str, Any]  # as in OpenAI's API

DEFAULT_ADDRESS = "127.0.0.1:9000"


class Piece(NamedTuple):
    """A piece of the assistant's turn; the last one has the whole turn as a message for the next request."""

    chunk: Chunk
    message: Message | None = None


class Local:
    """Models in this process."""

    def __init__(self, cascade: "Cascade") -> None:
        from cascade.chat.template import ChatTemplate

        self._cascade = cascade
        self._template = ChatTemplate(cascade.tokenizer)
        self.names = cascade.names
        self.default_params = cascade.default_params
        self.stream = cascade.stream

    def has_template(self) -> bool:
        return self._cascade.tokenizer.chat_template is not None

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation; raises `InvalidRequest` if its template does not take it."""
        from cascade.llm import prompt_of

        return self._cascade.tokenizer.encode_part(prompt_of(self._template, messages))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams, speculation: Speculation, handling: Handling
    ) -> Iterator[Piece]:
        """The assistant's turn after ``messages``; raises `InvalidRequest`."""
        for chunk in self._cascade.stream(self.encode(messages), params, speculation, handling):
            whole = chunk.completion
            yield Piece(chunk, None if whole is None else {"role": "assistant", "content": whole.text})


class Served:
    """A server, asked over gRPC."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self.info = client.describe()
        self.default_params = self.info.defaults
        self.names = (*self.info.drafters, *(tier.name for tier in self.info.tiers))
        self.stream = client.stream

    def has_template(self) -> bool:
        """Asks for one token of a conversation, because servers do not say."""
        try:
            self._client.chat(user_turn("Hello"), SamplingParams(max_tokens=1), Speculation("off"))
        except InvalidRequest:
            return False
        return True

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams, speculation: Speculation, handling: Handling
    ) -> Iterator[Piece]:
        """The assistant's turn after ``messages``; raises `InvalidRequest`."""
        for piece in self._client.stream_chat(messages, params, speculation, handling):
            yield Piece(piece.chunk, piece.turn.message if piece.turn is not None else None)


def user_turn(text: str) -> Sequence[Message]:
    """A conversation that the user begins with ``text``."""
    return ({"role": "user", "content": text},)


@contextmanager
def connected(address: str | None, models: tuple[str, ...] = ()) -> Iterator[Local | Served]:
    """The server at ``address``, or what `loaded` loads."""
    if address:
        from cascade.client import Client

        with Client(address) as client:
            yield Served(client)
    else:
        with loaded(models) as cascade:
            yield Local(cascade)


def loaded(models: tuple[str, ...]) -> "Cascade":
    """``models``, bottom to top, or those that ship."""
    if not models:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the models that ship load in no time
    from cascade.local import Cascade

    with console.status("Loading models"):
        return Cascade.from_pretrained(models) if models else Cascade.demo()

"""Whom commands ask: a server, or models that run here."""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cascade.answer import Chunk
from cascade.cli.screen import console
from cascade.errors import InvalidRequest
from cascade.params import Handling, SamplingParams, Speculation

if TYPE_CHECKING:  # the one needs PyTorch, the other gRPC, and both start slowly
    from cascade.client import Client
    from cascade.local import Cascade

Message: TypeAlias = Mapping[str, Any]  # as in OpenAI's API
Messages: TypeAlias = Sequence[Message]  # oldest first

DEFAULT_ADDRESS = "127.0.0.1:9000"
HELLO: Messages = ({"role": "user", "content": "Hello"},)


class Said(NamedTuple):
    """A piece of the assistant's turn, and with the last piece the turn as a message of the next request."""

    chunk: Chunk
    message: Message | None = None


class Here:
    """A cascade of this process; its model's chat template writes prompts as a server does."""

    def __init__(self, cascade: "Cascade") -> None:
        from deployments.gateway.chat.template import ChatTemplate

        self._cascade = cascade
        self._template = ChatTemplate(cascade.tokenizer)
        self.names = cascade.names
        self.stream = cascade.stream

    def has_template(self) -> bool:
        """Whether it can hold a conversation."""
        return self._cascade.tokenizer.backend.chat_template is not None

    def encode(self, messages: Messages) -> list[int]:
        """Token ids of a conversation; raises `InvalidRequest` if its template does not take it."""
        return self._template.encode([dict(message) for message in messages])

    def stream_chat(
        self, messages: Messages, params: SamplingParams, speculation: Speculation, handling: Handling
    ) -> Generator[Said, None, None]:
        """The assistant's turn after ``messages``; raises `InvalidRequest`."""
        ids = self.encode(messages)
        for chunk in self._cascade.stream(ids, params, speculation, handling):
            yield Said(chunk, self._message(ids, chunk.completion.text) if chunk.completion is not None else None)

    def _message(self, ids: Sequence[int], text: str) -> Message:
        """What the assistant said, its thoughts apart if it has any."""
        from deployments.gateway.chat.thoughts import TAIL, ThoughtSplitter, prompted

        if not self._template.thinks:
            return {"role": "assistant", "content": text}
        within = prompted(self._cascade.tokenizer.backend.decode(ids[-TAIL:]))
        thoughts, words = ThoughtSplitter(bool(within)).take(text, True) if within is not None else ("", text)
        return {"role": "assistant", "content": words} | ({"reasoning_content": thoughts} if thoughts else {})


class Served:
    """A server, through its gRPC door."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self.info = client.describe()
        self.names = (*self.info.drafters, *(tier.name for tier in self.info.tiers))
        self.stream = client.stream

    def has_template(self) -> bool:
        """Whether it can hold a conversation: it is asked for a token of one, for servers do not tell."""
        try:
            self._client.chat(HELLO, SamplingParams(max_tokens=1), Speculation("off"))
        except InvalidRequest:
            return False
        return True

    def stream_chat(
        self, messages: Messages, params: SamplingParams, speculation: Speculation, handling: Handling
    ) -> Generator[Said, None, None]:
        """The assistant's turn after ``messages``; raises `InvalidRequest`."""
        for piece in self._client.stream_chat(messages, params, speculation, handling):
            yield Said(piece.chunk, piece.turn.message if piece.turn is not None else None)


Asked: TypeAlias = Here | Served


def asking(text: str) -> Messages:
    return ({"role": "user", "content": text},)


def stream_for(asked: Asked) -> Callable[[str, SamplingParams, Speculation, Handling], Iterator[Chunk]]:
    """How a prompt is sent: as a user's first turn to a model that can hold a conversation, else as it is."""
    if not asked.has_template():
        return asked.stream

    def stream(prompt: str, params: SamplingParams, speculation: Speculation, handling: Handling) -> Iterator[Chunk]:
        for said in asked.stream_chat(asking(prompt), params, speculation, handling):
            yield said.chunk

    return stream


@contextmanager
def connected(address: str | None, models: tuple[str, ...] = ()) -> Iterator[Asked]:
    """The server at ``address``, or what `loaded` loads."""
    if address:
        from cascade.client import Client

        with Client(address) as client:
            yield Served(client)
        return
    with loaded(models) as cascade:
        yield Here(cascade)


def loaded(models: tuple[str, ...]) -> "Cascade":
    """``models``, bottom to top, or those that ship."""
    if not models:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the models that ship load in no time
    from cascade.local import Cascade

    with console.status("Loading models"):
        return Cascade.from_pretrained(models) if models else Cascade.demo()

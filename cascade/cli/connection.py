"""Backends that answer the requests of a command: a server, or models in this process."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from cascade.answer import Chunk
from cascade.cli.screen import console
from cascade.params import Handling, SamplingParams, Speculation

if TYPE_CHECKING:  # one needs PyTorch, the other gRPC, and both start slowly
    from cascade.client import Client
    from cascade.local import Cascade

Message: TypeAlias = Mapping[str, Any]  # as in OpenAI's API

DEFAULT_ADDRESS = "127.0.0.1:9000"


class Piece(NamedTuple):
    """A piece of the assistant's turn; the last one has the whole turn, as a message for the next request."""

    chunk: Chunk
    message: Message | None = None


class Backend(NamedTuple):
    """A server, or models in this process."""

    names: tuple[str, ...]  # drafters and tiers, bottom to top
    default_params: SamplingParams
    # continue a text and a conversation, with parameters, speculation and handling; both raise `InvalidRequest`
    stream: Callable[[str, SamplingParams, Speculation, Handling], Iterator[Chunk]]
    stream_chat: Callable[[Sequence[Message], SamplingParams, Speculation, Handling], Iterator[Piece]]


def local(cascade: "Cascade") -> Backend:
    from cascade.chat.template import ChatTemplate
    from cascade.llm import prompt_of

    template = ChatTemplate(cascade.tokenizer)

    def stream_chat(
        messages: Sequence[Message], params: SamplingParams, speculation: Speculation, handling: Handling
    ) -> Iterator[Piece]:
        ids = cascade.tokenizer.encode_part(prompt_of(template, messages))
        for chunk in cascade.stream(ids, params, speculation, handling):
            whole = chunk.completion
            yield Piece(chunk, None if whole is None else {"role": "assistant", "content": whole.text})

    return Backend(cascade.names, cascade.default_params, cascade.stream, stream_chat)


def served(client: "Client") -> Backend:
    info = client.describe()

    def stream_chat(
        messages: Sequence[Message], params: SamplingParams, speculation: Speculation, handling: Handling
    ) -> Iterator[Piece]:
        for piece in client.stream_chat(messages, params, speculation, handling):
            yield Piece(piece.chunk, piece.turn.message if piece.turn is not None else None)

    names = (*info.drafters, *(tier.name for tier in info.tiers))
    return Backend(names, info.defaults, client.stream, stream_chat)


@contextmanager
def connected(address: str | None, models: tuple[str, ...] = ()) -> Iterator[Backend]:
    """The server at ``address``, or ``models`` in this process, bottom to top, by default those that ship.

    Raises `click.UsageError` if both are given.
    """
    if address and models:
        raise click.UsageError("--address names a server and models run here: give one of them")
    if address:
        from cascade.client import Client

        with Client(address) as client:
            yield served(client)
        return
    if not models:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the models that ship load at once
    from cascade.local import Cascade

    with console.status("Loading models"):
        cascade = Cascade.from_pretrained(models) if models else Cascade.demo()
    with cascade:
        yield local(cascade)

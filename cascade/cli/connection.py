"""Who answers: a server, or models in this process."""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from cascade.answer import Chunk
from cascade.bench.load import AsyncStream
from cascade.cli.screen import console
from cascade.errors import InvalidRequest
from cascade.params import Handling, SamplingParams, Speculation

if TYPE_CHECKING:  # one needs PyTorch, the other gRPC, and both start slowly
    from cascade.client import Client
    from cascade.client.chat import TurnPiece
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
        self._cascade = cascade
        self.names = cascade.names
        self.default_params = cascade.default_params
        self.stream = cascade.stream

    def has_template(self) -> bool:
        return self._cascade.tokenizer.chat_template is not None

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation; raises `InvalidRequest` if its template does not take it."""
        from cascade.llm import chat_text

        tokenizer = self._cascade.tokenizer
        return tokenizer.encode_part(chat_text(tokenizer, messages))

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


@dataclass(frozen=True, slots=True)
class Backend:
    """Who answers many at once. Prompts are a user's turns where the model has a chat template."""

    stream: AsyncStream
    names: tuple[str, ...]  # of tiers and drafters, bottom to top
    model: str
    chat: bool  # whether there is a template
    device: str | None = None  # of the full tier; None if it is this machine's processor


@asynccontextmanager
async def asked(address: str | None, models: tuple[str, ...] = ()) -> AsyncIterator[Backend]:
    """A server, or models in this process."""
    if address is None:
        with loaded(models) as cascade:
            local = Local(cascade)
            chat = local.has_template()

            def ask_models(prompt: str, *how: Any) -> AsyncIterator[Chunk]:
                return cascade.astream(local.encode(user_turn(prompt)) if chat else prompt, *how)

            yield Backend(ask_models, cascade.names, Path(cascade.tokenizer.source).name, chat)
        return
    from cascade.client import AsyncClient, Client

    with Client(address) as client:
        served = Served(client)
        chat = served.has_template()
    full = served.info.tiers[-1]
    near = address.rpartition("/")[2].startswith(("127.0.0.1:", "localhost:", "[::1]:"))
    async with AsyncClient(address) as loader:

        async def ask_server(prompt: str, *how: Any) -> AsyncGenerator[Chunk, None]:
            turn = loader.stream_chat(user_turn(prompt), *how)
            async with aclosing(cast("AsyncGenerator[TurnPiece, None]", turn)) as pieces:
                async for piece in pieces:
                    yield piece.chunk

        yield Backend(ask_server if chat else loader.stream, served.names, full.model, chat, None if near else full.device)
